"""How primitives that move elements map a region of their result back to a region of their first operand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

DimIndices = range | np.ndarray
"""Indices along one dimension, in the order in which they occur in a variable."""

Region = tuple[DimIndices, ...]
"""A box of elements: indices along each dimension."""

MOST_INDICES = 1 << 22  # largest array of indices, in elements; more would take too much memory and time


class Unknown(Exception):
    """The elements, or an index, cannot be determined. The message says why."""


@dataclass(frozen=True, slots=True)
class Move:
    """An equation that moves elements of its first operand to the result with number `output`.

    `indices` has a function for each other operand, which returns its value or raises `Unknown`.
    """

    eqn: JaxprEqn
    output: int
    indices: Sequence[Callable[[], np.ndarray]]

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params

    @property
    def operand_shape(self) -> tuple[int, ...]:
        aval: Any = self.eqn.invars[0].aval
        return tuple(aval.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        aval: Any = self.eqn.outvars[self.output].aval
        return tuple(aval.shape)


RegionRule = Callable[[Move, Region], Region]


def full_region(shape: Sequence[int]) -> Region:
    return tuple(map(range, shape))


def without_dim(region: Region, dim: int) -> Region:
    return (*region[:dim], *region[dim + 1 :])


def shift(indices: DimIndices, offset: int) -> DimIndices:
    if isinstance(indices, range):
        return range(indices.start + offset, indices.stop + offset, indices.step)
    return indices + offset


def _scale(indices: DimIndices, start: int, step: int) -> DimIndices:
    """`start + step * i` for each index `i`."""
    if isinstance(indices, range) and len(indices):
        first, last = start + step * indices[0], start + step * indices[-1]
        stride = step * indices.step
        return range(first, last + (1 if stride > 0 else -1), stride)
    return start + step * np.asarray(indices)


def compact(indices: np.ndarray) -> DimIndices:
    """The same indices, as a range if they are evenly spaced."""
    if indices.size == 1:
        return range(int(indices[0]), int(indices[0]) + 1)
    steps = np.diff(indices)
    if steps.size and steps[0] and (steps == steps[0]).all():
        step = int(steps[0])
        return range(int(indices[0]), int(indices[-1]) + (1 if step > 0 else -1), step)
    return indices


# ---- rules


def transpose(move: Move, region: Region) -> Region:
    permutation = move.params["permutation"]
    return tuple(region[permutation.index(dim)] for dim in range(len(region)))


def squeeze(move: Move, region: Region) -> Region:
    rank = len(move.operand_shape)
    dropped = {d % rank for d in move.params["dimensions"]}
    rest = iter(region)
    return tuple(range(1) if dim in dropped else next(rest) for dim in range(rank))


def broadcast_in_dim(move: Move, region: Region) -> Region:
    dims = move.params["broadcast_dimensions"]
    sizes = move.operand_shape
    return tuple(range(1) if size == 1 else region[dim] for dim, size in zip(dims, sizes, strict=True))


def rev(move: Move, region: Region) -> Region:
    reversed_dims = move.params["dimensions"]
    return tuple(
        _scale(indices, size - 1, -1) if dim in reversed_dims else indices
        for dim, (indices, size) in enumerate(zip(region, move.shape, strict=True))
    )


def slice_(move: Move, region: Region) -> Region:
    params = move.params
    strides = params["strides"] or (1,) * len(region)
    return tuple(map(_scale, region, params["start_indices"], strides))


def split(move: Move, region: Region) -> Region:
    axis, sizes = move.params["axis"], move.params["sizes"]
    offset = sum(sizes[: move.output])
    return tuple(shift(indices, offset) if dim == axis else indices for dim, indices in enumerate(region))


def unstack(move: Move, region: Region) -> Region:
    axis = move.params["axis"]
    return (*region[:axis], range(move.output, move.output + 1), *region[axis:])


def dynamic_slice(move: Move, region: Region) -> Region:
    starts: list[DimIndices] = []
    for dim, (indices, index) in enumerate(zip(region, move.indices, strict=True)):
        size, whole = move.shape[dim], move.operand_shape[dim]
        start = 0 if size == whole else int(np.clip(index(), 0, whole - size))
        starts.append(shift(indices, start))
    return tuple(starts)


def tile(move: Move, region: Region) -> Region:
    sizes = move.operand_shape
    return tuple(
        compact(np.unique(np.asarray(indices) % size)) for indices, size in zip(region, sizes, strict=True)
    )


def gather(move: Move, region: Region) -> Region:
    """A gather that takes whole slices along one dimension, by known indices. Raises `Unknown` for any other."""
    params, rank = move.params, len(move.operand_shape)
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    (index,) = move.indices
    indexed = tuple(numbers.start_index_map)
    takes_single_indices = len(indexed) == 1 and all(sizes[d] == 1 for d in indexed)
    takes_whole_slices = all(sizes[d] == move.operand_shape[d] for d in range(rank) if d not in indexed)
    has_batching_dims = bool(getattr(numbers, "operand_batching_dims", ()))
    if not takes_single_indices or not takes_whole_slices or has_batching_dims:
        raise Unknown("it is read by 'gather' in a form that policyc does not follow")
    (dim,) = indexed
    values = np.clip(index()[..., 0], 0, move.operand_shape[dim] - 1)
    offset_dims = tuple(numbers.offset_dims)
    batch_dims = [d for d in range(len(region)) if d not in offset_dims]
    if batch_dims:
        values = values[np.ix_(*(np.asarray(region[d]) for d in batch_dims))]
    collapsed = set(numbers.collapsed_slice_dims)
    kept = iter(offset_dims)
    out: list[DimIndices] = []
    for operand_dim in range(rank):
        indices = None if operand_dim in collapsed else region[next(kept)]
        if operand_dim == dim:
            indices = compact(np.unique(values))
        assert indices is not None
        out.append(indices)
    return tuple(out)


def pad(move: Move, region: Region) -> Region:
    out: list[DimIndices] = []
    pairs = zip(region, move.params["padding_config"], move.operand_shape, strict=True)
    for indices, (low, high, inner), size in pairs:
        if (low, high, inner) == (0, 0, 0):
            out.append(indices)
            continue
        if inner:
            raise Unknown("it is padded between its elements")
        moved = np.asarray(indices) - low
        out.append(compact(moved[(moved >= 0) & (moved < size)]))
    return tuple(out)


def reshape(move: Move, region: Region) -> Region:
    """Follows each group of dimensions that a reshape merges or splits."""
    if move.params.get("dimensions") is not None:
        raise Unknown("it is reshaped with its dimensions in another order")
    out: list[DimIndices] = []
    for before, after in _reshape_groups(move.operand_shape, move.shape):
        group = [region[d] for d in after]
        sizes = [move.shape[d] for d in after]
        operand_sizes = [move.operand_shape[d] for d in before]
        if all(map(_is_whole, group, sizes)):
            out += map(range, operand_sizes)
            continue
        if math.prod(map(len, group)) > MOST_INDICES:
            raise Unknown("it is reshaped into parts that are too large to follow")
        grid = np.ix_(*(np.asarray(indices) for indices in group))
        flat = np.ravel_multi_index(np.broadcast_arrays(*grid), sizes).ravel()
        positions = np.unravel_index(flat, operand_sizes) if before else ()
        unique = [np.unique(p) for p in positions]
        if math.prod(u.size for u in unique) != flat.size:
            raise Unknown("it is reshaped across the boundaries of layers")
        out += map(compact, unique)
    return tuple(out)


def _is_whole(indices: DimIndices, size: int) -> bool:
    """Whether these are all indices of a dimension, in order."""
    return isinstance(indices, range) and indices == range(size)


def _reshape_groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest groups of dimensions that have equally many elements before and after a reshape."""
    if 0 in before or 0 in after:
        yield list(range(len(before))), list(range(len(after)))
        return
    i = j = 0
    while i < len(before) or j < len(after):
        left, right = [], []
        a = b = 1
        if i < len(before):
            a, left = before[i], [i]
            i += 1
        if j < len(after):
            b, right = after[j], [j]
            j += 1
        while a != b:
            if a < b:
                a *= before[i]
                left.append(i)
                i += 1
            else:
                b *= after[j]
                right.append(j)
                j += 1
        yield left, right
