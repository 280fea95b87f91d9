"""Builds a diff from two plans of the same loss."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from policyc.base.text import as_ranges, escape_controls
from policyc.changes.linears import Prediction, compare_linears, decisions_that_matter
from policyc.changes.matching import MatchedLoss, match_losses
from policyc.changes.model import (
    DiffData,
    DiffSide,
    Linear,
    Stack,
    Totals,
    shorten_path,
)
from policyc.compiler.planning.idle_rules import idle_rules
from policyc.compiler.planning.plan import Decisions, Plan, make_plan
from policyc.compiler.rewriting.rewrite import rewrite
from policyc.compiler.rewriting.rounding import RandomSource
from policyc.compiler.tables.plan_tables import other_products, uncertain_repeats
from policyc.hardware import step_cost
from policyc.hardware.mesh import MeshShape
from policyc.hardware.training_step import TrainingStep
from policyc.language.diagnostics import Severity
from policyc.language.policy import Policy
from policyc.numerics.targets import TARGETS, Target

_ONE_DEVICE = MeshShape()
DEFAULT_TARGET: Target = TARGETS["gb200"]


def build_diff(
    step: TrainingStep,
    *,
    before: Policy | None = None,
    labels: tuple[str, str] = ("no policy", "policy"),
    program: str = "",
    target: Target = DEFAULT_TARGET,
    mesh: MeshShape = _ONE_DEVICE,
    phase: int = 0,
    roots: tuple[str, ...] | None = None,
) -> DiffData:
    """Compares a policy with no policy, or with another one, in one phase of their schedules.

    Args:
      step: the training step, planned under the new policy.
      before: the policy to compare with; None for no policy.
      labels: names of the two sides, before and after.
      program: the program's name.
      target: the GPU for which times are predicted.
      mesh: the device mesh for which times are predicted.
      phase: index of the phase. A schedule with fewer phases uses its last one.
      roots: folders that file paths are shown relative to, so that a shared page does not reveal local folders.
    """
    roots = (os.getcwd(), *sys.path) if roots is None else roots
    after = step.plan
    plan_before = make_plan(before or Policy(), after.sites, after.execution)
    plans = replace(plan_before, constant_inputs=after.constant_inputs), after
    phases = tuple(
        plan.phases[min(phase, len(plan.phases) - 1)] for plan in plans
    )  # a schedule with fewer phases uses its last one
    predictions = [
        Prediction(replace(step, plan=plan), phase, target, mesh)
        for plan, phase in zip(plans, phases, strict=True)
    ]
    linears, cells = compare_linears(plans, phases, predictions)
    decisions = [decisions_that_matter(plan, phase) for plan, phase in zip(plans, phases, strict=True)]
    sides = [
        DiffSide(label=shorten_path(label, roots), policy=policy, seconds=prediction.step_seconds)
        for label, policy, prediction in zip(labels, (before, after.policy), predictions, strict=True)
    ]
    other = replace(step, phase=None).with_other_backend()
    other_seconds = [
        step_cost.estimate(
            replace(under, phase=under.plan.phases[min(phase, len(under.plan.phases) - 1)]), target, mesh
        ).seconds
        for under in (other.under(before or Policy()), other)
    ]
    seconds = [side.seconds for side in sides]
    return DiffData(
        program=program,
        before=sides[0],
        after=sides[1],
        linears=linears,
        stacks=find_stacks(linears),
        totals=count_products(linears),
        cells=cells,
        scans={site.address: tuple(s.address for s in site.stacks) for site in after.sites},
        phase=after.label(phases[1]),
        target=target.name,
        devices=mesh.devices,
        backends=tuple(sorted(_backends(linears))),
        other_backend=None
        if other_seconds == seconds
        else (other.plan.execution.backend, other_seconds[0] / other_seconds[1]),
        batch=(step.sequences, step.sequence) if step.sequences and step.sequence else None,
        matched=_match_losses(plans, decisions),
        refused=tuple(note for plan in plans for note in _refused_rules(plan, roots)),
        notes=(
            *uncertain_repeats(after),
            *(f"not in the predicted time: {line}" for line in other_products(after)),
        ),
        roots=roots,
    )


def _backends(linears: Sequence[Linear]) -> set[str]:
    """The backends that run products natively after the change."""
    products = (product for linear in linears for run in linear.runs for product in run.products)
    lowerings = (p.after.state.lowering for p in products)
    return {lowering.backend for lowering in lowerings if lowering.native} - {""}


def _refused_rules(plan: Plan, roots: Sequence[str]) -> Iterator[str]:
    """Messages about rules that do nothing, for which `policyc apply` refuses the policy."""
    for diagnostic in idle_rules(plan, hint="only the first loss of the program is compared"):
        if diagnostic.severity is Severity.ERROR:
            rule = escape_controls(textwrap.shorten(diagnostic.span.text, 60, placeholder=" …"))
            place = shorten_path(diagnostic.span.location, roots)
            yield f"{place}: '{rule}': {diagnostic.message}: {diagnostic.help}"


def _match_losses(plans: Sequence[Plan], decisions: Sequence[Decisions]) -> MatchedLoss:
    before, after = (
        rewrite(plan.sites, decided, plan.constant_inputs, RandomSource(seed=plan.policy.seed))
        for plan, decided in zip(plans, decisions, strict=True)
    )
    return match_losses(plans[1].sites.jaxpr, before, after)


# ---- stacks, classes and totals


def find_stacks(linears: Sequence[Linear]) -> tuple[Stack, ...]:
    """The stacks of a model, in the order of the linears. Layers that are treated alike form one class."""
    numbers: dict[str, list[int]] = {}
    for number, linear in enumerate(linears):
        numbers.setdefault(linear.stack, []).append(number)
    return tuple(_make_stack(name, members, linears) for name, members in numbers.items())


def _make_stack(name: str, members: Sequence[int], linears: Sequence[Linear]) -> Stack:
    layers = {layer for number in members for run in linears[number].runs for layer in run.layers}
    if not layers:
        return Stack(name=name, size=0, linears=tuple(members), classes=())
    layers_of: dict[Hashable, list[int]] = {}
    for layer in sorted(layers):
        key = tuple(_run_key(linears[number], layer) for number in members)
        layers_of.setdefault(key, []).append(layer)
    classes = tuple(map(as_ranges, layers_of.values()))
    return Stack(name=name, size=max(layers) + 1, linears=tuple(members), classes=classes)


def _run_key(linear: Linear, layer: int) -> Hashable:
    """Key of a layer of a linear: equal for layers that are treated alike, even in different runs."""
    run = next((run for run in linear.runs if run.first is None or layer in run.layers), None)
    if run is None:
        return None
    site = run.site
    return site.batch, site.m, site.n, site.k, site.place, site.opaque, run.products


def count_products(linears: Sequence[Linear]) -> Totals:
    """Counts the products of the whole model."""
    runs = [run for linear in linears for run in linear.runs]
    products = [(run, product) for run in runs for product in run.products]
    return Totals(
        gemms=sum(run.count for run in runs),
        products=sum(run.count for run, _ in products),
        changed=sum(run.count for run, product in products if product.is_changed),
        emulated=sum(run.count for run, product in products if product.after.state.is_emulated),
        opaque=sum(run.count for run, _ in products if run.site.opaque),
    )
