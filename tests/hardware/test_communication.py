"""What devices send each other, against the collectives of compiled steps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from policyc.compiler.matching.execution import execution_options
from policyc.compiler.planning.plan import make_plan
from policyc.hardware import llama_step
from policyc.hardware.communication import activation_traffic, communication_seconds, weight_traffic
from policyc.hardware.mesh import MeshShape, exchange_seconds
from policyc.hardware.training_step import TrainingStep
from policyc.language.loader import load
from policyc.language.policy import Policy
from policyc.models.llama.configs import find_config
from policyc.numerics.targets import get_target

MESH = MeshShape(fsdp=8)
MICROBATCHES = 64


@cache
def traced() -> TrainingStep:
    return llama_step.plan_step(
        Policy(), "llama3_8b", MESH, llama_step.Sizes(batch=1024), execution_options()
    )


def step_under(policy: str, backend: str = "xla") -> TrainingStep:
    step = traced()
    assert step.accumulate == MICROBATCHES
    plan = make_plan(load(policy), step.plan.sites, execution_options(backend, "gb200"))
    return TrainingStep(plan=plan, accumulate=step.accumulate, remat=step.remat, model=step.model)


# GB per step of the 8B on 8 GB200: what `policyc compile` found. The compiled step gathers the head once for fprop and
# dgrad together, 67.2 GB that the model counts twice.
COMPILED = {
    ("fp8", "xla"): 893.4 + 67.2,
    ("llama_nvfp4", "xla"): 410.8 + 363.6,
    ("quartet2", "xla"): 502.5 + 67.2,
    ("te_nvfp4", "te"): 446.7 + 67.2,
}
SUMMED = 960.6
HEAD = 128256 * 4096 * 2 * MICROBATCHES / 1e9


@pytest.mark.parametrize(("policy", "backend"), COMPILED)
def test_weights_are_gathered_and_summed_as_in_the_compiled_step(policy: str, backend: str) -> None:
    gathered, summed = (MICROBATCHES * n / 1e9 for n in weight_traffic(step_under(policy, backend)))
    assert gathered - HEAD == pytest.approx(COMPILED[policy, backend], rel=1e-3)
    assert summed == pytest.approx(SUMMED, rel=1e-3)


def test_weights_that_are_gathered_once_per_step() -> None:
    """What `policyc compile --gather once` found for fp8 and te_nvfp4 alike: bf16 weights and fp32 gradients.

    The compiled step also has the gradient of the embedding, which no GEMM reads.
    """
    step, target = replace(step_under("fp8"), gathers_once=True), get_target("gb200")
    gathered, summed = weight_traffic(step)
    embedding = 128256 * 4096 * 4
    assert gathered == pytest.approx(15.009e9, rel=1e-3)
    assert summed + embedding == pytest.approx(32.120e9, rel=1e-3)
    alone = communication_seconds(step, target, MeshShape(fsdp=8))
    assert alone == pytest.approx(exchange_seconds(target, gathered + summed, 8, 1))


def test_data_adds_the_sums_of_every_microbatch() -> None:
    step, target = step_under("bf16"), get_target("gb200")
    _, summed = weight_traffic(step)
    alone = communication_seconds(step, target, MeshShape(data=8))
    assert alone == pytest.approx(MICROBATCHES * exchange_seconds(target, 2 * summed, 8, 1))


# GB per step in compiled steps under te_nvfp4 with backend te: all-reduces of bf16 for the 405B, and for the 8B all
# collectives but gathers and scatters.
LLAMA_8B, LLAMA_405B = (find_config(name)[0] for name in ("llama3_8b", "llama3_405b"))
ALL_REDUCED = [
    pytest.param(1024, MeshShape(fsdp=4, tensor=2), "dots", LLAMA_8B, 2285, id="8B"),
    pytest.param(2048, MeshShape(data=16, fsdp=8, tensor=8), "full", LLAMA_405B, 2911, id="405B, tensor=8"),
    pytest.param(2048, MeshShape(data=16, fsdp=32, tensor=2), "full", LLAMA_405B, 727.8, id="405B, tensor=2"),
]


@pytest.mark.parametrize(("batch", "mesh", "remat", "model", "compiled"), ALL_REDUCED)
def test_activations_are_summed_as_in_the_compiled_step(batch, mesh, remat, model, compiled) -> None:
    """A sum counts twice here: it is scattered and gathered. The compiled steps also sum gradients over data.

    The collectives of the 8B step that are no such sums are 4 %.
    """
    step = replace(step_under("bf16"), remat=remat, model=model, accumulate=batch * 8192 / (16 * 8192))
    gradients = 1615 / mesh.fsdp if mesh.data > 1 else 0
    moved = activation_traffic(step, mesh)[0] / 2e9
    assert moved + gradients == pytest.approx(compiled, rel=0.04)
