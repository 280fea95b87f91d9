"""What JAX's derivative rules say of one equation: which results depend differentiably on which operands."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.core import AbstractValue
from jax.extend.core import JaxprEqn, Literal

from policyc.jaxcore import jaxprs
from policyc.jaxcore.internals import ad
from policyc.jaxcore.versions import BARRIERS_SKIP_ZERO_TANGENTS

_RESULT_PER_OPERAND = frozenset({"psum", "psum_invariant", "pmax", "pmin", "sort"})
"""Primitives whose n-th result depends differentiably on their n-th operand only."""
if BARRIERS_SKIP_ZERO_TANGENTS:
    _RESULT_PER_OPERAND |= {"optimization_barrier"}

_COTANGENT_PER_OPERAND = _RESULT_PER_OPERAND | {"device_put"}
"""Primitives whose n-th operand gets a cotangent from their n-th result only. If one operand of `device_put` has a
derivative, all its results have one."""

_CONSTANT_ON_REALS = frozenset({"stop_gradient", "sign"})
"""Primitives without a derivative on real numbers whose rule does not show it. (Since JAX 0.12, `sign` has a rule, for
complex numbers.)"""


def is_float(aval: AbstractValue) -> bool:
    """Can it have a derivative by its type?"""
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)


def _is_complex(aval: AbstractValue) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.complexfloating)


def active_results(eqn: JaxprEqn, active: Sequence[bool]) -> list[bool]:
    """Which results have a derivative, if these operands have one."""
    flows = [a and d for a, d in zip(active, _differentiable_operands(eqn), strict=True)]
    if not any(flows):
        return [False] * len(eqn.outvars)
    if _is_one_to_one(eqn, _RESULT_PER_OPERAND):
        return [f and is_float(v.aval) for f, v in zip(flows, eqn.outvars, strict=True)]
    return [is_float(v.aval) for v in eqn.outvars]


def operands_with_cotangent(eqn: JaxprEqn, results: Sequence[bool]) -> list[bool]:
    """Which operands get a cotangent if they have a derivative, and these results get one."""
    differentiable = _differentiable_operands(eqn)
    if _is_one_to_one(eqn, _COTANGENT_PER_OPERAND):
        return [r and d for r, d in zip(results, differentiable, strict=True)]
    return [any(results) and d for d in differentiable]


def _is_one_to_one(eqn: JaxprEqn, primitives: frozenset[str]) -> bool:
    """Is it one of these primitives, with as many results as operands?"""
    return jaxprs.primitive_name(eqn) in primitives and len(eqn.invars) == len(eqn.outvars)


def _differentiable_operands(eqn: JaxprEqn) -> list[bool]:
    """Which operands have a derivative rule. Rounding, comparing and `stop_gradient` have none."""
    rule: Any = ad.primitive_jvps.get(eqn.primitive)
    is_constant = jaxprs.primitive_name(eqn) in _CONSTANT_ON_REALS and not _is_complex(eqn.invars[0].aval)
    if is_constant or getattr(rule, "func", None) is ad.zero_jvp:
        return [False] * len(eqn.invars)
    by_type = [not isinstance(a, Literal) and is_float(a.aval) for a in eqn.invars]
    if isinstance(rule, partial) and rule.func in (ad.standard_jvp, ad.standard_jvp2):
        rules = rule.args[0]
        if len(rules) == len(by_type):
            return [d and r is not None for d, r in zip(by_type, rules, strict=True)]
    return by_type
