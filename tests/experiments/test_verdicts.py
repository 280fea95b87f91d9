"""Verdicts on variants: what is claimed, what is not claimed after failures, and that error rates hold at the end."""

from __future__ import annotations

import numpy as np
import pytest

from policyc.experiments.statistics import Margin, parse_margin
from policyc.experiments.verdicts import Comparison, SeedLosses, Verdict, compare_variants

pytestmark = pytest.mark.any_jax

MARGIN = Margin(value=0.01, is_relative=False)
BASE = (2.50, 2.53, 2.47, 2.51, 2.49)
NOISE = (0.001, -0.001, 0.0005, -0.0004, 0.0)


def runs(name: str, gap: float = 0.0, noise: float = 1.0, **ends: dict[int, str]) -> SeedLosses:
    """Five seeds at a distance from the baseline; the seeds in `ends` have no loss."""
    lost = {seed for seeds in ends.values() for seed in seeds}
    losses = {
        seed: base + gap + noise * shift
        for seed, (base, shift) in enumerate(zip(BASE, NOISE, strict=True))
        if seed not in lost
    }
    return SeedLosses(name=name, losses=losses, **ends)


def compare(*variants: SeedLosses, baseline: SeedLosses | None = None) -> list[Comparison]:
    return list(compare_variants(baseline or runs("bf16", noise=0), variants, MARGIN))


def test_verdicts_follow_the_gap() -> None:
    parity, resolved, worse, better, unclear = compare(
        runs("parity"),
        runs("resolved", 0.003),
        runs("worse", 0.03),
        runs("better", -0.03),
        runs("unclear", 0.004, 30),
    )
    assert [c.verdict for c in (parity, resolved, worse, better)] == ["parity", "parity", "worse", "better"]
    assert "a difference of +0.0030 nats is resolved" in resolved.reason
    assert unclear.verdict is Verdict.INCONCLUSIVE
    assert unclear.needed is not None
    assert f"{unclear.needed.seeds} seeds (now 5) would show parity with 80% power" in unclear.reason
    assert unclear.detectable is not None
    assert worse.detectable is not None
    assert unclear.detectable > 20 * worse.detectable


def test_failed_seeds_forbid_parity_and_improvement_but_not_worse() -> None:
    lost = {1: "out of memory"}
    parity, better, worse = compare(
        runs("parity", failed=lost), runs("better", -0.03, failed=lost), runs("worse", 0.03, failed=lost)
    )
    assert [c.verdict for c in (parity, better, worse)] == ["inconclusive", "inconclusive", "worse"]
    for comparison in (parity, better, worse):
        assert comparison.seeds == (0, 2, 3, 4)
        assert f"1 of 5 seeds of {comparison.variant} failed (seed 1: out of memory)" in comparison.reason
        assert "runs failed seeds again, except those that diverged" in comparison.reason


def test_parity_names_the_interval_that_decides_it() -> None:
    """The 95 % interval may reach beyond the margin of a variant at parity."""
    gaps = (0.001, 0.003, 0.008, 0.004, 0.007)
    baseline = SeedLosses(name="bf16", losses=dict.fromkeys(range(5), 3.0) | {4: 3.001})
    losses = {seed: baseline.losses[seed] + gap for seed, gap in enumerate(gaps)}
    (row,) = compare_variants(baseline, [SeedLosses(name="v", losses=losses)], parse_margin("0.0078"))
    assert row.verdict is Verdict.PARITY
    assert row.interval is not None
    assert row.margin is not None
    assert row.interval[1] > row.margin
    from scipy import stats  # a second of import, which other tests do not need

    low, high = stats.ttest_1samp(gaps, 0).confidence_interval(0.9)
    assert row.parity_interval == pytest.approx((low, high), rel=1e-9)
    assert high < row.margin
    assert f"the 90% interval, which decides parity, is {low:+.4f} to {high:+.4f}" in row.reason


def test_a_failed_variant_counts_in_the_correction() -> None:
    alone, _ = compare(runs("a", 0.0015), SeedLosses(name="b", losses={}, failed={0: "x"}))
    (single,) = compare(runs("a", 0.0015))
    assert alone.p_difference == pytest.approx(2 * (single.p_difference or 0))


@pytest.mark.parametrize("side", ["variant", "baseline"])
def test_nothing_is_claimed_before_all_runs_have_ended(side: str) -> None:
    running = {4: "step 10 of 100"}
    variant = runs("v", 0.03, unfinished=running if side == "variant" else {})
    baseline = runs("bf16", noise=0, unfinished=running if side == "baseline" else {})
    (comparison,) = compare(variant, baseline=baseline)
    assert comparison.verdict is Verdict.INCONCLUSIVE
    waiting = "seed 4: step 10 of 100" if side == "variant" else "bf16 seed 4"
    assert f"no verdict until all runs have ended. Waiting for {waiting}." in comparison.reason
    assert comparison.gap == pytest.approx(0.03, abs=0.001)


def test_a_baseline_that_lost_seeds_decides_nothing() -> None:
    (comparison,) = compare(runs("v", 0.03), baseline=runs("bf16", noise=0, failed={0: "killed"}))
    assert comparison.verdict is Verdict.INCONCLUSIVE
    assert "1 of 5 seeds of bf16 failed" in comparison.reason


def test_seeds_without_effect_are_not_independent_runs() -> None:
    same = SeedLosses(name="v", losses=dict.fromkeys(range(5), 2.6))
    (comparison,) = compare(same, baseline=SeedLosses(name="bf16", losses=dict.fromkeys(range(5), 2.5)))
    assert comparison.verdict is Verdict.INCONCLUSIVE
    assert "does not use its seed" in comparison.reason


def test_one_seed_gives_a_gap_and_no_verdict() -> None:
    (comparison,) = compare(
        SeedLosses(name="v", losses={0: 2.6}), baseline=SeedLosses(name="bf16", losses={0: 2.5})
    )
    assert comparison.verdict is Verdict.INCONCLUSIVE
    assert comparison.interval is None
    assert comparison.gap == pytest.approx(0.1)
    assert "1 seed in common with bf16" in comparison.reason


def test_wrong_verdicts_of_whole_sweeps_stay_below_the_level() -> None:
    # Each sweep has variants without effect, which must not be called better or worse, and variants far beyond the
    # margin, which must not be called parity. 400 sweeps: a rate of 0.05 has a standard error of 0.011; allow four.
    generator = np.random.default_rng(3)
    wrong_difference = wrong_parity = 0
    for _ in range(400):
        base = 2.5 + 0.03 * generator.standard_normal(4)
        gaps = {"a": 0.0, "b": 0.0, "c": 0.011, "d": -0.011}
        variants = [
            SeedLosses(name=name, losses=dict(enumerate(base + gap + 0.004 * generator.standard_normal(4))))
            for name, gap in gaps.items()
        ]
        verdicts = [
            c.verdict
            for c in compare_variants(SeedLosses(name="bf16", losses=dict(enumerate(base))), variants, MARGIN)
        ]
        wrong_difference += any(v in ("better", "worse") for v in verdicts[:2])
        wrong_parity += any(v == "parity" for v in verdicts[2:])
    assert wrong_difference / 400 <= 0.05 + 4 * 0.011
    assert wrong_parity / 400 <= 0.05 + 4 * 0.011
