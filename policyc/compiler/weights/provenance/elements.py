"""Which elements of which parameters a variable holds, in one iteration of the loops around it.

`read_elements` walks the graph of sources backwards: from a region of a variable to regions of parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from policyc.compiler.weights.provenance.graph import (
    ConcatenatedSource,
    EitherSource,
    IterationSource,
    LayoutSource,
    LostSource,
    OtherSource,
    ParameterSource,
    ShardSource,
    Source,
    StackedResultSource,
    StackedSource,
    UnknownSource,
    operands_of,
    shard_maps_of,
)
from policyc.compiler.weights.provenance.integers import Integers, Iterations, evaluate_index
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.transform import Address
from policyc.jaxcore.primitives.primitive_table import rule_of
from policyc.jaxcore.primitives.regions import (
    DimIndices,
    Move,
    Region,
    Unknown,
    compact,
    full_region,
    shift,
    without_dim,
)
from policyc.jaxcore.shardings import axis_names

ON_FIRST_DEVICE: Address = (-1,)
"""An extra key of `Iterations`: parts of dimensions that shard_maps divide are read on the first device."""


def read_elements(
    source: Source, region: Region, iterations: Iterations
) -> Iterator[tuple[ParameterSource, Region]]:
    """The regions of parameters that a region of a variable comes from, in one iteration. Raises `Unknown`."""
    if not all(map(len, region)):
        return  # it is padding
    match source:
        case ParameterSource():
            yield source, region
        case LayoutSource() if jaxprs.primitive_name(source.eqn).startswith("all_gather"):
            yield from _read_gathered(source, region, iterations)
        case LayoutSource():
            yield from read_elements(source.operand, _operand_region(source, region, iterations), iterations)
        case ConcatenatedSource():
            yield from _read_concatenated(source, region, iterations)
        case StackedSource():
            inner = without_dim(region, source.dimension)
            for index in region[source.dimension]:
                yield from read_elements(source.operands[index], inner, iterations)
        case EitherSource(index=None):
            for operand in source.operands:
                yield from read_elements(operand, region, iterations)
        case EitherSource(index=Integers() as index):
            for chosen in _values_in(index.evaluate(iterations), region):
                yield from read_elements(source.operands[chosen], region, iterations)
        case IterationSource():
            index = iterations[source.loop]
            yield from read_elements(source.operand, (range(index, index + 1), *region), iterations)
        case StackedResultSource():
            for index in region[0]:
                yield from read_elements(source.operand, region[1:], {**iterations, source.loop: int(index)})
        case ShardSource():
            yield from read_elements(source.operand, _shard_region(source, region, iterations), iterations)
        case OtherSource():
            return
        case UnknownSource():
            raise Unknown(source.reason)
        case LostSource():
            yield from _read_lost(source, region, iterations)
        case _:
            raise AssertionError(source)


def _operand_region(source: LayoutSource, region: Region, iterations: Iterations) -> Region:
    """The region of a layout equation's operand that a region of its result comes from."""
    rule = rule_of(source.eqn).region
    if rule is not None:
        indices = [partial(evaluate_index, i, iterations) for i in source.integers]
        return rule(Move(source.eqn, source.output, indices), region)
    if source.shape == source.operand.shape:
        return region  # element by element
    name = jaxprs.primitive_name(source.eqn)
    raise Unknown(f"'{name}' changes its shape in a way that policyc does not follow")


def _values_in(array: np.ndarray, region: Region) -> list[int]:
    """The distinct values in a region of an array; for a scalar, its value. Broadcast elements are read once."""
    if not array.ndim:
        return [int(array)]
    pairs = zip(region, array.strides, strict=True)
    indices = [np.asarray(taken[:1] if stride == 0 else taken) for taken, stride in pairs]
    return sorted(map(int, np.unique(array[np.ix_(*indices)])))


def _shard_region(source: ShardSource, region: Region, iterations: Iterations) -> Region:
    """The region of the whole array that a region of a shard comes from.

    The first dimension may divide a stack over devices. Other divided dimensions are followed only if read whole.
    """
    out: list[DimIndices] = []
    for dim, (indices, parts) in enumerate(zip(region, source.parts, strict=True)):
        if parts == 1:
            out.append(indices)
        elif dim == 0:
            out.append(shift(indices, iterations[source.shard_map] * source.shape[0]))
        elif len(indices) == source.shape[dim]:
            out.append(range(source.operand.shape[dim]))
        elif ON_FIRST_DEVICE in iterations:
            out.append(indices)
        else:
            raise Unknown(
                f"a shard_map divides its dimension {dim}, and only a part of that dimension is read"
            )
    return tuple(out)


def _read_lost(
    source: LostSource, region: Region, iterations: Iterations
) -> Iterator[tuple[ParameterSource, Region]]:
    """All elements of the operands, if these belong to a single layer. Otherwise raises `Unknown`.

    They do if the result is read whole and they are matrices, or if the paths of their parameters have the same index.
    """
    read = [r for o in source.operands for r in read_elements(o, full_region(o.shape), iterations)]
    layers = {tuple(name.index for name in p.path if name.index is not None) for p, _ in read}
    is_whole = tuple(map(len, region)) == source.shape
    are_matrices = all(sum(len(indices) > 1 for indices in elements) <= 2 for _, elements in read)
    if len(layers) > 1 or not ((is_whole and are_matrices) or any(layers)):
        raise Unknown(source.reason)
    yield from read


def _read_gathered(
    source: LayoutSource, region: Region, iterations: Iterations
) -> Iterator[tuple[ParameterSource, Region]]:
    """An all_gather undoes the division of a shard_map: each device gets the shards of all devices."""
    params = source.eqn.params
    dim, devices, tiled = params["all_gather_dimension"], params["axis_size"], params["tiled"]
    axes, divided = axis_names(params["axis_name"]), set(_first_axes(source.operand))
    if not any(set(axes) & set(first_axes) for first_axes in divided):
        operand = source.operand
        whole = tuple(range(operand.shape[d]) if d == dim and tiled else i for d, i in enumerate(region))
        if tiled and len(region[dim]) != source.shape[dim]:
            raise Unknown("only a part of the gathered array is read")
        yield from read_elements(operand, whole if tiled else without_dim(region, dim), iterations)
        return
    shards = {a: parts for a, parts in shard_maps_of(source.operand).items() if parts > 1}
    if dim != 0 or not tiled or divided != {axes} or list(shards.values()) != [devices]:
        raise Unknown("devices gather it in a form that policyc does not follow")
    (shard_map,) = shards
    size = source.operand.shape[0]
    indices = np.asarray(region[0])
    for device in range(devices):
        inside = indices[indices // size == device] - device * size
        if inside.size:
            part = (compact(inside), *region[1:])
            yield from read_elements(source.operand, part, {**iterations, shard_map: device})


def _first_axes(source: Source) -> Iterator[tuple[str, ...]]:
    """The mesh axes over which shard_maps divide the first dimension of the operands that a source is built from."""
    if isinstance(source, ShardSource) and source.first_axes:
        yield source.first_axes
    for operand in operands_of(source):
        yield from _first_axes(operand)


def _read_concatenated(
    source: ConcatenatedSource, region: Region, iterations: Iterations
) -> Iterator[tuple[ParameterSource, Region]]:
    dim, start = source.dimension, 0
    indices = np.asarray(region[dim])
    for operand in source.operands:
        size = operand.shape[dim]
        inside = indices[(indices >= start) & (indices < start + size)] - start
        if inside.size:
            part = (*region[:dim], compact(inside), *region[dim + 1 :])
            yield from read_elements(operand, part, iterations)
        start += size


@dataclass(frozen=True, slots=True)
class AxisIndex:
    """The part of a parameter axis that a product reads: one index, several members at once, or a part of a matrix."""

    axis: int
    index: int | None
    """None: it reads several members of the axis in one product."""
    first: int | None = None
    """Where the part that it reads begins. None: it reads all members, or a single one."""


def axis_indices(
    source: Source, batch_dims: Sequence[int], iterations: Iterations
) -> dict[ParameterSource, tuple[AxisIndex, ...]]:
    """The parameters that a product reads in one iteration, and the axes of each along which it reads single members.

    `batch_dims` are the batch dimensions of the variable in the product: along these it may read several members of a
    stack at once. Other axes that are read whole are dimensions of a matrix, not of a stack.
    """
    whole = full_region(source.shape)
    one = tuple(range(1) if dim in batch_dims else indices for dim, indices in enumerate(whole))
    of_one = dict(read_elements(source, one, {**iterations, ON_FIRST_DEVICE: 0}))
    indices: dict[ParameterSource, tuple[AxisIndex, ...]] = {}
    for parameter, region in read_elements(source, whole, iterations):
        axes = []
        for axis, (taken, size) in enumerate(zip(region, parameter.shape, strict=True)):
            if len(taken) == 1 and size > 1:
                axes.append(AxisIndex(axis, int(taken[0])))
            elif parameter in of_one and len(of_one[parameter][axis]) == 1 < len(taken):
                axes.append(AxisIndex(axis, None))
            elif 1 < len(taken) < size:
                axes.append(AxisIndex(axis, None, int(min(taken))))
        known = indices.get(parameter)
        indices[parameter] = tuple(axes) if known is None else _merge(known, tuple(axes))
    return indices


def _merge(one: tuple[AxisIndex, ...], other: tuple[AxisIndex, ...]) -> tuple[AxisIndex, ...]:
    """The axes of a parameter that is read in two places. If their indices differ, several members are read at once."""
    by_axis = {a.axis: a for a in other}
    return tuple(
        a if a.first is not None or by_axis.get(a.axis) == a else AxisIndex(a.axis, None) for a in one
    )


def iterations_of(loops: Sequence[tuple[Address, int]]) -> Iterator[dict[Address, int]]:
    """Every combination of iterations of some loops."""
    for combination in itertools.product(*(range(size) for _, size in loops)):
        yield {address: index for (address, _), index in zip(loops, combination, strict=True)}
