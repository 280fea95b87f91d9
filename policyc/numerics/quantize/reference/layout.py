"""The parts of a quantized array, and how its codes and scales are split, packed and padded.

All axes count from the end, so that `vmap` can add leading ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from policyc.numerics.quantize.reference.bits import ELEMENTS

_Dim = TypeVar("_Dim")

_FEW_TILES = 1 << 20
"""The most tiles for which scales are kept in both orders. Up to this many per layer of a stack, XLA reads the scales
from the stack in the kernel that repeats them for the rows of the tiles, provided that they are in row order. With more
tiles, it copies the scales first, and that copy can also transpose them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How to read the arrays of a `Quantized`.

    Attributes:
      axis: the quantized axis.
      block: the number of elements that share a block scale; 0 if there are no block scales.
      size: the length of the quantized axis before padding.
      tile_axis: the other axis of 2D tiles, along which they are as long as a block.
      tile_size: its length before padding.
      bound: the largest magnitude after division by the outer scale.
      fast_sums: whether the GEMM that reads it may accumulate in fewer bits than fp32.
      decoded: whether it has bfloat16 values (codes times block scales) in place of codes and scales.
      moved_axes: how many of the last axes come first in the codes, which then may be 32-bit words. Only for operands
        that are saved.
    """

    format: str
    element: str
    axis: int
    block: int
    size: int
    tile_axis: int | None = None
    tile_size: int = 0
    bound: float = 1.0
    fast_sums: bool = False
    decoded: bool = False
    moved_axes: int = 0

    @property
    def packed(self) -> bool:
        """Whether a byte holds two codes."""
        return ELEMENTS[self.element].bits == 4 and not self.decoded

    @property
    def has_scales(self) -> bool:
        """Whether there are block scales."""
        return bool(self.block) and not self.decoded

    @property
    def has_few_tiles(self) -> bool:
        """Whether there are few enough 2D tiles to keep their scales in both orders, if the codes are."""
        return -(-self.size // self.block) * -(-self.tile_size // self.block) <= _FEW_TILES

    def swap_tile_axes(self, array: jax.Array) -> jax.Array:
        """An array with the axes of 2D tiles swapped."""
        assert self.tile_axis is not None
        return array.swapaxes(self.axis, self.tile_axis)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """A quantized array.

    Attributes:
      codes: the codes, two to a byte if they have four bits; the values if the layout is decoded.
      scales: the bytes of the block scales.
      amax: the largest magnitude that each outer scale is computed from.
      transposed_codes: a second copy of the codes, if both orders were requested: with the last axes first or, for
        four-bit 2D tiles, packed along the other axis of the tiles.
      transposed_scales: a second copy of the scales of such tiles, with the tile axes swapped, if there are few tiles.
    """

    codes: jax.Array
    scales: jax.Array | None
    amax: jax.Array | None
    transposed_codes: jax.Array | None = None
    transposed_scales: jax.Array | None = None
    layout: Layout = field(metadata={"static": True})

    def transpose(self, order: tuple[int, ...]) -> Quantized:
        """The array with its axes in another order."""
        layout, ndim = self.layout, self.codes.ndim
        moved = {old - ndim: new - ndim for new, old in enumerate(order)}
        tile = None if layout.tile_axis is None else moved[layout.tile_axis]
        transposed: Quantized = jax.tree.map(lambda array: array.transpose(order), self)
        return replace(transposed, layout=replace(layout, axis=moved[layout.axis], tile_axis=tile))

    def swap_last_axes(self) -> Quantized:
        """Swaps the last two axes."""
        ndim = self.codes.ndim
        return self.transpose((*range(ndim - 2), ndim - 1, ndim - 2))

    def pack_along_tile_axis(self) -> jax.Array:
        """The codes of four-bit 2D tiles, packed along the other axis of the tiles."""
        tile = self.layout.tile_axis
        assert tile is not None
        unpacked = unpack(self.codes, self.layout.axis)
        pairs = split_axis(unpacked, tile, unpacked.shape[tile] // 2, 2)
        return pack(*(lax.index_in_dim(pairs, i, pairs.ndim + tile, keepdims=False) for i in range(2)))

    def add_other_packing(self, codes: jax.Array) -> Quantized:
        """Adds the codes of 2D tiles packed along the other axis and, if there are few tiles, transposed scales."""
        scales = self.scales if self.layout.has_few_tiles else None
        return replace(
            self,
            transposed_codes=codes,
            transposed_scales=None if scales is None else self.layout.swap_tile_axes(scales),
        )

    def select_packing(self, axis: int) -> Quantized:
        """Keeps one packing of 2D tiles that are packed along both axes: the one along `axis`."""
        layout, scales = self.layout, self.scales
        assert layout.tile_axis is not None
        if self.transposed_scales is not None and axis < max(layout.axis, layout.tile_axis):
            # The GEMM transposes this axis to the end. XLA cancels both transposes.
            scales = layout.swap_tile_axes(self.transposed_scales)
        selected = replace(self, scales=scales, transposed_codes=None, transposed_scales=None)
        if axis == layout.axis:
            return selected
        assert axis == layout.tile_axis
        assert self.transposed_codes is not None
        transposed = replace(
            layout, axis=axis, tile_axis=layout.axis, size=layout.tile_size, tile_size=layout.size
        )
        return replace(selected, codes=self.transposed_codes, layout=transposed)


Operand = Quantized | jax.Array
"""An operand of a GEMM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The meaning of an operand's axes.

    Attributes:
      axis: the axis that is cut into blocks.
      contract: all contracted axes. A scale per row spans them.
      batch: each index of these axes is a separate tensor.
      tile: the other axis of 2D tiles.
      second_order: how many of the last axes come first in a second copy of the codes; 0 if there is none. It is for
        two GEMMs of which one contracts these axes, and the other one all axes before them. Four-bit 2D tiles are
        packed along their other axis instead.
      only_second: whether to write the second copy alone.
    """

    axis: int = -1
    contract: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    tile: int | None = None
    second_order: int = 0
    only_second: bool = False


def move_last_axes(x: jax.Array, count: int) -> jax.Array:
    """Moves the last axes to the front."""
    return x.transpose(rotate_dims(range(x.ndim), count))


def move_first_axes(x: jax.Array, count: int) -> jax.Array:
    """Moves the first axes to the end."""
    return x.transpose(rotate_dims(range(x.ndim), -count))


def rotate_dims(dims: Sequence[_Dim], count: int) -> tuple[_Dim, ...]:
    """Reorders one item per dimension: the last `count` first or, if it is negative, the first ones last."""
    return (*dims[-count:], *dims[:-count])


def split_axis(x: jax.Array, axis: int, *sizes: int) -> jax.Array:
    """Reshapes an axis into several."""
    index = x.ndim + axis
    return x.reshape(x.shape[:index] + sizes + x.shape[index + 1 :])


def split_blocks(x: jax.Array, layout: Layout) -> jax.Array:
    """Reshapes the quantized axis into blocks and the elements of a block."""
    return split_axis(x, layout.axis, x.shape[layout.axis] // layout.block, layout.block)


def repeat_axis(x: jax.Array, axis: int, times: int) -> jax.Array:
    """Repeats each element along an axis. A broadcast, which XLA fuses."""
    i = x.ndim + axis
    wide = jnp.broadcast_to(jnp.expand_dims(x, i + 1), x.shape[: i + 1] + (times,) + x.shape[i + 1 :])
    return wide.reshape(x.shape[:i] + (x.shape[i] * times,) + x.shape[i + 1 :])


def expand_per_block(numbers: jax.Array, layout: Layout) -> jax.Array:
    """Shapes one number per block (or per tile) to broadcast against the result of `split_blocks`."""
    if layout.tile_axis is not None:
        numbers = repeat_axis(numbers, layout.tile_axis, layout.block)
    return jnp.expand_dims(numbers, numbers.ndim + layout.axis + 1)


def pack(even: jax.Array, odd: jax.Array) -> jax.Array:
    """Packs two codes into a byte, the even one in the low nibble."""
    return (even | (odd << 4)).astype(jnp.uint8)


def unpack(packed: jax.Array, axis: int = -1, *, cpu: bool = False) -> jax.Array:
    """Unpacks codes, one per uint8. With `cpu` they are stacked in memory before use, which is faster on a CPU."""
    i = packed.ndim + axis
    if cpu:
        wide = jnp.stack([packed & jnp.uint8(15), packed >> 4], i + 1)
    else:
        pair = packed.shape[: i + 1] + (2,) + packed.shape[i + 1 :]
        shifts = lax.broadcasted_iota(jnp.uint8, pair, i + 1) * 4
        wide = (jnp.expand_dims(packed, i + 1) >> shifts) & jnp.uint8(15)
    return wide.reshape(packed.shape[:i] + (2 * packed.shape[i],) + packed.shape[i + 1 :])


def trim(x: jax.Array, layout: Layout) -> jax.Array:
    """Removes the padding of the quantized axis and of the tile axis."""
    x = lax.slice_in_dim(x, 0, layout.size, axis=x.ndim + layout.axis)
    if layout.tile_axis is not None:
        x = lax.slice_in_dim(x, 0, layout.tile_size, axis=x.ndim + layout.tile_axis)
    return x
