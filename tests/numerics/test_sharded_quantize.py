"""NVFP4 operands quantized by kernels: on several devices, for two GEMMs at once, and in programs lowered for CUDA."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import policyc
from policyc.compiler.tables.plan_tables import lowering_reasons
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.language.recipes import Gemm
from policyc.numerics import backends, primitives
from policyc.numerics.backends import GemmQuery
from policyc.numerics.backends.choice import Machine, choose
from policyc.numerics.gemm import GemmOptions, quantized_dot_general
from policyc.numerics.quantize import Request, make_key
from policyc.numerics.quantize.kernels import fused_kernels as kernels
from policyc.numerics.quantize.orders import quantize_sharded
from tests.numerics.test_kernels import (
    COLUMNS,
    NEAREST,
    ROWS,
    STOCHASTIC,
    assert_equal,
    normal,
    reference_quantizer,
    requests,
)
from tests.support.gemms import FULL, MATMUL, quick_jit

BLACKWELL = Machine("gb200", frozenset({"nvfp4", "fp8"}))


# ---- shards


def run_sharded(shape: tuple[int, ...], spec: P, orders: list[Request], reference: Any) -> list[str]:
    """Checks that the sharding changes no bit. Returns the types of what is gathered."""
    axes = (AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=axes, devices=jax.devices()[:8])
    x = normal(*shape)
    sharded = jax.device_put(x, NamedSharding(mesh, spec))
    run = jax.jit(lambda x: quantize_sharded(x, orders, kernels.Kernels(interpret=True)))
    compiled = run.lower(sharded).compile()
    for one, other in zip(compiled(sharded), reference(x), strict=True):
        assert_equal(one, other)
    return re.findall(r"(\S+) all-gather\(", compiled.as_text())


def assert_sharding_changes_no_bit(
    shape: tuple[int, ...], spec: P, orders: list[Request], reference: Any
) -> None:
    # Two words of each device for each order, and nothing else, are gathered.
    assert run_sharded(shape, spec, orders, reference) == [f"u32[8,{2 * len(orders)}]{{1,0}}"]


@pytest.mark.slow
def test_shards_without_whole_tiles_are_gathered() -> None:
    """Only as far as the kernels need: the rows stay divided. A warning says so."""
    warning = "NVFP4 quantizer: its kernels need .* at least 256 features, but a device has 64 and 128. So it gathers"
    with pytest.warns(UserWarning, match=warning):
        gathered = run_sharded(
            (4, 64, 256), P("a", "b", "c"), requests("nearest"), reference_quantizer("nearest")
        )
    assert [re.findall(r"\[(.*)\]", type_)[0] for type_ in gathered] == ["2,32,256", "4,4"]


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("pair", ["stochastic", "stochastic values"])
def test_shards_by_interpreted_kernels_have_the_bits_of_the_whole(pair: str) -> None:
    reference = reference_quantizer(pair)
    assert_sharding_changes_no_bit((4, 128, 512), P("a", "b", "c"), requests(pair), reference)


# ---- two GEMMs at once

KEY = make_key(3)
DY = (
    Request(replace(STOCHASTIC, rht=0), ROWS, operand="dgrad.dy", key=KEY),
    Request(STOCHASTIC, replace(COLUMNS, contract=(-2,)), operand="wgrad.dy", key=KEY),
)
"""How the GEMMs of dgrad and wgrad read dy."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["emulate", "xla"])
def test_an_operand_of_two_gemms_has_the_codes_of_each(backend: str) -> None:
    x = normal(64, 256)
    pair = quick_jit(partial(primitives.quantize_pair, requests=DY, backend=backend))(x)
    alone = quick_jit(lambda x: [primitives.quantize(x, r, backend=backend) for r in DY])(x)
    for one, other in zip(pair, alone, strict=True):
        assert one.layout == other.layout
        assert_equal(one, other)


@pytest.mark.parametrize("backend", ["emulate", "xla"])
def test_a_gradient_reads_each_operand_once(backend: str) -> None:
    """The activation and dy each have one equation for both of their GEMMs, the weight has one for its tiles."""

    options = GemmOptions(backends=(backend,) * 3)

    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        return quantized_dot_general(x, w, MATMUL, FULL, options).astype(jnp.float32).sum()

    gradient = jax.make_jaxpr(jax.grad(multiply, (0, 1)))(normal(64, 256), normal(256, 256))
    eqns = [e for e in jaxprs.all_equations(gradient.jaxpr) if jaxprs.primitive_name(e) == "nvfp4_quantize"]
    assert Counter(len(eqn.params["specs"]) for eqn in eqns) == {2: 2, 1: 1}


# ---- lowering for CUDA


def count_kernels(function: Any, *args: Any) -> int:
    text: str = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("mosaic_gpu_v2")


@pytest.mark.slow
def test_kernels_in_programs_for_cuda() -> None:
    """Two kernels for an operand that is rotated, or for all under a `vmap`. None for one that does not fit."""
    x = normal(2, 64, 256)

    def quantize(x: jax.Array) -> Any:
        return primitives.quantize(x, Request(NEAREST, COLUMNS)).codes

    assert count_kernels(quantize, x) == 2
    assert count_kernels(jax.vmap(quantize), x) == 2
    assert count_kernels(quantize, x[:, :48]) == 0


@pytest.mark.slow
def test_two_kernels_quantize_for_both_gemms() -> None:
    """None where the operand does not fit: XLA quantizes it. The cost model counts as many reads."""
    run = partial(primitives.quantize_pair, requests=DY, backend="xla")
    assert count_kernels(run, normal(64, 256)) == 2
    assert {backends.load(name).count_reads([s.treatment for s in DY]) for name in ("emulate", "xla")} == {2}
    assert count_kernels(run, normal(64, 128)) == 0


# ---- the plan


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"left": replace(STOCHASTIC, rht=0), "right": replace(STOCHASTIC, rht=0), "m": 100}, None),
        ({"k": 96}, "require contracted % 64 == 0, but wgrad has 96"),
        ({"m": 264}, "require rows % 16 == 0, but wgrad has 264"),
        ({"n": 240}, "require columns >= 256, but wgrad has 240"),
        ({"m": 272, "n": 272}, None),
        ({"batch": 2}, "take no batch dimensions"),
        ({"types": ("bfloat16", "float32")}, "take bfloat16, not float32"),
    ],
)
def test_why_no_kernel_quantizes(fields: dict[str, Any], reason: str | None) -> None:
    query = GemmQuery(
        **({"gemm": Gemm.WGRAD, "left": NEAREST, "right": STOCHASTIC, "m": 256, "n": 512, "k": 64} | fields)
    )
    obstacle = choose("xla", query, BLACKWELL).quantizer_obstacle
    assert (obstacle and obstacle.reason) == (reason and f"the kernels that rotate {reason}")


def test_the_plan_says_where_no_kernel_quantizes() -> None:
    def loss(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return (x @ w["narrow"]).astype(jnp.float32).sum() + (x @ w["wide"]).astype(jnp.float32).sum()

    shapes = {
        name: jax.ShapeDtypeStruct((256, n), jnp.bfloat16) for name, n in (("narrow", 224), ("wide", 272))
    }
    x = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)
    policy = "* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)"
    plan = policyc.plan(policy, loss, shapes, x, backend="xla", target="gb200")
    assert list(lowering_reasons(plan)) == [
        "quantized by XLA (wgrad): the kernels that rotate require columns >= 256, but wgrad has 224; "
        "pad 224 to 256"
    ]
