"""Maps a kernel's tile to its position in the kernel's input matrix, in its operand, and in the global operand.

Random words are indexed by the position in the global operand, of which a device may hold only a shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from policyc.numerics.quantize.kernels.kernel_ops import Ref

BLOCK = 16
"""The elements of an NVFP4 block."""
TILE_BLOCKS = 16
"""Blocks of features in a tile. Each of its rows has one word for each of the 128 threads."""
TILE_FEATURES = TILE_BLOCKS * BLOCK
GROUPS = 4
"""Groups of 16 tokens in a tile. Transposed, they are 32 bytes of codes, the smallest unit of a memory write."""
TILE_TOKENS = GROUPS * BLOCK


def first_block(tile: jax.Array, blocks: int) -> jax.Array:
    """The first block of features of a tile, given the tile's index along features.

    If the features do not fill whole tiles, the last two tiles overlap and write the same numbers there.
    """
    block: jax.Array = tile * TILE_BLOCKS
    return block if blocks % TILE_BLOCKS == 0 else jnp.minimum(block, blocks - TILE_BLOCKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLengths:
    """The tokens of a row (the last dimension of tokens) in a shard and in the whole operand."""

    shard: int
    whole: int

    def first_token(self, group: jax.Array) -> jax.Array:
        """Where in the whole operand a group of 16 tokens starts, relative to the first token of the shard, uint32."""
        group = group.astype(jnp.uint32)
        if self.shard == self.whole:
            first: jax.Array = group * jnp.uint32(BLOCK)
        else:
            length = jnp.uint32(self.shard // BLOCK)
            row = lax.div(group, length)
            first = row * jnp.uint32(self.whole) + (group - row * length) * jnp.uint32(BLOCK)
        return first


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """The operands of a kernel, one after the other in one matrix.

    Attributes:
      count: the number of operands: more than one under `vmap`.
      tokens: the number of tokens per operand.
      rows: how tokens are numbered in the whole operand.
      features: the number of features of the whole operand.
    """

    count: int
    tokens: int
    rows: RowLengths
    features: int

    def locate(self, tile: jax.Array, block: jax.Array, start: Ref) -> TileOffset:
        """Locates a tile, given its number along tokens and its first block of features.

        `start` has the first token and the first feature of each operand in the whole operand.
        """
        operand: Any = 0
        first_group: Any = 0
        if self.count > 1:
            operand = lax.div(tile, jnp.int32(self.tokens // TILE_TOKENS))
            first_group = operand * (self.tokens // BLOCK)
        return TileOffset(
            operands=self,
            operand=operand,
            first_group=first_group,
            first_token=start[operand, 0],
            first_feature=start[operand, 1] + (block * BLOCK).astype(jnp.uint32),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TileOffset:
    """The position of a tile.

    Attributes:
      operands: all operands.
      operand: the number of the tile's operand.
      first_group: the first group of tokens of the operand in the matrix.
      first_token: the first token of the operand in the whole operand.
      first_feature: the first feature of the tile in the whole operand.
    """

    operands: Operands
    operand: Any
    first_group: Any
    first_token: jax.Array
    first_feature: jax.Array

    @property
    def features(self) -> int:
        return self.operands.features

    def token(self, group: jax.Array) -> jax.Array:
        """The first token, in the whole operand, of a group of 16 tokens of the matrix."""
        return self.first_token + self.operands.rows.first_token(group - self.first_group)
