"""XLA's own GEMMs of small formats: block-scaled for nvfp4 and mxfp8, 8-bit for fp8.

Blackwell runs the block-scaled GEMM as a cuDNN call. Elsewhere XLA multiplies values by scales first, which gives the
same numbers. XLA reads both operands with the contracted dimension last, and packed along it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from policyc.jaxcore.versions import FP8_DOT_PRECISION
from policyc.language.recipes import Treatment
from policyc.numerics import quantize as q
from policyc.numerics.backends import LoweringContext, emulate
from policyc.numerics.backends.choice import GemmQuery, Obstacle
from policyc.numerics.backends.emulate import apply_outer_scales, missing
from policyc.numerics.products import DimensionNumbers, free_dims
from policyc.numerics.quantize.bits import materialize, power_of_two
from policyc.numerics.quantize.layout import (
    TILE,
    Axes,
    Layout,
    Operand,
    Quantized,
    pack,
    repeat_axis,
    split_axis,
    unpack,
)
from policyc.numerics.quantize.values import outer_scale

__all__ = ["NEEDS_DEVICES", "UNSHARDABLE", "as_rows", "gemm", "missing", "obstacle", "quantize"]

NEEDS_DEVICES = True
UNSHARDABLE = False

_BLOCK_SCALED = {
    "nvfp4": (jnp.float4_e2m1fn, jnp.float8_e4m3fn),
    "mxfp8": (jnp.float8_e4m3fn, jnp.float8_e8m0fnu),
}
"""The dtypes of elements and of block scales."""
_FP8 = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


def obstacle(query: GemmQuery) -> Obstacle | None:
    """Why XLA cannot run this GEMM."""
    if query.ragged:
        return Obstacle(
            "XLA has no block-scaled GEMM over ragged groups",
            "keep it in bf16, or pad the groups to a dense GEMM",
        )
    if query.format not in (*_BLOCK_SCALED, "fp8"):
        return Obstacle(f"XLA has no block-scaled GEMM of {query.format}", "nvfp4 or mxfp8")
    return None


def quantize(
    x: jax.Array,
    treatment: Treatment,
    axes: Axes,
    key: q.Key | None,
    signs: q.Key | None,
    context: LoweringContext,
) -> Quantized:
    """Quantizes as the emulation does. A weight in 2D tiles is transposed first, if the GEMM reads it transposed.

    XLA would transpose it anyway, but later, as fp32 numbers on their way to codes.
    """
    if not treatment.tile2d or (axes.axis, axes.tile) != (-2, -1):
        return emulate.quantize(x, treatment, axes, key, signs, context)
    swap = {-1: -2, -2: -1}
    contract = tuple(swap.get(i, i) for i in axes.contract)
    transposed_axes = replace(axes, axis=-1, tile=-2, contract=contract)
    transposed = materialize(x.swapaxes(-1, -2))
    return emulate.quantize(transposed, treatment, transposed_axes, key, signs, context).swap_last_axes()


def gemm(
    lhs: Operand, rhs: Operand, dimensions: DimensionNumbers, out: Any, context: LoweringContext
) -> jax.Array:
    """The product of two quantized operands."""
    if not isinstance(lhs, Quantized) or not isinstance(rhs, Quantized):
        raise TypeError("both operands of a GEMM of small formats must be quantized")
    if lhs.layout.format == "fp8":
        if context.platform == "cpu":
            return emulate.gemm(lhs, rhs, dimensions, out, context)
        return _multiply_fp8(lhs, rhs, dimensions, out)
    (lc, rc), (lb, rb) = dimensions
    left, left_scales, left_free = as_rows(lhs, lc, lb)
    right, right_scales, right_free = as_rows(rhs, rc, rb)
    # The product stays fp32 if it is scaled once more afterwards.
    is_scaled = lhs.amax is not None or rhs.amax is not None or out not in (jnp.bfloat16, jnp.float32)
    multiply = jax.nn.scaled_matmul if context.platform == "cuda" else _multiply_block_scaled
    product = multiply(left, right, left_scales, right_scales, jnp.float32 if is_scaled else out)
    batch = tuple(lhs.codes.shape[i] for i in lb)
    product = product.reshape(*batch, *left_free, *right_free)
    return apply_outer_scales(product, lhs, rhs, dimensions, len(left_free)).astype(out)


def _multiply_block_scaled(
    a: jax.Array, b: jax.Array, a_scales: jax.Array, b_scales: jax.Array, out: Any
) -> jax.Array:
    """`jax.nn.scaled_matmul` on other platforms: what XLA does on a GPU that has no such GEMM."""

    def values(x: jax.Array, scales: jax.Array) -> jax.Array:
        blocks = x.astype(jnp.float32).reshape(*scales.shape, -1)
        return (blocks * scales.astype(jnp.float32)[..., None]).reshape(x.shape)

    dims = (((2,), (2,)), ((0,), (0,)))
    product = lax.dot_general(values(a, a_scales), values(b, b_scales), dims, precision=lax.Precision.HIGHEST)
    return product.astype(out)


def as_rows(
    operand: Quantized, contract: tuple[int, ...], batch: tuple[int, ...]
) -> tuple[jax.Array, jax.Array, tuple[int, ...]]:
    """An operand as (batch, rows, contracted), its scales likewise, and the sizes of its free dimensions."""
    layout, ndim = operand.layout, operand.codes.ndim
    element, scale = _BLOCK_SCALED[layout.format]
    free = free_dims(ndim, contract, batch)
    codes, scales = _arrange_along(operand, contract[-1] - ndim)
    sizes = {layout.axis: layout.size, layout.tile_axis: layout.tile_size}
    for i in free:
        if i - ndim in sizes:
            codes = lax.slice_in_dim(codes, 0, sizes[i - ndim], axis=i)
            scales = lax.slice_in_dim(scales, 0, sizes[i - ndim], axis=i)
    free_shape = tuple(codes.shape[i] for i in free)
    lead = (prod(codes.shape[i] for i in batch), prod(free_shape))
    order = (*batch, *free, *contract)
    codes, scales = (a.transpose(order).reshape(*lead, -1) for a in (codes, scales))
    values = lax.bitcast_convert_type(codes, element).reshape(*lead, -1)
    return values, lax.bitcast_convert_type(scales, scale), free_shape


def _arrange_along(operand: Quantized, axis: int) -> tuple[jax.Array, jax.Array]:
    """Codes packed along an axis, and one scale per block along it in each row."""
    layout: Layout = operand.layout
    codes, scales = operand.codes, operand.scales
    assert scales is not None
    if axis == layout.axis:
        return codes, scales if layout.tile_axis is None else repeat_axis(scales, layout.tile_axis, TILE)
    # Square tiles, contracted along their other axis: the scales serve as they are.
    assert axis == layout.tile_axis
    scales = repeat_axis(scales, layout.axis, TILE)
    if layout.packed:
        pairs = split_axis(unpack(codes, layout.axis), axis, codes.shape[axis] // 2, 2)
        index = pairs.ndim + axis
        codes = pack(*(lax.index_in_dim(pairs, i, index, keepdims=False) for i in range(2)))
    return codes, scales


# ---- FP8


def _multiply_fp8(lhs: Quantized, rhs: Quantized, dimensions: DimensionNumbers, out: Any) -> jax.Array:
    """On 8-bit matrix units, with fp32 accumulation. Inside a chunk, Hopper's units keep some 14 bits."""
    a, b = (lax.bitcast_convert_type(o.codes, _FP8[o.layout.element]) for o in (lhs, rhs))
    multiply = partial(lax.dot_general, a, b, dimensions, precision=FP8_DOT_PRECISION)
    has_one_scale = all(o.amax is not None and o.amax.size == 1 for o in (lhs, rhs))
    if has_one_scale and out == jnp.bfloat16 and _allows_excess_precision():
        return _scale_inside(multiply(preferred_element_type=out), lhs, rhs)
    product = multiply(preferred_element_type=jnp.float32)
    free = a.ndim - len(dimensions[0][0]) - len(dimensions[1][0])
    return apply_outer_scales(product, lhs, rhs, dimensions, free).astype(out)


_REACH = 60
"""An 8-bit GEMM applies scales from 2**-60 to 2**60 itself: they cannot move a sum out of the range of bfloat16."""


def _scale_inside(product: jax.Array, lhs: Quantized, rhs: Quantized) -> jax.Array:
    """Applies both outer scales so that XLA fuses them into the GEMM, before it rounds its fp32 sums to bfloat16.

    So no fp32 result is in memory. The cast of the scale to bfloat16 is there only for the types: XLA drops it and
    gives the GEMM the fp32 scale. Of a scale beyond `_REACH`, the rest is a power of two, which is exact outside the
    GEMM. If that is out of range too, so is every sum.
    """
    (m, e), (n, f) = (cast("tuple[jax.Array, jax.Array]", outer_scale(o)) for o in (lhs, rhs))
    exponent = jnp.reshape(e + f, ())
    inside = jnp.clip(exponent, -_REACH, _REACH)
    scale = jnp.reshape(m * n, ()) * power_of_two(inside)
    rest = power_of_two(jnp.clip(exponent - inside, -126, 127))
    return product * scale.astype(product.dtype) * rest.astype(product.dtype)


def _allows_excess_precision() -> bool:
    """Whether XLA may drop a cast to fewer bits and back. It may, unless a flag forbids it."""
    return "xla_allow_excess_precision=false" not in os.environ.get("XLA_FLAGS", "").lower()
