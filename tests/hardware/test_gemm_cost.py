"""The cost of one product: what must hold for any value of the constants."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import policyc
from policyc.hardware import gemm_cost
from policyc.language.recipes import Gemm, make_recipe
from policyc.numerics.targets import TARGETS, get_target

SIZES = st.integers(1, 20).map(lambda n: 2**n)
BY_WIDTH = ("f32", "bf16", "fp8", "nvfp4")


@settings(deadline=None, max_examples=50)
@given(SIZES, SIZES, SIZES, st.sampled_from(sorted(TARGETS)))
def test_a_wider_format_is_never_faster(m, n, k, name):
    target = get_target(name)
    times = [gemm_cost.gemm_seconds(target, f, m, n, k) for f in BY_WIDTH if target.is_native(f)]
    assert times == sorted(times, reverse=True)


def test_the_time_of_a_large_gemm_is_proportional_to_its_tokens():
    launch = gemm_cost.LAUNCH_SECONDS
    for name, format in (("h200", "fp8"), ("gb300", "nvfp4")):
        target = get_target(name)
        once, twice = (gemm_cost.gemm_seconds(target, format, m, 16384, 16384) for m in (8192, 16384))
        assert twice - launch == pytest.approx(2 * (once - launch), rel=1e-12)  # exact but for rounding


def test_a_tensor_is_quantized_as_often_as_the_numerics_need_it():
    def counts(recipe) -> list[int]:
        return [len(ways) for ways in gemm_cost.collect_quantizations(recipe, frozenset(Gemm)).values()]

    assert counts(make_recipe("fp8")) == [1, 1, 1]  # both products of a tensor share its codes
    assert counts(make_recipe("mxfp8")) == [2, 2, 2]
    full = policyc.parse("* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)")
    assert counts(full.resolver()(full.rules[0].recipe)) == [2, 1, 2]  # both products share 16x16 tiles
    assert counts(make_recipe("bf16")) == []
