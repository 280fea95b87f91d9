"""Time to an equal loss: the tokens that a gap costs, and the time they take at the speed of the policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from policyc.base.text import parse_count
from policyc.experiments.exchange import (
    CHINCHILLA,
    Exchange,
    exchange_of_law,
    exchange_of_lengths,
    exchange_of_run,
)
from policyc.experiments.report.charts import by_seed
from policyc.experiments.report.figures import read_figures
from policyc.experiments.report.runs import Column, RunData, judge_run
from policyc.experiments.report.series import Axis, make_axis
from policyc.experiments.report.sweeps import SweepData, VariantData, final_validation_loss, seed_losses
from policyc.experiments.report.values import JsonObject
from policyc.experiments.statistics import paired_interval
from policyc.experiments.sweep.metrics import trailing_steps
from policyc.experiments.sweep.run import METRICS_FILE
from policyc.experiments.verdicts import Comparison

_LEAST_VALIDATIONS = 3  # with fewer, the training loss says more about where a curve was


def compare_times(
    sweep: SweepData,
    speeds: Mapping[str, float | None],
    speed_ups: Mapping[str, float],
    comparisons: Sequence[Comparison],
    curve: Exchange | None = None,
) -> list[JsonObject]:
    """The tokens that each variant needs for the loss of each baseline, relative to it, and its speed.

    `curve` is the exchange rate; by default that of the baseline's own curve.
    """
    axis, rows = make_axis(sweep.runs), list[JsonObject]()
    finals = {variant.name: seed_losses(sweep, variant).losses for variant in sweep.variants}
    for baseline in sweep.baselines:
        exchange = curve or exchange_of_variant(sweep.variant(baseline), axis)
        for row in comparisons:
            if row.baseline != baseline or row.gap is None or exchange is None:
                continue
            speed, base_speed = speeds.get(row.variant), speeds.get(baseline)
            predicted = {row.variant, baseline} <= set(speed_ups)
            worse = row.variant if row.gap > 0 else baseline
            rows.append(
                {
                    "variant": row.variant,
                    "baseline": baseline,
                    "loss": float(np.mean([finals[worse][seed] for seed in row.seeds])),
                    **_cost(exchange, row.gap, row.interval),
                    "in_bf16": _cost_in_bf16(sweep, row, exchange),
                    "curve": exchange.source,
                    "is_bound": exchange.is_bound,
                    "measured_speed_up": speed / base_speed if speed and base_speed else None,
                    "predicted_speed_up": speed_ups[row.variant] / speed_ups[baseline] if predicted else None,
                }
            )
    return rows


def _cost(exchange: Exchange, gap: float, interval: Sequence[float] | None) -> JsonObject:
    """A gap and its interval in tokens. None for more tokens than the curve has."""
    ratio, *ends = (exchange.ratio(each) for each in (gap, *(interval or ())))
    return {
        "gap": gap,
        "token_ratio": ratio if math.isfinite(ratio) else None,
        "token_interval": [end if math.isfinite(end) else None for end in ends] or None,
    }


def _cost_in_bf16(sweep: SweepData, row: Comparison, exchange: Exchange) -> JsonObject | None:
    """The same for the weights of both, evaluated in BF16; None if a run did not measure it."""
    columns = [
        [
            final_validation_loss(run, "validation_loss_evaluated_in_bf16")
            for seed in row.seeds
            for number, run in enumerate(sweep.variant(name).runs)
            if seed == (number if run.seed is None else run.seed)
        ]
        for name in (row.variant, row.baseline)
    ]
    losses = np.array(columns, float)
    if not losses.size or not np.isfinite(losses).all():
        return None
    gaps = losses[0] - losses[1]
    interval = [float(end) for end in paired_interval(gaps)] if len(gaps) > 1 else None
    return _cost(exchange, float(gaps.mean()), interval)


# ---- exchange rates


def exchange_of_variant(variant: VariantData, axis: Axis) -> Exchange | None:
    """The exchange rate of the mean curve of the finished runs of a variant; None without a curve."""
    runs = [run for run in variant.runs if run.end.state == "finished"]
    validations = [run.evaluations.step.tolist() for run in runs]
    if runs and len(validations[0]) >= _LEAST_VALIDATIONS and all(s == validations[0] for s in validations):
        x = axis.at_steps(runs[0], runs[0].evaluations.step)
        y = np.mean([run.evaluations.columns["validation_loss"] for run in runs], axis=0)
        kind = "validation"
    else:
        x, y, kind = axis.values, _trailing_curve(variant, axis), "training"
    is_known = np.isfinite(y)
    if is_known.sum() < 2:
        return None
    return exchange_of_run(x[is_known].tolist(), y[is_known].tolist(), f"the {kind} loss of {variant.name}")


def _trailing_curve(variant: VariantData, axis: Axis) -> Column:
    """The training loss of a variant: the mean over seeds, and over the trailing steps of each point."""
    columns = list(by_seed(variant, axis, ("finished",)).values())
    if not columns:
        return np.full(len(axis.values), np.nan)
    mean = np.mean(columns, axis=0)
    steps = max(run.figures["rows"] for run in variant.runs)
    window = max(1, round(min(1.0, trailing_steps(steps) / steps) * len(mean)))
    means = np.lib.stride_tricks.sliding_window_view(mean, window).mean(-1)
    return np.concatenate([np.full(window - 1, np.nan), means])


def read_exchange(text: str) -> Exchange:
    """Reads `chinchilla:15T`, or the folders of runs of one policy: one, or several that differ in length.

    Raises ValueError.
    """
    name, _, count = text.partition(":")
    if name == CHINCHILLA:
        return exchange_of_law(parse_count(count))
    folders = [Path(part) for part in text.split(",")]
    runs = [run for folder in folders for run in _read_runs(folder)]
    by_tokens: dict[float, list[float]] = {}
    for run in runs:
        tokens = run.tokens_at(np.append(run.steps.step, run.evaluations.step[-1:]))
        loss = final_validation_loss(run) or run.figures["trailing_loss"]
        if tokens is None or loss is None:
            raise ValueError(f"'{run.folder}' has no finite loss, or does not count its tokens")
        by_tokens.setdefault(float(tokens[-1]), []).append(loss)
    if len(by_tokens) > 1:
        lengths = sorted(by_tokens)
        losses = [float(np.mean(by_tokens[tokens])) for tokens in lengths]
        ends = f"{lengths[0] / 1e6:,.1f}M to {lengths[-1] / 1e6:,.1f}M tokens"
        return exchange_of_lengths(lengths, losses, f"runs of {ends}")
    variant = VariantData(name=text, runs=tuple(runs))
    exchange = exchange_of_variant(variant, make_axis(runs))
    if exchange is None:
        raise ValueError(f"'{text}' has too few losses for a curve")
    return exchange


def _read_runs(folder: Path) -> list[RunData]:
    metrics = [folder / METRICS_FILE, *sorted(folder.glob(f"seed*/{METRICS_FILE}"))]
    runs = [
        read_figures(path.parent, variant=folder.name, seed=number)
        for number, path in enumerate(metrics)
        if path.exists()
    ]
    if not runs:
        raise ValueError(
            f"'{folder}' has no {METRICS_FILE}: name folders of runs, or a law such as {CHINCHILLA}:15T"
        )
    return [replace(run, end=judge_run(run, run.last_step)) for run in runs]
