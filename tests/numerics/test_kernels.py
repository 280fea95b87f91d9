"""The GPU kernels, interpreted on CPU, against the jnp code that they replace: the same bits."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policyc.language.recipes import Treatment
from policyc.numerics.quantize import Axes, Quantized, make_key, quantize
from policyc.numerics.quantize.hadamard import Method
from policyc.numerics.quantize.kernels import fits

# Both sides are compiled the same way. That the jnp code is exact when compiled in full is in test_quantize.py.
pytestmark = pytest.mark.usefixtures("quick_compile")

NEAREST = Treatment(format="nvfp4", element="e2m1", rht=16)
STOCHASTIC = Treatment(format="nvfp4", element="e2m1", rht=16, rounding="sr")
WITH_HEADROOM = Treatment(format="nvfp4", element="e2m1", rht=16, rounding="sr", headroom=Fraction(17, 16))
COLUMNS = Axes(axis=-2)


def normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(5), shape, jnp.bfloat16)


def assert_equal(one: Quantized, other: Quantized) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@cache
def quantizer(treatment: Treatment, axes: Axes, method: Method) -> Any:
    return jax.jit(lambda x: quantize(x, treatment, axes, key=make_key(7), method=method))


@pytest.mark.parametrize("treatment", [NEAREST, STOCHASTIC, WITH_HEADROOM])
@pytest.mark.parametrize("case", ["normal", "huge", "tiny", "zeros", "nan", "spread"])
def test_kernels_give_the_bits_of_the_jnp_code(treatment: Treatment, case: str) -> None:
    x = normal(64, 256)
    x = {
        "normal": x,
        "huge": x * 1e37,
        "tiny": x * 1e-28,
        "zeros": x * 0,
        "nan": x.at[3, 5].set(jnp.nan),
        "spread": x * jnp.exp2(jnp.arange(256) % 24 - 12).astype(jnp.bfloat16),
    }[case]
    interpreted, reference = (quantizer(treatment, COLUMNS, m) for m in ("interpreted", "matmul"))
    assert_equal(interpreted(x), reference(x))


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("case", ["normal", "huge", "tiny", "zeros", "nan"])
def test_codes_in_both_orders(case: str, element: str) -> None:
    """The kernel and the jnp code write the codes of a quantizer of one order, and their transpose."""
    x = normal(2, 128, 256)
    x = {"normal": x, "huge": x * 1e37, "tiny": x * 1e-38, "zeros": x * 0, "nan": x.at[0, 3, 5].set(jnp.nan)}[
        case
    ]
    treatment, both = Treatment(format="fp8", element=element), Axes(both_orders=True)
    assert fits(x, treatment, both)
    reference = quantizer(treatment, Axes(), "matmul")(x)
    assert reference.transposed_codes is None
    transposed = np.moveaxis(np.asarray(reference.codes), -1, 0)
    for method in ("interpreted", "matmul"):
        q = quantizer(treatment, both, method)(x)
        assert_equal(replace(q, transposed_codes=None), reference)
        np.testing.assert_array_equal(np.asarray(q.transposed_codes), transposed)


def test_which_operands_the_kernels_take() -> None:
    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    fp8, both = Treatment(format="fp8", element="e4m3"), Axes(both_orders=True)
    assert fits(array(128, 256), fp8, both)
    assert not fits(array(128, 256), fp8, Axes())
    assert not fits(array(128, 256), replace(fp8, outer="row"), both)
    assert not fits(array(128, 256, dtype=jnp.float32), fp8, both)
    assert not fits(array(64, 256), fp8, both)
    assert not fits(array(128, 200), fp8, both)
    assert not fits(array(128, 256), NEAREST, both)
    assert fits(array(64, 256), NEAREST, COLUMNS)
    assert not fits(array(64, 256), NEAREST, Axes())
    assert not fits(array(64, 256, dtype=jnp.float32), NEAREST, COLUMNS)
    assert not fits(array(60, 256), NEAREST, COLUMNS)
    assert not fits(array(64, 100), NEAREST, COLUMNS)
    assert not fits(array(64, 256), Treatment(format="nvfp4", element="e2m1"), COLUMNS)
    assert not fits(array(64, 256), replace(NEAREST, outer="row"), COLUMNS)
