"""MXFP4 and MXFP8: an E8M0 scale (a power of two) per block of 32, and no outer scale."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from policyc.numerics.quantize.reference.bits import (
    ELEMENTS,
    INFINITY,
    Element,
    bits_of,
    from_bits,
    materialize,
)
from policyc.numerics.quantize.reference.blocks import Request, encode_blocks, find_maxima, tensor_key
from policyc.numerics.quantize.reference.hadamard import Method, rotate_operand
from policyc.numerics.quantize.reference.layout import Layout, Quantized


def quantize_mx(x: jax.Array, request: Request, layout: Layout, method: Method) -> Quantized:
    """Quantizes to MXFP4 or MXFP8."""
    t = request.treatment
    x = rotate_operand(x, t, request.axes.axis, request.sign_key, method)
    x, block_max, amax = find_maxima(x, request, layout)
    # `scale_rounding` is an option of mxfp4 only. Scales of mxfp8 are rounded up, so that nothing saturates.
    rounding = "rceil" if layout.format == "mxfp8" else t.scale_rounding
    byte = e8m0_scales(block_max, ELEMENTS[layout.element], rounding)
    enc = materialize(from_bits((254 - byte) << 23))
    key = None if t.rounding == "rne" else tensor_key(block_max, amax, request, layout)
    codes = encode_blocks(x.astype(jnp.float32), enc, layout, method, key)
    byte = jnp.where(block_max >= INFINITY, 255, byte)
    return Quantized(codes=codes, scales=byte.astype(jnp.uint8), amax=None, layout=layout)


def e8m0_scales(block_max: jax.Array, element: Element, rounding: str) -> jax.Array:
    """Exponent bytes (int32) from the bits of block maxima. `rounding` is a value of `scale_rounding`."""
    top = bits_of(jnp.float32(element.top))
    if rounding == "rceil":
        above = (block_max & 0x7FFFFF) > (top & 0x7FFFFF)
        exponent = (block_max >> 23) + above.astype(jnp.int32)
    elif rounding == "even":
        exponent = (block_max + (1 << (element.shift - 1))) >> 23
    else:
        exponent = block_max >> 23
    return jnp.clip(exponent - ((top >> 23) - 127), 0, 254)
