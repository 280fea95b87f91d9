"""`quantized_ragged_dot`: the grouped product of mixtures of experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from policyc.language.recipes import OPERAND_GROUPS, make_recipe
from policyc.numerics.gemm import quantized_dot_general
from policyc.numerics.ragged import quantized_ragged_dot
from tests.support.gemms import MATMUL, RECIPES, normal, quick_jit, relative_error, slow, three_products

TOLERANCE = {"mxfp8": 0.06, "keep": 0.01}
"""The largest relative error of a product: 0.3 with four bits in both operands, less for these."""


@pytest.mark.parametrize("name", [slow("full"), "keep", "mxfp8", slow("ms_eden")])
def test_products_of_groups(name: str) -> None:
    """Products are near the exact ones. Rows of no group and weights of an empty group have no effect."""
    sizes = jnp.array([5, 0, 19, 33], jnp.int32)
    x, w, dy = normal(64, 128), normal(4, 128, 48, seed=1), normal(64, 48, seed=2)

    def products(ragged_dot: Any) -> Any:
        return quick_jit(partial(three_products, lambda x, w: ragged_dot(x, w, sizes)))

    f = products(partial(quantized_ragged_dot, recipe=RECIPES[name]))
    results, expected = f(x, w, dy), products(lax.ragged_dot)(x, w, dy)
    for ours, exact in zip(results, expected, strict=True):
        assert ours.shape == exact.shape
        assert ours.dtype == exact.dtype
        assert relative_error(ours, exact) < TOLERANCE.get(name, 0.3)
    assert (np.asarray(results[0])[57:] == 0).all()
    assert (np.asarray(results[1])[57:] == 0).all()
    assert (np.asarray(results[2])[1] == 0).all()
    if name == "full":
        check_nonfinite(f, x, w, dy)


def check_nonfinite(f: Any, x: jax.Array, w: jax.Array, dy: jax.Array) -> None:
    """What depends on an element that is not finite is not finite."""
    y, _, dw = f(x.at[3, 3].set(np.nan), w, dy)
    assert not np.isfinite(np.asarray(y)[3]).any()
    assert not np.isfinite(np.asarray(dw)[0, 3]).any()
    y, _, _ = f(x, w.at[2, 3, 3].set(np.inf), dy)
    assert not np.isfinite(np.asarray(y)[5:24, 3]).any()
    # Rows that belong to no group may hold anything.
    assert np.isfinite(np.asarray(f(x.at[60].set(np.nan), w, dy)[0])).all()


@pytest.mark.any_jax
@pytest.mark.slow
def test_a_group_is_a_product_of_its_own() -> None:
    """A group alone, with its rows at a whole block, has the same products (it contains the tensor's maximum)."""
    sizes = jnp.array([16, 48], jnp.int32)
    x, w, dy = normal(64, 32), normal(2, 32, 16, seed=1), normal(64, 16, seed=2)
    x, dy = x.at[20, 3].set(9), dy.at[20, 3].set(9)
    recipe = make_recipe("nvfp4", {"scale2d": OPERAND_GROUPS["weights"]})
    ragged = quick_jit(partial(three_products, lambda x, w: quantized_ragged_dot(x, w, sizes, recipe)))
    dense = quick_jit(
        partial(three_products, partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=recipe))
    )
    y, dx, dw = ragged(x, w, dy)
    for a, b in zip((y[16:], dx[16:], dw[1]), dense(x[16:], w[1], dy[16:]), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)
