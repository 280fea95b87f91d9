"""The three GEMMs of a dot_general as data. Nothing is compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from policyc.language.recipes import Gemm, make_recipe
from policyc.language.treatments import normalize_recipe
from policyc.numerics.dimensions import canonicalize
from policyc.numerics.products import (
    GemmOptions,
    GemmSpec,
    Products,
    Weight,
    gemm_products,
)
from tests.support.gemms import FULL, MATMUL

SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any]] = {
    "matmul": ((32, 64), (64, 48), MATMUL),
    "several free": ((2, 16, 64), (64, 4, 16), (((2,), (0,)), ((), ()))),
    "swapped contraction": ((2, 16, 5, 6), (6, 5, 24), (((2, 3), (1, 0)), ((), ()))),
    "batch": ((16, 3, 32), (32, 16, 3), (((0,), (1,)), ((1,), (2,)))),
}


def make_products(lhs: Any, rhs: Any, dims: Any, weight: Weight = "rhs", recipe: Any = FULL) -> Products:
    structs = (jax.ShapeDtypeStruct(s, jnp.float32) for s in (lhs, rhs))
    options = GemmOptions(weight=weight, site="up", backends=("xla", "emulate", "te"))
    spec = GemmSpec(
        dims=dims, recipe=normalize_recipe(recipe), lhs=next(structs), rhs=next(structs), options=options
    )
    return gemm_products(spec)


@pytest.mark.parametrize(("lhs", "rhs", "dims"), SHAPES.values(), ids=SHAPES)
def test_gradients_have_the_shapes_of_their_operands(lhs: Any, rhs: Any, dims: Any) -> None:
    """The dimension numbers and the transpose of each GEMM give the shape of the operand it is the gradient of."""
    products = make_products(lhs, rhs, dims)
    a, b = (jax.ShapeDtypeStruct(s, jnp.float32) for s in (lhs, rhs))
    dy = jax.eval_shape(lambda a, b: lax.dot_general(a, b, dims), a, b)
    for product, left, right, shape in (
        (products.fprop, a, b, dy.shape),
        (products.d_lhs, dy, b, lhs),
        (products.d_rhs, a, dy, rhs),
    ):
        result = jax.eval_shape(
            lambda x, y, p=product: lax.dot_general(x, y, p.dims).transpose(p.order), left, right
        )
        assert result.shape == shape


@pytest.mark.parametrize(
    ("weight", "d_lhs", "d_rhs"),
    [("rhs", Gemm.DGRAD, Gemm.WGRAD), ("lhs", Gemm.WGRAD, Gemm.DGRAD), (None, Gemm.DGRAD, Gemm.WGRAD)],
)
def test_the_gradient_of_the_weight_is_wgrad(weight: Weight, d_lhs: Gemm, d_rhs: Gemm) -> None:
    products = make_products((32, 64), (64, 48), MATMUL, weight)
    assert (products.d_lhs.gemm, products.d_rhs.gemm) == (d_lhs, d_rhs)
    assert products.fprop.left.treatment.tile2d == (weight == "lhs")
    assert products.fprop.right.treatment.tile2d == (weight == "rhs")


def test_names_backends_and_axes_of_operands() -> None:
    """Names are part of random streams: they must not change."""
    products = make_products((2, 16, 64), (64, 48), (((2,), (0,)), ((), ())))
    gemms = (products.fprop, products.d_lhs, products.d_rhs)
    operands = [operand for product in gemms for operand in (product.left, product.right)]
    assert [o.name for o in operands] == [
        "fprop.lhs", "fprop.rhs", "dgrad.dy", "dgrad.rhs", "wgrad.lhs", "wgrad.dy",
    ]  # fmt: skip
    assert [o.backend for o in operands] == ["xla", "xla", "emulate", "emulate", "te", "te"]
    assert [o.axes.axis for o in operands] == [-1, -2, -1, -1, -2, -2]
    assert [p.scope for p in gemms] == ["fprop.up", "dgrad.up", "wgrad.up"]
    assert products.d_rhs.right.tokens == (0, 1)


def test_canonical_form_merges_dimensions_only_if_blocks_would_cross_them() -> None:
    """The last token dimension has whole blocks of 16 in the first case, and not in the second."""
    recipe = normalize_recipe(make_recipe("nvfp4"))
    dims = (((2,), (0,)), ((), ()))
    whole = canonicalize((4, 16, 64), (64, 48), dims, recipe)
    assert (whole.dims, whole.lhs_groups, whole.result_shape) == (dims, None, (4, 16, 48))
    merged = canonicalize((4, 10, 64), (64, 48), dims, recipe)
    assert (merged.dims, merged.lhs_groups) == (MATMUL, ((), (0, 1), (2,)))
    assert jax.eval_shape(merged.convert_lhs, jax.ShapeDtypeStruct((4, 10, 64), jnp.float32)).shape == (
        40,
        64,
    )
    assert merged.result_shape == (4, 10, 48)


@pytest.mark.parametrize(
    ("shape", "contract", "expected"),
    [((64, 48), (0,), 1), ((4, 16, 48), (0, 1), 1), ((64, 4, 12), (0,), 2), ((4, 64, 12), (1,), 0)],
    ids=["matrix", "several contracted", "several free", "no GEMM contracts the last dimensions"],
)
def test_fp8_weights_that_are_written_in_both_orders(shape: Any, contract: Any, expected: int) -> None:
    contracted = tuple(shape[i] for i in contract)
    structs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((32, *contracted), shape)]
    dims = (tuple(range(1, 1 + len(contract))), contract), ((), ())
    options = GemmOptions(weight="rhs", backends=("xla", "xla", "xla"))
    recipe = normalize_recipe(make_recipe("fp8"))
    spec = GemmSpec(dims=dims, recipe=recipe, lhs=structs[0], rhs=structs[1], options=options)
    products = gemm_products(spec)
    weights = products.fprop.right, products.d_lhs.right
    assert [w.axes.second_order for w in weights] == [expected] * 2
