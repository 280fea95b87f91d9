"""`scaled_ragged_gemm` as a JAX primitive: one equation in a jaxpr. Its result has no derivative."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from policyc.jaxcore.define_primitive import DimSource, PrimitiveRules, Shape, bind, define
from policyc.numerics.backends import emulate
from policyc.numerics.flatten import OperandLayout, flatten_operand, unflatten_operands
from policyc.numerics.quantize.layout import Operand


def scaled_ragged_gemm(
    lhs: Operand, rhs: Operand, sizes: jax.Array, *, contracting: bool, out: Any
) -> jax.Array:
    """Products of groups of rows, as one equation. `emulate.scaled_ragged_gemm` describes the shapes."""
    (left, a), (right, b) = flatten_operand(lhs), flatten_operand(rhs)
    params = {"lhs": left, "rhs": right, "contracting": contracting, "out": jnp.dtype(out)}
    return bind(_SCALED_RAGGED_GEMM, sizes, *a, *b, **params)[0]


def _ragged(
    sizes: jax.Array,
    *arrays: jax.Array,
    lhs: OperandLayout,
    rhs: OperandLayout,
    contracting: bool,
    out: Any,
    value_dtype: Any = jnp.bfloat16,
) -> Sequence[jax.Array]:
    a, b = unflatten_operands(arrays, lhs, rhs)
    return [emulate.scaled_ragged_gemm(a, b, sizes, contracting, value_dtype).astype(out)]


def _ragged_shapes(
    sizes: Any, *avals: Any, lhs: OperandLayout, rhs: OperandLayout, contracting: bool, out: Any
) -> list[Shape]:
    a, b = avals[0], avals[lhs.array_count]
    if contracting:
        return [((sizes.shape[0], lhs.dim_size(a, 1), rhs.dim_size(b, 1)), out)]
    return [((lhs.dim_size(a, 0), rhs.dim_size(b, 2)), out)]


def _ragged_dim_sources(
    sizes: Any, *avals: Any, lhs: OperandLayout, rhs: OperandLayout, contracting: bool, out: Any
) -> list[list[DimSource]]:
    del sizes, avals, rhs, out
    # The sizes of the groups are operand 0.
    right = 1 + lhs.array_count
    return [[None, (1, -1), (right, -1)] if contracting else [(1, -2), (right, -1)]]


_SCALED_RAGGED_GEMM = define(
    "scaled_ragged_gemm",
    PrimitiveRules(
        body=_ragged,
        shapes=_ragged_shapes,
        dim_sources=_ragged_dim_sources,
        platform_bodies={"cpu": partial(_ragged, value_dtype=jnp.float32)},
    ),
    job="ragged gemm",
)
