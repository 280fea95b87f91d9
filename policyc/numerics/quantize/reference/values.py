"""Converts codes and scales back to numbers.

A GEMM multiplies `block_values`, which are exact in bfloat16, and applies the outer scales to its result. `dequantize`
is for measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from policyc.language.formats import FORMATS
from policyc.numerics.quantize.reference.bits import (
    ELEMENTS,
    HALF_UNIT,
    INFINITY,
    SCALES,
    Element,
    bits_of,
    decode,
    decode_in_half_units,
    exact_div_by_constant,
    from_bits,
    materialize,
    power_of_two,
)
from policyc.numerics.quantize.reference.layout import Quantized, expand_per_block, split_blocks, trim, unpack


def codes_of(q: Quantized) -> jax.Array:
    """The codes, one to a uint8, without padding."""
    codes = unpack(q.codes, q.layout.axis) if q.layout.packed else q.codes
    return trim(codes, q.layout)


def block_values(q: Quantized, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.Array:
    """Codes times block scales, with padding: exact in bfloat16. The outer scale is not applied."""
    layout = q.layout
    if layout.decoded:
        return q.codes.astype(dtype)
    scale = SCALES.get(FORMATS[layout.format].scale)
    if scale is not None and layout.axis == -1 and layout.tile_axis is None and dtype == jnp.bfloat16:
        return _nvfp4_rows(q, scale)
    # float32 is only requested on CPU.
    codes = unpack(q.codes, layout.axis, cpu=dtype == jnp.float32) if layout.packed else q.codes
    element = ELEMENTS[layout.element]
    if q.scales is None:
        return decode(codes, element).astype(dtype)
    blocks, scales = split_blocks(codes, layout), expand_per_block(q.scales, layout)
    if scale is not None:
        values = decode_in_half_units(blocks) * _scales_of_half_units(scales, scale)
    else:
        values = _scale_mx_blocks(blocks, scales, element)
    return values.reshape(codes.shape).astype(dtype)


def decode_values(q: Quantized, dtype: jax.typing.DTypeLike) -> Quantized:
    """Replaces codes and block scales by bfloat16 values, which `block_values` computes in `dtype`."""
    values = block_values(q, dtype).astype(jnp.bfloat16)
    return replace(q, codes=values, scales=None, layout=replace(q.layout, decoded=True))


def _nvfp4_rows(q: Quantized, scale: Element) -> jax.Array:
    """The bfloat16 values of blocks along the last axis, computed two to a word.

    A GPU thread reads eight codes at once and writes their 16 bytes at once.
    """
    assert q.scales is not None
    *lead, blocks = q.scales.shape
    words = lax.bitcast_convert_type(q.codes.reshape(*lead, blocks, 2, 4), jnp.uint32)
    shape = (*words.shape, 4)
    pairs = words[..., None] >> (lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1) * 8)
    scales = _scales_of_half_units(q.scales, scale)[..., None, None]
    low, high = (bits_of(decode_in_half_units(pairs >> shift) * scales) for shift in (0, 4))
    values = lax.bitcast_convert_type(lax.shift_right_logical(low, 16) | (high & ~0xFFFF), jnp.bfloat16)
    return values.reshape(*lead, -1)


def _scales_of_half_units(scales: jax.Array, element: Element) -> jax.Array:
    """The values of block scales times `HALF_UNIT`, to multiply with the result of `decode_in_half_units`."""
    return decode(scales, element) * HALF_UNIT


def _scale_mx_blocks(codes: jax.Array, scales: jax.Array, element: Element) -> jax.Array:
    byte = scales.astype(jnp.int32)
    # The least scale, 2**-127, is not a normal number: it is applied in two steps.
    values = decode(codes, element) * from_bits(jnp.clip(byte, 1, 254) << 23) * jnp.where(byte == 0, 0.5, 1.0)
    return jnp.where(byte == 255, jnp.float32(jnp.nan), values)


def outer_scale(amax: jax.Array, bound: float) -> tuple[jax.Array, jax.Array]:
    """The outer scale amax / bound as m * 2**e.

    It is kept in two parts because amax / bound may be denormal when the product of two such scales is not.
    """
    bits = bits_of(amax)
    is_denormal = bits < 0x800000
    # The integer is the denormal in units of 2**-149.
    normal = jnp.where(is_denormal, bits_of(bits.astype(jnp.float32)), bits)
    m = exact_div_by_constant((normal & 0x7FFFFF) | 0x800000, bound)
    e = (normal >> 23) - jnp.where(is_denormal, 149 + 127, 127)
    m = jnp.where(bits >= INFINITY, jnp.float32(jnp.nan), m)
    return jnp.where(bits == 0, jnp.float32(0), m), jnp.where(bits == 0, 0, e)


def apply_outer_scale(values: jax.Array, m: jax.Array, e: jax.Array) -> jax.Array:
    """values * m * 2**e. No intermediate result under- or overflows before the final one does."""
    half = e >> 1
    return values * m * power_of_two(half) * power_of_two(e - half)


Scale = tuple[jax.Array, float]
"""The amax and the bound of an outer scale, which is amax / bound."""


FindFactors = Callable[[Sequence[Scale]], Sequence[jax.Array]]
"""Computes both `outer_factors`, in memory."""


def write_outer_factors(scales: Sequence[Scale]) -> Sequence[jax.Array]:
    """Both `outer_factors`. Without the barrier, XLA would recompute them for every element."""
    return materialize(outer_factors(scales))


def scale_outer(
    values: jax.Array, scales: Sequence[Scale], find_factors: FindFactors = write_outer_factors
) -> jax.Array:
    """fp32 values times outer scales."""
    if not scales:
        return values
    if all(amax.size == 1 for amax, _ in scales):
        first, second = find_factors(scales)
        scaled: jax.Array = values * first * second
        return scaled
    m, e = jnp.float32(1), jnp.int32(0)
    for scale in scales:
        one, exponent = outer_scale(*scale)
        m, e = m * one, e + exponent
    return apply_outer_scale(values, m, e)


def outer_factors(scales: Sequence[Scale]) -> tuple[jax.Array, jax.Array]:
    """The product of outer scales as two fp32 factors, to be applied one after the other.

    Each scale and their product are rounded as fp32 but may leave its range, so they are computed in fp64. The first
    factor is between 2**-`REACH` and 2**`REACH`. The second one is the remaining power of two, almost always 1. If even
    that is out of range, so is every product with both.
    """
    with jax.enable_x64(True):
        product = jnp.float64(1)
        for amax, bound in scales:
            bits = bits_of(amax)
            # The integer is the denormal in units of 2**-149: converted as a float, it might become zero.
            denormal = lax.convert_element_type(bits, np.float64) * np.float64(2.0**-149)
            wide = jnp.where(bits < 0x800000, denormal, lax.convert_element_type(amax, np.float64))
            wide = jnp.where(bits < INFINITY, wide, np.float64(np.nan))
            product = product * lax.reduce_precision(wide / np.float64(bound), 11, 23)
        exponent = lax.bitcast_convert_type(product, np.int64) & np.int64(0x7FF << 52)
        power = lax.bitcast_convert_type(exponent, np.float64)
        rest = jnp.maximum(jnp.minimum(power * 2.0**REACH, 1.0), power * 2.0**-REACH)
        rest = jnp.clip(rest, 2.0**-126, 2.0**127)
        first, second = (lax.convert_element_type(f, np.float32) for f in (product / rest, rest))
    return first, second


def find_factors_in_kernel(
    maxima: Sequence[jax.Array], bounds: Sequence[float]
) -> tuple[jax.Array, jax.Array]:
    """The same `outer_factors`, without fp64, which kernels do not have."""
    m, e = jnp.float32(1), jnp.int32(0)
    for scale in zip(maxima, bounds, strict=True):
        one, exponent = outer_scale(*scale)
        m, e = m * one, e + exponent
    product = (bits_of(m) >> 23) - 127 + e
    rest = jnp.maximum(jnp.minimum(product + REACH, 0), product - REACH)
    return m * power_of_two(e - rest), power_of_two(rest)


def outer_product(scales: Sequence[Scale]) -> jax.Array:
    """The product of outer scales as one fp32 number: denormal below 2**-126, infinite beyond 2**128.

    Computed from the two factors: XLA would merge a conversion of the fp64 product with a later cast to bfloat16.
    """
    first, second = outer_factors(scales)
    return first * second


REACH = 60
"""A scale from 2**-60 to 2**60 moves no sum of products of codes out of the range of fp32 or bfloat16."""


def dequantize(q: Quantized) -> jax.Array:
    """The fp32 values, without padding. Those of a rotated operand are in the rotated basis."""
    values = trim(block_values(q, jnp.float32), q.layout)
    return scale_outer(values, [] if q.amax is None else [(q.amax, q.layout.bound)])
