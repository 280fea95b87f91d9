"""Multiplies two sharded operands, one shard per device.

XLA would not divide an emulated product as it divides a plain one: under FSDP it gathers activations, not weights. Each
device rounds its part of a sum to the dtype of the result before the parts are added, as other GEMMs do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from policyc.jaxcore.primitives.partition import Dims, PartitionRule, ShardIndex, partition
from policyc.numerics.dimensions import DimensionNumbers, free_dims
from policyc.numerics.flatten import OperandLayout, flatten_operand
from policyc.numerics.quantize.reference.layout import Layout, Operand

Multiply = Callable[[Operand, Operand, DimensionNumbers], jax.Array]
"""Multiplies two operands on one device."""


def multiply_sharded(
    lhs: Operand, rhs: Operand, dimensions: DimensionNumbers, multiply: Multiply
) -> jax.Array:
    """The product of two operands whose shardings XLA chooses."""
    ((lc, rc), (lb, rb)) = dimensions
    left, right = _name_dims(lhs, lc, lb, "m"), _name_dims(rhs, rc, rb, "n")
    counts = _count_indices((left, right))
    batch = left.result_dims(lb, counts)
    left_free = left.result_dims(free_dims(len(left.names), lc, lb), counts)
    right_free = right.result_dims(free_dims(len(right.names), rc, rb), counts)
    rule = PartitionRule(
        name="emulated GEMM",
        operands=(*left.array_dims(counts), *right.array_dims(counts)),
        results=((*batch, *left_free, *right_free),),
        xla_scatters=True,
    )

    def run(index: ShardIndex, *shards: jax.Array) -> tuple[jax.Array]:
        a, b = left.rebuild(shards[: len(left.arrays)]), right.rebuild(shards[len(left.arrays) :])
        scattered = index.first_scattered()
        if scattered is None or scattered < len(batch) + len(left_free):
            return (multiply(a, b, dimensions),)
        # Computed transposed, so that XLA need not transpose it before it scatters the sum along its columns.
        product = multiply(b, a, ((rc, lc), (rb, lb)))
        columns = range(len(batch), len(batch) + len(right_free))
        return (jnp.moveaxis(product, columns, range(-len(right_free), 0)),)

    return partition(run, rule)(*left.arrays, *right.arrays)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _NamedOperand:
    """An operand as arrays. Its dimensions have names: those that both operands share have the same ones.

    `side` is in the names of all dimensions that are not shared. `sizes` are the sizes without packing and padding.
    """

    side: str
    layout: OperandLayout
    arrays: Sequence[jax.Array]
    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def array_dims(self, counts: Mapping[str, int]) -> list[Dims]:
        """The dimensions of each array."""
        return [
            tuple(
                # A dimension that has one number for all indices is not divided.
                (f"{name}_{self.side}{number}", 1) if size % counts[name] else (name, size // counts[name])
                for name, size in zip(self.names, array.shape, strict=True)
            )
            for number, array in enumerate(self.arrays)
        ]

    @property
    def padded(self) -> frozenset[str]:
        """The names of the dimensions with padding."""
        layout, codes = self.layout.layout, self.arrays[0]
        lengths = list(codes.shape)
        if layout is not None and layout.packed:
            lengths[layout.axis] *= 2
        return frozenset(
            name for name, length, size in zip(self.names, lengths, self.sizes, strict=True) if length != size
        )

    def result_dims(self, dims: Sequence[int], counts: Mapping[str, int]) -> Dims:
        """Some dimensions of the operand, as dimensions of the result."""
        return tuple((self.names[i], self.sizes[i] // counts[self.names[i]]) for i in dims)

    def rebuild(self, shards: Sequence[jax.Array]) -> Operand:
        """The operand on one device, from the shards of its arrays."""
        layout, codes = self.layout.layout, shards[0]
        if layout is None:
            return codes
        sizes = dict(zip(range(-codes.ndim, 0), self.sizes, strict=True))

        def own_size(axis: int) -> int:
            whole, part = self.arrays[0].shape[axis], codes.shape[axis]
            return sizes[axis] * part // whole

        tile_size = 0 if layout.tile_axis is None else own_size(layout.tile_axis)
        own_layout: Layout = replace(layout, size=own_size(layout.axis), tile_size=tile_size)
        return OperandLayout(own_layout).unflatten(shards)


def _name_dims(
    operand: Operand, contract: tuple[int, ...], batch: tuple[int, ...], side: str
) -> _NamedOperand:
    layout, arrays = flatten_operand(operand)
    codes = arrays[0]
    names = [f"{side}{i}" for i in range(codes.ndim)]
    for dims, kind in ((contract, "k"), (batch, "batch")):
        for number, i in enumerate(dims):
            names[i] = f"{kind}{number}"
    sizes = tuple(layout.dim_size(codes, i) for i in range(codes.ndim))
    return _NamedOperand(side=side, layout=layout, arrays=arrays, names=tuple(names), sizes=sizes)


def _count_indices(operands: Sequence[_NamedOperand]) -> dict[str, int]:
    """Into how many parts each dimension can be cut, so that each array has whole blocks and tiles in each part.

    A padded dimension is not cut: only its last part would have padding.
    """
    sizes: dict[str, list[int]] = {}
    for operand in operands:
        for array in (operand.sizes, *(array.shape for array in operand.arrays)):
            for name, size in zip(operand.names, array, strict=True):
                sizes.setdefault(name, []).append(size)
    padded = frozenset().union(*(operand.padded for operand in operands))
    counts = {}
    for name, all_sizes in sizes.items():
        several = [size for size in all_sizes if size > 1] or [1]
        is_cut = name not in padded and all(size % min(several) == 0 for size in several)
        counts[name] = min(several) if is_cut else 1
    return counts
