"""Writes reports to files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from policyc.experiments.report.build import Report, ReportOptions, build_report
from policyc.experiments.report.markdown import render_markdown
from policyc.experiments.report.page import render_page
from policyc.experiments.report.sweeps import UnreadableRun
from policyc.experiments.sweep.run import PAGE_FILE
from policyc.language.files import STANDARD_OUTPUT, open_output

COMPARISON_NAME = "comparison.html"
"""The page of several folders, in the current folder. It has another name, so it never replaces a run's own."""


def write_report(
    folders: Sequence[Path],
    out: Path | None = None,
    warn: Callable[[str], None] = lambda _: None,
    options: ReportOptions | None = None,
) -> Path:
    """Writes the page of some runs or sweeps, and returns its path. Raises UnreadableRun.

    Args:
      folders: of runs or of sweeps.
      out: the file to write. By default `report.html` in the folder, or `comparison.html` in the current folder if
        there are several.
      warn: is called with each problem that left something out of the page.
      options: what is asked for on top of what the folders say.
    """
    path = choose_path(folders, out)
    report = build_report(folders, options)
    write_text(path, render_page(report))
    for problem in report.problems:
        warn(problem)
    return path


def choose_path(folders: Sequence[Path], out: Path | None) -> Path:
    """The file of a page. Raises UnreadableRun if a page of several folders would replace the page of one."""
    if out is None:
        return folders[0] / PAGE_FILE if len(folders) == 1 else Path(COMPARISON_NAME)
    pages = {(folder / PAGE_FILE).resolve() for folder in folders}
    if len(folders) > 1 and str(out) != STANDARD_OUTPUT and out.resolve() in pages:
        raise UnreadableRun(f"'{out}' is the page of one of these folders: choose another --out")
    return out


def render_report(report: Report, kind: str) -> str:
    """A report as `html`, `markdown` or `json`."""
    if kind == "json":
        return json.dumps(report.data, indent=1, allow_nan=False) + "\n"
    return render_markdown(report.data) if kind == "markdown" else render_page(report)


def write_text(path: Path, text: str) -> None:
    """Writes a text to a file, or to standard output for `-`. Raises UnreadableRun."""
    content = text.encode(errors="replace")  # JSON can hold a surrogate, which UTF-8 cannot
    try:
        with open_output(str(path)) as stream:
            stream.write(content)
    except OSError as error:
        raise UnreadableRun(f"'{path}' cannot be written: {error.strerror}") from None
