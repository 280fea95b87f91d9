"""Bit for bit against the vendor's reference vectors, op by op, compiled, and inside larger programs.

There are two bodies, one for CPUs and one for all else. The fast lane runs each case alone in the first, and inside a
larger program in the second; the slow lane the other way round.
"""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import policyc.numerics.quantize
from policyc.language.recipes import Treatment
from policyc.numerics.quantize import Axes, Quantized, quantize, swizzle
from policyc.numerics.quantize.bits import E2M1, E4M3, round_nearest, round_stochastic, sign_bit
from policyc.numerics.quantize.hadamard import Method, rotate

DATA = Path(__file__).parents[1] / "data"
CASES: dict[str, dict[str, Any]] = json.loads((DATA / "nvfp4_reference.json").read_text())
REFERENCE = np.load(DATA / "nvfp4_reference.npz")
KERNEL = np.load(DATA / "nvfp4_kernel_semantics.npz")

DENORMAL = ("tiny1e_36", "min_normal", "denorm", "min_denorm")
"""Tensors whose decoding scale is an fp32 denormal: no bits are promised."""

NONFINITE = [c for c, m in CASES.items() if "nonfinite" in m["tags"]]
EXACT = [c for c in CASES if c + "/q" in REFERENCE and not c.startswith("4over6")]
FUSED = [c for c in EXACT if "1e38" not in c and "fltmax" not in c]
EAGER = "normal_16x16_bfloat16_1d"
EAGER_TOO = ("ties_and_scale_rounding_16x32_f32_1d", "lognormal_64x128_f32_2d")
AXES = Axes(axis=-1, tile=-2)
# Compiled: op by op they would cost more than what is tested.
codes_of, dequantize = (
    jax.jit(policyc.numerics.quantize.codes_of),
    jax.jit(policyc.numerics.quantize.dequantize),
)
block_values = jax.jit(policyc.numerics.quantize.block_values, static_argnums=1)


def load(case: str) -> np.ndarray:
    x = REFERENCE[case + "/x"]
    return x.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else x


def treatment_of(case: str, *, rotated: bool = False) -> Treatment:
    return Treatment(
        format="nvfp4",
        element="e2m1",
        tile2d=CASES[case]["tile"][0] == 16,
        rht=16 if rotated else 0,
        outer="row" if case.startswith("rowscaled") else "tensor",
    )


HERE: Method = "cpu" if jax.default_backend() == "cpu" else "matmul_bf16"
"""The body of the machine that the tests run on; the one for CPUs is exact nowhere else."""


@cache
def compiled(treatment: Treatment, axes: Axes = AXES, method: Method = HERE) -> Any:
    return jax.jit(partial(quantize, treatment=treatment, axes=axes, method=method))


@cache
def fused(treatment: Treatment, method: Method) -> Any:
    return jax.jit(partial(buried, treatment=treatment, method=method))


def rows(q: Quantized, count: int) -> np.ndarray:
    """Scales of 2D tiles are repeated over their rows in the vectors."""
    s = np.asarray(q.scales)
    return np.repeat(s, 16, 0)[:count] if q.layout.tile_axis is not None else s


def codes_equal(mine: np.ndarray, theirs: np.ndarray, x: np.ndarray) -> None:
    """An input of -0.0 is code 8 here, as in the kernels, and 0 in the reference; so is a negative denormal
    whose product with the scale underflows.
    """
    theirs = np.stack([theirs & 15, theirs >> 4], -1).reshape(x.shape)
    mine = np.stack([mine & 15, mine >> 4], -1).reshape(x.shape)
    negative_zero = (np.abs(x.astype(np.float32)) < 1e-44) & np.signbit(x.astype(np.float32))
    np.testing.assert_array_equal(mine[~negative_zero], theirs[~negative_zero])
    assert (mine[negative_zero] == 8).all()


def buried(x: jax.Array, treatment: Treatment, method: Method) -> tuple[Quantized, jax.Array]:
    """A larger program around the quantizer: producers and consumers for XLA to fuse it with."""
    doubled = jnp.tanh(x.astype(jnp.float32)) * 0 + x.astype(jnp.float32) * 2
    q = quantize((doubled * 0.5).astype(x.dtype), treatment, AXES, method=method)
    return q, jnp.sum(dequantize(q)) + jnp.sum(block_values(q).astype(jnp.float32))


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


EXECUTIONS = [
    (EAGER, "eager", "matmul"), *(slow(c, "eager", m) for c in EAGER_TOO for m in ("matmul", HERE)),
    *((c, "jit", HERE) for c in EXACT), *(slow(c, "jit", "matmul") for c in EXACT),
    *((c, "fused", "matmul") for c in FUSED), *(slow(c, "fused", HERE) for c in FUSED),
]  # fmt: skip


@pytest.mark.parametrize(("case", "execution", "method"), EXECUTIONS)
def test_rows(case: str, execution: str, method: Method) -> None:
    x, t = load(case), treatment_of(case)
    if execution == "eager":
        q = quantize(jnp.asarray(x), t, AXES, method=method)
    else:
        q = compiled(t, method=method)(x) if execution == "jit" else fused(t, method)(x)[0]
    np.testing.assert_array_equal(rows(q, len(x)), REFERENCE[case + "/s"])
    np.testing.assert_array_equal(np.ravel(q.amax), REFERENCE[case + "/amax_row"])
    codes_equal(np.asarray(q.codes), REFERENCE[case + "/q"], x)
    if case + "/dq" in REFERENCE:
        np.testing.assert_array_equal(np.asarray(dequantize(q)), REFERENCE[case + "/dq"])


COLUMNS = [c for c in EXACT if c + "/q_t" in REFERENCE and CASES[c]["random_sign"]]
TRANSPOSED = [c for c in COLUMNS if "32x64" in c or "rht" in c]


ALONG = [
    *((c, False, HERE) for c in COLUMNS), *((c, True, HERE) for c in TRANSPOSED),
    *(slow(c, False, "matmul") for c in COLUMNS),
]  # fmt: skip


@pytest.mark.parametrize(("case", "transposed", "method"), ALONG)
def test_columns(case: str, transposed: bool, method: Method) -> None:
    """The operand of wgrad: along the other axis in place, or along the last axis of the transpose."""
    x, t = load(case), treatment_of(case, rotated=CASES[case]["rht"])
    if transposed:
        q = compiled(t, method=method)(x.T)
        codes, scales = np.asarray(q.codes), rows(q, x.shape[1])
    else:
        q = compiled(t, Axes(axis=-2, tile=-1), method)(x)
        codes = np.asarray(q.codes).T
        scales = np.asarray(q.scales).T
        scales = np.repeat(scales, 16, 0)[: x.shape[1]] if t.tile2d else scales
    np.testing.assert_array_equal(scales, REFERENCE[case + "/s_t"])
    np.testing.assert_array_equal(np.ravel(q.amax), REFERENCE[case + "/amax_col"])
    codes_equal(codes, REFERENCE[case + "/q_t"], x.T)
    if case + "/dq_t" in REFERENCE and transposed:
        np.testing.assert_array_equal(np.asarray(dequantize(q)), REFERENCE[case + "/dq_t"])


@pytest.mark.parametrize("case", [c for c in CASES if c + "/x_t_rht" in REFERENCE])
@pytest.mark.parametrize("method", ["matmul", slow("butterfly"), "matmul_bf16"])
@pytest.mark.parametrize("axis", [0, 1])
def test_rotation(case: str, method: Any, axis: int) -> None:
    x = load(case)
    signs = None if CASES[case]["random_sign"] else jnp.ones(16)
    turned = jax.jit(partial(rotate, axis=axis, size=16, signs=signs, method=method))(x if axis == 0 else x.T)
    turned = np.asarray(turned).view(np.uint16)
    np.testing.assert_array_equal(turned.T if axis == 0 else turned, REFERENCE[case + "/x_t_rht"])


def test_rotation_matrix() -> None:
    turned = rotate(jnp.eye(16, dtype=jnp.float32), 1, 16)
    np.testing.assert_array_equal(np.asarray(turned, np.float32), REFERENCE["rht_matrix_f32"])


@pytest.mark.parametrize("case", [c for c in CASES if c + "/s_swizzled" in REFERENCE])
def test_swizzle(case: str) -> None:
    np.testing.assert_array_equal(swizzle(REFERENCE[case + "/s"]), REFERENCE[case + "/s_swizzled"])
    np.testing.assert_array_equal(swizzle(REFERENCE[case + "/s_t"]), REFERENCE[case + "/s_t_swizzled"])


@pytest.mark.parametrize("case", [c for c in EXACT if c + "/s" in KERNEL])
def test_kernels(case: str) -> None:
    """Negative zeros included: the choice here is the kernels'."""
    q = compiled(treatment_of(case))(load(case))
    np.testing.assert_array_equal(np.asarray(q.codes), KERNEL[case + "/q"])
    np.testing.assert_array_equal(np.asarray(q.scales), KERNEL[case + "/s"])


@pytest.mark.parametrize("case", NONFINITE)
def test_nonfinite(case: str) -> None:
    """Our own decision: one NaN or infinity makes every value of the tensor NaN."""
    q = compiled(treatment_of(case))(load(case))
    assert np.isnan(np.asarray(dequantize(q))).all()
    assert np.isnan(np.asarray(block_values(q), np.float32)).all()


@pytest.mark.parametrize("case", [c for c in CASES if c.startswith(DENORMAL)])
def test_denormal(case: str) -> None:
    """Finite, and as near as four bits allow: an element is off by at most a twelfth of its block's maximum
    (half the widest step, 1, over 6), and 1/16 of that again from the rounding of the scale. The CPU reads
    denormal inputs as zeros.
    """
    x = load(case).astype(np.float64)
    t = treatment_of(case)
    q = compiled(t)(load(case))
    m, e = np.frexp(np.float64(np.asarray(q.amax).item()))
    blocks = np.asarray(block_values(q, jnp.float32)).astype(np.float64)
    values = blocks * (np.ldexp(m, e) / 2688)
    assert np.isfinite(np.asarray(dequantize(q))).all()
    if np.abs(x).max() < 2.0**-126:
        return
    normal = np.abs(x) >= 2.0**-126
    top = np.abs(x).max() if t.tile2d else np.abs(x).reshape(len(x), -1, 16).max(-1).repeat(16, -1)
    assert (np.abs(values - x)[normal] <= (top * np.ones_like(x))[normal] * (1 / 6 + 1 / 16)).all()


def test_conversions() -> None:
    x = KERNEL["conv/x"]

    def convert(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        e2m1 = round_nearest(jnp.abs(x), E2M1) | sign_bit(x, E2M1)
        e4m3 = round_nearest(jnp.abs(x), E4M3) | sign_bit(x, E4M3)
        return e2m1, e4m3

    number = ~np.isnan(x)
    for f in (convert, jax.jit(convert)):
        e2m1, e4m3 = (np.asarray(c) for c in f(jnp.asarray(x)))
        np.testing.assert_array_equal(e2m1[number], KERNEL["conv/e2m1"][number])
        np.testing.assert_array_equal(e4m3[number], KERNEL["conv/e4m3"][number])


def test_stochastic_table() -> None:
    """All 256 random bytes. A NaN saturates, as in the kernels; the scale is what carries it."""
    x = jnp.asarray(KERNEL["sr/x"])[:, None]
    byte = jnp.arange(256, dtype=jnp.int32)[None]
    codes = jax.jit(lambda x: round_stochastic(jnp.abs(x), byte, 8, E2M1) | sign_bit(x, E2M1))(x)
    np.testing.assert_array_equal(np.asarray(codes), KERNEL["sr/e2m1"])


def test_vendor_four_over_six() -> None:
    """The vectors choose by the sum of absolute errors, under the full bound."""
    from tests.support.rounding_oracle import four_over_six, pack

    case = "4over6_mae448_64x128_bf16_1d"
    theirs = four_over_six(load(case), bound=448, error="mae")
    np.testing.assert_array_equal(theirs["scales"], REFERENCE[case + "/s"])
    np.testing.assert_array_equal(pack(theirs["codes"]), REFERENCE[case + "/q"])
    q = compiled(FOUR_OVER_SIX)(load(case))
    np.testing.assert_array_equal(np.asarray(q.scales), REFERENCE[case + "/s"])
    np.testing.assert_array_equal(np.asarray(q.codes), REFERENCE[case + "/q"])
    np.testing.assert_array_equal(np.asarray(codes_of(q)), theirs["codes"])


FOUR_OVER_SIX = Treatment(format="nvfp4", element="e2m1", scale="four_over_six_mae448")
