"""Predicts how fast each policy of a sweep trains a large model on a GPU, with the cost model of `policyc estimate`."""

from __future__ import annotations

from collections.abc import Mapping

from policyc.compiler.execution import execution_options
from policyc.experiments.report.build import PredictedStep
from policyc.hardware import llama_step, step_cost
from policyc.hardware.mesh import parse_mesh
from policyc.language.loader import parse


def predict_speed_ups(policies: Mapping[str, str], baseline: str, step: PredictedStep) -> dict[str, float]:
    """The speed-up of each policy over the baseline. Raises ValueError if the step is not possible.

    A policy with a schedule has the mean time of all steps of a training. `policies` are texts by name, that of the
    baseline among them.
    """
    execution = execution_options(step.backend, step.target)
    mesh = parse_mesh(f"fsdp={step.devices}", step.devices)
    first = parse(policies[baseline])
    traced = llama_step.plan_step(first, step.config, mesh, llama_step.Sizes(), execution)
    target = execution.target
    assert target is not None
    seconds = {
        name: step_cost.scheduled_seconds(traced.under(parse(text)), target, mesh)
        for name, text in policies.items()
    }
    return {name: seconds[baseline] / each for name, each in seconds.items()}
