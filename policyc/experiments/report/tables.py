"""The plan of a run and its last telemetry, as tables in HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policyc.experiments.report.runs import RunData, layer_key
from policyc.experiments.report.values import (
    Record,
    as_list,
    as_number,
    as_record,
    as_records,
    as_text,
    safe_html,
)

LayerKey = tuple[int, ...]


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


def heat_maps(run: RunData) -> list[str]:
    """The last measurement of a run, by site and layer."""
    operands: dict[str, dict[LayerKey, Record]] = {}
    gradients: dict[str, dict[LayerKey, Record]] = {}
    step = max((record["step"] for record in run.stats), default=0)
    for record in run.stats:
        if record["step"] != step:
            continue
        if "operand" in record:
            label = f"{safe_html(as_text(record['site']))} <em>{safe_html(as_text(record['operand']))}</em>"
            operands.setdefault(label, {})[layer_key(record)] = record
        elif "cosine" in record:
            gradients.setdefault(safe_html(as_text(record["parameter"])), {})[layer_key(record)] = record
    maps = [_heat_table(heat_map, operands, step) for heat_map in _OPERAND_MAPS if operands]
    return [*maps, _heat_table(_GRADIENT_MAP, gradients, step)] if gradients else maps


def _heat_table(heat_map: _HeatMap, rows: dict[str, dict[LayerKey, Record]], step: int) -> str:
    """A colored table: a row per site or parameter, a column per layer. A value of no layer has the last column."""
    layers = {layer for cells in rows.values() for layer in cells}
    columns = sorted(layers, key=lambda layer: (not layer, layer))
    head = "".join(f"<th>{'.'.join(map(str, layer)) or '–'}</th>" for layer in columns)
    body = ""
    for label, cells in rows.items():
        marks = "".join(_heat_cell(heat_map, cells.get(layer, {}).get(heat_map.field)) for layer in columns)
        body += f"<tr><td class=site>{label}</td>{marks}</tr>"
    table = f"<div class=scroll><table class=heat><tr><th>layer</th>{head}</tr>{body}</table></div>"
    return f"<div><h3>{heat_map.title} <small>{heat_map.note.format(step=step)}</small></h3>{table}</div>"


def _heat_cell(heat_map: _HeatMap, value: object) -> str:
    number = as_number(value)
    if number is None:
        return "<td class=cell></td>"
    is_good = (number > heat_map.neutral) == (heat_map.good > heat_map.neutral)
    span = heat_map.good - heat_map.neutral if is_good else heat_map.neutral - heat_map.bad
    strength = max(-1.0, min(1.0, (number - heat_map.neutral) / span))
    kind = "good" if strength > 0 else "bad"
    text = safe_html(heat_map.format.format(number * heat_map.factor))
    return f'<td class="cell {kind}" style="--s:{abs(strength):.2f}">{text}</td>'


# ---- plan


def plan_table(plan: Record) -> str:
    """The rule that decides each site, and the formats of its products."""
    body = ""
    has_phases = len(as_list(plan.get("phases"))) > 1
    rules = [as_text(rule) for rule in as_list(plan.get("rules"))]
    for site in as_records(plan.get("sites")):
        for phase, layer_groups in as_record(site.get("decisions")).items():
            for group in as_records(layer_groups):
                body += _plan_row(site, phase if has_phases else "", group, rules)
    head = "".join(f"<th>{name}</th>" for name in ("site", "layers", "fprop", "dgrad", "wgrad", "rule"))
    return f"<div class=scroll><table class=plan><tr>{head}</tr>{body}</table></div>"


def _plan_row(site: Record, phase: str, group: Record, rules: Sequence[str]) -> str:
    """The row of consecutive layers of a site that have the same decision."""
    names = (*as_list(site.get("parameters"))[:1], site.get("scope"), site.get("place"))
    name = next((text for text in map(as_text, names) if text), "")
    products = as_record(group.get("products"))
    cells = ""
    for gemm in ("fprop", "dgrad", "wgrad"):
        product = as_record(products.get(gemm))
        formats = list(dict.fromkeys(map(as_text, as_list(product.get("formats")))))
        is_quantized = any(name not in ("keep", "bf16", "f32") for name in formats)
        cells += (
            f"<td{' class=quantized' if is_quantized else ''}>{safe_html(' × '.join(formats)) or '–'}</td>"
        )
    winners = dict.fromkeys(_rule_text(as_record(p).get("rule"), rules) for p in products.values())
    phase_note = f" <small>{safe_html(as_text(phase))}</small>" if phase else ""
    return (
        f"<tr><td class=site>{safe_html(name)}{phase_note}</td><td>{safe_html(_layers_text(group))}</td>{cells}"
        f"<td class=rule><code>{safe_html('; '.join(winners))}</code></td></tr>"
    )


def _rule_text(index: object, rules: Sequence[str]) -> str:
    """The text of a rule by its index in the policy."""
    if index is None:
        return "no rule"
    return rules[index] if isinstance(index, int) and 0 <= index < len(rules) else "unknown rule"


def _layers_text(group: Record) -> str:
    """The first and the last layer of a group, each an index or several."""
    bounds = [".".join(map(as_text, as_list(index))) for index in as_list(group.get("layers"))]
    if len(bounds) != 2:
        return "–"
    return bounds[0] if bounds[0] == bounds[1] else f"{bounds[0]} to {bounds[1]}"
