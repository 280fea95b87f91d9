"""Dimension numbers of a product, and an equivalent product in which every block runs along a single dimension."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import jax

from policyc.language.formats import FORMATS
from policyc.language.recipes import Recipe

DimensionNumbers = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]
"""As in `lax.dot_general`: the contracted dimensions of lhs and rhs, then their batch dimensions."""


def as_dimension_numbers(numbers: Any) -> DimensionNumbers:
    """Dimension numbers as tuples of integers."""
    (lc, rc), (lb, rb) = numbers
    return (tuple(map(int, lc)), tuple(map(int, rc))), (tuple(map(int, lb)), tuple(map(int, rb)))


def free_dims(ndim: int, *taken: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions that are in none of the groups."""
    return tuple(i for i in range(ndim) if all(i not in group for group in taken))


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalDot:
    """An equivalent product in which every block runs along a single dimension.

    Attributes:
      dims: its dimension numbers.
      result_shape: the shape of the result of the original product.
      lhs_groups, rhs_groups: the dimensions of each original operand in three groups. The batch dimensions come first
        and stay separate. The other two groups are each merged into one dimension. None if nothing is merged.
    """

    dims: DimensionNumbers
    result_shape: tuple[int, ...]
    lhs_groups: tuple[tuple[int, ...], ...] | None = None
    rhs_groups: tuple[tuple[int, ...], ...] | None = None

    def convert_lhs(self, x: jax.Array) -> jax.Array:
        return _merge_dims(x, self.lhs_groups)

    def convert_rhs(self, x: jax.Array) -> jax.Array:
        return _merge_dims(x, self.rhs_groups)


def _merge_dims(x: jax.Array, groups: tuple[tuple[int, ...], ...] | None) -> jax.Array:
    if groups is None:
        return x
    batch, *merged = groups
    sizes = [prod(x.shape[i] for i in group) for group in merged]
    order = [i for group in groups for i in group]
    return x.transpose(order).reshape(*(x.shape[i] for i in batch), *sizes)


def canonicalize(
    lhs: tuple[int, ...], rhs: tuple[int, ...], dims: DimensionNumbers, recipe: Recipe
) -> CanonicalDot:
    """The canonical form of a product of operands of these shapes.

    In each GEMM, blocks run along the contracted dimensions as if these were a single one. If the last of them consists
    of whole blocks, no reshape is needed, which matters if the dimensions are sharded. Otherwise they are merged. A
    missing free dimension is added.
    """
    (lc, rc), (lb, rb) = dims
    lf, rf = free_dims(len(lhs), lc, lb), free_dims(len(rhs), rc, rb)
    result_shape = tuple(lhs[i] for i in (*lb, *lf)) + tuple(rhs[i] for i in rf)
    unit = max(max(FORMATS[t.format].block, t.rht, 1) for t in recipe.treatments)

    def must_merge(shape: tuple[int, ...], group: tuple[int, ...]) -> bool:
        sizes = [shape[i] for i in group]
        return not sizes or (any(s > 1 for s in sizes[:-1]) and sizes[-1] % unit != 0)

    if not (must_merge(lhs, lc) or must_merge(lhs, lf) or must_merge(rhs, rf)):
        return CanonicalDot(dims=dims, result_shape=result_shape)
    n = len(lb)
    batch = tuple(range(n))
    return CanonicalDot(
        dims=(((n + 1,), (n,)), (batch, batch)),
        result_shape=result_shape,
        lhs_groups=(lb, lf, lc),
        rhs_groups=(rb, rc, rf),
    )
