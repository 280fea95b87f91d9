"""The random Hadamard transform of groups along one axis.

In: an array, an axis whose length is a multiple of the group, signs. Out: bfloat16, rounded once. The one trap: both
operands of a product must be turned by the same signs, or the product is not theirs.
"""

from __future__ import annotations

from functools import cache
from math import sqrt
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from policyc.quantize.bits import round_bf16
from policyc.quantize.random import Key, words

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The fixed signs; a longer transform repeats them."""

Method = Literal["matmul", "butterfly"]


@cache
def sylvester(size: int) -> np.ndarray:
    """The Hadamard matrix of a power of two, +1 and -1."""
    h = np.ones((1, 1), np.float32)
    while h.shape[0] < size:
        h = np.block([[h, h], [h, -h]])
    return h


def default_signs(size: int) -> jax.Array:
    return jnp.asarray(np.resize(np.asarray(SIGNS, np.float32), size))


def random_signs(key: Key, size: int) -> jax.Array:
    """Fresh signs: +1 or -1 by the top bit of a random word."""
    return jnp.where(words(key, (size,)) >> 31 == 0, jnp.float32(1), jnp.float32(-1))


def rotate(
    x: jax.Array, axis: int, size: int, signs: jax.Array | None = None, *, method: Method = "matmul"
) -> jax.Array:
    """x @ (diag(signs) @ H) / sqrt(size) on groups of `size` along `axis`, rounded to bfloat16.

    fp32 sums of 16 bfloat16 numbers are exact unless their magnitudes span more than 16 binades, so that the order
    of the sum, and therefore the method, does not show in the result.
    """
    axis = axis % x.ndim
    signs = default_signs(size) if signs is None else signs
    split = x.shape[:axis] + (x.shape[axis] // size, size) + x.shape[axis + 1 :]
    groups = x.reshape(split)
    turned = _matmul(groups, axis + 1, signs) if method == "matmul" else _butterfly(groups, axis + 1, signs)
    return round_bf16(turned * jnp.float32(1 / sqrt(size))).reshape(x.shape)


def _matmul(groups: jax.Array, axis: int, signs: jax.Array) -> jax.Array:
    size = groups.shape[axis]
    exact = groups.dtype if groups.dtype in (jnp.bfloat16, jnp.float32) else jnp.float32
    matrix = (signs[:, None] * sylvester(size)).astype(exact)
    turned = lax.dot_general(
        groups.astype(exact),
        matrix,
        (((axis,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return jnp.moveaxis(turned, -1, axis)


def _butterfly(groups: jax.Array, axis: int, signs: jax.Array) -> jax.Array:
    size = groups.shape[axis]
    shape = groups.shape
    y = groups.astype(jnp.float32) * signs.reshape((size,) + (1,) * (len(shape) - axis - 1))
    half = 1
    while half < size:
        pairs = y.reshape(shape[:axis] + (size // (2 * half), 2, half) + shape[axis + 1 :])
        low = lax.index_in_dim(pairs, 0, axis + 1, keepdims=True)
        high = lax.index_in_dim(pairs, 1, axis + 1, keepdims=True)
        y = jnp.concatenate([low + high, low - high], axis + 1).reshape(shape)
        half *= 2
    return y
