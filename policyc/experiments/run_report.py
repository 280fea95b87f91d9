"""Writes one self-contained HTML page about one or more training runs, with plots as inline SVG.

A run that was killed may end with a partial line. Lines that cannot be read are skipped, and the page says how many.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from policyc.experiments.svg_plots import Point, Series, draw_lines
from policyc.language.files import open_output

Record = dict[str, Any]
"""One line of `metrics.jsonl` or `stats.jsonl`, or a part of `plan.json`."""

_COLORS = ("#2563eb", "#d9480f", "#0f766e", "#9333ea", "#b45309", "#be185d")
_WARM_UP = 2  # first steps that compile: their times are not typical


class UnreadableRun(ValueError):
    """There is no run to report on, or the report cannot be written. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What a run has written."""

    name: str
    steps: tuple[Record, ...]
    evaluations: tuple[Record, ...]
    stats: tuple[Record, ...]
    plan: Record | None
    skipped_lines: int

    def series(self, metric: str) -> list[Point]:
        """A metric of the training steps, over the steps."""
        return _points(self.steps, metric)

    def evaluation_series(self, metric: str) -> list[Point]:
        """A metric of the evaluations, over the steps."""
        return _points(self.evaluations, metric)


def _points(records: Iterable[Record], metric: str) -> list[Point]:
    return [
        (record["step"], record[metric])
        for record in records
        if isinstance(record.get(metric), int | float) and math.isfinite(record[metric])
    ]


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Writes the report of some runs, and returns its path: `report.html` in the first folder by default."""
    runs = [read_run(folder) for folder in folders]
    path = out or folders[0] / "report.html"
    page = render_page(runs).encode(errors="replace")  # JSON can hold a surrogate, which UTF-8 cannot
    try:
        with open_output(str(path)) as stream:
            stream.write(page)
    except OSError as error:
        raise UnreadableRun(f"'{path}' cannot be written: {error.strerror}") from None
    return path


def read_run(folder: Path) -> RunRecord:
    """Reads `metrics.jsonl`, and `stats.jsonl` and `plan.json` if they are there."""
    if not folder.is_dir():
        raise UnreadableRun(f"'{folder}' is not a folder")
    metrics, skipped_metrics = _read_lines(folder / "metrics.jsonl")
    stats, skipped_stats = _read_lines(folder / "stats.jsonl")
    if not metrics:
        raise UnreadableRun(f"'{folder}' has no metrics.jsonl with a step in it: is it the folder of a run?")
    plan = folder / "plan.json"
    return RunRecord(
        name=folder.resolve().name,
        steps=tuple(record for record in metrics if "loss" in record),
        evaluations=tuple(record for record in metrics if "validation_loss" in record),
        stats=stats,
        plan=json.loads(plan.read_text()) if plan.exists() else None,
        skipped_lines=skipped_metrics + skipped_stats,
    )


def _read_lines(path: Path) -> tuple[tuple[Record, ...], int]:
    """The records of a file, and the number of lines that are not records."""
    if not path.exists():
        return (), 0
    lines = path.read_text(errors="replace").splitlines()
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return tuple(records), len(lines) - len(records)


# ---- page


def render_page(runs: Sequence[RunRecord]) -> str:
    """The whole page as HTML."""
    title = " · ".join(run.name for run in runs)
    colors = [_COLORS[i % len(_COLORS)] for i in range(len(runs))]
    parts = [f"<h1>{escape(title)}</h1>", _cards(runs[0]) if len(runs) == 1 else _comparison(runs, colors)]
    parts += _plots(runs, colors)
    for run in runs:
        suffix = f" of {run.name}" if len(runs) > 1 else ""
        parts += _heat_maps(run, suffix)
        if run.plan is not None:
            parts.append(_plan_table(run.plan, suffix))
    skipped = sum(run.skipped_lines for run in runs)
    if skipped:
        parts.append(f"<p class=note>{skipped} lines could not be read and were left out.</p>")
    return _PAGE.replace("{title}", escape(title)).replace("{body}", "\n".join(parts))


def _plots(runs: Sequence[RunRecord], colors: Sequence[str]) -> list[str]:
    """Loss, speed and gradient norm over the steps."""
    legend = [(run.name, color) for run, color in zip(runs, colors, strict=True)]
    loss: list[Series] = [(run.series("loss"), color) for run, color in zip(runs, colors, strict=True)]
    validation: list[Series] = [
        (run.evaluation_series("validation_loss"), color) for run, color in zip(runs, colors, strict=True)
    ]
    loss_legend = [*legend, ("● validation", "")] if any(points for points, _ in validation) else legend
    note = "nats per token; a faint line is each step, the strong one their running mean"
    figures = [_figure("Loss", note, draw_lines(loss, dots=validation), loss_legend)]
    for metric, title, unit in (
        ("tokens_per_second_per_device", "Speed", "tokens per second and device"),
        ("grad_norm", "Gradient norm", "before clipping"),
    ):
        lines: list[Series] = [(run.series(metric), color) for run, color in zip(runs, colors, strict=True)]
        if any(points for points, _ in lines):
            lines = [(_without_warm_up(points), color) for points, color in lines]
            figures.append(_figure(title, unit, draw_lines(lines), legend))
    return figures


def _without_warm_up(points: Sequence[Point]) -> Sequence[Point]:
    return points[_WARM_UP:] if len(points) > 2 * _WARM_UP else points


def _cards(run: RunRecord) -> str:
    cards = "".join(
        f"<div><b>{value}</b><span>{escape(label)}</span></div>" for label, value in _key_figures(run)
    )
    return f"<div class=cards>{cards}</div>"


def _key_figures(run: RunRecord) -> list[tuple[str, str]]:
    """The most important numbers of a run: label and value."""
    last = run.steps[-1] if run.steps else {}
    figures = [("steps", f"{last.get('step', 0)}"), ("last loss", _format_number(last.get("loss")))]
    for metric, label in (
        ("validation_loss", "validation loss"),
        ("validation_loss_plain", "the same, in plain bf16"),
    ):
        points = run.evaluation_series(metric)
        if points:
            figures.append((label, _format_number(points[-1][1])))
    speed = _median(run, "tokens_per_second_per_device")
    mfu = _median(run, "mfu")
    stall = _stall_fraction(run)
    if speed is not None:
        figures.append(("tokens/s/device", f"{speed:,.0f}"))
    if mfu is not None:
        figures.append(("MFU", f"{mfu:.1%}"))
    if stall is not None:
        figures.append(("input stall", f"{stall:.2%}"))
    if last.get("skipped", 0):
        figures.append(("skipped steps", f"{last['skipped']}"))
    return figures


def _comparison(runs: Sequence[RunRecord], colors: Sequence[str]) -> str:
    """A table of the key figures, one run a row."""
    figures = [dict(_key_figures(run)) for run in runs]
    labels = list(dict.fromkeys(label for row in figures for label in row))
    head = "".join(f"<th>{escape(label)}</th>" for label in labels)
    body = ""
    for run, color, row in zip(runs, colors, figures, strict=True):
        cells = "".join(f"<td class=number>{row.get(label, '–')}</td>" for label in labels)
        body += f"<tr><td>{_legend_key(run.name, color)}</td>{cells}</tr>"
    return f"<table><tr><th>run</th>{head}</tr>{body}</table>"


def _median(run: RunRecord, metric: str) -> float | None:
    values = [value for _, value in run.series(metric)]
    return statistics.median(values) if values else None


def _stall_fraction(run: RunRecord) -> float | None:
    """The fraction of the time spent waiting for data. The first step compiles, so it does not count."""
    records = [record for record in run.steps[1:] if "stall_seconds" in record]
    total = sum(record["step_seconds"] for record in records)
    return sum(record["stall_seconds"] for record in records) / total if total else None


def _format_number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "–"


# ---- plots


def _figure(title: str, unit: str, picture: str, legend: Iterable[tuple[str, str]]) -> str:
    keys = " ".join(_legend_key(name, color) for name, color in legend)
    return _section(title, unit, f"{picture}<p class=keys>{keys}</p>")


def _section(title: str, note: str, content: str) -> str:
    return f"<section><h2>{escape(title)} <small>{escape(note)}</small></h2>{content}</section>"


def _legend_key(name: str, color: str) -> str:
    mark = f'<i style="background:{color}"></i>' if color else ""
    return f"<span class=key>{mark}{escape(name)}</span>"


# ---- quantization error


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeatMap:
    """How one number is shown: the value times `factor`, colored from `bad` over `neutral` to `good`."""

    title: str
    note: str
    field: str
    bad: float
    neutral: float
    good: float
    format: str
    factor: float = 1


_OPERAND_MAPS = (
    _HeatMap(title="SQNR", note="dB at step {step}; 20 dB: a tenth of the size is noise", field="sqnr_db",
             bad=10.0, neutral=20.0, good=32.0, format="{:.1f}"),
    _HeatMap(title="Flushed to zero", note="percent of what was not zero, at step {step}", field="flushed",
             bad=0.3, neutral=0.1, good=0.0, format="{:.1f}", factor=100),
    _HeatMap(title="Saturated", note="percent that was cut to the largest value, at step {step}", field="saturated",
             bad=0.1, neutral=0.04, good=0.0, format="{:.1f}", factor=100),
)  # fmt: skip
_GRADIENT_MAP = _HeatMap(
    title="Gradients", note="cosine with the gradient in plain bf16, at step {step}", field="cosine",
    bad=0.8, neutral=0.95, good=1.0, format="{:.3f}",
)  # fmt: skip


def _heat_maps(run: RunRecord, suffix: str) -> list[str]:
    """The last measurement of a run, by site and layer."""
    if not run.stats:
        return []
    step = max(record["step"] for record in run.stats)
    latest = [record for record in run.stats if record["step"] == step]
    operands: dict[str, dict[int | None, Record]] = {}
    gradients: dict[str, dict[int | None, Record]] = {}
    for record in latest:
        if "operand" in record:
            label = f"{escape(record['site'])} <em>{record['operand']}</em>"
            operands.setdefault(label, {})[record["layer"]] = record
        if "cosine" in record:
            gradients.setdefault(escape(record["parameter"]), {})[record["layer"]] = record
    maps = [_heat_table(heat_map, operands, step, suffix) for heat_map in _OPERAND_MAPS if operands]
    return [*maps, _heat_table(_GRADIENT_MAP, gradients, step, suffix)] if gradients else maps


def _heat_table(heat_map: _HeatMap, rows: dict[str, dict[int | None, Record]], step: int, suffix: str) -> str:
    """A colored table: a row per site or parameter, a column per layer. A value of no layer has the last column."""
    layers = {layer for cells in rows.values() for layer in cells}
    columns = sorted(layers, key=lambda layer: (layer is None, layer or 0))
    head = "".join(f"<th>{'–' if layer is None else layer}</th>" for layer in columns)
    body = ""
    for label, cells in rows.items():
        marks = "".join(_heat_cell(heat_map, cells.get(layer, {}).get(heat_map.field)) for layer in columns)
        body += f"<tr><td class=site>{label}</td>{marks}</tr>"
    table = f"<div class=scroll><table class=heat><tr><th>layer</th>{head}</tr>{body}</table></div>"
    return _section(heat_map.title + suffix, heat_map.note.format(step=step), table)


def _heat_cell(heat_map: _HeatMap, value: float | None) -> str:
    if value is None:
        return "<td class=cell></td>"
    text = heat_map.format.format(value * heat_map.factor)
    return f'<td class=cell style="{_cell_style(heat_map, value)}">{text}</td>'


def _cell_style(heat_map: _HeatMap, value: float) -> str:
    """Red for bad, pale for neutral, blue for good; black or white text, whichever is readable on it."""
    is_good = (value > heat_map.neutral) == (heat_map.good > heat_map.neutral)
    span = heat_map.good - heat_map.neutral if is_good else heat_map.neutral - heat_map.bad
    strength = max(-1.0, min(1.0, (value - heat_map.neutral) / span))
    pale, end = (247, 247, 247), (33, 102, 172) if strength > 0 else (178, 24, 43)
    red, green, blue = (round(a + (b - a) * abs(strength)) for a, b in zip(pale, end, strict=True))
    return f"background:rgb({red},{green},{blue});color:{'#fff' if abs(strength) > 0.55 else '#111'}"


# ---- plan


def _plan_table(plan: Record, suffix: str) -> str:
    """The rule that decides each site, and the formats of its products."""
    body = ""
    for site in plan["sites"]:
        for phase, layer_groups in site["decisions"].items():
            shown_phase = phase if len(plan["phases"]) > 1 else ""
            for group in layer_groups:
                body += _plan_row(site, shown_phase, group, plan["rules"])
    head = "".join(f"<th>{name}</th>" for name in ("site", "layers", "fprop", "dgrad", "wgrad", "rule"))
    note = f"policy {plan['policy']['path']}, sha256 {plan['policy']['sha256'][:12]}"
    return _section(f"Plan{suffix}", note, f"<div class=scroll><table><tr>{head}</tr>{body}</table></div>")


def _plan_row(site: Record, phase: str, group: Record, rules: Sequence[str]) -> str:
    """The row of consecutive layers of a site that have the same decision."""
    name = (site["parameters"] or [site["scope"]])[0] or site["place"] or ""
    layers = "–"
    if "layers" in group:
        first, last = (".".join(map(str, index)) for index in group["layers"])
        layers = first if first == last else f"{first} to {last}"
    cells = ""
    for gemm in ("fprop", "dgrad", "wgrad"):
        formats = list(dict.fromkeys(group["products"].get(gemm, {}).get("formats", ())))
        is_quantized = any(name not in ("keep", "bf16", "f32") for name in formats)
        cells += f"<td{' class=quantized' if is_quantized else ''}>{escape(' × '.join(formats)) or '–'}</td>"
    winners = dict.fromkeys(product["rule"] for product in group["products"].values())
    rule = "; ".join("no rule" if index is None else rules[index] for index in winners)
    phase_note = f" <small>{escape(phase)}</small>" if phase else ""
    return (
        f"<tr><td class=site>{escape(name)}{phase_note}</td><td>{layers}</td>{cells}"
        f"<td><code>{escape(rule)}</code></td></tr>"
    )


_PAGE = """<!doctype html>
<html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width"><title>{title}</title>
<style>
:root{--ink:#1c2024;--soft:#667085;--line:#e4e7ec;--paper:#fff;--card:#f8fafc;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8eb;--soft:#98a2b3;--line:#2c3138;--paper:#14171a;--card:#1c2024}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1020px;margin:2.5rem auto;
padding:0 1.25rem}
h1{font-size:1.6rem;margin:0 0 1rem}h2{font-size:1.1rem;margin:2.2rem 0 .6rem}
small{color:var(--soft);font-weight:400;font-size:.85rem;margin-left:.4rem}
.cards{display:flex;flex-wrap:wrap;gap:.75rem}.cards div{background:var(--card);border:1px solid var(--line);
border-radius:10px;padding:.7rem 1rem;min-width:7rem}
.cards b{display:block;font-size:1.35rem;font-variant-numeric:tabular-nums}
.cards span{color:var(--soft);font-size:.85rem}
svg{width:100%;height:auto;background:var(--card);border:1px solid var(--line);border-radius:10px}
svg text{fill:var(--soft);font:12px system-ui,sans-serif}.grid{stroke:var(--line)}
path{fill:none}.line{stroke-width:2.2;stroke-linejoin:round}.faint{stroke-width:1;opacity:.28}
.dot{stroke:var(--paper);stroke-width:1.5}
.keys{margin:.4rem 0 0}.key{margin-right:1.1rem;color:var(--soft);font-size:.9rem;white-space:nowrap}
.key i{display:inline-block;width:.8rem;height:.8rem;border-radius:3px;margin-right:.4rem;vertical-align:-1px}
table{border-collapse:collapse;font-size:.9rem}
th,td{padding:.3rem .6rem;text-align:left;border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:500}.number{font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto}.heat{border-spacing:2px;border-collapse:separate}.heat th{text-align:center;border:0}
.heat th:first-child{text-align:left}.heat td{border:0}
.cell{text-align:center;font-size:.8rem;border-radius:4px;min-width:2.6rem;font-variant-numeric:tabular-nums;
padding:.2rem .3rem}
.site{font-family:ui-monospace,monospace;font-size:.82rem;white-space:nowrap}
.site em{color:var(--soft);font-style:normal}
.quantized{font-weight:600}code{font-size:.8rem}.note{color:var(--soft)}
</style>
{body}
</html>
"""
