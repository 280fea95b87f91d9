"""Writes a report as one page of HTML, as Markdown or as JSON. The templates are in the folder `web`.

The charts of the page are drawn by uPlot 1.6.32 (MIT), which is embedded in it. Texts come from the files of runs and
are not trusted: the templates escape all of them, and the scripts show the embedded ones as text.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from policyc.base.files import STANDARD_OUTPUT, open_output
from policyc.base.text import escape_controls
from policyc.base.web_page import as_markup, compress_json, read_assets, render_template
from policyc.experiments.report.build import Report
from policyc.experiments.report.charts import colors_of, to_list
from policyc.experiments.report.format import (
    FIGURES,
    MISSING,
    TIME_NOTE,
    equal_loss_notes,
    equal_loss_table,
    format_bounds,
    format_figure,
    format_gap,
    format_interval,
    group_failures,
    known_figures,
    speed_up_columns,
    summarize,
    time_table,
)
from policyc.experiments.report.series import elapsed_seconds, make_axis
from policyc.experiments.report.sweeps import ReportError, SweepData
from policyc.experiments.report.values import JsonObject, escape_texts
from policyc.experiments.sweep.run import PAGE_FILE
from policyc.numerics.backends import title

_PACKAGE = "policyc.experiments.report"
_read = partial(read_assets, _PACKAGE)

COMPARISON_NAME = "comparison.html"
"""The page about several folders, in the current folder. Its own name keeps it from replacing a run's page."""


def render_page(report: Report) -> str:
    """Renders the whole HTML page."""
    data, sweep = report.data, report.sweep
    colors = {variant.name: color for color, variant in colors_of(sweep)}
    runs = _runs(data)
    embedded = {
        "charts": data["charts"],
        "comparisons": data["comparisons"],
        "speed_ups": data["speed_ups"],
        "colors": colors,
        "margin": data["statistics"]["margin"],
        "clock": _clock(sweep),
    }
    return render_template(
        _PACKAGE,
        "page.html",
        **_shared_values(data),
        runs=runs,
        colors=colors,
        facts=_facts(data),
        cards=_cards(runs[0]),
        columns=known_figures([variant["figures"] for variant in data["variants"]]),
        run_columns=known_figures(runs),
        speed_ups=speed_up_columns(data),
        format_bounds=format_bounds,
        policies=_policies(data, sweep),
        format_gap=format_gap,
        format_interval=format_interval,
        format_figure=format_figure,
        style=_read("uPlot.min.css", "page.css"),
        embedded=compress_json(escape_texts(embedded)),
        uplot_license=_read("uPlot.LICENSE"),
        uplot=_read("uPlot.min.js"),
        script=_read("charts.js", "main.js"),
    )


def render_markdown(data: JsonObject) -> str:
    """Renders verdicts, figures, time to equal loss, failures and the command as Markdown, without charts."""

    def verdict_rows(baseline: str) -> list[list[Any]]:
        return [
            [
                row["variant"],
                as_markup(f"**{row['verdict']}**"),
                format_gap(row["gap"]),
                format_interval(row["interval"]),
                len(row["seeds"]),
                format_figure("detectable_loss", row["detectable"]),
                row["reason"],
            ]
            for row in data["comparisons"]
            if row["baseline"] == baseline
        ]

    columns = known_figures([variant["figures"] for variant in data["variants"]])
    figures = [
        [
            variant["name"],
            f"{variant['states']['finished']}/{len(variant['runs'])}",
            *(format_figure(name, variant["figures"][name]) for name, _ in columns),
        ]
        for variant in data["variants"]
    ]
    values = _shared_values(data)
    return render_template(
        _PACKAGE,
        "report.md",
        **values,
        verdict_rows=verdict_rows,
        figure_table=(["variant", "finished", *(label for _, label in columns)], figures),
        command=as_markup(escape_controls(values["commands"][0][1])) if values["commands"] else "",
    )


def _shared_values(data: JsonObject) -> dict[str, Any]:
    """The values that both templates use."""
    time_titles, time_rows = time_table(data)
    equal_loss_titles, equal_loss_rows = equal_loss_table(data)
    return {
        "data": data,
        "summary": summarize(data),
        "baselines": data["statistics"]["baselines"],
        "interval_title": f"{1 - data['statistics']['alpha']:.0%} interval",
        "time_titles": time_titles,
        "time_rows": time_rows,
        "time_note": TIME_NOTE,
        "equal_loss_titles": equal_loss_titles,
        "equal_loss_rows": equal_loss_rows,
        "equal_loss_notes": equal_loss_notes(data),
        "failures": group_failures(_runs(data)),
        "commands": [(command["of"], shlex.join(command["words"])) for command in data["commands"]],
    }


def _runs(data: JsonObject) -> list[JsonObject]:
    return [run for variant in data["variants"] for run in variant["runs"]]


def _clock(sweep: SweepData) -> JsonObject:
    """Data for drawing charts over steps or time: tokens per step, and elapsed seconds of each variant."""
    axis = make_axis(sweep.runs)
    seconds = {variant.name: elapsed_seconds(variant.runs, axis) for variant in sweep.variants}
    ends = [(axis.positions(run, run.steps)[-1], run.last_step) for run in sweep.runs if run.last_step]
    ratios = {float(tokens / step) for tokens, step in ends} if axis.label == "tokens" else set()
    return {
        "unit": axis.label,
        "x": to_list(axis.values),
        "seconds": {name: to_list(column) for name, column in seconds.items() if np.isfinite(column).any()},
        "tokens_per_step": ratios.pop() if len(ratios) == 1 else None,
    }


def _facts(data: JsonObject) -> list[str]:
    """The line below the title."""
    runs = _runs(data)
    finished = sum(run["state"] == "finished" for run in runs)
    tokens = max((run["tokens"] or 0 for run in runs), default=0)
    return [
        f"{finished} of {len(runs)} runs finished" if len(runs) > 1 else f"run {runs[0]['state']}",
        *sorted({entry["values"].get("device", "") for entry in data["environment"]} - {""}),
        *([f"{format_figure('tokens', tokens)} tokens a run"] if tokens else []),
        f"{max(run['last_step'] for run in runs):,} steps",
        data["created"].replace("T", " ").replace("+00:00", " UTC"),
    ]


def _cards(run: JsonObject) -> list[tuple[str, str]]:
    """The figures of a single run, with their names."""
    figures = [("steps", f"{run['last_step']:,}"), ("tokens", format_figure("tokens", run["tokens"] or None))]
    figures += [(label, format_figure(name, run[name])) for name, label in FIGURES]
    return [(label, value) for label, value in figures if value != MISSING]


def _policies(data: JsonObject, sweep: SweepData) -> list[JsonObject]:
    """The text or the diff of each policy, and its hashes."""
    diffs = {diff["variant"]: diff for diff in data["diffs"]}
    policies = []
    for variant, summary in zip(sweep.variants, data["variants"], strict=True):
        policy = {
            "name": variant.name,
            "facts": [
                *summary["policy_names"],
                *(f"{kind} {hash[:12]}" for kind in ("policy", "plan") for hash in summary[f"{kind}_sha256"]),
                *(f"backend {title(name)}" for name in summary["backends"]),
            ],
            "edit": variant.edit,
            "diff": diffs.get(variant.name),
            "text": variant.policy_text,
        }
        if any(value for name, value in policy.items() if name != "name"):
            policies.append(policy)
    return policies


# ---- files


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
