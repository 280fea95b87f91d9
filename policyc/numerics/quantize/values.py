"""Converts codes and scales back to numbers.

A GEMM multiplies `block_values`, which are exact in bfloat16, and applies the outer scales to its result. `dequantize`
is for measurements.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from policyc.numerics.quantize.bits import (
    E4M3,
    ELEMENTS,
    INFINITY,
    bits_of,
    decode,
    exact_div_by_constant,
    from_bits,
    power_of_two,
)
from policyc.numerics.quantize.layout import Quantized, expand_per_block, split_blocks, trim, unpack


def codes_of(q: Quantized) -> jax.Array:
    """The codes, one to a uint8, without padding."""
    codes = unpack(q.codes, q.layout.axis) if q.layout.packed else q.codes
    return trim(codes, q.layout)


def block_values(q: Quantized, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.Array:
    """Codes times block scales, with padding: exact in bfloat16. The outer scale is not applied."""
    layout = q.layout
    # float32 is only requested on CPU.
    codes = unpack(q.codes, layout.axis, cpu=dtype == jnp.float32) if layout.packed else q.codes
    values = decode(codes, ELEMENTS[layout.element])
    if q.scales is None:
        return values.astype(dtype)
    blocks = split_blocks(values, layout)
    scales = expand_per_block(q.scales, layout)
    if layout.format == "nvfp4":
        blocks = blocks * decode(scales, E4M3)
    else:
        byte = scales.astype(jnp.int32)
        # The least scale, 2**-127, is not a normal number: it is applied in two steps.
        blocks = blocks * from_bits(jnp.clip(byte, 1, 254) << 23) * jnp.where(byte == 0, 0.5, 1.0)
        blocks = jnp.where(byte == 255, jnp.float32(jnp.nan), blocks)
    return blocks.reshape(values.shape).astype(dtype)


def outer_scale(q: Quantized) -> tuple[jax.Array, jax.Array] | None:
    """The outer scale amax / bound as m * 2**e; None if the format has none.

    It is kept in two parts because amax / bound may be denormal when the product of two such scales is not.
    """
    if q.amax is None:
        return None
    bits = bits_of(q.amax)
    is_denormal = bits < 0x800000
    # The integer is the denormal in units of 2**-149.
    normal = jnp.where(is_denormal, bits_of(bits.astype(jnp.float32)), bits)
    m = exact_div_by_constant((normal & 0x7FFFFF) | 0x800000, q.layout.bound)
    e = (normal >> 23) - jnp.where(is_denormal, 149 + 127, 127)
    m = jnp.where(bits >= INFINITY, jnp.float32(jnp.nan), m)
    return jnp.where(bits == 0, jnp.float32(0), m), jnp.where(bits == 0, 0, e)


def apply_outer_scale(values: jax.Array, m: jax.Array, e: jax.Array) -> jax.Array:
    """values * m * 2**e. No intermediate result under- or overflows before the final one does."""
    half = e >> 1
    return values * m * power_of_two(half) * power_of_two(e - half)


def dequantize(q: Quantized) -> jax.Array:
    """The fp32 values, without padding. Those of a rotated operand are in the rotated basis."""
    values = trim(block_values(q, jnp.float32), q.layout)
    scale = outer_scale(q)
    return values if scale is None else apply_outer_scale(values, *scale)
