"""The scalars with which the NVFP4 kernels quantize an operand in one order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from policyc.language.recipes import Treatment
from policyc.numerics.quantize import random
from policyc.numerics.quantize.bits import (
    E4M3,
    INFINITY,
    bits_of,
    decode_magnitude,
    from_bits,
    kernel_div,
    round_nearest,
)
from policyc.numerics.quantize.blocks import (
    SCALE_KEY,
    bound_of,
    find_encoding_scale,
    refinement_of,
)
from policyc.numerics.quantize.kernel_tiles import BLOCK
from policyc.numerics.quantize.layout import Axes
from policyc.numerics.quantize.words import Word, word

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

    @property
    def is_staged(self) -> bool:
        """Whether the kernel collects codes in shared memory."""
        return self.along_tokens and not self.decoded

    def add_headroom(self, bits: jax.Array) -> jax.Array:
        """The bits of maxima times the headroom."""
        return bits if self.headroom == 1 else bits_of(from_bits(bits) * jnp.float32(self.headroom))


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
    def from_words(cls, words: Sequence[jax.Array], order: Order) -> Encoder:
        amax, maximum, content, a, b = words
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


class Scalars(NamedTuple):
    """The words that all threads need to quantize blocks of an operand in one order.

    Attributes:
      lift: the lift in fp32.
      unit: the lift times 2**-126.
      sixth: a sixth of the encoding scale of the tensor.
      dec: the decoding scale of the tensor.
      nan: the bits of NaN if the operand has a NaN or an infinity, else zero.
      key, scaled_key: the key of stochastic rounding, see `random.mix_scaled`.
    """

    lift: Word
    unit: Word
    sixth: Word
    dec: Word
    nan: Word
    key: Word
    scaled_key: Word
