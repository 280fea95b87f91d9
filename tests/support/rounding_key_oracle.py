"""Test oracle: the keys and random bits of stochastic rounding from their definition, in NumPy.

It shares no code with policyc.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np

WORD = 2**32
Key = tuple[int, int]


def mix(x: np.ndarray | int, key: int) -> np.ndarray:
    x = np.asarray(x, np.uint64)
    x = x ^ (x >> np.uint64(16))
    x = x * np.uint64(0x7FEB352D) % WORD
    x = x ^ (x >> np.uint64(15))
    x = (x + np.uint64(key)) % WORD * np.uint64(0x846CA68B) % WORD
    return x ^ (x >> np.uint64(16))


def fold(key: Key, word: int | str) -> Key:
    w = crc32(word.encode()) if isinstance(word, str) else word % WORD
    a, b = key
    return int(mix(a ^ w, b)), int(mix((b + w * 0x9E3779B9) % WORD, a))


def make_key(*words: int | str) -> Key:
    key = 0x243F6A88, 0x85A308D3
    for word in words:
        key = fold(key, word)
    return key


def magnitude_bits(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)


def checksum(words: np.ndarray) -> int:
    return int(mix(words, 0).sum(dtype=np.uint64) % WORD)


def tensor_key(key: Key, block_maxima: np.ndarray) -> Key:
    """The key of a tensor, from the bits of the maxima of its blocks."""
    return fold(fold(key, int(block_maxima.max())), checksum(block_maxima))


def random_16(key: Key, shape: tuple[int, int], axis: int) -> np.ndarray:
    """The 16 random bits of each element.

    Four neighbours along the axis share one word, with bytes 0 to 3 from the lowest one. They get the bytes (0, 3),
    (1, 0), (2, 1) and (3, 2), the more significant one first.
    """
    words = list(shape)
    words[axis] = -(-words[axis] // 4)
    index = np.arange(np.prod(words), dtype=np.uint64).reshape(words)
    word = mix(index ^ np.uint64(key[0]), key[1])
    byte = [(word >> np.uint64(8 * i)) & np.uint64(255) for i in range(4)]
    numbers = [byte[i] * np.uint64(256) + byte[i - 1] for i in range(4)]
    joined = np.stack(numbers, axis + 1 if axis == 0 else -1)
    joined = joined.reshape([4 * n if i == axis % 2 else n for i, n in enumerate(words)])
    return joined[: shape[0], : shape[1]].astype(np.int64)


def round_up(magnitude: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Stochastically rounded E2M1 values of magnitudes up to 6.

    Takes the grid value above if the relative distance from the one below is at least 1 - random.
    """
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    low = np.clip(np.searchsorted(grid, magnitude, side="right") - 1, 0, 6)
    step = grid[low + 1] - grid[low]
    # 2**22 is the mantissa below the one bit of E2M1; the random bits are the top 16 of these 22.
    distance = np.floor((magnitude - grid[low]) / step * 2**22)
    return np.where(distance + random * 2**6 >= 2**22, grid[low + 1], grid[low])
