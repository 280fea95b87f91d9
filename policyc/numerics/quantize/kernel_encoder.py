"""The arithmetic of the NVFP4 kernels: rotation, block scales, codes.

Mosaic runs it on registers. On a GPU, integer operations, comparisons and maxima take twice as long as fp32 additions
and multiplications. They limit the speed of these kernels, so there are as few of them as possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from policyc.language.recipes import Treatment
from policyc.numerics.quantize import random
from policyc.numerics.quantize.bits import (
    E2M1,
    E4M3,
    INFINITY,
    NEAREST_OFFSET,
    bits_of,
    clamp,
    decode_magnitude,
    from_bits,
    kernel_div,
    nearest_bits_e2m1,
    round_nearest,
    stochastic_bits,
)
from policyc.numerics.quantize.blocks import (
    RANDOM_BITS,
    SCALE_KEY,
    bound_of,
    find_encoding_scale,
    refinement_of,
)
from policyc.numerics.quantize.hadamard import SIGNS
from policyc.numerics.quantize.kernel_ops import KernelOps, Ref
from policyc.numerics.quantize.kernel_tiles import BLOCK
from policyc.numerics.quantize.layout import Axes

WORDS = BLOCK // 2
"""The 32-bit words of a block of features."""
SCALARS = 5
"""The number of scalar words per order, see `kernels.OrderScales`."""

# Jitted, so that it is traced once for all kernels. Tracing them is a good part of the time to compile a step.
divide: Any = jax.jit(kernel_div)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How a matrix is quantized in one order: along its features, along its tokens, or in tiles of 16 x 16 (`square`).

    `headroom` multiplies the maxima. Only an order along tokens can rotate, and not if block scales are refined. If
    `decoded`, the kernel writes values in place of codes and scales: always for tiles, never along tokens. For
    `refinement`, `bound` and `operand`, see `blocks.refinement_of`, `blocks.bound_of` and `orders.OrderRequest`.
    """

    along_tokens: bool
    square: bool = False
    rotates: bool = False
    stochastic: bool = False
    headroom: float = 1.0
    refinement: str = ""
    bound: float
    decoded: bool = False
    operand: str = ""

    @classmethod
    def from_treatment(cls, treatment: Treatment, axes: Axes) -> Order:
        refinement = refinement_of(treatment)
        return cls(
            along_tokens=axes.axis == -2 and not treatment.tile2d,
            square=treatment.tile2d,
            rotates=bool(treatment.rht) and not refinement,
            stochastic=treatment.rounding == "sr",
            headroom=float(treatment.headroom),
            refinement=refinement,
            bound=bound_of(treatment),
        )

    @property
    def results(self) -> int:
        """How many arrays the kernel writes."""
        return 1 if self.decoded else 2

    def add_headroom(self, bits: jax.Array) -> jax.Array:
        """The bits of maxima times the headroom."""
        return bits if self.headroom == 1 else bits_of(from_bits(bits) * jnp.float32(self.headroom))


# ---- arithmetic on words


def _even(words: jax.Array) -> jax.Array:
    """The feature in the low half of each word, in fp32."""
    return lax.bitcast_convert_type(words << word(16), jnp.float32)


def _odd(words: jax.Array) -> jax.Array:
    """The feature in the high half of each word, in fp32."""
    return lax.bitcast_convert_type(words & word(0xFFFF0000), jnp.float32)


HALVES = (_even, _odd)


def word(number: int) -> jax.Array:
    """A number as a word."""
    unsigned: jax.Array = jnp.uint32(number)
    return unsigned


def _top_bits(x: jax.Array) -> jax.Array:
    """The highest 4 bits of fp32 numbers, the sign first."""
    return lax.bitcast_convert_type(x, jnp.uint32) >> word(28)


def row_maxima(words: jax.Array) -> jax.Array:
    """The bits of the largest magnitudes along the last axis, of both features of each word."""
    return _largest_of_blocks(_larger_halves(words))


def tile_maxima(rows: Sequence[jax.Array]) -> jax.Array:
    """The bits of the largest magnitudes along the last axis and over all these arrays of words."""
    return _largest_of_blocks(reduce(jnp.maximum, map(_larger_halves, rows)))


def _larger_halves(words: jax.Array) -> jax.Array:
    """The larger magnitude of the two features of each word, in its high half. The low half is arbitrary."""
    magnitudes = words & word(0x7FFF7FFF)
    return jnp.maximum(magnitudes, magnitudes << word(16)).astype(jnp.int32)


def _largest_of_blocks(halves: jax.Array) -> jax.Array:
    # Clears the low half, where an even feature may be left.
    maxima: jax.Array = jnp.max(halves, axis=-1) & jnp.int32(0x7FFF0000)
    return maxima


def rotate(ops: KernelOps, values: Sequence[jax.Array]) -> list[jax.Array]:
    """The Hadamard transform across 16 arrays, not rounded yet. Values are divided first, so that no sum overflows.

    Negative zeros must add up to a positive zero, as in a matrix product, whose sums start with positive zero. So here
    the first term of each sum is never a negative zero.
    """
    rotated = [v * jnp.float32(sign / 4) for v, sign in zip(values, SIGNS, strict=True)]
    rotated[::2] = map(ops.add_zero, rotated[::2])
    half = 1
    while half < BLOCK:
        for start in range(0, BLOCK, 2 * half):
            for i in range(start, start + half):
                low, high = rotated[i], rotated[i + half]
                rotated[i], rotated[i + half] = low + high, low - high
        half *= 2
    return rotated


def decode_bytes(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Decodes the two codes of each byte, stored as a word of its own, to a word of two bfloat16 numbers."""
    signs = (codes & word(0x08)) << word(12) | (codes & word(0x80)) << word(24)
    return _join_values([codes & word(7), codes >> word(4) & word(7)], scale, signs)


def _join_values(
    codes: Sequence[jax.Array], scale: jax.Array, signs: jax.Array, offset: int = 0
) -> jax.Array:
    """The values of two codes as a word of two bfloat16 numbers.

    `codes` have no signs and are too large by `offset`. `signs` has the sign bits where the result has them.
    """
    rebias = (E2M1.rebias - offset << E2M1.shift) & 0xFFFFFFFF
    values = []
    for code in codes:
        normal = lax.bitcast_convert_type((code << word(E2M1.shift)) + word(rebias), jnp.float32)
        # The codes 0 and 1 have no leading one: read as normal numbers, they are 0.5 and 0.75 instead of 0 and 0.5.
        # 2 * x - 1 corrects them, and is never less than x for the other codes.
        magnitude = jnp.minimum(normal, normal * jnp.float32(2) - jnp.float32(1))
        values.append(lax.bitcast_convert_type(magnitude * scale, jnp.uint32))
    low, high = values
    joined: jax.Array = (low >> word(16)) | (high & word(0xFFFF0000)) | (signs & word(0x80008000))
    return joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Computes block scales and codes of one order, from the words of its `kernels.OrderScales`."""

    lift: jax.Array
    enc: jax.Array
    dec: jax.Array
    is_finite: jax.Array
    key: random.Key
    scaled_key: jax.Array

    @classmethod
    def from_words(cls, words: Ref, start: Any, order: Order) -> Encoder:
        amax, maximum, content, a, b = (words[start + i] for i in range(SCALARS))
        enc, lift = find_encoding_scale(amax.astype(jnp.int32), order.bound, divide)
        key = random.Key(a, b)
        if order.stochastic or order.refinement == "ms_eden":
            if order.operand:
                key = key.fold(order.operand)
            # As in `blocks.tensor_key`.
            key = key.fold(maximum).fold(content)
        if order.refinement == "ms_eden":
            key = key.fold(SCALE_KEY)
        dec = divide(jnp.float32(1), enc)
        return cls(
            lift=lift,
            enc=enc,
            dec=dec,
            is_finite=amax < word(INFINITY),
            key=key,
            scaled_key=random.scale_key(key.b),
        )

    def block_scales(self, maxima: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The codes of block scales, and the encoding scales. `maxima` has bits."""
        code, enc = self.scale_candidates(maxima, jnp.float32(1 / 6))
        return self.mark_not_finite(code), enc

    def scale_candidates(self, maxima: jax.Array, fraction: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Like `block_scales`, for scales that map maxima to 1 / `fraction`. Never NaN, see `mark_not_finite`."""
        ideal = (from_bits(maxima) * self.lift) * (self.enc * fraction)
        code = round_nearest(ideal, E4M3)
        scale = decode_magnitude(code, E4M3) * self.dec
        return code, kernel_div(jnp.ones_like(scale), scale)

    def mark_not_finite(self, code: jax.Array) -> jax.Array:
        """Replaces the codes of block scales by NaN if the tensor has a NaN or an infinity."""
        return jnp.where(self.is_finite, code, E4M3.nan or 0)

    def row_values(
        self, words: jax.Array, enc: jax.Array, scale: jax.Array, index: jax.Array | None
    ) -> jax.Array:
        """The values of both codes of each word, as a word of two bfloat16 numbers. For `index`, see `_round`."""
        codes, offset = self._round([half(words) * self.lift * enc for half in HALVES], [index])
        return _join_values(codes, scale, words, offset)

    def encode_row(self, words: jax.Array, enc: jax.Array, index: jax.Array | None) -> jax.Array:
        """Both codes of each word in a byte, uint8. For `index`, see `_round`."""
        codes, offset = self._round([half(words) * self.lift * enc for half in HALVES], [index])
        # Adds up the byte in the highest bits. The factor copies the even feature's sign from bit 15 to bit 27.
        signs = (words & word(0x80008000)) * word(0x1001) - word(offset * 0x11000000 & 0xFFFFFFFF)
        packed: jax.Array = (codes[1] << word(28)) + ((codes[0] << word(24)) + signs)
        return (packed >> word(24)).astype(jnp.uint8)

    def encode_column(
        self, values: Sequence[jax.Array], enc: jax.Array, indices: Sequence[jax.Array | None]
    ) -> jax.Array:
        """Eight codes in a word, the first one in the lowest bits. For `indices`, see `_round`."""
        scaled = [v * self.lift * enc for v in values]
        codes, offset = self._round(scaled, indices)
        packed, signs = codes[-1], _top_bits(scaled[-1])
        for code, x in zip(codes[-2::-1], scaled[-2::-1], strict=True):
            packed = packed * word(16) + code
            # A GPU shifts two words as one, in one instruction.
            signs = (signs << word(4)) | _top_bits(x)
        return (packed - word(offset * 0x11111111 & 0xFFFFFFFF)) | (signs & word(0x88888888))

    def _round(
        self, scaled: Sequence[jax.Array], indices: Sequence[jax.Array | None]
    ) -> tuple[list[jax.Array], int]:
        """Codes without signs, uint32, and the offset by which each is too large. It is subtracted in packing.

        `indices` are the indices of the pairs in the whole operand; None rounds to nearest.
        """
        magnitudes = [clamp(jnp.abs(x), E2M1) for x in scaled]
        codes = []
        for i, index in enumerate(indices):
            pair = magnitudes[2 * i : 2 * i + 2]
            if index is None:
                codes += [nearest_bits_e2m1(t).astype(jnp.uint32) for t in pair]
                continue
            mixed = random.mix_scaled(index ^ self.key.a, self.scaled_key)
            for t, half in zip(pair, (mixed & word(0xFFFF), mixed >> word(16)), strict=True):
                steps = (half << word(E2M1.shift - RANDOM_BITS)).astype(jnp.int32)
                codes.append(stochastic_bits(t, steps, E2M1).astype(jnp.uint32) >> word(E2M1.shift))
        return codes, NEAREST_OFFSET if indices[0] is None else E2M1.rebias
