"""XLA's block-scaled GEMM of two operands in rows, with a custom partitioning rule.

JAX's rule for `jax.nn.scaled_matmul` sums fp32 products over devices and gathers one scale for each block of each row.
Here each device applies the outer scales and rounds to the dtype of the result before the sum over devices, as other
GEMMs do. It gathers the scales of 2D tiles without repeating them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from policyc.jaxcore.primitives.lowering import merge_mapped_axes
from policyc.jaxcore.primitives.partition import Dim, Dims, PartitionRule, ShardIndex, partition
from policyc.numerics.quantize.reference.layout import repeat_axis
from policyc.numerics.quantize.reference.values import apply_outer_scale

DTYPES = {
    "nvfp4": (jnp.float4_e2m1fn, jnp.float8_e4m3fn),
    "mxfp8": (jnp.float8_e4m3fn, jnp.float8_e8m0fnu),
}
"""The dtypes of elements and of block scales."""


class Rows(NamedTuple):
    """An operand as (batch, rows, contracted).

    `codes` and `scales` are bytes. `scales` has one row per row of codes or per row of tiles. The outer scale is
    `mantissa` * 2**`exponent`, both (batch, rows or 1, 1), or None.
    """

    codes: jax.Array
    scales: jax.Array
    mantissa: jax.Array | None = None
    exponent: jax.Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockScaledSpec:
    """Static parameters of a block-scaled GEMM.

    `native` says whether to call XLA's block-scaled GEMM, which needs CUDA. `divides_itself` says whether a
    partitioning rule divides it over devices. Without one, it cannot be native.
    """

    format: str
    out: Any
    native: bool
    divides_itself: bool = True


def multiply_rows(a: Rows, b: Rows, spec: BlockScaledSpec) -> jax.Array:
    """The product (batch, rows of a, rows of b), with the outer scales applied, in the dtype `spec.out`."""
    product: jax.Array = _multiplier(spec)(a, b)
    return product


@cache
def _multiplier(spec: BlockScaledSpec) -> Callable[[Rows, Rows], jax.Array]:
    return merge_mapped_axes(partial(_multiply_divided, spec=spec))


# ---- on one device


def as_values(rows: Rows, format: str) -> tuple[jax.Array, jax.Array]:
    """Codes and scales in XLA's dtypes, with one scale for each block of each row."""
    element, scale = DTYPES[format]
    values = lax.bitcast_convert_type(rows.codes, element).reshape(*rows.codes.shape[:2], -1)
    return values, lax.bitcast_convert_type(row_scales(rows), scale)


def row_scales(rows: Rows) -> jax.Array:
    """The bytes of the block scales, one for each block of each row."""
    tile = rows.codes.shape[1] // rows.scales.shape[1]
    return repeat_axis(rows.scales, -2, tile) if tile > 1 else rows.scales


def _multiply(a: Rows, b: Rows, spec: BlockScaledSpec) -> jax.Array:
    (left, left_scales), (right, right_scales) = as_values(a, spec.format), as_values(b, spec.format)
    # The product stays fp32 if outer scales are applied to it afterwards.
    is_scaled = a.mantissa is not None or b.mantissa is not None
    dtype = spec.out if not is_scaled and spec.out in (jnp.bfloat16, jnp.float32) else jnp.float32
    multiply = jax.nn.scaled_matmul if spec.native else _multiply_values
    product = multiply(left, right, left_scales, right_scales, dtype)
    return _apply_outer_scales(product, a, b).astype(spec.out)


def _multiply_values(
    a: jax.Array, b: jax.Array, a_scales: jax.Array, b_scales: jax.Array, out: Any
) -> jax.Array:
    """Fallback for `jax.nn.scaled_matmul` off CUDA. Computes what XLA does on GPUs without block-scaled GEMMs."""

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


# ---- on several devices


def _multiply_divided(a: Rows, b: Rows, spec: BlockScaledSpec) -> jax.Array:
    """The product, partitioned over devices."""
    if not spec.divides_itself:
        return _multiply(a, b, spec)
    arrays, structure = jax.tree.flatten((a, b))

    def run(index: ShardIndex, *shards: jax.Array) -> tuple[jax.Array]:
        left, right = jax.tree.unflatten(structure, shards)
        if index.first_scattered() == 2:
            # Computed transposed, so that XLA need not transpose it before it scatters the sum along its columns.
            return (_multiply(right, left, spec).swapaxes(1, 2),)
        return (_multiply(left, right, spec),)

    return partition(run, gemm_rule(a, b))(*arrays)[0]


def gemm_rule(a: Rows, b: Rows) -> PartitionRule:
    """Partitioning rule: rows are divided in whole tiles, the contracted dimension in whole blocks."""
    (left, left_arrays), (right, right_arrays) = (_row_dims(x, name) for x, name in ((a, "m"), (b, "n")))
    return PartitionRule(
        name="block-scaled GEMM",
        operands=(*left_arrays, *right_arrays),
        results=((("batch", 1), left, right),),
        xla_scatters=True,
    )


def _row_dims(rows: Rows, name: str) -> tuple[Dim, tuple[Dims, ...]]:
    """The dimension of the rows of an operand in the result, and the dimensions of its arrays."""
    (_, count, length), (_, scale_rows, blocks) = rows.codes.shape, rows.scales.shape
    dim = name, count // scale_rows
    codes = ("batch", 1), dim, ("contracted", length // blocks)
    scales = ("batch", 1), (name, 1), ("contracted", 1)
    if rows.mantissa is None:
        return dim, (codes, scales)
    # One outer scale for all rows, or one per row.
    scale_dim = dim if rows.mantissa.shape[1] == count else (f"{name}_scale", 1)
    outer = ("batch", 1), scale_dim, (f"{name}_one", 1)
    return dim, (codes, scales, outer, outer)
