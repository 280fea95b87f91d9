"""NumPy rules that evaluate primitives on integers: the result of an equation whose operands are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from policyc.jaxcore.primitives.regions import Unknown

IntegerRule = Callable[..., np.ndarray]
"""(equation, values of its operands) -> the value of its only result."""


def plain(function: Callable[..., Any]) -> IntegerRule:
    """The rule of a primitive without parameters."""
    return lambda _, *xs: np.asarray(function(*xs))


def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Integer division as in JAX, which rounds toward zero."""
    x, y = a.astype(object), b.astype(object)  # Python's integers have no overflow
    quotient = np.sign(x) * np.sign(y) * (np.abs(x) // np.where(b == 0, 1, np.abs(y)))
    return np.asarray(quotient).astype(a.dtype)


def remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(a - divide(a, b) * b)


def shift_right_arithmetic(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Treats the first bit as the sign, even in unsigned integers."""
    return np.asarray(np.right_shift(a.astype(f"i{a.itemsize}"), b.astype(int)))


def select(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    return np.asarray(np.choose(which.astype(int), np.broadcast_arrays(*cases)))


def clamp(low: np.ndarray, x: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.asarray(np.minimum(np.maximum(x, low), high))


def convert(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray:
    return x.astype(eqn.params["new_dtype"])


def reshape(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray:
    out: Any = eqn.outvars[0].aval
    return np.reshape(x, out.shape)


def broadcast(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray:
    params = eqn.params
    shape = [1] * len(params["shape"])
    for dim, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        shape[dim] = size
    return np.broadcast_to(x.reshape(shape), params["shape"])


def concatenate(eqn: JaxprEqn, *xs: np.ndarray) -> np.ndarray:
    return np.concatenate(xs, eqn.params["dimension"])


def stack(eqn: JaxprEqn, *xs: np.ndarray) -> np.ndarray:
    return np.stack(xs, eqn.params["axis"])


def tile(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray:
    return np.tile(x, eqn.params["reps"])


def transpose(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray:
    return np.transpose(x, eqn.params["permutation"])


def reverse(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray:
    return np.flip(x, eqn.params["dimensions"])


def slice_(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray:
    params = eqn.params
    strides = params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


def dynamic_slice(eqn: JaxprEqn, x: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    sizes = eqn.params["slice_sizes"]
    firsts = [min(max(int(i), 0), n - size) for i, n, size in zip(starts, x.shape, sizes, strict=True)]
    return x[tuple(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True))]


def iota(eqn: JaxprEqn) -> np.ndarray:
    shape, dim = eqn.params["shape"], eqn.params["dimension"]
    counts = np.arange(shape[dim], dtype=eqn.params["dtype"])
    return np.broadcast_to(counts.reshape([-1 if d == dim else 1 for d in range(len(shape))]), shape)


def integer_pow(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray:
    return np.asarray(x ** eqn.params["y"], x.dtype)


def reduce(function: Callable[..., Any]) -> IntegerRule:
    """A reduction over the axes of the equation, in the type of its operand."""

    def rule(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray:
        return np.asarray(function(x, axis=tuple(eqn.params["axes"])), x.dtype)

    return rule


def arg_extreme(function: Callable[..., Any]) -> IntegerRule:
    """The first index of an extreme value."""

    def rule(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray:
        (axis,) = eqn.params["axes"]
        return np.asarray(function(x, axis), eqn.params["index_dtype"])

    return rule


def cumulative(function: np.ufunc) -> IntegerRule:
    def rule(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray:
        axis = eqn.params["axis"]
        ordered = np.flip(x, axis) if eqn.params["reverse"] else x
        sums = np.asarray(function.accumulate(ordered, axis, x.dtype))
        return np.flip(sums, axis) if eqn.params["reverse"] else sums

    return rule


def sort(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray:
    return np.sort(x, eqn.params["dimension"])


def gather(eqn: JaxprEqn, x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Evaluates `table[indices]`: whole slices along one dimension, all in bounds. Other forms raise `Unknown`."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    indexed, rank = tuple(numbers.start_index_map), indices.ndim - 1
    takes = tuple(1 if d in indexed else size for d, size in enumerate(x.shape))
    offset_dims = tuple(d if d < indexed[0] else d + rank - 1 for d in range(x.ndim) if d not in indexed)
    form = (tuple(sizes), tuple(numbers.collapsed_slice_dims), tuple(numbers.offset_dims))
    if len(indexed) != 1 or form != (takes, indexed, offset_dims):
        raise Unknown("its index is gathered in a form that policyc does not evaluate")
    if not ((indices >= 0) & (indices < x.shape[indexed[0]])).all():
        raise Unknown("its index is read from a table, out of bounds")
    return np.take(x, indices[..., 0], indexed[0])
