"""The statistics of sweeps against simulated sweeps with known effects, and against scipy.stats.

A rate of N simulated sweeps has a binomial standard error of sqrt(p (1 - p) / N). Tests allow four of them: with fixed
seeds nothing is left to chance, and a wrong formula is off by far more.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from policyc.experiments.statistics import (
    Margin,
    adjust_holm,
    difference_p_value,
    equivalence_interval,
    equivalence_p_value,
    paired_interval,
    parse_margin,
    seeds_needed,
    smallest_detectable_effect,
)

pytestmark = pytest.mark.any_jax

SWEEPS = 20_000
NATS = Margin(value=0.01, is_relative=False)


def binomial_tolerance(rate: float, sweeps: int = SWEEPS) -> float:
    return 4 * math.sqrt(rate * (1 - rate) / sweeps)


def simulate(gaps: list[float], seeds: int, deviation: float = 0.006) -> tuple[np.ndarray, np.ndarray]:
    """Losses of variants (sweep, variant, seed), and of their baseline (sweep, 1, seed), by seed.

    A seed moves baseline and variants together, five times as far as a variant moves by itself.
    """
    generator = np.random.default_rng(len(gaps) * 100 + seeds)
    by_seed = 2.5 + 5 * deviation * generator.standard_normal((SWEEPS, 1, seeds))
    by_run = deviation * generator.standard_normal((SWEEPS, len(gaps), seeds))
    return by_seed + np.array(gaps)[:, None] + by_run, by_seed


@pytest.mark.parametrize("margin", [NATS, Margin(value=0.004, is_relative=True)])  # both are 0.01 nats at 2.5
@pytest.mark.parametrize("side", [1, -1])
def test_parity_is_claimed_on_the_margin_at_the_level(margin: Margin, side: int) -> None:
    # Where the margin is wide for the spread, the other bound rejects always, and the rate is the level itself.
    variant, baseline = simulate([side * 0.01], 5, deviation=0.002)
    p = equivalence_p_value(variant[:, 0], baseline[:, 0], margin)
    assert np.mean(p < 0.05) == pytest.approx(0.05, abs=binomial_tolerance(0.05))


def test_the_smallest_detectable_effect_is_found_with_its_power() -> None:
    effect = float(smallest_detectable_effect(0.006, 5, alpha=0.01))
    variant, baseline = simulate([effect], 5)
    p = difference_p_value((variant - baseline)[:, 0])
    assert np.mean(p < 0.01) == pytest.approx(0.8, abs=binomial_tolerance(0.8))


@pytest.mark.parametrize(("gap", "claim"), [(0.0, "parity"), (0.02, "difference")])
def test_the_advised_seeds_decide_a_variant_with_the_power(gap: float, claim: str) -> None:
    # Losses whose mean difference and spread are exactly the true ones.
    pattern = np.array([1.0, -1.0, 0.0]) * 0.012
    needed = seeds_needed(2.5 + gap + pattern, np.full(3, 2.5), NATS, variants=3)
    assert needed is not None
    assert needed.claim == claim
    variant, baseline = simulate([gap], needed.seeds, deviation=0.012)
    p = (
        equivalence_p_value(variant[:, 0], baseline[:, 0], NATS)
        if claim == "parity"
        else difference_p_value((variant - baseline)[:, 0])
    )
    power = np.mean(p < 0.05 / 3)
    assert power >= 0.8 - binomial_tolerance(0.8)
    assert power < 0.9  # one seed fewer would have less than 0.8


def test_a_gap_on_the_margin_that_is_lost_in_noise_needs_more_seeds_than_anyone_runs() -> None:
    losses = 2.5 + 0.01 + np.array([1.0, -1.0, 0.0])
    assert seeds_needed(losses, np.full(3, 2.5), NATS, variants=1) is None


def test_p_values_and_intervals_agree_with_scipy() -> None:
    from scipy import stats  # a second of import, which other tests do not need

    generator = np.random.default_rng(1)
    baseline = generator.normal(2.5, 0.03, 5)
    variant = baseline + generator.normal(0.004, 0.003, 5)
    test = stats.ttest_rel(variant, baseline)
    assert difference_p_value(variant - baseline) == pytest.approx(test.pvalue, rel=1e-9)
    assert np.array(paired_interval(variant - baseline)) == pytest.approx(
        np.array(test.confidence_interval(0.95)), rel=1e-9
    )
    upper = stats.ttest_rel(variant, baseline + 0.01, alternative="less").pvalue
    lower = stats.ttest_rel(variant, baseline - 0.01, alternative="greater").pvalue
    assert equivalence_p_value(variant, baseline, NATS) == pytest.approx(max(upper, lower), rel=1e-9)


def test_holm_multiplies_in_order_and_counts_variants_without_a_test() -> None:
    # Holm (1979): 0.01 x 4, 0.02 x 3 = 0.06, 0.03 x 2 = 0.06, and the variant that failed.
    assert adjust_holm([0.03, 0.01, math.nan, 0.02]) == pytest.approx(
        [0.06, 0.04, math.nan, 0.06], nan_ok=True
    )
    assert adjust_holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])


def test_equal_losses_are_parity_without_a_division() -> None:
    losses = np.array([2.5, 2.6, 2.4])
    assert difference_p_value(losses - losses) == 1
    assert equivalence_p_value(losses, losses, NATS) == 0


def test_a_margin_is_nats_or_a_percentage() -> None:
    assert parse_margin("0.01") == parse_margin("0.01 nats") == NATS
    assert parse_margin("0.5%").in_nats(2.0) == pytest.approx(0.01)
    assert str(parse_margin("0.5%")) == "0.5%"
    for text in ("", "0", "-1", "1e999", "0.5 percent", "1..2", "nan"):
        with pytest.raises(ValueError, match="is not a margin"):
            parse_margin(text)


@pytest.mark.parametrize(
    "margin", [Margin(value=0.01, is_relative=False), Margin(value=0.003, is_relative=True)]
)
def test_the_interval_of_parity_is_inside_the_margin_where_the_test_says_so(margin: Margin) -> None:
    random = np.random.default_rng(3)
    decided = set()
    for _ in range(300):
        baseline = 3 + random.normal(0, 0.2, 5)
        variant = baseline + random.normal(0.004, 0.005, 5)
        width = margin.in_nats(float(baseline.mean()))
        low, high = equivalence_interval(variant, baseline, margin, 0.05)
        is_inside = -width < low and high < width
        assert is_inside == (equivalence_p_value(variant, baseline, margin) < 0.05)
        decided.add(is_inside)
    assert decided == {True, False}
