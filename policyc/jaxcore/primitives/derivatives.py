"""Which results of an equation depend differentiably on which operands, according to JAX's derivative rules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import and_
from typing import Any

import jax.numpy as jnp
from jax.core import AbstractValue
from jax.extend.core import JaxprEqn, Literal, Primitive

from policyc.jaxcore.internals import ad
from policyc.jaxcore.primitives.primitive_table import PRIMITIVES, rule_of

_CONSTANT = frozenset(name for name, rule in PRIMITIVES.items() if rule.derivative == "none")
"""Primitives without a derivative on real numbers."""


def is_float(aval: AbstractValue) -> bool:
    """Whether values of this type can have a derivative."""
    return _is_inexact(getattr(aval, "dtype", None))


@cache  # `issubdtype` is slow: it searches JAX's own types
def _is_inexact(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _is_complex(aval: AbstractValue) -> bool:
    return getattr(getattr(aval, "dtype", None), "kind", "") == "c"


def active_results(eqn: JaxprEqn, active: Sequence[bool]) -> list[bool]:
    """Which results have a derivative, given which operands do. Active operands must be of differentiable types."""
    results = eqn.outvars
    if True in active:
        rules = _operand_rules(eqn)
        flows = active if rules is None else list(map(and_, active, rules))
        if True in flows:
            if len(results) > 1 and _is_one_to_one(eqn, "per operand"):
                return [f and is_float(v.aval) for f, v in zip(flows, results, strict=True)]
            return [is_float(v.aval) for v in results]
    return [False] * len(results)


def operands_with_cotangent(eqn: JaxprEqn, results: Sequence[bool]) -> list[bool]:
    """Which operands get a cotangent, provided that they have a derivative, given which results get one."""
    differentiable = differentiable_operands(eqn)
    if len(results) > 1 and _is_one_to_one(eqn, "per operand", "cotangent per operand"):
        return [r and d for r, d in zip(results, differentiable, strict=True)]
    return differentiable if any(results) else [False] * len(differentiable)


def _is_one_to_one(eqn: JaxprEqn, *derivatives: str) -> bool:
    """Whether an equation has as many results as operands, and its primitive has one of these kinds of `derivative`."""
    return len(eqn.invars) == len(eqn.outvars) and rule_of(eqn).derivative in derivatives


def differentiable_operands(eqn: JaxprEqn) -> list[bool]:
    """Which operands are variables of a differentiable type and have a derivative rule."""
    by_type = [type(a) is not Literal and _is_inexact(getattr(a.aval, "dtype", None)) for a in eqn.invars]
    rules = _operand_rules(eqn)
    return by_type if rules is None else list(map(and_, by_type, rules))


def _operand_rules(eqn: JaxprEqn) -> Sequence[bool] | None:
    """Which operands have a derivative rule; None if all do. Rounding, comparing and `stop_gradient` have none."""
    name, has_rule = eqn.primitive.name, _has_rule(eqn.primitive)
    if has_rule is None and name not in _CONSTANT:  # most primitives
        return None
    if name in _CONSTANT and not _is_complex(eqn.invars[0].aval):
        has_rule = ()
    if has_rule == ():
        return [False] * len(eqn.invars)
    return None if has_rule is None or len(has_rule) != len(eqn.invars) else has_rule


@cache  # called twice per equation
def _has_rule(primitive: Primitive) -> tuple[bool, ...] | None:
    """Which operands of a primitive have a derivative rule; empty if none does, None if all do or share one rule."""
    rule: Any = ad.primitive_jvps.get(primitive)
    function = getattr(rule, "func", None)
    if function is ad.zero_jvp:
        return ()
    if function in (ad.standard_jvp, ad.standard_jvp2):
        has_rule = tuple(r is not None for r in rule.args[0])
        return None if all(has_rule) else has_rule
    return None
