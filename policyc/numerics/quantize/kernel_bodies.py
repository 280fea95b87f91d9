"""Bodies of the NVFP4 kernels: the code that one kernel instance runs.

The kernels read two neighbouring bfloat16 features as one 32-bit word. A row of a tile has one word for each thread,
and the 16 tokens of a block are 16 arrays of such words. So a thread has whole blocks in its registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from policyc.language.recipes import Treatment
from policyc.numerics.quantize import random
from policyc.numerics.quantize.bits import (
    E2M1,
    E4M3,
    INFINITY,
    bits_of,
    decode_magnitude,
    from_bits,
    kernel_div,
    round_nearest,
    round_stochastic,
    sign_bit,
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
from policyc.numerics.quantize.kernel_tiles import (
    BLOCK,
    GROUPS,
    TILE_BLOCKS,
    Operands,
    TileOffset,
    first_block,
)
from policyc.numerics.quantize.layout import Axes

WORDS = BLOCK // 2
"""The words of a block of features."""
SCALARS = 5
"""The words of the scalars of one order, see `kernels.OrderScales`."""

# Jitted, so that it is traced once for all kernels, whose tracing is a good part of the time to compile a step.
divide: Any = jax.jit(kernel_div)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How a matrix is quantized in one order: along its features, or along its tokens.

    `headroom` multiplies the maxima. Only tokens are rotated, and not if block scales are refined. `refinement` is that
    of `blocks.refinement_of`, `bound` that of `blocks.bound_of`.
    """

    along_tokens: bool
    rotates: bool = False
    stochastic: bool = False
    headroom: float = 1.0
    refinement: str = ""
    bound: float

    @classmethod
    def from_treatment(cls, treatment: Treatment, axes: Axes) -> Order:
        refinement = refinement_of(treatment)
        return cls(
            along_tokens=axes.axis == -2,
            rotates=bool(treatment.rht) and not refinement,
            stochastic=treatment.rounding == "sr",
            headroom=float(treatment.headroom),
            refinement=refinement,
            bound=bound_of(treatment),
        )

    def add_headroom(self, bits: jax.Array) -> jax.Array:
        """The bits of maxima times the headroom."""
        return bits if self.headroom == 1 else bits_of(from_bits(bits) * jnp.float32(self.headroom))


# ---- arithmetic on words


def _even(words: jax.Array) -> jax.Array:
    """The feature in the low half of each word, in fp32."""
    return lax.bitcast_convert_type(words << _word(16), jnp.float32)


def _odd(words: jax.Array) -> jax.Array:
    """The feature in the high half of each word, in fp32."""
    return lax.bitcast_convert_type(words & _word(0xFFFF0000), jnp.float32)


_HALVES = (_even, _odd)


def _word(number: int) -> jax.Array:
    word: jax.Array = jnp.uint32(number)
    return word


def _join(parts: Sequence[jax.Array], width: int) -> jax.Array:
    """Words that hold numbers of `width` bits, the first in the lowest bits."""
    joined = parts[0]
    for i, part in enumerate(parts[1:], 1):
        joined = joined | (part << _word(i * width))
    return joined


def _maximum(values: Sequence[jax.Array]) -> jax.Array:
    """The bits of the largest magnitude."""
    magnitudes = [bits_of(value) & jnp.int32(0x7FFFFFFF) for value in values]
    largest: jax.Array = magnitudes[0]
    for magnitude in magnitudes[1:]:
        largest = jnp.maximum(largest, magnitude)
    return largest


def rotate(ops: KernelOps, values: Sequence[jax.Array]) -> list[jax.Array]:
    """The Hadamard transform across 16 arrays, rounded to bfloat16. Divided first, so that no sum overflows.

    A sum of negative zeros is a positive zero, as in a product of matrices, whose sums start with one.
    """
    rotated = [v * jnp.float32(sign / 4) for v, sign in zip(values, SIGNS, strict=True)]
    half = 1
    while half < BLOCK:
        for start in range(0, BLOCK, 2 * half):
            for i in range(start, start + half):
                low, high = rotated[i], rotated[i + half]
                rotated[i], rotated[i + half] = low + high, low - high
        half *= 2
    zero = jnp.float32(0)
    return [ops.round_bf16(jnp.where(v == zero, zero, v)) for v in rotated]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Computes block scales and codes of one order, from the words of its `kernels.OrderScales`."""

    lift: jax.Array
    enc: jax.Array
    dec: jax.Array
    is_finite: jax.Array
    key: random.Key

    @classmethod
    def from_words(cls, words: Ref, start: Any, order: Order) -> Encoder:
        amax, maximum, content, a, b = (words[start + i] for i in range(SCALARS))
        enc, lift = find_encoding_scale(amax.astype(jnp.int32), order.bound, divide)
        key = random.Key(a, b)
        if order.stochastic or order.refinement == "ms_eden":
            # As in `blocks.tensor_key`.
            key = key.fold(maximum).fold(content)
        if order.refinement == "ms_eden":
            key = key.fold(SCALE_KEY)
        dec = divide(jnp.float32(1), enc)
        return cls(lift=lift, enc=enc, dec=dec, is_finite=amax < _word(INFINITY), key=key)

    def block_scales(self, maxima: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The codes of block scales, and what elements are multiplied by. `maxima` has bits."""
        code, enc = self.scale_candidates(maxima, jnp.float32(1 / 6))
        return self.mark_not_finite(code), enc

    def scale_candidates(self, maxima: jax.Array, fraction: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As `block_scales`, for scales that map maxima to 1 / `fraction`. They are finite in any case."""
        ideal = (from_bits(maxima) * self.lift) * (self.enc * fraction)
        code = round_nearest(ideal, E4M3)
        scale = decode_magnitude(code, E4M3) * self.dec
        return code, kernel_div(jnp.ones_like(scale), scale)

    def mark_not_finite(self, code: jax.Array) -> jax.Array:
        """The codes of block scales: NaN if the tensor has a NaN or an infinity."""
        return jnp.where(self.is_finite, code, E4M3.nan or 0)

    def encode_pair(self, pair: Sequence[jax.Array], enc: jax.Array, index: jax.Array | None) -> jax.Array:
        """Two packed codes, uint32. `index` numbers the pairs of the whole operand; None rounds to nearest."""
        word = None if index is None else random.mix(index ^ self.key.a, self.key.b)
        codes = []
        for i, values in enumerate(pair):
            scaled = values * self.lift * enc
            if word is None:
                magnitude = round_nearest(jnp.abs(scaled), E2M1)
            else:
                bits = ((word >> _word(RANDOM_BITS * i)) & _word(0xFFFF)).astype(jnp.int32)
                magnitude = round_stochastic(jnp.abs(scaled), bits, RANDOM_BITS, E2M1)
            codes.append((magnitude | sign_bit(scaled, E2M1)).astype(jnp.uint32))
        return _join(codes, 4)


# ---- the tile of one instance


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """The tile of a matrix that one instance of a kernel reads: some blocks of features, a slice."""

    ops: KernelOps
    x: Ref
    blocks: Any

    def load_blocks(self, group: jax.Array) -> jax.Array:
        """The words of 16 tokens in one array, so that a thread has whole blocks of features."""
        return self.ops.load(self.x, (pl.ds(group * BLOCK, BLOCK), self.blocks), "blocks")

    def load_columns(self, group: jax.Array, order: Order) -> list[list[jax.Array]]:
        """The values of even and of odd features, each an array for each of 16 tokens; rotated if the order rotates."""
        rows = [self.ops.load(self.x, (group * BLOCK + i, self.blocks), "words") for i in range(BLOCK)]
        halves = [[half(row) for row in rows] for half in _HALVES]
        return [rotate(self.ops, values) for values in halves] if order.rotates else halves


@dataclass(frozen=True, slots=True, kw_only=True)
class _TileIndex:
    """The indices of the elements of a tile in the whole operand."""

    ops: KernelOps
    offset: TileOffset

    def of_columns(self, group: jax.Array, half: int) -> list[jax.Array]:
        """The indices of the pairs of tokens of a group, at even or odd features."""
        shape = (TILE_BLOCKS, WORDS)
        block, word = (self.ops.iota(shape, axis, "words") for axis in (0, 1))
        feature = self.offset.first_feature + block * _word(BLOCK) + word * _word(2) + _word(half)
        first = self.offset.token(group) >> _word(1)
        return [(first + _word(i)) * _word(self.offset.features) + feature for i in range(WORDS)]

    def of_rows(self, group: jax.Array) -> jax.Array:
        """The indices of the pairs of features of 16 tokens."""
        shape = (BLOCK, TILE_BLOCKS, WORDS)
        token, block, word = (self.ops.iota(shape, axis, "blocks") for axis in (0, 1, 2))
        token = token + self.offset.token(group)
        pair = (self.offset.first_feature >> _word(1)) + block * _word(WORDS) + word
        return token * _word(self.offset.features // 2) + pair


# ---- statistics


def find_statistics(ops: KernelOps, x: Ref, *outs: Ref, orders: tuple[Order, ...], groups: int) -> None:
    """Writes the maximum and the checksum of each thread, in each order."""
    i, j = ops.index(0), ops.index(1)
    blocks = pl.ds(first_block(j, x.shape[1]), TILE_BLOCKS)
    tile = _Tile(ops=ops, x=x, blocks=blocks)

    def block_maxima(order: Order, group: jax.Array) -> list[jax.Array]:
        if order.along_tokens:
            return [_maximum(values) for values in tile.load_columns(group, order)]
        words = tile.load_blocks(group)
        return [jnp.max(_maximum([half(words) for half in _HALVES]), axis=2)]

    def add_group(g: jax.Array, totals: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            _add_maxima(block_maxima(order, i * groups + g), total)
            for order, total in zip(orders, totals, strict=True)
        )

    first = tuple(_add_maxima(block_maxima(order, i * groups), None) for order in orders)
    totals = lax.fori_loop(1, groups, add_group, first)
    for k, (order, total) in enumerate(zip(orders, totals, strict=True)):
        for out, array in zip(outs[2 * k : 2 * k + 2], total, strict=True):
            everything = slice(None)
            index = (i, blocks, everything) if order.along_tokens else (i, everything, blocks)
            ops.store(out, index, array)


def _add_maxima(
    maxima: Sequence[jax.Array], total: tuple[jax.Array, jax.Array] | None
) -> tuple[jax.Array, jax.Array]:
    """Adds block maxima to the largest of each thread and to its checksum."""
    for bits in maxima:
        hashed = random.mix(bits.astype(jnp.uint32), _word(0))
        total = (bits, hashed) if total is None else (jnp.maximum(total[0], bits), total[1] + hashed)
    assert total is not None
    return total


# ---- codes


def write_codes(
    ops: KernelOps,
    x: Ref,
    scalars: Ref,
    *refs: Ref,
    orders: tuple[Order, ...],
    operands: Operands,
) -> None:
    """Writes codes and block scales in each order. Scratch memory follows the results in `refs`."""
    i, j = ops.index(0), ops.index(1)
    block = first_block(j, x.shape[1])
    tile = _Tile(ops=ops, x=x, blocks=pl.ds(block, TILE_BLOCKS))
    offset = operands.locate(i, block, scalars)
    index = _TileIndex(ops=ops, offset=offset)
    outs, stages = refs[: 2 * len(orders)], list(refs[2 * len(orders) :])
    for k, order in enumerate(orders):
        writer = _Writer(
            tile=tile,
            index=index,
            order=order,
            encoder=Encoder.from_words(scalars, offset.scalars + SCALARS * k, order),
            codes=outs[2 * k],
            scales=outs[2 * k + 1],
        )
        if order.along_tokens:
            writer.write_columns(i, stages.pop(0))
        else:
            lax.fori_loop(0, GROUPS, partial(writer.write_rows, i), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writer:
    """Writes the codes and scales of a tile in one order."""

    tile: _Tile
    index: _TileIndex
    order: Order
    encoder: Encoder
    codes: Ref
    scales: Ref

    def write_rows(self, i: jax.Array, g: jax.Array, carry: tuple[()]) -> tuple[()]:
        """Writes group g of tile i, quantized along features."""
        tile, group = self.tile, i * GROUPS + g
        words = tile.load_blocks(group)
        pair = [half(words) for half in _HALVES]
        maxima = self.order.add_headroom(jnp.max(_maximum(pair), axis=2))
        scale, enc = self.encoder.block_scales(maxima)
        index = self.index.of_rows(group) if self.order.stochastic else None
        packed = self.encoder.encode_pair(pair, tile.ops.expand(enc, words.shape, "blocks"), index)
        tokens = pl.ds(group * BLOCK, BLOCK)
        tile.ops.store(self.codes, (tokens, tile.blocks, slice(None)), packed.astype(jnp.uint8))
        tile.ops.store(self.scales, (tokens, tile.blocks), scale.astype(jnp.uint8))
        return carry

    def write_columns(self, i: jax.Array, stage: Ref) -> None:
        """Writes tile i, quantized along tokens.

        A thread collects the codes of its columns in shared memory, and writes 32 bytes of a column at once.
        """
        tile, words = self.tile, 2 * GROUPS

        def add_group(g: jax.Array, joined: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            results = []
            for half, (packed, scale) in enumerate(self._quantize_columns(i * GROUPS + g)):
                for k in range(2):
                    word = _join(packed[4 * k : 4 * k + 4], 8)
                    tile.ops.store(stage, (half, slice(None), slice(None), 2 * g + k), word)
                # After four groups, the scale of the first one is in the lowest byte.
                results.append((joined[half] >> _word(8)) | (scale << _word(24)))
            return tuple(results)

        zeros = tile.ops.iota((TILE_BLOCKS, WORDS), 0, "words") & _word(0)
        for half, scale in enumerate(lax.fori_loop(0, GROUPS, add_group, (zeros, zeros))):
            columns = tile.ops.load(stage, (half,), "columns")
            column = (tile.blocks, slice(None), half)
            tile.ops.store(self.codes, (*column, pl.ds(i * words, words)), columns)
            tile.ops.store(self.scales, (*column, i), scale)

    def _quantize_columns(self, group: jax.Array) -> list[tuple[list[jax.Array], jax.Array]]:
        """The packed codes of the 8 pairs of tokens, and the scale, at even and at odd features."""
        quantized = []
        for half, values in enumerate(self.tile.load_columns(group, self.order)):
            scale, enc = self.encoder.block_scales(self.order.add_headroom(_maximum(values)))
            indices = self.index.of_columns(group, half) if self.order.stochastic else [None] * WORDS
            packed = [
                self.encoder.encode_pair(values[2 * k : 2 * k + 2], enc, indices[k]) for k in range(WORDS)
            ]
            quantized.append((packed, scale.astype(jnp.uint32)))
        return quantized
