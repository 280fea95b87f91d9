"""The cost of one product: what must hold for any value of the constants."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import policyc
from policyc.hardware import gemm_cost
from policyc.language.recipes import Gemm, Recipe, Role, Treatment, make_recipe
from policyc.numerics.targets import TARGETS, get_target

pytestmark = pytest.mark.any_jax

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


def resolve(text: str) -> Recipe:
    policy = policyc.parse(f"* -> {text}")
    return policy.resolver()(policy.rules[0].recipe)


def test_a_tensor_is_quantized_as_often_as_the_numerics_need_it():
    def counts(recipe) -> list[int]:
        return [len(ways) for _, ways in gemm_cost.collect_quantizations(recipe, frozenset(Gemm))]

    assert counts(make_recipe("fp8")) == [1, 1, 1]  # both products of a tensor share its codes
    assert counts(resolve("split(fprop=fp8(sums=fast), dgrad=fp8, wgrad=fp8)")) == [1, 1, 1]
    assert counts(resolve("fp8(outer=row)")) == [2, 2, 2]  # rows of a product are columns of the other
    assert counts(make_recipe("mxfp8")) == [2, 2, 2]
    full = resolve("nvfp4(rht=wgrad, sr=grad, scale2d=weights)")
    assert counts(full) == [2, 1, 2]  # both products share 16x16 tiles
    assert counts(make_recipe("bf16")) == []
    # Each GEMM has its own fresh signs, and a weight that is rounded to nearest is quantized before all others.
    assert counts(resolve("split(fprop=nvfp4, dgrad=nvfp4(rounding=ms_eden), wgrad=nvfp4)")) == [
        2,
        1,
        1,
        1,
        1,
    ]


ROWS = Treatment(format="nvfp4", element="e2m1")
ROTATED = replace(ROWS, rht=16)
FOUR_OVER_SIX = replace(ROWS, scale="four_over_six")
MS_EDEN = replace(ROWS, rht=128, rounding="ms_eden")
FP8 = make_recipe("fp8").treatments[0]
CODES = 0.5 + 1 / 16


@pytest.mark.parametrize(
    ("backend", "treatments", "slowdown", "reads", "written", "rotation"),
    [
        pytest.param("te", [ROWS, ROTATED], 1.1, 3, 2 * CODES, 0, id="te, rotated: maximum, rows, columns"),
        pytest.param("te", [ROWS, ROWS], 1.1, 1, 2 * CODES, 0, id="te: rows and columns at once"),
        pytest.param("te", [ROWS], 1.1, 1, CODES, 0, id="te: rows"),
        pytest.param("xla", [ROWS, ROTATED], 2, 2, 2 * CODES, 0, id="xla, rotated: maxima, both codes"),
        pytest.param("xla", [ROWS, ROWS], 2, 2, 2 * CODES, 0, id="xla, rows and columns: maxima, both codes"),
        pytest.param("xla", [FOUR_OVER_SIX], 1.4, 2, CODES, 0, id="xla, four-over-six: maxima, codes"),
        pytest.param(
            "xla", [MS_EDEN], 1.5, 2, CODES, 6, id="xla, MS-EDEN: fp32 between product and rounding"
        ),
        pytest.param(
            "xla", [FOUR_OVER_SIX, ROTATED], 2, 4, 2 * CODES, 0, id="xla: each by kernels of its own"
        ),
        pytest.param(
            "xla", [replace(ROWS, rht=64)], 1.4, 2, CODES, 2, id="xla: a product that rounds itself"
        ),
        pytest.param(
            "emulate", [ROWS, ROTATED], 2, 2, 2 * CODES, 0, id="emulate, as xla: maxima, both codes"
        ),
        pytest.param("xla", [FP8], 1, 1, 1, 0, id="fp8"),
    ],
)
def test_a_quantizer_moves_the_bytes_of_its_kernels(backend, treatments, slowdown, reads, written, rotation):
    """A GB200 copies 0.62 of 8 TB/s, and a kernel takes 3 us or longer.

    `rotation` is how often XLA moves the bytes of the operand to rotate it: in compiled steps under quartet2, it reads
    the operand, writes it in fp32, reads that, and writes it in bf16.
    """
    target, elements = get_target("gb200"), 1e9
    seconds = gemm_cost.quantize_seconds(target, treatments, elements, backend)
    moved = slowdown * (2 * reads + written) + 2 * rotation
    assert seconds == pytest.approx(
        elements * moved / (0.62 * 8e12) + reads * 3e-6, rel=1e-12
    )  # but for rounding


def test_kernels_move_bytes_as_fast_as_a_copy_on_hopper():
    """Measured: 131072 x 512 numbers in 0.112 ms, with 2 bytes read and 2 + CODES written for each."""
    h200 = get_target("h200")
    measured = 0.112e-3 / gemm_cost.copy_seconds(h200, 131072 * 512 * (4 + CODES))
    for treatments in ([ROTATED], [ROWS, ROWS]):
        (kind,) = gemm_cost.quantizer_kinds(treatments, "emulate")
        assert gemm_cost.quantizer_slowdown(h200, kind, "emulate") == pytest.approx(measured, abs=0.05)
        assert gemm_cost.quantizer_slowdown(get_target("gb200"), kind, "emulate") == 2


@pytest.mark.parametrize(("gemm", "decoded"), [(Gemm.FPROP, 0), (Gemm.DGRAD, 0), (Gemm.WGRAD, 3e9)])
def test_an_emulated_product_reads_values_and_its_result_again(gemm, decoded):
    """Values are written in place of codes, but those of a saved activation are decoded. The bandwidth is a copy's."""
    shape = {"rows": 3e4, "columns": 2e4, "contracted": 1e5}
    values = 3e9 + 2e9 - decoded
    moved_bytes = values * (2 - CODES) + decoded * (2 + CODES)
    hopper, blackwell = (gemm_cost.emulation_seconds(get_target(t), gemm, **shape) for t in ("h200", "gb200"))
    assert hopper == pytest.approx(moved_bytes / (0.62 * 4.8e12)), "the kernel for Hopper writes bf16"
    assert blackwell == pytest.approx((moved_bytes + 4 * 3e4 * 2e4) / (0.62 * 8e12))


@pytest.mark.parametrize(
    ("recipe", "writes_fp32"),
    [
        ("fp8", False),
        ("fp8(outer=row)", True),
        ("mxfp8", False),
        ("nvfp4", True),
    ],
)
def test_results_to_scale_are_written_and_read_in_fp32(recipe, writes_fp32):
    """Two more bytes are written for each, and two more are read."""
    seconds = gemm_cost.outer_scale_seconds(get_target("h200"), resolve(recipe).treatments, 1e9)
    assert seconds == pytest.approx(4e9 / (0.62 * 4.8e12) if writes_fp32 else 0)


def test_a_tensor_that_is_not_computed_is_read_for_its_maximum():
    target = get_target("gb200")
    for treatment in (ROWS, FP8):
        computed, read = (
            gemm_cost.quantize_seconds(target, [treatment], 1e9, "te", is_computed=is_computed)
            for is_computed in (True, False)
        )
        assert read - computed == pytest.approx(1.1 * 2e9 / (0.62 * 8e12) + 3e-6)


def test_scales_of_blocks_alone_need_no_maximum_of_the_tensor():
    target = get_target("gb200")
    activation, weight, gradient, *_ = resolve("nvfp4(block_scale=ue5m3)").treatments
    for treatment, needs_maximum in ((activation, False), (weight, False), (gradient, True)):
        computed, read = (
            gemm_cost.quantize_seconds(target, [treatment], 1e9, "xla", is_computed=is_computed)
            for is_computed in (True, False)
        )
        assert (read > computed) == needs_maximum
    assert gemm_cost.outer_scale_seconds(target, [activation, weight], 1e9) == 0


def test_weights_that_share_a_scale_are_read_once_more():
    """For the maximum of all of them, before any of them is quantized."""
    target, products = get_target("gb200"), frozenset(Gemm)
    for recipe in ("nvfp4(scale2d=weights{})", "fp8({})"):
        own, shared = (
            gemm_cost.collect_quantizations(resolve(recipe.format(option)), products)
            for option in ("", ", outer=shared" if "2d" in recipe else "outer=shared")
        )
        for (role, one), (_, other) in zip(own, shared, strict=True):
            times = [gemm_cost.quantize_seconds(target, t, 1e9, "xla") for t in (one, other)]
            assert (times[1] > times[0]) == (role is Role.WEIGHT)
            if role is not Role.WEIGHT:
                assert times[0] == times[1]


def test_operands_that_are_decoded_are_multiplied_in_bf16_and_kept_as_codes():
    recipe = resolve("nvfp4(scale2d=weights, backward=dequantized)")
    formats = [gemm_cost.product_format(recipe, gemm, "f32") for gemm in Gemm]
    assert formats == ["nvfp4", "bf16", "bf16"]
    assert gemm_cost.collect_quantizations(recipe, frozenset(Gemm)) == [
        (role, (recipe.treatment(Gemm.FPROP, role),)) for role in (Role.ACTIVATION, Role.WEIGHT)
    ]
    for gemm, role in ((Gemm.DGRAD, Role.WEIGHT), (Gemm.WGRAD, Role.ACTIVATION)):
        assert recipe.stored_treatment(gemm, role) == recipe.treatment(Gemm.FPROP, role)
