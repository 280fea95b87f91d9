"""Instructions on 32-bit words, for code that runs on one GPU thread: PTX on registers, jnp on arrays of words.

A word is an integer, the bits of an fp32 number, or a pair: two 16-bit numbers, the first in the low half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from policyc.jaxcore.primitives.inline_ptx import Register
from policyc.numerics.quantize.reference.bits import (
    E2M1,
    E4M3,
    F32_MAX,
    decode_magnitude,
    round_nearest,
    stochastic_bits,
)
from policyc.numerics.quantize.reference.blocks import lift_amax

Word = Any
"""A `Register`, an array of uint32, or a constant."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction: its PTX (see `Program.emit`), and a function with the same result on arrays of uint32."""

    ptx: str
    compute: Callable[..., jax.Array]

    def __call__(self, *operands: Word) -> Word:
        for operand in operands:
            if isinstance(operand, Register):
                return operand.program.emit(self.ptx, *operands)
        return self.compute(*(jnp.asarray(operand, jnp.uint32) for operand in operands))


def word(number: int) -> np.uint32:
    """A constant."""
    return np.uint32(number)


def pair(number: int) -> np.uint32:
    """A constant with this number in both halves."""
    return np.uint32(number * 0x10001)


def float_word(number: float) -> np.uint32:
    """The bits of an fp32 constant."""
    return np.float32(number).view(np.uint32)


def _on_floats(compute: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def on_words(*words: jax.Array) -> jax.Array:
        return _bits(compute(*map(_float, words)))

    return on_words


def _float(words: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(words, jnp.float32)


def _bits(floats: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(floats, jnp.uint32)


def _on_halves(compute: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Applies a function to the low and to the high halves of words, as integers."""

    def on_words(*words: jax.Array) -> jax.Array:
        low = compute(*(w & word(0xFFFF) for w in words))
        return low | (compute(*(w >> word(16) for w in words)) << word(16))

    return on_words


# ---- pairs

low_halves: Instruction = Instruction(
    "prmt.b32 {0}, {1}, {2}, 0x5410;", lambda a, b: (a & word(0xFFFF)) | (b << word(16))
)
"""The low halves of two words, as a pair."""
high_halves: Instruction = Instruction(
    "prmt.b32 {0}, {1}, {2}, 0x7632;", lambda a, b: (a >> word(16)) | (b & word(0xFFFF0000))
)


def two_bytes(a: Word, low: int, high: int) -> Word:
    """Two bytes of a word as a 16-bit number."""
    return Instruction(
        f"prmt.b32 {{0}}, {{1}}, 0, {0x4400 | high << 4 | low:#x};",
        lambda a: ((a >> word(8 * low)) & word(0xFF)) | ((a >> word(8 * high)) & word(0xFF)) << word(8),
    )(a)


exchange: Instruction = Instruction(
    "shfl.sync.bfly.b32 {0}, {1}, 1, 0x1f, 0xffffffff;",
    lambda a: a.reshape(*a.shape[:-1], -1, 2)[..., ::-1].reshape(a.shape),
)
"""The word of the neighbouring thread: thread 2i has that of thread 2i + 1, and the other way round."""


def select(mask: Word, a: Word, b: Word) -> Word:
    """The bits of a where the mask is set, else those of b."""
    return (mask & a) | ((mask ^ word(0xFFFFFFFF)) & b)


larger_halves: Instruction = Instruction("max.u16x2", _on_halves(jnp.maximum))
smaller_halves: Instruction = Instruction("min.u16x2", _on_halves(jnp.minimum))


def _multiply_bf16(a: jax.Array, b: jax.Array) -> jax.Array:
    return _bits(_float(a << word(16)) * _float(b << word(16))) >> word(16)


multiply_pairs: Instruction = Instruction("mul.rn.bf16x2", _on_halves(_multiply_bf16))
"""The products of bfloat16 numbers. All products here are exact."""

round_pair: Instruction = Instruction(
    "cvt.rn.bf16x2.f32 {0}, {2}, {1};",
    lambda a, b: high_halves(*(_bits(lax.reduce_precision(_float(x), 8, 7)) for x in (a, b))),
)
"""Two fp32 numbers as a pair of bfloat16 numbers, rounded to nearest even."""


def _decode_e2m1(code: jax.Array) -> jax.Array:
    magnitude = (code >> word(6)) & word(7)
    normal = (magnitude << word(6)) + word(0x3F00)
    value = jnp.where(magnitude > word(1), normal, magnitude * word(0x3F00))
    return value | (code & word(0x8000))


_decode_pair = Instruction("mul.rn.bf16x2", lambda a, _: _on_halves(_decode_e2m1)(a))
"""The values of two E2M1 codes, with the sign in bit 15 and the magnitude in bits 6 to 8 of each half."""
_E2M1_UNIT = pair(0x7E80)
"""2**126 in bfloat16."""


def decode_pair(codes: Word) -> Word:
    """The values of two E2M1 codes, each with its sign in bit 15 and its magnitude in bits 6 to 8 of its half.

    In these bits a magnitude is a denormal bfloat16 number: its value times 2**-126.
    """
    return _decode_pair(codes, _E2M1_UNIT)


# ---- fp32

add: Instruction = Instruction("add.rn.f32", _on_floats(jnp.add))
subtract: Instruction = Instruction("sub.rn.f32", _on_floats(jnp.subtract))
multiply: Instruction = Instruction("mul.rn.f32", _on_floats(jnp.multiply))
multiply_add: Instruction = Instruction("fma.rn.f32", _on_floats(lambda a, b, c: a * b + c))
"""a * b + c. Here b is always a power of two, so that a * b is exact."""


def _multiply_to_positive_zero(a: jax.Array, b: jax.Array) -> jax.Array:
    # XLA would drop an addition of zero.
    product = a * b
    return jnp.where(product == 0, jnp.float32(0), product)


multiply_to_positive_zero: Instruction = Instruction(
    "fma.rn.f32 {0}, {1}, {2}, 0f00000000;", _on_floats(_multiply_to_positive_zero)
)
"""a * b + 0, which is never a negative zero."""

less: Instruction = Instruction("set.lt.u32.u32", lambda a, b: jnp.where(a < b, word(0xFFFFFFFF), word(0)))
"""A mask of all bits where a < b as integers, else of none."""
smaller_bits: Instruction = Instruction("min.u32", jnp.minimum)
"""The smaller of two words as integers: of positive numbers, the smaller one. NaN is larger than all numbers."""
# PTX takes a number in place of a NaN.
smaller: Instruction = Instruction(
    "min.f32", _on_floats(lambda a, b: jnp.where((a < b) | jnp.isnan(b), a, b))
)


lift_maximum: Instruction = Instruction(
    "mul.rn.f32", lambda amax, _: _bits(lift_amax(amax.astype(jnp.int32))[0])
)
"""A maximum times its lift. The maximum may be denormal."""


def _code_bits(t: jax.Array, unit: jax.Array) -> jax.Array:
    lift = _float(unit + word(126 << 23))
    bits = stochastic_bits(_float(t) * lift, jnp.int32(0), E2M1).astype(jnp.uint32)
    return bits - word(E2M1.rebias << E2M1.shift)


code_bits: Instruction = Instruction("mul.rn.f32", _code_bits)
"""The bits of t * unit, for t >= 0 and a unit of 2**-126 times a power of two, the lift of t. Below 1, the lifted t is
denormal in this unit, and E2M1 is denormal too. So the magnitude of the code of t is in the bits from 22 up.
"""

# Denormal divisors count as zero, and denormal quotients are zero, as in `exact_div`.
_divide = Instruction("div.rn.ftz.f32", _on_floats(jnp.divide))
# The steps of rcp.rn.ftz for all divisors but the largest and zero, without its branches: those would keep the compiler
# from interleaving blocks. With the largest, the first step gives zero, and so do the others. With zero they give NaN.
_reciprocal = Instruction(
    "{{ .reg .b32 guess, error, minus; rcp.approx.ftz.f32 guess, {1}; neg.f32 minus, {1}; "
    "fma.rn.f32 error, minus, guess, 0f3F800000; fma.rn.f32 {0}, guess, error, guess; }}",
    _on_floats(lambda a: 1 / a),
)


def divide(a: Word, b: Word) -> Word:
    """a / b like `bits.exact_div`."""
    return smaller(_divide(a, b), float_word(F32_MAX))


def reciprocal(a: Word) -> Word:
    """1 / a like `bits.exact_div`."""
    return smaller(_reciprocal(a), float_word(F32_MAX))


_encode_e4m3 = Instruction(
    "{{ .reg .b16 code; .reg .b32 zero; mov.b32 zero, 0; cvt.rn.satfinite.e4m3x2.f32 code, zero, {1}; "
    "cvt.u32.u16 {0}, code; }}",
    lambda a: round_nearest(_float(a), E4M3).astype(jnp.uint32),
)
_decode_e4m3 = Instruction(
    "{{ .reg .b16 code; .reg .b32 halves; cvt.u16.u32 code, {1}; cvt.rn.f16x2.e4m3x2 halves, code; "
    "cvt.u16.u32 code, halves; cvt.f32.f16 {0}, code; }}",
    lambda a: _bits(decode_magnitude(a.astype(jnp.int32), E4M3)),
)


def encode_scale(a: Word) -> Word:
    """The E4M3 code of a number that is not negative, rounded to nearest even. NaN saturates."""
    return _encode_e4m3(smaller(a, float_word(E4M3.top)))


def decode_scale(code: Word) -> Word:
    """The value of an E4M3 code without a sign, in fp32."""
    return _decode_e4m3(code)
