"""How values flow through containers: the interface of an analysis, and the fixed points of loops.

Forwards, values of any type flow from operands to results. Backwards, the only value is whether a variable gets a
cotangent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from jax.extend.core import JaxprEqn

from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.reading import AnyJaxpr

V = TypeVar("V")

Enter = Callable[[int, Sequence[V]], list[V]]
"""Propagates values through a jaxpr of an equation: (its number, values of its inputs) -> values of its results."""

EnterBackwards = Callable[[int, Sequence[bool]], list[bool]]
"""Propagates backwards through a jaxpr of an equation: (its number, which results get a cotangent) -> which inputs do.
"""


class Domain(Protocol[V]):
    """How the values of an analysis (what it knows about variables) pass through branches and loops."""

    def join(self, values: Sequence[V]) -> V:
        """The value of a result of a `cond`, from its values in the branches."""

    def enter_loop(self, body: AnyJaxpr, consts: Sequence[V], init: Sequence[V], xs: Sequence[V]) -> list[V]:
        """The values of the carry inside a loop, before any iteration changes them; `init` are those outside."""

    def may_change(self, carry: Sequence[V], others: Sequence[V]) -> bool:
        """Whether another iteration can change the carry. `others` are the values of the loop's other inputs."""

    def widen(self, carry: V, result: V) -> V:
        """The value of a carry after one more iteration."""

    def leave_loop(self, result: V, carry: V | None) -> V:
        """The value after a loop of a carry, or, if `carry` is None, of a stacked result of a scan."""

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
    carry = domain.enter_loop(body, consts, init, xs)
    while domain.may_change(carry, [*consts, *xs]):
        results = enter_body([*consts, *carry, *xs])
        widened = [domain.widen(c, r) for c, r in zip(carry, results, strict=False)]
        if widened == carry:
            break
        carry = widened
    return carry


def unchanged_carries(body: AnyJaxpr, const_count: int, carry_count: int) -> list[bool]:
    """Which carries an iteration returns unchanged."""
    opened = jaxprs.open_jaxpr(body)
    invars = opened.invars[const_count : const_count + carry_count]
    return [var is out for var, out in zip(invars, opened.outvars, strict=False)]


def settle_cotangents(
    const_count: int,
    carry: Sequence[bool],
    stacked: Sequence[bool],
    enter_body: Callable[[Sequence[bool]], list[bool]],
) -> list[bool]:
    """Which inputs of a loop get a cotangent: constants, carry and stacked inputs, in this order.

    Args:
      const_count: how many constants the body has.
      carry, stacked: which results of the loop get a cotangent.
      enter_body: propagates backwards through the body.
    """
    carry = list(carry)
    while True:
        inputs = enter_body([*carry, *stacked])
        end = const_count + len(carry)
        widened = [a or b for a, b in zip(carry, inputs[const_count:end], strict=True)]
        if widened == carry:
            # JAX differentiates the initial value of such a carry even if no iteration reads it.
            return [*inputs[:const_count], *carry, *inputs[end:]]
        carry = widened
