"""Bit for bit against the vendor's reference vectors: op by op, compiled, and inside larger programs.

The quantizers have two implementations, one for CPU and one for other platforms. All cases of a treatment run as one
batch, on the first one by themselves and on the second inside a larger program. On the newest JAX, rows run inside the
larger program, and columns by themselves. test_quantize.py compares both in larger programs with an oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policyc.numerics.quantize
from policyc.hardware.selftest.golden import (
    COLUMNS,
    ROWS,
    SHAPE,
    load_tensor,
    read_arrays,
    read_cases,
    treatment_of,
)
from policyc.language.recipes import Treatment
from policyc.numerics.quantize import Axes, Quantized, quantize
from policyc.numerics.quantize.reference.bits import E2M1, E4M3, round_nearest, round_stochastic, sign_bit
from policyc.numerics.quantize.reference.hadamard import Method, rotate
from tests.support.gemms import slow
from tests.support.quick_options import quick_compilation

pytestmark = pytest.mark.full_compile

CASES, REFERENCE = read_cases(), read_arrays()
KERNEL = np.load(Path(__file__).parents[1] / "data" / "nvfp4_kernel_semantics.npz")

DENORMAL = ("tiny1e_36", "min_normal", "denorm", "min_denorm")
"""Tensors whose decoding scale is an fp32 denormal: their bits are not specified."""

NONFINITE = [c for c, m in CASES.items() if "nonfinite" in m["tags"]]
EXACT = [c for c in CASES if c + "/q" in REFERENCE and not c.startswith("4over6")]
EAGER = "normal_16x16_bfloat16_1d"
# Compiled, since they would take longer than the test if they ran op by op.
codes_of, dequantize = (
    jax.jit(policyc.numerics.quantize.codes_of),
    jax.jit(policyc.numerics.quantize.dequantize),
)
block_values = jax.jit(policyc.numerics.quantize.block_values, static_argnums=1)

HERE: Method = "cpu" if jax.default_backend() == "cpu" else "matmul_bf16"
"""The implementation for the machine that runs the tests. The one for CPU is exact nowhere else."""


class Result(NamedTuple):
    """A quantized case in the form of the vectors: packed codes, one scale per row and block, amax, values."""

    codes: np.ndarray
    scales: np.ndarray
    amax: np.ndarray
    values: np.ndarray


def as_result(q: Quantized) -> Result:
    """The vectors repeat the scales of 2D tiles for each row."""
    axis, tile_axis = q.layout.axis, q.layout.tile_axis
    scales = np.asarray(q.scales)
    if tile_axis is not None:
        scales = np.repeat(scales, 16, tile_axis).take(range(q.layout.tile_size), tile_axis)
    codes, values = np.asarray(q.codes), np.asarray(dequantize(q))
    if axis == -2:
        codes, scales, values = codes.T, scales.T, values.T
    return Result(codes, scales, np.ravel(q.amax), values)


# --- programs -------------------------------------------------------------------------------------


@cache
def compiled(treatment: Treatment, axes: Axes = ROWS, method: Method = HERE) -> Any:
    return jax.jit(partial(quantize, treatment=treatment, axes=axes, method=method))


@cache
def fused(treatment: Treatment, axes: Axes, method: Method) -> Any:
    """A larger program around the quantizer: XLA can fuse it with producers and consumers."""

    def program(x: jax.Array) -> tuple[Quantized, jax.Array]:
        # A power of two that neither overflows nor underflows. XLA does not know it.
        largest = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=(-2, -1), keepdims=True)
        factor = jnp.where(largest > 1e37, jnp.float32(0.5), jnp.float32(2))
        # XLA must keep the first term, which might be NaN. It keeps the sign of a zero.
        scaled = jnp.clip(x.astype(jnp.float32), -1, 1) * 0 + x.astype(jnp.float32) * factor
        q = quantize((scaled / factor).astype(x.dtype), treatment, axes, method=method)
        return q, jnp.sum(dequantize(q)) + jnp.sum(block_values(q).astype(jnp.float32))

    run = jax.jit(program)
    return lambda x: run(x)[0]


def run_batched(cases: list[str], run: Callable[[np.ndarray], Quantized]) -> dict[str, Result]:
    """Runs cases of one treatment and dtype as a batch: each index of the batch is one tensor."""
    arrays = [load_tensor(c) for c in cases]
    padded = [np.pad(x, [(0, n - m) for m, n in zip(x.shape, SHAPE, strict=True)]) for x in arrays]
    q = jax.tree.map(np.asarray, run(np.stack(padded)))
    values = np.asarray(dequantize(q))
    results = {}
    for i, (case, x) in enumerate(zip(cases, arrays, strict=True)):
        rows, columns = x.shape
        codes, scales, value, amax = q.codes[i], q.scales[i], values[i, :rows, :columns], q.amax[i]
        if q.layout.axis == -2:
            codes, scales, value, rows, columns = codes.T, scales.T, value.T, columns, rows
        if q.layout.tile_axis is not None:
            scales = np.repeat(scales, 16, 0)
        # A scale per row has as many as the padded shape.
        amax = np.ravel(amax)[:rows] if amax.size > 1 else np.ravel(amax)
        results[case] = Result(codes[:rows, : columns // 2], scales[:rows, : columns // 16], amax, value)
    return results


@cache
def fused_batch(treatment: Treatment, dtype: str, method: Method) -> dict[str, Result]:
    cases = [c for c in EXACT if (treatment_of(c), str(load_tensor(c).dtype)) == (treatment, dtype)]
    return run_batched(cases, fused(treatment, Axes(axis=-1, tile=-2, batch=(-3,)), method))


@cache
def row_batch(treatment: Treatment, dtype: str, method: Method) -> dict[str, Result]:
    cases = [c for c in EXACT if (treatment_of(c), str(load_tensor(c).dtype)) == (treatment, dtype)]
    return run_batched(cases, compiled(treatment, Axes(axis=-1, tile=-2, batch=(-3,)), method))


@cache
def column_batch(treatment: Treatment, dtype: str) -> dict[str, Result]:
    """Along the columns, in place."""
    cases = [c for c in COLUMN_CASES if (wgrad_treatment(c), str(load_tensor(c).dtype)) == (treatment, dtype)]
    return run_batched(cases, compiled(treatment, Axes(axis=-2, tile=-1, batch=(-3,))))


# --- whole tensors --------------------------------------------------------------------------------


def check(result: Result, case: str, x: np.ndarray, suffix: str = "", amax: str = "/amax_row") -> None:
    np.testing.assert_array_equal(result.scales, REFERENCE[f"{case}/s{suffix}"])
    np.testing.assert_array_equal(result.amax, REFERENCE[case + amax])
    check_codes(result.codes, REFERENCE[f"{case}/q{suffix}"], x)


def check_codes(mine: np.ndarray, theirs: np.ndarray, x: np.ndarray) -> None:
    """An input of -0.0 has code 8 here, as in the kernels, and code 0 in the reference. The same is true of a negative
    denormal whose product with the scale underflows.
    """
    theirs = np.stack([theirs & 15, theirs >> 4], -1).reshape(x.shape)
    mine = np.stack([mine & 15, mine >> 4], -1).reshape(x.shape)
    is_negative_zero = (np.abs(x.astype(np.float32)) < 1e-44) & np.signbit(x.astype(np.float32))
    np.testing.assert_array_equal(mine[~is_negative_zero], theirs[~is_negative_zero])
    assert (mine[is_negative_zero] == 8).all()


def is_slow(case: str) -> list[pytest.MarkDecorator]:
    """Float32 tensors, each of whose programs takes a second to compile, show the least."""
    return [pytest.mark.slow] * (load_tensor(case).dtype == np.float32)


EXECUTIONS = [
    (EAGER, "eager", "matmul"),
    (EAGER, "jit", HERE),
    *(pytest.param(c, "batch", HERE, marks=[pytest.mark.any_jax, *is_slow(c)]) for c in EXACT),
    *(pytest.param(c, "fused batch", "matmul", marks=is_slow(c)) for c in EXACT),
]


@pytest.mark.parametrize(("case", "execution", "method"), EXECUTIONS)
def test_rows_equal_the_reference(case: str, execution: str, method: Method) -> None:
    x, t = load_tensor(case), treatment_of(case)
    if execution == "eager":
        # Op by op, every operation is a program of its own: there is nothing to fuse, and optimizing changes no bit.
        with quick_compilation():
            result = as_result(quantize(jnp.asarray(x), t, ROWS, method=method))
    elif execution == "batch":
        result = row_batch(t, str(x.dtype), method)[case]
    elif execution == "fused batch":
        result = fused_batch(t, str(x.dtype), method)[case]
    else:
        result = as_result(compiled(t, ROWS, method)(x))
    check(result, case, x)
    if case + "/dq" in REFERENCE:
        np.testing.assert_array_equal(result.values, REFERENCE[case + "/dq"])


COLUMN_CASES = [c for c in EXACT if c + "/q_t" in REFERENCE and CASES[c]["random_sign"]]
TRANSPOSED = [c for c in COLUMN_CASES if "32x64" in c or "rht" in c][:2]


def wgrad_treatment(case: str) -> Treatment:
    return treatment_of(case, rotated=CASES[case]["rht"])


COLUMN_EXECUTIONS = [
    *(pytest.param(c, "batch", HERE, marks=is_slow(c)) for c in COLUMN_CASES),
    *(slow(c, "transposed", HERE) for c in TRANSPOSED),
    *(slow(c, "in place", "matmul") for c in COLUMN_CASES[::12]),
]


@pytest.mark.any_jax
@pytest.mark.parametrize(("case", "execution", "method"), COLUMN_EXECUTIONS)
def test_columns_equal_the_reference(case: str, execution: str, method: Method) -> None:
    """The operands of wgrad: along the first axis in place, or along the last axis of the transpose."""
    x, t = load_tensor(case), wgrad_treatment(case)
    if execution == "batch":
        result = column_batch(t, str(x.dtype))[case]
    elif execution == "transposed":
        result = as_result(compiled(t, ROWS, method)(x.T))
    else:
        result = as_result(compiled(t, COLUMNS, method)(x))
    check(result, case, x.T, "_t", "/amax_col")
    if case + "/dq_t" in REFERENCE:
        np.testing.assert_array_equal(result.values, REFERENCE[case + "/dq_t"])


# --- the transform --------------------------------------------------------------------------------


@pytest.mark.any_jax
@pytest.mark.parametrize("case", [c for c in CASES if c + "/x_t_rht" in REFERENCE])
@pytest.mark.parametrize("method", ["matmul", "matmul_bf16"])
def test_rotation_equals_the_reference(case: str, method: Any) -> None:
    signs = None if CASES[case]["random_sign"] else jnp.ones(16)
    rotated = jax.jit(partial(rotate, axis=0, size=16, signs=signs, method=method))(load_tensor(case))
    np.testing.assert_array_equal(np.asarray(rotated).view(np.uint16).T, REFERENCE[case + "/x_t_rht"])


@pytest.mark.any_jax
def test_rotation_of_the_identity_is_the_reference_matrix() -> None:
    rotated = jax.jit(partial(rotate, axis=1, size=16))(np.eye(16, dtype=np.float32))
    np.testing.assert_array_equal(np.asarray(rotated, np.float32), REFERENCE["rht_matrix_f32"])


# --- scales, kernels, special values --------------------------------------------------------------


@pytest.mark.any_jax
@pytest.mark.parametrize("case", [c for c in EXACT if c + "/s" in KERNEL])
def test_codes_and_scales_equal_those_of_the_kernels(case: str) -> None:
    """Negative zeros included: their code is that of the kernels."""
    q = compiled(treatment_of(case))(load_tensor(case))
    np.testing.assert_array_equal(np.asarray(q.codes), KERNEL[case + "/q"])
    np.testing.assert_array_equal(np.asarray(q.scales), KERNEL[case + "/s"])


@pytest.mark.any_jax
@pytest.mark.parametrize("case", [pytest.param(c, marks=is_slow(c)) for c in NONFINITE])
def test_nonfinite_tensors_become_nan(case: str) -> None:
    """Unlike in the kernels, one NaN or infinity makes every value of the tensor NaN."""
    q = compiled(treatment_of(case))(load_tensor(case))
    assert np.isnan(np.asarray(dequantize(q))).all()
    assert np.isnan(np.asarray(block_values(q), np.float32)).all()


@pytest.mark.any_jax
@pytest.mark.parametrize("case", [c for c in CASES if c.startswith(DENORMAL)])
def test_tensors_with_a_denormal_scale_are_accurate(case: str) -> None:
    """Values are finite, and as near as four bits allow: an element is off by at most a twelfth of the maximum of its
    block (half the widest step, 1, over 6), and by 1/16 of that again from the rounding of the scale. The CPU reads
    denormal inputs as zeros.
    """
    x = load_tensor(case).astype(np.float64)
    t = treatment_of(case)
    q = compiled(t)(load_tensor(case))
    m, e = np.frexp(np.float64(np.asarray(q.amax).item()))
    blocks = np.asarray(block_values(q, jnp.float32)).astype(np.float64)
    values = blocks * (np.ldexp(m, e) / 2688)
    assert np.isfinite(np.asarray(dequantize(q))).all()
    if np.abs(x).max() < 2.0**-126:
        return
    is_normal = np.abs(x) >= 2.0**-126
    top = np.abs(x).max() if t.tile2d else np.abs(x).reshape(len(x), -1, 16).max(-1).repeat(16, -1)
    assert (np.abs(values - x)[is_normal] <= (top * np.ones_like(x))[is_normal] * (1 / 6 + 1 / 16)).all()


# --- rounding -------------------------------------------------------------------------------------


@pytest.mark.any_jax
def test_conversions_equal_those_of_the_kernels() -> None:
    x = KERNEL["conv/x"]

    def convert(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        e2m1 = round_nearest(jnp.abs(x), E2M1) | sign_bit(x, E2M1)
        e4m3 = round_nearest(jnp.abs(x), E4M3) | sign_bit(x, E4M3)
        return e2m1, e4m3

    is_number = ~np.isnan(x)
    for f in (convert, jax.jit(convert)):
        e2m1, e4m3 = (np.asarray(c) for c in f(jnp.asarray(x)))
        np.testing.assert_array_equal(e2m1[is_number], KERNEL["conv/e2m1"][is_number])
        np.testing.assert_array_equal(e4m3[is_number], KERNEL["conv/e4m3"][is_number])


@pytest.mark.any_jax
def test_stochastic_rounding_equals_that_of_the_kernels() -> None:
    """For all 256 random bytes. A NaN saturates, as in the kernels; the scale carries it."""
    x = jnp.asarray(KERNEL["sr/x"])[:, None]
    byte = jnp.arange(256, dtype=jnp.int32)[None]
    codes = jax.jit(lambda x: round_stochastic(jnp.abs(x), byte, 8, E2M1) | sign_bit(x, E2M1))(x)
    np.testing.assert_array_equal(np.asarray(codes), KERNEL["sr/e2m1"])


@pytest.mark.any_jax
def test_four_over_six_and_its_oracle_equal_the_reference() -> None:
    """The vectors choose by the sum of absolute errors, with block scales up to 448."""
    from tests.support.rounding_oracle import four_over_six, pack

    case = "4over6_mae448_64x128_bf16_1d"
    options = {"scale": "four_over_six", "scale_error": "mae", "scale_bound": 448}
    ours = jax.jit(partial(quantize, treatment=replace(treatment_of(case), **options)))(load_tensor(case))
    np.testing.assert_array_equal(ours.scales, REFERENCE[case + "/s"])
    np.testing.assert_array_equal(ours.codes, REFERENCE[case + "/q"])
    theirs = four_over_six(load_tensor(case), bound=448, error="mae")
    np.testing.assert_array_equal(theirs["scales"], REFERENCE[case + "/s"])
    np.testing.assert_array_equal(pack(theirs["codes"]), REFERENCE[case + "/q"])


@pytest.mark.any_jax
def test_the_docs_claim_no_more_than_the_vectors_cover() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "status.md"
    if not page.exists():
        pytest.skip("an installed package has no docs")
    treatments = {case: treatment_of(case, rotated=m["rht"]) for case, m in CASES.items()}
    counts = {
        "reference vectors": len(CASES),
        "with 16x16 tiles": sum(t.tile2d for t in treatments.values()),
        "rotated": sum(t.rht > 0 for t in treatments.values()),
        "with a scale per row": sum(t.outer == "row" for t in treatments.values()),
        "with four-over-six scales": sum(case.startswith("4over6") for case in CASES),
    }
    assert {t.format for t in treatments.values()} == {"nvfp4"}
    text = " ".join(page.read_text(encoding="utf-8").split())
    for name, count in counts.items():
        assert f"{count} {name}" in text
