"""What a quantized array is made of, and moving its parts about.

In: arrays of codes and scales. Out: the same, split, padded, packed, swizzled. The one trap: axes count
from the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

from policyc.numerics.quantize.bits import ELEMENTS

TILE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the arrays of a `Quantized` are to be read. Axes count from the end, so that `vmap` may add some.

    `size` is the length of the quantized axis before it was padded, `tile_size` that of the other axis of 2D
    tiles. `bound` is the value that the largest element takes when it is divided by the outer scale.
    """

    format: str
    element: str
    axis: int
    block: int
    size: int
    tile_axis: int | None = None
    tile_size: int = 0
    bound: float = 1.0

    @property
    def packed(self) -> bool:
        return ELEMENTS[self.element].bits == 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """Codes (two to a byte where they have four bits), bytes of block scales, amax of each outer scale; and, where both
    were asked for, the codes once more, their last axis first.
    """

    codes: jax.Array
    scales: jax.Array | None
    amax: jax.Array | None
    across: jax.Array | None = None
    layout: Layout = field(metadata={"static": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """What the axes of an operand are, all counted from the end.

    `axis` is cut into blocks; `contract` are all the contracted axes (the scale per row spans them); each
    index of the `batch` axes is a tensor of its own; `tile` is the other axis of 2D tiles. `both` asks for the
    codes in both orders: of one product the last axis is contracted, of another all before it.
    """

    axis: int = -1
    contract: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    tile: int | None = None
    both: bool = False


def split_axis(x: jax.Array, axis: int, *sizes: int) -> jax.Array:
    """Cuts an axis (counted from the end) into several."""
    at = x.ndim + axis
    return x.reshape(x.shape[:at] + sizes + x.shape[at + 1 :])


def repeat_axis(x: jax.Array, axis: int, times: int) -> jax.Array:
    """Repeats each element along an axis, as a broadcast that fuses."""
    at = x.ndim + axis
    wide = jnp.broadcast_to(jnp.expand_dims(x, at + 1), x.shape[: at + 1] + (times,) + x.shape[at + 1 :])
    return wide.reshape(x.shape[:at] + (x.shape[at] * times,) + x.shape[at + 1 :])


def spread(per_block: jax.Array, layout: Layout) -> jax.Array:
    """From one per tile to one per block, with a dimension of size 1 after the axis of blocks."""
    if layout.tile_axis is not None:
        per_block = repeat_axis(per_block, layout.tile_axis, TILE)
    return jnp.expand_dims(per_block, per_block.ndim + layout.axis + 1)


def pack(even: jax.Array, odd: jax.Array) -> jax.Array:
    """Two codes in a byte, the even one in the low nibble."""
    return (even | (odd << 4)).astype(jnp.uint8)


def unpack(packed: jax.Array, axis: int = -1, *, cpu: bool = False) -> jax.Array:
    """The codes of packed bytes, one to a uint8. A CPU is faster if they are stored so before they are used."""
    at = packed.ndim + axis
    if cpu:
        wide = jnp.stack([packed & jnp.uint8(15), packed >> 4], at + 1)
    else:
        pair = packed.shape[: at + 1] + (2,) + packed.shape[at + 1 :]
        shifts = lax.broadcasted_iota(jnp.uint8, pair, at + 1) * 4
        wide = (jnp.expand_dims(packed, at + 1) >> shifts) & jnp.uint8(15)
    return wide.reshape(packed.shape[:at] + (2 * packed.shape[at],) + packed.shape[at + 1 :])


def trim(x: jax.Array, layout: Layout) -> jax.Array:
    x = lax.slice_in_dim(x, 0, layout.size, axis=x.ndim + layout.axis)
    if layout.tile_axis is not None:
        x = lax.slice_in_dim(x, 0, layout.tile_size, axis=x.ndim + layout.tile_axis)
    return x


def swizzle(scales: jax.Array) -> jax.Array:
    """Block scales (rows, blocks) in the 128x4 tiles that cuBLAS reads, zero padded."""
    rows, columns = scales.shape[0] + -scales.shape[0] % 128, scales.shape[1] + -scales.shape[1] % 4
    full = jnp.pad(scales, ((0, rows - scales.shape[0]), (0, columns - scales.shape[1])))
    tiles = full.reshape(rows // 128, 4, 32, columns // 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(rows, columns)
