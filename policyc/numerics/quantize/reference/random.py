"""Random bits from a counter and a key: a few integer operations per word, which fuse into their consumer.

The hash also runs on registers of a GPU kernel (`words.Word`).

The key enters the hash twice. If it entered once, two keys would give the same words in a different order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from policyc.numerics.quantize.reference.bits import materialize

_WORD = 0xFFFFFFFF
_GOLDEN_RATIO = 0x9E3779B9  # 2**32 / golden ratio, odd: its multiples are spread evenly
# The multipliers of the hash lowbias32, chosen by its author for low bias.
_FIRST, _SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_PI = 0x243F6A88, 0x85A308D3  # the first 64 bits of the fraction of pi: a start without structure


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Key:
    """A 64-bit key, as two uint32 arrays of the same shape.

    A key of known words is computed on the host, so it appears in a program as two constants.
    """

    a: Any
    b: Any

    def fold(self, word: Any) -> Key:
        """Folds a word into the key: text, an integer, or an array of integers or fp32 numbers (their bits)."""
        if isinstance(word, str):
            word = word_of(word)
        if isinstance(word, int) and isinstance(self.a, np.uint32):
            a, b = int(self.a), int(self.b)
            return Key(
                np.uint32(_mix_on_host((a ^ word) & _WORD, b)),
                np.uint32(_mix_on_host((b + word * _GOLDEN_RATIO) & _WORD, a)),
            )
        w = jnp.uint32(word & _WORD) if isinstance(word, int) else _as_word(word)
        a, b = self.a, self.b
        if isinstance(a, np.uint32):
            # Without the barrier, XLA compiles one kernel per constant key.
            a, b = materialize((jnp.uint32(a), jnp.uint32(b)))
        return Key(*fold_words(a, b, w))


def word_of(text: str) -> int:
    """The word that is folded into a key for a text."""
    return crc32(text.encode())


def fold_words(a: Any, b: Any, word: Any) -> tuple[Any, Any]:
    """The words of a key, with another word folded in: an array, or an integer."""
    if isinstance(word, int):
        multiple = np.uint32(word * _GOLDEN_RATIO & _WORD)  # NumPy would warn of the overflow
        word = np.uint32(word)
    else:
        multiple = word * np.uint32(_GOLDEN_RATIO)
    return mix(a ^ word, b), mix(b + multiple, a)


def make_key(seed: Any = 0, *words: Any) -> Key:
    """Makes a key from a seed and from words that distinguish one rounding from another."""
    key = Key(np.uint32(_PI[0]), np.uint32(_PI[1]))
    for word in (seed, *words):
        key = key.fold(word)
    return key


def _mix_on_host(x: int, key: int) -> int:
    """`mix` for Python integers."""
    x ^= x >> 16
    x = x * int(_FIRST) & _WORD
    x ^= x >> 15
    x = (x + key) * int(_SECOND) & _WORD
    return x ^ (x >> 16)


def _as_word(word: Any) -> jax.Array:
    array = jnp.asarray(word)
    if array.dtype == jnp.float32:
        return lax.bitcast_convert_type(array, jnp.uint32)
    return array.astype(jnp.uint32)


def mix(x: Any, key: Any) -> Any:
    """Hashes 32-bit words, adding `key` halfway. Bijective in x; the bias of every output bit is under 1 %."""
    return _finish_mix((_start_mix(x) + key) * _SECOND)


def mix_scaled(x: Any, key: Any) -> Any:
    """`mix` with a key from `scale_key`, which saves one operation per word."""
    return _finish_mix(_start_mix(x) * _SECOND + key)


def scale_key(key: Any) -> Any:
    """Converts the key of `mix` to that of `mix_scaled`."""
    return key * _SECOND


def _start_mix(x: Any) -> Any:
    x = x ^ (x >> 16)
    x = x * _FIRST
    return x ^ (x >> 15)


def _finish_mix(x: Any) -> Any:
    return x ^ (x >> 16)


def checksum(words: jax.Array, axis: int | tuple[int, ...] | None = None) -> jax.Array:
    """The wrapping sum of hashed words over these axes, which keep size 1. A scalar over all axes if `axis` is None.

    Integer sums do not depend on their order, so the checksum is the same on any sharding.
    """
    hashed = mix(words.astype(jnp.uint32), jnp.uint32(0))
    return jnp.sum(hashed, axis=axis, keepdims=axis is not None, dtype=jnp.uint32)


def random_words(key: Key, shape: tuple[int, ...]) -> jax.Array:
    """A random uint32 for each index of `shape`. The arrays of the key broadcast against the shape."""
    index = jnp.zeros((), jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        index = index + lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride & _WORD)
        stride *= shape[axis]
    words: jax.Array = mix(index ^ key.a, key.b)
    return words
