"""`quantized_dot_general` against the vendor's vectors, an oracle, and plain JAX; and under JAX's transformations."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from policyc.hardware.selftest.golden import read_arrays
from policyc.language.recipes import OPERAND_GROUPS, Gemm, make_recipe, make_split_recipe
from policyc.language.treatments import find_recipe_problems, normalize_recipe
from policyc.numerics.gemm import GemmOptions, Precomputed, quantized_dot_general
from policyc.numerics.quantize import make_key
from tests.support import rounding_oracle as oracle
from tests.support.gemms import (
    FULL,
    MATMUL,
    NEAREST,
    RECIPES,
    assert_equal_arrays,
    normal,
    quick_jit,
    relative_error,
    three_products,
)

# The order of sums may differ, and each comparison here says by how much. So these programs may be compiled quickly.
# What must be equal to the bit when compiled in full is in test_quantize.py and test_golden.py.
GOLDEN = read_arrays()


def test_small_bf16_products_run_on_cpu() -> None:
    """XLA has no kernel for these products, of a batch of matrices and one matrix, with an fp32 result."""
    w, x, dy = normal(3, 8, 8), normal(4, 8, seed=1), normal(3, 4, 8, seed=2)
    f = jax.vmap(
        partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=make_recipe("bf16")), (None, 0)
    )
    results = jax.jit(lambda x, w: three_products(f, x, w, dy))(x, w)
    exact = [np.asarray(a, ml_dtypes.bfloat16).astype(np.float64) for a in (x, w, dy)]
    expected = (
        np.einsum("tk,bkn->btn", exact[0], exact[1]),
        np.einsum("btn,bkn->tk", exact[2], exact[1]),
        np.einsum("tk,btn->bkn", exact[0], exact[2]),
    )
    for ours, theirs in zip(results, expected, strict=True):
        # Products of bfloat16 numbers are exact in fp32. The sums have up to 24 terms.
        np.testing.assert_allclose(np.asarray(ours, np.float64), theirs, rtol=0, atol=1e-5)


def test_bf16_products_have_second_derivatives() -> None:
    w, x = normal(8, 8), normal(4, 8, seed=1)
    f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=make_recipe("bf16"))

    def penalty(multiply: Any, w: jax.Array) -> jax.Array:
        return jnp.sum(jax.grad(lambda w: jnp.sum(multiply(x, w) ** 3))(w) ** 2)

    ours, plain = (jax.jit(jax.grad(partial(penalty, multiply)))(w) for multiply in (f, jnp.matmul))
    # Operands are rounded to bfloat16, at most 2**-9 each, in three products.
    assert relative_error(ours, plain) < 0.02


# --- against the vectors and the oracle -----------------------------------------------------------


def test_every_cpu_multiplies_bf16_of_an_fp32_program() -> None:
    """XLA swaps the operands of a transposed product, and has no CPU kernel for that one in bfloat16 with fp32 sums."""
    x, w = normal(16, 32, seed=1), normal(32, 48, seed=2)
    bf16 = make_recipe("bf16")
    y = jax.jit(lambda x, w: quantized_dot_general(x, w, MATMUL, bf16).T)(x, w)
    a, b = (np.asarray(v.astype(jnp.bfloat16), np.float64) for v in (x, w))
    # The products of bfloat16 are exact in fp32: only 32 terms are rounded when they are added.
    np.testing.assert_allclose(y, (a @ b).T, rtol=0, atol=32 * 2**-24 * np.max(np.abs(a) @ np.abs(b)))


@pytest.mark.any_jax
def test_products_equal_the_vendors() -> None:
    """The three products of the default recipe without stochastic rounding."""
    x, w, dy = (jnp.asarray(GOLDEN[f"gemm/{n}"].view(ml_dtypes.bfloat16)) for n in ("X", "W", "DY"))
    f = partial(
        quantized_dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        recipe=NEAREST,
        options=GemmOptions(preferred_element_type=jnp.float32),
    )
    y, dx, dw = quick_jit(partial(three_products, f))(x, w, dy)
    for ours, name in ((y, "fprop"), (dx, "dgrad"), (dw, "wgrad")):
        theirs = GOLDEN[f"gemm/{name}"]
        # fp32 sums of 64 to 128 terms in another order, and gradients rounded to bfloat16.
        tolerance = 2.0**-8 if ours.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), theirs, rtol=tolerance, atol=1e-5 * np.abs(theirs).max()
        )


@pytest.mark.any_jax
def test_products_are_those_of_the_oracles_values() -> None:
    x, w, dy = normal(64, 128), normal(128, 96, seed=1), normal(64, 96, seed=2)
    f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=make_recipe("nvfp4"))
    results = quick_jit(partial(three_products, f))(x, w, dy)
    q = {
        name: oracle.nvfp4(np.asarray(v))["dequantized"].astype(np.float64)
        for name, v in {"x": x, "wt": w.T, "dy": dy, "w": w, "xt": x.T, "dyt": dy.T}.items()
    }
    expected = (q["x"] @ q["wt"].T, q["dy"] @ q["w"].T, q["xt"] @ q["dyt"].T)
    for a, b in zip(results, expected, strict=True):
        # fp32 accumulation of about a hundred terms.
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


# --- other formats ----------------------------------------------------------------------------------

ROWS = (((2,), (0,)), ((), ()))


@pytest.mark.any_jax
def test_fp8_rows_have_scales_along_each_contraction() -> None:
    """Each of the six operands is quantized row by row, along what its GEMM contracts."""
    x, w, dy = normal(24, 40), normal(40, 56, seed=1), normal(24, 56, seed=2)
    x, dy = x.at[3].multiply(1e4), dy.at[:, 5].multiply(1e4)
    f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=RECIPES["fp8 row"])
    results = quick_jit(partial(three_products, f))(x, w, dy)

    def rows(array: jax.Array, element: str) -> np.ndarray:
        parts = [oracle.fp8(row[None], element)["dequantized"] for row in np.asarray(array)]
        return np.concatenate(parts).astype(np.float64)

    expected = (
        rows(x, "e4m3") @ rows(w.T, "e4m3").T,
        rows(dy, "e5m2") @ rows(w, "e4m3").T,
        rows(x.T, "e4m3") @ rows(dy.T, "e5m2").T,
    )
    for ours, exact in zip(results, expected, strict=True):
        assert relative_error(ours, exact) < 1e-6


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_keep_is_bit_identical_to_dot_general(dtype: Any) -> None:
    x, w, dy = (normal(*s, dtype=dtype) for s in ((8, 32), (32, 16), (8, 16)))
    f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=make_recipe("keep"))
    results = jax.jit(partial(three_products, f))(x, w, dy)
    expected = jax.jit(partial(three_products, partial(lax.dot_general, dimension_numbers=MATMUL)))(x, w, dy)
    assert_equal_arrays(results, expected)


@pytest.mark.any_jax
def test_kept_gemms_of_a_mixed_recipe_are_exact() -> None:
    x, w, dy = normal(8, 32), normal(32, 16), normal(8, 16)
    f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=make_split_recipe({Gemm.FPROP: FULL}))
    results = quick_jit(partial(three_products, f))(x, w, dy)
    plain = partial(lax.dot_general, dimension_numbers=MATMUL)
    expected = quick_jit(partial(three_products, plain))(x, w, dy)
    assert relative_error(results[0], expected[0]) > 0.05
    for ours, exact in zip(results[1:], expected[1:], strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(exact), rtol=1e-6)


def test_bf16_accumulates_in_fp32() -> None:
    """4096 ones: a bfloat16 sum would stop at 256."""
    ones = jnp.ones((1, 4096), jnp.bfloat16)
    y = quantized_dot_general(ones, ones.T, MATMUL, make_recipe("bf16"))
    assert y.item() == 4096


@pytest.mark.any_jax
def test_padding_is_exact() -> None:
    """A contraction of 37 equals one of 48 with zeros. Rows and columns are whole blocks in both."""
    x, w = normal(32, 37), normal(37, 16, seed=1)
    f = quick_jit(partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=make_recipe("nvfp4")))
    padded = f(jnp.pad(x, ((0, 0), (0, 11))), jnp.pad(w, ((0, 11), (0, 0))))
    np.testing.assert_allclose(np.asarray(f(x, w)), np.asarray(padded), rtol=1e-6)


@pytest.mark.any_jax
@pytest.mark.slow
def test_leading_dimensions_are_rows() -> None:
    """Blocks run along tokens as if all tokens were one dimension, with whole blocks in a sequence or not."""
    for shape, recipe in (((4, 32, 64), RECIPES["mxfp8"]), ((3, 10, 64), NEAREST)):
        x, w, dy = normal(*shape), normal(64, 32, seed=1), normal(*shape[:2], 32, seed=2)
        batched, flat = (
            partial(quantized_dot_general, dimension_numbers=dims, recipe=recipe) for dims in (ROWS, MATMUL)
        )
        a = quick_jit(partial(three_products, batched))(x, w, dy)
        b = quick_jit(partial(three_products, flat))(x.reshape(-1, 64), w, dy.reshape(-1, 32))
        for one, other in zip(a, b, strict=True):
            # The operands are equal. The order of sums is the compiler's.
            np.testing.assert_allclose(np.asarray(one).reshape(other.shape), other, rtol=1e-4, atol=1e-4)


@pytest.mark.any_jax
def test_a_last_dimension_of_one() -> None:
    """Blocks of wgrad run along all tokens as if they were one dimension: tokens (32, 1) are 32."""
    x, w, dy = normal(32, 32), normal(32, 16, seed=1), normal(32, 16, seed=2)

    def weight_gradient(*tokens: int) -> jax.Array:
        dims = (((len(tokens),), (0,)), ((), ()))
        f = partial(quantized_dot_general, dimension_numbers=dims, recipe=RECIPES["plain"])
        run = quick_jit(lambda x, w, dy: three_products(f, x, w, dy)[2])
        return run(x.reshape(*tokens, 32), w, dy.reshape(*tokens, 16))

    np.testing.assert_array_equal(weight_gradient(32, 1), weight_gradient(32))


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.any_jax
def test_gradients_are_unbiased() -> None:
    """Only the gradient is rounded stochastically. Averaging B draws of dx and dw, the squared error falls as 1/B."""
    x, w, dy = normal(32, 32), normal(32, 32, seed=1), normal(32, 32, seed=2).clip(-3.9, 3.9)
    dy = dy.at[::16].set(4).at[:, ::16].set(4)  # all block scales are exact: no number saturates
    stochastic = make_recipe("nvfp4", {"sr": OPERAND_GROUPS["grad"]})
    recipe = make_split_recipe(
        {Gemm.FPROP: make_recipe("keep"), Gemm.DGRAD: stochastic, Gemm.WGRAD: stochastic}
    )

    def draw(step: jax.Array) -> tuple[jax.Array, ...]:
        keyed = Precomputed(rounding_key=make_key(0, 0, step))
        f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=recipe, precomputed=keyed)
        return three_products(f, x, w, dy)[1:]

    draws = quick_jit(jax.vmap(draw))(jnp.arange(1024))
    q = {n: oracle.nvfp4(np.asarray(v))["dequantized"] for n, v in {"w": w, "xt": x.T}.items()}
    expected = (np.asarray(dy, np.float64) @ q["w"].T, q["xt"] @ np.asarray(dy, np.float64))
    for results, exact in zip(draws, expected, strict=True):
        results = np.asarray(results, np.float64)
        errors = [np.mean((results[:n].mean(0) - exact) ** 2) for n in (1, 32, 1024)]
        # 1024 correlated numbers: their mean square is known to about 15 %.
        assert errors[0] / errors[1] == pytest.approx(32, rel=0.4)
        assert errors[1] / errors[2] == pytest.approx(32, rel=0.4)


@pytest.mark.any_jax
def test_gradient_through_a_smooth_function() -> None:
    """The gradient of a function around a product agrees with finite differences."""
    x, w = normal(8, 32), normal(32, 16, seed=1)
    f = jax.jit(lambda w: jnp.sum(jnp.tanh(quantized_dot_general(x, w, MATMUL, make_recipe("f32")))))
    g, d = jax.grad(f)(w), normal(32, 16, seed=3)
    # The error of a central difference is of order 1e-4 here.
    slope = (f(w + 1e-2 * d) - f(w - 1e-2 * d)) / 2e-2
    assert float(slope) == pytest.approx(float(jnp.sum(g * d)), rel=2e-2)


@pytest.mark.any_jax
def test_outer_scales_do_not_underflow_or_overflow_on_their_own() -> None:
    """One operand is tiny and the other huge: each outer scale is at the edge of fp32, their product is not."""
    x, w = normal(16, 32), normal(32, 16, seed=1)
    f = quick_jit(partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=make_recipe("nvfp4")))
    expected = np.asarray(f(x, w))
    result = np.asarray(f(x * 2.0**-120, w * 2.0**120))
    # A tensor this small is lifted by a power of two first, and a scale may round in the other direction.
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    assert np.isfinite(np.asarray(f(x * 2.0**100, w * 2.0**-120))).all()


# --- recipes that cannot be run -------------------------------------------------------------------


@pytest.mark.any_jax
def test_problems_of_a_recipe_are_named() -> None:
    one_sided = make_recipe("nvfp4", {"rht": OPERAND_GROUPS["wgrad.activations"]})
    assert "wgrad" in find_recipe_problems(one_sided)[0]
    rotated_tiles = make_recipe("nvfp4", {"rht": OPERAND_GROUPS["all"], "scale2d": OPERAND_GROUPS["weights"]})
    assert "2D" in find_recipe_problems(rotated_tiles)[0]
    with pytest.raises(ValueError, match="both or neither"):
        normalize_recipe(one_sided)
    assert not any(find_recipe_problems(r) for r in RECIPES.values())
