"""How variables are laid out from parameters: a graph with a node for every variable that holds elements of one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jax.extend.core import JaxprEqn

from policyc.compiler.weights.provenance.integers import Integers
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.transform import Address
from policyc.language.selectors import DottedPath


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
    """One of several variables: the branches of a `cond`, the cases of a `select_n`.

    `index` says which one, if known: a scalar for all elements, or a value for each element.
    """

    operands: tuple[Source, ...]
    index: Integers | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class IterationSource(Source):
    """One iteration's slice of a stacked input of a scan."""

    operand: Source
    loop: Address


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ShardSource(Source):
    """One device's shard of an operand of a shard_map, which divides each dimension into `parts`.

    `first_axes` are the mesh axes over which it divides the first dimension.
    """

    operand: Source
    shard_map: Address
    parts: tuple[int, ...]
    first_axes: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StackedResultSource(Source):
    """The stacked per-iteration results of a scan, such as those of `lax.map`."""

    operand: Source
    loop: Address


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class OtherSource(Source):
    """Elements that do not come from a parameter, such as the zeros that pad a stack."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class UnknownSource(Source):
    """Derived from these parameters by a layout that the analysis cannot follow."""

    operands: tuple[ParameterSource, ...]
    reason: str


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LostSource(Source):
    """Computed from these variables alone, by an operation that the analysis cannot follow."""

    operands: tuple[Source, ...]
    reason: str


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CarriedSource(Source):
    """A carry of a loop, among the projections of a variable. `LayerIndices` knows the projections of the carry."""

    loop: Address


def unknown_source(shape: tuple[int, ...], sources: Iterable[Source], reason: str) -> UnknownSource:
    parameters = dict.fromkeys(parameter for source in sources for parameter in parameters_of(source))
    return UnknownSource(shape=shape, operands=tuple(parameters), reason=reason)


def operands_of(source: Source) -> tuple[Source, ...]:
    """The sources that a source is directly laid out from."""
    match source:
        case LayoutSource() | IterationSource() | StackedResultSource() | ShardSource():
            return (source.operand,)
        case ConcatenatedSource() | StackedSource() | EitherSource() | UnknownSource() | LostSource():
            return source.operands
    return ()


def parameters_of(source: Source) -> Iterator[ParameterSource]:
    """The parameters that a source is laid out from, with repetitions."""
    if isinstance(source, ParameterSource):
        yield source
    for operand in operands_of(source):
        yield from parameters_of(operand)


def is_lost(source: Source) -> bool:
    """Whether any part of it is computed by an operation that the analysis cannot follow."""
    return isinstance(source, LostSource) or any(map(is_lost, operands_of(source)))


def is_broadcast(source: Source) -> bool:
    """Whether it is broadcast from a smaller array, such as a bias, a scale or a position."""
    if not isinstance(source, LayoutSource):
        return False
    before, after = source.operand.shape, source.shape
    match jaxprs.primitive_name(source.eqn):
        case "broadcast_in_dim" if math.prod(after) > math.prod(before):
            return True
        case "tile" if any(new > old == 1 for old, new in zip(before, after, strict=True)):
            return True
    return is_broadcast(source.operand)


def loops_of(source: Source) -> frozenset[Address]:
    """The loops whose iteration decides which elements a variable holds, and the shard_maps whose device does."""
    operands = operands_of(source)
    if not operands:  # most weights are parameters
        return frozenset()
    loops = frozenset[Address]().union(*map(loops_of, operands))
    match source:
        case LayoutSource():
            return loops.union(*(i.loops for i in source.integers if i is not None))
        case EitherSource(index=Integers() as index):
            return loops | index.loops
        case IterationSource():
            return loops | {source.loop}
        case StackedResultSource():
            return loops - {source.loop}
        case ShardSource():
            return loops | {source.shard_map}
    return loops


def shard_maps_of(source: Source) -> dict[Address, int]:
    """The shard_maps that a source passes through, and into how many parts each divides the first dimension."""
    parts = {a: parts for operand in operands_of(source) for a, parts in shard_maps_of(operand).items()}
    if isinstance(source, ShardSource):
        parts[source.shard_map] = source.parts[0] if source.parts else 1
    return parts
