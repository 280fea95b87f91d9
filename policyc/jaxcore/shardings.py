"""Meshes and shardings: which mesh axes an array is sharded over, or varies over inside `shard_map`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, PartitionSpec, use_abstract_mesh


def mesh_axes_of(aval: Any) -> tuple[Any, ...]:
    """The mesh axes that each dimension is sharded over, by its type: a name, a tuple of names, or None."""
    spec = aval.sharding.spec
    return (*spec.partitions,) + (None,) * (len(aval.shape) - len(spec))


def axis_names(axes: Any) -> tuple[Any, ...]:
    """The mesh axes in one entry of a partition spec, as a tuple. An entry is a name, a tuple of names, or None."""
    if axes is None:
        return ()
    return axes if isinstance(axes, tuple) else (axes,)


def valid_partition_spec(
    mesh_axes: Sequence[Any], shape: Sequence[int], axis_sizes: Mapping[Any, int]
) -> PartitionSpec:
    """A partition spec without the mesh axes that do not divide their dimension or that an earlier dimension uses."""
    used: set[Any] = set()
    entries: list[Any] = []
    for axes, size in zip(mesh_axes, shape, strict=True):
        names = axis_names(axes)
        fits = not used & set(names) and size % prod(axis_sizes[n] for n in names) == 0
        entries.append(axes if fits else None)
        used |= set(names) if fits else set()
    return PartitionSpec(*entries)


def match_varying_axes(*args: Any) -> list[jax.Array]:
    """Casts arrays to vary over the same manual mesh axes: all that any of them varies over."""
    arrays = [jax.numpy.asarray(a) for a in args]
    varying = [jax.typeof(a).manual_axis_type.varying for a in arrays]
    union = frozenset().union(*varying)
    return [
        a if v == union else lax.pcast(a, tuple(sorted(union - v)), to="varying")
        for a, v in zip(arrays, varying, strict=True)
    ]


def shape_dtype_struct(x: jax.Array) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array, and its sharding and manual axes if its type has any."""
    aval = jax.typeof(x)
    manual = aval.manual_axis_type
    if not (any(mesh_axes_of(aval)) or manual.varying):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=aval.sharding, manual_axis_type=manual)


def reshard_like(x: jax.Array, operand: jax.ShapeDtypeStruct) -> jax.Array:
    """Reshards `x` like `operand`, if that has a sharding."""
    sharding = operand.sharding
    if sharding is None or mesh_axes_of(jax.typeof(x)) == mesh_axes_of(operand):
        return x
    resharded: jax.Array = jax.sharding.reshard(x, sharding)
    return resharded


@contextlib.contextmanager
def explicit_axes_as_auto(mesh: Any) -> Iterator[None]:
    """Lower under Auto axes: Explicit types would pin intermediates as unsharded."""
    explicit = [n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Explicit]
    if not explicit:
        yield
        return
    with use_abstract_mesh(mesh.update_axis_types(dict.fromkeys(explicit, AxisType.Auto))):
        yield
