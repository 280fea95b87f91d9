"""Finds which GEMMs get a cotangent, in a backward pass over a loss from its differentiated results.

The forward pass of `analysis` finds the variables that have a tangent. Together they tell which backward products the
gradient has: none upstream of `stop_gradient`, rounding or comparisons, and none for auxiliary results.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.containers import CONTAINERS, container_of
from policyc.jaxcore.jaxprs.reading import AnyJaxpr
from policyc.jaxcore.jaxprs.transform import Address
from policyc.jaxcore.primitives.derivatives import differentiable_operands, is_float, operands_with_cotangent
from policyc.jaxcore.primitives.primitive_table import PRIMITIVES


def products_with_cotangent(jaxpr: ClosedJaxpr, differentiated: Sequence[bool]) -> set[Address]:
    """The addresses of the products whose result gets a cotangent, provided that it has a derivative.

    Equations without a row in `PRIMITIVES` are included, because they may be products. `differentiated` says which
    results of the loss are differentiated.
    """
    activity = _BackwardActivity()
    activity.run(jaxpr, differentiated, (), everything=_has_references(jaxpr))
    return activity.addresses


def _has_references(jaxpr: AnyJaxpr) -> bool:
    """Whether a loss uses references. Values that pass through a reference are not followed."""
    opened = jaxprs.open_jaxpr(jaxpr)
    if any(jaxprs.is_reference(v.aval) for v in (*opened.invars, *opened.constvars)):
        return True
    for eqn in opened.eqns:
        if eqn.effects and any(jaxprs.is_reference(a.aval) for a in eqn.invars):
            return True
        if eqn.primitive.name in CONTAINERS and any(_has_references(s.jaxpr) for s in jaxprs.sub_jaxprs(eqn)):
            return True
    return False


class _BackwardActivity:
    """Walks jaxprs backwards, and records which products get a cotangent."""

    def __init__(self) -> None:
        self.addresses: set[Address] = set()

    def run(
        self, jaxpr: AnyJaxpr, results: Sequence[bool], address: Address, *, everything: bool = False
    ) -> list[bool]:
        """Returns which inputs get a cotangent, given which results do. With `everything`, all variables do."""
        opened = jaxprs.open_jaxpr(jaxpr)
        with_cotangent: set[Var] = set()

        def add(atoms: Sequence[Any], get_cotangent: Sequence[bool]) -> None:
            pairs = zip(atoms, get_cotangent, strict=True)
            with_cotangent.update(
                a for a, gets in pairs if gets and not isinstance(a, Literal) and is_float(a.aval)
            )

        add(opened.outvars, results)
        for number, eqn in reversed(list(enumerate(opened.eqns))):
            rule = PRIMITIVES.get(eqn.primitive.name)
            if rule is not None and not everything and with_cotangent.isdisjoint(eqn.outvars):
                continue
            operands: list[Any] = eqn.invars
            if rule is not None and rule.weight == "product":
                self.addresses.add((*address, number))
            if rule is not None and len(eqn.outvars) == 1:  # most equations
                with_cotangent.update(itertools.compress(operands, differentiable_operands(eqn)))
                continue
            eqn_results = [everything or v in with_cotangent for v in eqn.outvars]
            if rule is None:
                add(operands, self._equation(eqn, eqn_results, (*address, number), everything))
            else:
                with_cotangent.update(itertools.compress(operands, operands_with_cotangent(eqn, eqn_results)))
        return [everything or v in with_cotangent for v in opened.invars]

    def _equation(
        self, eqn: JaxprEqn, results: Sequence[bool], address: Address, everything: bool
    ) -> Sequence[bool]:
        if any(results):
            self.addresses.add(address)
        container = container_of(eqn)
        enter = self._enter(eqn, address, everything)
        if container is not None:
            return container.propagate_back(eqn, results, enter)
        for number, sub in enumerate(jaxprs.sub_jaxprs(eqn)):
            # A container that the compiler does not enter. Its results need not match those of the jaxpr inside.
            count = len(jaxprs.open_jaxpr(sub.jaxpr).outvars)
            if count == len(results):
                enter(number, results)
            else:
                self.run(sub.jaxpr, [any(results)] * count, (*address, number), everything=any(results))
        return operands_with_cotangent(eqn, results)

    def _enter(
        self, eqn: JaxprEqn, address: Address, everything: bool
    ) -> Callable[[int, Sequence[bool]], list[bool]]:
        bodies = [sub.jaxpr for sub in jaxprs.sub_jaxprs(eqn)]
        return lambda number, results: self.run(
            bodies[number], results, (*address, number), everything=everything
        )
