"""Curves of runs on a common axis: means over equal parts of the tokens, bands over seeds, gaps between variants."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from policyc.experiments.report.runs import Column, RunData, Table
from policyc.experiments.statistics import paired_interval

_MOST_POINTS = 200  # per curve: about one for every three pixels of a chart

_WARM_UP = 2  # first steps, which compile: their times are not typical

SPIKE_WINDOW = 50  # steps that a step is compared with
GRADIENT_SPIKE = 3.0  # times the median of the steps before
LOSS_SPIKE = 6.0  # robust standard deviations above the median of the steps before
_MAD_TO_DEVIATION = 1.4826  # for a normal distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The horizontal axis of all charts: tokens if all runs report them, otherwise steps.

    `edges` divides it into equal parts, from 0 to the end of the longest run.
    """

    label: str
    edges: Column

    @property
    def values(self) -> Column:
        """The right edge of each part."""
        return self.edges[1:]

    def positions(self, run: RunData, table: Table) -> Column:
        """The position of each row of a run on the axis."""
        return self.at_steps(run, table.step)

    def at_steps(self, run: RunData, steps: Column) -> Column:
        """The positions of some steps of a run on the axis."""
        tokens = run.tokens_at(steps) if self.label == "tokens" else None
        return steps if tokens is None else tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line, and the band around it if there is one. NaN where there is no value."""

    values: Column
    low: Column | None = None
    high: Column | None = None


def make_axis(runs: Sequence[RunData], most_points: int = _MOST_POINTS) -> Axis:
    """The common axis of some runs."""
    begun = [run for run in runs if len(run.steps)]
    has_tokens = bool(begun) and all(run.tokens_at(run.steps.step) is not None for run in begun)
    axis = Axis(label="tokens" if has_tokens else "steps", edges=np.zeros(1))
    ends = [axis.positions(run, run.steps).max() for run in begun]
    points = min(most_points, max((len(run.steps) for run in begun), default=1))
    return Axis(label=axis.label, edges=np.linspace(0, max(ends, default=1.0) or 1.0, points + 1))


def bin_run(run: RunData, metric: str, axis: Axis, reduce: np.ufunc | None = None) -> Column:
    """Bins a metric of a run by the parts of the axis: the mean of each part, or its np.fmin or np.fmax."""
    column = run.steps.column(metric)
    result = np.full(len(axis.values), np.nan)
    if column is None:
        return result
    is_number = np.isfinite(column)
    positions = axis.positions(run, run.steps)[is_number]
    parts = np.clip(np.searchsorted(axis.edges, positions, side="left") - 1, 0, len(result) - 1)
    if reduce is not None:
        reduce.at(result, parts, column[is_number])
        return result
    counts = np.bincount(parts, minlength=len(result))
    sums = np.bincount(parts, weights=column[is_number], minlength=len(result))
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def over_seeds(columns: Sequence[Column]) -> Curve:
    """The mean of some runs, and the band between their lowest and highest."""
    rows = np.array(columns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a part of the axis without any value: NaN
        mean = np.nanmean(rows, 0)
        if len(rows) < 2:
            return Curve(values=mean)
        return Curve(values=mean, low=np.nanmin(rows, 0), high=np.nanmax(rows, 0))


def range_of_run(run: RunData, metric: str, axis: Axis) -> Curve:
    """The mean of a single run in each part of the axis, and the band between its lowest and highest step there."""
    column = run.steps.column(metric)
    mean = bin_run(run, metric, axis)
    if column is None or len(run.steps) <= len(axis.values):
        return Curve(values=mean)
    names = [f"{metric}{end}" for end in ("_low", "_high") if f"{metric}_low" in run.steps.columns] or [
        metric
    ] * 2
    low, high = (bin_run(run, *each) for each in zip(names, [axis] * 2, (np.fmin, np.fmax), strict=True))
    return Curve(values=mean, low=low, high=high)


def gap_curve(variant: Mapping[int, Column], baseline: Mapping[int, Column], confidence: float) -> Curve:
    """The mean difference of the seeds that both have, with the paired t interval of each part of the axis.

    A part has a value only if all these seeds have one, so that every mean is over the same seeds.
    """
    seeds = sorted(set(variant) & set(baseline))
    differences = np.array([variant[seed] - baseline[seed] for seed in seeds])
    if len(seeds) < 2:
        return Curve(values=differences[0] if seeds else np.empty(0))
    low, high = paired_interval(differences.T, confidence)
    return Curve(values=differences.mean(0), low=low, high=high)


def with_derived_metrics(run: RunData) -> RunData:
    """Adds the speed over all devices and the stalled fraction of each step. Times of the first steps become NaN."""
    columns = dict(run.steps.columns)
    seconds = columns.get("step_seconds")
    if seconds is not None:
        if len(seconds) > 2 * _WARM_UP:
            columns["step_seconds"] = seconds = np.where(np.arange(len(seconds)) < _WARM_UP, np.nan, seconds)
        if "stall_seconds" in columns:
            with np.errstate(divide="ignore", invalid="ignore"):
                columns["stall_fraction"] = columns["stall_seconds"] / seconds
    per_device = columns.get("tokens_per_second_per_device")
    speed = columns.get("tokens_per_second_total")
    if speed is None and per_device is not None:
        speed = per_device * (run.devices or 1)
    if speed is not None:
        is_first = (np.arange(len(speed)) < _WARM_UP) & (len(speed) > 2 * _WARM_UP)
        columns["tokens_per_second"] = np.where(is_first, np.nan, speed)
    return replace(run, steps=replace(run.steps, columns=columns))


def elapsed_seconds(runs: Sequence[RunData], axis: Axis) -> Column:
    """Mean elapsed time of the runs at each part of the axis; NaN where no run reports it."""
    columns = []
    for run in runs:
        seconds = run.steps.column("step_seconds")
        if seconds is None or not np.isfinite(seconds).any():
            continue
        known = np.where(np.isfinite(seconds), seconds, np.nanmedian(seconds))
        elapsed = np.cumsum(known * np.diff(run.steps.step, prepend=0))  # a line may stand for several steps
        positions = axis.positions(run, run.steps)
        columns.append(np.interp(axis.values, [0, *positions], [0, *elapsed], right=np.nan))
    return over_seeds(columns).values if columns else np.full(len(axis.values), np.nan)


def count_loss_spikes(losses: Column) -> int:
    """Steps more than LOSS_SPIKE robust standard deviations above the median of the steps before them."""
    values, windows, medians = _windows_before(losses)
    is_above = values > medians  # a spike is above the median, whatever the spread
    values, windows, medians = values[is_above], windows[is_above], medians[is_above]
    spread = _MAD_TO_DEVIATION * np.median(np.abs(windows - medians[:, None]), axis=1)
    return int(np.sum(values > medians + LOSS_SPIKE * spread))


def count_gradient_spikes(norms: Column) -> int:
    """Steps with a gradient norm above GRADIENT_SPIKE times the median of the steps before them."""
    values, _, medians = _windows_before(norms)
    return int(np.sum(values > GRADIENT_SPIKE * medians))


def _windows_before(column: Column) -> tuple[Column, Column, Column]:
    """The finite values after the first SPIKE_WINDOW; for each, the SPIKE_WINDOW values before it, and their median."""
    values = column[np.isfinite(column)]
    if len(values) <= SPIKE_WINDOW:
        return np.empty(0), np.empty((0, SPIKE_WINDOW)), np.empty(0)
    windows = np.lib.stride_tricks.sliding_window_view(values[:-1], SPIKE_WINDOW)
    return values[SPIKE_WINDOW:], windows, np.median(windows, axis=1)
