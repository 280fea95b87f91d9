"""The random Hadamard transform of groups along one axis.

Both operands of a GEMM must be rotated by the same signs, otherwise their product changes.
"""

from __future__ import annotations

from functools import cache
from math import frexp, sqrt
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from policyc.language.recipes import Treatment
from policyc.numerics.quantize.reference.bits import abs_bits, materialize, round_bf16
from policyc.numerics.quantize.reference.random import Key, make_key, random_words

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The fixed signs. A longer transform repeats them."""

_LARGE = (127 + 100) << 23
"""The bits of 2**100: sums of 128 smaller numbers are far from overflow."""

Method = Literal["matmul", "matmul_bf16", "kernels", "interpreted", "cpu"]
"""How an operand is rotated and quantized. All methods give the same bits. `rotate` treats all but matmul_bf16 alike.

- matmul: a product with a small matrix, rounded to bfloat16 afterwards
- matmul_bf16: a product that returns bfloat16 itself
- kernels: GPU kernels if they fit, else matmul_bf16
- interpreted: the same kernels, interpreted, for tests
- cpu: operations that are fast on CPU
"""


@cache
def sylvester(size: int) -> np.ndarray:
    """Sylvester's Hadamard matrix, of +1 and -1. The size is a power of two."""
    h = np.ones((1, 1), np.float32)
    while h.shape[0] < size:
        h = np.block([[h, h], [h, -h]])
    return h


def default_signs(size: int) -> jax.Array:
    """The fixed signs, repeated to this size."""
    return jnp.asarray(np.resize(np.asarray(SIGNS, np.float32), size))


def random_signs(key: Key, size: int) -> jax.Array:
    """Fresh signs: +1 or -1 by the top bit of a random word."""
    return jnp.where(random_words(key, (size,)) >> 31 == 0, jnp.float32(1), jnp.float32(-1))


def rotate(
    x: jax.Array, axis: int, size: int, signs: jax.Array | None = None, *, method: Method = "matmul"
) -> jax.Array:
    """x @ (diag(signs) @ H) / sqrt(size) on groups of `size` along `axis`, rounded once, to bfloat16.

    The length of the axis is a multiple of `size`. fp32 sums of 16 bfloat16 numbers are exact unless their magnitudes
    span more than 16 binades, so the order of the sum, and therefore the method, does not change the result.

    The power of two in the norm is applied before the sums if they might overflow. A result is infinite only if it is
    out of range itself.
    """
    axis = axis % x.ndim
    signs = default_signs(size) if signs is None else signs
    split = x.shape[:axis] + (x.shape[axis] // size, size) + x.shape[axis + 1 :]
    groups = x.reshape(split)
    norm = 1 / sqrt(size)
    power = 2.0 ** (frexp(norm)[1] - 1)
    if method == "matmul_bf16" and x.dtype == jnp.bfloat16:
        # The matrix units keep denormal products, so the power of two can always be part of the matrix.
        if power == norm:  # then the only rounding is that of the product
            return _matmul(groups, axis + 1, signs, jnp.bfloat16, power).reshape(x.shape)
        rotated = _matmul(groups, axis + 1, signs, scale=power)
        return round_bf16(rotated * jnp.float32(norm / power)).reshape(x.shape)
    # XLA on CPU has no product of small bfloat16 matrices with an fp32 result.
    groups = groups.astype(jnp.float32)
    is_large = abs_bits(groups).max(axis=axis + 1, keepdims=True) >= _LARGE
    rotated = _matmul(groups * jnp.where(is_large, jnp.float32(power), 1), axis + 1, signs)
    return round_bf16(rotated * jnp.where(is_large, norm / power, norm)).reshape(x.shape)


def rotate_operand(
    x: jax.Array, treatment: Treatment, axis: int, sign_key: Key | None, method: Method
) -> jax.Array:
    """Rotates an operand if its treatment asks for it, and writes it to memory."""
    if not treatment.rht:
        return x
    if method in ("kernels", "interpreted"):
        method = "matmul_bf16" if method == "kernels" else "matmul"
    return materialize(rotate(x, axis, treatment.rht, signs_of(treatment, sign_key), method=method))


def signs_of(treatment: Treatment, sign_key: Key | None) -> jax.Array | None:
    """The signs of a treatment that rotates; None for the fixed ones."""
    if treatment.has_random_signs:
        return random_signs(sign_key or make_key(), treatment.rht)
    return jnp.ones(treatment.rht) if treatment.rht_signs == "none" else None


def _matmul(
    groups: jax.Array,
    axis: int,
    signs: jax.Array,
    out: jax.typing.DTypeLike = jnp.float32,
    scale: float = 1.0,
) -> jax.Array:
    # The scale is applied on the host: XLA would move a multiplication by a scalar after the sums.
    matrix = (signs[:, None] * (sylvester(groups.shape[axis]) * np.float32(scale))).astype(groups.dtype)
    if axis == groups.ndim - 1:
        return _dot(groups, matrix, (((axis,), (0,)), ((), ())), out)
    # One copy of the small matrix per group keeps the dimension order: the large array is not transposed.
    batch = tuple(range(axis))
    copies = jnp.broadcast_to(matrix.T, groups.shape[:axis] + matrix.shape)
    return _dot(copies, groups, (((axis + 1,), (axis,)), (batch, batch)), out)


def _dot(
    a: jax.Array, b: jax.Array, dimensions: lax.DotDimensionNumbers, out: jax.typing.DTypeLike
) -> jax.Array:
    highest = lax.Precision.HIGHEST
    return lax.dot_general(a, b, dimensions, precision=highest, preferred_element_type=out)
