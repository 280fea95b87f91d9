"""Integers that are known before a program runs, for each iteration of the loops around them, such as loop counters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.extend.core import JaxprEqn, Literal, Var

from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.containers import Container, container_of
from policyc.jaxcore.jaxprs.reading import AnyJaxpr
from policyc.jaxcore.jaxprs.transform import Address
from policyc.jaxcore.primitives.primitive_table import rule_of
from policyc.jaxcore.primitives.regions import MOST_INDICES, Unknown

Iterations = Mapping[Address, int]
"""The iteration of each loop, by the loop's address: an index into its stacked inputs. For a shard_map: the device."""

_MOST_CONSTANTS = 1 << 16  # elements of a constant array of indices
_NOT_KNOWN = "its index is computed from values that are not known before the program runs"


@dataclass(frozen=True, slots=True, eq=False)
class Integers:
    """An integer variable whose value depends on nothing but the iterations of the loops around it.

    `unknown` says why policyc does not evaluate it, in which case `evaluate` raises `Unknown`; empty if it does.
    """

    evaluate: Callable[[Iterations], np.ndarray]
    loops: frozenset[Address] = frozenset()
    unknown: str = ""


def evaluate_index(integers: Integers | None, iterations: Iterations) -> np.ndarray:
    """The value of an index in an iteration. Raises `Unknown` if it is not known."""
    if integers is None:
        raise Unknown(_NOT_KNOWN)
    return integers.evaluate(iterations)


def known_integers(integers: Integers | None) -> Integers | None:
    """The same integers; None if policyc does not evaluate them."""
    return None if integers is None or integers.unknown else integers


@cache  # most literals of a loss need one
def not_evaluated(reason: str) -> Integers:
    def evaluate(_: Iterations) -> np.ndarray:
        raise Unknown(reason)

    return Integers(evaluate, unknown=reason)


def _computed(compute: Callable[[Iterations], np.ndarray], loops: frozenset[Address]) -> Integers:
    """Integers that cache their last value.

    Without the cache, a value that several equations read would be computed once for each path to it. The number of
    paths is exponential.
    """
    addresses = tuple(loops)
    last: list[tuple[tuple[int, ...], np.ndarray]] = []

    def evaluate(iterations: Iterations) -> np.ndarray:
        key = tuple(iterations[address] for address in addresses)
        if not last or last[0][0] != key:
            last[:] = [(key, compute(iterations))]
        return last[0][1]

    return Integers(evaluate, loops)


def constant_value(value: Any, aval: Any) -> Integers | None:
    """The value of a constant of this type; None if it is a tracer, too large, or an array that is not of integers."""
    dtype = getattr(aval, "dtype", None)
    if isinstance(value, Tracer) or not isinstance(dtype, np.dtype):
        return None
    if dtype.kind not in "iub":
        return None if aval.shape else not_evaluated(_in_type(dtype))
    if math.prod(aval.shape) > _MOST_CONSTANTS:
        return None
    array = np.asarray(value, dtype)
    return Integers(lambda _: array)


@cache  # formatting a NumPy dtype is slow
def _in_type(dtype: np.dtype) -> str:
    return f"its index is computed in {dtype}, but policyc evaluates only integers"


def loop_slice(integers: Integers, loop: Address) -> Integers:
    """One iteration's slice of integers that a scan runs over."""
    return Integers(
        lambda iterations: integers.evaluate(iterations)[iterations[loop]],
        integers.loops | {loop},
        integers.unknown,
    )


def is_array(aval: Any) -> bool:
    """Whether this is the type of an array of numbers, and not of a reference, token or random key."""
    return isinstance(getattr(aval, "dtype", None), np.dtype)


def propagate_integers(eqn: JaxprEqn, operands: Sequence[Integers | None]) -> Integers | None:
    """The result of an equation whose operands are known integers; None if it is not known."""
    if None in operands:
        return None
    known = [o for o in operands if o is not None]
    out: Any = eqn.outvars[0].aval if eqn.outvars else None
    if not is_array(out) or eqn.effects:
        return None
    dtype = out.dtype
    for operand in known:
        if operand.unknown:
            return operand
    if dtype.kind not in "iub":
        return not_evaluated(_in_type(dtype))
    rule = rule_of(eqn).integers
    if rule is None or len(eqn.outvars) != 1:
        name = jaxprs.primitive_name(eqn)
        return not_evaluated(f"its index is computed by '{name}', which policyc does not evaluate")
    if math.prod(out.shape) > MOST_INDICES and jaxprs.primitive_name(eqn) != "broadcast_in_dim":
        return None  # a broadcast array takes no memory

    def evaluate(iterations: Iterations) -> np.ndarray:
        with np.errstate(all="ignore"):  # integers wrap around, as JAX's do
            return np.asarray(rule(eqn, *(o.evaluate(iterations) for o in known))).astype(dtype, copy=False)

    return _computed(evaluate, frozenset[Address]().union(*(o.loops for o in known)))


# ---- loops


@dataclass(frozen=True, slots=True)
class LoopIterations:
    """The iterations of a scan."""

    address: Address
    length: int
    reverse: bool

    def position(self, index: int) -> int:
        """The number of iterations that run before the one with this index. It is its own inverse."""
        return self.length - 1 - index if self.reverse else index


def carried_integers(
    body: AnyJaxpr,
    consts: Sequence[Integers | None],
    carry: Sequence[Integers | None],
    xs: Sequence[Integers | None],
    loop: LoopIterations,
) -> list[Integers | None]:
    """The carry of a scan in each iteration, if it is computed from known integers. `carry` is its initial value."""
    loops = frozenset({loop.address}).union(*(i.loops for i in (*consts, *carry, *xs) if i is not None))
    while True:
        carried = [None if i is None or i.unknown else _Carried(i, loop) for i in carry]
        inside = [
            i if c is None else Integers(c.evaluate, loops) for i, c in zip(carry, carried, strict=True)
        ]
        results = _propagate_jaxpr(body, [*consts, *inside, *xs])[: len(carry)]
        after = [
            i if c is None or (result is not None and not result.unknown) else result
            for i, c, result in zip(carry, carried, results, strict=True)
        ]
        if after == list(carry):
            for c, result in zip(carried, results, strict=True):
                if c is not None and result is not None:
                    c.next = result
            return inside
        carry = after


class _Carried:
    """A carry of a scan, computed iteration by iteration. `next` computes its value after an iteration."""

    def __init__(self, init: Integers, loop: LoopIterations) -> None:
        self._init, self._loop = init, loop
        self._others: Iterations = {}
        self._values: list[np.ndarray] = []
        self.next = init

    def evaluate(self, iterations: Iterations) -> np.ndarray:
        address = self._loop.address
        others = {a: i for a, i in iterations.items() if a != address}
        if not self._values or others != self._others:
            self._others, self._values = others, [self._init.evaluate(iterations)]
        position = self._loop.position(iterations[address])
        while len(self._values) <= position:
            index = self._loop.position(len(self._values) - 1)
            self._values.append(self.next.evaluate({**iterations, address: index}))
        return self._values[position]


def _propagate_jaxpr(jaxpr: AnyJaxpr, inputs: Sequence[Integers | None]) -> list[Integers | None]:
    """The integers among the results of a jaxpr, given those among its inputs."""
    opened = jaxprs.open_jaxpr(jaxpr)
    known: dict[Var, Integers | None] = dict(zip(opened.invars, inputs, strict=True))
    for var, value in zip(opened.constvars, jaxprs.constants(jaxpr), strict=False):
        known[var] = constant_value(value, var.aval)

    def integers(atom: Any) -> Integers | None:
        return constant_value(atom.val, atom.aval) if isinstance(atom, Literal) else known.get(atom)

    for eqn in opened.eqns:
        operands = [integers(a) for a in eqn.invars]
        container = container_of(eqn)
        if container is not None and type(container).propagate is Container.propagate:
            (sub,) = jaxprs.sub_jaxprs(eqn)
            known.update(zip(eqn.outvars, _propagate_jaxpr(sub.jaxpr, operands), strict=True))
        elif not jaxprs.sub_jaxprs(eqn):
            result = propagate_integers(eqn, operands)
            known.update((v, result) for v in eqn.outvars)
    return [integers(a) for a in opened.outvars]
