"""Back from codes and scales to numbers.

In: a `Quantized`. Out: its values, with or without the outer scale. The one trap: a GEMM wants
`block_values`, which are exact in bfloat16, and the outer scales on its result; `dequantize` is for looking.
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
    from_bits,
    power_of_two,
    quotient_by,
)
from policyc.numerics.quantize.layout import Quantized, split_axis, spread, trim, unpack


def codes_of(q: Quantized) -> jax.Array:
    """One code to a uint8, padding removed."""
    codes = unpack(q.codes, q.layout.axis) if q.layout.packed else q.codes
    return trim(codes, q.layout)


def block_values(q: Quantized, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.Array:
    """Code times block scale, padding kept: exact in bfloat16. The outer scale is left out."""
    layout = q.layout
    # Who wants fp32 is a CPU.
    codes = unpack(q.codes, layout.axis, cpu=dtype == jnp.float32) if layout.packed else q.codes
    values = decode(codes, ELEMENTS[layout.element])
    if q.scales is None:
        return values.astype(dtype)
    pieces = split_axis(values, layout.axis, values.shape[layout.axis] // layout.block, layout.block)
    scales = spread(q.scales, layout)
    if layout.format == "nvfp4":
        pieces = pieces * decode(scales, E4M3)
    else:
        byte = scales.astype(jnp.int32)
        # The least scale, 2**-127, is not normal: it is applied in two steps.
        pieces = pieces * from_bits(jnp.clip(byte, 1, 254) << 23) * jnp.where(byte == 0, 0.5, 1.0)
        pieces = jnp.where(byte == 255, jnp.float32(jnp.nan), pieces)
    return pieces.reshape(values.shape).astype(dtype)


def outer(q: Quantized) -> tuple[jax.Array, jax.Array] | None:
    """The outer scale amax / bound as m * 2**e, or None where the format has none.

    Apart, since amax / bound alone may be denormal where the product of two scales is not.
    """
    if q.amax is None:
        return None
    bits = bits_of(q.amax)
    denormal = bits < 0x800000
    # The integer is the denormal in units of 2**-149.
    normal = jnp.where(denormal, bits_of(bits.astype(jnp.float32)), bits)
    m = quotient_by((normal & 0x7FFFFF) | 0x800000, q.layout.bound)
    e = (normal >> 23) - jnp.where(denormal, 149 + 127, 127)
    m = jnp.where(bits >= INFINITY, jnp.float32(jnp.nan), m)
    return jnp.where(bits == 0, jnp.float32(0), m), jnp.where(bits == 0, 0, e)


def apply_outer(values: jax.Array, m: jax.Array, e: jax.Array) -> jax.Array:
    """values * m * 2**e, with no step that under- or overflows before the result does."""
    half = e >> 1
    return values * m * power_of_two(half) * power_of_two(e - half)


def dequantize(q: Quantized) -> jax.Array:
    """fp32 values, padding removed. Of a rotated operand: in the rotated basis."""
    values = trim(block_values(q, jnp.float32), q.layout)
    scale = outer(q)
    return values if scale is None else apply_outer(values, *scale)
