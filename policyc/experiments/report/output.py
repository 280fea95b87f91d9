"""Writes reports to files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from policyc.base.files import STANDARD_OUTPUT, open_output
from policyc.experiments.report.build import Report
from policyc.experiments.report.markdown import render_markdown
from policyc.experiments.report.page import render_page
from policyc.experiments.report.sweeps import ReportError
from policyc.experiments.sweep.run import PAGE_FILE

COMPARISON_NAME = "comparison.html"
"""The page of several folders, in the current folder. It has another name, so it never replaces a run's own."""


def write_report(report: Report, out: str | None = None, kind: str = "html") -> Path:
    """Writes a report as `html`, `markdown` or `json`, and returns its path. Raises ReportError.

    `out` is the file; `-` is standard output. By default a page goes to `report.html` in the folder, or to
    `comparison.html` in the current folder if there are several; the other kinds are printed.
    """
    path = _choose_path([Path(folder) for folder in report.data["folders"]], out, kind)
    write_text(path, render_report(report, kind))
    return path


def _choose_path(folders: Sequence[Path], out: str | None, kind: str) -> Path:
    if out is None and kind != "html":
        return Path(STANDARD_OUTPUT)
    if out is None:
        return folders[0] / PAGE_FILE if len(folders) == 1 else Path(COMPARISON_NAME)
    pages = {(folder / PAGE_FILE).resolve() for folder in folders}
    if len(folders) > 1 and out != STANDARD_OUTPUT and Path(out).resolve() in pages:
        raise ReportError(f"'{out}' is the page of one of these folders: choose another --out")
    return Path(out)


def render_report(report: Report, kind: str) -> str:
    """A report as `html`, `markdown` or `json`."""
    if kind == "json":
        return json.dumps(report.data, indent=1, allow_nan=False) + "\n"
    return render_markdown(report.data) if kind == "markdown" else render_page(report)


def write_text(path: Path, text: str) -> None:
    """Writes a text to a file, or to standard output for `-`. Raises ReportError."""
    content = text.encode(errors="replace")  # JSON can hold a surrogate, which UTF-8 cannot
    try:
        with open_output(str(path)) as stream:
            stream.write(content)
    except OSError as error:
        raise ReportError(f"'{path}' cannot be written: {error.strerror}") from None
