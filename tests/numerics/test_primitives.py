"""The primitives `quantize` and `scaled_gemm`: how they print, their abstract shapes and their shardings."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from policyc.jaxcore.primitives import lowering
from policyc.jaxcore.primitives.define_primitive import LoweringContext
from policyc.language.recipes import Treatment
from policyc.language.treatments import normalize_recipe
from policyc.numerics import primitives, quantize
from policyc.numerics.backends.emulate import BACKEND as EMULATION
from policyc.numerics.gemm import quantized_dot_general
from tests.support.gemms import FULL, MATMUL, RECIPES, assert_equal_arrays, normal

needs_eight_devices = pytest.mark.skipif(
    len(jax.devices()) < 8, reason="needs 8 devices: XLA_FLAGS in conftest"
)


def test_the_jaxpr_is_readable() -> None:
    product = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=FULL)
    text = str(jax.make_jaxpr(jax.grad(lambda w: jnp.sum(product(normal(16, 32), w))))(normal(32, 16)))
    assert "nvfp4_quantize[" in text
    assert "specs=(1x16@-1 as values, 1x16,rht16@-2)" in text
    assert "operands=('fprop.lhs', 'wgrad.lhs')" in text
    assert "specs=(1x16,sr@-1 as values, 1x16,rht16,sr@-2 as values)" in text
    assert "operands=('dgrad.dy', 'wgrad.dy')" in text
    assert "scaled_gemm[" in text
    assert "shift_right" not in text


@pytest.mark.parametrize("single_device", [False, True])
def test_saved_codes_are_decoded_when_dy_is_there(single_device: bool) -> None:
    """XLA decodes those of all layers at once otherwise, and keeps their values. A kernel runs where it is needed."""
    context = LoweringContext(platform="cuda", single_device=single_device)
    axes = quantize.Axes(axis=-2, contract=(-2,))
    x = quantize.quantize(normal(256, 1024), Treatment(format="nvfp4", element="e2m1"), axes)
    wgrad = partial(EMULATION.gemm, dimensions=(((0,), (0,)), ((), ())), out=jnp.float32, context=context)
    jaxpr = jax.make_jaxpr(wgrad)(x, x)
    barriers = [e for e in jaxpr.eqns if e.primitive.name == "optimization_barrier"]
    joined = [v for e in barriers for v in e.invars if v.aval.dtype == jnp.uint8]
    assert len(joined) == (0 if single_device else 4), "codes and scales of both operands"
    assert ("decode_rows" in str(jaxpr)) == single_device


@pytest.mark.parametrize("single_device", [False, True])
def test_wgrad_runs_before_dgrad_on_one_device(single_device: bool) -> None:
    """Its values of dy take four times the memory of codes. On several devices, dgrad would wait for a sum."""
    context = LoweringContext(platform="cuda", single_device=single_device)
    product = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=FULL)
    x, w = normal(64, 64), normal(64, 256)
    gradients = jax.grad(lambda x, w: jnp.sum(product(x, w)), argnums=(0, 1))
    (equation,) = (e for e in jax.make_jaxpr(gradients)(x, w).eqns if e.primitive.name == "run_first")
    assert "run_first" not in str(jax.make_jaxpr(gradients)(w, w.T)), "dx is larger than dy"
    wgrad, dy, amax = (v.aval for v in equation.invars)
    assert (wgrad.shape, dy.shape, amax.shape) == (w.shape, x.shape[:1] + w.shape[1:], (1, 1))
    ordered = jax.make_jaxpr(partial(lowering._run_first, context=context))(wgrad, dy, amax)
    assert ("optimization_barrier" in str(ordered)) == single_device


def test_abstract_shapes_are_those_of_the_implementation() -> None:
    def shapes(q: Any) -> list[tuple[Any, Any]]:
        return [(a.shape, a.dtype) for a in jax.tree.leaves(q)]

    for t in {t for r in RECIPES.values() for t in normalize_recipe(r).treatments if t.bits in (4, 8)}:
        for shape in ((5, 30), (3, 16, 64)):
            axes = quantize.Axes(axis=-1, tile=-2, batch=(-3,) if len(shape) == 3 else ())
            x = jax.ShapeDtypeStruct(shape, jnp.float32)
            abstract = jax.eval_shape(partial(primitives.quantize, request=quantize.Request(t, axes)), x)
            traced = jax.eval_shape(partial(quantize.quantize, treatment=t, axes=axes), x)
            assert shapes(abstract) == shapes(traced)
            assert abstract.layout == traced.layout


@needs_eight_devices
@pytest.mark.parametrize("compiled", [True, False])
def test_shardings_in_types(compiled: bool) -> None:
    """Codes and scales are sharded like their operand and equal those of one device. Nothing is gathered for them."""
    treatment = Treatment(format="nvfp4", element="e2m1")
    f = partial(primitives.quantize, request=quantize.Request(treatment))

    def quantize_and_multiply(x: jax.Array) -> tuple[Any, jax.Array]:
        q = jax.vmap(f)(x)
        return q, jax.vmap(lambda q: primitives.scaled_gemm(q, q, (((1,), (1,)), ((), ())), jnp.float32))(q)

    x = normal(4, 32, 64)
    expected = jax.jit(quantize_and_multiply)(x)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        shards = jax.device_put(x, NamedSharding(mesh, P("data", None, "model")))
        run = jax.jit(quantize_and_multiply) if compiled else quantize_and_multiply
        q, y = run(shards)
        if compiled:
            assert "all-gather" not in run.lower(shards).compile().as_text()
    specs = [jax.typeof(a).sharding.spec for a in (q.codes, q.scales, q.amax, y)]
    like_operand = P("data", None, "model")
    # The product is summed over the dimension that "model" shards.
    assert specs == [like_operand, like_operand, P("data", None, None), P("data", None, None)]
    assert_equal_arrays(q, expected[0])
    np.testing.assert_allclose(np.asarray(y), np.asarray(expected[1]), rtol=1e-5, atol=1e-4)


@needs_eight_devices
def test_shardings_in_types_of_codes_in_both_orders() -> None:
    treatment, x = Treatment(format="fp8", element="e4m3"), normal(4, 32, 64)
    axes = quantize.Axes(second_order=1)
    f = jax.jit(partial(primitives.quantize, request=quantize.Request(treatment, axes), backend="xla"))
    expected = f(x)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    tiles = Treatment(format="nvfp4", element="e2m1", tile2d=True)
    tile_axes = quantize.Axes(axis=-2, tile=-1, second_order=1)
    with jax.set_mesh(mesh):
        shards = jax.device_put(x, NamedSharding(mesh, P("data", None, "model")))
        q = f(shards)
        packed = jax.eval_shape(
            partial(primitives.quantize, request=quantize.Request(tiles, tile_axes)), shards
        )
    assert packed.transposed_codes.sharding.spec == P("data", None, "model")
    assert packed.transposed_scales.sharding.spec == P("data", "model", None)
    assert jax.typeof(q.codes).sharding.spec == P("data", None, "model")
    assert jax.typeof(q.transposed_codes).sharding.spec == P("model", "data", None)
    assert_equal_arrays(q, expected)
