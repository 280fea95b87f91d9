"""Recommends the bundled policy that reaches a loss soonest in a program on a GPU.

The step times are predictions of the cost model for the program; the tokens for an equal loss were measured on small
models.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from policyc.compiler.matching.execution import ExecutionOptions
from policyc.compiler.planning.idle_rules import find_deciding_rules
from policyc.compiler.planning.plan import Plan, make_plan
from policyc.compiler.planning.plan_checks import check_plan
from policyc.compiler.schedule import SCHEDULE
from policyc.hardware import step_cost
from policyc.hardware.gemm_cost import speed_up_bounds
from policyc.hardware.mesh import MeshShape
from policyc.hardware.training_step import TrainingStep
from policyc.language.bundled import RECOMMENDED
from policyc.language.diagnostics import PolicyError
from policyc.language.loader import load
from policyc.language.policy import Policy
from policyc.language.policy_tables import read_measured
from policyc.numerics.backends import PRICED
from policyc.numerics.targets import TARGETS, find_by_device_kind, get_target

REFERENCE = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The policy that reaches a loss soonest on a machine, and why. `str` is one line."""

    machine: str
    name: str
    reason: str
    considered: tuple[str, ...] = ()

    @property
    def policy(self) -> Policy:
        return load(self.name)

    def __str__(self) -> str:
        others = f"; considered: {', '.join(self.considered)}" if self.considered else ""
        return f"{RECOMMENDED} on {self.machine}: {self.name}, {self.reason}{others}"


def recommend_here(plan: Plan) -> Recommendation:
    """Recommends a policy for the devices of this process and the loss of a plan."""
    device = jax.devices()[0]
    kind, capability = str(device.device_kind), str(getattr(device, "compute_capability", ""))
    same = (t for t in TARGETS.values() if capability == "{}.{}".format(*t.compute_capability))
    target = None
    if device.platform == "gpu":
        target = find_by_device_kind(kind) or next(same, None)
    if target is None:
        reason = "since 'policyc targets' lists no GPU like it"
        return Recommendation(machine=kind, name=REFERENCE, reason=reason)
    execution = ExecutionOptions(backend=plan.execution.backend, target=target)
    step = TrainingStep(plan=make_plan(plan.policy, plan.sites, execution))
    rows = max(site.batch * site.m for site in plan.sites)
    return recommend(step, MeshShape(fsdp=min(jax.device_count(), rows)))


def recommend_for(
    step: TrainingStep, target: str, mesh: MeshShape, *, sets_steps: bool | None
) -> Recommendation:
    """Recommends a policy for a step on a GPU that need not be present, with the backend of predictions."""
    execution = ExecutionOptions(backend=PRICED, target=get_target(target))
    return recommend(step.under(step.plan.policy, execution), mesh, sets_steps=sets_steps)


def recommend(step: TrainingStep, mesh: MeshShape, *, sets_steps: bool | None = None) -> Recommendation:
    """Recommends a policy for a step that is planned for a GPU.

    A policy must be faster than bf16 to the same loss even if the time outside of the cost model stays as it is.

    Args:
      step: the training step, planned for the target under any policy.
      mesh: the device mesh.
      sets_steps: whether the program sets its steps, which a schedule needs; None: whether it has done so.
    """
    target = step.target
    if sets_steps is None:
        sets_steps = SCHEDULE.step is not None and SCHEDULE.total is not None
    reference = step_cost.scheduled_seconds(step.under(load(REFERENCE)), target, mesh)
    speed_ups: dict[str, float] = {}
    left_out: dict[str, list[str]] = {}
    measured = read_measured()
    for name in measured:
        under = step.under(load(name))
        reason = find_refusal(under)
        if not reason and under.plan.policy.step_conditions and not sets_steps:
            reason = "the program does not call policyc.set_step(n, total=N)"
        if reason:
            left_out.setdefault(reason, []).append(name)
        else:
            speed_ups[name] = reference / step_cost.scheduled_seconds(under, target, mesh)
    tokens = {name: measured[name]["tokens"] for name in speed_ups}
    ranked = sorted(speed_ups, key=lambda name: tokens[name] / speed_ups[name])
    best = next((n for n in ranked if speed_up_bounds(speed_ups[n])[0] > tokens[n]), REFERENCE)
    gains = {name: f"{speed_ups[name] / tokens[name]:.2f}x" for name in ranked}
    if best == REFERENCE:
        reason = "since no policy with fewer bits reaches its loss sooner"
    else:
        reason = (
            f"{gains.pop(best)} sooner at the loss of {REFERENCE} (steps {speed_ups[best]:.2f}x as fast, predicted; "
            f"{tokens[best] - 1:.1%} more tokens, docs/results/{measured[best]['runs']})"
        )
    considered = [f"{name} {gain}" for name, gain in gains.items()]
    considered += [f"not {' and '.join(names)} ({reason})" for reason, names in left_out.items()]
    return Recommendation(machine=target.name, name=best, reason=reason, considered=tuple(considered))


def find_refusal(step: TrainingStep) -> str:
    """Why a policy cannot be tried on this model; empty if it can."""
    try:
        check_plan(step.plan)
    except PolicyError as error:
        return error.diagnostics[0].message
    if step.plan.policy.changes_nothing or find_deciding_rules(step.plan)[0]:
        return ""
    return "none of its rules decides anything here"
