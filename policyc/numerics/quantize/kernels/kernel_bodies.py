"""Bodies of the NVFP4 kernels: which words a kernel instance loads for its threads, and which it stores.

The kernels read two neighbouring bfloat16 features as one word. Along tokens, a thread has the words of 16 tokens at
one pair of features; along features, it has 8 words of a block. `block_programs` has what it computes.
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

from policyc.numerics.quantize.kernels import block_programs
from policyc.numerics.quantize.kernels.kernel_ops import KernelOps, Ref
from policyc.numerics.quantize.kernels.kernel_orders import SCALARS, WORDS, Order, Scalars
from policyc.numerics.quantize.kernels.kernel_tiles import (
    BLOCK,
    GROUPS,
    TILE_BLOCKS,
    TILE_TOKENS,
    Operands,
    TileOffset,
    first_block,
)
from policyc.numerics.quantize.kernels.words import word
from policyc.numerics.quantize.reference.values import find_factors_in_kernel

_COLUMN_WORDS = (TILE_BLOCKS, WORDS)
_ROW_BLOCKS = (BLOCK, TILE_BLOCKS)


def _zero_words(ops: KernelOps) -> jax.Array:
    """Zeros in the layout `words`. They are computed, because a constant has no layout."""
    return ops.iota(_COLUMN_WORDS, 0, "words") & word(0)


# ---- the tile of one instance


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """The tile of a matrix that one kernel instance reads. `blocks` is its slice of blocks of features."""

    ops: KernelOps
    x: Ref
    blocks: Any

    def load_blocks(self, group: jax.Array) -> jax.Array:
        """The words of 16 tokens in one array, so that a thread has whole blocks of features."""
        return self.ops.load(self.x, (pl.ds(group * BLOCK, BLOCK), self.blocks), "blocks")

    def load_rows(self, group: jax.Array) -> list[jax.Array]:
        """The words of 16 tokens, one array per token."""
        # One address for all tokens: each load adds a constant to it.
        tokens = self.x.at[pl.ds(group * BLOCK, BLOCK), self.blocks]
        return [self.ops.load(tokens, (i,), "words") for i in range(BLOCK)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TileIndex:
    """The indices of a tile's random words in the whole operand. Each is for 4 elements of a block."""

    ops: KernelOps
    offset: TileOffset

    def of_columns(self, group: jax.Array) -> jax.Array:
        """The index of the first word of each block in a group of tokens, at even features."""
        block, pair = (self.ops.iota(_COLUMN_WORDS, axis, "words") for axis in (0, 1))
        feature = self.offset.first_feature + block * word(BLOCK) + pair * word(2)
        return (self.offset.token(group) >> word(2)) * word(self.offset.features) + feature

    def of_rows(self, group: jax.Array) -> jax.Array:
        """The index of the first word that each thread uses of the first of its two blocks, in a group of tokens."""
        token, thread = (self.ops.iota(_ROW_BLOCKS, axis, "rows") for axis in (0, 1))
        token = token + self.offset.token(group)
        odd = thread & word(1)
        quad = (thread - odd) * word(BLOCK // 4) + odd * word(BLOCK // 8)
        return token * word(self.offset.features // 4) + (self.offset.first_feature >> word(2)) + quad


# ---- statistics


def find_statistics(
    ops: KernelOps, x: Ref, maxima: Ref, checksums: Ref, *, orders: tuple[Order, ...], groups: int
) -> None:
    """Writes 16 maxima and 16 checksums per instance, for each order."""
    # Backwards: the end of x, which was just computed, is still in a cache. The next kernel starts where this one ends.
    i, j = maxima.shape[1] - 1 - ops.index(0), ops.index(1)
    first_of_tile = first_block(j, x.shape[1])
    tile = _Tile(ops=ops, x=x, blocks=pl.ds(first_of_tile, TILE_BLOCKS))

    def add_group(g: jax.Array, totals: tuple[Any, ...]) -> tuple[Any, ...]:
        group = i * groups + g
        results = []
        for order, total in zip(orders, totals, strict=True):
            if order.along_tokens:
                program: Any = partial(block_programs.add_columns, order=order)
                inputs = tile.load_rows(group)
            else:
                program = block_programs.add_block
                inputs = [tile.load_blocks(group), ops.iota(_ROW_BLOCKS, 1, "rows")]
            results.append(tuple(ops.run(program, [*inputs, *total], [t.shape for t in total])))
        return tuple(results)

    numbers = [_block_numbers(ops, order) for order in orders]
    zeros = [n & word(0) for n in numbers]
    totals = lax.fori_loop(0, groups, add_group, tuple((zero, zero) for zero in zeros))
    # The number of blocks that the previous tile has too. They must not be counted twice.
    overlap = (j * TILE_BLOCKS - first_of_tile).astype(jnp.uint32)
    for k, (number, (largest, checksum)) in enumerate(zip(numbers, totals, strict=True)):
        if x.shape[1] % TILE_BLOCKS:
            checksum = jnp.where(number >= overlap, checksum, word(0))
        ops.store(maxima, (k, i, j), jnp.max(largest.astype(jnp.int32), axis=-1))
        ops.store(checksums, (k, i, j), jnp.sum(checksum, axis=-1, dtype=jnp.uint32))


def _block_numbers(ops: KernelOps, order: Order) -> jax.Array:
    """The index of each block within its tile, in the shape of the block maxima of one order."""
    if order.along_tokens:
        return ops.iota(_COLUMN_WORDS, 0, "words")
    return ops.iota((BLOCK, TILE_BLOCKS), 1, "rows")


# ---- codes


def write_codes(
    ops: KernelOps,
    x: Ref,
    start: Ref,
    *refs: Ref,
    orders: tuple[Order, ...],
    operands: Operands,
) -> None:
    """Writes codes and block scales, or values, in each order.

    `refs` has the words of each order's `kernels.OrderScales`, then the results, then scratch memory.
    """
    i, j = ops.index(0), ops.index(1)
    block = first_block(j, x.shape[1])
    tile = _Tile(ops=ops, x=x, blocks=pl.ds(block, TILE_BLOCKS))
    offset = operands.locate(i, block, start)
    arrays = iter(refs)
    scales = [[next(arrays) for _ in range(SCALARS)] for _ in orders]
    results = [[next(arrays) for _ in range(order.results)] for order in orders]
    writers = [
        _Writer(
            tile=tile,
            index=_TileIndex(ops=ops, offset=offset),
            order=order,
            scalars=load_scalars(ops, scales[k], offset, order),
            results=results[k],
            stage=next(arrays) if order.is_staged else None,
        )
        for k, order in enumerate(orders)
    ]
    no_scales = tuple((_zero_words(ops),) * 2 if order.is_staged else () for order in orders)

    # All orders of a group at once: the second one to read x finds it in a cache.
    def write_group(g: jax.Array, scales: _Scales) -> _Scales:
        return tuple(w.write_group(i, g, s) for w, s in zip(writers, scales, strict=True))

    for writer, joined in zip(writers, lax.fori_loop(0, GROUPS, write_group, no_scales), strict=True):
        writer.finish(i, joined)


def load_scalars(ops: KernelOps, refs: Sequence[Ref], offset: TileOffset, order: Order) -> Scalars:
    """The scalars of an order and of a tile's operand, from the words of the order's `kernels.OrderScales`."""
    program = partial(block_programs.find_scalars, order=order)
    return Scalars(*ops.run(program, [ref[offset.operand] for ref in refs], [()] * len(Scalars._fields)))


_Scales = tuple[tuple[jax.Array, ...], ...]
"""For each order that is staged: the codes of the scales so far, of the even and of the odd features."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writer:
    """Writes a tile in one order.

    Attributes:
      results: its codes and scales, or its values.
      stage: shared memory, for codes along tokens. A thread collects those of its columns there, and writes 32 bytes of
        a column at once.
    """

    tile: _Tile
    index: _TileIndex
    order: Order
    scalars: Scalars
    results: Sequence[Ref]
    stage: Ref | None

    def write_group(self, i: jax.Array, g: jax.Array, scales: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Writes group g of tile i, or collects it. Returns the scales that are collected so far."""
        group = i * GROUPS + g
        if self.order.is_staged:
            return self._collect_columns(group, g, scales)
        if self.order.square:
            self._write_tiles(group)
        elif self.order.along_tokens:
            self._write_column_values(group)
        else:
            self._write_rows(group)
        return ()

    def finish(self, i: jax.Array, scales: tuple[jax.Array, ...]) -> None:
        """Writes what was collected of tile i."""
        if self.stage is None:
            return
        ops, words = self.tile.ops, 2 * GROUPS
        codes, scale_codes = self.results
        for half, scale in enumerate(scales):
            columns = ops.load(self.stage, (half,), "columns")
            column = (self.tile.blocks, slice(None), half)
            ops.store(codes, (*column, pl.ds(i * words, words)), columns)
            ops.store(scale_codes, (*column, i), scale)

    def _write_rows(self, group: jax.Array) -> None:
        ops = self.tile.ops
        tokens = pl.ds(group * BLOCK, BLOCK)
        index = [self.index.of_rows(group)] if self.order.stochastic else []
        inputs = [self.tile.load_blocks(group), ops.iota(_ROW_BLOCKS, 1, "rows"), *index, *self.scalars]
        shapes = [(*_ROW_BLOCKS, WORDS)] if self.order.decoded else [(*_ROW_BLOCKS, WORDS // 4), _ROW_BLOCKS]
        arrays = ops.run(partial(block_programs.encode_rows, order=self.order), inputs, shapes)
        if not self.order.decoded:
            arrays[1] = arrays[1].astype(jnp.uint8)
        for ref, array in zip(self.results, arrays, strict=True):
            ops.store(ref, (tokens, self.tile.blocks), array)

    def _write_tiles(self, group: jax.Array) -> None:
        """Writes a group whose 16 tokens share their scales. A thread holds one word of each token."""
        ops = self.tile.ops
        rows = self.tile.load_rows(group)
        (maxima,) = ops.run(block_programs.find_maximum, rows, [_COLUMN_WORDS])
        largest = jnp.max(maxima.astype(jnp.int32), axis=-1).astype(jnp.uint32)
        inputs = [*rows, ops.expand(largest, _COLUMN_WORDS, "words"), *self.scalars]
        program = block_programs.encode_tile
        (values,) = self.results
        for k, array in enumerate(ops.run(program, inputs, [_COLUMN_WORDS] * BLOCK)):
            ops.store(values, (group * BLOCK + k, self.tile.blocks), array)

    def _write_column_values(self, group: jax.Array) -> None:
        """Writes 32 bytes of each column."""
        (values,) = self.results
        tokens = pl.ds(group * WORDS, WORDS)
        for half, array in enumerate(self._encode_columns(group, [(*_COLUMN_WORDS, WORDS)])):
            self.tile.ops.store(values, (self.tile.blocks, slice(None), half, tokens), array)

    def _collect_columns(
        self, group: jax.Array, g: jax.Array, scales: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        arrays = self._encode_columns(group, [_COLUMN_WORDS] * 3)
        results = []
        for half in range(2):
            *codes, scale = arrays[3 * half : 3 * half + 3]
            for k, code in enumerate(codes):
                self.tile.ops.store(self.stage, (half, slice(None), slice(None), 2 * g + k), code)
            # After four groups, the scale of the first one is in the lowest byte.
            results.append((scales[half] >> word(8)) | (scale << word(24)))
        return tuple(results)

    def _encode_columns(self, group: jax.Array, shapes: Sequence[tuple[int, ...]]) -> Sequence[jax.Array]:
        """The results of `block_programs.encode_columns`, which have these shapes for each of the two features."""
        index = [self.index.of_columns(group)] if self.order.stochastic else []
        ops = self.tile.ops
        inputs = [*self.tile.load_rows(group), ops.iota(_COLUMN_WORDS, 1, "words"), *index, *self.scalars]
        features = self.index.offset.features
        program = partial(block_programs.encode_columns, order=self.order, features=features)
        return ops.run(program, inputs, [*shapes, *shapes])


# ---- values of codes


def decode_rows(ops: KernelOps, codes: Ref, scales: Ref, values: Ref) -> None:
    """Writes the values of codes. A row of the arrays has 16 blocks, and each thread holds one block."""
    i = ops.index(0)

    def decode_group(g: jax.Array, carry: tuple[()]) -> tuple[()]:
        rows = pl.ds(i * TILE_TOKENS + g * BLOCK, BLOCK)
        packed = ops.load(codes, (rows,), "codes")
        scale = ops.load(scales, (rows,), "rows").astype(jnp.uint32)
        inputs = [packed, scale, ops.iota(_ROW_BLOCKS, 1, "rows")]
        (array,) = ops.run(block_programs.decode_block, inputs, [(*_ROW_BLOCKS, WORDS)])
        ops.store(values, (rows,), array)
        return carry

    lax.fori_loop(0, GROUPS, decode_group, ())


# ---- outer scales


def write_outer_factors(ops: KernelOps, *refs: Ref, bounds: tuple[float, ...]) -> None:
    """Writes both factors of the product of some outer scales. `refs` has the maxima, then the factors."""
    *maxima, first, second = refs
    i = ops.index(0)
    first[i], second[i] = find_factors_in_kernel([amax[i] for amax in maxima], bounds)
