"""The instructions of the kernels' programs, on arrays, against NumPy and the types of ml_dtypes."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from policyc.jaxcore.primitives.inline_ptx import Program
from policyc.numerics.quantize.kernels import words

pytestmark = pytest.mark.any_jax

A, B = np.random.default_rng(0).integers(0, 1 << 32, (2, 4, 1024), dtype=np.uint32)


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint32)


def test_halves() -> None:
    a, b = (x.view(np.uint16) for x in (A, B))
    for instruction, expected in (
        (words.larger_halves, np.maximum(a, b)),
        (words.smaller_halves, np.minimum(a, b)),
        (words.low_halves, np.stack([a[:, ::2], b[:, ::2]], -1)),
        (words.high_halves, np.stack([a[:, 1::2], b[:, 1::2]], -1)),
    ):
        result = np.asarray(instruction(A, B)).view(np.uint16)
        np.testing.assert_array_equal(result, expected.reshape(result.shape))


@pytest.mark.parametrize(("low", "high"), [(3, 0), (0, 1), (1, 2), (2, 3)])
def test_two_bytes(low: int, high: int) -> None:
    byte = A.view(np.uint8).reshape(*A.shape, 4).astype(np.uint32)
    expected = byte[..., high] << 8 | byte[..., low]
    np.testing.assert_array_equal(np.asarray(words.two_bytes(jnp.asarray(A), low, high)), expected)


def test_neighbours_exchange_words() -> None:
    result = np.asarray(words.exchange(A))
    np.testing.assert_array_equal(result[:, ::2], A[:, 1::2])
    np.testing.assert_array_equal(result[:, 1::2], A[:, ::2])


def test_select() -> None:
    mask = np.where(A & 1, np.uint32(0xFFFFFFFF), np.uint32(0))
    np.testing.assert_array_equal(words.select(mask, A, B), np.where(A & 1, A, B))
    np.testing.assert_array_equal(words.less(A, B), np.where(A < B, np.uint32(0xFFFFFFFF), np.uint32(0)))


def test_pairs_of_bfloat16() -> None:
    x, y = floats(2, 4096)
    halves = np.asarray(words.round_pair(bits(x), bits(y))).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(halves[::2], x.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(halves[1::2], y.astype(ml_dtypes.bfloat16))
    # Products of numbers of 4 bits are exact.
    a, b = (np.round(v * 4).astype(ml_dtypes.bfloat16) for v in (x, y))
    result = np.asarray(words.multiply_pairs(a.view(np.uint32), b.view(np.uint32))).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(result.astype(np.float32), a.astype(np.float32) * b.astype(np.float32))


def test_codes_of_e2m1_are_decoded() -> None:
    codes = np.arange(16, dtype=np.uint32)
    half = (codes & 7) << 6 | (codes & 8) << 12
    result = np.asarray(words.decode_pair(jnp.asarray(half | half[::-1] << 16))).view(ml_dtypes.bfloat16)
    values = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(result[::2].astype(np.float32), values)
    np.testing.assert_array_equal(result[1::2].astype(np.float32), values[::-1])


def test_scales() -> None:
    x = np.abs(floats(1 << 16)) * np.float32(2) ** np.random.default_rng(2).integers(-12, 9, 1 << 16)
    expected = np.minimum(x, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    codes = np.asarray(words.encode_scale(bits(x.astype(np.float32))))
    np.testing.assert_array_equal(codes, expected.view(np.uint8))
    decoded = np.asarray(words.decode_scale(jnp.asarray(codes))).view(np.float32)
    np.testing.assert_array_equal(decoded, expected.astype(np.float32))


def test_a_code_is_in_the_bits_of_a_number_from_22_up() -> None:
    """A multiple of a step of E2M1 has nothing below. The lift multiplies the number first."""
    values = np.arange(16, dtype=np.uint8)[:8].view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    for lift in (1.0, 2.0**64):
        unit = words.float_word(lift) - np.uint32(126 << 23)
        result = np.asarray(words.code_bits(bits(values / np.float32(lift)), unit))
        np.testing.assert_array_equal(result, np.arange(8, dtype=np.uint32) << 22)


def test_quotients() -> None:
    x, y = np.abs(floats(2, 4096))
    np.testing.assert_array_equal(np.asarray(words.divide(bits(x), bits(y))).view(np.float32), x / y)
    np.testing.assert_array_equal(np.asarray(words.reciprocal(bits(y))).view(np.float32), np.float32(1) / y)
    zero = np.asarray(words.reciprocal(np.zeros(1, np.uint32))).view(np.float32)
    np.testing.assert_array_equal(zero, np.finfo(np.float32).max)


def test_on_registers_a_function_becomes_ptx() -> None:
    program = Program()
    a, b = program.new_register(), program.new_register()
    result = words.larger_halves((a + b) & np.uint32(0xFFFF), words.two_bytes(b, 3, 0)) ^ np.uint32(0xFFFF)
    assert program.text(2, [result]).splitlines() == [
        "{",
        ".reg .b32 r<9>;",
        "mov.b32 r1, $1;",
        "mov.b32 r2, $2;",
        "add.u32 r3, r1, r2;",
        "mov.b32 r4, 0xffff;",
        "and.b32 r5, r3, r4;",
        "prmt.b32 r6, r2, 0, 0x4403;",
        "max.u16x2 r7, r5, r6;",
        "xor.b32 r8, r7, r4;",
        "mov.b32 $0, r8;",
        "}",
    ]
