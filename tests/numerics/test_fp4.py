"""FP4 with one scale per tensor, to the bit: codes, values and products against an independent oracle."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from policyc.language.recipes import OPERAND_GROUPS, Treatment, make_recipe
from policyc.numerics.gemm import quantized_dot_general
from policyc.numerics.quantize import Axes, codes_of, dequantize, make_key, quantize
from policyc.numerics.quantize.reference.hadamard import Method
from tests.support import rounding_oracle as oracle
from tests.support.gemms import MATMUL, quick_jit, slow, three_products

pytestmark = [pytest.mark.any_jax, pytest.mark.full_compile]

NEAREST = Treatment(format="fp4", element="e2m1")
SHAPE = (8, 30)
ROWS = Axes()


@cache
def quantizer(treatment: Treatment, axes: Axes = ROWS, method: Method = "cpu", jit: Any = quick_jit) -> Any:
    """(x, step) -> codes, values and amax."""

    def run(x: jax.Array, step: int) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        q = quantize(x, treatment, axes, key=make_key(5, step), method=method)
        return codes_of(q), dequantize(q), q.amax

    return jit(run)


def tensors() -> dict[str, np.ndarray]:
    """By the size of their largest number: all of fp32, and numbers that are exact in bfloat16."""
    x = np.random.default_rng(0).standard_t(3, SHAPE).astype(np.float32)
    x = np.where(np.abs(x) < 2.0**-12, np.float32(2.0**-12), x)
    unit = x / np.abs(x).max()
    sizes = {"small": 2.0**-30, "tiny": 2.0**-104.5, "tiniest": 2.0**-113, "huge": 3.4e38}
    return {
        "normal": x,
        "bfloat16": x.astype(ml_dtypes.bfloat16).astype(np.float32),
        **{name: (unit * size).astype(np.float32) for name, size in sizes.items()},
        "zero": np.zeros(SHAPE, np.float32),
        # Every midpoint between two values, whose ties go to the even code.
        "ties": np.resize(np.float32([6, 0.25, 0.75, 1.25, -1.75, 2.5, -3.5, 5, -0.25]), SHAPE),
    }


@pytest.mark.parametrize("method", ["cpu", slow("matmul")])
def test_codes_and_values_equal_the_oracle(method: Method) -> None:
    for name, x in tensors().items():
        codes, values, amax = quantizer(NEAREST, method=method, jit=jax.jit)(x, 0)
        expected = oracle.fp4(x)
        np.testing.assert_array_equal(np.asarray(codes), expected["codes"], name)
        assert np.asarray(amax).item() == np.abs(x).max()
        with np.errstate(under="ignore"):
            exact = np.ldexp(expected["value"] * expected["scale"], expected["exponent"])
        # A CPU has no denormal values.
        np.testing.assert_array_equal(np.asarray(values), np.where(np.abs(exact) < 2.0**-126, 0, exact), name)


def test_a_tensor_of_denormals_is_finite() -> None:
    """A CPU reads a denormal element as 0, but the maximum is not lost."""
    x = np.full(SHAPE, 1e-40, np.float32)
    x[0, 0] = -1e-39
    codes, values, amax = quantizer(NEAREST)(x, 0)
    assert np.asarray(amax).item() == np.float32(1e-39)
    assert np.isfinite(np.asarray(values)).all()
    is_cpu = jax.default_backend() == "cpu"
    np.testing.assert_array_equal(
        np.asarray(codes), np.where(x < 0, 8, 0) if is_cpu else oracle.fp4(x)["codes"]
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_tensor_with_a_nonfinite_number_is_nan(bad: float) -> None:
    x = tensors()["normal"]
    x[3, 5] = bad
    assert np.isnan(np.asarray(quantizer(NEAREST)(x, 0)[1])).all()


# ---- products

SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])


def rotate_tokens(x: np.ndarray) -> np.ndarray:
    """16 tokens. The sums of small integers are exact."""
    return ((SIGNS[:, None] * oracle.hadamard(16)).T @ x / 4).astype(ml_dtypes.bfloat16).astype(np.float32)


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sums of E2M1 products are exact in fp32, in any order. Then come the scales, in fp32."""
    p, q = oracle.fp4(a), oracle.fp4(b)
    total = (p["value"].astype(np.float64) @ q["value"]).astype(np.float32)
    return np.ldexp(total * (p["scale"] * q["scale"]), p["exponent"] + q["exponent"])


@pytest.mark.parametrize("rht", ["none", slow("wgrad")])
def test_three_products_equal_the_oracle(rht: str) -> None:
    rng = np.random.default_rng(4)
    x, w, dy = (rng.integers(-9, 10, s).astype(np.float32) for s in ((16, 7), (7, 5), (16, 5)))
    recipe = make_recipe("fp4", {"rht": OPERAND_GROUPS[rht]})
    f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=recipe)
    y, dx, dw = quick_jit(partial(three_products, f))(x, w, dy)
    np.testing.assert_array_equal(np.asarray(y), multiply(x, w))
    np.testing.assert_array_equal(np.asarray(dx), multiply(dy, w.T))
    if rht == "wgrad":
        x, dy = rotate_tokens(x), rotate_tokens(dy)
    np.testing.assert_array_equal(np.asarray(dw), multiply(x.T, dy))


def test_without_a_rotation_each_array_is_quantized_once() -> None:
    """Its codes serve both GEMMs that read it, also if they are random."""
    x, w = jnp.ones((16, 7)), jnp.ones((7, 5))
    recipe = make_recipe("fp4", {"sr": OPERAND_GROUPS["grad"]})
    loss = lambda x, w: jnp.sum(quantized_dot_general(x, w, MATMUL, recipe) ** 2)  # noqa: E731
    jaxpr = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w))
    assert jaxpr.count("fp4_quantize") == 3
