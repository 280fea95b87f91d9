"""Emulated products on several devices: each device multiplies its shards."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from policyc.jaxcore.primitives.define_primitive import LoweringContext
from policyc.language.recipes import Treatment
from policyc.numerics.backends import emulate
from policyc.numerics.backends.sharded_gemm import multiply_sharded
from policyc.numerics.gemm import quantized_dot_general
from policyc.numerics.quantize import Axes, Quantized, quantize
from policyc.numerics.quantize.reference.values import decode_values
from tests.support.gemms import FULL, MATMUL, quick_jit

NVFP4 = Treatment(format="nvfp4", element="e2m1")
"""Sums of small integers under outer scales that are powers of two are exact, however they are divided."""
CONTRACT_LAST = (((1,), (1,)), ((), ()))
ON_CPU = LoweringContext(platform="cpu", single_device=True)


def integers(*shape: int) -> jax.Array:
    """Small integers, and 5.25 = 2688 / 512: the outer scale is a power of two."""
    x = np.random.default_rng(len(shape)).integers(-3, 4, shape).astype(np.float32)
    x.flat[0] = 5.25
    return jnp.asarray(x, jnp.bfloat16)


# Compiled: op by op, they would take longer than the test.
@partial(jax.jit, static_argnums=(1, 2))
def rows(x: jax.Array, axis: int = -1, treatment: Treatment = NVFP4) -> Quantized:
    return quantize(x, treatment, Axes(axis=axis))


@partial(jax.jit, static_argnames="decoded")
def tiles(w: jax.Array, *, decoded: bool = False) -> Quantized:
    q = quantize(w, replace(NVFP4, tile2d=True), Axes(axis=-2, tile=-1))
    return decode_values(q, jnp.float32) if decoded else q


def collectives(text: str) -> list[str]:
    """The kind and the type of each collective of a program. On CPU, XLA gathers bfloat16 as fp32."""
    found = re.findall(r"= (\w+)\[[\d,]*\]\S* (all-gather|all-reduce|reduce-scatter|all-to-all)\(", text)
    return sorted(f"{kind} {dtype}" for dtype, kind in found)


def run_divided(
    operands: tuple[Any, Any], specs: tuple[P, P], dimensions: Any, result: P
) -> tuple[jax.Array, list[str]]:
    """The product on eight devices, with operands and result sharded like this, and the collectives of its program."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])

    def put(operand: Any, spec: P) -> Any:
        def put_array(array: jax.Array) -> jax.Array:
            # A dimension with one number for all is not sharded.
            own = [
                axes if size > 1 else None
                for axes, size in zip((*spec, *(None,) * array.ndim), array.shape, strict=False)
            ]
            return jax.device_put(array, NamedSharding(mesh, P(*own)))

        return jax.tree.map(put_array, operand)

    multiply = partial(emulate.BACKEND.gemm, out=jnp.float32, context=ON_CPU)
    run = jax.jit(
        lambda a, b: multiply_sharded(a, b, dimensions, multiply), out_shardings=NamedSharding(mesh, result)
    )
    arguments = [put(operand, spec) for operand, spec in zip(operands, specs, strict=True)]
    compiled = run.lower(*arguments).compile()
    return compiled(*arguments), collectives(compiled.as_text())


def divide(operands: tuple[Any, Any], specs: tuple[P, P], result: P, dimensions: Any = MATMUL) -> list[str]:
    """Asserts that the divided product equals the whole one, and returns the collectives of its program."""
    product, found = run_divided(operands, specs, dimensions, result)
    multiply = partial(emulate.BACKEND.gemm, dimensions=dimensions, out=jnp.float32, context=ON_CPU)
    np.testing.assert_array_equal(np.asarray(product), np.asarray(quick_jit(multiply)(*operands)))
    return found


@pytest.mark.parametrize(
    ("weight", "gathered"),
    [
        pytest.param(tiles(integers(128, 64)), ["all-gather u8"] * 2, id="codes and scales"),
        pytest.param(tiles(integers(128, 64), decoded=True), ["all-gather f32"], id="values"),
        pytest.param(integers(128, 64), ["all-gather f32"], id="not quantized"),
    ],
)
def test_fsdp_gathers_weights(weight: Any, gathered: list[str]) -> None:
    """And no activation."""
    operands = rows(integers(256, 128)), weight
    assert divide(operands, (P("a", None), P("a", None)), P("a", None)) == gathered


def test_fsdp_scatters_gradients_of_weights() -> None:
    """Tokens are contracted. The result is scattered along its rows, or along its columns."""
    x, dy = rows(integers(256, 128), -2), rows(integers(256, 64), -2)
    contract = (((0,), (0,)), ((), ()))
    for result in (P("a", None), P(None, "a")):
        found = divide((x, dy), (P("a", None), P("a", None)), result, contract)
        assert [kind.split()[0] for kind in found] in (["reduce-scatter"], ["all-reduce"])


def test_tensor_parallelism_gathers_nothing() -> None:
    x, w = rows(integers(256, 128)), tiles(integers(128, 64))
    assert divide((x, w), (P("a", None), P(None, "b")), P("a", "b")) == []
    assert divide((x, w), (P("a", "b"), P("b", None)), P("a", None)) == ["all-reduce f32"]


def test_batch_dimensions_are_divided() -> None:
    a, b = rows(integers(8, 64, 128)), rows(integers(8, 32, 128))
    dimensions = (((2,), (2,)), ((0,), (0,)))
    spec = P("a", None, None)
    assert divide((a, b), (spec, spec), spec, dimensions) == []


def test_three_dimensions_of_activations() -> None:
    operands, spec = (rows(integers(8, 32, 128)), tiles(integers(128, 64))), P("a", "b", None)
    assert divide(operands, (spec, P(None, None)), spec, (((2,), (0,)), ((), ()))) == []


def test_padded_dimensions_are_not_divided() -> None:
    """72 features are padded to 80, and 24 rows of tiles to 32."""
    x, w = rows(integers(256, 72)), rows(integers(64, 72))
    assert divide((x, w), (P("a", None), P("b", None)), P("a", "b"), CONTRACT_LAST) == []
    padded = x, tiles(integers(72, 24))
    assert divide(padded, (P("a", None), P(None, "b")), P("a", None)) == ["all-gather u8"] * 2


@pytest.mark.parametrize(
    "treatment",
    [
        Treatment(format="mxfp8", element="e4m3"),
        Treatment(format="fp8", element="e4m3"),
        replace(NVFP4, outer="row"),
    ],
    ids=["mxfp8", "fp8", "nvfp4, a scale per row"],
)
def test_other_formats_are_divided(treatment: Treatment) -> None:
    x, w = (rows(integers(size, 128), treatment=treatment) for size in (256, 64))
    assert divide((x, w), (P("a", None), P(None, None)), P("a", None), CONTRACT_LAST) == []


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_without_gpus_a_program_is_lowered_for_an_abstract_mesh(platform: str) -> None:
    """XLA then divides its products, because JAX tells no devices to a rule."""
    mesh = AbstractMesh((8,), ("a",), axis_types=(AxisType.Auto,))
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((256, 128), P("a")), ((128, 64), P()))
    )

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return quantized_dot_general(x, w, MATMUL, FULL).astype(jnp.float32).sum()

    exported = jax.export.export(jax.jit(jax.grad(loss)), platforms=(platform,))(w, x)
    assert exported.nr_devices == 8
    assert "CustomSPMDPartitioning" not in exported.mlir_module()


def test_only_products_on_several_gpus_are_divided() -> None:
    x, w = (jax.eval_shape(rows, jax.ShapeDtypeStruct((size, 128), jnp.bfloat16)) for size in (256, 64))

    def is_divided(context: LoweringContext) -> bool:
        multiply = partial(emulate.BACKEND.gemm, dimensions=CONTRACT_LAST, out=jnp.bfloat16, context=context)
        return "custom_partitioning" in str(jax.make_jaxpr(multiply)(x, w))

    several = LoweringContext(platform="cuda", can_partition=True)
    assert is_divided(several)
    for context in (
        replace(several, platform="cpu"),
        LoweringContext(platform="cuda", is_partly_manual=True),
    ):
        assert not is_divided(context)
