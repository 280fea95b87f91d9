"""The arithmetic of every format, exact to the bit: the reference in plain jnp, and kernels with the same bits."""

from policyc.numerics.quantize.dispatch import quantize
from policyc.numerics.quantize.reference.blocks import Request
from policyc.numerics.quantize.reference.layout import Axes, Operand, Quantized, pack, unpack
from policyc.numerics.quantize.reference.random import Key, make_key
from policyc.numerics.quantize.reference.values import block_values, codes_of, dequantize

__all__ = [
    "Axes",
    "Key",
    "Operand",
    "Quantized",
    "Request",
    "block_values",
    "codes_of",
    "dequantize",
    "make_key",
    "pack",
    "quantize",
    "unpack",
]
