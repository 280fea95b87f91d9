"""Options that decide which numbers the backward products multiply, against the oracle.

`backward=dequantized`, `scale2d=all` and `rht_signs`. Where magnitudes reach exactly the bound of a format, its outer
scale is 1, and all products and sums here are exact in fp32: then results are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import policyc
from policyc.language.recipes import Gemm, Recipe, Role
from policyc.numerics.gemm import GemmOptions, quantized_dot_general
from policyc.numerics.ragged import quantized_ragged_dot
from tests.support import rounding_key_oracle as keys
from tests.support import rounding_oracle as oracle
from tests.support.gemms import MATMUL, normal, quick_jit, relative_error, three_products
from tests.support.jaxpr_tools import without_dead_code
from tests.support.layered_models import GATED, X, gated_model

Rows = Callable[[np.ndarray], np.ndarray]


def recipe_of(text: str) -> Recipe:
    policy = policyc.parse(f"* -> {text}")
    return policy.resolver()(policy.rules[0].recipe)


def values(of: Callable[..., Any], block: int, tile: int = 1) -> Rows:
    """The dequantized rows of a matrix, padded with zeros to whole blocks and tiles."""

    def quantize(x: np.ndarray) -> np.ndarray:
        padded = np.pad(x, ((0, -x.shape[0] % tile), (0, -x.shape[1] % block)))
        return of(padded)["dequantized"][: x.shape[0], : x.shape[1]].astype(np.float64)

    return quantize


plain, tiles = values(oracle.nvfp4, 16), values(partial(oracle.nvfp4, tile=16), 16, 16)
mxfp8 = values(partial(oracle.mx, element="e4m3", rounding="rceil"), 32)


def mxfp8_tiles(x: np.ndarray) -> dict[str, np.ndarray]:
    """MXFP8 in tiles of 32x32: each tile has the scale of a block that holds its largest magnitude."""
    m, n = x.shape
    amax = np.abs(x).reshape(m // 32, 32, n // 32, 32).max((1, 3)).astype(np.float64)
    with np.errstate(divide="ignore"):
        scale = np.exp2(np.clip(np.ceil(np.log2(amax / 448)), -127, 127))
    wide = np.repeat(np.repeat(scale, 32, 0), 32, 1)
    codes = (x / wide).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return {"dequantized": codes.astype(np.float32) * wide}


FORMATS: dict[str, tuple[float, Rows, Rows]] = {
    "nvfp4(backward=dequantized)": (2688, plain, plain),
    "nvfp4(scale2d=weights, outer=shared, backward=dequantized)": (2688, plain, tiles),
    "nvfp4(scale2d=all, backward=dequantized)": (2688, tiles, tiles),
    "mxfp8(scale2d=weights, backward=dequantized)": (448, mxfp8, values(mxfp8_tiles, 32, 32)),
    "mxfp8(backward=dequantized)": (448, mxfp8, mxfp8),
    "mxfp4(backward=dequantized)": (6, *2 * (values(partial(oracle.mx, element="e2m1", rounding="floor"), 32),)),
    "fp8(backward=dequantized)": (448, *2 * (values(partial(oracle.fp8, element="e4m3"), 1),)),
}  # fmt: skip
"""For each recipe: the largest magnitude whose outer scale is 1, and the oracles of x and of the transposed w."""


def operands(m: int, n: int, k: int, top: float) -> tuple[np.ndarray, ...]:
    """x and w with this largest magnitude, and dy of small integers."""
    rng = np.random.default_rng(m)
    x, w = (rng.standard_normal(shape) for shape in ((m, k), (k, n)))
    x, w = (np.clip(a * top / 3, -top, top).astype(np.float32) for a in (x, w))
    x[0, 0] = w[0, 0] = top
    return x, w, rng.integers(-8, 9, (m, n)).astype(np.float32)


@pytest.mark.parametrize("shape", [(32, 48, 64), (5, 7, 23)])
@pytest.mark.parametrize("text", FORMATS)
def test_gradients_are_those_of_the_function_that_was_computed(
    text: str, shape: tuple[int, int, int]
) -> None:
    top, of_x, of_w = FORMATS[text]
    x, w, dy = operands(*shape, top)
    f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=recipe_of(text))
    y, dx, dw = jax.jit(partial(three_products, f))(x, w, dy)
    qx, qw = of_x(x), of_w(w.T).T
    np.testing.assert_allclose(
        y, qx @ qw, rtol=1e-6, atol=1e-6 * np.abs(qx @ qw).max()
    )  # the order of fp32 sums
    np.testing.assert_array_equal(dx, (dy @ qw.T).astype(np.float32))
    np.testing.assert_array_equal(dw, (qx.T @ dy).astype(np.float32))


def test_the_gradient_enters_in_bf16() -> None:
    x, w, _ = operands(32, 48, 64, 2688)
    dy = np.asarray(normal(32, 48, seed=3))
    text = "nvfp4(backward=dequantized)"
    f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=recipe_of(text))
    _, dx, _ = jax.jit(partial(three_products, f))(x, w, dy)
    rounded = np.asarray(jnp.asarray(dy).astype(jnp.bfloat16), np.float64)
    assert relative_error(dx, rounded @ plain(w.T)) < 1e-6
    assert relative_error(dx, dy.astype(np.float64) @ plain(w.T)) > 1e-4


@pytest.mark.parametrize("weight", ["lhs", None])
def test_every_place_of_the_weight(weight: Any) -> None:
    """A weight on the left, and a product of two activations."""
    x, w, dy = operands(32, 48, 64, 2688)
    recipe, options = recipe_of("nvfp4(backward=dequantized)"), GemmOptions(weight=weight)
    f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=recipe, options=options)
    _, dx, dw = jax.jit(partial(three_products, f))(x, w, dy)
    np.testing.assert_array_equal(dx, (dy @ plain(w.T)).astype(np.float32))
    np.testing.assert_array_equal(dw, (plain(x).T @ dy).astype(np.float32))


def test_groups_of_rows() -> None:
    """The rows after the last group belong to none."""
    (x, _, dy), sizes = operands(40, 32, 48, 2688), np.array([7, 0, 25])
    x[32:] = 1e6
    w = np.stack([operands(m, 32, 48, 2688)[1] for m in (1, 2, 3)])
    recipe = recipe_of("nvfp4(scale2d=weights, backward=dequantized)")
    f = partial(quantized_ragged_dot, group_sizes=jnp.asarray(sizes), recipe=recipe)
    _, dx, dw = jax.jit(partial(three_products, f))(x, w, dy)
    qx, start = plain(x[:32]), 0
    for group, size in enumerate(sizes):
        rows = slice(start, start + size)
        np.testing.assert_array_equal(dx[rows], (dy[rows] @ tiles(w[group].T)).astype(np.float32))
        np.testing.assert_array_equal(dw[group], (qx[rows].T @ dy[rows]).astype(np.float32))
        start += size


def quantizers(policy: str, *, remat: str = "none") -> list[tuple[str, ...]]:
    """The operands that the step of a model with gates quantizes, per layer."""
    step = jax.make_jaxpr(jax.grad(policyc.apply(policy, gated_model(remat, unrolled=True))))(GATED, X[0])
    eqns = policyc_equations(without_dead_code(step))
    return sorted(e.params["operands"] for e in eqns if e.primitive.name.endswith("_quantize"))


def policyc_equations(jaxpr: Any) -> list[Any]:
    from policyc.jaxcore.jaxprs import reading

    return list(reading.all_equations(jaxpr))


def test_no_operand_is_quantized_twice() -> None:
    """Two layers of three products, two of which share an activation."""
    weights, activations, gradients = 6 * [("fprop.rhs",)], 4 * [("fprop.lhs",)], 6 * [("dgrad.dy",)]
    assert quantizers("* -> nvfp4(backward=dequantized)") == activations + weights
    all_2d = quantizers("* -> nvfp4(scale2d=all)")
    assert all_2d[-10:] == activations + weights
    # Nothing reads the gradient of the data, so the two products with the data have no dgrad.
    assert [name for name in all_2d if name in (("dgrad.dy",), ("wgrad.dy",))] == all_2d[:-10]
    assert len(all_2d[:-10]) == len(gradients)


def test_codes_are_what_is_saved() -> None:
    """4.5 bits for each element of both operands, and some scalars."""
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((512, 256), (256, 1024)))
    for text in ("nvfp4(backward=dequantized)", "nvfp4(scale2d=all)"):
        f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=recipe_of(text))
        residuals = jax.eval_shape(lambda x, w, f=f: jax.vjp(f, x, w)[1], x, w)
        sizes = [a.size * a.dtype.itemsize for a in jax.tree.leaves(residuals)]
        codes = x.size * 4.5 / 8 if "2d" not in text else x.size * (4 / 8 + 1 / 256)
        weight = w.size * 4.5 / 8 if "2d" not in text else w.size * 2  # values of tiles, see `decode_tiles`
        assert sum(sizes) == pytest.approx(codes + weight, rel=0.01), text


def test_tiles_of_every_operand_serve_both_products() -> None:
    x, w, dy = (np.asarray(normal(*s, seed=i)) for i, s in enumerate([(64, 96), (96, 48), (64, 48)]))
    f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=recipe_of("nvfp4(scale2d=all)"))
    for scaled in (1.0, 1e-30):  # also where the largest magnitude is tiny
        results = quick_jit(partial(three_products, f))(x, w, np.float32(scaled) * dy)
        qx, qw, qdy = tiles(x), tiles(w.T).T, tiles(np.float32(scaled) * dy)
        for ours, exact in zip(results, (qx @ qw, qdy @ qw.T, qx.T @ qdy), strict=True):
            assert relative_error(ours, exact) < 1e-6


@pytest.mark.parametrize("backend", ["emulate", "xla"])
def test_mxfp8_tiles_serve_both_products_of_a_weight(backend: str) -> None:
    x, w, dy = (np.asarray(normal(*s, seed=i)) for i, s in enumerate([(40, 96), (96, 72), (40, 72)]))
    options = GemmOptions(backends=(backend,) * 3)
    recipe = recipe_of("mxfp8(scale2d=weights)")
    f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=recipe, options=options)
    y, dx, dw = quick_jit(partial(three_products, f))(x, w, dy)
    qw = values(mxfp8_tiles, 32, 32)(w.T).T
    exact = mxfp8(x) @ qw, mxfp8(dy) @ qw.T, mxfp8(x.T) @ mxfp8(dy.T).T
    for ours, theirs in zip((y, dx, dw), exact, strict=True):
        assert relative_error(ours, theirs) < 1e-6


def test_only_gradients_have_a_tensor_scale_with_ue5m3() -> None:
    """Also where all of them are below the least scale. A block of x below 2**-17 * 3 is zero."""
    x, w, dy = (np.array(normal(*s, seed=i)) for i, s in enumerate([(64, 96), (96, 48), (64, 48)]))
    x[:32, :16] *= np.float32(1e-6)
    fixed = values(partial(oracle.nvfp4, scale="ue5m3", bound=114688, amax=6 * 114688), 16)
    scaled = values(partial(oracle.nvfp4, scale="ue5m3", bound=114688), 16)
    assert not fixed(x)[:32, :16].any()
    f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=recipe_of("nvfp4(block_scale=ue5m3)"))
    tiny = np.float32(1e-9) * dy
    exact = fixed(x) @ fixed(w.T).T, scaled(tiny) @ fixed(w).T, fixed(x.T) @ scaled(tiny.T).T
    for ours, expected in zip(quick_jit(partial(three_products, f))(x, w, tiny), exact, strict=True):
        assert relative_error(ours, expected) < 1e-6


def test_a_gradient_in_tiles_is_rounded_stochastically_once() -> None:
    """Both products multiply the same codes: dx and dw of an identity are the same numbers."""
    dy, one = np.asarray(normal(32, 32, seed=5)), np.eye(32, dtype=np.float32) * 2688
    recipe = recipe_of("nvfp4(scale2d=all, sr=grad)")
    f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=recipe)
    _, dx, dw = quick_jit(partial(three_products, f))(one, one, dy)
    np.testing.assert_array_equal(np.asarray(dx).T, np.asarray(dw).T)
    assert 0.05 < relative_error(np.asarray(dx) / 2688, dy) < 0.2


# ---- signs


@pytest.mark.parametrize("signs", ["none", "random"])
def test_the_signs_of_the_rotation_are_those_of_the_documented_key(signs: str) -> None:
    x, w, dy = (normal(*s, seed=i, dtype=jnp.bfloat16) for i, s in enumerate([(64, 32), (32, 48), (64, 48)]))
    recipe = recipe_of(f"nvfp4(rht=wgrad, rht_signs={signs})")
    f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=recipe, options=GemmOptions(site=9))
    _, _, dw = jax.jit(partial(three_products, f))(x, w, dy)
    a, b, g = (np.asarray(v).astype(np.float32) for v in (x, w, dy))
    sums = [keys.checksum(keys.magnitude_bits(v).ravel()) for v in (a, b)]
    key = keys.make_key(0, 9, *sums, "wgrad.signs")
    drawn = np.array([1 - 2 * (int(keys.mix(i ^ key[0], key[1])) >> 31) for i in range(16)])
    rotation = (drawn if signs == "random" else np.ones(16, int))[:, None] * oracle.hadamard(16) / 4

    def rotated(v: np.ndarray) -> np.ndarray:
        groups = v.T.reshape(v.shape[1], -1, 16).astype(np.float64) @ rotation
        return np.asarray(jnp.asarray(groups.reshape(v.shape[1], -1), jnp.bfloat16), np.float32)

    exact = plain(rotated(a)) @ plain(rotated(g)).T
    # The result is bfloat16.
    assert relative_error(np.asarray(dw, np.float32), exact) < 2**-8
    assert relative_error(plain(a.T) @ plain(g.T).T, exact) > 0.05


def test_random_signs_change_with_the_numbers_and_the_gemm() -> None:
    """An operand of ones has an outlier in one column of the matrix after each rotation; where depends on the signs."""
    policy = "* -> mxfp4(rht=wgrad, rht_signs=random)"
    loss = policyc.apply(policy, lambda w, x: jnp.sum((x @ w) ** 2))
    w, grads = normal(32, 32), []
    for seed in range(2):
        x = normal(32, 32, seed=seed + 5)
        grads.append(jax.jit(jax.grad(loss))(w, x) - jax.grad(lambda w, x: jnp.sum((x @ w) ** 2))(w, x))
    same = jax.jit(jax.grad(loss))(w, x) - jax.grad(lambda w, x: jnp.sum((x @ w) ** 2))(w, x)
    np.testing.assert_array_equal(grads[1], same)
    assert not np.array_equal(grads[0], grads[1])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nvfp4(backward=dequantized, sr=grad)", "sr does not apply"),
        ("nvfp4(backward=dequantized, rht=wgrad)", "rht does not apply"),
        ("nvfp4(backward=dequantized, rounding=ms_eden)", "rounding does not apply"),
        ("nvfp4(backward=dequantized, outer=row)", "outer does not apply"),
        ("fp8(backward=dequantized, grad=e4m3)", "grad does not apply"),
        ("nvfp4(scale2d=all, rht=wgrad)", "rht would need another"),
        ("nvfp4(scale2d=all, mean_split)", "mean_split would need another"),
        ("nvfp4(rht_signs=random)", "operands that rht rotates"),
        ("nvfp4(block_scale=ue5m3, outer=row)", "outer does not apply"),
        ("nvfp4(block_scale=ue5m3, scale=four_over_six)", "scale does not apply"),
        ("nvfp4(block_scale=ue5m3, rounding=ms_eden)", "rounding does not apply"),
        ("nvfp4(scale_error=mae)", "option of scale=four_over_six"),
        ("nvfp4(scale_bound=448)", "option of scale=four_over_six"),
    ],
)
def test_options_that_would_have_no_effect_are_errors(text: str, reason: str) -> None:
    with pytest.raises(policyc.PolicyError, match=reason):
        recipe_of(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nvfp4(outer=row)\n* @ bwd -> nvfp4(backward=dequantized)", "at 'w', dgrad decodes the weight"),
        ("split(fprop=nvfp4(outer=row), bwd=nvfp4(backward=dequantized))", "outer=row or keep"),
        ("split(bwd=nvfp4(backward=dequantized))", "keep"),
        ("nvfp4(rht=wgrad.grad, rht_signs=none)", "both or neither"),
    ],
)  # fmt: skip
def test_a_decoded_operand_needs_codes(text: str, reason: str) -> None:
    with pytest.raises(policyc.PolicyError, match=reason):
        policyc.apply(f"* -> {text}", lambda p, x: jnp.sum(x @ p["w"]))({"w": normal(32, 32)}, normal(32, 32))


def test_a_late_switch_of_fprop_decodes_nothing() -> None:
    """After it, all three products are in bf16."""
    recipe = recipe_of("split(fprop=bf16, bwd=nvfp4(backward=dequantized))")
    assert recipe.treatment(Gemm.DGRAD, Role.WEIGHT).dequantized
    x, w, dy = (normal(32, 32, seed=i) for i in range(3))
    ours, bf16 = (
        quick_jit(
            partial(three_products, partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=r))
        )(x, w, dy)
        for r in (recipe, recipe_of("bf16"))
    )
    for one, other in zip(ours, bf16, strict=True):
        np.testing.assert_array_equal(one, other)
