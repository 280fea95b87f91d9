"""Policy x Sites -> Plan: the rule that decides about each product of each GEMM, and the rules that it overrides.

A policy with a schedule has one decision for each phase. `expect` counts the sites that a rule matches, not those that
it decides about.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from policyc.base.text import count_noun
from policyc.compiler.matching.decisions import Phase, RuleDecisions, Rules
from policyc.compiler.matching.execution import ExecutionOptions
from policyc.compiler.sites.site import Site
from policyc.compiler.sites.site_list import Sites
from policyc.compiler.sites.site_masks import find_bits, union
from policyc.compiler.sites.stacks import Layer
from policyc.language import recipes
from policyc.language.diagnostics import Diagnostic, PolicyError
from policyc.language.policy import Policy
from policyc.language.recipes import Gemm, Recipe, Role, Treatment
from policyc.language.treatments import normalize_if_valid
from policyc.numerics.backends import GemmQuery
from policyc.numerics.backends.choice import (
    PLAIN,
    Lowering,
    Machine,
    choose,
    machine_here,
    machine_of,
)

if TYPE_CHECKING:
    from policyc.jaxcore.jaxprs.transform import Address
    from policyc.numerics.products import Backends

_GEMMS = tuple(Gemm)


@dataclass(frozen=True, slots=True)
class Decision:
    """What decides about one layer of a site, and what happens to it.

    Attributes:
      rules: for each product, the rules that match it. The first decides.
      recipe: normalized; None if the layer is kept as it is.
      lowerings: how each product runs.
    """

    rules: Rules
    recipe: Recipe | None
    lowerings: tuple[Lowering, Lowering, Lowering] = (PLAIN, PLAIN, PLAIN)

    def rule(self, gemm: Gemm) -> int | None:
        """The rule that decides about a product; None if none matches it."""
        return next(iter(self.rules[_GEMMS.index(gemm)]), None)

    def overridden(self, gemm: Gemm) -> tuple[int, ...]:
        """The rules that match a product too, nearest first."""
        return self.rules[_GEMMS.index(gemm)][1:]

    @property
    def applied_recipe(self) -> Recipe:
        """The recipe of a layer that is not kept."""
        assert self.recipe is not None
        return self.recipe

    @property
    def deciding(self) -> tuple[int, ...]:
        """The rules that decide about some product."""
        return tuple(rules[0] for rules in self.rules if rules)

    @property
    def backends(self) -> Backends:
        """The backends of a quantized layer. `emulate` stands for products that are kept."""
        fprop, dgrad, wgrad = (lowering.backend or "emulate" for lowering in self.lowerings)
        return fprop, dgrad, wgrad

    def lowering(self, gemm: Gemm) -> Lowering:
        return self.lowerings[_GEMMS.index(gemm)]

    @property
    def shared_scale(self) -> Treatment | None:
        """How fprop treats the weight, if it shares the weight's outer scale with siblings; else None."""
        weight = None if self.recipe is None else self.recipe.treatment(Gemm.FPROP, Role.WEIGHT)
        return weight if weight is not None and weight.outer == "shared" else None


Decisions: TypeAlias = "Mapping[tuple[Address, Layer], Decision]"


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Consecutive layers of a site with the same decision. A site that is not in a stack has one layer."""

    site: Site
    layers: tuple[Layer, ...]
    decision: Decision

    def products(self) -> Iterator[PlannedProduct]:
        """Yields the products that the differentiated loss runs for the site, in the order fprop, dgrad, wgrad."""
        for gemm in Gemm:
            if gemm in self.site.products:
                yield PlannedProduct(self.site, self.layers, gemm, self.decision)


@dataclass(frozen=True, slots=True)
class PlannedProduct:
    """One product of consecutive layers of a site with the same decision."""

    site: Site
    layers: tuple[Layer, ...]
    gemm: Gemm
    decision: Decision

    @property
    def rule(self) -> int | None:
        """The rule that decides about it; None if none matches it."""
        return self.decision.rule(self.gemm)

    @property
    def lowering(self) -> Lowering:
        return self.decision.lowering(self.gemm)

    @property
    def treatments(self) -> tuple[Treatment, ...]:
        """The treatments of both operands; empty if the layers are kept as they are."""
        return () if self.decision.recipe is None else self.decision.recipe.gemm_treatments(self.gemm)

    @property
    def bits(self) -> int:
        """The number of bits of its narrower operand; 0 if it is kept."""
        return min((treatment.bits for treatment in self.treatments), default=0)


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """Every site with what the policy decides about it, and how its products run."""

    policy: Policy
    sites: Sites
    execution: ExecutionOptions
    constant_inputs: frozenset[int] = field(default=frozenset(), compare=False, repr=False)
    """The inputs of the loss, by number, that stay the same from call to call."""
    seconds: tuple[float, float] = field(default=(0.0, 0.0), compare=False, repr=False)
    """How long the loss took to trace, and to plan."""
    _decisions: dict[Phase, Decisions] = field(default_factory=dict, compare=False, repr=False)

    def __repr__(self) -> str:
        return f"<Plan of {self.policy.name} for {self.caption}>"

    @property
    def caption(self) -> str:
        return f"{count_noun(self.sites.count, 'site')} on {self.machine.name}"

    # ---- phases of the schedule

    @property
    def phases(self) -> tuple[Phase, ...]:
        """All phases of the schedule, the earliest first."""
        return self.rules.phases

    def phase(self, step: int, total: int | None) -> Phase:
        """The phase at a step. A condition in percent needs the total number of steps."""
        if total is None:
            diagnostics = [
                Diagnostic(
                    code="schedule-without-step",
                    message="this is a percentage of the training, but the program does not say how long that is",
                    span=condition.span,
                    help="call policyc.set_step(n, total=N), where N is the total number of steps",
                )
                for condition in self.policy.step_conditions
                if condition.bound.percent
            ]
            if diagnostics:
                raise PolicyError(diagnostics)
        return tuple(c.holds(step, total or 1) for c in self.policy.step_conditions)

    def label(self, phase: Phase) -> str:
        return self.rules.label(phase)

    def in_force(self, rule: int, phase: Phase) -> bool:
        """Whether a rule applies in a phase."""
        return self.rules.in_force(rule, phase)

    # ---- decisions

    def decisions(self, phase: Phase = ()) -> Decisions:
        """The decision for every layer of every site in a phase."""
        if phase not in self._decisions:
            decisions: dict[tuple[Address, Layer], Decision] = {}
            decided: dict[
                Hashable, Decision
            ] = {}  # by everything that a decision depends on: many layers share one
            by_layer = zip(self.sites.masks.layers, self.rules.by_layer(phase), strict=True)
            for (number, layer), rules in by_layer:
                site = self.sites.sites[number]
                key = rules, site.weight, site.is_ragged, site.types, (site.batch, site.m, site.n, site.k)
                if key not in decided:
                    decided[key] = self._decide(site, rules)
                decisions[site.address, layer] = decided[key]
            for site in (s for s in self.sites if s.running is not None):
                decisions |= dict(_decide_idle_layers(site, decisions))
            self._decisions[phase] = decisions
        return self._decisions[phase]

    def _decide(self, site: Site, rules: Rules) -> Decision:
        parts = {g: self.resolved[own[0]] for g, own in zip(Gemm, rules, strict=True) if own}
        recipe = normalize_if_valid(recipes.make_split_recipe(parts), has_weight=site.weight is not None)
        if all(t.format == "keep" for t in recipe.treatments):
            return Decision(rules, None)
        if not site.types:  # it was read from a file, which does not say what its products need
            return Decision(rules, recipe)
        queries = gemm_queries(site, recipe)
        fprop, dgrad, wgrad = (choose(self.execution.backend, q, self.machine) for q in queries)
        return Decision(rules, recipe, (fprop, dgrad, wgrad))

    def runs(self, phase: Phase = ()) -> Iterator[LayerRun]:
        """The decisions of a phase. Consecutive layers of a site with the same decision form one range."""
        for site in self.sites:
            yield from self.site_runs(site, phase)

    def site_runs(self, site: Site, phase: Phase = ()) -> Iterator[LayerRun]:
        decisions = self.decisions(phase)
        for decision, layers in itertools.groupby(site.layers(), lambda la: decisions[site.address, la]):
            yield LayerRun(site, tuple(layers), decision)

    def products(self, phase: Phase = ()) -> Iterator[PlannedProduct]:
        """All products that run in a phase."""
        for run in self.runs(phase):
            yield from run.products()

    def all_products(self) -> Iterator[PlannedProduct]:
        """The products of every phase, one phase after the other."""
        return itertools.chain.from_iterable(map(self.products, self.phases))

    def matched_layers(self, rule: int) -> Iterator[tuple[Site, Layer]]:
        """Yields the layers with a product that a rule matches, in any phase. Layers that do not run are left out."""
        for bit in find_bits(union(self.rules.matched[rule]) & self.sites.running):
            number, layer = self.sites.masks.layers[bit]
            yield self.sites.sites[number], layer

    @property
    def counts(self) -> tuple[int, ...]:
        """For each rule: the number of sites with a product that it matches. Every layer counts as a site."""
        return self.rules.counts

    @cached_property
    def resolved(self) -> tuple[Recipe, ...]:
        """The recipe of each rule, with names resolved."""
        resolve = self.policy.resolver()
        return tuple(resolve(rule.recipe) for rule in self.policy.rules)

    @cached_property
    def machine(self) -> Machine:
        """The machine that the products run on."""
        return machine_here() if self.execution.target is None else machine_of(self.execution.target)

    @cached_property
    def rules(self) -> RuleDecisions:
        """The rules that match and decide about each layer."""
        return RuleDecisions(self.policy, self.sites)


def make_plan(policy: Policy, sites: Sites, execution: ExecutionOptions | None = None) -> Plan:
    return Plan(policy=policy, sites=sites, execution=execution or ExecutionOptions())


def _decide_idle_layers(site: Site, decisions: Decisions) -> Iterator[tuple[tuple[Address, Layer], Decision]]:
    """Layers where the site never runs borrow a neighbour's decision, so that they do not force a scan split.

    The neighbour is the last running layer before it, if some running layer has the same path.
    """
    running = set(site.layers())
    last = decisions[site.address, next(site.layers())]
    paths = {site.paths(layer) for layer in running}
    for layer in site.all_layers():
        if layer in running:
            last = decisions[site.address, layer]
        elif site.paths(layer) in paths:
            yield (site.address, layer), last


def gemm_queries(site: Site, recipe: Recipe) -> tuple[GemmQuery, ...]:
    """The backend queries for the three products of a site. `recipe` is normalized."""
    m, n, k = site.m, site.n, site.k
    lhs, rhs, dy = site.types
    x, w = (rhs, lhs) if site.weight == "lhs" else (lhs, rhs)
    products = {
        Gemm.FPROP: ((m, n, k), (x, w)),
        Gemm.DGRAD: ((m, k, n), (dy, w)),
        Gemm.WGRAD: ((k, n, m), (x, dy)),
    }
    return tuple(
        GemmQuery(
            gemm=gemm,
            left=recipe.gemm_treatments(gemm)[0],
            right=recipe.gemm_treatments(gemm)[1],
            m=rows,
            n=columns,
            k=contracted,
            batch=site.batch,
            ragged=site.is_ragged,
            types=types,
        )
        for gemm, ((rows, columns, contracted), types) in products.items()
    )
