"""A report as Markdown: verdicts, figures, time to equal loss, failures, commands. It has no charts."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from policyc.base.text import escape_controls
from policyc.experiments.report.format import (
    MISSING,
    TIME_NOTE,
    format_figure,
    format_gap,
    format_interval,
    known_figures,
    summarize,
    time_table,
)
from policyc.experiments.report.values import Record

_TEXT_COLUMNS = ("variant", "verdict", "reason", "baseline", "run")  # the others are numbers


def render_markdown(data: Record) -> str:
    """The whole text."""
    blocks = [f"# {_cell(data['title'])}", _cell(summarize(data)) + "."]
    blocks += [f"**Not comparable:** {_cell(text)}." for text in data["inequalities"]]
    blocks += _verdicts(data)
    blocks += ["## Figures", _figures(data)]
    blocks += _time(data)
    blocks += _equal_loss(data)
    blocks += _failures(data)
    if data["commands"]:
        words = data["commands"][0]["words"]
        blocks += ["## Command", f"```sh\n{escape_controls(shlex.join(words))}\n```"]
    notes = [f"Left out: {text}" for text in data["problems"]]
    blocks += ["## Notes", "\n".join(f"- {_cell(note)}" for note in notes)] if notes else []
    return "\n\n".join(blocks) + "\n"


def _cell(text: object) -> str:
    """A text that is not read as markup, in one line."""
    plain = escape_controls(str(text).replace("\n", " "))
    for character in "\\`*_[]<>|#":
        plain = plain.replace(character, "\\" + character)
    return plain


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = "".join("|---" if title in _TEXT_COLUMNS else "|---:" for title in head)
    lines = [f"| {' | '.join(head)} |", f"{rule}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _verdicts(data: Record) -> list[str]:
    blocks = []
    for baseline in data["statistics"]["baselines"]:
        rows = [
            [
                _cell(row["variant"]),
                f"**{row['verdict']}**",
                format_gap(row["gap"]),
                format_interval(row["interval"]),
                str(len(row["seeds"])),
                MISSING if row["detectable"] is None else f"{row['detectable']:.4f}",
                _cell(row["reason"]),
            ]
            for row in data["comparisons"]
            if row["baseline"] == baseline
        ]
        head = ["variant", "verdict", "gap, nats", "interval", "seeds", "detectable", "reason"]
        if rows:
            blocks += [
                f"## Against {_cell(baseline)}, margin {data['statistics']['margin']}",
                _table(head, rows),
            ]
    rules = data["statistics"]["rules"]
    return [*blocks, "\n".join(f"- {_cell(rule)}" for rule in rules)] if rules else blocks


def _figures(data: Record) -> str:
    columns = known_figures([variant["figures"] for variant in data["variants"]])
    rows = [
        [
            _cell(variant["name"]),
            f"{variant['states']['finished']}/{len(variant['runs'])}",
            *(format_figure(name, variant["figures"].get(name)) for name, _ in columns),
        ]
        for variant in data["variants"]
    ]
    return _table(["variant", "finished", *(label for _, label in columns)], rows)


def _time(data: Record) -> list[str]:
    head, rows = time_table(data)
    return (
        ["## Time", _table(head, [[_cell(cell) for cell in row] for row in rows]), TIME_NOTE] if rows else []
    )


def _equal_loss(data: Record) -> list[str]:
    rows = [
        [
            _cell(row["variant"]),
            _cell(row["baseline"]),
            f"{row['loss']:.4f}",
            f"{row['token_ratio'] - 1:+.1%}",
            format_figure("ratio", row["measured_speed_up"]),
            format_figure("ratio", row["predicted_speed_up"]),
        ]
        for row in data["equal_loss"]
    ]
    head = ["variant", "baseline", "loss", f"extra {data['axis']}", "measured speed-up", "predicted speed-up"]
    return ["## Time to equal loss", _table(head, rows)] if rows else []


def _failures(data: Record) -> list[str]:
    runs = [run for variant in data["variants"] for run in variant["runs"] if run["state"] == "failed"]
    lines = [f"- {_cell(run['name'])}: {_cell(run['reason'])}" for run in runs]
    return ["## Failed runs", "\n".join(lines)] if lines else []
