"""Runs a function on each device's shard: for kernels that XLA cannot partition by itself.

A `PartitionRule` says how the dimensions of operands and results correspond. XLA uses it to propagate shardings, and
`divide` decides what is gathered, what each device computes, and what is reduced over devices.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from math import prod
from typing import Any, NamedTuple, cast

import jax
from jax import lax
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from policyc.jaxcore.shardings import axis_names

Dim = tuple[str, int]
"""A dimension: the name of its factor, and its number of elements per index of the factor.

Only whole indices of a factor are sharded. Dimensions of one factor are sharded alike, though their sizes may differ.
"""
Dims = tuple[Dim, ...]
MeshAxes = tuple[str, ...]
ArrayAxes = tuple[MeshAxes, ...]
"""The mesh axes of each dimension of an array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRule:
    """How a function may be divided over devices.

    Attributes:
      name: names the function in warnings.
      operands, results: the dimensions of each array. Results without dimensions are not summed over devices, because
        all devices compute the same value.
      whole: factors that are not divided: each device has all of them.
      xla_scatters: whether to leave scattering of sums over devices to XLA, as for XLA's own products. Otherwise they
        are scattered inside this operation. XLA pipelines such a scatter: it moves it to the next iteration of a loop,
        and may copy the sum for that.
      limit: why the function cannot run on a shard in which the factors have these sizes; empty if it can.
    """

    name: str
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    whole: frozenset[str] = frozenset()
    xla_scatters: bool = False
    limit: Callable[[Mapping[str, int]], str] = lambda _: ""

    @property
    def reduced_factors(self) -> frozenset[str]:
        """The factors of operands that no result has, except the `whole` ones."""
        return frozenset(_factors(self.operands)) - frozenset(_factors(self.results)) - self.whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How a function is divided.

    Attributes:
      factors: the mesh axes that each factor is sharded over. An axis belongs to one factor.
      summed: the mesh axes over which results are summed.
      scattered: the mesh axes over which each dimension of each sum is scattered.
      gathered: why some factors are gathered although they could have stayed sharded; empty if none are.
    """

    factors: Mapping[str, MeshAxes]
    summed: MeshAxes
    scattered: tuple[ArrayAxes, ...]
    gathered: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """Which shard a device has, and how results are divided further. For use in the body of a partitioned function.

    Attributes:
      factors: as in `Division`.
      scattered: as in `Division`.
    """

    factors: Mapping[str, MeshAxes]
    scattered: tuple[ArrayAxes, ...] = ()

    @property
    def axes(self) -> MeshAxes:
        """All mesh axes that the work is divided over."""
        return tuple(axis for axes in self.factors.values() for axis in axes)

    def flat(self) -> jax.Array | None:
        """The index among all shards; None if nothing is divided."""
        return lax.axis_index(self.axes) if self.axes else None

    def along(self, factor: str) -> jax.Array | int:
        """The index among the shards of one factor."""
        axes = self.factors.get(factor, ())
        return lax.axis_index(axes) if axes else 0

    def first_scattered(self, result: int = 0) -> int | None:
        """The first dimension along which a result is scattered when it is reduced; None if there is none.

        XLA transposes the result unless this dimension is the first one in memory.
        """
        dims = self.scattered[result] if self.scattered else ()
        return next((i for i, axes in enumerate(dims) if axes), None)


Body = Callable[..., Sequence[jax.Array]]
"""Takes a `ShardIndex` and the operands' shards."""


def partition(body: Body, rule: PartitionRule) -> Callable[..., Sequence[jax.Array]]:
    """Turns `body` into a function of whole arrays that is divided over devices by XLA's shardings and the rule."""

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(body(ShardIndex(factors={}), *arrays))

    def run_divided(mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        sizes = factor_sizes(rule, [o.shape for o in operands])
        axes = [array_mesh_axes(a, rule.name) for a in (*operands, *results)]
        division = divide(rule, sizes, dict(mesh.shape), axes[: len(operands)], axes[len(operands) :])
        if division.gathered:
            warnings.warn(division.gathered, stacklevel=2)

        index = ShardIndex(factors=division.factors, scattered=division.scattered)
        scattered = _scattered_here(rule, division)

        def run_shard(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            # XLA may compile in the context of a mesh with Explicit axes. JAX 0.12 would then pin the results here to
            # that mesh, but a shard has no mesh.
            with use_abstract_mesh(AbstractMesh((), ())):
                results = zip(body(index, *arrays), rule.results, scattered, strict=True)
                return tuple(
                    _add(division.summed if dims else (), result, axes) for result, dims, axes in results
                )

        none = tuple(((),) * len(dims) for dims in rule.operands)
        return (
            mesh,
            run_shard,
            _shardings(mesh, rule.results, division.factors, scattered),
            _shardings(mesh, rule.operands, division.factors, none),
        )

    function = custom_partitioning(run)
    function.def_partition(partition=run_divided, sharding_rule=partial(_shardy_rule, rule))
    return cast("Callable[..., Sequence[jax.Array]]", function)


def factor_sizes(rule: PartitionRule, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """The size of each factor, from the shapes of the operands."""
    return {
        factor: size // unit
        for shape, dims in zip(shapes, rule.operands, strict=True)
        for size, (factor, unit) in zip(shape, dims, strict=True)
    }


class _Use(IntEnum):
    """Possible uses of a mesh axis, in order of preference."""

    SUM = 0
    """A reduced factor that all its operands shard over the axis: devices add their parts."""
    KEEP = 1
    """A factor that both an operand and a result shard over the axis: nothing moves."""
    OPERAND = 2
    """A factor that an operand shards over the axis, but no result does."""
    RESULT = 3
    """A factor that only results shard: each device computes its part of them from the whole operand."""


class _Candidate(NamedTuple):
    use: _Use
    factor: str
    axis: str


def divide(
    rule: PartitionRule,
    sizes: Mapping[str, int],
    mesh: Mapping[str, int],
    operands: Sequence[ArrayAxes],
    results: Sequence[ArrayAxes],
) -> Division:
    """Decides how to divide a function, given how its operands are sharded and how its results should be.

    Each mesh axis is used for one factor, in the order of `_Use`. Other factors that are sharded over it are gathered.

    Example: the product `y[m, n] = x[m, k] w[k, n]` on the mesh `{"data": 4, "tensor": 2}`. `x` is sharded over (data,
    tensor), `w` over (tensor, data), and `y` should be over (data, none). Both operands shard k over `tensor`, so it is
    used for k (`SUM`). `data` could be used for m, which x and y shard (`KEEP`), or for n, which only w shards
    (`OPERAND`): it is used for m. So w is gathered along n, and y is summed over `tensor`.
    """
    candidates = _find_candidates(rule, sizes, operands, results)
    factor_of = _assign_axes(candidates, sizes, mesh)
    # In the order of the candidates, so that a device keeps the shard that it has.
    names = dict.fromkeys((*sizes, *_factors(rule.results)))  # a factor that only results have is not divided
    factors = {
        name: tuple(c.axis for c in candidates if c.factor == factor_of.get(c.axis) == name) for name in names
    }
    gathered = _gather_to_fit(rule, sizes, mesh, factors)
    summed = tuple(axis for factor in sorted(rule.reduced_factors) for axis in factors[factor])

    def scatter(dim: Dim, requested: MeshAxes) -> MeshAxes:
        """The mesh axes over which to scatter a sum along a dimension, so that it is sharded as requested."""
        kept, rest = factors[dim[0]], requested[len(factors[dim[0]]) :]
        fits = requested[: len(kept)] == kept and sizes.get(dim[0], 1) % prod(mesh[a] for a in requested) == 0
        return rest if fits and rest and set(summed).issuperset(rest) else ()

    scattered = tuple(tuple(map(scatter, *pair)) for pair in zip(rule.results, results, strict=True))
    return Division(factors=factors, summed=summed, scattered=scattered, gathered=gathered)


def _find_candidates(
    rule: PartitionRule,
    sizes: Mapping[str, int],
    operands: Sequence[ArrayAxes],
    results: Sequence[ArrayAxes],
) -> list[_Candidate]:
    """All possible uses of mesh axes. A factor of several operands that is not reduced follows the first of them."""
    of_operands = _proposals(rule.operands, operands)
    of_results = _proposals(rule.results, results)
    candidates: list[_Candidate] = []
    for factor in (f for f in sizes if f not in rule.whole):
        first, *others = of_operands[factor]
        requested = of_results.get(factor, [])
        if factor in rule.reduced_factors:
            agreed = (axis for axis in first if all(axis in other for other in others))
            candidates += [_Candidate(_Use.SUM, factor, axis) for axis in agreed]
        elif first:
            in_results = sum(requested, ())
            candidates += [
                _Candidate(_Use.KEEP if axis in in_results else _Use.OPERAND, factor, axis) for axis in first
            ]
        elif requested:
            candidates += [_Candidate(_Use.RESULT, factor, axis) for axis in requested[0]]
    return candidates


def _assign_axes(
    candidates: Sequence[_Candidate], sizes: Mapping[str, int], mesh: Mapping[str, int]
) -> dict[str, str]:
    """The factor that each mesh axis is used for: its most preferred use for which the factor's size is divisible."""
    factor_of: dict[str, str] = {}
    for _, factor, axis in sorted(candidates, key=lambda candidate: candidate.use):
        shards = mesh[axis] * prod(mesh[a] for a, other in factor_of.items() if other == factor)
        if axis not in factor_of and sizes[factor] % shards == 0:
            factor_of[axis] = factor
    return factor_of


def _gather_to_fit(
    rule: PartitionRule, sizes: Mapping[str, int], mesh: Mapping[str, int], factors: dict[str, MeshAxes]
) -> str:
    """Gathers factors, in place, until the function can run on the shards. Returns why; empty if it gathers none."""
    reason = ""
    for factor in reversed(list(sizes)):
        shard = {name: size // prod(mesh[a] for a in factors[name]) for name, size in sizes.items()}
        limit = rule.limit(shard)
        if not limit:
            break
        if factors[factor]:
            reason, factors[factor] = limit, ()
    return reason and f"{rule.name}: {reason}. So it gathers an operand that is sharded more finely."


def _scattered_here(rule: PartitionRule, division: Division) -> tuple[ArrayAxes, ...]:
    """The axes to scatter over in this operation, rather than in XLA.

    A sum that also goes over further axes is always scattered here, before it is added over those axes.
    """
    return tuple(
        ((),) * len(dims) if rule.xla_scatters and set(division.summed) == set(sum(dims, ())) else dims
        for dims in division.scattered
    )


def _add(summed: MeshAxes, result: jax.Array, scattered: ArrayAxes) -> jax.Array:
    """Adds the parts of a result that devices hold."""
    for dim, axes in enumerate(scattered):
        if axes:
            result = lax.psum_scatter(result, axes, scatter_dimension=dim, tiled=True)
    rest = tuple(axis for axis in summed if axis not in sum(scattered, ()))
    return lax.psum(result, rest) if rest else result


# ---- shardings


def _factors(arrays: Sequence[Dims]) -> list[str]:
    return [factor for dims in arrays for factor, _ in dims]


def _proposals(arrays: Sequence[Dims], axes: Sequence[ArrayAxes]) -> dict[str, list[MeshAxes]]:
    """The mesh axes of each factor, in each array that has it."""
    proposals: dict[str, list[MeshAxes]] = {}
    for dims, array_axes in zip(arrays, axes, strict=True):
        for (factor, _), dim_axes in zip(dims, array_axes, strict=True):
            proposals.setdefault(factor, []).append(dim_axes)
    return proposals


def array_mesh_axes(array: Any, name: str) -> ArrayAxes:
    """The mesh axes of each dimension of an array. `name` is the function's name, for the error if there is no mesh."""
    if not isinstance(array.sharding, NamedSharding):
        raise NotImplementedError(
            f"{name}: the program has several devices but no mesh, or this is in a shard_map over only some axes of "
            "its mesh: give the arguments of the jitted function a NamedSharding, and write a shard_map over all axes"
        )
    spec = map(axis_names, array.sharding.spec.partitions)
    return (*spec, *((),) * (len(array.shape) - len(array.sharding.spec)))


def _shardings(
    mesh: Mesh, arrays: Sequence[Dims], factors: Mapping[str, MeshAxes], scattered: Sequence[ArrayAxes]
) -> tuple[NamedSharding, ...]:
    specs = [
        [(factors[factor] + extra) or None for (factor, _), extra in zip(dims, more, strict=True)]
        for dims, more in zip(arrays, scattered, strict=True)
    ]
    return tuple(NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs)


def _shardy_rule(
    rule: PartitionRule, mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]
) -> SdyShardingRule:
    """The rule in the form of XLA's partitioner. The elements of a dimension within one index form a second factor.

    XLA accepts two factors for a dimension only if both are larger than 1, and wants the sizes of such factors only.
    """
    del mesh, results
    sizes = factor_sizes(rule, [o.shape for o in operands])
    arrays = (*rule.operands, *rule.results)
    whole = {factor for dims in arrays for factor, unit in dims if unit == 1}
    compound = dict.fromkeys(dim for dims in arrays for dim in dims if dim[1] != 1 and sizes[dim[0]] != 1)
    inner = {_inner(dim): dim[1] for dim in compound}
    split = {factor: sizes[factor] for factor, _ in compound if factor not in whole}

    def factors_of(dim: Dim) -> Any:
        if dim in compound:
            return CompoundFactor(dim[0], _inner(dim))
        return dim[0] if dim[1] == 1 else _inner(dim)

    def mapping(dims: Dims) -> ArrayMapping:
        return ArrayMapping(*map(factors_of, dims))

    factors: Any = split | inner
    return SdyShardingRule(tuple(map(mapping, rule.operands)), tuple(map(mapping, rule.results)), **factors)


def _inner(dim: Dim) -> str:
    return f"{dim[0]}_by_{dim[1]}"
