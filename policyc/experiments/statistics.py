"""Statistics of paired runs: is a variant at parity with its baseline, better, or worse?

Every function is pure and works along the last axis of its arrays. Losses are paired by seed: a variant and its
baseline have the same data order and initial weights, so the effect of the seed cancels in their difference. The
differences are assumed to be independent and normal. Nothing is resampled: a bootstrap over three seeds is too narrow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

# `scipy.special` has the distributions that are needed here, and loads ten times as fast as `scipy.stats`.
from scipy.special import nctdtr, nctdtrinc, stdtr, stdtrit

Array = NDArray[np.float64]

_MOST_SEEDS = 1000  # nobody runs more, so a larger number does not help


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """The largest difference of loss that counts as parity: in nats, or as a fraction of the baseline's loss."""

    value: float
    is_relative: bool

    def __str__(self) -> str:
        return f"{100 * self.value:g}%" if self.is_relative else f"{self.value:g} nats"

    def in_nats(self, baseline_loss: float) -> float:
        return self.value * abs(baseline_loss) if self.is_relative else self.value

    def excesses(self, variant: ArrayLike, baseline: ArrayLike) -> tuple[Array, Array]:
        """How far each pair is above the upper and above the lower bound of parity.

        A relative margin is a bound on the ratio of the two expected losses. Its bounds are multiples of each pair's
        baseline, so that the test stays exact even though the expected loss of the baseline is unknown.
        """
        losses, base = np.asarray(variant, float), np.asarray(baseline, float)
        width = self.value * np.abs(base) if self.is_relative else np.full_like(base, self.value)
        return losses - base - width, losses - base + width


def parse_margin(text: str) -> Margin:
    """Reads `0.01`, `0.01 nats` or `0.5%`. Raises ValueError for anything else, or if it is not above 0."""
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*(%|nats?|)\s*", text)
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if match is None or not 0 < number < np.inf:
        raise ValueError(
            f"'{text}' is not a margin: expected nats above 0, such as 0.01, or a percentage, such as 0.5%"
        )
    is_relative = match[2] == "%"
    return Margin(value=number / 100 if is_relative else number, is_relative=is_relative)


DEFAULT_MARGIN = Margin(value=0.005, is_relative=True)

ALPHA = 0.05
"""Bound on the probability, over all variants, of one wrong claim of a difference; the same bound holds for parity."""

RERUN_NOISE = 0.003
"""Nats by which two runs with the same policy and seed differed in docs/results: XLA may choose other algorithms."""

FEW_SEEDS = 3
"""An interval over so few pairs may be narrow by chance: in 1 of 10 sweeps, three gaps have a third of their true
standard deviation or less."""

POWER = 0.8
"""Probability of detecting the smallest detectable effect, and of deciding a variant with the advised seeds."""


# ---- one variant


def _summarize(differences: ArrayLike) -> tuple[Array, Array, int]:
    """Mean and standard error along the last axis, and the number of pairs."""
    values = np.asarray(differences, float)
    pairs = values.shape[-1]
    if pairs < 2:
        raise ValueError("an interval needs at least two pairs")
    return values.mean(-1), values.std(-1, ddof=1) / np.sqrt(pairs), pairs


def _t_statistic(mean: Array, error: Array) -> Array:
    """mean / error. Without spread, t is infinite for every mean but 0, because all pairs agree exactly."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(mean == 0, 0.0, mean / error)


def paired_interval(differences: ArrayLike, confidence: float = 0.95) -> tuple[Array, Array]:
    """The paired t interval of the mean difference."""
    mean, error, pairs = _summarize(differences)
    half = stdtrit(pairs - 1, 0.5 + confidence / 2) * error
    return mean - half, mean + half


def difference_p_value(differences: ArrayLike) -> Array:
    """Two-sided p-value of the hypothesis that the mean difference is 0 (paired t test)."""
    mean, error, pairs = _summarize(differences)
    return np.asarray(2 * stdtr(pairs - 1, -np.abs(_t_statistic(mean, error))))


def equivalence_p_value(variant: ArrayLike, baseline: ArrayLike, margin: Margin) -> Array:
    """p-value of the hypothesis that the losses differ by the margin or more: two one-sided t tests (TOST)."""
    above_upper, above_lower = (_summarize(excess) for excess in margin.excesses(variant, baseline))
    p_upper = stdtr(above_upper[2] - 1, _t_statistic(*above_upper[:2]))
    p_lower = stdtr(above_lower[2] - 1, -_t_statistic(*above_lower[:2]))
    return np.asarray(np.maximum(p_upper, p_lower))


def equivalence_interval(
    variant: ArrayLike, baseline: ArrayLike, margin: Margin, alpha: float
) -> tuple[float, float]:
    """The interval of the mean difference at 1 - 2 alpha. It is inside the margin if TOST's p-value is below alpha.

    For a relative margin, its ends are computed from the distance of each pair to its own bounds, then shifted by the
    mean bound.
    """
    (above, above_error, pairs), (below, below_error, _) = map(_summarize, margin.excesses(variant, baseline))
    width = margin.in_nats(float(np.mean(np.abs(baseline))))
    factor = stdtrit(pairs - 1, 1 - alpha)
    return float(below - factor * below_error - width), float(above + factor * above_error + width)


def adjust_holm(p_values: ArrayLike) -> Array:
    """p-values adjusted for several variants by Holm's method, along the last axis. NaN (no test) stays NaN.

    A variant without a test still counts: the number of variants is fixed before the sweep runs.
    """
    p = np.asarray(p_values, float)
    order = np.argsort(np.where(np.isnan(p), np.inf, p), axis=-1)
    factors = np.arange(p.shape[-1], 0, -1)
    ascending = np.take_along_axis(np.where(np.isnan(p), 1.0, p), order, -1) * factors
    adjusted = np.minimum(np.maximum.accumulate(ascending, -1), 1.0)
    result = np.empty_like(adjusted)
    np.put_along_axis(result, order, adjusted, -1)
    return np.where(np.isnan(p), np.nan, result)


# ---- what a sweep can resolve


def smallest_detectable_effect(deviation: ArrayLike, pairs: int, alpha: float) -> Array:
    """The smallest difference that a two-sided paired t test detects with probability `POWER`.

    Args:
      deviation: standard deviation of the differences.
      pairs: number of seeds.
      alpha: level of the test: the sweep's level divided by the number of variants, which is Holm's strictest.
    """
    critical = stdtrit(pairs - 1, 1 - alpha / 2)
    noncentrality = nctdtrinc(pairs - 1, 1 - POWER, critical)
    return np.asarray(noncentrality * np.asarray(deviation, float) / np.sqrt(pairs))


def _one_sided_power(effect: float, deviation: float, pairs: int, alpha: float) -> float:
    """The probability that a one-sided t test finds an effect above 0."""
    if deviation == 0:
        return float(effect > 0)
    critical = stdtrit(pairs - 1, 1 - alpha)
    return float(1 - nctdtr(pairs - 1, effect * np.sqrt(pairs) / deviation, critical))


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedsNeeded:
    """How many seeds would decide a variant, if the true difference and spread are as measured."""

    seeds: int
    claim: str
    """`parity` or `difference`: what these seeds would show."""


def seeds_needed(
    variant: ArrayLike, baseline: ArrayLike, margin: Margin, variants: int
) -> SeedsNeeded | None:
    """The smallest number of seeds, above the current number, that decides a variant with probability `POWER`.

    None if 1000 are too few. The power of the two one-sided tests is bounded from below by the sum of their powers
    minus 1.
    """
    alpha = ALPHA / variants
    difference = np.asarray(variant, float) - np.asarray(baseline, float)
    effect, spread = abs(float(difference.mean())), float(difference.std(ddof=1))
    bounds = [
        (sign * float(excess.mean()), float(excess.std(ddof=1)))
        for sign, excess in zip((-1, 1), margin.excesses(variant, baseline), strict=True)
    ]
    for pairs in range(len(difference) + 1, _MOST_SEEDS + 1):
        equivalence = sum(_one_sided_power(room, width, pairs, alpha) for room, width in bounds) - 1
        if equivalence >= POWER:
            return SeedsNeeded(seeds=pairs, claim="parity")
        if _one_sided_power(effect, spread, pairs, alpha / 2) >= POWER:
            return SeedsNeeded(seeds=pairs, claim="difference")
    return None
