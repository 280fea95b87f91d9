"""`quantized_dot_general`: a matrix product whose fprop, dgrad and wgrad run as a recipe says.

The residuals of the backward pass are quantized operands, wherever the recipe quantizes them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from policyc.jaxcore.hooks import autodiff
from policyc.jaxcore.primitives.lowering import run_first
from policyc.jaxcore.shardings import match_varying_axes, reshard_like, shape_dtype_struct
from policyc.jaxcore.versions import INLINE_WHEN_TRACED
from policyc.language.formats import FORMATS
from policyc.language.recipes import Gemm, Recipe
from policyc.language.treatments import normalize_recipe
from policyc.numerics import primitives
from policyc.numerics.dimensions import as_dimension_numbers, canonicalize
from policyc.numerics.operands import (
    Keys,
    Parts,
    can_quantize_pair,
    quantize_operand,
    quantize_pair,
    save_code_order,
    select_code_order,
    shares_codes,
)
from policyc.numerics.primitives import takes_stack
from policyc.numerics.products import (
    DEFAULT_OPTIONS,
    Backends,
    GemmOptions,
    GemmSpec,
    OperandSpec,
    Product,
    Products,
    gemm_products,
)
from policyc.numerics.quantize import Key, Quantized, dequantize, make_key
from policyc.numerics.quantize.reference.bits import abs_bits, materialize
from policyc.numerics.quantize.reference.random import checksum

__all__ = [
    "Backends",
    "GemmOptions",
    "Precomputed",
    "Prequantized",
    "prequantize",
    "quantized_dot_general",
    "takes_stack",
    "weight_maxima",
]


class Prequantized(NamedTuple):
    """An already quantized operand.

    fprop reads `fprop`. The GEMM of the other operand's gradient reads `backward`, if it needs different codes.
    """

    fprop: Quantized | None = None
    backward: Quantized | None = None


PrequantizedPair = tuple[Prequantized, Prequantized]


class Precomputed(NamedTuple):
    """Optional precomputed inputs: quantized operands, and the key of stochastic rounding.

    The product computes whatever is missing.
    """

    lhs: Prequantized = Prequantized()
    rhs: Prequantized = Prequantized()
    rounding_key: Key | None = None


_NOTHING_PRECOMPUTED = Precomputed()


def quantized_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    recipe: Recipe,
    options: GemmOptions = DEFAULT_OPTIONS,
    precomputed: Precomputed = _NOTHING_PRECOMPUTED,
) -> jax.Array:
    """`lax.dot_general` whose three GEMMs run as the recipe says.

    Anything but a GEMM of nonempty floating-point operands of up to 32 bits is left to `lax.dot_general`.

    Args:
      lhs, rhs, dimension_numbers: as in `lax.dot_general`.
      recipe: how each of the three GEMMs treats its operands.
      options: how the product runs.
      precomputed: operands that `prequantize` has quantized, and the key of stochastic rounding (by default
        `make_key(0, site)`; the content of each tensor is folded into it). Gradients still go to lhs and rhs.
    """
    dims = as_dimension_numbers(dimension_numbers)
    preferred = options.preferred_element_type
    is_float = all(jnp.issubdtype(x.dtype, jnp.floating) and x.size for x in (lhs, rhs))
    if not is_float or not dims[0][0] or jnp.float64 in (lhs.dtype, rhs.dtype):
        return lax.dot_general(lhs, rhs, dims, precision=options.precision, preferred_element_type=preferred)
    out_dtype = jnp.dtype(preferred or jnp.result_type(lhs, rhs))
    recipe = normalize_recipe(recipe, has_weight=options.weight is not None)
    # Outside the custom_vjp: the transpose of this cast sums the gradient of a weight over the devices of a
    # `shard_map` that share it.
    lhs, rhs = match_varying_axes(lhs, rhs)
    canonical = canonicalize(lhs.shape, rhs.shape, dims, recipe)
    lhs, rhs = canonical.convert_lhs(lhs), canonical.convert_rhs(rhs)
    spec = GemmSpec(
        dims=canonical.dims,
        recipe=recipe,
        lhs=shape_dtype_struct(lhs),
        rhs=shape_dtype_struct(rhs),
        options=options,
        out_dtype=out_dtype,
    )
    key = precomputed.rounding_key or make_key(0, options.site)
    prequantized = precomputed.lhs, precomputed.rhs
    return _gemm(spec, lhs, rhs, prequantized, key).reshape(canonical.result_shape)


def prequantize(
    array: jax.Array,
    other: jax.ShapeDtypeStruct,
    dimension_numbers: Any,
    recipe: Recipe,
    options: GemmOptions,
    *,
    operand: Literal["lhs", "rhs"],
    shared_maximum: jax.Array | None = None,
) -> Prequantized:
    """Quantizes one operand as `quantized_dot_general` would. `other` is the shape of the other operand.

    Operands that are rounded stochastically, or split into a mean and a residual, are left to the product. `backward`
    is skipped if its GEMM is not in `options.products`. `shared_maximum` is the maximum of the `weight_maxima` of all
    weights that share an outer scale; without it, a weight has a scale of its own.
    """
    is_lhs = operand == "lhs"
    array, products = _describe_operand(array, other, dimension_numbers, recipe, options, is_lhs=is_lhs)
    if operand == options.weight:
        # A cast produces the weight. Once the result is in memory, each further read takes half the bytes.
        array = materialize(array)
    # lhs is an operand of fprop and of the gradient of rhs; rhs, of fprop and of the gradient of lhs.
    gradient = products.d_rhs if is_lhs else products.d_lhs
    forward = products.fprop.left if is_lhs else products.fprop.right
    backward = gradient.left if is_lhs else gradient.right

    def quantize(product: Product, side: OperandSpec) -> Quantized | None:
        t = side.treatment
        if not FORMATS[t.format].is_quantized or t.is_random or t.mean_split:
            return None
        key = make_key(0, options.site)
        save = operand != options.weight
        (quantized,) = _quantize(array, side, product, (key, key), save=save, shared_maximum=shared_maximum)
        return cast("Quantized", quantized)

    differs = gradient.gemm in options.products and not shares_codes(forward, backward)
    is_random = any(o.treatment.is_random for o in (forward, backward))
    if differs and not is_random and can_quantize_pair(forward, backward):
        key = make_key(0, options.site)
        with jax.named_scope(products.fprop.scope):
            pair = quantize_pair(
                array,
                forward,
                backward,
                (key, key),
                save=operand != options.weight,
                shared_maximum=shared_maximum,
            )
        return Prequantized(*pair)
    return Prequantized(quantize(products.fprop, forward), quantize(gradient, backward) if differs else None)


def weight_maxima(
    array: jax.Array,
    other: jax.ShapeDtypeStruct,
    dimension_numbers: Any,
    recipe: Recipe,
    options: GemmOptions,
) -> jax.Array:
    """The bits of the largest magnitude of a weight, one for each index of its batch dimensions."""
    is_lhs = options.weight == "lhs"
    array, products = _describe_operand(array, other, dimension_numbers, recipe, options, is_lhs=is_lhs)
    batch = (products.fprop.left if is_lhs else products.fprop.right).axes.batch
    return abs_bits(array).max(axis=tuple(i for i in range(-array.ndim, 0) if i not in batch)).reshape(-1)


def _describe_operand(
    array: jax.Array,
    other: jax.ShapeDtypeStruct,
    dimension_numbers: Any,
    recipe: Recipe,
    options: GemmOptions,
    *,
    is_lhs: bool,
) -> tuple[jax.Array, Products]:
    """An operand in canonical form, and the GEMMs that read it."""
    recipe = normalize_recipe(recipe, has_weight=options.weight is not None)
    lhs, rhs = (array, other) if is_lhs else (other, array)
    canonical = canonicalize(lhs.shape, rhs.shape, as_dimension_numbers(dimension_numbers), recipe)
    array = canonical.convert_lhs(array) if is_lhs else canonical.convert_rhs(array)
    other = jax.eval_shape(canonical.convert_rhs if is_lhs else canonical.convert_lhs, other)
    this = shape_dtype_struct(array)
    lhs, rhs = (this, other) if is_lhs else (other, this)
    spec = GemmSpec(dims=canonical.dims, recipe=recipe, lhs=lhs, rhs=rhs, options=options)
    return array, gemm_products(spec)


def _quantize(x: jax.Array, operand: OperandSpec, product: Product, keys: Keys, **options: Any) -> Parts:
    with jax.named_scope(product.scope):
        return quantize_operand(x, operand, keys, decode_tiles=True, **options)


def _multiply(product: Product, left: Parts, right: Parts, out: Any, tokens: int = 0) -> jax.Array:
    """Sums the products of all parts, in the dimension order of the result.

    `tokens` is the number of tokens, needed only if the product contracts them and both operands are split.
    """
    with jax.named_scope(product.scope):
        left, right = select_code_order(left, product.left), select_code_order(right, product.right)
        return _multiply_parts(product, left, right, out, tokens).astype(out).transpose(product.order)


def _multiply_parts(product: Product, left: Parts, right: Parts, out: Any, tokens: int) -> jax.Array:
    multiply = partial(primitives.scaled_gemm, dimension_numbers=product.dims, backend=product.left.backend)
    if not any(isinstance(p, Quantized) for p in (*left, *right)):
        return primitives.multiply_plain(
            product, cast("jax.Array", left[0]), cast("jax.Array", right[0]), out
        )
    if len(left) == len(right) == 1:
        return multiply(left[0], right[0], out=out)
    if product.left.contracts_tokens:
        # The residuals sum to zero over tokens, so the products of a residual and a mean vanish. The product of both
        # means is the same for each token.
        y = multiply(left[0], right[0], out=jnp.float32)
        if len(left) == len(right):
            a, b = (dequantize(cast("Quantized", parts[1])) for parts in (left, right))
            y = y + tokens * lax.dot_general(a, b, product.dims, precision=lax.Precision.HIGHEST)
        return y
    terms = [multiply(a, b, out=jnp.float32) for a in left for b in right]
    return sum(terms[1:], start=terms[0])


def _original_dot(spec: GemmSpec, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return lax.dot_general(
        lhs, rhs, spec.dims, precision=spec.options.precision, preferred_element_type=spec.out_dtype
    )


# ---- differentiation


class _Residuals(NamedTuple):
    """Residuals: each operand in the form that the gradient of the other one reads, and the keys."""

    rhs: Parts
    lhs: Parts
    keys: Keys


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gemm(
    spec: GemmSpec, lhs: jax.Array, rhs: jax.Array, prequantized: PrequantizedPair, key: Key
) -> jax.Array:
    return _forward(spec, lhs, rhs, prequantized, (key, make_sign_key(spec, lhs, rhs, key)))[0]


def _forward(
    spec: GemmSpec,
    lhs: jax.Array,
    rhs: jax.Array,
    prequantized: PrequantizedPair,
    keys: Keys,
    *,
    save: bool = False,
) -> tuple[jax.Array, Parts, Parts]:
    """The result, and both operands as fprop read them."""
    fprop = gemm_products(spec).fprop
    if fprop.is_kept:
        with jax.named_scope(fprop.scope):
            return _original_dot(spec, lhs, rhs), (lhs,), (rhs,)
    left = _as_parts(prequantized[0].fprop) or _quantize(lhs, fprop.left, fprop, keys, save=save)
    right = _as_parts(prequantized[1].fprop) or _quantize(rhs, fprop.right, fprop, keys, save=save)
    return _multiply(fprop, left, right, spec.out_dtype), left, right


def _as_parts(quantized: Quantized | None) -> Parts:
    return () if quantized is None else (quantized,)


def _gemm_fwd(
    spec: GemmSpec, lhs: jax.Array, rhs: jax.Array, prequantized: PrequantizedPair, key: Key
) -> tuple[jax.Array, _Residuals]:
    products = gemm_products(spec)
    fprop, d_lhs, d_rhs = products.fprop, products.d_lhs, products.d_rhs
    keys = key, make_sign_key(spec, lhs, rhs, key)
    prequantized = (
        _quantize_pair_if_possible(spec, lhs, prequantized[0], (fprop.left, d_rhs.left), keys),
        _quantize_pair_if_possible(spec, rhs, prequantized[1], (fprop.right, d_lhs.right), keys),
    )
    y, left, right = _forward(spec, lhs, rhs, prequantized, keys, save=True)
    if not shares_codes(fprop.right, d_lhs.right):
        right = _as_parts(prequantized[1].backward) or _quantize(rhs, d_lhs.right, d_lhs, keys, save=True)
    if not shares_codes(fprop.left, d_rhs.left):
        left = _as_parts(prequantized[0].backward) or _quantize(lhs, d_rhs.left, d_rhs, keys, save=True)
    saved_rhs, saved_lhs = save_code_order(right, d_lhs.right), save_code_order(left, d_rhs.left)
    return y, _Residuals(saved_rhs, saved_lhs, keys)


def _quantize_pair_if_possible(
    spec: GemmSpec,
    x: jax.Array,
    prequantized: Prequantized,
    operands: tuple[OperandSpec, OperandSpec],
    keys: Keys,
) -> Prequantized:
    """Quantizes an operand for fprop and for the gradient of the other operand, if one quantizer can write both."""
    forward, backward = operands
    is_used = backward.gemm in spec.options.products
    if prequantized.fprop is not None or not is_used or not can_quantize_pair(forward, backward):
        return prequantized
    with jax.named_scope(gemm_products(spec).fprop.scope):
        return Prequantized(*quantize_pair(x, forward, backward, keys, save=True))


def make_sign_key(spec: GemmSpec, lhs: jax.Array, rhs: jax.Array, key: Key) -> Key:
    """The key of fresh signs. The content of both operands is folded in, so the signs change in every step.

    Both operands of a GEMM need the same signs, and the forward pass quantizes one operand of each backward GEMM before
    dy is known. So the key depends on lhs and rhs only. Each GEMM folds its own name into it.
    """
    if not any(t.has_random_signs for t in spec.recipe.treatments):
        return key
    return key.fold(checksum(abs_bits(lhs))).fold(checksum(abs_bits(rhs)))


def _gemm_bwd(
    spec: GemmSpec, residuals: _Residuals, dy: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    # The layers of an unrolled model have identical products: their gradients are traced once and inlined.
    gradients = _traced_gradients if autodiff.is_staging() else _gradients
    return *gradients(spec, residuals, dy), None, None


def _gradients(spec: GemmSpec, residuals: _Residuals, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradients of both operands."""
    products = gemm_products(spec)
    d_lhs, d_rhs = products.d_lhs, products.d_rhs
    for_lhs, for_rhs = _quantize_dy_once(spec, dy, residuals.keys)

    def lhs_gradient() -> jax.Array:
        saved, operand = residuals.rhs, d_lhs.left
        quantize_dy = partial(_quantize, dy, operand, d_lhs, residuals.keys)
        return _gradient(spec, d_lhs, dy, saved, lambda: for_lhs or quantize_dy(), wrt="lhs")

    def rhs_gradient() -> jax.Array:
        saved, operand = residuals.lhs, d_rhs.right
        quantize_dy = partial(_quantize, dy, operand, d_rhs, residuals.keys)
        return _gradient(spec, d_rhs, dy, saved, lambda: for_rhs or quantize_dy(), wrt="rhs")

    # Values of dy for wgrad take much memory until wgrad has run, which XLA would put off. If dgrad has a larger result
    # than dy, as in a down projection, it runs when XLA likes: what reads the result often computes the operand of
    # wgrad again, in one pass.
    if d_rhs.gemm == Gemm.WGRAD and _has_values(for_rhs) and dy.size >= spec.lhs.size:
        rhs, for_lhs = _run_first(rhs_gradient(), for_lhs)
        return lhs_gradient(), rhs
    if d_lhs.gemm == Gemm.WGRAD and _has_values(for_lhs) and dy.size >= spec.rhs.size:
        lhs, for_rhs = _run_first(lhs_gradient(), for_rhs)
        return lhs, rhs_gradient()
    return lhs_gradient(), rhs_gradient()


def _has_values(parts: Parts) -> bool:
    return any(isinstance(part, Quantized) and part.layout.decoded for part in parts)


def _run_first(gradient: jax.Array, dy: Parts) -> tuple[jax.Array, Parts]:
    leaves, tree = jax.tree.flatten(dy)
    gradient, *leaves = run_first(gradient, *leaves)
    return gradient, jax.tree.unflatten(tree, leaves)


_traced_gradients = jax.jit(_gradients, static_argnums=0, inline=INLINE_WHEN_TRACED)


def _quantize_dy_once(spec: GemmSpec, dy: jax.Array, keys: Keys) -> tuple[Parts, Parts]:
    """dy for the GEMM of each gradient, if one quantizer serves both; empty otherwise."""
    products = gemm_products(spec)
    d_lhs, d_rhs = products.d_lhs, products.d_rhs
    if shares_codes(d_lhs.left, d_rhs.right):
        shared = _quantize(dy, d_lhs.left, d_lhs, keys)
        return shared, shared
    if {d_lhs.gemm, d_rhs.gemm} <= spec.options.products and can_quantize_pair(d_lhs.left, d_rhs.right):
        with jax.named_scope(d_lhs.scope):
            one, other = quantize_pair(dy, d_lhs.left, d_rhs.right, keys)
        return (one,), (other,)
    return (), ()


def _gradient(
    spec: GemmSpec,
    product: Product,
    dy: jax.Array,
    saved: Parts,
    quantize_dy: Callable[[], Parts],
    *,
    wrt: Literal["lhs", "rhs"],
) -> jax.Array:
    """The gradient of an operand, from dy and the saved other operand."""
    is_lhs = wrt == "lhs"
    operand = spec.lhs if is_lhs else spec.rhs
    if product.is_kept:
        other = cast("jax.Array", saved[0])

        def linear(x: jax.Array) -> jax.Array:
            return _original_dot(spec, x, other) if is_lhs else _original_dot(spec, other, x)

        with jax.named_scope(product.scope):
            return cast("jax.Array", jax.linear_transpose(linear, operand)(dy)[0])
    tokens = prod(dy.shape[i] for i in (product.left if is_lhs else product.right).tokens)
    quantized_dy = quantize_dy()
    left, right = (quantized_dy, saved) if is_lhs else (saved, quantized_dy)
    return reshard_like(_multiply(product, left, right, operand.dtype, tokens), operand)


_gemm.defvjp(_gemm_fwd, _gemm_bwd)
