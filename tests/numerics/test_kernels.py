"""The GPU kernels against the mathematics they replace: the same codes, scales and maxima, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policyc.language.recipes import Treatment
from policyc.numerics import primitives
from policyc.numerics.quantize import Axes, Quantized, make_key, quantize
from policyc.numerics.quantize.hadamard import Method
from policyc.numerics.quantize.kernels import fits

NEAREST = Treatment(format="nvfp4", element="e2m1", rht=16)
STOCHASTIC = Treatment(format="nvfp4", element="e2m1", rht=16, rounding="sr")
ROOMY = Treatment(format="nvfp4", element="e2m1", rht=16, rounding="sr", headroom=Fraction(17, 16))
DOWN = Axes(axis=-2)

gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


def normal(rows: int, columns: int) -> jax.Array:
    return jax.random.normal(jax.random.key(5), (rows, columns), jnp.bfloat16)


def same(one: Quantized, other: Quantized) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("treatment", [NEAREST, STOCHASTIC, ROOMY])
@pytest.mark.parametrize("case", ["normal", "huge", "tiny", "zeros", "nan", "spread"])
def test_kernels_give_the_bits_of_the_mathematics(treatment: Treatment, case: str) -> None:
    x = normal(64, 256)
    x = {
        "normal": x,
        "huge": x * 1e37,
        "tiny": x * 1e-28,
        "zeros": x * 0,
        "nan": x.at[3, 5].set(jnp.nan),
        "spread": x * jnp.exp2(jnp.arange(256) % 24 - 12).astype(jnp.bfloat16),
    }[case]

    def run(method: Method) -> Quantized:
        return jax.jit(lambda x: quantize(x, treatment, DOWN, key=make_key(7), method=method))(x)

    same(run("interpreted"), run("matmul"))


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("case", ["normal", "huge", "tiny", "zeros", "nan"])
def test_codes_in_both_orders(case: str, element: str) -> None:
    x = jax.random.normal(jax.random.key(5), (2, 128, 256), jnp.bfloat16)
    x = {"normal": x, "huge": x * 1e37, "tiny": x * 1e-38, "zeros": x * 0, "nan": x.at[0, 3, 5].set(jnp.nan)}[
        case
    ]
    treatment = Treatment(format="fp8", element=element)
    assert fits(x, treatment, Axes(both_orders=True))

    def run(method: Method, both: bool) -> Quantized:
        return jax.jit(lambda x: quantize(x, treatment, Axes(both_orders=both), method=method))(x)

    alone = run("matmul", False)
    assert alone.transposed_codes is None
    for found in (run("interpreted", True), run("matmul", True)):
        same(replace(found, transposed_codes=None), alone)
        np.testing.assert_array_equal(
            np.asarray(found.transposed_codes), np.moveaxis(np.asarray(alone.codes), -1, 0)
        )


def test_kernels_take_only_what_they_can() -> None:
    x = normal(64, 256)
    eight, both = Treatment(format="fp8", element="e4m3"), Axes(both_orders=True)
    assert fits(normal(128, 256), eight, both)
    assert not fits(normal(128, 256), eight, Axes())
    assert not fits(normal(128, 256), replace(eight, outer="row"), both)
    assert not fits(normal(128, 256).astype(jnp.float32), eight, both)
    assert not fits(normal(64, 256), eight, both)
    assert not fits(normal(128, 200), eight, both)
    assert not fits(normal(128, 256), NEAREST, both)
    assert fits(x, NEAREST, DOWN)
    assert not fits(x, NEAREST, Axes())
    assert not fits(x.astype(jnp.float32), NEAREST, DOWN)
    assert not fits(x[:60], NEAREST, DOWN)
    assert not fits(x[:, :100], NEAREST, DOWN)
    assert not fits(x, Treatment(format="nvfp4", element="e2m1"), DOWN)
    assert not fits(x, Treatment(format="nvfp4", element="e2m1", rht=16, outer="row"), DOWN)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("treatment", [NEAREST, STOCHASTIC, ROOMY])
def test_compiled_kernels_on_large_arrays(treatment: Treatment) -> None:
    x = normal(8192, 4096)
    compiled = jax.jit(
        lambda x: primitives.quantize(x, treatment, DOWN, operand="wgrad.dy", keys=(make_key(7), make_key(7)))
    )
    assert "triton" in compiled.lower(x).as_text()
    by_hand = jax.jit(
        lambda x: quantize(x, treatment, DOWN, key=make_key(7).fold("wgrad.dy"), method="matmul")
    )
    same(compiled(x), by_hand(x))


@gpu
@pytest.mark.gpu
def test_compiled_codes_in_both_orders() -> None:
    x, eight, both = normal(8192, 4096), Treatment(format="fp8", element="e5m2"), Axes(both_orders=True)
    run = jax.jit(lambda x: primitives.quantize(x, eight, both, backend="xla"))
    assert "triton" in run.lower(x).as_text()
    same(run(x), jax.jit(lambda x: quantize(x, eight, both, method="matmul"))(x))
