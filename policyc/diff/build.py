"""Builds a diff from two plans of the same loss."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from policyc.compiler.plan import Decision, Phase, Plan, gemm_queries, make_plan
from policyc.compiler.rewrite import rewrite
from policyc.compiler.rounding import RandomSource
from policyc.compiler.sites import Layer, Site
from policyc.diff.earlier import EarlierPlan, read_earlier_plan
from policyc.diff.gradient import match_gradients
from policyc.diff.matching import MatchedLoss, match_losses
from policyc.diff.model import (
    DiffData,
    DiffSide,
    LayerClass,
    Linear,
    LinearLayers,
    ProductChange,
    ProductSide,
    ProductState,
    Stack,
    Totals,
    as_ranges,
)
from policyc.diff.predict import Prediction
from policyc.hardware.gemm_cost import product_format
from policyc.hardware.mesh import MeshShape
from policyc.hardware.training_step import TrainingStep
from policyc.jaxcore.transform import Address
from policyc.language.formats import FORMATS, OTHER_FORMAT_NAMES
from policyc.language.policy import Policy
from policyc.language.recipes import OPERANDS, Gemm, Role, make_recipe
from policyc.language.selectors import DottedPath
from policyc.language.treatments import normalize_if_valid, treatment_words
from policyc.numerics.targets import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffRequest:
    """What to compare: a policy with no policy, or with another one, in one phase of their schedules.

    Attributes:
      step: the training step under the policy after.
      before: the policy before; None: no policy.
      labels: the names of both sides.
      phase: the number of the phase.
      is_gradient: compare the gradients of the loss, where dgrad and wgrad show.
      earlier_plan: the path of a plan to compare with, instead of a policy.
      folder: files of the program are named relative to it.
    """

    step: TrainingStep
    before: Policy | None = None
    labels: tuple[str, str] = ("no policy", "policy")
    program: str = ""
    target: Target | None = None
    mesh: MeshShape = MeshShape()
    phase: int = 0
    is_gradient: bool = False
    earlier_plan: str | None = None
    folder: str = field(default_factory=os.getcwd)


def build_diff(request: DiffRequest) -> DiffData:
    """Compares two plans of one loss."""
    after = request.step.plan
    before = replace(
        make_plan(request.before or Policy(), after.sites, after.execution),
        constant_inputs=after.constant_inputs,
    )
    plans = before, after
    phases = tuple(_phase(plan, request.phase) for plan in plans)
    predictions = [
        Prediction(replace(request.step, plan=plan), phase, request.target, request.mesh)
        for plan, phase in zip(plans, phases, strict=True)
    ]
    earlier = None
    if request.earlier_plan is not None:
        earlier = read_earlier_plan(Path(request.earlier_plan), after.sites, after.label(phases[1]))
    table = _LinearTable(plans, phases, predictions, earlier)
    linears = tuple(table.linears())
    policies = request.before, after.policy
    seconds = [prediction.step_seconds for prediction in predictions]
    if earlier is not None:
        seconds[0] = None  # its recipes are not known
    sides = [
        DiffSide(label=label, policy=policy, seconds=time)
        for label, policy, time in zip(request.labels, policies, seconds, strict=True)
    ]
    return DiffData(
        program=request.program,
        before=sides[0],
        after=sides[1],
        linears=linears,
        stacks=find_stacks(linears),
        totals=count_products(linears),
        places=table.places,
        phase=after.label(phases[1]),
        target="" if request.target is None else request.target.name,
        devices=request.mesh.devices,
        is_gradient=request.is_gradient,
        matched=None if earlier is not None else _match(request, plans, phases),
        notes=_seed_notes(request.before, after.policy, linears) if earlier is None else earlier.notes,
        folder=request.folder,
    )


def _seed_notes(before: Policy | None, after: Policy, linears: Sequence[Linear]) -> tuple[str, ...]:
    """A seed is in no equation, so it is said which products draw other numbers because of it."""
    if before is None or before.seed == after.seed:
        return ()
    pairs = (
        (run.count, product.before.state.seed, product.after.state.seed)
        for linear in linears
        for run in linear.runs
        for product in run.products
        if product.before is not None and product.after is not None
    )
    count = sum(layers for layers, old, new in pairs if old is not None and new is not None)
    text = f"the seed is {before.seed} before and {after.seed} after"
    effect = (
        f"{count} products round stochastically with other random numbers" if count else "nothing uses it"
    )
    return (f"{text}: {effect}",)


def _match(request: DiffRequest, plans: Sequence[Plan], phases: Sequence[Phase]) -> MatchedLoss:
    return match_gradients(plans, phases) if request.is_gradient else _match_losses(plans, phases)


def _match_losses(plans: Sequence[Plan], phases: Sequence[Phase]) -> MatchedLoss:
    before, after = (
        rewrite(plan.sites, plan.decisions(phase), plan.constant_inputs, RandomSource(seed=plan.policy.seed))
        for plan, phase in zip(plans, phases, strict=True)
    )
    return match_losses(plans[1].sites.jaxpr, before, after)


def _phase(plan: Plan, number: int) -> Phase:
    """The phase of that number, or the last one of a plan with fewer phases."""
    return plan.phases[min(number, len(plan.phases) - 1)]


# ---- linears


@dataclass(slots=True)
class _Row:
    """A linear that is being built: for each layer, the layer of a site and its two decisions."""

    stack: str
    name: str
    layers: dict[int | None, tuple[Site, Layer, tuple[Decision, Decision]]] = field(default_factory=dict)


class _LinearTable:
    """Sorts the layers of all sites into linears: one for each path without its layer index.

    Two sites with the same path and layer (a weight that is used twice) are two linears.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        phases: Sequence[Phase],
        predictions: Sequence[Prediction],
        earlier: EarlierPlan | None = None,
    ) -> None:
        self._plans, self._predictions, self._earlier = plans, predictions, earlier
        self._decisions = [plan.decisions(phase) for plan, phase in zip(plans, phases, strict=True)]
        self.places: dict[tuple[Address, Layer], tuple[int, int | None]] = {}

    def linears(self) -> Iterator[Linear]:
        rows: dict[tuple[str, str, int], _Row] = {}
        known = {_split_at_layer(path)[0] for path in self._weight_paths()}
        for site in self._plans[1].sites:
            for layer in site.layers():
                stack, index, name = _split_at_layer(_layer_path(site, layer, known))
                decisions = tuple(d[site.address, layer] for d in self._decisions)
                name = name or site.name
                for occurrence in itertools.count():
                    label = name if not occurrence else f"{name} ({occurrence + 1})"
                    row = rows.setdefault((stack, name, occurrence), _Row(stack, label))
                    if index not in row.layers:
                        row.layers[index] = (site, layer, (decisions[0], decisions[1]))
                        break
        for number, row in enumerate(rows.values()):
            for index, (site, layer, _) in row.layers.items():
                self.places[site.address, layer] = (number, index)
            yield Linear(stack=row.stack, name=row.name, runs=tuple(self._runs(row)))

    def _weight_paths(self) -> Iterator[DottedPath]:
        for site in self._plans[1].sites:
            if site.parameters:
                yield site.layer_path(site.stack_indices((0,) * len(site.stacks)))

    def _runs(self, row: _Row) -> Iterator[LinearLayers]:
        """The layers of a row, consecutive ones to which the same happens together."""
        ordered = sorted(row.layers.items(), key=lambda item: -1 if item[0] is None else item[0])
        numbered = enumerate(ordered)

        def key(
            item: tuple[int, tuple[int | None, tuple[Site, Layer, tuple[Decision, Decision]]]],
        ) -> Hashable:
            position, (index, (site, layer, decisions)) = item
            offset = None if index is None else index - position  # a missing layer ends a run
            shape = site.batch, site.m, site.n, site.k, site.kind, site.weight
            earlier = tuple(self._earlier_state(site, layer, gemm) for gemm in Gemm)
            return offset, shape, site.place, site.products, site.opaque, site.repeats, decisions, earlier

        for _, group in itertools.groupby(numbered, key):
            layers = [item for _, item in group]
            site, layer, decisions = layers[0][1]
            sides = [
                prediction.products(site, decision)
                for prediction, decision in zip(self._predictions, decisions, strict=True)
            ]
            yield LinearLayers(
                first=layers[0][0],
                last=layers[-1][0],
                site=site,
                layer=layer,
                products=tuple(self._products(site, layer, decisions, [s.seconds for s in sides])),
                quantization=(sides[0].quantization, sides[1].quantization),
            )

    def _earlier_state(self, site: Site, layer: Layer, gemm: Gemm) -> ProductState | None:
        if self._earlier is None or gemm not in site.products:
            return None
        return self._earlier.product(site, layer, gemm, kept_state(site, gemm))

    def _products(
        self,
        site: Site,
        layer: Layer,
        decisions: tuple[Decision, Decision],
        seconds: Sequence[dict[Gemm, float]],
    ) -> Iterator[ProductChange]:
        for gemm in Gemm:
            if gemm not in site.products:
                continue
            sides: list[ProductSide | None] = [
                ProductSide(
                    state=product_state(site, decision, gemm, None if self._earlier else plan.policy.seed),
                    rule=decision.choice(gemm).rule,
                    overridden=decision.choice(gemm).overridden,
                    seconds=times.get(gemm),
                    moved_bytes=prediction.moved_bytes(site, decision, gemm),
                )
                for plan, decision, times, prediction in zip(
                    self._plans, decisions, seconds, self._predictions, strict=True
                )
            ]
            if self._earlier is not None:
                state = self._earlier_state(site, layer, gemm)
                sides[0] = None if state is None else ProductSide(state=state)
            yield ProductChange(gemm=gemm, before=sides[0], after=sides[1])


def product_state(site: Site, decision: Decision, gemm: Gemm, seed: int | None = None) -> ProductState:
    """How a product of a site runs. `seed` is that of the policy, None if it is not known."""
    kept = kept_state(site, gemm)
    if decision.recipe is None or site.opaque:
        return kept
    recipe = normalize_if_valid(decision.recipe)
    treatments = recipe.gemm_treatments(gemm)
    if all(t.format == "keep" for t in treatments):
        return kept
    return ProductState(
        format=product_format(recipe, gemm, kept.format),
        formats=(treatments[0].format, treatments[1].format),
        roles=kept.roles,
        seed=seed if any(t.rounding != "rne" for t in treatments) else None,
        badges=(treatment_words(treatments[0]), treatment_words(treatments[1])),
        lowering=decision.lowering(gemm),
    )


def kept_state(site: Site, gemm: Gemm) -> ProductState:
    """How a product runs without a policy."""
    formats = operand_formats(site, gemm)
    wider = max(formats, key=lambda name: FORMATS[name].bits if name in FORMATS else 0)
    return ProductState(format=wider, formats=formats, roles=operand_roles(site, gemm), is_kept=True)


def operand_roles(site: Site, gemm: Gemm) -> tuple[str, str]:
    """What the operands of a product are. Without a weight, both operands of the GEMM are activations."""
    first, second = (role for g, role in OPERANDS if g is gemm)
    names = {} if site.weight is not None else {Role.ACTIVATION: "lhs", Role.WEIGHT: "rhs"}
    return names.get(first, str(first)), names.get(second, str(second))


def operand_formats(site: Site, gemm: Gemm) -> tuple[str, str]:
    """The dtypes of the operands of a product in the program, by the names of the formats."""
    query = gemm_queries(site, make_recipe("keep"))[list(Gemm).index(gemm)]
    first, second = (OTHER_FORMAT_NAMES.get(dtype, dtype) for dtype in query.types)
    return first, second


def _layer_path(site: Site, layer: Layer, stacks: Collection[str]) -> DottedPath:
    """The path of a layer of a site.

    In a scan, any name of a scope may carry the index. It is put where the weights of the scan have theirs.
    """
    indices = site.stack_indices(layer)
    if site.parameters:
        return site.layer_path(indices)
    paths = list(site.scope.paths(indices))
    return next((p for p in paths if _split_at_layer(p)[0] in stacks), paths[0] if paths else site.scope.path)


def _split_at_layer(path: DottedPath) -> tuple[str, int | None, str]:
    """The path of the stack, the index in it, and the path inside; without an index, the whole path is inside."""
    for number, segment in enumerate(path):
        if segment.index is not None:
            stack = ".".join([*map(str, path[:number]), segment.text])
            return stack, segment.index, ".".join(map(str, path[number + 1 :]))
    return "", None, ".".join(map(str, path))


# ---- stacks, classes and totals


def find_stacks(linears: Sequence[Linear]) -> tuple[Stack, ...]:
    """The stacks of a model, in the order of the linears, with the layers to which the same happens in one class."""
    numbers: dict[str, list[int]] = {}
    for number, linear in enumerate(linears):
        numbers.setdefault(linear.stack, []).append(number)
    return tuple(_make_stack(name, members, linears) for name, members in numbers.items())


def _make_stack(name: str, members: Sequence[int], linears: Sequence[Linear]) -> Stack:
    layers = {
        layer
        for number in members
        for run in linears[number].runs
        if run.first is not None and run.last is not None
        for layer in range(run.first, run.last + 1)
    }
    if not layers:
        return Stack(name=name, size=0, linears=tuple(members), classes=())
    members_of: dict[Hashable, list[int]] = {}
    for layer in sorted(layers):
        key = tuple(_run_key(linears[number], layer) for number in members)
        members_of.setdefault(key, []).append(layer)
    classes = tuple(LayerClass(ranges=as_ranges(members)) for members in members_of.values())
    return Stack(name=name, size=max(layers) + 1, linears=tuple(members), classes=classes)


def _run_key(linear: Linear, layer: int) -> Hashable:
    """What happens to a layer of a linear: equal for runs that are apart and alike."""
    run = linear.run_at(layer)
    if run is None:
        return None
    site = run.site
    return site.batch, site.m, site.n, site.k, site.place, site.opaque, run.products


def count_products(linears: Sequence[Linear]) -> Totals:
    changed_names = [linear.name for linear in linears if any(run.is_changed for run in linear.runs)]
    group = _common_scope(changed_names)
    counted = [linear for linear in linears if not group or linear.name.split(".")[: len(group)] == group]
    runs = [(run, product) for linear in linears for run in linear.runs for product in run.products]
    return Totals(
        products=sum(run.count * len(run.products) for linear in counted for run in linear.runs),
        changed=sum(run.count for run, product in runs if product.is_changed),
        emulated=sum(
            run.count
            for run, product in runs
            if product.after is not None and product.after.state.is_emulated
        ),
        opaque=sum(run.count for run, _ in runs if run.site.opaque),
        group=".".join(group),
    )


def _common_scope(names: Sequence[str]) -> list[str]:
    """The names that all these paths start with, without the last name of any."""
    if not names:
        return []
    paths = [name.split(".")[:-1] for name in names]
    pairs = itertools.takewhile(lambda column: len({*column}) == 1, zip(*paths, strict=False))
    return [column[0] for column in pairs]
