"""The charts of a report as data: lines and bands over tokens. The page draws them with uPlot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from policyc.experiments.report.sweeps import SweepData, VariantData, judge_run
from policyc.experiments.report.values import as_number

_GAP_POINTS = 80  # a gap is small, so that more steps have to be averaged to see it


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a chart. `color` is the number of its variant; `low` and `high` are the edges of its band."""

    label: str
    color: int
    values: list[float | None]
    low: list[float | None] | None = None
    high: list[float | None] | None = None
    has_points: bool = False
    is_dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines over a common axis.

    Attributes:
      x: the positions of the values.
      note: what lines and bands are.
      zone: a horizontal band, such as the margin around 0.
      format: how values are written: `loss`, `gap`, `number`, `seconds`, `bytes`, `percent` or `count`.
    """

    id: str
    title: str
    note: str
    x_label: str
    x: list[float | None]
    lines: list[Line]
    format: str = "number"
    zone: tuple[float, float] | None = None
    is_log: bool = False
    zone_label: str = ""


def to_list(values: Column) -> list[float | None]:
    """Numbers for JSON: six digits are more than a chart shows, and NaN is null."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]


def make_charts(sweep: SweepData, axis: Axis, margins: dict[str, float]) -> list[Chart]:
    """All charts that the runs have values for. `margins` has the margin in nats for each baseline."""
    coarse = make_axis(sweep.runs, _GAP_POINTS)
    charts = [
        _loss_chart(sweep, axis),
        *(_gap_chart(sweep, coarse, baseline, margins.get(baseline)) for baseline in sweep.baselines),
        *_validation_charts(sweep, axis),
        *_metric_charts(sweep, axis),
        *_telemetry_charts(sweep, axis),
    ]
    return [chart for chart in charts if any(any(v is not None for v in line.values) for line in chart.lines)]


def colors_of(sweep: SweepData) -> list[tuple[int, VariantData]]:
    """The variants with their colors. Color 0, a gray, is for a baseline."""
    first = 0 if sweep.baselines else 1
    return [(first + number, variant) for number, variant in enumerate(sweep.variants)]


def _line(label: str, color: int, curve: Curve, *, has_points: bool = False) -> Line:
    bounds = (curve.low, curve.high)
    low, high = (None if bound is None else to_list(bound) for bound in bounds)
    return Line(
        label=label, color=color, values=to_list(curve.values), low=low, high=high, has_points=has_points
    )


def _is_single(sweep: SweepData) -> bool:
    return len(sweep.runs) == 1


def _band_note(sweep: SweepData) -> str:
    if _is_single(sweep):
        return "band: lowest and highest step of each part of the axis"
    has_seeds = any(len(variant.runs) > 1 for variant in sweep.variants)
    return "mean over seeds; band: lowest and highest seed" if has_seeds else ""


def _loss_chart(sweep: SweepData, axis: Axis) -> Chart:
    lines = []
    for color, variant in colors_of(sweep):
        if _is_single(sweep):
            lines.append(_line(variant.name, color, range_of_run(variant.runs[0], "loss", axis)))
            continue
        columns = [
            (run, judge_run(run, sweep.longest).state, bin_run(run, "loss", axis)) for run in variant.runs
        ]
        if others := [column for _, state, column in columns if state != "failed"]:
            lines.append(_line(variant.name, color, over_seeds(others)))
        lines += [
            Line(label=f"{run.name} (failed)", color=color, values=to_list(column), is_dashed=True)
            for run, state, column in columns
            if state == "failed"
        ]
    parts = len(axis.values)
    is_binned = any(len(run.steps) > parts for run in sweep.runs)
    means = f"each point is the mean of 1/{parts} of the {axis.label}; " if is_binned else ""
    bands = "" if _is_single(sweep) and not is_binned else _band_note(sweep)
    note = f"nats per token; {means}{bands}"
    return Chart(
        id="loss", title="Training loss", note=note.rstrip("; "), x_label=axis.label, x=to_list(axis.values),
        lines=lines, format="loss",
    )  # fmt: skip


def by_seed(sweep: SweepData, variant: VariantData, axis: Axis, states: Sequence[str]) -> dict[int, Column]:
    """The loss of each seed of a variant that is in one of some states. Runs without a seed are numbered."""
    return {
        number if run.seed is None else run.seed: bin_run(run, "loss", axis)
        for number, run in enumerate(variant.runs)
        if len(run.steps) and judge_run(run, sweep.longest).state in states
    }


def _pairs(
    sweep: SweepData, variant: VariantData, baseline: VariantData, axis: Axis
) -> tuple[dict[int, Column], dict[int, Column]]:
    """The seeds of a gap: those that both variants finished if there are two or more, else all that did not fail.

    So a run that has just begun does not shorten the curve of the others.
    """
    for states in (("finished",), ("finished", "unfinished")):
        ours, theirs = (by_seed(sweep, v, axis, states) for v in (variant, baseline))
        if len(set(ours) & set(theirs)) > 1:
            break
    return ours, theirs


def _gap_chart(sweep: SweepData, axis: Axis, baseline: str, margin: float | None) -> Chart:
    confidence = 1 - sweep.settings.alpha
    lines = []
    for color, variant in colors_of(sweep):
        ours, theirs = _pairs(sweep, variant, sweep.variant(baseline), axis)
        if variant.name != baseline and set(ours) & set(theirs):
            lines.append(_line(variant.name, color, gap_curve(ours, theirs, confidence)))
    note = (
        f"training loss minus that of {baseline}, nats, paired by seed; means of 1/{len(axis.values)} of the "
        f"{axis.label}; band: paired t interval at {confidence:.0%}, for each point alone"
    )
    zone = None if margin is None else (-margin, margin)
    return Chart(
        id=f"gap-{baseline}", title=f"Gap to {baseline}", note=note, x_label=axis.label, x=to_list(axis.values),
        lines=lines, format="gap", zone=zone, zone_label=f"margin {sweep.settings.margin}",
    )  # fmt: skip


def _validation_charts(sweep: SweepData, axis: Axis) -> Iterator[Chart]:
    for metric, title in (
        ("validation_loss", "Validation loss"),
        ("validation_loss_plain", "Validation loss, computed in bf16"),
    ):
        measured = [
            (color, variant, [_evaluations(run, metric, axis) for run in variant.runs])
            for color, variant in colors_of(sweep)
        ]
        positions = sorted({x for _, _, runs in measured for run in runs for x in run})
        if not positions:
            continue
        lines = [
            _line(
                variant.name, color,
                over_seeds([np.array([run.get(x, np.nan) for x in positions]) for run in runs]), has_points=True,
            )
            for color, variant, runs in measured
        ]  # fmt: skip
        bands = "" if _is_single(sweep) else _band_note(sweep)
        yield Chart(
            id=metric, title=title, note=f"nats per token; {bands}".rstrip("; "),
            x_label=axis.label, x=to_list(np.array(positions)), lines=lines, format="loss",
        )  # fmt: skip


def _evaluations(run: RunData, metric: str, axis: Axis) -> dict[float, float]:
    column = run.evaluations.column(metric)
    if column is None:
        return {}
    return dict(zip(axis.positions(run, run.evaluations).tolist(), column.tolist(), strict=True))


# ---- speed, memory, gradients


def _metric_charts(sweep: SweepData, axis: Axis) -> Iterator[Chart]:
    first_steps = "without the first steps, which compile; "
    largest = "before clipping; the largest of each part of the axis; "
    for metric, title, note, format in (
        ("grad_norm", "Gradient norm", largest, "number"),
        ("step_seconds", "Step time", first_steps, "seconds"),
        ("tokens_per_second", "Speed", "tokens per second, all devices; " + first_steps, "count"),
        ("memory_bytes", "Peak memory", "of a device, or of the process; ", "bytes"),
        ("stall_fraction", "Input stalls", "part of the step that waits for data; ", "percent"),
        ("learning_rate", "Learning rate", "", "number"),
    ):
        reduce = np.fmax if metric in ("grad_norm", "memory_bytes") else None
        lines = []
        for color, variant in colors_of(sweep):
            runs = [with_derived_metrics(run) for run in variant.runs]
            columns = [bin_run(run, metric, axis, reduce) for run in runs]
            lines.append(_line(variant.name, color, over_seeds(columns)))
        bands = _band_note(sweep) if len(sweep.runs) > 1 else ""
        yield Chart(
            id=metric, title=title, note=(note + bands).rstrip("; "), x_label=axis.label, x=to_list(axis.values),
            lines=lines, format=format, is_log=metric == "grad_norm",
        )  # fmt: skip


# ---- numerics telemetry


def _telemetry_charts(sweep: SweepData, axis: Axis) -> Iterator[Chart]:
    """Quantization error over time: by operand for one run, by variant for several."""
    for field_name, title, note, format in (
        ("sqnr_db", "SQNR of quantized operands", "dB", "number"),
        ("flushed", "Flushed to zero", "fraction of what was not zero", "percent"),
        ("saturated", "Saturated", "fraction that was cut to the largest value", "percent"),
        ("cosine", "Gradients", "cosine with the gradient in plain bf16", "number"),
        (
            "gradient_to_noise",
            "Gradient over quantization noise",
            "below √3 (1.73) training stalls",
            "number",
        ),
    ):
        groups = _group_measurements(sweep, field_name)
        positions = sorted({step for group in groups.values() for step in group})
        if not positions:
            continue
        is_single = _is_single(sweep)
        lines = [
            _line(label, color, _spread_of(group, positions, has_band=is_single), has_points=True)
            for (color, label), group in groups.items()
        ]
        reduction = "mean over sites, layers and seeds"
        if is_single:
            reduction = "mean over sites and layers, band: lowest and highest"
        per_step = next((r.tokens_per_step for r in sweep.runs if r.tokens_per_step), None)
        factor = per_step if axis.label == "tokens" and per_step else 1
        x_label = axis.label if factor != 1 else "steps"
        yield Chart(
            id=f"telemetry-{field_name}", title=title,
            note=f"{note}; {reduction}", x_label=x_label,
            x=to_list(np.array(positions, float) * factor), lines=lines, format=format,
        )  # fmt: skip


def _group_measurements(sweep: SweepData, name: str) -> dict[tuple[int, str], dict[int, list[float]]]:
    """The measured numbers by line, which is a color and a label, and by step."""
    groups: dict[tuple[int, str], dict[int, list[float]]] = {}
    labels: list[str] = []
    for color, variant in colors_of(sweep):
        for run in variant.runs:
            for row in run.stats:
                number = as_number(row.get(name))
                if number is None:
                    continue
                if _is_single(sweep):
                    label = str(row.get("operand", "all parameters"))[:60]
                    if label not in labels:
                        labels.append(label)
                    key = (1 + labels.index(label), label)
                else:
                    key = (color, variant.name)
                groups.setdefault(key, {}).setdefault(row["step"], []).append(number)
    return groups


def _spread_of(group: dict[int, list[float]], positions: Sequence[int], *, has_band: bool) -> Curve:
    def reduce(function: Callable[[list[float]], Any]) -> Column:
        return np.array([function(group[step]) if step in group else np.nan for step in positions], float)

    if not has_band:
        return Curve(values=reduce(np.mean))
    return Curve(values=reduce(np.mean), low=reduce(np.min), high=reduce(np.max))
