"""Describes the matrix product of an equation: its sizes, its weight, and whether the compiler can change it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from policyc.compiler.sites.paths import DATA_NAMES
from policyc.compiler.weights.provenance.graph import Source, is_lost, parameters_of
from policyc.compiler.weights.var_info import VarInfo
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.reading import shape_of
from policyc.numerics.products import Weight

GEMMS = frozenset({"dot_general", "ragged_dot_general", "ragged_dot"})
"""The products that the compiler rewrites."""

OPAQUE_PRODUCTS = {
    "scaled_dot": "jax.lax.scaled_dot, which does its own quantization",
    "scaled_matmul": "jax.nn.scaled_matmul, which does its own quantization",
    "scaled_matmul_wrapper": "jax.nn.scaled_matmul, which does its own quantization",
}
"""Matrix products that the compiler does not rewrite, described for messages. Their sites are opaque."""


_FLOAT64 = np.dtype("float64")


def operand_dtype(atom: Any) -> Any:
    return atom.aval.dtype


@cache  # `issubdtype` is slow: it searches JAX's own types
def is_floating(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def pick_weight(lhs: VarInfo, rhs: VarInfo) -> Weight:
    """Which operand is the weight; None if neither is. If both come from parameters, it is the one less likely data.

    Rows that are looked up are a weight only if the other operand is an activation: a product of two lookups, or of
    a lookup and a constant, has none.
    """
    if lhs.is_lookup and rhs.is_lookup:
        return None
    if any(a.is_lookup and b.source is None and b.is_constant for a, b in ((lhs, rhs), (rhs, lhs))):
        return None
    if lhs.source is not None and rhs.source is not None and lhs.is_lookup != rhs.is_lookup:
        return "rhs" if lhs.is_lookup else "lhs"
    if lhs.source is None or rhs.source is None:
        return "rhs" if rhs.source is not None else "lhs" if lhs.source is not None else None

    def unlikely(info: VarInfo) -> tuple[bool, ...]:
        assert info.source is not None
        parameters = list(parameters_of(info.source))
        named_as_data = all(p.path and p.path[0].text.casefold() in DATA_NAMES for p in parameters)
        return info.is_modified, is_lost(info.source), all(p.is_frozen for p in parameters), named_as_data

    return "lhs" if unlikely(lhs) < unlikely(rhs) else "rhs"


def why_opaque(eqn: JaxprEqn, dtypes: Sequence[Any]) -> str:
    """Why the compiler cannot change a GEMM of this form, regardless of its context; empty if it can."""
    name = jaxprs.primitive_name(eqn)
    if name in OPAQUE_PRODUCTS:
        return OPAQUE_PRODUCTS[name]
    if _FLOAT64 in dtypes:
        return "a computation in float64, for which there is no recipe"
    if not _is_plain_ragged(eqn):
        return "a ragged product in a form that has no quantized version"
    return ""


def matrix_sources(eqn: JaxprEqn, infos: list[VarInfo]) -> tuple[Source, ...]:
    """The sources of a container's operands that are laid out from parameters, except vectors and looked-up rows."""
    pairs = zip(eqn.invars, infos, strict=True)
    return tuple(
        i.source for a, i in pairs if len(shape_of(a)) > 1 and i.source is not None and not i.is_lookup
    )


def _is_plain_ragged(eqn: JaxprEqn) -> bool:
    """Whether it is not ragged, or ragged in the common form: rows in groups, with one matrix per group."""
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    if numbers is None:
        return True
    dims = tuple(tuple(map(tuple, pair)) for pair in numbers.dot_dimension_numbers)
    groups = (tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions))
    offset = eqn.params.get("group_offset")
    return dims == (((1,), (1,)), ((), ())) and groups == ((0,), (0,)) and offset is None


def _dimension_numbers(eqn: JaxprEqn) -> Any:
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    numbers = ragged.dot_dimension_numbers if ragged else eqn.params.get("dimension_numbers")
    # jax.nn.scaled_matmul has no dimension numbers: it multiplies (batch, m, k) by (batch, n, k).
    return (((2,), (2,)), ((0,), (0,))) if numbers is None else numbers


def batch_dims(eqn: JaxprEqn, weight: Weight) -> tuple[int, ...]:
    """The dimensions of the weight along which one product reads several matrices."""
    _, (lhs, rhs) = _dimension_numbers(eqn)
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    groups = tuple(ragged.rhs_group_dimensions) if ragged and weight != "lhs" else ()
    return (*map(int, lhs if weight == "lhs" else rhs), *groups)


def gemm_sizes(eqn: JaxprEqn, weight: Weight) -> tuple[int, int, int, int] | None:
    """(batch, m, n, k) as in `y = x W`; None if it contracts nothing or is empty."""
    lhs, rhs = (shape_of(a) for a in eqn.invars[:2])
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    (lc, rc), (lb, rb) = _dimension_numbers(eqn)
    not_left, not_right = {*lc, *lb}, {*rc, *rb, *(ragged.rhs_group_dimensions if ragged else ())}
    k, batch = math.prod([lhs[i] for i in lc]), math.prod([lhs[i] for i in lb])
    left = math.prod([d for i, d in enumerate(lhs) if i not in not_left])
    right = math.prod([d for i, d in enumerate(rhs) if i not in not_right])
    if not lc or k <= 1 or not (batch and left and right):
        return None
    return (batch, right, left, k) if weight == "lhs" else (batch, left, right, k)
