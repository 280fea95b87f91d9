"""The verdict of a sweep on each variant: parity, better, worse, inconclusive, or failed.

A run that failed or has not ended is never left out silently: it is named, and it limits what can be claimed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from policyc.base.text import count_noun
from policyc.experiments.statistics import (
    ALPHA,
    FEW_SEEDS,
    POWER,
    RERUN_NOISE,
    Margin,
    SeedsNeeded,
    adjust_holm,
    difference_p_value,
    equivalence_interval,
    equivalence_p_value,
    paired_interval,
    seeds_needed,
    smallest_detectable_effect,
)


class Verdict(StrEnum):
    """The outcome of comparing a variant with a baseline."""

    PARITY = "parity"
    BETTER = "better"
    WORSE = "worse"
    INCONCLUSIVE = "inconclusive"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedLosses:
    """The final losses of one variant, and its seeds without one.

    Attributes:
      name: the variant.
      losses: the final loss of each seed that finished.
      failed: the reason for each seed that failed.
      unfinished: the progress of each seed that has not ended.
    """

    name: str
    losses: Mapping[int, float]
    failed: Mapping[int, str] = field(default_factory=dict)
    unfinished: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison of a variant with a baseline.

    Numbers are None if fewer than two seeds finished in both, except for the gap of a single seed.

    Attributes:
      seeds: the seeds that finished in both.
      gap: mean of the variant's loss minus the baseline's, in nats.
      interval: paired t interval of the gap, at 1 - alpha, for this variant alone.
      parity_interval: the interval of the parity test, at 1 - 2 alpha. It is inside the margin if this variant alone
        would be at parity.
      margin: the margin in nats.
      p_difference: p-value of no difference, adjusted for the number of variants.
      p_parity: p-value of a difference as large as the margin, adjusted in the same way.
      detectable: the smallest difference that this sweep detects with probability `POWER`.
      reason: the reason for the verdict.
      needed: how many seeds would decide an inconclusive verdict; None if no number would.
    """

    variant: str
    baseline: str
    seeds: tuple[int, ...]
    verdict: Verdict
    reason: str
    gap: float | None = None
    interval: tuple[float, float] | None = None
    parity_interval: tuple[float, float] | None = None
    margin: float | None = None
    p_difference: float | None = None
    p_parity: float | None = None
    detectable: float | None = None
    needed: SeedsNeeded | None = None


def compare_variants(
    baseline: SeedLosses, variants: Sequence[SeedLosses], margin: Margin
) -> tuple[Comparison, ...]:
    """Compares variants with a baseline. The p-values are adjusted for all of them, failed ones included."""
    raw = [_test_pairs(baseline, variant, margin) for variant in variants]
    p_difference = adjust_holm([p for p, _ in raw]) if raw else ()
    p_parity = adjust_holm([p for _, p in raw]) if raw else ()
    return tuple(
        _compare(baseline, variant, margin, len(variants), (float(p_d), float(p_e)))
        for variant, p_d, p_e in zip(variants, p_difference, p_parity, strict=True)
    )


def _paired(baseline: SeedLosses, variant: SeedLosses) -> tuple[int, ...]:
    return tuple(sorted(set(baseline.losses) & set(variant.losses)))


def _pair_arrays(baseline: SeedLosses, variant: SeedLosses) -> tuple[np.ndarray, np.ndarray]:
    """The losses of the variant and of the baseline, in the order of their common seeds."""
    seeds = _paired(baseline, variant)
    return np.array([variant.losses[s] for s in seeds]), np.array([baseline.losses[s] for s in seeds])


def _test_pairs(baseline: SeedLosses, variant: SeedLosses, margin: Margin) -> tuple[float, float]:
    """The unadjusted p-values of a difference and of parity; NaN for fewer than two pairs."""
    losses, base = _pair_arrays(baseline, variant)
    if len(losses) < 2:
        return math.nan, math.nan
    return float(difference_p_value(losses - base)), float(equivalence_p_value(losses, base, margin))


def _compare(
    baseline: SeedLosses, variant: SeedLosses, margin: Margin, variants: int, p: tuple[float, float]
) -> Comparison:
    seeds = _paired(baseline, variant)
    if len(seeds) < 2:
        verdict, reason = _judge_without_test(baseline, variant, len(seeds))
        gap = variant.losses[seeds[0]] - baseline.losses[seeds[0]] if seeds else None
        return Comparison(
            variant=variant.name, baseline=baseline.name, seeds=seeds, verdict=verdict, reason=reason, gap=gap
        )
    losses, base = _pair_arrays(baseline, variant)
    differences = losses - base
    low, high = paired_interval(differences, 1 - ALPHA)
    detectable = smallest_detectable_effect(differences.std(ddof=1), len(seeds), ALPHA / variants)
    parity_interval = equivalence_interval(losses, base, margin, ALPHA)
    verdict, reason = _judge(baseline, variant, margin, float(differences.mean()), p)
    if verdict is Verdict.PARITY:
        ends = " to ".join(f"{end:+.4f}" for end in parity_interval)
        reason += f"; the {1 - 2 * ALPHA:.0%} interval, which decides parity, is {ends}"
    if len(seeds) <= FEW_SEEDS and high - low < 2 * RERUN_NOISE:
        reason += (
            f"; reruns with the same seed differ by up to {RERUN_NOISE} nats, more than this interval of "
            f"{len(seeds)} seeds says"
        )
    is_open = verdict is Verdict.INCONCLUSIVE and not (variant.failed or _obstacles(baseline, variant))
    needed = seeds_needed(losses, base, margin, variants) if is_open else None
    if is_open:
        reason += _advise(needed, len(seeds))
    return Comparison(
        variant=variant.name,
        baseline=baseline.name,
        seeds=seeds,
        verdict=verdict,
        reason=reason,
        gap=float(differences.mean()),
        interval=(float(low), float(high)),
        parity_interval=parity_interval,
        margin=margin.in_nats(float(base.mean())),
        p_difference=p[0],
        p_parity=p[1],
        detectable=float(detectable),
        needed=needed,
    )


# ---- verdicts


def _judge(
    baseline: SeedLosses, variant: SeedLosses, margin: Margin, gap: float, p: tuple[float, float]
) -> tuple[Verdict, str]:
    """The verdict for two or more pairs, and its reason. Parity comes first: a real difference may be negligible."""
    p_difference, p_parity = p
    is_different, is_equivalent = p_difference < ALPHA, p_parity < ALPHA
    if obstacles := _obstacles(baseline, variant):
        return Verdict.INCONCLUSIVE, " ".join(obstacles)
    if variant.failed:
        if is_different and gap > 0:
            return (
                Verdict.WORSE,
                f"the loss is higher (p = {p_difference:.2g}). {_describe_failures(variant)}",
            )
        return Verdict.INCONCLUSIVE, _describe_failures(variant)
    if is_equivalent:
        resolved = f"; a difference of {gap:+.4f} nats is resolved" if is_different else ""
        return Verdict.PARITY, f"within the margin of {margin} (p = {p_parity:.2g}){resolved}"
    if is_different:
        verdict, side = (Verdict.WORSE, "higher") if gap > 0 else (Verdict.BETTER, "lower")
        return verdict, f"the loss is {side} (p = {p_difference:.2g})"
    return Verdict.INCONCLUSIVE, (
        f"neither a difference (p = {p_difference:.2g}) nor parity within {margin} (p = {p_parity:.2g}) is "
        "shown"
    )


def _judge_without_test(baseline: SeedLosses, variant: SeedLosses, pairs: int) -> tuple[Verdict, str]:
    """The verdict for fewer than two pairs, and its reason."""
    if variant.failed and not variant.losses and not variant.unfinished:
        return Verdict.FAILED, f"every seed failed: {_list_seeds(variant.failed)}"
    failures = [_describe_failures(variant)] if variant.failed else []
    if sentences := [*failures, *_obstacles(baseline, variant)]:
        return Verdict.INCONCLUSIVE, " ".join(sentences)
    return Verdict.INCONCLUSIVE, (
        f"{count_noun(pairs, 'seed')} in common with {baseline.name}: an interval needs at least two"
    )


def _obstacles(baseline: SeedLosses, variant: SeedLosses) -> list[str]:
    """Reasons why nothing can be claimed: unfinished runs, a failed baseline, seeds without effect."""
    sentences = []
    if baseline.failed:
        sentences.append(
            f"{_count_failures(baseline)}: the seeds that survived cannot serve as a baseline. {_RESTART}"
        )
    if variant.unfinished or baseline.unfinished:
        waiting = [_list_seeds(variant.unfinished)] if variant.unfinished else []
        if baseline.unfinished:
            waiting.append(f"{baseline.name} seed {', '.join(map(str, sorted(baseline.unfinished)))}")
        sentences.append(f"There is no verdict until all runs have ended. Waiting for {'; '.join(waiting)}.")
    sentences += [
        f"All seeds of {runs.name} have exactly the same loss: the program does not use its seed, so its runs are not "
        "independent."
        for runs in (variant, baseline)
        if len(runs.losses) > 1 and len(set(runs.losses.values())) == 1
    ]
    return sentences


def _describe_failures(variant: SeedLosses) -> str:
    return (
        f"{_count_failures(variant)}: the seeds that survived cannot show parity or an improvement. "
        f"{_RESTART}"
    )


_RESTART = "The same command runs failed seeds again, except those that diverged: divergence is a result."


def _count_failures(runs: SeedLosses) -> str:
    count = len(runs.losses) + len(runs.failed) + len(runs.unfinished)
    return f"{len(runs.failed)} of {count} seeds of {runs.name} failed ({_list_seeds(runs.failed)})"


def _list_seeds(reasons: Mapping[int, str]) -> str:
    return "; ".join(f"seed {seed}: {reason}" for seed, reason in sorted(reasons.items()))


def _advise(needed: SeedsNeeded | None, pairs: int) -> str:
    """Advice on what would decide an inconclusive variant."""
    if needed is None:
        return (
            ". More seeds would not decide it: the gap is too close to the margin, or the spread too large. More steps "
            "change the gap, and a wider margin changes the question"
        )
    return (
        f". With the measured gap and spread, {needed.seeds} seeds (now {pairs}) would show "
        f"{'parity' if needed.claim == 'parity' else 'the difference'} with {POWER:.0%} power"
    )
