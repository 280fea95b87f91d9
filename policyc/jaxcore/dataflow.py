"""How values flow through containers: what an analysis defines, and the fixed points of loops.

Forwards, values of any kind flow from operands to results. Backwards, it is whether a value gets a cotangent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from policyc.jaxcore import jaxprs
from policyc.jaxcore.jaxprs import AnyJaxpr, Atom

V = TypeVar("V")

Enter = Callable[[int, Sequence[V]], list[V]]
"""Propagates values through a jaxpr of an equation: (its number, the values of its inputs) -> those of its results."""

EnterBackwards = Callable[[int, Sequence[bool]], list[bool]]
"""Goes backwards through a jaxpr of an equation: (its number, which results get a cotangent) -> which inputs do."""


@dataclass(frozen=True, slots=True)
class CarryChange:
    """What an iteration does to a carry: nothing, or it adds a constant, or something else (both unset)."""

    invariant: bool = False
    increment: int | None = None


class Domain(Protocol[V]):
    """What an analysis knows of a value, and how that passes through branches and loops."""

    def join(self, values: Sequence[V]) -> V:
        """The value after a `cond` whose branches give these."""

    def enter_loop(self, value: V, change: CarryChange) -> V:
        """The value of a carry inside a loop, given how an iteration changes it."""

    def may_change(self, carry: Sequence[V], others: Sequence[V]) -> bool:
        """Can another iteration change the carry? `others` are the values of the loop's other inputs."""

    def widen(self, carry: V, result: V) -> V:
        """The value of a carry after one more iteration."""

    def leave_loop(self, result: V, carry: V | None) -> V:
        """The value behind a loop: of a carry, or (without `carry`) of the stacked results of a scan."""

    def slice_inputs(self, eqn: JaxprEqn, values: Sequence[V]) -> list[V]:
        """The values of the stacked inputs of a scan in one of its iterations."""

    def split_over_devices(self, eqn: JaxprEqn, values: Sequence[V]) -> list[V]:
        """The values of the operands of a shard_map on one device."""


# ---- loops


def settle_carry(
    body: AnyJaxpr,
    init: Sequence[V],
    consts: Sequence[V],
    xs: Sequence[V],
    enter_body: Callable[[Sequence[V]], list[V]],
    domain: Domain[V],
) -> list[V]:
    """The values of the carry in any iteration: the fixed point of the loop's body."""
    opened = jaxprs.open_jaxpr(body)
    invars = opened.invars[len(consts) : len(consts) + len(init)]
    changes = [_carry_change(opened, var, out) for var, out in zip(invars, opened.outvars, strict=False)]
    carry = [domain.enter_loop(value, change) for value, change in zip(init, changes, strict=True)]
    while domain.may_change(carry, [*consts, *xs]):
        results = enter_body([*consts, *carry, *xs])
        widened = [domain.widen(c, r) for c, r in zip(carry, results, strict=False)]
        if widened == carry:
            break
        carry = widened
    return carry


def _carry_change(body: Jaxpr, var: Var, out: Atom) -> CarryChange:
    if var is out:
        return CarryChange(invariant=True)
    producer = next((e for e in body.eqns if out in e.outvars), None)
    if producer is None or jaxprs.primitive_name(producer) != "add" or var not in producer.invars:
        return CarryChange()
    steps = [np.asarray(a.val) for a in producer.invars if isinstance(a, Literal)]
    if len(steps) != 1 or steps[0].ndim or steps[0].dtype.kind not in "iu":
        return CarryChange()
    return CarryChange(increment=int(steps[0]))


def settle_cotangents(
    const_count: int,
    carry: Sequence[bool],
    stacked: Sequence[bool],
    enter_body: Callable[[Sequence[bool]], list[bool]],
) -> list[bool]:
    """Which inputs of a loop get a cotangent: its constants, its carry, and what a scan slices.

    Args:
      const_count: how many constants the body has.
      carry, stacked: which results of the loop get a cotangent.
      enter_body: goes backwards through the body.
    """
    carry = list(carry)
    while True:
        inputs = enter_body([*carry, *stacked])
        end = const_count + len(carry)
        widened = [a or b for a, b in zip(carry, inputs[const_count:end], strict=True)]
        if widened == carry:
            # JAX differentiates the first value of such a carry even if no iteration reads it.
            return [*inputs[:const_count], *carry, *inputs[end:]]
        carry = widened
