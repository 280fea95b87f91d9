"""The reference mathematics: every format to the bit, in plain jnp.

In: arrays and treatments. Out: codes, scales and values. The one trap: `dequantize` of a rotated
operand is in the rotated basis.
"""

from policyc.numerics.quantize.blocks import layout_of, quantize, spanned
from policyc.numerics.quantize.layout import Axes, Layout, Quantized, pack, swizzle, unpack
from policyc.numerics.quantize.random import Key, key
from policyc.numerics.quantize.values import block_values, codes_of, dequantize

__all__ = [
    "Axes",
    "Key",
    "Layout",
    "Quantized",
    "block_values",
    "codes_of",
    "dequantize",
    "key",
    "layout_of",
    "pack",
    "quantize",
    "spanned",
    "swizzle",
    "unpack",
]
