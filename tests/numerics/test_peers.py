"""Whole tensors against independent implementations, if they are installed.

    pip install torch torchao compressed-tensors && pytest -m peers

Each test says what agrees, what does not, and why.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from policyc.language.recipes import Treatment
from policyc.numerics.quantize import codes_of, quantize
from tests.support import rounding_oracle as oracle

pytestmark = pytest.mark.peers

NVFP4_TENSOR = "torchao.prototype.mx_formats.nvfp4_tensor"
torch: Any = pytest.importorskip("torch", reason="torch is not installed")
X = np.random.default_rng(3).standard_normal((256, 512)).astype(np.float32)


def ours(x: np.ndarray, **options: Any) -> Any:
    return jax.jit(partial(quantize, treatment=Treatment(**options)))(x)


def bf16_valued(x: np.ndarray) -> np.ndarray:
    import ml_dtypes

    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("x", [X, bf16_valued(X)], ids=["f32", "bf16"])
def test_torchao_nvfp4(x: np.ndarray) -> None:
    """torchao divides the block maximum by 6 and then by the tensor's scale. The vendor multiplies it by one factor.

    On fp32 numbers nothing differs. Ratios of bfloat16 numbers are often a midpoint of E4M3: some scales (0.63 % of
    these) differ by one step, and with them the codes of those blocks. No other codes differ.
    """
    module = pytest.importorskip(NVFP4_TENSOR, reason="torchao is not installed")
    t = torch.from_numpy(x)
    scales, packed = module.nvfp4_quantize(t, 16, module.per_tensor_amax_to_scale(t.abs().max()))
    scales, packed = scales.view(torch.uint8).numpy().reshape(256, 32), packed.numpy()
    # Only the order of operations differs: the same order in NumPy gives its bits.
    outer = np.abs(x).max() / np.float32(2688)
    model = oracle.e4m3(np.abs(x).reshape(256, 32, 16).max(-1) / np.float32(6) / outer)
    np.testing.assert_array_equal(model.view(np.uint8), scales)
    by = (np.float32(1) / outer) / model.astype(np.float32)
    np.testing.assert_array_equal(oracle.pack(oracle.e2m1(x * np.repeat(by, 16, 1))), packed)
    q = ours(x, format="nvfp4", element="e2m1")
    apart = np.abs(np.asarray(q.scales).astype(int) - scales)
    assert apart.max() <= 1
    # At most twice what was measured, and none at all on fp32 numbers.
    assert (apart != 0).mean() <= (0 if x is X else 0.0127)
    same = np.repeat(apart == 0, 8, axis=1)
    np.testing.assert_array_equal(np.asarray(q.codes)[same], packed[same])


@pytest.mark.parametrize("mode", ["floor", "rceil", "even"])
@pytest.mark.parametrize("element", ["e2m1", "e4m3"])
def test_torchao_mx(mode: str, element: str) -> None:
    """Scales and codes agree bit for bit."""
    module = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="torchao is not installed")
    if element == "e4m3" and mode != "rceil":
        pytest.skip("mxfp8 rounds its scales up")
    kinds = {"e2m1": torch.float4_e2m1fn_x2, "e4m3": torch.float8_e4m3fn}
    rounding = module.ScaleCalculationMode[mode.upper()]
    scales, data = module.to_mx(torch.from_numpy(X), kinds[element], 32, rounding)
    name = "mxfp4" if element == "e2m1" else "mxfp8"
    q = ours(X, format=name, element=element, scale_rounding=mode)
    np.testing.assert_array_equal(np.asarray(q.scales).ravel(), scales.view(torch.uint8).numpy().ravel())
    theirs = data.view(torch.uint8).numpy().reshape(np.asarray(q.codes).shape)
    np.testing.assert_array_equal(np.asarray(q.codes), theirs)


@pytest.mark.parametrize("x", [X, bf16_valued(X)], ids=["f32", "bf16"])
def test_compressed_tensors_nvfp4(x: np.ndarray) -> None:
    """It divides the block maximum by 6 before it multiplies by the tensor's factor.

    As with torchao, nothing differs for fp32 numbers. For bfloat16 numbers some scales differ by one step, with the
    codes of their blocks.
    """
    forward = pytest.importorskip(
        "compressed_tensors.quantization.lifecycle.forward", reason="compressed-tensors is not installed"
    )
    args = pytest.importorskip("compressed_tensors.quantization.quant_args")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    # Without `scale_dtype` its scales stay in fp32, which is another format.
    config = args.QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True, dynamic=False,
        scale_dtype=torch.float8_e4m3fn, zp_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    t = torch.from_numpy(x)
    outer = helpers.generate_gparam(t.min(), t.max())
    blocks = t.reshape(256, 32, 16)
    scale, zero = helpers.calculate_qparams(blocks.amin(-1), blocks.amax(-1), config, global_scale=outer)
    value = forward.quantize(t, scale, zero, config, dtype=torch.float32, global_scale=outer).numpy()
    q = ours(x, format="nvfp4", element="e2m1")
    theirs = scale.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    apart = np.abs(np.asarray(q.scales).astype(int) - theirs)
    assert apart.max() <= 1
    # At most twice what was measured, and none at all on fp32 numbers.
    assert (apart != 0).mean() <= (0 if x is X else 0.0127)
    codes = np.asarray(codes_of(q))
    mine = oracle.GRID[codes & 7] * np.where(codes & 8, -1, 1)
    same = np.repeat(apart == 0, 16, axis=1)
    np.testing.assert_array_equal(mine[same], value[same])
