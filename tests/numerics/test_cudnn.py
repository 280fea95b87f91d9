"""Backend `cudnn`: what it gives to cuDNN's grouped GEMMs, read as their documentation says.

The kernels need a Blackwell GPU. In their place, NumPy reads the codes, the atoms of scales and the ends of the groups.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from policyc.jaxcore.primitives.define_primitive import LoweringContext
from policyc.language.recipes import Treatment
from policyc.numerics.backends import cudnn, emulate
from policyc.numerics.quantize import Axes, Quantized, quantize
from tests.support.gemms import normal, quick_jit

pytestmark = pytest.mark.any_jax

NVFP4 = Treatment(format="nvfp4", element="e2m1")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
ON_GPU = LoweringContext(platform="cuda", single_device=True)
ROWS, COLUMNS = Axes(axis=-1), Axes(axis=-2)
WEIGHT = Axes(axis=-2, batch=(-3,), tile=-1)


def values(packed: np.ndarray) -> np.ndarray:
    """Two values per byte, the first in the low nibble."""
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    return np.where(codes & 8, -1, 1) * E2M1[codes & 7]


def scales(atoms: np.ndarray, rows: int, blocks: int) -> np.ndarray:
    """One for each element, from atoms (rows / 128, blocks / 4, 32, 4, 4) in row-major order."""
    found = np.empty((rows, blocks))
    shape = -(-rows // 128), -(-blocks // 4), 32, 4, 4
    atoms = atoms.view(ml_dtypes.float8_e4m3fn).astype(np.float64).reshape(shape)
    for r in range(rows):
        for b in range(blocks):
            found[r, b] = atoms[r // 128, b // 4, r % 32, r % 128 // 32, b % 4]
    return np.repeat(found, 16, axis=1)


def multiply_rows(codes: Any, weights: Any, sfa: Any, sfb: Any, ends: Any, outer: Any) -> np.ndarray:
    codes, weights, sfa, sfb, ends, outer = map(np.asarray, (codes, weights, sfa, sfb, ends, outer))
    assert len(codes) % 256 == 0
    assert (ends % 256 == 0).all()
    left = values(codes)
    left *= scales(sfa, *np.floor_divide(left.shape, (1, 16)))
    product = np.full((len(codes), weights.shape[1]), np.nan)  # what is after the last group is not written
    start, per_group = 0, len(sfb) // len(weights)
    for g, end in enumerate(ends):
        right = values(weights[g])
        right *= scales(sfb[g * per_group : (g + 1) * per_group], *np.floor_divide(right.shape, (1, 16)))
        product[start:end] = left[start:end] @ right.T * outer[g]
        start = end
    return product


def contract_tokens(a: Any, b: Any, sfa: Any, sfb: Any, ends: Any, outer: Any) -> np.ndarray:
    a, b, sfa, sfb, ends = map(np.asarray, (a, b, sfa, sfb, ends))
    assert (ends % 128 == 0).all()
    left, right = values(a), values(b)
    products, start = [], 0
    for g, end in enumerate(ends):
        factors = []
        for whole, atoms in ((left, sfa), (right, sfb)):
            rows = len(whole)
            assert rows % 128 == 0
            part = atoms[rows * start // 16 : rows * end // 16]
            factors.append(whole[:, start:end] * scales(part, rows, (end - start) // 16))
        products.append(factors[0] @ factors[1].T * np.asarray(outer[0])[g] * np.asarray(outer[1])[g])
        start = end
    return np.stack(products)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(function: Any, shape: tuple[int, ...], *operands: Any) -> jax.Array:
        *arrays, out = operands
        result = jax.ShapeDtypeStruct(shape, out)
        return jax.pure_callback(lambda *args: function(*args).astype(out), result, *arrays)

    def call_rows(codes: jax.Array, weights: jax.Array, *rest: Any) -> jax.Array:
        return call(multiply_rows, (codes.shape[0], weights.shape[1]), codes, weights, *rest)

    def call_tokens(a: jax.Array, b: jax.Array, *rest: Any) -> jax.Array:
        return call(contract_tokens, (rest[2].shape[0], a.shape[0], b.shape[0]), a, b, *rest)

    monkeypatch.setattr(cudnn, "_call_rows", call_rows)
    monkeypatch.setattr(cudnn, "_call_tokens", call_tokens)


SIZES = np.array([5, 0, 19, 33])


@pytest.mark.parametrize(
    "tile2d",
    [pytest.param(False, id="blocks"), pytest.param(True, id="tiles", marks=pytest.mark.slow)],
)
def test_rows_are_multiplied_with_the_matrix_of_their_group(tile2d: bool) -> None:
    x, w = normal(64, 128), normal(4, 128, 256, seed=1) * jnp.array([1.0, 1, 8, 64])[:, None, None]
    a = quick_jit(partial(quantize, treatment=NVFP4, axes=ROWS))(x)
    b = quick_jit(partial(quantize, treatment=replace(NVFP4, tile2d=tile2d), axes=WEIGHT))(w)
    check(a, b, jnp.asarray(SIZES), contracting=False, out=jnp.bfloat16)


def test_groups_of_tokens_are_contracted() -> None:
    sizes = (SIZES + 15) // 16 * 16
    x, dy = normal(128, 128), normal(128, 256, seed=1)
    a, b = (quick_jit(partial(quantize, treatment=NVFP4, axes=COLUMNS))(operand) for operand in (x, dy))
    check(a, b, jnp.asarray(sizes), contracting=True, out=jnp.float32)


def check(a: Quantized, b: Quantized, sizes: jax.Array, *, contracting: bool, out: Any) -> None:
    ours, emulated = quick_jit(
        lambda a, b, sizes: (
            cudnn.BACKEND.ragged_gemm(a, b, sizes, contracting, out, ON_GPU),
            emulate.BACKEND.ragged_gemm(a, b, sizes, contracting, out, LoweringContext(platform="cpu")),
        )
    )(a, b, sizes)
    assert ours.shape == emulated.shape
    assert ours.dtype == emulated.dtype == out
    used = slice(None) if contracting else slice(0, int(sizes.sum()))
    # Fp32 sums in another order: some ulps. One rounding to bfloat16 may fall to the other side.
    tolerance = 2**-8 if out == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(
        np.asarray(ours, np.float32)[used], np.asarray(emulated, np.float32)[used], tolerance, tolerance
    )
    if not contracting:
        assert (np.asarray(ours, np.float32)[int(sizes.sum()) :] == 0).all()
