"""Integers that are known before a program runs, in each iteration of the loops around them: indices, loop counters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from policyc.jaxcore import jaxprs
from policyc.jaxcore.transform import Address

Iterations = Mapping[Address, int]
"""The iteration of each loop, by the loop's address: an index into its stacked inputs. Of a shard_map: the device."""

MOST_INDICES = 1 << 22  # elements of an array of indices; more would take too much memory and time


@dataclass(frozen=True, slots=True, eq=False)
class Integers:
    """An integer variable whose value is known in each iteration of the loops around it."""

    evaluate: Callable[[Iterations], np.ndarray]
    loops: frozenset[Address] = frozenset()


def _computed(compute: Callable[[Iterations], np.ndarray], loops: frozenset[Address]) -> Integers:
    """Integers that remember their last value.

    Without it, a value that several equations read is computed once for each path to it: their number is exponential.
    """
    addresses = tuple(loops)
    last: list[tuple[tuple[int, ...], np.ndarray]] = []

    def evaluate(iterations: Iterations) -> np.ndarray:
        key = tuple(iterations[address] for address in addresses)
        if not last or last[0][0] != key:
            last[:] = [(key, compute(iterations))]
        return last[0][1]

    return Integers(evaluate, loops)


def constant_integers(value: Any) -> Integers:
    array = np.asarray(value)
    return Integers(lambda _: array)


def loop_slice(integers: Integers, loop: Address) -> Integers:
    """One iteration's slice of integers that a scan runs over."""
    return Integers(
        lambda iterations: integers.evaluate(iterations)[iterations[loop]], integers.loops | {loop}
    )


def loop_counter(init: Integers, step: int, loop: Address, length: int, reverse: bool) -> Integers:
    """A carry of a scan that grows by `step` in each iteration."""

    def evaluate(iterations: Iterations) -> np.ndarray:
        index = iterations[loop]
        earlier_iterations = length - 1 - index if reverse else index
        return np.asarray(init.evaluate(iterations) + step * earlier_iterations)

    return _computed(evaluate, init.loops | {loop})


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    quotient = np.sign(a) * np.sign(b) * (np.abs(a) // np.where(b == 0, 1, np.abs(b)))
    return np.asarray(quotient, a.dtype)


_INTEGER_OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "div": _divide,
    "rem": lambda a, b: a - _divide(a, b) * b,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.bitwise_not,
    "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift,
    "select_n": lambda which, *cases: np.choose(which.astype(int), np.broadcast_arrays(*cases)),
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "sign": np.sign,
    "copy": lambda x: x,
    "stop_gradient": lambda x: x,
    "name": lambda x: x,
}
"""The operations on integers that indices are computed with, as numpy has them. JAX's division rounds to zero."""


def _integer_operation(eqn: JaxprEqn) -> Callable[..., np.ndarray] | None:
    name, params = jaxprs.primitive_name(eqn), eqn.params
    out: Any = eqn.outvars[0].aval if eqn.outvars else None
    shapes: dict[str, Callable[..., np.ndarray]] = {
        "convert_element_type": lambda x: np.asarray(x).astype(params["new_dtype"]),
        "reshape": lambda x: np.reshape(x, out.shape),
        "squeeze": lambda x: np.reshape(x, out.shape),
        "expand_dims": lambda x: np.reshape(x, out.shape),
        "broadcast_in_dim": lambda x: _broadcast(np.asarray(x), params),
        "concatenate": lambda *xs: np.concatenate(xs, params["dimension"]),
        "transpose": lambda x: np.transpose(x, params["permutation"]),
        "rev": lambda x: np.flip(x, params["dimensions"]),
        "slice": lambda x: x[_slices(params)],
        "dynamic_slice": lambda x, *starts: _dynamic_slice(x, starts, params["slice_sizes"]),
        "iota": lambda: _iota(params),
    }
    return shapes.get(name) or _INTEGER_OPERATIONS.get(name)


def _broadcast(x: np.ndarray, params: Mapping[str, Any]) -> np.ndarray:
    shape = [1] * len(params["shape"])
    for dim, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        shape[dim] = size
    return np.broadcast_to(x.reshape(shape), params["shape"])


def _slices(params: Mapping[str, Any]) -> tuple[slice, ...]:
    strides = params["strides"] or (1,) * len(params["start_indices"])
    return tuple(map(slice, params["start_indices"], params["limit_indices"], strides))


def _dynamic_slice(x: np.ndarray, starts: Sequence[np.ndarray], sizes: Sequence[int]) -> np.ndarray:
    firsts = [
        min(max(int(start), 0), n - size) for start, n, size in zip(starts, x.shape, sizes, strict=True)
    ]
    return x[tuple(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True))]


def _iota(params: Mapping[str, Any]) -> np.ndarray:
    shape, dim = params["shape"], params["dimension"]
    counts = np.arange(shape[dim], dtype=params["dtype"])
    return np.broadcast_to(counts.reshape([-1 if d == dim else 1 for d in range(len(shape))]), shape)


def propagate_integers(eqn: JaxprEqn, operands: Sequence[Integers | None]) -> Integers | None:
    """The value of an equation on known integers; None if it is not known."""
    if len(eqn.outvars) != 1 or any(o is None for o in operands):
        return None
    out: Any = eqn.outvars[0].aval
    dtype = getattr(out, "dtype", None)
    if not isinstance(dtype, np.dtype) or dtype.kind not in "iub" or math.prod(out.shape) > MOST_INDICES:
        return None
    operation = _integer_operation(eqn)
    if operation is None:
        return None
    known = [o for o in operands if o is not None]

    def evaluate(iterations: Iterations) -> np.ndarray:
        return np.asarray(operation(*(o.evaluate(iterations) for o in known)))

    return _computed(evaluate, frozenset[Address]().union(*(o.loops for o in known)))
