"""Recipes, arrays and comparisons for tests of quantized GEMMs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policyc.hardware.selftest.subject import relative_error, three_products
from policyc.language.recipes import OPERAND_GROUPS, Gemm, Recipe, make_recipe, make_split_recipe
from tests.support.quick_options import known_quick_options

__all__ = ["relative_error", "three_products"]  # tests import these from here, along with the names below

MATMUL = (((1,), (0,)), ((), ()))
VENDOR = {"rht": OPERAND_GROUPS["wgrad"], "sr": OPERAND_GROUPS["grad"], "scale2d": OPERAND_GROUPS["weights"]}
FULL = make_recipe("nvfp4", VENDOR)
NEAREST = make_recipe("nvfp4", {"rht": OPERAND_GROUPS["wgrad"], "scale2d": OPERAND_GROUPS["weights"]})
RECIPES: dict[str, Recipe] = {
    "full": FULL,
    "nearest": NEAREST,
    "plain": make_recipe("nvfp4"),
    "row": make_recipe("nvfp4", {"outer": "row"}),
    "bound": make_recipe("nvfp4", {"outer": "bound", "rht": OPERAND_GROUPS["wgrad"]}),
    "mean": make_recipe("nvfp4", {"mean_split": True, "rht": OPERAND_GROUPS["wgrad"]}),
    "four_over_six": make_recipe("nvfp4", {"scale": "four_over_six", "scale2d": OPERAND_GROUPS["weights"]}),
    "ms_eden": make_recipe("nvfp4", {"rounding": "ms_eden"}),
    "dequantized": make_recipe(
        "nvfp4", {"backward": "dequantized", "outer": "shared", "scale2d": OPERAND_GROUPS["weights"]}
    ),
    "tiles": make_recipe("nvfp4", {"scale2d": OPERAND_GROUPS["all"], "sr": OPERAND_GROUPS["grad"]}),
    "signs": make_recipe("nvfp4", {"rht": OPERAND_GROUPS["wgrad"], "rht_signs": "random"}),
    "mxfp8 tiles": make_recipe("mxfp8", {"scale2d": OPERAND_GROUPS["weights"]}),
    "mxfp4": make_recipe(
        "mxfp4", {"rht": OPERAND_GROUPS["wgrad"], "rht_size": 32, "sr": OPERAND_GROUPS["grad"]}
    ),
    "mxfp8": make_recipe("mxfp8"),
    "fp8": make_recipe("fp8"),
    "fp8 row": make_recipe("fp8", {"outer": "row"}),
    "fp4": make_recipe("fp4", {"rht": OPERAND_GROUPS["wgrad"], "sr": OPERAND_GROUPS["grad"]}),
    "bf16": make_recipe("bf16"),
    "f32": make_recipe("f32"),
    "keep": make_recipe("keep"),
    "mixed": make_split_recipe({Gemm.FPROP: FULL, Gemm.DGRAD: make_recipe("fp8")}),
    "forward": make_split_recipe(
        {Gemm.FPROP: FULL, Gemm.DGRAD: make_recipe("bf16"), Gemm.WGRAD: make_recipe("f32")}
    ),
}


def normal(*shape: int, seed: int = 0, dtype: Any = jnp.float32, divisor: int = 1) -> jax.Array:
    """Normally distributed numbers, drawn by NumPy because JAX would compile programs for every shape."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return jax.device_put(values.astype(jnp.dtype(dtype)) / jnp.dtype(dtype).type(divisor))


def quick_jit(f: Any) -> Any:
    """`jax.jit` with fast compilation, for programs that run few small steps and are compared within a tolerance."""
    return jax.jit(f, compiler_options=dict(known_quick_options()))


def slow(*values: Any) -> Any:
    """A row of a parametrized test that runs only with the slow tests."""
    return pytest.param(*values, marks=pytest.mark.slow)


def assert_equal_arrays(one: Any, other: Any) -> None:
    """Asserts that two trees hold the same arrays, to the bit."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
