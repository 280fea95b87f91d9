"""The charts of a report as data: lines and bands over tokens. The page draws them with uPlot.

docs/reference/reports.md describes the fields of a chart and of a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from policyc.experiments.report.runs import Column, RunData
from policyc.experiments.report.series import (
    Axis,
    Curve,
    bin_run,
    gap_curve,
    make_axis,
    over_seeds,
    range_of_run,
    with_derived_metrics,
)
from policyc.experiments.report.sweeps import SweepData, VariantData
from policyc.experiments.report.values import JsonObject, as_number
from policyc.experiments.statistics import ALPHA

_GAP_POINTS = 80  # gaps are small: more steps are averaged to make them visible


def to_list(values: Column) -> list[float | None]:
    """Converts numbers for JSON. Six digits are more than a chart shows; NaN and infinities become None."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]


def make_charts(sweep: SweepData, axis: Axis, margins: dict[str, float]) -> list[JsonObject]:
    """All charts that the runs have values for. `margins` has the margin in nats for each baseline."""
    coarse = make_axis(sweep.runs, _GAP_POINTS)
    charts = [
        _loss_chart(sweep, axis),
        *(_gap_chart(sweep, coarse, baseline, margins.get(baseline)) for baseline in sweep.baselines),
        *_validation_charts(sweep, axis),
        *_metric_charts(sweep, axis),
        *_telemetry_charts(sweep, axis),
    ]
    return [c for c in charts if any(v is not None for line in c["lines"] for v in line["values"])]


def colors_of(sweep: SweepData) -> list[tuple[int, VariantData]]:
    """The variants with the numbers of their colors. Color 0, a gray, is only used for a baseline."""
    return list(enumerate(sweep.variants, start=0 if sweep.baselines else 1))


def _chart(
    id: str, title: str, notes: Sequence[str], x: tuple[str, Column], lines: list[JsonObject], **values: Any
) -> JsonObject:
    """A chart of lines over a common axis, whose label and positions are `x`."""
    defaults = {"format": "number", "zone": None, "is_log": False, "zone_label": ""}
    return {
        "id": id,
        "title": title,
        "note": "; ".join(filter(None, notes)),
        "x_label": x[0],
        "x": to_list(x[1]),
        "lines": [line for line in lines if any(value is not None for value in line["values"])],
        **(defaults | values),
    }


def _line(
    label: str, color: int, curve: Curve, *, has_points: bool = False, is_dashed: bool = False
) -> JsonObject:
    low, high = (None if bound is None else to_list(bound) for bound in (curve.low, curve.high))
    return {
        "label": label,
        "color": color,
        "values": to_list(curve.values),
        "low": low,
        "high": high,
        "has_points": has_points,
        "is_dashed": is_dashed,
    }


def _is_single(sweep: SweepData) -> bool:
    return len(sweep.runs) == 1


def _band_note(sweep: SweepData) -> str:
    """Explains the bands over seeds; empty if no variant has several seeds."""
    has_seeds = any(len(variant.runs) > 1 for variant in sweep.variants)
    return "mean over seeds; band: lowest and highest seed" if has_seeds else ""


def _loss_chart(sweep: SweepData, axis: Axis) -> JsonObject:
    lines = []
    for color, variant in colors_of(sweep):
        if _is_single(sweep):
            lines.append(_line(variant.name, color, range_of_run(variant.runs[0], "loss", axis)))
            continue
        columns = [(run, bin_run(run, "loss", axis)) for run in variant.runs]
        if others := [column for run, column in columns if run.end.state != "failed"]:
            lines.append(_line(variant.name, color, over_seeds(others)))
        lines += [
            _line(f"{run.name} (failed)", color, Curve(values=column), is_dashed=True)
            for run, column in columns
            if run.end.state == "failed"
        ]
    parts = len(axis.values)
    is_binned = any(len(run.steps) > parts for run in sweep.runs)
    means = f"each point is the mean of 1/{parts} of the {axis.label}" if is_binned else ""
    bands = _band_note(sweep)
    if _is_single(sweep) and is_binned:
        bands = "band: lowest and highest step of each part of the axis"
    x = axis.label, axis.values
    return _chart("loss", "Training loss", ["nats per token", means, bands], x, lines, format="loss")


def by_seed(variant: VariantData, axis: Axis, states: Sequence[str]) -> dict[int, Column]:
    """The loss curves of a variant by seed, for runs in one of these states. Runs without a seed are numbered."""
    return {
        number if run.seed is None else run.seed: bin_run(run, "loss", axis)
        for number, run in enumerate(variant.runs)
        if len(run.steps) and run.end.state in states
    }


def _pairs(
    variant: VariantData, baseline: VariantData, axis: Axis
) -> tuple[dict[int, Column], dict[int, Column]]:
    """The loss curves by seed of a variant and a baseline, for the gap between them.

    Only finished runs are used if the two have at least two finished seeds in common, otherwise all runs that did not
    fail. So a run that has just begun does not shorten the curve.
    """
    for states in (("finished",), ("finished", "unfinished")):
        ours, theirs = (by_seed(v, axis, states) for v in (variant, baseline))
        if len(set(ours) & set(theirs)) > 1:
            break
    return ours, theirs


def _gap_chart(sweep: SweepData, axis: Axis, baseline: str, margin: float | None) -> JsonObject:
    confidence = 1 - ALPHA
    lines = []
    for color, variant in colors_of(sweep):
        ours, theirs = _pairs(variant, sweep.variant(baseline), axis)
        if variant.name != baseline and set(ours) & set(theirs):
            lines.append(_line(variant.name, color, gap_curve(ours, theirs, confidence)))
    notes = [
        f"training loss minus that of {baseline}, nats, paired by seed",
        f"means of 1/{len(axis.values)} of the {axis.label}",
        f"band: paired t interval at {confidence:.0%}, for each point alone",
    ]
    zone = None if margin is None else (-margin, margin)
    x, label = (axis.label, axis.values), f"margin {sweep.margin}"
    return _chart(
        f"gap-{baseline}", f"Gap to {baseline}", notes, x, lines, format="gap", zone=zone, zone_label=label
    )


def _validation_charts(sweep: SweepData, axis: Axis) -> Iterator[JsonObject]:
    """One chart: each variant in its own precision, and in bf16 as a dashed line of the same color."""
    measured = [
        (color, label, is_in_bf16, [_evaluations(run, metric, axis) for run in variant.runs])
        for color, variant in colors_of(sweep)
        for metric, label, is_in_bf16 in (
            ("validation_loss", variant.name, False),
            ("validation_loss_evaluated_in_bf16", f"{variant.name}, in bf16", True),
        )
    ]
    positions = sorted({x for *_, runs in measured for run in runs for x in run})
    lines = []
    for number, (color, label, is_in_bf16, runs) in enumerate(measured):
        if any(runs) and not (is_in_bf16 and runs == measured[number - 1][-1]):
            columns = [np.array([run.get(x, np.nan) for x in positions]) for run in runs]
            lines.append(
                _line(label, color, over_seeds(columns), has_points=not is_in_bf16, is_dashed=is_in_bf16)
            )
    dashed = "dashed: the same weights in bf16" if any(line["is_dashed"] for line in lines) else ""
    notes = ["nats per token, in the precision of the policy", dashed, _band_note(sweep)]
    yield _chart(
        "validation_loss", "Validation loss", notes, (axis.label, np.array(positions)), lines, format="loss"
    )


def _evaluations(run: RunData, metric: str, axis: Axis) -> dict[float, float]:
    column = run.evaluations.column(metric)
    if column is None:
        return {}
    return dict(zip(axis.positions(run, run.evaluations).tolist(), column.tolist(), strict=True))


# ---- speed, memory, gradients


def _metric_charts(sweep: SweepData, axis: Axis) -> Iterator[JsonObject]:
    first_steps = "without the first steps, which compile"
    largest = "before clipping; the largest of each part of the axis"
    for metric, title, note, format in (
        ("grad_norm", "Gradient norm", largest, "number"),
        ("step_seconds", "Step time", first_steps, "seconds"),
        ("tokens_per_second", "Speed", f"tokens per second, all devices; {first_steps}", "count"),
        ("memory_bytes", "Peak memory", "of a device, or of the process", "bytes"),
        ("stall_fraction", "Input stalls", "fraction of the step spent waiting for data", "percent"),
        ("learning_rate", "Learning rate", "", "number"),
    ):
        reduce = np.fmax if metric in ("grad_norm", "memory_bytes") else None
        lines = []
        for color, variant in colors_of(sweep):
            runs = [with_derived_metrics(run) for run in variant.runs]
            columns = [bin_run(run, metric, axis, reduce) for run in runs]
            lines.append(_line(variant.name, color, over_seeds(columns)))
        x, is_log = (axis.label, axis.values), metric == "grad_norm"
        yield _chart(metric, title, [note, _band_note(sweep)], x, lines, format=format, is_log=is_log)


# ---- numerics telemetry


def _telemetry_charts(sweep: SweepData, axis: Axis) -> Iterator[JsonObject]:
    """Quantization error over time: by operand for one run, by variant for several."""
    longest = max(sweep.runs, key=lambda run: run.last_step)
    reduction = "mean over sites, layers and seeds"
    if _is_single(sweep):
        reduction = "mean over sites and layers, band: lowest and highest"
    for name, title, note, format in (
        ("sqnr_db", "SQNR of quantized operands", "dB", "number"),
        ("flushed", "Flushed to zero", "fraction of nonzero values", "percent"),
        ("saturated", "Saturated", "fraction clipped to the largest value", "percent"),
        ("cosine", "Gradients", "cosine with the gradient in plain bf16", "number"),
        (
            "gradient_to_noise",
            "Gradient over quantization noise",
            "below √3 (1.73), training stalls",
            "number",
        ),
    ):
        groups = _group_measurements(sweep, name)
        positions = sorted({step for group in groups.values() for step in group})
        lines = [
            _line(label, color, _spread_of(group, positions, has_band=_is_single(sweep)), has_points=True)
            for (color, label), group in groups.items()
        ]
        x = axis.label, axis.at_steps(longest, np.array(positions, float))
        yield _chart(f"telemetry-{name}", title, [note, reduction], x, lines, format=format)


def _group_measurements(sweep: SweepData, name: str) -> dict[tuple[int, str], dict[int, list[float]]]:
    """Groups the measured numbers by line of the chart (color and label), then by step."""
    groups: dict[tuple[int, str], dict[int, list[float]]] = {}
    labels: dict[str, int] = {}
    for color, variant in colors_of(sweep):
        for run in variant.runs:
            for row in run.stats:
                number = as_number(row.get(name))
                if number is None:
                    continue
                key = (color, variant.name)
                if _is_single(sweep):
                    label = str(row.get("operand", "all parameters"))[:60]
                    key = (labels.setdefault(label, 1 + len(labels)), label)
                groups.setdefault(key, {}).setdefault(row["step"], []).append(number)
    return groups


def _spread_of(group: dict[int, list[float]], positions: Sequence[int], *, has_band: bool) -> Curve:
    def reduce(function: Callable[[list[float]], Any]) -> Column:
        return np.array([function(group[step]) if step in group else np.nan for step in positions], float)

    if not has_band:
        return Curve(values=reduce(np.mean))
    return Curve(values=reduce(np.mean), low=reduce(np.min), high=reduce(np.max))
