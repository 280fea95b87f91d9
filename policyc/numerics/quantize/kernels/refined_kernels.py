"""Kernels for block scales that depend on every element: four-over-six, and the correction of MS-EDEN.

Each thread has one block, which it rereads for each stage, pair by pair. Loops keep the code short: a training step has
many such kernels, and their size determines how long it takes to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from policyc.numerics.quantize.kernels.kernel_bodies import load_scalars
from policyc.numerics.quantize.kernels.kernel_ops import KernelOps, Ref
from policyc.numerics.quantize.kernels.kernel_orders import SCALARS, WORDS, Order, Scalars
from policyc.numerics.quantize.kernels.kernel_tiles import (
    BLOCK,
    GROUPS,
    TILE_BLOCKS,
    Operands,
    TileOffset,
    first_block,
)
from policyc.numerics.quantize.reference import random
from policyc.numerics.quantize.reference.bits import (
    E2M1,
    E4M3,
    abs_bits,
    bits_of,
    decode_magnitude,
    from_bits,
    kernel_div,
    multiply_unfused,
    round_nearest,
    round_stochastic,
    sign_bit,
)
from policyc.numerics.quantize.reference.blocks import RANDOM_BITS

ROW_TOKENS = 8
"""The tokens that the threads process at once along features: 8 x 16 blocks, one per thread."""

_HALF_PAIRS = WORDS // 2

# Jitted, so that they are traced once for all kernels. Tracing them is a good part of the time to compile a step.
_divide = jax.jit(kernel_div)
_round_nearest = jax.jit(round_nearest, static_argnums=1)
_decode = jax.jit(decode_magnitude, static_argnums=1)
_mix = jax.jit(random.mix_scaled)

Sums = tuple[jax.Array, ...]


# ---- one block


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoder:
    """Computes block scales, from the `Scalars` of the operand as numbers."""

    lift: jax.Array
    enc: jax.Array
    dec: jax.Array
    nan: jax.Array
    key: jax.Array
    scaled_key: jax.Array

    @classmethod
    def from_scalars(cls, scalars: Scalars) -> _Encoder:
        lift, enc, dec = (
            lax.bitcast_convert_type(bits, jnp.float32) for bits in (scalars.lift, scalars.enc, scalars.dec)
        )
        return cls(
            lift=lift, enc=enc, dec=dec, nan=scalars.nan, key=scalars.key, scaled_key=scalars.scaled_key
        )

    def scale_candidates(self, maxima: jax.Array, fraction: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The codes of block scales that map maxima to 1 / `fraction`, and the encoding scales. `maxima` has bits.

        Codes are never NaN, see `mark_not_finite`.
        """
        ideal = (from_bits(maxima) * self.lift) * (self.enc * fraction)
        code = _round_nearest(ideal, E4M3)
        scale = _decode(code, E4M3) * self.dec
        return code, _divide(jnp.ones_like(scale), scale)

    def mark_not_finite(self, code: jax.Array) -> jax.Array:
        """Replaces the codes of block scales by NaN if the tensor has a NaN or an infinity."""
        marked: jax.Array = code | (self.nan & jnp.uint32(E4M3.nan or 0)).astype(jnp.int32)
        return marked


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockQuantizer:
    """Quantizes the block of each thread. All arrays have one element per block.

    Attributes:
      load_pair: loads the elements 2p and 2p + 1 of the blocks, given p, as fp32.
    """

    encoder: _Encoder
    refinement: str
    load_pair: Callable[[Any], Sequence[jax.Array]]

    def quantize(self, index: jax.Array) -> tuple[Sequence[jax.Array], jax.Array]:
        """The codes as two words of 8, and the codes of the scales. `index` is that of `_BlockIndex`."""
        maxima = lax.fori_loop(1, WORDS, self._add_maximum, self._pair_maximum(0))
        if self.refinement == "ms_eden":
            scale, enc = self.encoder.scale_candidates(maxima, jnp.float32(1 / 6))
            words, (vv, vq) = self._encode(enc, has_sums=True)
            scale = self._correct(scale, _divide(vv, vq), index)
        else:
            scale, enc = self._choose(maxima)
            words, _ = self._encode(enc, has_sums=False)
        return words, self.encoder.mark_not_finite(scale)

    def _pair_maximum(self, pair: Any) -> jax.Array:
        first, second = map(abs_bits, self.load_pair(pair))
        return jnp.maximum(first, second)

    def _add_maximum(self, i: Any, largest: jax.Array) -> jax.Array:
        return jnp.maximum(largest, self._pair_maximum(i))

    def _load_lifted(self, pair: Any) -> list[jax.Array]:
        return [value * self.encoder.lift for value in self.load_pair(pair)]

    # ---- four over six

    def _choose(self, maxima: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The scales with the smaller error in each block, and the encoding scales; on a tie, those for 6."""

        def try_candidate(i: Any, best: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            fraction = jnp.where(i == 0, jnp.float32(1 / 6), jnp.float32(1 / 4))
            scale, enc = self.encoder.scale_candidates(maxima, fraction)
            loss = self._error(_decode(scale, E4M3), enc)
            is_better = loss < best[0]
            candidate = (loss, scale, enc)
            return tuple(jnp.where(is_better, new, old) for new, old in zip(candidate, best, strict=True))

        zero = maxima & jnp.int32(0)
        nothing = from_bits(zero)
        # Errors are finite, so the first candidate always replaces infinity.
        _, scale, enc = lax.fori_loop(0, 2, try_candidate, (nothing + jnp.float32(jnp.inf), zero, nothing))
        return scale, enc

    def _error(self, scale: jax.Array, enc: jax.Array) -> jax.Array:
        def terms(pair: Any) -> list[Sums]:
            return [(self._element_error(lifted, scale, enc),) for lifted in self._load_lifted(pair)]

        def add(j: Any, sums: tuple[Sums, ...]) -> tuple[Sums, ...]:
            return _push(sums, terms(j), terms(j + _HALF_PAIRS))

        return _finish(lax.fori_loop(0, _HALF_PAIRS, add, _zeros(scale, 1)))[0]

    def _element_error(self, lifted: jax.Array, scale: jax.Array, enc: jax.Array) -> jax.Array:
        magnitude = jnp.abs(lifted * self.encoder.enc)
        magnitude = jnp.where(magnitude < jnp.float32(1e5), magnitude, jnp.float32(1e5))
        code = _round_nearest(jnp.abs(lifted) * enc, E2M1)
        error = jnp.abs(magnitude - _decode(code, E2M1) * scale)
        return multiply_unfused(error, error)

    # ---- codes, and the sums of MS-EDEN

    def _encode(self, enc: jax.Array, *, has_sums: bool) -> tuple[Sequence[jax.Array], Sums]:
        """The codes, eight to a word, and the sums <v,v> and <v,q>."""
        no_codes = bits_of(enc).astype(jnp.uint32) & jnp.uint32(0)
        no_sums = _zeros(enc, 2) if has_sums else ()

        def encode_pair(pair: Any) -> tuple[jax.Array, list[Sums]]:
            codes: list[jax.Array] = []
            terms: list[Sums] = []
            for lifted in self._load_lifted(pair):
                scaled = lifted * enc
                magnitude = _round_nearest(jnp.abs(scaled), E2M1)
                codes.append((magnitude | sign_bit(scaled, E2M1)).astype(jnp.uint32))
                if has_sums:
                    v = jnp.minimum(jnp.abs(scaled), jnp.float32(1e4))
                    q = _decode(magnitude, E2M1)
                    terms.append((multiply_unfused(v, v), multiply_unfused(v, q)))
            return codes[0] | (codes[1] << jnp.uint32(4)), terms

        def add(j: Any, carry: Any) -> Any:
            words, sums = carry
            pairs = [encode_pair(j), encode_pair(j + _HALF_PAIRS)]
            # After four pairs, the first one is in the lowest byte.
            words = tuple(
                (word >> jnp.uint32(8)) | (pair << jnp.uint32(24))
                for word, (pair, _) in zip(words, pairs, strict=True)
            )
            return words, _push(sums, pairs[0][1], pairs[1][1]) if has_sums else ()

        words, sums = lax.fori_loop(0, _HALF_PAIRS, add, ((no_codes, no_codes), no_sums))
        return words, _finish(sums) if has_sums else ()

    def _correct(self, scale: jax.Array, gain: jax.Array, index: jax.Array) -> jax.Array:
        """The scale times its gain, rounded stochastically."""
        value = _decode(scale, E4M3) * jnp.where(scale == 0, jnp.float32(1), gain)
        word = _mix(index ^ self.encoder.key, self.encoder.scaled_key)
        bits = (word >> jnp.uint32(32 - RANDOM_BITS)).astype(jnp.int32)
        return round_stochastic(value, bits, RANDOM_BITS, E4M3)


# ---- sums over a block, in the order of the jnp code: halves are added until one element is left


def _zeros(like: jax.Array, count: int) -> tuple[Sums, ...]:
    zero = from_bits(bits_of(like) & jnp.int32(0))
    return ((zero,) * (2 * count),) * _HALF_PAIRS


def _push(sums: tuple[Sums, ...], low: Sequence[Sums], high: Sequence[Sums]) -> tuple[Sums, ...]:
    """Appends the sums of the pairs j and j + 4: first the sums of their first elements, then of their second ones."""
    added = tuple(
        a + b for one, other in zip(low, high, strict=True) for a, b in zip(one, other, strict=True)
    )
    return (*sums[1:], added)


def _finish(sums: tuple[Sums, ...]) -> Sums:
    """The sums over the block, from the four entries that `_push` appended."""
    first, second = (tuple(map(jnp.add, sums[j], sums[j + 2])) for j in range(2))
    total = tuple(map(jnp.add, first, second))
    half = len(total) // 2
    return tuple(map(jnp.add, total[:half], total[half:]))


# ---- the tile of one instance


def write_codes(
    ops: KernelOps,
    x: Ref,
    start: Ref,
    *refs: Ref,
    orders: tuple[Order, ...],
    operands: Operands,
) -> None:
    """Writes codes and block scales in one order.

    `refs` has the words of the order's `kernels.OrderScales`, then the results, then scratch memory.
    """
    (order,) = orders
    i, j = ops.index(0), ops.index(1)
    block = first_block(j, x.shape[1])
    offset = operands.locate(i, block, start)
    scalars, (codes, scales, *scratch) = refs[:SCALARS], refs[SCALARS:]
    writer = _Writer(
        ops=ops,
        x=x,
        blocks=pl.ds(block, TILE_BLOCKS),
        encoder=_Encoder.from_scalars(load_scalars(ops, scalars, offset, order)),
        refinement=order.refinement,
        index=_BlockIndex(ops=ops, offset=offset),
        codes=codes,
        scales=scales,
    )
    if order.along_tokens:
        lax.fori_loop(0, 2, partial(writer.write_columns, i, *scratch), ())
    else:
        lax.fori_loop(0, GROUPS * BLOCK // ROW_TOKENS, partial(writer.write_rows, i), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockIndex:
    """The indices of the blocks of a tile in the whole operand."""

    ops: KernelOps
    offset: TileOffset

    def of_rows(self, group: jax.Array, offset: jax.Array) -> jax.Array:
        """The indices of the blocks of 8 tokens, starting at token `offset` of a group."""
        token, block = (self.ops.iota((ROW_TOKENS, TILE_BLOCKS), axis, "rows") for axis in (0, 1))
        token = token + (self.offset.token(group) + offset.astype(jnp.uint32))
        block = block + (self.offset.first_feature >> jnp.uint32(4))
        index: jax.Array = token * jnp.uint32(self.offset.features // BLOCK) + block
        return index

    def of_columns(self, group: jax.Array, half: jax.Array) -> jax.Array:
        """The indices of the blocks of a group of tokens, at even or odd features."""
        block, word = (self.ops.iota((TILE_BLOCKS, WORDS), axis, "words") for axis in (0, 1))
        feature = self.offset.first_feature + half.astype(jnp.uint32) + block * jnp.uint32(BLOCK)
        row = self.offset.token(group) >> jnp.uint32(4)
        index: jax.Array = row * jnp.uint32(self.offset.features) + feature + word * jnp.uint32(2)
        return index


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writer:
    """Writes the codes and scales of a tile. `blocks` is its slice of blocks of features."""

    ops: KernelOps
    x: Ref
    blocks: Any
    encoder: _Encoder
    refinement: str
    index: _BlockIndex
    codes: Ref
    scales: Ref

    def write_rows(self, i: jax.Array, n: jax.Array, carry: tuple[()]) -> tuple[()]:
        """Writes 8 tokens of tile i, quantized along features."""
        ops, blocks = self.ops, self.blocks
        group, offset = i * GROUPS + (n >> 1), (n & 1) * ROW_TOKENS
        tokens = pl.ds(group * BLOCK + offset, ROW_TOKENS)

        def load_pair(pair: Any) -> list[jax.Array]:
            words = ops.load(self.x, (tokens, blocks, pair), "rows")
            return [_high_half(words << jnp.uint32(16)), _high_half(words)]

        words, scale = self._quantize(load_pair, self.index.of_rows(group, offset))
        for k, word in enumerate(words):
            ops.store(self.codes, (tokens, blocks, k), word)
        ops.store(self.scales, (tokens, blocks), scale.astype(jnp.uint8))
        return carry

    def write_columns(self, i: jax.Array, stage: Ref, half: jax.Array, carry: tuple[()]) -> tuple[()]:
        """Writes the even or odd features of tile i, quantized along tokens.

        A thread collects the codes of its columns in shared memory, and writes 32 bytes of a column at once.
        """
        ops, blocks = self.ops, self.blocks
        shift = (jnp.int32(16) - half * 16).astype(jnp.uint32)

        def add_group(g: jax.Array, joined: jax.Array) -> jax.Array:
            group = i * GROUPS + g

            def load_pair(pair: Any) -> list[jax.Array]:
                first = group * BLOCK + pair * 2
                rows = [ops.load(self.x, (first + k, blocks), "words") for k in range(2)]
                return [_high_half(row << shift) for row in rows]

            words, scale = self._quantize(load_pair, self.index.of_columns(group, half))
            for k, word in enumerate(words):
                ops.store(stage, (half, slice(None), slice(None), 2 * g + k), word)
            # After four groups, the scale of the first one is in the lowest byte.
            shifted: jax.Array = (joined >> jnp.uint32(8)) | (scale.astype(jnp.uint32) << jnp.uint32(24))
            return shifted

        zeros = ops.iota((TILE_BLOCKS, WORDS), 0, "words") & jnp.uint32(0)
        scales = lax.fori_loop(0, GROUPS, add_group, zeros)
        columns = ops.load(stage, (half,), "columns")
        column = (blocks, slice(None), half)
        ops.store(self.codes, (*column, pl.ds(i * 2 * GROUPS, 2 * GROUPS)), columns)
        ops.store(self.scales, (*column, i), scales)
        return carry

    def _quantize(
        self, load_pair: Callable[[Any], Sequence[jax.Array]], index: jax.Array
    ) -> tuple[Sequence[jax.Array], jax.Array]:
        block = BlockQuantizer(encoder=self.encoder, refinement=self.refinement, load_pair=load_pair)
        return block.quantize(index)


def _high_half(words: jax.Array) -> jax.Array:
    """The bfloat16 number in the high half of each word, in fp32."""
    return lax.bitcast_convert_type(words & jnp.uint32(0xFFFF0000), jnp.float32)
