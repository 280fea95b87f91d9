"""What a quantized array consists of, and how its codes and scales are split, packed and padded.

All axes count from the end, so that `vmap` can add leading ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax

from policyc.numerics.quantize.bits import ELEMENTS

TILE = 16
"""The rows and columns of a 2D tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How to read the arrays of a `Quantized`.

    Attributes:
      axis: the quantized axis.
      block: the number of elements that share a block scale; 0 if there are no block scales.
      size: the length of the quantized axis before padding.
      tile_axis: the other axis of 2D tiles.
      tile_size: its length before padding.
      bound: the value of the largest element after division by the outer scale.
      has_power_of_two: whether the outer scale is a power of two.
    """

    format: str
    element: str
    axis: int
    block: int
    size: int
    tile_axis: int | None = None
    tile_size: int = 0
    bound: float = 1.0
    has_power_of_two: bool = False

    @property
    def packed(self) -> bool:
        """Whether a byte holds two codes."""
        return ELEMENTS[self.element].bits == 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """A quantized array.

    Attributes:
      codes: the codes, two to a byte if they have four bits.
      scales: the bytes of the block scales.
      amax: the largest magnitude that each outer scale is computed from.
      transposed_codes: the codes again, if both orders were asked for: with their last axis first or, of 2D tiles with
        four bits, packed along the other axis of the tiles.
    """

    codes: jax.Array
    scales: jax.Array | None
    amax: jax.Array | None
    transposed_codes: jax.Array | None = None
    layout: Layout = field(metadata={"static": True})

    def swap_last_axes(self) -> Quantized:
        """The transpose of the last two axes."""
        layout, swap = self.layout, {-1: -2, -2: -1}
        tile = None if layout.tile_axis is None else swap[layout.tile_axis]
        return Quantized(
            codes=self.codes.swapaxes(-1, -2),
            scales=None if self.scales is None else self.scales.swapaxes(-1, -2),
            amax=None if self.amax is None else self.amax.swapaxes(-1, -2),
            transposed_codes=None
            if self.transposed_codes is None
            else self.transposed_codes.swapaxes(-1, -2),
            layout=replace(layout, axis=swap[layout.axis], tile_axis=tile),
        )

    def pack_along_tile_axis(self) -> jax.Array:
        """The codes of 2D tiles with four bits, packed along the other axis of the tiles."""
        tile = self.layout.tile_axis
        assert tile is not None
        unpacked = unpack(self.codes, self.layout.axis)
        pairs = split_axis(unpacked, tile, unpacked.shape[tile] // 2, 2)
        return pack(*(lax.index_in_dim(pairs, i, pairs.ndim + tile, keepdims=False) for i in range(2)))

    def select_packing(self, axis: int) -> Quantized:
        """2D tiles that were packed along both axes, only along this one."""
        layout = self.layout
        if axis == layout.axis:
            return replace(self, transposed_codes=None)
        assert axis == layout.tile_axis
        assert self.transposed_codes is not None
        transposed = replace(
            layout, axis=axis, tile_axis=layout.axis, size=layout.tile_size, tile_size=layout.size
        )
        return replace(self, codes=self.transposed_codes, transposed_codes=None, layout=transposed)


Operand = Quantized | jax.Array
"""An operand of a GEMM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """What the axes of an operand are.

    Attributes:
      axis: the axis that is cut into blocks.
      contract: all contracted axes. A scale per row spans them.
      batch: each index of these axes is a separate tensor.
      tile: the other axis of 2D tiles.
      both_orders: whether to also write the codes transposed: one GEMM contracts the last axis, another all before it.
        2D tiles of four bits are packed along both of their axes instead.
    """

    axis: int = -1
    contract: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    tile: int | None = None
    both_orders: bool = False


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
        numbers = repeat_axis(numbers, layout.tile_axis, TILE)
    return jnp.expand_dims(numbers, numbers.ndim + layout.axis + 1)


def pack(even: jax.Array, odd: jax.Array) -> jax.Array:
    """Packs two codes into a byte, the even one in the low nibble."""
    return (even | (odd << 4)).astype(jnp.uint8)


def unpack(packed: jax.Array, axis: int = -1, *, cpu: bool = False) -> jax.Array:
    """Unpacks codes, one to a uint8. With `cpu` they are stacked in memory before use, which is faster there."""
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
