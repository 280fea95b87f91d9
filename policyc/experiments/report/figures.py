"""What a report keeps of a run: figures of all its steps, and a table thin enough for the curves of 500 runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policyc.experiments.report.runs import Column, RunData, Table, read_run
from policyc.experiments.report.series import (
    count_gradient_spikes,
    count_loss_spikes,
    with_derived_metrics,
)
from policyc.experiments.report.values import JsonObject
from policyc.experiments.sweep.metrics import describe_divergence, describe_lost_lines, trailing_steps

MOST_ROWS = 8192  # of a table; a chart has 200 points
_MAXIMA = ("grad_norm", "memory_bytes", "skipped")  # metrics whose largest value is shown


def read_figures(
    folder: Path, *, variant: str, seed: int | None = None, planned_steps: int | None = None
) -> RunData:
    """Reads a run, computes its figures, and thins its table."""
    run = read_run(folder, variant=variant, seed=seed, planned_steps=planned_steps)
    return replace(run, figures=_compute_figures(run), steps=thin(run.steps))


def thin(table: Table) -> Table:
    """Replaces consecutive rows by one: means, or the largest values. Losses also keep the lowest and the highest."""
    size = math.ceil(len(table) / MOST_ROWS)
    if size < 2:
        return table
    starts = np.arange(0, len(table), size)
    ends = np.append(starts[1:], len(table)) - 1
    columns = {name: _reduce(name, column, starts) for name, column in table.columns.items()}
    losses = table.columns["loss"]
    columns |= {"loss_low": np.fmin.reduceat(losses, starts), "loss_high": np.fmax.reduceat(losses, starts)}
    if "tokens" in columns:  # counted so far; unknown if a line lacks them
        columns["tokens"] = table.columns["tokens"][ends] + 0 * np.add.reduceat(
            table.columns["tokens"], starts
        )
    return Table(step=table.step[ends], columns=columns)


def _reduce(name: str, column: Column, starts: NDArray[np.intp]) -> Column:
    if name in _MAXIMA:
        return np.asarray(np.fmax.reduceat(column, starts), np.float64)
    is_known = np.isfinite(column)
    counts = np.add.reduceat(is_known.astype(float), starts)
    sums = np.add.reduceat(np.where(is_known, column, 0.0), starts)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _compute_figures(run: RunData) -> JsonObject:
    """The figures of all steps; None for what the run did not measure."""
    derived = with_derived_metrics(run).steps
    losses, grad_norm = run.steps.columns["loss"], run.steps.column("grad_norm")
    steps = run.steps.step.astype(int).tolist()
    last = int(max([0, *steps[-1:], *run.evaluations.step[-1:]]))
    trailing = float(np.mean(losses[-trailing_steps(len(losses)) :])) if len(losses) else math.nan

    def figure(name: str, reduce: Callable[[Column], Any]) -> float | None:
        column = derived.column(name)
        values = np.empty(0) if column is None else column[np.isfinite(column)]
        return float(reduce(values)) if len(values) else None

    return {
        "divergence": describe_divergence(dict(zip(steps, losses.tolist(), strict=True))),
        "lost_lines": describe_lost_lines(steps, last, run.about, run.planned_steps if run.status else None),
        "rows": len(steps),
        "trailing_loss": trailing if math.isfinite(trailing) else None,
        "loss_spikes": count_loss_spikes(losses),
        "gradient_spikes": None if grad_norm is None else count_gradient_spikes(grad_norm),
        "skipped_steps": figure("skipped", np.max),
        "step_seconds": figure("step_seconds", np.median),
        "tokens_per_second": figure("tokens_per_second", np.median),
        "mfu": figure("mfu", np.median),
        "memory_bytes": figure("memory_bytes", np.max),
        "stall_fraction": _stall_fraction(run),
    }


def _stall_fraction(run: RunData) -> float | None:
    """The fraction of the time spent waiting for data. The first step compiles, so it does not count."""
    stall, step = run.steps.column("stall_seconds"), run.steps.column("step_seconds")
    if stall is None or step is None:
        return None
    is_known = np.isfinite(stall[1:]) & np.isfinite(step[1:])
    total = float(step[1:][is_known].sum())
    return float(stall[1:][is_known].sum()) / total if total > 0 else None
