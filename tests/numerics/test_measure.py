"""Measurements of one array, against the oracle and the published numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from policyc.language.recipes import OPERAND_GROUPS, Gemm, OptionValue, Role, make_recipe
from policyc.numerics.measure import Measurement, measure_operand
from tests.support import rounding_oracle as oracle

# That the quantizers are exact when compiled in full is in test_quantize.py.
pytestmark = pytest.mark.any_jax

X = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)


def measure(x: Any, format: str, options: Mapping[str, OptionValue] = {}, *, axis: int = -1) -> Measurement:
    return measure_operand(x, make_recipe(format, options), Gemm.FPROP, Role.ACTIVATION, axis=axis)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_arrays_have_the_quantized_axis_last(axis: int) -> None:
    m = measure(X, "nvfp4", axis=axis)
    expected = oracle.nvfp4(X.T if axis == 0 else X)
    np.testing.assert_array_equal(m.codes, expected["codes"])
    np.testing.assert_array_equal(m.packed, oracle.pack(expected["codes"]))
    np.testing.assert_array_equal(m.scales, expected["scales"])
    np.testing.assert_array_equal(m.amax, [expected["amax"]])
    np.testing.assert_array_equal(m.dequantized, expected["dequantized"])
    assert set(m.arrays()) == {"codes", "packed", "scales", "amax", "dequantized"}


def test_statistics_are_those_of_the_oracles_values() -> None:
    m = measure(X, "nvfp4")
    values = oracle.nvfp4(X)["dequantized"].astype(np.float64)
    noise, power = np.sum((values - X) ** 2), np.sum(X.astype(np.float64) ** 2)
    assert m.stats.sqnr_db == pytest.approx(10 * np.log10(power / noise))
    assert m.stats.relative_error == pytest.approx(np.sqrt(noise / power))
    assert m.stats.gain == pytest.approx(np.sum(values * X) / power)
    assert m.stats.flushed == pytest.approx(np.mean((values == 0) & (X != 0)))
    assert m.stats.zero_blocks == 0
    assert 19 < m.stats.sqnr_db < 22
    assert "SQNR" in str(m.stats)


def test_zero_blocks_are_counted() -> None:
    x = X.copy()
    x[3] = 0
    assert measure(x, "nvfp4").stats.zero_blocks == 6


def test_saturation_is_counted() -> None:
    """The scale of MXFP4, rounded down, saturates maxima above 6. Rounded up, it saturates none."""
    floor = measure(X, "mxfp4")
    up = measure(X, "mxfp4", {"scale_rounding": "rceil"})
    assert floor.stats.saturated > 0.01
    assert up.stats.saturated == 0


@pytest.mark.parametrize(
    ("gemm", "role", "axis", "scales"),
    [
        (Gemm.FPROP, Role.ACTIVATION, -1, (64, 6)),
        (Gemm.FPROP, Role.WEIGHT, 0, (96, 4)),
        (Gemm.DGRAD, Role.GRADIENT, -1, (64, 6)),
        (Gemm.WGRAD, Role.ACTIVATION, 0, (96, 4)),
        (Gemm.WGRAD, Role.GRADIENT, 0, (96, 4)),
    ],
)
def test_operands_of_the_vendors_recipe(gemm: Gemm, role: Role, axis: int, scales: tuple[int, int]) -> None:
    options = {
        "rht": OPERAND_GROUPS["wgrad"],
        "sr": OPERAND_GROUPS["grad"],
        "scale2d": OPERAND_GROUPS["weights"],
    }
    m = measure_operand(X, make_recipe("nvfp4", options), gemm, role, axis=axis)
    assert m.scales.shape == scales
    assert 15 < m.stats.sqnr_db < 22


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "bf16", "f32", "keep"])
def test_other_formats_are_accurate(name: str) -> None:
    m = measure_operand(X, make_recipe(name), Gemm.FPROP, Role.ACTIVATION)
    assert m.stats.sqnr_db > 30
    np.testing.assert_allclose(m.dequantized, X, rtol=0.07, atol=1e-2)


def test_a_split_mean_is_added_back() -> None:
    m, plain = measure(X + 50, "nvfp4", {"mean_split": True}), measure(X + 50, "nvfp4")
    # The rounding of the mean leaves a bias per feature. The residual is rounded at its own, smaller size.
    error, plain_error = (np.std(v.dequantized - X - 50, axis=0).mean() for v in (m, plain))
    assert error < 0.5 * plain_error


def test_a_mean_over_contracted_tokens_is_quantized_as_in_a_gemm() -> None:
    """Its blocks run along the last dimension of features, its outer scale is that of all of them."""
    x = np.arange(2 * 32 * 2, dtype=np.float32).reshape(2, 32, 2)  # exact means, and residuals of one half
    recipe = make_recipe("nvfp4", {"mean_split": True, "outer": "row"})
    m = measure_operand(x, recipe, Gemm.WGRAD, Role.ACTIVATION)
    mean = oracle.nvfp4(x.mean(-1))["dequantized"]
    np.testing.assert_array_equal(m.dequantized, mean[..., None] + np.float32([-0.5, 0.5]))


@pytest.mark.slow
def test_a_mean_is_rounded_by_the_seed() -> None:
    """All tokens are the same, so that the residual is zero."""
    x = np.broadcast_to(X[:1, :16], (2, 16))
    recipe = make_recipe("nvfp4", {"mean_split": True, "sr": OPERAND_GROUPS["grad"]})
    one, other = (
        measure_operand(x, recipe, Gemm.DGRAD, Role.GRADIENT, seed=seed).dequantized for seed in (0, 1)
    )
    assert (one != other).any()


def test_lengths_that_are_not_multiples_of_a_tile_or_block() -> None:
    """Padding is not part of the result, except for a rotated operand, whose numbers spread into it."""
    tiles = make_recipe("nvfp4", {"scale2d": OPERAND_GROUPS["weights"]})
    tiled = measure_operand(X[:40, :64], tiles, Gemm.FPROP, Role.WEIGHT)
    assert tiled.codes.shape == tiled.dequantized.shape == (40, 64)
    assert tiled.scales.shape == (40, 4)
    rotated = measure(X[:, :40], "mxfp4", {"rht": OPERAND_GROUPS["fprop"]})
    assert rotated.codes.shape == rotated.dequantized.shape == (64, 64)
    assert 15 < rotated.stats.sqnr_db < 22
