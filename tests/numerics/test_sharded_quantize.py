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
from policyc.numerics.backends.choice import GemmQuery, Machine, choose
from policyc.numerics.backends.sharded import quantize_sharded
from policyc.numerics.gemm import GemmOptions, quantized_dot_general
from policyc.numerics.primitives import QuantizeSpec
from policyc.numerics.quantize import Axes, make_key, quantize
from policyc.numerics.quantize.kernels import fused_kernels as kernels
from policyc.numerics.quantize.orders import OrderRequest
from tests.numerics.test_kernels import (
    COLUMNS,
    NEAREST,
    REFINED,
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


def run_sharded(shape: tuple[int, ...], spec: P, orders: list[OrderRequest], reference: Any) -> list[str]:
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
    shape: tuple[int, ...], spec: P, orders: list[OrderRequest], reference: Any
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


# Without a rotation, which comes before the kernels. It is ROWS and COLUMNS whose random words differ.
EDEN = replace(REFINED["ms_eden"], rht=0)


def assert_sharding_changes_no_refined_scale(shape: tuple[int, ...], axes: Axes) -> None:
    def reference(x: jax.Array) -> Any:
        return [quantize(x, EDEN, axes, key=make_key(7))]

    orders = [OrderRequest(treatment=EDEN, axes=axes, key=make_key(7))]
    assert_sharding_changes_no_bit(shape, P("a", "b", "c"), orders, quick_jit(reference))


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("axes", [ROWS, COLUMNS])
def test_shards_by_interpreted_kernels_have_the_refined_scales_of_the_whole(axes: Axes) -> None:
    assert_sharding_changes_no_refined_scale((4, 128, 512), axes)


# ---- two GEMMs at once

DY = (
    QuantizeSpec(replace(STOCHASTIC, rht=0), ROWS),
    QuantizeSpec(STOCHASTIC, replace(COLUMNS, contract=(-2,))),
)
"""How the GEMMs of dgrad and wgrad read dy."""
NAMES = ("dgrad.dy", "wgrad.dy")
KEY = make_key(3)


def quantize_pair(x: jax.Array, backend: str) -> Any:
    return primitives.quantize_pair(x, DY, operands=NAMES, rounding_key=KEY, backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["emulate", "xla"])
def test_an_operand_of_two_gemms_has_the_codes_of_each(backend: str) -> None:
    x = normal(64, 256)

    def alone(x: jax.Array) -> Any:
        return [
            primitives.quantize(x, s.treatment, s.axes, operand=name, keys=(KEY, KEY), backend=backend)
            for s, name in zip(DY, NAMES, strict=True)
        ]

    pair = quick_jit(partial(quantize_pair, backend=backend))(x)
    for one, other in zip(pair, quick_jit(alone)(x), strict=True):
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
        return primitives.quantize(x, NEAREST, COLUMNS).codes

    assert count_kernels(quantize, x) == 2
    assert count_kernels(jax.vmap(quantize), x) == 2
    assert count_kernels(quantize, x[:, :48]) == 0


@pytest.mark.slow
def test_two_kernels_quantize_for_both_gemms() -> None:
    """None where the operand does not fit: XLA quantizes it. The cost model counts as many reads."""
    run = partial(quantize_pair, backend="xla")
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


@pytest.mark.parametrize(
    ("gemm", "sizes", "reason"),
    [
        (Gemm.FPROP, {"k": 256, "m": 64, "n": 256}, None),
        (Gemm.FPROP, {"k": 256, "m": 96, "n": 256}, "rows % 64 == 0, but fprop has 96"),
        (Gemm.DGRAD, {"k": 256, "m": 64, "n": 64}, None),
        (Gemm.DGRAD, {"k": 128, "m": 64, "n": 64}, "contracted >= 256, but dgrad has 128"),
        (Gemm.DGRAD, {"k": 272, "m": 64, "n": 64}, None),
        (Gemm.WGRAD, {"k": 128, "m": 256, "n": 256}, None),
        (Gemm.WGRAD, {"k": 64, "m": 256, "n": 256}, "contracted % 128 == 0, but wgrad has 64"),
    ],
)
def test_why_no_kernel_refines_scales(gemm: Gemm, sizes: dict[str, int], reason: str | None) -> None:
    treatment = REFINED["four_over_six" if gemm is Gemm.FPROP else "ms_eden"]
    query = GemmQuery(gemm=gemm, left=treatment, right=treatment, **sizes)
    obstacle = choose("xla", query, BLACKWELL).quantizer_obstacle
    assert (obstacle and obstacle.reason) == (reason and f"the kernels that refine scales require {reason}")


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
