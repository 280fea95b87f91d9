"""XLA's block-scaled GEMM of two operands in rows, with a partitioning rule of its own.

JAX's rule for `jax.nn.scaled_matmul` sums fp32 products over devices and gathers one scale for each block of each row.
Here each device applies the outer scales and rounds to the dtype of the result before the sum over devices, as other
GEMMs do, and gathers the scales of 2D tiles as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from policyc.jaxcore.partition import ArrayAxes, MeshAxes, array_mesh_axes
from policyc.numerics.quantize.layout import repeat_axis
from policyc.numerics.quantize.values import apply_outer_scale

DTYPES = {
    "nvfp4": (jnp.float4_e2m1fn, jnp.float8_e4m3fn),
    "mxfp8": (jnp.float8_e4m3fn, jnp.float8_e8m0fnu),
}
"""The dtypes of elements and of block scales."""


class Rows(NamedTuple):
    """An operand as (batch, rows, contracted).

    `codes` are bytes, and so are `scales`, which have one row for each row of codes or for each row of tiles. The outer
    scale is `mantissa` * 2**`exponent`, both (batch, rows or 1, 1), or None.
    """

    codes: jax.Array
    scales: jax.Array
    mantissa: jax.Array | None = None
    exponent: jax.Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockScaledSpec:
    """What a block-scaled GEMM computes.

    `native` says whether to call XLA's block-scaled GEMM, which needs CUDA. `rounds_first` says that the GEMM may round
    its result before the outer scales are applied: they are powers of two, so that the order does not matter.
    """

    format: str
    out: Any
    native: bool
    rounds_first: bool = False


def multiply_rows(a: Rows, b: Rows, spec: BlockScaledSpec) -> jax.Array:
    """The product (batch, rows of a, rows of b), with the outer scales applied, in the dtype `spec.out`."""
    product: jax.Array = _batched(spec)(a, b)
    return product


# ---- on one device


def as_values(rows: Rows, format: str) -> tuple[jax.Array, jax.Array]:
    """Codes and scales in XLA's dtypes, with one scale for each block of each row."""
    element, scale = DTYPES[format]
    tile = rows.codes.shape[1] // rows.scales.shape[1]
    scales = repeat_axis(rows.scales, -2, tile) if tile > 1 else rows.scales
    values = lax.bitcast_convert_type(rows.codes, element).reshape(*rows.codes.shape[:2], -1)
    return values, lax.bitcast_convert_type(scales, scale)


def _multiply(a: Rows, b: Rows, spec: BlockScaledSpec) -> jax.Array:
    (left, left_scales), (right, right_scales) = as_values(a, spec.format), as_values(b, spec.format)
    # The product stays fp32 if it is scaled once more afterwards, unless that is exact.
    is_scaled = a.mantissa is not None or b.mantissa is not None
    stays_wide = is_scaled and not spec.rounds_first
    dtype = spec.out if not stays_wide and spec.out in (jnp.bfloat16, jnp.float32) else jnp.float32
    multiply = jax.nn.scaled_matmul if spec.native else _multiply_values
    product = multiply(left, right, left_scales, right_scales, dtype)
    return _apply_outer_scales(product, a, b).astype(spec.out)


def _multiply_values(
    a: jax.Array, b: jax.Array, a_scales: jax.Array, b_scales: jax.Array, out: Any
) -> jax.Array:
    """`jax.nn.scaled_matmul` on other platforms: what XLA does on a GPU that has no such GEMM."""

    def values(x: jax.Array, scales: jax.Array) -> jax.Array:
        blocks = x.astype(jnp.float32).reshape(*scales.shape, -1)
        return (blocks * scales.astype(jnp.float32)[..., None]).reshape(x.shape)

    dims = (((2,), (2,)), ((0,), (0,)))
    product = lax.dot_general(values(a, a_scales), values(b, b_scales), dims, precision=lax.Precision.HIGHEST)
    return product.astype(out)


def _apply_outer_scales(product: jax.Array, a: Rows, b: Rows) -> jax.Array:
    m, e = jnp.float32(1), jnp.int32(0)
    if a.mantissa is not None and a.exponent is not None:
        m, e = m * a.mantissa, e + a.exponent
    if b.mantissa is not None and b.exponent is not None:
        m, e = m * b.mantissa.swapaxes(1, 2), e + b.exponent.swapaxes(1, 2)
    return apply_outer_scale(product, m, e) if m.ndim else product


# ---- under vmap


@cache
def _batched(spec: BlockScaledSpec) -> Any:
    """The GEMM under any number of `vmap`s: a mapped axis becomes part of the batch."""
    partitioned = _partitioned(spec)

    @custom_vmap
    def multiply(a: Rows, b: Rows) -> jax.Array:
        product: jax.Array = partitioned(a, b)
        return product

    @multiply.def_vmap
    def multiply_mapped(size: int, mapped: tuple[Rows, Rows], a: Rows, b: Rows) -> tuple[jax.Array, bool]:
        def merge(x: jax.Array, is_mapped: bool) -> jax.Array:
            wide = x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
            return wide.reshape(-1, *wide.shape[2:])

        merged = jax.tree.map(merge, (a, b), tuple(mapped))  # JAX may pass a list
        product = multiply(*merged)
        return product.reshape(size, -1, *product.shape[1:]), True

    return multiply


# ---- on several devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """How a GEMM is divided: the mesh axes of its batch, of the rows of both operands, and of what it contracts.

    `sum_to_m` and `sum_to_n` are the contracted axes over which a sum leaves each device a part of the result's rows or
    columns.
    """

    batch: MeshAxes
    m: MeshAxes
    n: MeshAxes
    k: MeshAxes
    sum_to_m: MeshAxes
    sum_to_n: MeshAxes

    @property
    def result(self) -> tuple[MeshAxes, MeshAxes, MeshAxes]:
        return self.batch, self.m + self.sum_to_m, self.n + self.sum_to_n

    @property
    def sum_to_all(self) -> MeshAxes:
        """The contracted axes over which each device gets the whole sum."""
        return tuple(axis for axis in self.k if axis not in self.sum_to_m + self.sum_to_n)


def divide(
    mesh_shape: dict[str, int],
    operands: tuple[Rows, Rows],
    shardings: tuple[ArrayAxes, ArrayAxes, ArrayAxes],
) -> Partition:
    """The partition of a GEMM whose operands and result are sharded like this. What does not fit is gathered.

    Both operands must be sharded alike along what is contracted, else it is gathered: for weights these are codes. A
    sharded sum goes to the devices that the result asks for.
    """
    a, b = operands
    (a_batch, a_m, a_k), (b_batch, b_n, b_k), (_, out_m, out_n) = shardings

    def count(axes: MeshAxes) -> int:
        return prod(mesh_shape[axis] for axis in axes)

    def fits(axes: MeshAxes, *sizes: int) -> bool:
        return all(size % count(axes) == 0 for size in sizes)

    k = a_k if a_k == b_k and fits(a_k, a.scales.shape[2]) else ()
    batch = a_batch if a_batch == b_batch and fits(a_batch, a.codes.shape[0]) else ()

    def rows(requested: MeshAxes, sharded: MeshAxes, x: Rows, taken: MeshAxes) -> tuple[MeshAxes, MeshAxes]:
        """The axes that divide the rows of an operand, and those over which its rows of the sum are divided."""
        axes = requested or tuple(axis for axis in sharded if axis not in k)
        axes = tuple(axis for axis in axes if axis not in taken)
        kept = tuple(axis for axis in axes if axis not in k)
        summed = tuple(axis for axis in axes if axis in k)
        if not fits(kept, x.codes.shape[1], x.scales.shape[1]):
            return (), ()
        # A sum divides what each device has: its axes come after the others.
        return kept, summed if kept + summed == axes and fits(axes, x.codes.shape[1]) else ()

    m, sum_to_m = rows(out_m, a_m, a, batch)
    n, sum_to_n = rows(out_n, b_n, b, batch + m + sum_to_m)
    return Partition(batch=batch, m=m, n=n, k=k, sum_to_m=sum_to_m, sum_to_n=sum_to_n)


@cache
def _partitioned(spec: BlockScaledSpec) -> Any:
    def multiply(a: Rows, b: Rows) -> jax.Array:
        return _multiply(a, b, spec)

    def partition(mesh: Mesh, operands: tuple[Rows, Rows], result: Any) -> tuple[Any, Any, Any, Any]:
        a, b = operands
        left, right, out = (array_mesh_axes(x, "block-scaled GEMM") for x in (a.codes, b.codes, result))
        parts = divide(dict(mesh.shape), operands, (left, right, out))

        def run(a: Rows, b: Rows) -> jax.Array:
            if parts.sum_to_n and not parts.sum_to_m:
                # Along its first dimension, XLA scatters a sum without transposing it first.
                return _sum(_multiply(b, a, spec), parts.sum_to_n, parts.sum_to_all).swapaxes(1, 2)
            product = _sum(_multiply(a, b, spec), parts.sum_to_m, parts.sum_to_all)
            if parts.sum_to_n:
                product = _sum(product.swapaxes(1, 2), parts.sum_to_n, ()).swapaxes(1, 2)
            return product

        rows = (
            _operand_shardings(mesh, a, (parts.batch, parts.m, parts.k)),
            _operand_shardings(mesh, b, (parts.batch, parts.n, parts.k)),
        )
        return mesh, run, _named_sharding(mesh, parts.result), rows

    partitioned: Any = custom_partitioning(multiply)
    partitioned.def_partition(partition, sharding_rule=_sharding_rule)
    return partitioned


def _sum(product: jax.Array, to_rows: MeshAxes, to_all: MeshAxes) -> jax.Array:
    """Sums over devices, in the dtype of the product."""
    if to_rows:
        product = lax.psum_scatter(product, to_rows, scatter_dimension=1, tiled=True)
    return lax.psum(product, to_all) if to_all else product


def _sharding_rule(mesh: Any, operands: Any, results: Any) -> str:
    """Shardy's rule: the dimension names of each array. Outer scales, if there are any, have few elements."""
    del mesh, results
    left, right = ["b m k", "b m k"], ["b n k", "b n k"]
    if len(operands) > len(left + right):
        left, right = [*left, "p q r", "p q r"], [*right, "s t u", "s t u"]
    return f"{', '.join(left + right)} -> b m n"


def _operand_shardings(mesh: Mesh, rows: Rows, axes: tuple[MeshAxes, MeshAxes, MeshAxes]) -> Rows:
    along, batch = _named_sharding(mesh, axes), _named_sharding(mesh, (axes[0], axes[1], ()))
    if rows.mantissa is None:
        return Rows(along, along)  # type: ignore[arg-type]  # shardings in place of arrays
    outer = batch if rows.mantissa.shape[1] > 1 else _named_sharding(mesh, (axes[0], (), ()))
    return Rows(along, along, outer, outer)  # type: ignore[arg-type]  # shardings in place of arrays


def _named_sharding(mesh: Mesh, axes: ArrayAxes) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(a or None for a in axes)))
