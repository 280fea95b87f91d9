"""XLA's own GEMMs of small formats: block-scaled for nvfp4 and mxfp8, 8-bit for fp8.

In: two operands of one format. Out: their product. Blackwell runs the block-scaled one as a cuDNN call; elsewhere XLA
multiplies values and scales out, which gives the same numbers. The one trap: both operands are read with what is
contracted last, and packed along it.
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

from policyc.jaxcore.define_primitive import FULL_8_BIT_SUMS
from policyc.language.recipes import Treatment
from policyc.numerics import quantize as q
from policyc.numerics.backends import emulate
from policyc.numerics.backends.choice import GemmQuery, Obstacle
from policyc.numerics.backends.emulate import Dims, Operand, missing, with_outer
from policyc.numerics.quantize.bits import materialize, power_of_two
from policyc.numerics.quantize.layout import TILE, Axes, Quantized, pack, repeat_axis, split_axis, unpack
from policyc.numerics.quantize.values import outer

__all__ = ["gemm", "missing", "obstacle", "quantize", "rows"]

_BLOCK_SCALED = {
    "nvfp4": (jnp.float4_e2m1fn, jnp.float8_e4m3fn),
    "mxfp8": (jnp.float8_e4m3fn, jnp.float8_e8m0fnu),
}
_FP8 = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


def obstacle(ask: GemmQuery) -> Obstacle | None:
    if ask.ragged:
        return Obstacle(
            "XLA has no block-scaled GEMM over ragged groups",
            "keep it in bf16, or pad the groups to a dense GEMM",
        )
    if ask.format not in (*_BLOCK_SCALED, "fp8"):
        return Obstacle(f"XLA has no block-scaled GEMM of {ask.format}", "nvfp4 or mxfp8")
    return None


def quantize(
    x: jax.Array,
    treatment: Treatment,
    axes: Axes,
    *,
    key: q.Key | None,
    signs: q.Key | None,
    platform: str,
    alone: bool,
) -> Quantized:
    """As in the emulation. A weight in tiles is turned first, where the product reads it turned.

    XLA would turn it anyway, but later, as fp32 numbers on their way to codes.
    """
    quantize_as = partial(emulate.quantize, key=key, signs=signs, platform=platform, alone=alone)
    if not treatment.tile2d or (axes.axis, axes.tile) != (-2, -1):
        return quantize_as(x, treatment, axes)
    swap = {-1: -2, -2: -1}
    contract = tuple(swap.get(i, i) for i in axes.contract)
    out = quantize_as(
        materialize(x.swapaxes(-1, -2)), treatment, replace(axes, axis=-1, tile=-2, contract=contract)
    )
    assert out.scales is not None
    return Quantized(
        codes=out.codes.swapaxes(-1, -2),
        scales=out.scales.swapaxes(-1, -2),
        amax=None if out.amax is None else out.amax.swapaxes(-1, -2),
        layout=replace(out.layout, axis=-2, tile_axis=-1),
    )


def gemm(lhs: Operand, rhs: Operand, dimensions: Dims, out: Any, *, platform: str) -> jax.Array:
    if not isinstance(lhs, Quantized) or not isinstance(rhs, Quantized):
        raise TypeError("both operands of a product of small formats must be quantized")
    if lhs.layout.format == "fp8":
        if platform == "cpu":
            return emulate.gemm(lhs, rhs, dimensions, out, platform=platform)
        return _fp8(lhs, rhs, dimensions, out)
    (lc, rc), (lb, rb) = dimensions
    left, left_scales, left_free = rows(lhs, lc, lb)
    right, right_scales, right_free = rows(rhs, rc, rb)
    # What is scaled once more afterwards stays fp32 until then.
    scaled = lhs.amax is not None or rhs.amax is not None or out not in (jnp.bfloat16, jnp.float32)
    multiply = _block_scaled if platform == "cuda" else _multiplied_out
    product = multiply(left, right, left_scales, right_scales, jnp.float32 if scaled else out)
    batch = tuple(lhs.codes.shape[i] for i in lb)
    product = product.reshape(*batch, *left_free, *right_free)
    return with_outer(product, lhs, rhs, dimensions, len(left_free)).astype(out)


def _block_scaled(
    a: jax.Array, b: jax.Array, a_scales: jax.Array, b_scales: jax.Array, out: Any
) -> jax.Array:
    return jax.nn.scaled_matmul(a, b, a_scales, b_scales, out)


def _multiplied_out(
    a: jax.Array, b: jax.Array, a_scales: jax.Array, b_scales: jax.Array, out: Any
) -> jax.Array:
    """The same where XLA has no such GEMM: what it makes of one on a GPU that has none either."""

    def values(x: jax.Array, scales: jax.Array) -> jax.Array:
        blocks = x.astype(jnp.float32).reshape(*scales.shape, -1)
        return (blocks * scales.astype(jnp.float32)[..., None]).reshape(x.shape)

    dims = (((2,), (2,)), ((0,), (0,)))
    product = lax.dot_general(values(a, a_scales), values(b, b_scales), dims, precision=lax.Precision.HIGHEST)
    return product.astype(out)


def rows(
    operand: Quantized, contract: tuple[int, ...], batch: tuple[int, ...]
) -> tuple[jax.Array, jax.Array, tuple[int, ...]]:
    """An operand as (batch, rows, contracted), its scales alike, and the lengths of its free dimensions."""
    layout, ndim = operand.layout, operand.codes.ndim
    element, scale = _BLOCK_SCALED[layout.format]
    free = tuple(i for i in range(ndim) if i not in (*contract, *batch))
    order = (*batch, *free, *contract)
    along = contract[-1] - ndim
    codes, scales = operand.codes, operand.scales
    assert scales is not None
    if along != layout.axis:
        # Square tiles, contracted along their other axis: the scales serve as they are.
        assert along == layout.tile_axis
        scales = repeat_axis(scales, layout.axis, TILE)
        if layout.packed:
            split = split_axis(unpack(codes, layout.axis), along, codes.shape[along] // 2, 2)
            at = split.ndim + along
            codes = pack(*(lax.index_in_dim(split, i, at, keepdims=False) for i in range(2)))
    elif layout.tile_axis is not None:
        scales = repeat_axis(scales, layout.tile_axis, TILE)
    sizes = {layout.axis: layout.size, layout.tile_axis: layout.tile_size}
    for i in free:
        if i - ndim in sizes:
            codes = lax.slice_in_dim(codes, 0, sizes[i - ndim], axis=i)
            scales = lax.slice_in_dim(scales, 0, sizes[i - ndim], axis=i)
    shape = tuple(codes.shape[i] for i in free)
    lead = (prod(codes.shape[i] for i in batch), prod(shape))
    codes, scales = (a.transpose(order).reshape(*lead, -1) for a in (codes, scales))
    values = lax.bitcast_convert_type(codes, element).reshape(*lead, -1)
    return values, lax.bitcast_convert_type(scales, scale), shape


def _fp8(lhs: Quantized, rhs: Quantized, dimensions: Dims, out: Any) -> jax.Array:
    """On 8-bit matrix units, accumulated in fp32; inside a chunk, Hopper's keep some 14 bits."""
    a, b = (lax.bitcast_convert_type(o.codes, _FP8[o.layout.element]) for o in (lhs, rhs))
    multiply = partial(lax.dot_general, a, b, dimensions, precision=FULL_8_BIT_SUMS)
    one = all(o.amax is not None and o.amax.size == 1 for o in (lhs, rhs))
    if one and out == jnp.bfloat16 and _excess_precision():
        return _scaled_inside(multiply(preferred_element_type=out), lhs, rhs)
    product = multiply(preferred_element_type=jnp.float32)
    free = a.ndim - len(dimensions[0][0]) - len(dimensions[1][0])
    return with_outer(product, lhs, rhs, dimensions, free).astype(out)


_REACH = 60
"""Scales from 2**-60 to 2**60 are applied inside a product of 8-bit numbers: no sum of theirs leaves bfloat16 by it."""


def _scaled_inside(product: jax.Array, lhs: Quantized, rhs: Quantized) -> jax.Array:
    """Both outer scales, where XLA takes them into the product: on its fp32 sums, before they are rounded to bfloat16.

    So no fp32 result stands in memory. XLA hands the product the scale before its cast to bfloat16, which is there for
    the types alone. Of a scale out of reach, the rest is a power of two, which is exact outside; where that is out of
    range too, so is every sum.
    """
    (m, e), (n, f) = (cast("tuple[jax.Array, jax.Array]", outer(o)) for o in (lhs, rhs))
    exponent = jnp.reshape(e + f, ())
    inside = jnp.clip(exponent, -_REACH, _REACH)
    scale = jnp.reshape(m * n, ()) * power_of_two(inside)
    rest = power_of_two(jnp.clip(exponent - inside, -126, 127))
    return product * scale.astype(product.dtype) * rest.astype(product.dtype)


def _excess_precision() -> bool:
    """May XLA leave out a cast to fewer bits and back? It does, unless it is told not to."""
    return "xla_allow_excess_precision=false" not in os.environ.get("XLA_FLAGS", "").lower()
