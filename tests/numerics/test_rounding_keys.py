"""The keys of stochastic rounding: their definition, their freshness, and that they do not depend on the sharding."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import policyc.numerics.quantize
from policyc.language.recipes import Treatment, make_recipe
from policyc.numerics import primitives
from policyc.numerics.gemm import make_sign_key
from policyc.numerics.products import DEFAULT_OPTIONS, GemmSpec
from policyc.numerics.quantize import Axes, Key, Quantized, Request, make_key
from tests.support import rounding_key_oracle as oracle

# Compiled, since it would take longer than the test if it ran op by op.
dequantize = jax.jit(policyc.numerics.quantize.dequantize)

SR = Treatment(format="nvfp4", element="e2m1", rounding="sr")
MX = Treatment(format="mxfp4", element="e2m1", rounding="sr")
SIZE = (512, 512)
BOUND = 0.01
"""Of a correlation. That of 2**18 independent pairs is known to .002: this allows five deviations."""


def microbatch(seed: int, shape: tuple[int, int] = SIZE) -> np.ndarray:
    """Positive bfloat16 numbers with the maximum 4, so that equal random bits show in the sign of the error too.

    The maximum of each block is 2 or 4, so that all block scales are exact: no number saturates, which would be an
    error that does not depend on the key.
    """
    rng = np.random.default_rng(seed)
    x = np.abs(rng.standard_normal(shape)).clip(0.05, 1.9)
    maxima = rng.choice([2.0, 4.0], shape)
    x[::16], x[:, ::16] = maxima[::16], maxima[:, ::16]
    x[0, 0] = 4
    return x.astype(ml_dtypes.bfloat16)


@cache
def quantizer(axis: int = -1, operand: str = "dgrad.dy", treatment: Treatment = SR) -> Any:
    """(x, the two words of the key) -> x as the operand of a GEMM."""

    def run(x: jax.Array, a: jax.Array, b: jax.Array) -> Quantized:
        key = Key(a, b)
        return primitives.quantize(x, Request(treatment, Axes(axis=axis), operand=operand, key=key))

    return jax.jit(run)


def error(x: np.ndarray, *words: int, axis: int = -1, operand: str = "dgrad.dy") -> np.ndarray:
    key = make_key(0, *words)
    quantized = quantizer(axis, operand)(x, key.a, key.b)
    return (np.asarray(dequantize(quantized), np.float64) - x.astype(np.float64)).ravel()


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return abs(float(np.corrcoef(a, b)[0, 1]))


# ---- the definition


@pytest.mark.any_jax
@pytest.mark.parametrize("axis", [-1, 0])
def test_codes_are_those_of_the_documented_key(axis: int) -> None:
    """The oracle computes key, random bits and rounding. Every scale is 1 here, so it needs no scales."""
    x = np.random.default_rng(0).uniform(-6, 6, (32, 64)).astype(np.float32)
    blocks = x.reshape(32, 4, 16) if axis == -1 else x.reshape(2, 16, 64)
    blocks[(..., 0) if axis == -1 else (slice(None), 0)] = 6
    maxima = oracle.magnitude_bits(np.abs(blocks).max(-1 if axis == -1 else 1))
    x[0, 0] = (
        2688  # the tensor's scale is 1, and the scale of this block 448: its other elements are left out below
    )
    maxima.ravel()[0] = oracle.magnitude_bits(x[0, 0])
    key = oracle.make_key(5, 17, "dgrad.dy")
    random = oracle.random_16(oracle.tensor_key(key, maxima), x.shape, axis)
    expected = oracle.round_up(np.abs(x), random) * np.sign(x)
    known = make_key(5, 17)
    actual = np.asarray(dequantize(quantizer(axis - (2 if axis == 0 else 0))(x, known.a, known.b)))
    mask = np.ones(x.shape, bool)
    mask[:16, :16] = False
    np.testing.assert_array_equal(actual[mask], expected[mask])


@pytest.mark.any_jax
def test_mx_codes_depend_on_the_documented_key() -> None:
    """Blocks of 32, no outer scale: a block whose maximum is 6 has the scale 1."""
    x = np.random.default_rng(1).uniform(-6, 6, (16, 64)).astype(np.float32)
    x[:, ::32] = 6
    maxima = oracle.magnitude_bits(np.full((16, 2), 6.0))
    key = oracle.tensor_key(oracle.make_key(5, "wgrad.dy"), maxima)
    expected = oracle.round_up(np.abs(x), oracle.random_16(key, x.shape, -1)) * np.sign(x)
    known = make_key(5)
    actual = dequantize(quantizer(-1, "wgrad.dy", MX)(x, known.a, known.b))
    np.testing.assert_array_equal(np.asarray(actual), expected)


# ---- freshness


@pytest.mark.any_jax
def test_errors_of_microbatches_with_equal_maxima_are_uncorrelated() -> None:
    first, second = microbatch(0), microbatch(1)
    # The same numbers but one, which is no maximum of the tensor.
    third = first.copy()
    third[100, 0] = 3.9375
    errors = [error(x) for x in (first, second, third)]
    assert correlation(errors[0], errors[1]) < BOUND
    assert correlation(errors[0], errors[2]) < BOUND


@pytest.mark.any_jax
def test_errors_of_steps_layers_and_sites_are_uncorrelated() -> None:
    """The same numbers under keys that differ in one word."""
    x = microbatch(0)
    first = error(x, 7, 0)
    for words in ((7, 1), (8, 0), (7, 0, 0), (0, 7)):
        assert correlation(first, error(x, *words)) < BOUND


@pytest.mark.any_jax
def test_errors_of_row_and_column_codes_are_uncorrelated() -> None:
    """dgrad reads dy along its rows, and wgrad along its columns."""
    x = microbatch(0)
    rows, columns = error(x), error(x, axis=-2, operand="wgrad.dy")
    assert correlation(rows, columns) < BOUND
    assert correlation(rows, error(x, operand="wgrad.dy")) < BOUND


@pytest.mark.any_jax
def test_signs_of_ms_eden_depend_on_the_whole_of_both_operands() -> None:
    """Neither a microbatch nor a small step of the weights, with the same maxima, leaves the signs as they are."""
    x, w = microbatch(0, (32, 64)), microbatch(1, (64, 48))
    recipe = make_recipe("nvfp4", {"rounding": "ms_eden"})
    spec = GemmSpec(dims=(((1,), (0,)), ((), ())), recipe=recipe, lhs=x, rhs=w, options=DEFAULT_OPTIONS)
    words = [oracle.checksum(oracle.magnitude_bits(a)) for a in (x, w)]
    run = jax.jit(partial(make_sign_key, spec, key=make_key(3)))
    key = run(x, w)
    assert (int(key.a), int(key.b)) == oracle.make_key(3, *words)
    next_x, next_w = x.copy(), w.copy()
    next_x[5, 5], next_w[5, 5] = 0.5, 0.75
    others = [run(next_x, w), run(x, next_w)]
    assert len({(int(k.a), int(k.b)) for k in (key, *others)}) == 3


# ---- the same everywhere


@pytest.mark.parametrize("treatment", [SR, MX], ids=["nvfp4", "mxfp4"])
def test_codes_do_not_depend_on_the_sharding(treatment: Treatment) -> None:
    x, key = microbatch(3, (64, 256)), make_key(0, 7)
    run = quantizer(-1, "dgrad.dy", treatment)
    expected = run(x, key.a, key.b)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("a", "b")))
    np.testing.assert_array_equal(np.asarray(run(sharded, key.a, key.b).codes), np.asarray(expected.codes))
