"""Stacks of saved activations: their bytes, and the time of a step against compiled steps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest

import policyc
from policyc.compiler.matching.execution import execution_options
from policyc.compiler.planning.plan import make_plan
from policyc.hardware import llama_step
from policyc.hardware.mesh import MeshShape
from policyc.hardware.saved_activations import device_memory, stacked_bytes
from policyc.hardware.step_cost import estimate
from policyc.hardware.training_step import TrainingStep
from policyc.language.loader import load
from policyc.language.policy import Policy
from policyc.models.llama.configs import ModelConfig
from policyc.numerics.targets import get_target

TOKENS, WIDTH, INNER, LAYERS = 4096, 256, 1024, 3


def layer(x, w):
    return jnp.tanh(x @ w["up"]) @ w["down"], None


def scanned(w, x):
    return jnp.sum(jax.lax.scan(layer, x, w)[0])


def unrolled(w, x):
    for i in range(LAYERS):
        x, _ = layer(x, jax.tree.map(lambda stack, i=i: stack[i], w))
    return jnp.sum(x)


def training_step(policy: str, loss=scanned, **fields) -> TrainingStep:
    weights = {
        "up": jax.ShapeDtypeStruct((LAYERS, WIDTH, INNER), "bfloat16"),
        "down": jax.ShapeDtypeStruct((LAYERS, INNER, WIDTH), "bfloat16"),
    }
    tokens = jax.ShapeDtypeStruct((TOKENS, WIDTH), "bfloat16")
    plan = policyc.plan(policy, loss, weights, tokens, backend="xla", target="gb200")
    return TrainingStep(plan=plan, **fields)


RESULTS = 2 * (INNER + WIDTH)
INPUTS = 2 * (WIDTH + INNER)
CODES = WIDTH + INNER


@pytest.mark.parametrize(
    ("policy", "remat", "bytes"),
    [
        ("* -> bf16", "none", RESULTS + INPUTS),
        ("* -> bf16", "dots", RESULTS),
        ("* -> bf16", "full", 0),
        ("* -> fp8", "dots", RESULTS + CODES),
        ("* -> fp8", "quantized", CODES),
        ("* -> fp8", "full", 0),
        ("* -> nvfp4", "dots", RESULTS + CODES * (0.5 + 1 / 16)),
    ],
)
def test_what_a_scan_over_layers_saves(policy, remat, bytes):
    step = training_step(policy, remat=remat)
    assert stacked_bytes(step, MeshShape()) == LAYERS * TOKENS * bytes
    assert stacked_bytes(step, MeshShape(fsdp=4)) == LAYERS * TOKENS * bytes / 4


def test_the_input_of_a_layer_and_the_output_of_attention():
    model = ModelConfig(layers=LAYERS, width=WIDTH, heads=4, head_dim=32)
    full, dots = (training_step("* -> bf16", remat=remat, model=model) for remat in ("full", "dots"))
    assert stacked_bytes(full, MeshShape()) == LAYERS * TOKENS * 2 * WIDTH
    assert stacked_bytes(dots, MeshShape()) == LAYERS * TOKENS * (RESULTS + 2 * 128)


def test_layers_that_are_not_in_a_scan_have_no_stacks():
    step = training_step("* -> fp8", unrolled)
    assert stacked_bytes(step, MeshShape()) == 0


@cache
def traced() -> TrainingStep:
    return llama_step.plan_step(
        Policy(), "llama3_8b", MeshShape(fsdp=8), llama_step.Sizes(batch=1024), execution_options()
    )


# Seconds of all kernels but GEMMs and attention in the 8B step on 8 GB200, by `policyc estimate --compiled`.
COMPILED = {"fp8": 10.62, "te_nvfp4": 11.58, "te_nvfp4_no_rht": 9.5, "llama_nvfp4": 9.58, "quartet2": 27.63}
FAST = ("te_nvfp4", "quartet2")  # by te and by xla


@pytest.mark.parametrize(
    "policy",
    [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in COMPILED if name not in FAST)],
)
def test_a_step_takes_as_long_as_the_compiled_one(policy: str) -> None:
    """Within a tenth. The model does not know small kernels, nor how weights are rearranged."""
    step, target, mesh = traced(), get_target("gb200"), MeshShape(fsdp=8)
    plan = make_plan(load(policy), step.plan.sites, execution_options("te", "gb200"))
    parts = estimate(replace(step, plan=plan), target, mesh)
    computed = {part: parts.compute[part] for part in ("gemms", "attention")}
    compiled = replace(parts, compute=computed | {"other kernels": COMPILED[policy]})
    assert parts.seconds == pytest.approx(compiled.seconds, rel=0.1)


# Memory per device of compiled steps, in GB, from XLA's own analysis: docs/reference/status.md.
COMPILED_MEMORY = [
    ("llama3_8b", MeshShape(fsdp=8), None, "fp8", 94.7),
    ("llama3_8b", MeshShape(fsdp=8), None, "llama_nvfp4", 84.8),
    ("llama3_8b", MeshShape(fsdp=8), None, "te_nvfp4", 87.5),
    ("llama3_8b", MeshShape(fsdp=4, tensor=2), None, "fp8", 65.4),
    ("llama3_8b", MeshShape(fsdp=4, tensor=2), None, "te_nvfp4", 58.3),
    ("llama3_70b", MeshShape(fsdp=64), "full", "te_nvfp4", 56.2),
    ("llama3_405b", MeshShape(fsdp=128), None, "te_nvfp4", 152.4),
]


@pytest.mark.parametrize(("config", "mesh", "remat", "policy", "compiled"), COMPILED_MEMORY)
def test_compiled_steps_need_a_little_more_memory(config, mesh, remat, policy, compiled):
    """What the model leaves out (gathered weights, codes, what XLA keeps between kernels) is 3 to 22 % more."""
    sizes = llama_step.Sizes(remat=remat)
    step = llama_step.plan_step(load(policy), config, mesh, sizes, execution_options("te", "gb200"))
    assert 1.02 <= 1e9 * compiled / device_memory(step, mesh) <= 1.225
