"""The linears of a diff, and how each of them runs before and after."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property

from policyc.changes.model import Linear, LinearRange, ProductChange, ProductSide, ProductState
from policyc.compiler.matching.decisions import Phase
from policyc.compiler.planning.plan import Decision, Decisions, Plan, gemm_queries
from policyc.compiler.sites.linears import LinearLayers, sort_into_linears
from policyc.compiler.sites.site import Site
from policyc.compiler.sites.stacks import Layer
from policyc.hardware import gemm_cost, step_cost, training_step
from policyc.hardware.gemm_cost import product_format
from policyc.hardware.mesh import MeshShape
from policyc.hardware.training_step import LayerGroup, TrainingStep
from policyc.jaxcore.jaxprs.transform import Address
from policyc.language.formats import FORMATS, OTHER_FORMAT_NAMES
from policyc.language.recipes import OPERANDS, Gemm, Role, make_recipe
from policyc.language.treatments import describe_options
from policyc.numerics.targets import Target


class Prediction:
    """The predicted times of a training step in one phase of its policy."""

    def __init__(self, step: TrainingStep, phase: Phase, target: Target, mesh: MeshShape) -> None:
        self._step, self._target, self._mesh = replace(step, phase=phase), target, mesh

    @cached_property
    def step_seconds(self) -> float:
        return step_cost.estimate(self._step, self._target, self._mesh).seconds

    @cached_property
    def _readers(self) -> training_step.ReaderCounts:
        return training_step.count_readers(self._step.plan)

    def layer_seconds(self, site: Site, decision: Decision) -> tuple[dict[Gemm, float], float | None]:
        """Seconds that one layer of a site takes on one device: for each product, and for quantizing the operands.

        The latter is None for attention, which is a fused kernel.
        """
        group = LayerGroup.from_decision(site, decision)
        if step_cost.is_attention(group):
            each = step_cost.attention_seconds(site, self._target, self._mesh, causal=self._step.causal)
            # This product is part of a fused kernel. On its own, it would take at least one launch.
            return dict.fromkeys(site.products, max(each, gemm_cost.LAUNCH_SECONDS)), None
        times = step_cost.gemm_times(group, self._target, self._mesh, self._step.remat)
        gemms = [gemm for gemm in Gemm if gemm in site.products]
        quantization = step_cost.quantization_seconds(
            group, self._target, self._mesh, self._readers, self._step.accumulate, self._step.remat
        )
        return {gemm: seconds for gemm, (_, seconds) in zip(gemms, times, strict=True)}, quantization

    def moved_bytes(self, site: Site, decision: Decision, gemm: Gemm) -> float:
        """Bytes that a product reads and writes on one device."""
        recipe = LayerGroup.from_decision(site, decision).recipe
        format = gemm_cost.product_format(recipe, gemm, training_step.unquantized_format(site))
        m, n, k, batch = training_step.local_shape(site, self._mesh)
        rows, columns, contracted = gemm_cost.product_shape(gemm, m, n, k)
        return gemm_cost.gemm_bytes(self._target, format, rows, columns, contracted, batch)


Cells = dict[tuple[Address, Layer], tuple[int, int | None]]
"""For each layer of each site: the number of its linear, and the index of the layer in its stack."""


def compare_linears(
    plans: Sequence[Plan],
    phases: Sequence[Phase],
    predictions: Sequence[Prediction],
) -> tuple[tuple[Linear, ...], Cells]:
    """Compares the linears of two plans. Also returns the cell of each layer of each site."""
    rows = sort_into_linears(plans[1].sites)
    comparison = _Comparison(plans, phases, predictions)
    linears = (Linear(stack=row.stack, name=row.name, runs=tuple(comparison.runs(row))) for row in rows)
    cells = {
        (site.address, layer): (number, index)
        for number, row in enumerate(rows)
        for index, (site, layer) in row.layers.items()
    }
    return tuple(linears), cells


class _Comparison:
    """Compares the layers of sites under two plans."""

    def __init__(
        self, plans: Sequence[Plan], phases: Sequence[Phase], predictions: Sequence[Prediction]
    ) -> None:
        self._predictions = predictions
        self._seeds = [plan.policy.seed for plan in plans]
        self._decisions = [plan.decisions(phase) for plan, phase in zip(plans, phases, strict=True)]

    def runs(self, row: LinearLayers) -> Iterator[LinearRange]:
        """Groups the layers of a row into runs of consecutive layers that are treated alike."""

        def key(item: tuple[int, tuple[int | None, tuple[Site, Layer]]]) -> Hashable:
            position, (index, (site, layer)) = item
            offset = None if index is None else index - position  # a missing layer ends a run
            shape = site.batch, site.m, site.n, site.k, site.is_ragged, site.kind.name, site.weight
            decisions = tuple(decided[site.address, layer] for decided in self._decisions)
            return offset, shape, site.place, site.products, site.opaque, site.repeats, decisions

        for _, group in itertools.groupby(enumerate(row.ordered()), key):
            layers = [item for _, item in group]
            (first, (site, layer)), (last, _) = layers[0], layers[-1]
            decisions = [decided[site.address, layer] for decided in self._decisions]
            (old, old_quantization), (new, new_quantization) = (
                prediction.layer_seconds(site, decision)
                for prediction, decision in zip(self._predictions, decisions, strict=True)
            )
            yield LinearRange(
                first=first,
                last=last,
                site=site,
                layer=layer,
                products=tuple(self._products(site, decisions, (old, new))),
                quantization=(old_quantization, new_quantization),
            )

    def _products(
        self, site: Site, decisions: Sequence[Decision], seconds: Sequence[dict[Gemm, float]]
    ) -> Iterator[ProductChange]:
        """The products of a layer on both sides, with their predicted `seconds`."""
        for gemm in (gemm for gemm in Gemm if gemm in site.products):
            before, after = (
                ProductSide(
                    state=product_state(site, decision, gemm, seed),
                    rule=decision.rule(gemm),
                    overridden=decision.overridden(gemm),
                    seconds=times[gemm],
                    moved_bytes=prediction.moved_bytes(site, decision, gemm),
                )
                for seed, decision, times, prediction in zip(
                    self._seeds, decisions, seconds, self._predictions, strict=True
                )
            )
            yield ProductChange(gemm=gemm, before=before, after=after)


def product_state(site: Site, decision: Decision, gemm: Gemm, seed: int | None = None) -> ProductState:
    """How a product of a site runs. `seed` is the seed of the policy; None if unknown."""
    kept = kept_state(site, gemm)
    if decision.recipe is None or site.opaque:
        return kept
    recipe = decision.recipe
    treatments = recipe.gemm_treatments(gemm)
    if all(t.format == "keep" for t in treatments):
        return kept
    return ProductState(
        format=product_format(recipe, gemm, kept.format),
        formats=(treatments[0].format, treatments[1].format),
        roles=kept.roles,
        seed=seed if any(t.is_random for t in treatments) else None,
        options=(describe_options(treatments[0]), describe_options(treatments[1])),
        lowering=decision.lowering(gemm),
    )


def kept_state(site: Site, gemm: Gemm) -> ProductState:
    """How a product runs without a policy."""
    formats = operand_formats(site, gemm)
    wider = max(formats, key=lambda name: FORMATS[name].bits if name in FORMATS else 0)
    return ProductState(format=wider, formats=formats, roles=operand_roles(site, gemm), is_kept=True)


def decisions_that_matter(plan: Plan, phase: Phase) -> Decisions:
    """The decisions of a phase, without recipes that leave the numerics unchanged, such as `bf16` on a bf16 product.

    The compiler replaces such a site with an equal equation, which should not be shown as a change.
    """
    sites = {site.address: site for site in plan.sites}

    @cache
    def leave_out(address: Address, decision: Decision) -> Decision:
        site = sites[address]
        states = ((product_state(site, decision, gemm), kept_state(site, gemm)) for gemm in site.products)
        return (
            replace(decision, recipe=None) if all(a.numerics == b.numerics for a, b in states) else decision
        )

    return {key: leave_out(key[0], decision) for key, decision in plan.decisions(phase).items()}


def operand_roles(site: Site, gemm: Gemm) -> tuple[str, str]:
    """The roles of a product's operands. Without a weight, the activations are named lhs and rhs."""
    first, second = (role for g, role in OPERANDS if g is gemm)
    names = {} if site.weight is not None else {Role.ACTIVATION: "lhs", Role.WEIGHT: "rhs"}
    return names.get(first, str(first)), names.get(second, str(second))


def operand_formats(site: Site, gemm: Gemm) -> tuple[str, str]:
    """The dtypes of a product's operands in the program, as names of formats."""
    query = gemm_queries(site, make_recipe("keep"))[list(Gemm).index(gemm)]
    first, second = (OTHER_FORMAT_NAMES.get(dtype, dtype) for dtype in query.types)
    return first, second
