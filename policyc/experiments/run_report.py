"""Writes one self-contained HTML page about one or more training runs, with plots as inline SVG.

A run that was killed may end with a partial line, and the files may come from anywhere. What cannot be read is left
out, and the page says so. Every text from a file is escaped.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from policyc.experiments.svg_plots import Point, Series, draw_lines
from policyc.language.files import open_output

Record = dict[str, Any]
"""One line of `metrics.jsonl` or `stats.jsonl`, or a part of `plan.json`."""

LayerKey = tuple[int, ...]
"""The index of a layer in each stack around it. Empty for what is in no stack."""

_COLORS = ("#2563eb", "#d9480f", "#0f766e", "#9333ea", "#b45309", "#be185d")
_WARM_UP = 2  # first steps that compile: their times are not typical
_MAX_NUMBER = 1e100  # larger numbers are no measurements, and sums of them would overflow
_MAX_TEXT = 400  # characters of a text from a file


class UnreadableRun(ValueError):
    """There is no run to report on, or the report cannot be written. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What a run has written, as far as it could be read. `problems` says what could not."""

    name: str
    steps: tuple[Record, ...]
    evaluations: tuple[Record, ...]
    stats: tuple[Record, ...]
    plan: Record | None
    problems: tuple[str, ...]

    def series(self, metric: str) -> list[Point]:
        """A metric of the training steps, over the steps."""
        return _points(self.steps, metric)

    def evaluation_series(self, metric: str) -> list[Point]:
        """A metric of the evaluations, over the steps."""
        return _points(self.evaluations, metric)


def _points(records: Iterable[Record], metric: str) -> list[Point]:
    numbers = ((record["step"], _as_number(record.get(metric))) for record in records)
    return [(step, number) for step, number in numbers if number is not None]


def write_report(
    folders: Sequence[Path], out: Path | None = None, warn: Callable[[str], None] = lambda _: None
) -> Path:
    """Writes the report of some runs, and returns its path: `report.html` in the first folder by default.

    `warn` is called with each problem that left something out of the page.
    """
    runs = [read_run(folder) for folder in folders]
    path = out or folders[0] / "report.html"
    page = render_page(runs).encode(errors="replace")  # JSON can hold a surrogate, which UTF-8 cannot
    try:
        with open_output(str(path)) as stream:
            stream.write(page)
    except OSError as error:
        raise UnreadableRun(f"'{path}' cannot be written: {error.strerror}") from None
    for run in runs:
        for problem in run.problems:
            warn(f"{run.name}: {problem}")
    return path


# ---- reading


def read_run(folder: Path) -> RunRecord:
    """Reads `metrics.jsonl`, and `stats.jsonl` and `plan.json` if they are there."""
    if not folder.is_dir():
        raise UnreadableRun(f"'{folder}' is not a folder")
    if not (folder / "metrics.jsonl").exists():
        raise UnreadableRun(f"'{folder}' has no metrics.jsonl with a step in it: is it the folder of a run?")
    problems: list[str] = []
    metrics = _read_records(folder / "metrics.jsonl", problems, _is_metric)
    stats = _read_records(folder / "stats.jsonl", problems, _is_measurement)
    return RunRecord(
        name=folder.resolve().name,
        steps=tuple(record for record in metrics if "loss" in record),
        evaluations=tuple(record for record in metrics if "validation_loss" in record),
        stats=stats,
        plan=_read_plan(folder / "plan.json", problems),
        problems=tuple(problems),
    )


def _read_text(path: Path, problems: list[str]) -> str | None:
    """The text of a file, or None if there is none. Reports a file that cannot be read."""
    if not path.exists():
        return None
    if not path.is_file():
        problems.append(f"{path.name} is not a file")
        return None
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return None


def _read_records(path: Path, problems: list[str], is_valid: Callable[[Record], bool]) -> tuple[Record, ...]:
    """The valid records of a file, one per line. Reports how many lines are left out."""
    text = _read_text(path, problems)
    lines = [] if text is None else text.splitlines()
    records = []
    for line in lines:
        value = _parse_json(line)
        if isinstance(value, dict) and _is_count(value.get("step")) and is_valid(value):
            records.append(value)
    if len(records) < len(lines):
        problems.append(f"{len(lines) - len(records)} lines could not be read in {path.name}")
    elif text is not None and not records:
        problems.append(f"{path.name} is empty")
    return tuple(records)


def _read_plan(path: Path, problems: list[str]) -> Record | None:
    text = _read_text(path, problems)
    if text is None:
        return None
    plan = _parse_json(text)
    if not isinstance(plan, dict) or not _as_records(plan.get("sites")):
        problems.append(f"{path.name} is not a plan with sites")
        return None
    return plan


def _parse_json(text: str) -> Any:
    """The value of a JSON text, or None if it is not JSON or nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_metric(record: Record) -> bool:
    """Are the losses in a record numbers? A loss may be nan: then the run has diverged."""
    return all(isinstance(record.get(name, 0), int | float) for name in ("loss", "validation_loss"))


def _is_measurement(record: Record) -> bool:
    """Does a record of `stats.jsonl` have the site or the parameter, and the layer, that it is about?"""
    has_name = isinstance(record.get("site" if "operand" in record else "parameter"), str)
    return has_name and all(_is_count(index) for index in _layer_key(record))


def _layer_key(record: Record) -> LayerKey:
    layer = record.get("layer")
    if layer is None:
        return ()
    return tuple(layer) if isinstance(layer, list) else (layer,)


def _is_count(value: object) -> bool:
    """Is it an integer that a float can hold exactly?"""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def _as_number(value: object) -> float | None:
    """A number that can be plotted, or None. Tiny numbers become 0."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if not -_MAX_NUMBER < value < _MAX_NUMBER:  # also false for nan
        return None
    return float(value) if abs(value) > 1 / _MAX_NUMBER else 0.0


def _as_record(value: object) -> Record:
    return value if isinstance(value, dict) else {}


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _as_records(value: object) -> list[Record]:
    return [item for item in _as_list(value) if isinstance(item, dict)]


def _as_text(value: object) -> str:
    """A text for the page: a string, a number, or nothing."""
    return str(value)[:_MAX_TEXT] if isinstance(value, str | int | float) else ""


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
        parts += [f"<p class=note>Left out{escape(suffix)}: {escape(p)}.</p>" for p in run.problems]
    before, middle, after = re.split(
        r"\{(?:title|body)\}", _PAGE
    )  # not `replace`: a run may be named "{body}"
    return before + escape(title) + middle + "\n".join(parts) + after


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
        f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>" for label, value in _key_figures(run)
    )
    return f"<div class=cards>{cards}</div>"


def _key_figures(run: RunRecord) -> list[tuple[str, str]]:
    """The most important numbers of a run: label and value."""
    last = run.steps[-1] if run.steps else {}
    figures = [("steps", _as_text(last.get("step", 0))), ("last loss", _format_number(last.get("loss")))]
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
        figures.append(("skipped steps", _as_text(last["skipped"])))
    return figures


def _comparison(runs: Sequence[RunRecord], colors: Sequence[str]) -> str:
    """A table of the key figures, one run a row."""
    figures = [dict(_key_figures(run)) for run in runs]
    labels = list(dict.fromkeys(label for row in figures for label in row))
    head = "".join(f"<th>{escape(label)}</th>" for label in labels)
    body = ""
    for run, color, row in zip(runs, colors, figures, strict=True):
        cells = "".join(f"<td class=number>{escape(row.get(label, '–'))}</td>" for label in labels)
        body += f"<tr><td>{_legend_key(run.name, color)}</td>{cells}</tr>"
    return f"<table><tr><th>run</th>{head}</tr>{body}</table>"


def _median(run: RunRecord, metric: str) -> float | None:
    values = [value for _, value in run.series(metric)]
    return statistics.median(values) if values else None


def _stall_fraction(run: RunRecord) -> float | None:
    """The fraction of the time spent waiting for data. The first step compiles, so it does not count."""
    times = [(_as_number(r.get("stall_seconds")), _as_number(r.get("step_seconds"))) for r in run.steps[1:]]
    measured = [(stall, step) for stall, step in times if stall is not None and step is not None]
    total = sum(step for _, step in measured)
    return sum(stall for stall, _ in measured) / total if total else None


def _format_number(value: object) -> str:
    number = value if isinstance(value, float) else _as_number(value)
    return "–" if number is None else f"{number:.4g}"


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
    operands: dict[str, dict[LayerKey, Record]] = {}
    gradients: dict[str, dict[LayerKey, Record]] = {}
    for record in latest:
        if "operand" in record:
            label = f"{escape(_as_text(record['site']))} <em>{escape(_as_text(record['operand']))}</em>"
            operands.setdefault(label, {})[_layer_key(record)] = record
        elif "cosine" in record:
            gradients.setdefault(escape(_as_text(record["parameter"])), {})[_layer_key(record)] = record
    maps = [_heat_table(heat_map, operands, step, suffix) for heat_map in _OPERAND_MAPS if operands]
    return [*maps, _heat_table(_GRADIENT_MAP, gradients, step, suffix)] if gradients else maps


def _heat_table(heat_map: _HeatMap, rows: dict[str, dict[LayerKey, Record]], step: int, suffix: str) -> str:
    """A colored table: a row per site or parameter, a column per layer. A value of no layer has the last column."""
    layers = {layer for cells in rows.values() for layer in cells}
    columns = sorted(layers, key=lambda layer: (not layer, layer))
    head = "".join(f"<th>{'.'.join(map(str, layer)) or '–'}</th>" for layer in columns)
    body = ""
    for label, cells in rows.items():
        marks = "".join(_heat_cell(heat_map, cells.get(layer, {}).get(heat_map.field)) for layer in columns)
        body += f"<tr><td class=site>{label}</td>{marks}</tr>"
    table = f"<div class=scroll><table class=heat><tr><th>layer</th>{head}</tr>{body}</table></div>"
    return _section(heat_map.title + suffix, heat_map.note.format(step=step), table)


def _heat_cell(heat_map: _HeatMap, value: object) -> str:
    number = _as_number(value)
    if number is None:
        return "<td class=cell></td>"
    text = escape(heat_map.format.format(number * heat_map.factor))
    return f'<td class=cell style="{_cell_style(heat_map, number)}">{text}</td>'


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
    has_phases = len(_as_list(plan.get("phases"))) > 1
    rules = [_as_text(rule) for rule in _as_list(plan.get("rules"))]
    for site in _as_records(plan.get("sites")):
        for phase, layer_groups in _as_record(site.get("decisions")).items():
            for group in _as_records(layer_groups):
                body += _plan_row(site, phase if has_phases else "", group, rules)
    head = "".join(f"<th>{name}</th>" for name in ("site", "layers", "fprop", "dgrad", "wgrad", "rule"))
    policy = _as_record(plan.get("policy"))
    note = f"policy {_as_text(policy.get('path'))}, sha256 {_as_text(policy.get('sha256'))[:12]}"
    return _section(f"Plan{suffix}", note, f"<div class=scroll><table><tr>{head}</tr>{body}</table></div>")


def _plan_row(site: Record, phase: str, group: Record, rules: Sequence[str]) -> str:
    """The row of consecutive layers of a site that have the same decision."""
    names = (*_as_list(site.get("parameters"))[:1], site.get("scope"), site.get("place"))
    name = next((text for text in map(_as_text, names) if text), "")
    products = _as_record(group.get("products"))
    cells = ""
    for gemm in ("fprop", "dgrad", "wgrad"):
        product = _as_record(products.get(gemm))
        formats = list(dict.fromkeys(map(_as_text, _as_list(product.get("formats")))))
        is_quantized = any(name not in ("keep", "bf16", "f32") for name in formats)
        cells += f"<td{' class=quantized' if is_quantized else ''}>{escape(' × '.join(formats)) or '–'}</td>"
    winners = dict.fromkeys(_rule_text(_as_record(p).get("rule"), rules) for p in products.values())
    phase_note = f" <small>{escape(_as_text(phase))}</small>" if phase else ""
    return (
        f"<tr><td class=site>{escape(name)}{phase_note}</td><td>{escape(_layers_text(group))}</td>{cells}"
        f"<td><code>{escape('; '.join(winners))}</code></td></tr>"
    )


def _rule_text(index: object, rules: Sequence[str]) -> str:
    """The text of a rule by its index in the policy."""
    if index is None:
        return "no rule"
    is_known = isinstance(index, int) and 0 <= index < len(rules)
    return rules[index] if is_known and isinstance(index, int) else "unknown rule"


def _layers_text(group: Record) -> str:
    """The first and the last layer of a group, each an index or several."""
    bounds = [".".join(map(_as_text, _as_list(index))) for index in _as_list(group.get("layers"))]
    if len(bounds) != 2:
        return "–"
    return bounds[0] if bounds[0] == bounds[1] else f"{bounds[0]} to {bounds[1]}"


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
