"""Regions of variables, and how each primitive that moves elements maps a region of its result back to its operand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from policyc.compiler.provenance.graph import LayoutSource, ShardSource
from policyc.compiler.provenance.integers import MOST_INDICES, Iterations
from policyc.jaxcore import jaxprs
from policyc.jaxcore.transform import Address

DimIndices = range | np.ndarray
"""Indices along one dimension, in the order in which a variable has them."""

Region = tuple[DimIndices, ...]
"""A box of elements: indices along each dimension."""


ON_FIRST_DEVICE: Address = (-1,)
"""A key of `Iterations` beside those of loops: read what the first device has of dimensions that shard_maps divide."""


class Unknown(Exception):
    """The elements cannot be told. The message says why."""


def full_region(shape: Sequence[int]) -> Region:
    return tuple(map(range, shape))


def without_dim(region: Region, dim: int) -> Region:
    return (*region[:dim], *region[dim + 1 :])


def shard_region(source: ShardSource, region: Region, iterations: Iterations) -> Region:
    """The first dimension divides a stack over devices. Of others, only whole ones are followed."""
    out: list[DimIndices] = []
    for dim, (indices, parts) in enumerate(zip(region, source.parts, strict=True)):
        if parts == 1:
            out.append(indices)
        elif dim == 0:
            out.append(_shift(indices, iterations[source.shard_map] * source.shape[0]))
        elif len(indices) == source.shape[dim]:
            out.append(range(source.operand.shape[dim]))
        elif ON_FIRST_DEVICE in iterations:
            out.append(indices)
        else:
            raise Unknown(f"a shard_map divides its dimension {dim}, of which a part is taken")
    return tuple(out)


def _shift(indices: DimIndices, offset: int) -> DimIndices:
    if isinstance(indices, range):
        return range(indices.start + offset, indices.stop + offset, indices.step)
    return indices + offset


def _scale(indices: DimIndices, start: int, step: int) -> DimIndices:
    """start + step * i, for each index."""
    if isinstance(indices, range) and len(indices):
        first, last = start + step * indices[0], start + step * indices[-1]
        stride = step * indices.step
        return range(first, last + (1 if stride > 0 else -1), stride)
    return start + step * np.asarray(indices)


def compact(indices: np.ndarray) -> DimIndices:
    """The same indices, as a range where they are evenly spaced."""
    if indices.size == 1:
        return range(int(indices[0]), int(indices[0]) + 1)
    steps = np.diff(indices)
    if steps.size and steps[0] and (steps == steps[0]).all():
        step = int(steps[0])
        return range(int(indices[0]), int(indices[-1]) + (1 if step > 0 else -1), step)
    return indices


def operand_region(source: LayoutSource, region: Region, iterations: Iterations) -> Region:
    """The region of the operand of a layout equation that a region of its result comes from."""
    name = jaxprs.primitive_name(source.eqn)
    rule = _RULES.get(name)
    if rule is not None:
        return rule(source, region, iterations)
    if source.shape == source.operand.shape:
        return region  # element by element
    raise Unknown(f"'{name}' changes its shape in a way that is not followed")


def _transpose(source: LayoutSource, region: Region, _: Iterations) -> Region:
    permutation = source.eqn.params["permutation"]
    return tuple(region[permutation.index(dim)] for dim in range(len(region)))


def _squeeze(source: LayoutSource, region: Region, _: Iterations) -> Region:
    rank = len(source.operand.shape)
    dropped = {d % rank for d in source.eqn.params["dimensions"]}
    rest = iter(region)
    return tuple(range(1) if dim in dropped else next(rest) for dim in range(rank))


def _expand_dims(source: LayoutSource, region: Region, _: Iterations) -> Region:
    added = {d % len(region) for d in source.eqn.params["dimensions"]}
    return tuple(indices for dim, indices in enumerate(region) if dim not in added)


def _broadcast_in_dim(source: LayoutSource, region: Region, _: Iterations) -> Region:
    dims = source.eqn.params["broadcast_dimensions"]
    sizes = source.operand.shape
    return tuple(range(1) if size == 1 else region[dim] for dim, size in zip(dims, sizes, strict=True))


def _rev(source: LayoutSource, region: Region, _: Iterations) -> Region:
    reversed_dims = source.eqn.params["dimensions"]
    return tuple(
        _scale(indices, size - 1, -1) if dim in reversed_dims else indices
        for dim, (indices, size) in enumerate(zip(region, source.shape, strict=True))
    )


def _slice(source: LayoutSource, region: Region, _: Iterations) -> Region:
    params = source.eqn.params
    strides = params["strides"] or (1,) * len(region)
    return tuple(map(_scale, region, params["start_indices"], strides))


def _split(source: LayoutSource, region: Region, _: Iterations) -> Region:
    axis, sizes = source.eqn.params["axis"], source.eqn.params["sizes"]
    offset = sum(sizes[: source.output])
    return tuple(_shift(indices, offset) if dim == axis else indices for dim, indices in enumerate(region))


def _unstack(source: LayoutSource, region: Region, _: Iterations) -> Region:
    axis = source.eqn.params["axis"]
    return (*region[:axis], range(source.output, source.output + 1), *region[axis:])


def _dynamic_slice(source: LayoutSource, region: Region, iterations: Iterations) -> Region:
    starts: list[DimIndices] = []
    for dim, (indices, integers) in enumerate(zip(region, source.integers, strict=True)):
        size, whole = source.shape[dim], source.operand.shape[dim]
        if size == whole:
            starts.append(indices)
            continue
        if integers is None:
            raise Unknown(
                "the index of a slice is computed from values that are not known before the program runs"
            )
        start = int(np.clip(integers.evaluate(iterations), 0, whole - size))
        starts.append(_shift(indices, start))
    return tuple(starts)


def _gather(source: LayoutSource, region: Region, iterations: Iterations) -> Region:
    """A gather that takes whole slices along one dimension, by known indices."""
    params, rank = source.eqn.params, len(source.operand.shape)
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    (integers,) = source.integers
    if integers is None:
        raise Unknown("it is gathered by indices that are not known before the program runs")
    indexed = tuple(numbers.start_index_map)
    takes_single_indices = len(indexed) == 1 and all(sizes[d] == 1 for d in indexed)
    takes_whole_slices = all(sizes[d] == source.operand.shape[d] for d in range(rank) if d not in indexed)
    has_batching_dims = bool(getattr(numbers, "operand_batching_dims", ()))
    if not takes_single_indices or not takes_whole_slices or has_batching_dims:
        raise Unknown("it is gathered in a form that is not followed")
    (dim,) = indexed
    values = np.clip(integers.evaluate(iterations)[..., 0], 0, source.operand.shape[dim] - 1)
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


def _pad(source: LayoutSource, region: Region, _: Iterations) -> Region:
    out: list[DimIndices] = []
    pairs = zip(region, source.eqn.params["padding_config"], source.operand.shape, strict=True)
    for indices, (low, high, inner), size in pairs:
        if (low, high, inner) == (0, 0, 0):
            out.append(indices)
            continue
        if inner:
            raise Unknown("it is padded between its elements")
        moved = np.asarray(indices) - low
        out.append(compact(moved[(moved >= 0) & (moved < size)]))
    return tuple(out)


def _reshape(source: LayoutSource, region: Region, _: Iterations) -> Region:
    """Follows each group of dimensions that a reshape merges or splits."""
    if source.eqn.params.get("dimensions") is not None:
        raise Unknown("it is reshaped in another order of dimensions")
    out: list[DimIndices] = []
    for before, after in _reshape_groups(source.operand.shape, source.shape):
        group = [region[d] for d in after]
        sizes = [source.shape[d] for d in after]
        operand_sizes = [source.operand.shape[d] for d in before]
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
    """Are these all indices of a dimension, in order?"""
    return isinstance(indices, range) and indices == range(size)


def _reshape_groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest groups of dimensions, before and after a reshape, that have as many elements."""
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


_RULES: dict[str, Callable[[LayoutSource, Region, Iterations], Region]] = {
    "transpose": _transpose,
    "squeeze": _squeeze,
    "expand_dims": _expand_dims,
    "broadcast_in_dim": _broadcast_in_dim,
    "rev": _rev,
    "slice": _slice,
    "split": _split,
    "unstack": _unstack,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "pad": _pad,
    "reshape": _reshape,
}
"""How each primitive that moves elements maps a region of its result back to one of its operand."""
