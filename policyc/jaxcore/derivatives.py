"""What JAX's derivative rules say of one equation: which results depend differentiably on which operands."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import and_
from typing import Any

import jax.numpy as jnp
from jax.core import AbstractValue
from jax.extend.core import JaxprEqn, Literal, Primitive

from policyc.jaxcore.internals import ad
from policyc.jaxcore.primitives import PRIMITIVES, rule_of

_CONSTANT = frozenset(name for name, rule in PRIMITIVES.items() if rule.derivative == "none")
"""Primitives without a derivative on real numbers."""


def is_float(aval: AbstractValue) -> bool:
    """Can it have a derivative by its type?"""
    return _is_inexact(getattr(aval, "dtype", None))


@cache  # JAX looks through its own types each time
def _is_inexact(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _is_complex(aval: AbstractValue) -> bool:
    return getattr(getattr(aval, "dtype", None), "kind", "") == "c"


def active_results(eqn: JaxprEqn, active: Sequence[bool]) -> list[bool]:
    """Which results have a derivative, if these operands, which are of types that can, have one."""
    rules = _operand_rules(eqn)
    flows = active if rules is None else list(map(and_, active, rules))
    if True not in flows:
        return [False] * len(eqn.outvars)
    if len(eqn.outvars) > 1 and _is_one_to_one(eqn, "per operand"):
        return [f and is_float(v.aval) for f, v in zip(flows, eqn.outvars, strict=True)]
    return [is_float(v.aval) for v in eqn.outvars]


def operands_with_cotangent(eqn: JaxprEqn, results: Sequence[bool]) -> list[bool]:
    """Which operands get a cotangent if they have a derivative, and these results get one."""
    differentiable = _differentiable_operands(eqn)
    if len(results) == 1:
        return differentiable if results[0] else [False] * len(differentiable)
    if _is_one_to_one(eqn, "per operand", "cotangent per operand"):
        return [r and d for r, d in zip(results, differentiable, strict=True)]
    return differentiable if any(results) else [False] * len(differentiable)


def _is_one_to_one(eqn: JaxprEqn, *derivatives: str) -> bool:
    """Is it a primitive with such a derivative, with as many results as operands?"""
    return len(eqn.invars) == len(eqn.outvars) and rule_of(eqn).derivative in derivatives


def _differentiable_operands(eqn: JaxprEqn) -> list[bool]:
    """Which operands have a derivative rule, and a type that can have a derivative."""
    by_type = [type(a) is not Literal and is_float(a.aval) for a in eqn.invars]
    rules = _operand_rules(eqn)
    return by_type if rules is None else list(map(and_, by_type, rules))


def _operand_rules(eqn: JaxprEqn) -> Sequence[bool] | None:
    """Which operands have a derivative rule, None if all have. Rounding, comparing and `stop_gradient` have none."""
    has_rule = _has_rule(eqn.primitive)
    if eqn.primitive.name in _CONSTANT and not _is_complex(eqn.invars[0].aval):
        has_rule = ()
    if has_rule == ():
        return [False] * len(eqn.invars)
    return None if has_rule is None or len(has_rule) != len(eqn.invars) else has_rule


@cache  # each equation asks twice
def _has_rule(primitive: Primitive) -> tuple[bool, ...] | None:
    """Which operands of a primitive have a derivative rule, empty if none has. None if all have, or share one."""
    rule: Any = ad.primitive_jvps.get(primitive)
    function = getattr(rule, "func", None)
    if function is ad.zero_jvp:
        return ()
    if function in (ad.standard_jvp, ad.standard_jvp2):
        has_rule = tuple(r is not None for r in rule.args[0])
        return None if all(has_rule) else has_rule
    return None
