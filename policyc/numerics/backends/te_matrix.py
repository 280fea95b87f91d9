"""How an operand and its shards become the matrices that Transformer Engine's kernels read and write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from policyc.jaxcore.primitives.partition import Dims, ShardIndex
from policyc.numerics.backends.te_calls import QuantizedOrders
from policyc.numerics.dimensions import free_dims
from policyc.numerics.quantize import Request
from policyc.numerics.quantize.kernels.kernel_tiles import BLOCK
from policyc.numerics.quantize.reference.layout import TILE, Layout

ROTATED_TOKENS, ROTATED_FEATURES = 64, 128
"""The sizes of a rotated matrix must be multiples of these."""

_UNITS = {"elements": (BLOCK, TILE), "codes": (BLOCK // 2, TILE), "scales": (1, 1)}
"""The size of a block along the quantized axis and along the other axis of 2D tiles, in each of the arrays."""

_WHOLE = "_whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """How the shard of an operand becomes the matrix that a kernel quantizes.

    Its rows run over free dimensions and its columns over contracted ones, or the other way round: the kernel that
    rotates reads it transposed, and so does every kernel if it is stored that way. With `both`, the codes are packed
    along both.

    Attributes:
      is_bounded: whether the scale of a rotated matrix comes from the largest magnitude before the rotation.
      blocked: dimensions along which another order of the same operand has blocks. They are divided in whole blocks.
    """

    layout: Layout
    ndim: int
    contract: tuple[int, ...]
    rotates: bool
    is_bounded: bool = False
    both: bool = False
    blocked: tuple[int, ...] = ()

    @classmethod
    def from_request(cls, shape: tuple[int, ...], request: Request) -> Matrix:
        ndim, treatment, axes = len(shape), request.treatment, request.axes
        return cls(
            layout=request.layout(shape)[0],
            ndim=ndim,
            contract=tuple(ndim + i for i in (axes.contract or (axes.axis,))),
            rotates=bool(treatment.rht),
            is_bounded=treatment.outer == "bound",
            both=axes.both_orders,
        )

    @property
    def free(self) -> tuple[int, ...]:
        return free_dims(self.ndim, self.contract)

    @property
    def is_transposed(self) -> bool:
        return self.rotates or self.contract == tuple(range(len(self.contract)))

    @property
    def dim_order(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The dimensions that the rows of the matrix run over, and those that its columns run over."""
        return (self.contract, self.free) if self.is_transposed else (self.free, self.contract)

    @property
    def factors(self) -> tuple[str, ...]:
        """The names of the dimensions in a `PartitionRule`."""
        return tuple(f"d{i}" for i in range(self.ndim))

    def flatten(self, shard: jax.Array) -> jax.Array:
        """The shard as the matrix that the kernel reads."""
        outer, inner = self.dim_order
        rows = prod(shard.shape[i] for i in outer)
        return shard.transpose(*outer, *inner).reshape(rows, -1)

    def rows(self, quantized: QuantizedOrders) -> tuple[jax.Array, ...]:
        """Codes, scales and, with `both`, the codes of the transpose: bytes in rows, as the kernel writes them."""
        matrix, other = (quantized.rows, quantized.columns)[:: -1 if self.is_transposed else 1]
        assert matrix is not None
        arrays = _as_bytes(matrix.codes), _as_bytes(matrix.scales)
        if not self.both:
            return arrays
        assert other is not None
        return *arrays, _as_bytes(other.codes)

    def results(self, rows: Sequence[jax.Array], shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
        """The arrays that `rows` returns, in the dimension order of a shard of this shape."""
        codes, scales, *transposed = rows
        order, other_order = (*self.free, *self.contract), (*self.contract, *self.free)
        scales = _restore_dims(scales, shape, order, BLOCK)
        if self.layout.tile_axis is not None:
            # The kernel repeats the scale of a tile for each of its rows.
            scales = lax.slice_in_dim(scales, 0, None, TILE, axis=self.ndim + self.layout.tile_axis)
        codes = _restore_dims(codes, shape, order, 2)
        return codes, scales, *(_restore_dims(a, shape, other_order, 2) for a in transposed)

    def gather_scales(self, scales: jax.Array, index: ShardIndex) -> jax.Array:
        """Gathers the scales of 2D tiles from all devices, see `scale_dims`. Leaves other scales alone."""
        if self.layout.tile_axis is None:
            return scales
        for dim, factor in enumerate(self.factors):
            axes = index.factors.get(factor, ())
            scales = lax.all_gather(scales, axes, axis=dim, tiled=True) if axes else scales
        return scales

    def element_dims(self) -> Dims:
        """The dimensions of the operand in a `PartitionRule`."""
        return array_dims(self.layout, self.factors, "elements", self.blocked)

    def result_dims(self) -> tuple[Dims, ...]:
        """The dimensions of the results in a `PartitionRule`."""
        layout = self.layout
        codes = array_dims(layout, self.factors, "codes", self.blocked)
        scales = scale_dims(layout, self.factors, self.blocked)
        if not self.both:
            return codes, scales
        assert layout.tile_axis is not None
        transposed = replace(layout, axis=layout.tile_axis, tile_axis=layout.axis)
        return codes, scales, array_dims(transposed, self.factors, "codes")

    def find_limit(self, sizes: Mapping[str, int]) -> str:
        """Why the kernel cannot quantize a shard whose factors have these sizes; empty if it can."""
        lengths = [sizes[name] * unit for name, unit in self.element_dims()]
        rows, columns = (prod(lengths[i] for i in dims) for dims in (self.free, self.contract))
        features, tokens = (ROTATED_FEATURES, ROTATED_TOKENS) if self.rotates else (BLOCK, BLOCK)
        return find_remainder({"rows": (rows, features), "contracted": (columns, tokens)})


def matrices_of(shape: tuple[int, ...], requests: Sequence[Request]) -> tuple[Matrix, ...]:
    """One `Matrix` per order in which the operand is quantized."""
    matrices = [Matrix.from_request(shape, r) for r in requests]
    block_axes = {len(shape) + m.layout.axis for m in matrices}
    return tuple(
        replace(m, blocked=tuple(sorted(block_axes - {len(shape) + m.layout.axis}))) for m in matrices
    )


def array_dims(
    layout: Layout,
    names: Sequence[str],
    array: Literal["elements", "codes", "scales"],
    blocked: tuple[int, ...] = (),
) -> Dims:
    """The dimensions of an operand, of its codes or of its scales, for a `PartitionRule`."""
    block, tile = _UNITS[array]
    units = dict.fromkeys(blocked, BLOCK) | {len(names) + layout.axis: block}
    if layout.tile_axis is not None:
        units[len(names) + layout.tile_axis] = tile
    return tuple((name, units.get(i, 1)) for i, name in enumerate(names))


def scale_dims(layout: Layout, names: Sequence[str], blocked: tuple[int, ...] = ()) -> Dims:
    """The dimensions of the scales of an operand, for a `PartitionRule`.

    The scales of 2D tiles take one byte per 256 elements. Each device has all of them, so that the scales of a weight
    are gathered once, where it is quantized, and not for each microbatch.
    """
    if layout.tile_axis is None:
        return array_dims(layout, names, "scales", blocked)
    return tuple((f"{name}{_WHOLE}", 1) for name in names)


def undivided_factors(arrays: Sequence[Dims]) -> frozenset[str]:
    """The factors of scales that each device has in full."""
    return frozenset(name for dims in arrays for name, _ in dims if name.endswith(_WHOLE))


def select_own_scales(
    layout: Layout, codes: jax.Array, scales: jax.Array, names: Sequence[str], index: ShardIndex
) -> jax.Array:
    """The scales that belong to a device's shard of codes. `scales` may be those of the whole operand."""
    sizes = tuple(
        size // unit for size, (_, unit) in zip(codes.shape, array_dims(layout, names, "codes"), strict=True)
    )
    if sizes == scales.shape:
        return scales
    return lax.dynamic_slice(
        scales, [index.along(n) * size for n, size in zip(names, sizes, strict=True)], sizes
    )


def find_remainder(sizes: Mapping[str, tuple[int, int]]) -> str:
    """Names the first size that is not a multiple of its unit; empty if there is none."""
    for name, (size, unit) in sizes.items():
        if size % unit:
            return f"requires {name} % {unit} == 0, but a device has {size}"
    return ""


def _restore_dims(rows: jax.Array, shape: tuple[int, ...], order: tuple[int, ...], unit: int) -> jax.Array:
    """Restores the dimension order of `shape`. `rows` has a byte per `unit` elements along the last dim of `order`."""
    *outer, last = (shape[i] for i in order)
    return rows.reshape(*outer, last // unit).transpose(sorted(range(len(order)), key=order.__getitem__))


def _as_bytes(rows: jax.Array) -> jax.Array:
    """Rows of codes (two to a byte) or of scales, as uint8."""
    if rows.dtype == jnp.float4_e2m1fn:
        rows = rows.reshape(rows.shape[0], -1, 2)
    return lax.bitcast_convert_type(rows, jnp.uint8)
