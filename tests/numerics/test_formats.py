"""Every format and option, along both axes, in several shapes and types, against the independent oracle: the same bits.

Each quantizer is compiled in full, inside a program that produces its input and uses its result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from policyc.language.recipes import Treatment
from policyc.numerics.quantize import Axes, block_values, codes_of, dequantize, quantize
from policyc.numerics.quantize.reference.hadamard import Method
from tests.support import rounding_oracle as oracle
from tests.support.gemms import slow

pytestmark = [pytest.mark.any_jax, pytest.mark.full_compile]

Expected = Mapping[str, Any]
Oracle = Callable[[np.ndarray], Expected]
nvfp4, ue5m3, mxfp4, fp8 = (
    partial(Treatment, format=f, element=e)
    for f, e in (("nvfp4", "e2m1"), ("nvfp4_ue5m3", "e2m1"), ("mxfp4", "e2m1"), ("fp8", "e4m3"))
)


def by_row(of_tensor: Oracle) -> Oracle:
    """The oracle of a format with a scale for each row."""

    def of_rows(x: np.ndarray) -> Expected:
        rows = [of_tensor(row[None]) for row in x]
        return {key: np.concatenate([np.atleast_2d(row[key]) for row in rows]) for key in rows[0]}

    return of_rows


def fp4(x: np.ndarray) -> Expected:
    q = oracle.fp4(x)
    value = np.ldexp(q["value"] * q["scale"], q["exponent"])
    return {"codes": q["codes"], "dequantized": value, "amax": np.abs(x).max()}


FORMATS: dict[str, tuple[Treatment, Oracle, int]] = {
    "nvfp4": (nvfp4(), oracle.nvfp4, 16),
    "nvfp4 16x16": (nvfp4(tile2d=True), partial(oracle.nvfp4, tile=16), 16),
    "nvfp4 row": (nvfp4(outer="row"), by_row(oracle.nvfp4), 16),
    "nvfp4 4/6": (nvfp4(scale="four_over_six"), oracle.four_over_six, 16),
    "nvfp4 4/6 mae": (
        nvfp4(scale="four_over_six", scale_error="mae"), partial(oracle.four_over_six, error="mae"), 16
    ),
    "nvfp4 4/6 448": (
        nvfp4(scale="four_over_six", scale_bound=448), partial(oracle.four_over_six, bound=448), 16
    ),
    "nvfp4 4/6 mae 448": (
        nvfp4(scale="four_over_six", scale_error="mae", scale_bound=448),
        partial(oracle.four_over_six, bound=448, error="mae"), 16
    ),
    "nvfp4 ue5m3": (ue5m3(outer="none"), partial(oracle.nvfp4, scale="ue5m3", bound=114688, amax=6 * 114688), 16),
    "nvfp4 ue5m3 16x16": (
        ue5m3(outer="none", tile2d=True),
        partial(oracle.nvfp4, scale="ue5m3", bound=114688, amax=6 * 114688, tile=16), 16
    ),
    "nvfp4 ue5m3 tensor": (ue5m3(), partial(oracle.nvfp4, scale="ue5m3", bound=114688), 16),
    "mxfp4 floor": (mxfp4(), partial(oracle.mx, element="e2m1", rounding="floor"), 32),
    "mxfp4 rceil": (mxfp4(scale_rounding="rceil"), partial(oracle.mx, element="e2m1", rounding="rceil"), 32),
    "mxfp4 even": (mxfp4(scale_rounding="even"), partial(oracle.mx, element="e2m1", rounding="even"), 32),
    "mxfp8": (
        Treatment(format="mxfp8", element="e4m3"), partial(oracle.mx, element="e4m3", rounding="rceil"), 32
    ),
    "fp8 e4m3": (fp8(), partial(oracle.fp8, element="e4m3"), 1),
    "fp8 e5m2": (fp8(element="e5m2"), partial(oracle.fp8, element="e5m2"), 1),
    "fp8 row": (fp8(outer="row"), by_row(partial(oracle.fp8, element="e4m3")), 1),
    "fp4": (Treatment(format="fp4", element="e2m1"), fp4, 2),
}  # fmt: skip
"""The treatment, the oracle of a matrix whose rows are quantized, and the length of a block."""


@cache
def program(name: str, axis: int, method: Method) -> Any:
    treatment, _, _ = FORMATS[name]
    axes = Axes(axis=axis, contract=(axis,), tile=-3 - axis)

    @jax.jit
    def run(x: jax.Array) -> Any:
        q = quantize((x.astype(jnp.float32) * 4).astype(x.dtype), treatment, axes, method=method)
        values = dequantize(q)
        return codes_of(q), q.scales, q.amax, block_values(q), values, jnp.sum(values)

    return run


def inputs(rows: int, columns: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    wide = np.exp(4 * rng.standard_normal((rows, columns))) * rng.choice([-1, 1], (rows, columns))
    steps = np.resize(np.float32([6, 0.25, 0.75, 1.25, -1.75, 2.5, -3.5, 5, -0.25, 448]), (rows, columns))
    zeros = rng.standard_normal((rows, columns))
    zeros[: rows // 2] = 0
    zeros[0, 0] = 1.75 * 2.0**-9
    return {"normal": rng.standard_normal((rows, columns)), "wide": wide, "ties": steps, "zeros": zeros}


FEW = ("nvfp4 16x16", "mxfp8", "fp8 row")
TABLE = [
    *((name, -1, (64, 96), "float32", "cpu") for name in FORMATS),
    *((name, -2, (64, 96), "bfloat16", "cpu") for name in FEW),
    *((name, -1, (5, 23), "float32", "cpu") for name in ("nvfp4", "mxfp8")),
    *(slow(name, -2, (64, 96), "bfloat16", "cpu") for name in FORMATS if name not in FEW),
    *(slow(name, -1, (48, 64), "bfloat16", "matmul") for name in FORMATS),
    *(slow(name, axis, (37, 45), "float32", "matmul") for name in FORMATS for axis in (-1, -2)),
    slow("nvfp4", -1, (64, 96), "float16", "cpu"),
]


@pytest.mark.parametrize(("name", "axis", "shape", "dtype", "method"), TABLE)
def test_bits_are_those_of_the_oracle(
    name: str, axis: int, shape: tuple[int, int], dtype: str, method: Method
) -> None:
    treatment, of_rows, block = FORMATS[name]
    for case, numbers in inputs(*shape).items():
        limit = 6e4 if dtype == "float16" else np.inf
        quarter = (np.clip(numbers, -limit, limit) / 4).astype(np.float32).astype(jnp.dtype(dtype))
        x = (quarter.astype(np.float32) * 4).astype(quarter.dtype).astype(np.float32)
        rows = x if axis == -1 else x.T
        units = 16 if treatment.tile2d else 1, block
        expected = of_rows(np.pad(rows, [(0, -n % u) for n, u in zip(rows.shape, units, strict=True)]))
        arrays = [None if a is None else np.asarray(a) for a in program(name, axis, method)(quarter)]
        if axis == -2:
            arrays = [None if a is None else a.T for a in arrays]
        codes, scales, amax, blocks, values, _ = arrays
        # Four over six: the oracle sums in fp64. If the two errors agree to 1e-5, fp32 may choose the other scale.
        is_clear = np.abs(expected.get("margin", np.ones((len(rows), 1)))) > 1e-5
        assert is_clear.mean() > {"normal": 0.99, "wide": 0.8}.get(case, -1)
        same = np.repeat(is_clear, 16 if "margin" in expected else rows.shape[1], 1)[:, : rows.shape[1]]
        inside = slice(len(rows)), slice(rows.shape[1])
        assert_equal(np.where(same, codes, 0), np.where(same, expected["codes"][inside], 0), case)
        if scales is not None:
            is_clear = np.broadcast_to(is_clear, scales.shape) if scales.shape[0] == len(rows) else True
            assert_equal(np.where(is_clear, scales, 0), np.where(is_clear, expected["scales"], 0), case)
        if amax is not None:
            of_rows_or_tensor = np.ravel(expected.get("amax", np.abs(x).max()))
            assert_equal(np.ravel(amax)[: len(rows)], of_rows_or_tensor, case)
        if "block" in expected:
            assert_equal(blocks, expected["block"], case)
        if "dequantized" in expected:
            assert_equal(values, expected["dequantized"][inside], case)


def assert_equal(ours: Any, theirs: Any, case: str) -> None:
    np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), case)


@pytest.mark.parametrize("name", [slow(name) for name in FORMATS])
def test_each_index_of_a_batch_is_a_tensor(name: str) -> None:
    """With a batch axis, or under a vmap."""
    treatment, _, _ = FORMATS[name]
    x = np.random.default_rng(1).standard_normal((3, 32, 45)) * np.array([[[1]], [[9]], [[1e-3]]])
    x = x.astype(ml_dtypes.bfloat16)
    run = partial(quantize, treatment=treatment)
    one = jax.jit(partial(run, axes=Axes(tile=-2)))
    batched = jax.jit(partial(run, axes=Axes(tile=-2, batch=(-3,))))(x)
    mapped = jax.jit(jax.vmap(partial(run, axes=Axes(tile=-2))))(x)
    for i in range(3):
        for array, other, alone in zip(*map(jax.tree.leaves, (batched, mapped, one(x[i]))), strict=True):
            np.testing.assert_array_equal(np.asarray(array)[i], np.asarray(alone).reshape(array.shape[1:]))
            np.testing.assert_array_equal(np.asarray(other)[i], np.asarray(alone))


# ---- UE5M3


def test_the_codes_of_ue5m3_are_those_of_e4m3_with_another_bias() -> None:
    """Up to the code that E4M3 lacks; the rest are twice the codes eight before."""
    e4m3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(oracle.UE5M3[:127] * 2.0**8, e4m3)
    np.testing.assert_array_equal(oracle.UE5M3[16:], 2 * oracle.UE5M3[8:-8])
    assert oracle.UE5M3[[1, 254]].tolist() == [2.0**-17, 114688]


def test_ue5m3_scales_of_every_bf16_maximum() -> None:
    """Blocks with each finite bf16 number as their maximum. Only a block that is not finite has a scale of NaN."""
    tops = np.arange(0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    rows = np.random.default_rng(0).uniform(-1, 1, (tops.size, 16)).astype(np.float32)
    rows[:, 5] = 1
    x = (rows * tops[:, None]).astype(ml_dtypes.bfloat16)
    q = jax.jit(partial(quantize, treatment=ue5m3(outer="none"), method="cpu"))(x)
    expected = oracle.nvfp4(x.astype(np.float32), scale="ue5m3", bound=114688, amax=6 * 114688)
    np.testing.assert_array_equal(q.scales, expected["scales"])
    is_kept = expected["scales"] > 0  # below, all values are 0, whatever the codes
    assert is_kept.mean() == pytest.approx((tops > 3 * 2.0**-17).mean())
    np.testing.assert_array_equal(np.where(is_kept, codes_of(q), 0), np.where(is_kept, expected["codes"], 0))
    np.testing.assert_array_equal(dequantize(q), expected["block"])
    x[7, 3], x[9, 0] = np.inf, np.nan
    scales = np.asarray(quantize(x, ue5m3(outer="none"), method="cpu").scales)
    assert set(np.flatnonzero(scales == 255)) == {7, 9}
