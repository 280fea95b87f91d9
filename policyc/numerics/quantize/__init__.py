"""The reference arithmetic of every format, exact to the bit, in plain jnp."""

from policyc.numerics.quantize.blocks import layout_of, outer_scale_axes
from policyc.numerics.quantize.dispatch import quantize
from policyc.numerics.quantize.layout import Axes, Layout, Operand, Quantized, pack, swizzle, unpack
from policyc.numerics.quantize.random import Key, make_key
from policyc.numerics.quantize.values import block_values, codes_of, dequantize

__all__ = [
    "Axes",
    "Key",
    "Layout",
    "Operand",
    "Quantized",
    "block_values",
    "codes_of",
    "dequantize",
    "layout_of",
    "make_key",
    "outer_scale_axes",
    "pack",
    "quantize",
    "swizzle",
    "unpack",
]
