"""Random bits from a counter: a few integer operations per word, fused into whoever uses them.

In: a `Key` (who rounds, and when) and a shape. Out: int32 words. The one trap: the key enters the hash twice.
With one entry, two keys would give the same words in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_WORD = 0xFFFFFFFF
_ODD = 0x9E3779B9
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Key:
    """64 bits, as two uint32 of one shape: where rounding happens, and when.

    A key of known words is computed here, on the host, so that it shows as two constants.
    """

    a: Any
    b: Any

    def fold(self, word: Any) -> Key:
        """A key that depends on `word` too (an integer, traced or not, or text)."""
        if isinstance(word, str):
            word = crc32(word.encode())
        if isinstance(word, int) and isinstance(self.a, np.uint32):
            a, b = int(self.a), int(self.b)
            return Key(
                np.uint32(_mix_known((a ^ word) & _WORD, b)),
                np.uint32(_mix_known((b + word * _ODD) & _WORD, a)),
            )
        w = jnp.uint32(word & _WORD) if isinstance(word, int) else _as_word(word)
        return Key(mix(self.a ^ w, self.b), mix(self.b + w * jnp.uint32(_ODD), self.a))


def key(seed: Any = 0, *words: Any) -> Key:
    """The key of a seed and whatever else tells one rounding from another."""
    k = Key(np.uint32(0x243F6A88), np.uint32(0x85A308D3))
    for word in (seed, *words):
        k = k.fold(word)
    return k


def _mix_known(x: int, k: int) -> int:
    """`mix` of integers."""
    x ^= x >> 16
    x = x * _FIRST & _WORD
    x ^= x >> 15
    x = (x + k) * _SECOND & _WORD
    return x ^ (x >> 16)


def _as_word(word: Any) -> jax.Array:
    array = jnp.asarray(word)
    if array.dtype == jnp.float32:
        return lax.bitcast_convert_type(array, jnp.uint32)
    return array.astype(jnp.uint32)


def mix(x: jax.Array, k: jax.Array) -> jax.Array:
    """A 32-bit mixer with a second key in its middle. Bijective in x, bias under 1 % in every output bit."""
    x = x ^ (x >> 16)
    x = x * jnp.uint32(_FIRST)
    x = x ^ (x >> 15)
    x = x + k
    x = x * jnp.uint32(_SECOND)
    return x ^ (x >> 16)


def words(k: Key, shape: tuple[int, ...], offset: int = 0) -> jax.Array:
    """A random uint32 for each index of `shape`. The arrays of the key broadcast against the shape."""
    index = jnp.zeros((), jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        index = index + lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride & _WORD)
        stride *= shape[axis]
    return mix((index + jnp.uint32(offset)) ^ k.a, k.b)
