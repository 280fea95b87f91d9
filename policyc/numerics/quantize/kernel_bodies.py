"""Bodies of the NVFP4 kernels: the code that one kernel instance runs.

The kernels read two neighbouring bfloat16 features as one 32-bit word. A row of a tile has one word for each thread,
and the 16 tokens of a block are 16 arrays of such words. So a thread has whole blocks in its registers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from policyc.numerics.quantize import random
from policyc.numerics.quantize.bits import E4M3, abs_bits, bits_of, decode_magnitude, power_of_two
from policyc.numerics.quantize.kernel_encoder import (
    HALVES,
    SCALARS,
    WORDS,
    Encoder,
    Order,
    decode_bytes,
    rotate,
    row_maxima,
    tile_maxima,
    word,
)
from policyc.numerics.quantize.kernel_ops import KernelOps, Ref
from policyc.numerics.quantize.kernel_tiles import (
    BLOCK,
    GROUPS,
    TILE_BLOCKS,
    TILE_TOKENS,
    Operands,
    TileOffset,
    first_block,
)
from policyc.numerics.quantize.values import REACH, outer_scale

_ROWS = 8
"""Rows of blocks that are written at once: the fewest that occupy 128 threads. More would take longer to compile."""


def _zero_words(ops: KernelOps) -> jax.Array:
    """Zeros in the layout `words`. They are computed, because a constant has no layout."""
    return ops.iota((TILE_BLOCKS, WORDS), 0, "words") & word(0)


# ---- the tile of one instance


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """The tile of a matrix that one kernel instance reads. `blocks` is its slice of blocks of features."""

    ops: KernelOps
    x: Ref
    blocks: Any

    def load_blocks(self, first: jax.Array, tokens: int) -> jax.Array:
        """The words of some tokens in one array, so that a thread has whole blocks of features."""
        return self.ops.load(self.x, (pl.ds(first, tokens), self.blocks), "blocks")

    def load_rows(self, group: jax.Array) -> list[jax.Array]:
        """The words of 16 tokens, one array per token."""
        # One address for all tokens: each load adds a constant to it.
        tokens = self.x.at[pl.ds(group * BLOCK, BLOCK), self.blocks]
        return [self.ops.load(tokens, (i,), "words") for i in range(BLOCK)]

    def load_columns(self, group: jax.Array, order: Order) -> list[list[jax.Array]]:
        """The values of even and of odd features, each as 16 arrays, one per token.

        If the order rotates, they are rotated but not rounded yet.
        """
        rows = self.load_rows(group)
        halves = [[half(row) for row in rows] for half in HALVES]
        return [rotate(self.ops, values) for values in halves] if order.rotates else halves

    def column_maxima(self, values: Sequence[jax.Array], order: Order) -> jax.Array:
        """The bits of the largest magnitude of each column."""
        if order.rotates:
            # Rounding is monotonic: the rounded maximum is the maximum of the rounded values.
            return bits_of(self.ops.round_bf16(self.ops.largest(values)))
        maxima: jax.Array = reduce(jnp.maximum, map(abs_bits, values))
        return maxima


@dataclass(frozen=True, slots=True, kw_only=True)
class _TileIndex:
    """The indices of a tile's pairs of elements in the whole operand."""

    ops: KernelOps
    offset: TileOffset

    def of_columns(self, group: jax.Array, half: int) -> list[jax.Array]:
        """The indices of the pairs of tokens of a group, at even or odd features."""
        shape = (TILE_BLOCKS, WORDS)
        block, pair = (self.ops.iota(shape, axis, "words") for axis in (0, 1))
        feature = self.offset.first_feature + block * word(BLOCK) + pair * word(2) + word(half)
        first = self.offset.token(group) >> word(1)
        return [(first + word(i)) * word(self.offset.features) + feature for i in range(WORDS)]

    def of_rows(self, group: jax.Array, first: jax.Array) -> jax.Array:
        """The indices of the pairs of features of some tokens of a group, the first of which is token `first`."""
        shape = (_ROWS, TILE_BLOCKS, WORDS)
        token, block, pair = (self.ops.iota(shape, axis, "blocks") for axis in (0, 1, 2))
        token = token + (self.offset.token(group) + first.astype(jnp.uint32))
        pair = (self.offset.first_feature >> word(1)) + block * word(WORDS) + pair
        return token * word(self.offset.features // 2) + pair


# ---- statistics


def find_statistics(
    ops: KernelOps, x: Ref, maxima: Ref, checksums: Ref, *, orders: tuple[Order, ...], groups: int
) -> None:
    """Writes 16 maxima and 16 checksums per instance, for each order."""
    i, j = ops.index(0), ops.index(1)
    first_of_tile = first_block(j, x.shape[1])
    tile = _Tile(ops=ops, x=x, blocks=pl.ds(first_of_tile, TILE_BLOCKS))

    def block_maxima(order: Order, group: jax.Array) -> list[jax.Array]:
        if order.along_tokens:
            return [tile.column_maxima(values, order) for values in tile.load_columns(group, order)]
        return [row_maxima(tile.load_blocks(group * BLOCK, BLOCK))]

    def add_group(g: jax.Array, totals: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            _add_maxima(block_maxima(order, i * groups + g), total)
            for order, total in zip(orders, totals, strict=True)
        )

    numbers = [_block_numbers(ops, order) for order in orders]
    zeros = [n & word(0) for n in numbers]
    totals = lax.fori_loop(0, groups, add_group, tuple((zero.astype(jnp.int32), zero) for zero in zeros))
    # The number of blocks that the previous tile has too. They must not be counted twice.
    overlap = (j * TILE_BLOCKS - first_of_tile).astype(jnp.uint32)
    for k, (number, (largest, checksum)) in enumerate(zip(numbers, totals, strict=True)):
        if x.shape[1] % TILE_BLOCKS:
            checksum = jnp.where(number >= overlap, checksum, word(0))
        ops.store(maxima, (k, i, j), jnp.max(largest, axis=-1))
        ops.store(checksums, (k, i, j), jnp.sum(checksum, axis=-1, dtype=jnp.uint32))


def _block_numbers(ops: KernelOps, order: Order) -> jax.Array:
    """The index of each block within its tile, in the shape of the block maxima of one order."""
    if order.along_tokens:
        return ops.iota((TILE_BLOCKS, WORDS), 0, "words")
    return jnp.max(ops.iota((BLOCK, TILE_BLOCKS, WORDS), 1, "blocks"), axis=-1)


def _add_maxima(
    maxima: Sequence[jax.Array], total: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Adds block maxima to each thread's running maximum and checksum."""
    largest, checksum = total
    for bits in maxima:
        largest = jnp.maximum(largest, bits)
        checksum = checksum + random.mix(bits.astype(jnp.uint32), word(0))
    return largest, checksum


# ---- codes


def write_codes(
    ops: KernelOps,
    x: Ref,
    scalars: Ref,
    *refs: Ref,
    orders: tuple[Order, ...],
    operands: Operands,
) -> None:
    """Writes codes and block scales, or values, in each order. Scratch memory follows the results in `refs`."""
    i, j = ops.index(0), ops.index(1)
    block = first_block(j, x.shape[1])
    tile = _Tile(ops=ops, x=x, blocks=pl.ds(block, TILE_BLOCKS))
    offset = operands.locate(i, block, scalars)
    index = _TileIndex(ops=ops, offset=offset)
    arrays = iter(refs)
    results = [[next(arrays) for _ in range(order.results)] for order in orders]
    for k, order in enumerate(orders):
        writer = _Writer(
            tile=tile,
            index=index,
            order=order,
            encoder=Encoder.from_words(scalars, offset.scalars + SCALARS * k, order),
            results=results[k],
        )
        if order.along_tokens:
            writer.write_columns(i, next(arrays))
        else:
            write_group = writer.write_tiles if order.square else writer.write_rows
            lax.fori_loop(0, GROUPS, partial(write_group, i), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writer:
    """Writes a tile in one order: `results` are its codes and scales, or its values."""

    tile: _Tile
    index: _TileIndex
    order: Order
    encoder: Encoder
    results: Sequence[Ref]

    def write_rows(self, i: jax.Array, g: jax.Array, carry: tuple[()]) -> tuple[()]:
        """Writes group g of tile i, quantized along features, `_ROWS` tokens at a time."""
        group = i * GROUPS + g

        def write(k: jax.Array, carry: tuple[()]) -> tuple[()]:
            self._write_rows(group, k * _ROWS)
            return carry

        lax.fori_loop(0, BLOCK // _ROWS, write, ())
        return carry

    def _write_rows(self, group: jax.Array, first: jax.Array) -> None:
        tile, first_token = self.tile, group * BLOCK + first
        words = tile.load_blocks(first_token, _ROWS)
        scale, enc = self.encoder.block_scales(self.order.add_headroom(row_maxima(words)))
        index = self.index.of_rows(group, first) if self.order.stochastic else None
        tokens = pl.ds(first_token, _ROWS)

        def expand(per_block: jax.Array) -> jax.Array:
            return tile.ops.expand(per_block, words.shape, "blocks")

        if self.order.decoded:
            unit = expand(decode_magnitude(scale, E4M3))
            results = [self.encoder.row_values(words, expand(enc), unit, index)]
        else:
            packed = self.encoder.encode_row(words, expand(enc), index)
            results = [packed, scale.astype(jnp.uint8)]
        for ref, array in zip(self.results, results, strict=True):
            tile.ops.store(ref, (tokens, tile.blocks, slice(None))[: array.ndim], array)

    def write_tiles(self, i: jax.Array, g: jax.Array, carry: tuple[()]) -> tuple[()]:
        """Writes group g of tile i, whose 16 tokens share their scales. A thread holds one word of each token."""
        tile, group = self.tile, i * GROUPS + g
        rows = tile.load_rows(group)
        scale, enc = self.encoder.block_scales(self.order.add_headroom(tile_maxima(rows)))
        enc, unit = (
            tile.ops.expand(per_tile, rows[0].shape, "words")
            for per_tile in (enc, decode_magnitude(scale, E4M3))
        )
        (values,) = self.results

        def write_row(k: jax.Array, carry: tuple[()]) -> tuple[()]:
            row = group * BLOCK + k, tile.blocks
            words = tile.ops.load(tile.x, row, "words")
            tile.ops.store(values, row, self.encoder.row_values(words, enc, unit, None))
            return carry

        # Each row is read again, from a cache. Without the loop, the kernel would take twice as long to compile.
        lax.fori_loop(0, BLOCK, write_row, ())
        return carry

    def write_columns(self, i: jax.Array, stage: Ref) -> None:
        """Writes tile i, quantized along tokens.

        A thread collects the codes of its columns in shared memory, and writes 32 bytes of a column at once.
        """
        tile, words = self.tile, 2 * GROUPS

        def add_group(g: jax.Array, joined: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            results = []
            for half, (values, indices, scale, enc) in enumerate(self._load_columns(i * GROUPS + g)):
                for k in range(2):
                    pairs = slice(4 * k, 4 * k + 4)
                    codes = self.encoder.encode_column(values[8 * k : 8 * k + 8], enc, indices[pairs])
                    tile.ops.store(stage, (half, slice(None), slice(None), 2 * g + k), codes)
                # After four groups, the scale of the first one is in the lowest byte.
                results.append((joined[half] >> word(8)) | (scale.astype(jnp.uint32) << word(24)))
            return tuple(results)

        zeros = _zero_words(tile.ops)
        codes, scales = self.results
        for half, scale in enumerate(lax.fori_loop(0, GROUPS, add_group, (zeros, zeros))):
            columns = tile.ops.load(stage, (half,), "columns")
            column = (tile.blocks, slice(None), half)
            tile.ops.store(codes, (*column, pl.ds(i * words, words)), columns)
            tile.ops.store(scales, (*column, i), scale)

    def _load_columns(
        self, group: jax.Array
    ) -> Iterator[tuple[list[jax.Array], Sequence[jax.Array | None], jax.Array, jax.Array]]:
        """Yields values of 16 tokens, indices of their pairs, scales and encoding scales: even, then odd features."""
        tile = self.tile
        for half, values in enumerate(tile.load_columns(group, self.order)):
            maxima = self.order.add_headroom(tile.column_maxima(values, self.order))
            scale, enc = self.encoder.block_scales(maxima)
            rounded = [tile.ops.round_bf16(v) for v in values] if self.order.rotates else values
            indices = self.index.of_columns(group, half) if self.order.stochastic else [None] * WORDS
            yield rounded, indices, scale, enc


# ---- values of codes


def decode_rows(ops: KernelOps, codes: Ref, scales: Ref, values: Ref) -> None:
    """Writes the values of codes. A row of the arrays has 16 blocks, and each thread holds one block."""
    i = ops.index(0)

    def decode_group(g: jax.Array, carry: tuple[()]) -> tuple[()]:
        rows = pl.ds(i * TILE_TOKENS + g * _ROWS, _ROWS)
        packed = ops.load(codes, (rows,), "blocks").astype(jnp.uint32)
        unit = decode_magnitude(ops.load(scales, (rows,), "rows").astype(jnp.int32), E4M3)
        ops.store(values, (rows,), decode_bytes(packed, ops.expand(unit, packed.shape, "blocks")))
        return carry

    lax.fori_loop(0, TILE_TOKENS // _ROWS, decode_group, ())


# ---- outer scales


def write_outer_factors(ops: KernelOps, *refs: Ref, bounds: tuple[float, ...]) -> None:
    """Writes both factors of the product of some outer scales, each 128 times. `refs` has the maxima, then the result.

    Computes the same product as `values.outer_factors`, without fp64.
    """
    *maxima, factors = refs
    i = ops.index(0)
    m, e = jnp.float32(1), jnp.int32(0)
    for amax, bound in zip(maxima, bounds, strict=True):
        one, exponent = outer_scale(amax[i], bound)
        m, e = m * one, e + exponent
    product = (bits_of(m) >> 23) - 127 + e
    rest = jnp.maximum(jnp.minimum(product + REACH, 0), product - REACH)
    zeros = _zero_words(ops).astype(jnp.float32)
    for k, factor in enumerate((m * power_of_two(e - rest), power_of_two(rest))):
        ops.store(factors, (i, k), zeros + factor)
