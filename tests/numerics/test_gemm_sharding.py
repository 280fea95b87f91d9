"""`quantized_dot_general` on many devices gives the results of one device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from policyc.language.treatments import normalize_recipe
from policyc.numerics import primitives
from policyc.numerics.gemm import quantized_dot_general
from policyc.numerics.quantize import Axes, Request
from tests.support.gemms import (
    FULL,
    MATMUL,
    RECIPES,
    assert_equal_arrays,
    normal,
    quick_jit,
    slow,
    three_products,
)

pytestmark = [
    pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices: XLA_FLAGS in conftest"),
]

ROWS = (((2,), (0,)), ((), ()))
LINEAR = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=RECIPES["mxfp8"])


def put(mesh: Any, x: jax.Array, *spec: Any) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


@pytest.mark.any_jax
def test_sharded_results_are_those_of_one_device() -> None:
    """Products up to the order of sums, codes and scales to the bit. Of NVFP4: `test_shardings_in_types`, and
    test_rounding_keys.py.
    """
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    x, w, dy = normal(8, 64, 128), normal(128, 64, seed=1), normal(8, 64, 64, seed=2)
    product = partial(quantized_dot_general, dimension_numbers=ROWS, recipe=RECIPES["mxfp8"])
    run = quick_jit(partial(three_products, product))
    shards = put(mesh, x, "data", None, "model"), put(mesh, w, "model", None), put(mesh, dy, "data")
    for a, b in zip(run(*shards), run(x, w, dy), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-4)
    for t in set(normalize_recipe(RECIPES["mxfp8"]).treatments):
        axes = Axes(axis=-2, contract=(-3, -2), tile=-1)
        f = quick_jit(partial(primitives.quantize, request=Request(replace(t, tile2d=False), axes)))
        assert_equal_arrays(f(shards[0]), f(x))


def test_nothing_is_gathered() -> None:
    """With tokens over eight devices, only maxima and the sum of the weight gradient are communicated."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    x, w, dy = (
        put(mesh, normal(8, 64, 128), "data"),
        put(mesh, normal(128, 64)),
        put(mesh, normal(8, 64, 64), "data"),
    )
    product = partial(quantized_dot_general, dimension_numbers=ROWS, recipe=FULL)
    text = quick_jit(partial(three_products, product)).lower(x, w, dy).compile().as_text()
    assert "all-gather" not in text
    assert "all-to-all" not in text
    assert "all-reduce" in text


SPECS = [
    (("data", None), (None, "model")),
    (("data", "model"), ("model", None)),
    (("data", None), ("data", None)),
]


@pytest.mark.parametrize(
    ("left", "right", "name"),
    [
        (*SPECS[1], "mxfp8"),
        slow(*SPECS[1], "full"),
        slow(*SPECS[1], "dequantized"),
        *(slow(*p, "mxfp8") for p in SPECS[::2]),
    ],
)
def test_shardings_in_types(left: Any, right: Any, name: str) -> None:
    """Types say how results are sharded, gradients are sharded like their operands, and results are those of one device
    up to the order of sums.
    """
    x, w, dy = normal(64, 128), normal(128, 64, seed=1), normal(64, 64, seed=2)
    linear = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=RECIPES[name])
    expected = quick_jit(partial(three_products, linear))(x, w, dy)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        shards = put(mesh, x, *left), put(mesh, w, *right), put(mesh, dy, left[0], right[1])
        results = quick_jit(partial(three_products, linear))(*shards)
        for result, spec in zip(results, ((left[0], right[1]), left, right), strict=True):
            assert jax.typeof(result).sharding.spec == P(*spec)
    for a, b in zip(results, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-4)


@pytest.mark.any_jax
def test_shard_map() -> None:
    """Each device multiplies its own shard, and the gradient of the shared weight is the sum over devices."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    x, w = normal(64, 32), normal(32, 16, seed=1)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        f = jax.shard_map(LINEAR, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
        return jnp.sum(jnp.tanh(f(x, w)))

    value, gradient = quick_jit(jax.value_and_grad(loss))(w, x)
    one_device = quick_jit(jax.value_and_grad(lambda w, p: jnp.sum(jnp.tanh(LINEAR(p, w)))))
    parts = [one_device(w, p) for p in x.reshape(8, 8, 32)]
    np.testing.assert_allclose(float(value), sum(float(v) for v, _ in parts), rtol=1e-5)
    expected = sum(np.asarray(g) for _, g in parts)
    np.testing.assert_allclose(np.asarray(gradient), expected, rtol=1e-4, atol=1e-4)
