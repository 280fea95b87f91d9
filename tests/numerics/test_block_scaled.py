"""The block-scaled GEMM on several devices: what is divided, what is gathered, and in which dtype sums are."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from policyc.jaxcore.primitives.partition import divide, factor_sizes
from policyc.language.recipes import OPERAND_GROUPS, make_recipe
from policyc.numerics.backends.xla import Rows, gemm_rule
from policyc.numerics.gemm import GemmOptions, quantized_dot_general
from policyc.numerics.quantize import Axes, dequantize, quantize
from tests.support.gemms import normal, quick_jit, three_products

MESH = {"data": 2, "fsdp": 4, "tensor": 2}
BATCH = ("data", "fsdp")
WHOLE = ((), (), ())


def rows(count: int, contracted: int, tile: int = 1) -> Rows:
    """The shapes of an operand in NVFP4."""
    codes, scales = (1, count, contracted // 2), (1, count // tile, contracted // 16)
    return Rows(*(jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in (codes, scales)))  # type: ignore[arg-type]


X, W = rows(1024, 256), rows(512, 256, tile=16)
CASES: dict[str, Any] = {
    "tokens are divided and the weight is gathered": (
        (X, W),
        (((), BATCH, ()), ((), ("tensor",), ("fsdp",)), ((), BATCH, ("tensor",))),
        {"m": BATCH, "n": ("tensor",)},
        WHOLE,
    ),
    "the gradient of a weight goes to the devices that hold it": (
        (rows(256, 1024), rows(512, 1024)),
        (((), (), BATCH), ((), ("tensor",), BATCH), ((), ("fsdp",), ("tensor",))),
        {"n": ("tensor",), "contracted": BATCH},
        ((), ("fsdp",), ()),
    ),
    "also if they divide its columns": (
        (rows(256, 1024), rows(512, 1024)),
        (((), ("tensor",), BATCH), ((), (), BATCH), ((), ("tensor",), ("fsdp",))),
        {"m": ("tensor",), "contracted": BATCH},
        ((), (), ("fsdp",)),
    ),
    "a sharded contraction is summed": (
        (X, W),
        (((), BATCH, ("tensor",)), ((), ("fsdp",), ("tensor",)), ((), BATCH, ())),
        {"m": BATCH, "contracted": ("tensor",)},
        WHOLE,
    ),
    "blocks are not divided": (
        (rows(1024, 32), rows(512, 32)),
        (((), (), ("fsdp",)), ((), (), ("fsdp",)), WHOLE),
        {},
        WHOLE,
    ),
    "nor are tiles": (
        (X, rows(48, 256, tile=16)),
        (WHOLE, ((), ("tensor",), ()), ((), (), ("tensor",))),
        {},
        WHOLE,
    ),
    "a part of a sum is divided again after the axes that divide an operand": (
        (rows(256, 1024), rows(512, 1024)),
        (((), ("tensor",), BATCH), ((), (), BATCH), ((), ("fsdp", "tensor"), ())),
        {"m": ("tensor",), "contracted": BATCH},
        WHOLE,
    ),
}


@pytest.mark.parametrize(("operands", "shardings", "factors", "scattered"), CASES.values(), ids=CASES)
def test_how_a_gemm_is_divided(operands: Any, shardings: Any, factors: Any, scattered: Any) -> None:
    left, right, result = shardings
    rule = gemm_rule(*operands)
    sizes = factor_sizes(rule, [array.shape for x in operands for array in (x.codes, x.scales)])
    division = divide(rule, sizes, MESH, (left, left, right, right), (result,))
    assert {name: axes for name, axes in division.factors.items() if axes} == factors
    assert division.scattered == (scattered,)


@pytest.mark.parametrize("count", [1, 64])
def test_an_outer_scale_of_each_row_is_divided_with_the_rows(count: int) -> None:
    outer = jax.ShapeDtypeStruct((1, count, 1), jnp.float32)
    x = rows(64, 256)._replace(mantissa=outer, exponent=outer)
    rule = gemm_rule(x, W)
    assert [dims[1][0] for dims in rule.operands] == [
        "m",
        "m",
        *["m" if count > 1 else "m_scale"] * 2,
        "n",
        "n",
    ]


DIMS = (((2,), (0,)), ((), ()))
NEAREST = make_recipe("nvfp4", {"scale2d": OPERAND_GROUPS["weights"]})


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices: XLA_FLAGS in conftest")
def test_devices_gather_codes_and_tile_scales_and_sum_rounded_gradients() -> None:
    x, w, dy = (
        normal(*shape, seed=i, dtype=jnp.bfloat16)
        for i, shape in enumerate([(8, 16, 128), (128, 32), (8, 16, 32)])
    )
    mesh = Mesh(np.array(jax.devices()[:8]), ("fsdp",))
    tokens, weight = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P("fsdp"))
    options = GemmOptions(backends=("xla",) * 3)
    linear = partial(quantized_dot_general, dimension_numbers=DIMS, recipe=NEAREST, options=options)
    step = jax.jit(partial(three_products, linear), out_shardings=(tokens, tokens, weight))
    shards = [jax.device_put(a, s) for a, s in zip((x, w, dy), (tokens, weight, tokens), strict=True)]
    compiled = step.lower(*shards).compile()
    y, dx, dw = compiled(*shards)

    gathered = set(re.findall(r"= (\w+\[[\d,]*\])\S* all-gather\(", compiled.as_text() or ""))
    # The weight, for fprop and for dgrad: packed codes, and one scale for each of its 8 x 2 tiles.
    assert gathered == {"u8[1,32,64]", "u8[1,2,8]", "u8[1,128,16]", "u8[1,8,2]"}

    one_y, one_dx, _ = quick_jit(partial(three_products, linear))(x, w, dy)
    np.testing.assert_array_equal(y, one_y)  # nothing is summed over devices
    np.testing.assert_array_equal(dx, one_dx)

    # Each device rounds its product to bfloat16. The sum of eight of these is rounded at most seven times more.
    left, right = (quantized_values(a.reshape(128, -1)) for a in (x, dy))
    products = np.einsum("dtm,dtn->dmn", left.reshape(8, 16, 128), right.reshape(8, 16, 32))
    rounded = np.asarray(jnp.asarray(products, jnp.float32).astype(jnp.bfloat16), np.float64)
    unit = 2.0**-8 * np.abs(rounded).sum(0)
    assert np.all(np.abs(np.asarray(dw, np.float64) - rounded.sum(0)) <= unit)
    # XLA for CPU sums in float32 and rounds once. Had the devices not rounded before, two fifths would differ.
    exact_sum = np.asarray(jnp.asarray(rounded.sum(0), jnp.float32).astype(jnp.bfloat16))
    assert np.mean(np.asarray(dw) != exact_sum) < 0.03


def quantized_values(x: jax.Array) -> np.ndarray:
    """What wgrad reads of an operand: blocks along tokens, rounded to nearest."""
    treatment = NEAREST.treatments[-1]
    run = quick_jit(lambda x: dequantize(quantize(x, treatment, Axes(axis=-2))))
    return np.asarray(run(x), np.float64)
