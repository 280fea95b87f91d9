"""Which elements of which parameters a variable holds: exact maps from loop iterations to indices in a parameter.

The analysis records how each variable is laid out from parameters, as a graph of `Source` nodes. `read_elements` walks
that graph backwards: from a region of a variable, in one iteration of the loops around it, to regions of parameters.
Integers that select elements (`w[i]`, gathers by constants) are evaluated on the way. What cannot be followed raises
`Unknown`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from policyc.jaxcore import jaxprs
from policyc.jaxcore.transform import Address
from policyc.language.selectors import DottedPath

Indices = range | np.ndarray
"""Indices along one dimension, in the order in which a variable has them."""

Region = tuple[Indices, ...]
"""A box of elements: indices along each dimension."""

Iterations = Mapping[Address, int]
"""The iteration of each loop, by the loop's address: an index into its stacked inputs. Of a shard_map: the device."""

_MOST_INDICES = 1 << 22  # in one dimension; beyond it, following a reshape would take too much memory


class Unknown(Exception):
    """The elements cannot be told. The message says why."""


# ---- the graph


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Source:
    """How a variable is laid out from parameters."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ParameterSource(Source):
    """A parameter itself. A frozen one is not differentiated."""

    path: DottedPath
    is_frozen: bool = False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayoutSource(Source):
    """The result of an equation that moves elements. `operand` is what it moves, `integers` are its index operands."""

    eqn: JaxprEqn
    output: int
    operand: Source
    integers: tuple[Integers | None, ...] = ()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ConcatenatedSource(Source):
    """Several variables along one dimension."""

    operands: tuple[Source, ...]
    dimension: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StackedSource(Source):
    """Several variables along a new dimension."""

    operands: tuple[Source, ...]
    dimension: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EitherSource(Source):
    """One of several variables: the branches of a `cond`."""

    operands: tuple[Source, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class IterationSource(Source):
    """One iteration's slice of a stacked input of a scan."""

    operand: Source
    loop: Address


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ShardSource(Source):
    """One device's shard of an operand of a shard_map, which divides each dimension into `parts`."""

    operand: Source
    shard_map: Address
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class UnknownSource(Source):
    """Laid out from these variables, in a way that is not followed."""

    operands: tuple[Source, ...]
    reason: str


# ---- integers


@dataclass(frozen=True, slots=True, eq=False)
class Integers:
    """An integer variable whose value is known in each iteration of the loops around it."""

    evaluate: Callable[[Iterations], np.ndarray]
    loops: frozenset[Address] = frozenset()


def constant_integers(value: Any) -> Integers:
    array = np.asarray(value)
    return Integers(lambda _: array)


def loop_slice(integers: Integers, loop: Address) -> Integers:
    """One iteration's slice of integers that a scan runs over."""
    return Integers(
        lambda iterations: integers.evaluate(iterations)[iterations[loop]], integers.loops | {loop}
    )


def loop_counter(init: Integers, step: int, loop: Address, length: int, reverse: bool) -> Integers:
    """A carry of a scan that grows by `step` in each iteration."""

    def evaluate(iterations: Iterations) -> np.ndarray:
        index = iterations[loop]
        done = length - 1 - index if reverse else index
        return np.asarray(init.evaluate(iterations) + step * done)

    return Integers(evaluate, init.loops | {loop})


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    quotient = np.sign(a) * np.sign(b) * (np.abs(a) // np.where(b == 0, 1, np.abs(b)))
    return np.asarray(quotient, a.dtype)


_INTEGER_OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "div": _divide,
    "rem": lambda a, b: a - _divide(a, b) * b,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
    "select_n": lambda which, *cases: np.choose(which.astype(int), np.broadcast_arrays(*cases)),
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "sign": np.sign,
    "copy": lambda x: x,
    "stop_gradient": lambda x: x,
    "name": lambda x: x,
}
"""The operations on integers that indices are computed with, as numpy has them. JAX's division rounds to zero."""


def _integer_operation(eqn: JaxprEqn) -> Callable[..., np.ndarray] | None:
    name, params = jaxprs.primitive_name(eqn), eqn.params
    out: Any = eqn.outvars[0].aval if eqn.outvars else None
    shapes: dict[str, Callable[..., np.ndarray]] = {
        "convert_element_type": lambda x: np.asarray(x).astype(params["new_dtype"]),
        "reshape": lambda x: np.reshape(x, out.shape),
        "squeeze": lambda x: np.reshape(x, out.shape),
        "expand_dims": lambda x: np.reshape(x, out.shape),
        "broadcast_in_dim": lambda x: _broadcast(np.asarray(x), params),
        "concatenate": lambda *xs: np.concatenate(xs, params["dimension"]),
        "transpose": lambda x: np.transpose(x, params["permutation"]),
        "rev": lambda x: np.flip(x, params["dimensions"]),
        "slice": lambda x: x[_slices(params)],
        "iota": lambda: _iota(params),
    }
    return shapes.get(name) or _INTEGER_OPERATIONS.get(name)


def _broadcast(x: np.ndarray, params: Mapping[str, Any]) -> np.ndarray:
    shape = [1] * len(params["shape"])
    for dim, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        shape[dim] = size
    return np.broadcast_to(x.reshape(shape), params["shape"])


def _slices(params: Mapping[str, Any]) -> tuple[slice, ...]:
    strides = params["strides"] or (1,) * len(params["start_indices"])
    return tuple(map(slice, params["start_indices"], params["limit_indices"], strides))


def _iota(params: Mapping[str, Any]) -> np.ndarray:
    shape, dim = params["shape"], params["dimension"]
    counts = np.arange(shape[dim], dtype=params["dtype"])
    return np.broadcast_to(counts.reshape([-1 if d == dim else 1 for d in range(len(shape))]), shape)


def propagate_integers(eqn: JaxprEqn, operands: Sequence[Integers | None]) -> Integers | None:
    """The value of an equation on known integers; None if it is not known."""
    if len(eqn.outvars) != 1 or any(o is None for o in operands):
        return None
    out: Any = eqn.outvars[0].aval
    dtype = getattr(out, "dtype", None)
    if not isinstance(dtype, np.dtype) or dtype.kind not in "iub" or math.prod(out.shape) > _MOST_INDICES:
        return None
    operation = _integer_operation(eqn)
    if operation is None:
        return None
    known = [o for o in operands if o is not None]

    def evaluate(iterations: Iterations) -> np.ndarray:
        return np.asarray(operation(*(o.evaluate(iterations) for o in known)))

    return Integers(evaluate, frozenset[Address]().union(*(o.loops for o in known)))


# ---- walking back


def full_region(shape: Sequence[int]) -> Region:
    return tuple(map(range, shape))


def parameters_of(source: Source) -> Iterator[ParameterSource]:
    """The parameters that a variable is laid out from."""
    match source:
        case ParameterSource():
            yield source
        case LayoutSource() | IterationSource() | ShardSource():
            yield from parameters_of(source.operand)
        case ConcatenatedSource() | StackedSource() | EitherSource() | UnknownSource():
            for operand in source.operands:
                yield from parameters_of(operand)


def loops_of(source: Source) -> frozenset[Address]:
    """The loops (and shard_maps) on whose iteration the elements of a variable depend."""
    match source:
        case LayoutSource():
            indices = (i.loops for i in source.integers if i is not None)
            return loops_of(source.operand).union(*indices)
        case IterationSource():
            return loops_of(source.operand) | {source.loop}
        case ShardSource():
            return loops_of(source.operand) | {source.shard_map}
        case ConcatenatedSource() | StackedSource() | EitherSource() | UnknownSource():
            return frozenset[Address]().union(*map(loops_of, source.operands))
    return frozenset()


def shard_maps_of(source: Source) -> dict[Address, int]:
    """The shard_maps that divide the first dimension of a parameter, and into how many parts."""
    match source:
        case ShardSource():
            return {**shard_maps_of(source.operand), source.shard_map: source.parts[0] if source.parts else 1}
        case LayoutSource() | IterationSource():
            return shard_maps_of(source.operand)
        case ConcatenatedSource() | StackedSource() | EitherSource() | UnknownSource():
            return {a: parts for operand in source.operands for a, parts in shard_maps_of(operand).items()}
    return {}


def read_elements(
    source: Source, region: Region, iterations: Iterations
) -> Iterator[tuple[ParameterSource, Region]]:
    """The regions of parameters that a region of a variable comes from, in one iteration. Raises `Unknown`."""
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
            inner = _without(region, source.dimension)
            for index in region[source.dimension]:
                yield from read_elements(source.operands[index], inner, iterations)
        case EitherSource():
            for operand in source.operands:
                yield from read_elements(operand, region, iterations)
        case IterationSource():
            index = iterations[source.loop]
            yield from read_elements(source.operand, (range(index, index + 1), *region), iterations)
        case ShardSource():
            yield from read_elements(source.operand, _shard_region(source, region, iterations), iterations)
        case UnknownSource():
            raise Unknown(source.reason)
        case _:
            raise AssertionError(source)


def _shard_region(source: ShardSource, region: Region, iterations: Iterations) -> Region:
    """The first dimension divides a stack over devices. Of others, only whole ones are followed."""
    out: list[Indices] = []
    for dim, (indices, parts) in enumerate(zip(region, source.parts, strict=True)):
        if parts == 1:
            out.append(indices)
        elif dim == 0:
            out.append(_shift(indices, iterations[source.shard_map] * source.shape[0]))
        elif len(indices) == source.shape[dim]:
            out.append(range(source.operand.shape[dim]))
        else:
            raise Unknown(f"a shard_map divides its dimension {dim}, of which a part is taken")
    return tuple(out)


def _read_gathered(
    source: LayoutSource, region: Region, iterations: Iterations
) -> Iterator[tuple[ParameterSource, Region]]:
    """An all_gather undoes the division of a shard_map: each device has the shards of all."""
    params = source.eqn.params
    dim, devices, tiled = params["all_gather_dimension"], params["axis_size"], params["tiled"]
    shards = {a: parts for a, parts in shard_maps_of(source.operand).items() if parts > 1}
    if dim != 0 or not shards:
        operand = source.operand
        whole = tuple(range(operand.shape[d]) if d == dim and tiled else i for d, i in enumerate(region))
        if tiled and len(region[dim]) != source.shape[dim]:
            raise Unknown("a part of what devices gather is taken")
        yield from read_elements(operand, whole if tiled else _without(region, dim), iterations)
        return
    if not tiled or list(shards.values()) != [devices]:
        raise Unknown("devices gather it in a form that is not followed")
    (shard_map,) = shards
    size = source.operand.shape[0]
    indices = np.asarray(region[0])
    for device in range(devices):
        inside = indices[indices // size == device] - device * size
        if inside.size:
            part = (_compact(inside), *region[1:])
            yield from read_elements(source.operand, part, {**iterations, shard_map: device})


def _without(region: Region, dim: int) -> Region:
    return (*region[:dim], *region[dim + 1 :])


def _read_concatenated(
    source: ConcatenatedSource, region: Region, iterations: Iterations
) -> Iterator[tuple[ParameterSource, Region]]:
    dim, start = source.dimension, 0
    indices = np.asarray(region[dim])
    for operand in source.operands:
        size = operand.shape[dim]
        inside = indices[(indices >= start) & (indices < start + size)] - start
        if inside.size:
            part = (*region[:dim], _compact(inside), *region[dim + 1 :])
            yield from read_elements(operand, part, iterations)
        start += size


def _shift(indices: Indices, offset: int) -> Indices:
    if isinstance(indices, range):
        return range(indices.start + offset, indices.stop + offset, indices.step)
    return indices + offset


def _scale(indices: Indices, start: int, step: int) -> Indices:
    """start + step * i, for each index."""
    if isinstance(indices, range) and len(indices):
        first, last = start + step * indices[0], start + step * indices[-1]
        stride = step * indices.step
        return range(first, last + (1 if stride > 0 else -1), stride)
    return start + step * np.asarray(indices)


def _compact(indices: np.ndarray) -> Indices:
    """The same indices, as a range where they are evenly spaced."""
    if indices.size == 1:
        return range(int(indices[0]), int(indices[0]) + 1)
    steps = np.diff(indices)
    if steps.size and steps[0] and (steps == steps[0]).all():
        step = int(steps[0])
        return range(int(indices[0]), int(indices[-1]) + (1 if step > 0 else -1), step)
    return indices


def _operand_region(source: LayoutSource, region: Region, iterations: Iterations) -> Region:
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
    starts: list[Indices] = []
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
    taken = tuple(numbers.start_index_map)
    whole = all(sizes[d] == source.operand.shape[d] for d in range(rank) if d not in taken)
    one = all(sizes[d] == 1 for d in taken) and len(taken) == 1
    if not (whole and one and not getattr(numbers, "operand_batching_dims", ())):
        raise Unknown("it is gathered in a form that is not followed")
    (dim,) = taken
    values = np.clip(integers.evaluate(iterations)[..., 0], 0, source.operand.shape[dim] - 1)
    offset_dims = tuple(numbers.offset_dims)
    batch_dims = [d for d in range(len(region)) if d not in offset_dims]
    chosen = values[np.ix_(*(np.asarray(region[d]) for d in batch_dims))] if batch_dims else values
    collapsed = set(numbers.collapsed_slice_dims)
    kept = iter(offset_dims)
    out: list[Indices] = []
    for operand_dim in range(rank):
        indices = None if operand_dim in collapsed else region[next(kept)]
        if operand_dim == dim:
            indices = _compact(np.unique(chosen))
        assert indices is not None
        out.append(indices)
    return tuple(out)


def _pad(source: LayoutSource, region: Region, _: Iterations) -> Region:
    out: list[Indices] = []
    pairs = zip(region, source.eqn.params["padding_config"], source.operand.shape, strict=True)
    for indices, (low, high, inner), size in pairs:
        if (low, high, inner) == (0, 0, 0):
            out.append(indices)
            continue
        if inner:
            raise Unknown("it is padded between its elements")
        moved = np.asarray(indices) - low
        out.append(_compact(moved[(moved >= 0) & (moved < size)]))
    return tuple(out)


def _reshape(source: LayoutSource, region: Region, _: Iterations) -> Region:
    """Follows each group of dimensions that a reshape merges or splits."""
    if source.eqn.params.get("dimensions") is not None:
        raise Unknown("it is reshaped in another order of dimensions")
    out: list[Indices] = []
    for before, after in _reshape_groups(source.operand.shape, source.shape):
        own = [region[d] for d in after]
        if all(len(i) == source.shape[d] for i, d in zip(own, after, strict=True)) and all(
            isinstance(i, range) and i.step == 1 for i in own
        ):
            out += [range(source.operand.shape[d]) for d in before]
            continue
        if math.prod(len(i) for i in own) > _MOST_INDICES:
            raise Unknown("it is reshaped into parts that are too large to follow")
        sizes = [source.shape[d] for d in after]
        grid = np.ix_(*(np.asarray(i) for i in own)) if own else ()
        flat = np.ravel_multi_index(np.broadcast_arrays(*grid), sizes).ravel() if own else np.zeros(1, int)
        positions = np.unravel_index(flat, [source.operand.shape[d] for d in before]) if before else ()
        unique = [np.unique(p) for p in positions]
        if math.prod(u.size for u in unique) != flat.size:
            raise Unknown("it is reshaped across the boundaries of layers")
        out += map(_compact, unique)
    return tuple(out)


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


# ---- indices in a parameter


@dataclass(frozen=True, slots=True)
class AxisIndex:
    """What a product reads of one axis of a parameter: one index, or several at once."""

    axis: int
    index: int | None
    """None: it reads several members of the axis in one product."""


def axis_indices(
    source: Source, batch_dims: Sequence[int], iterations: Iterations
) -> dict[ParameterSource, tuple[AxisIndex, ...]]:
    """The parameters that a product reads in one iteration, and the axes of each along which it reads single members.

    `batch_dims` are the dimensions of the variable that the product does not mix: along these it may read several
    members of a stack at once. Axes that are read whole and mixed are dimensions of a matrix, not of a stack.
    """
    whole = full_region(source.shape)
    one = tuple(range(1) if dim in batch_dims else indices for dim, indices in enumerate(whole))
    of_one = dict(read_elements(source, one, iterations))
    indices: dict[ParameterSource, tuple[AxisIndex, ...]] = {}
    for parameter, region in read_elements(source, whole, iterations):
        axes = []
        for axis, (taken, size) in enumerate(zip(region, parameter.shape, strict=True)):
            if len(taken) == 1 and size > 1:
                axes.append(AxisIndex(axis, int(taken[0])))
            elif parameter in of_one and len(of_one[parameter][axis]) == 1 < len(taken):
                axes.append(AxisIndex(axis, None))
        known = indices.get(parameter)
        indices[parameter] = tuple(axes) if known is None else _merge(known, tuple(axes))
    return indices


def _merge(one: tuple[AxisIndex, ...], other: tuple[AxisIndex, ...]) -> tuple[AxisIndex, ...]:
    """The axes of a parameter that is read in two places: where the indices differ, several are read at once."""
    by_axis = {a.axis: a for a in other}
    return tuple(a if by_axis.get(a.axis) == a else AxisIndex(a.axis, None) for a in one)


def iterations_of(loops: Sequence[tuple[Address, int]]) -> Iterator[dict[Address, int]]:
    """Every combination of iterations of some loops."""
    for combination in itertools.product(*(range(size) for _, size in loops)):
        yield {address: index for (address, _), index in zip(loops, combination, strict=True)}
