"""Policy x Sites -> Plan: the rule that decides about each product of each GEMM, and the rules that it overrides.

A policy with a schedule has one decision for each phase. `expect` counts the sites that a rule matches, not those that
it decides about.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import and_
from typing import Any

from policyc.base.text import count_noun
from policyc.compiler.matching.decisions import Choice, Choices, Phase, RuleDecisions
from policyc.compiler.matching.execution import ExecutionOptions
from policyc.compiler.matching.site_masks import find_bits, union
from policyc.compiler.sites.site import Site, Sites
from policyc.compiler.sites.stacks import Layer
from policyc.jaxcore.jaxprs.transform import Address
from policyc.language import recipes
from policyc.language.diagnostics import Diagnostic, PolicyError
from policyc.language.policy import Policy
from policyc.language.recipes import Gemm, Recipe, Treatment
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

_GEMMS = tuple(Gemm)


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one layer of a site. `recipe` is normalized; None if the layer is kept as it is."""

    choices: Choices
    recipe: Recipe | None
    lowerings: tuple[Lowering, Lowering, Lowering] = (PLAIN, PLAIN, PLAIN)

    def choice(self, gemm: Gemm) -> Choice:
        return self.choices[_GEMMS.index(gemm)]

    def lowering(self, gemm: Gemm) -> Lowering:
        return self.lowerings[_GEMMS.index(gemm)]


Decisions = Mapping[tuple[Address, Layer], Decision]


@dataclass(frozen=True, slots=True)
class LayerRange:
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
    def choice(self) -> Choice:
        return self.decision.choice(self.gemm)

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
    _decisions: dict[Phase, Decisions] = field(default_factory=dict, compare=False, repr=False)

    def __repr__(self) -> str:
        return f"<Plan of {self.policy.name} for {self.caption}>"

    @property
    def caption(self) -> str:
        return f"{count_noun(sum(site.count for site in self.sites), 'GEMM')} on {self.machine.name}"

    # ---- phases of the schedule

    @property
    def phases(self) -> tuple[Phase, ...]:
        """All phases of the schedule, the earliest first."""
        return self._rules.phases

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
        return self._rules.label(phase)

    def in_force(self, rule: int, phase: Phase) -> bool:
        """Whether a rule applies in a phase."""
        return self._rules.in_force(rule, phase)

    # ---- decisions

    def decisions(self, phase: Phase = ()) -> Decisions:
        """The decision for every layer of every site in a phase."""
        if phase not in self._decisions:
            decisions: dict[tuple[Address, Layer], Decision] = {}
            for (number, layer), choices in zip(
                self.sites.masks.layers, self._rules.choices(phase), strict=True
            ):
                site = self.sites.sites[number]
                decisions[site.address, layer] = self._with_lowerings(
                    site, self._decide(choices, has_weight=site.weight is not None)
                )
            for site in (s for s in self.sites if s.running is not None):
                decisions |= dict(self._decide_idle_layers(site, decisions))
            self._decisions[phase] = decisions
        return self._decisions[phase]

    def with_decisions(self, decisions: Decisions) -> Plan:
        """A copy of the plan with these decisions in every phase, instead of those of the policy."""
        return replace(self, _decisions=dict.fromkeys(self.phases, decisions))

    def layer_ranges(self, phase: Phase = ()) -> Iterator[LayerRange]:
        """The decisions of a phase. Consecutive layers of a site with the same decision form one range."""
        for site in self.sites:
            yield from self.site_layer_ranges(site, phase)

    def site_layer_ranges(self, site: Site, phase: Phase = ()) -> Iterator[LayerRange]:
        decisions = self.decisions(phase)
        for decision, layers in itertools.groupby(site.layers(), lambda la: decisions[site.address, la]):
            yield LayerRange(site, tuple(layers), decision)

    def products(self, phase: Phase = ()) -> Iterator[PlannedProduct]:
        """All products that run in a phase."""
        for layer_range in self.layer_ranges(phase):
            yield from layer_range.products()

    def all_products(self) -> Iterator[PlannedProduct]:
        """The products of every phase, one phase after the other."""
        return itertools.chain.from_iterable(map(self.products, self.phases))

    def matched_layers(self, rule: int) -> Iterator[tuple[Site, Layer]]:
        """Yields the layers with a product that a rule matches, in any phase. Layers that do not run are left out."""
        for bit in find_bits(union(self._rules.matched[rule]) & self.sites.running):
            number, layer = self.sites.masks.layers[bit]
            yield self.sites.sites[number], layer

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """For each rule: the number of sites with a product that it matches. Every layer counts as a site."""
        return tuple(union(map(and_, m, self.sites.existing)).bit_count() for m in self._rules.matched)

    @cached_property
    def resolved(self) -> tuple[Recipe, ...]:
        """The recipe of each rule, with names resolved."""
        resolve = self.policy.resolver()
        return tuple(resolve(rule.recipe) for rule in self.policy.rules)

    @cached_property
    def machine(self) -> Machine:
        """The machine that the products run on."""
        return machine_here() if self.execution.target is None else machine_of(self.execution.target)

    def _with_lowerings(self, site: Site, decision: Decision) -> Decision:
        """Adds to a decision how each product runs."""
        if decision.recipe is None:
            return decision
        operands: list[Any] = [*site.eqn.invars[:2], *site.eqn.outvars[:1]]
        dtypes = tuple(a.aval.dtype for a in operands)
        sizes = (site.batch, site.m, site.n, site.k)
        # Everything that the queries depend on. The id is unique: `_decided` keeps decisions without lowerings alive.
        key = (id(decision), sizes, dtypes, site.weight, site.is_ragged)
        lowered = self._lowered.get(key)
        if lowered is None:
            queries = gemm_queries(site, decision.recipe)
            fprop, dgrad, wgrad = (choose(self.execution.backend, q, self.machine) for q in queries)
            lowered = self._lowered[key] = replace(decision, lowerings=(fprop, dgrad, wgrad))
        return lowered

    def _decide(self, choices: Choices, *, has_weight: bool) -> Decision:
        """The decision for these choices, without lowerings."""
        key = choices, has_weight
        if key not in self._decided:
            pairs = zip(Gemm, choices, strict=True)
            parts = {gemm: self.resolved[c.rule] for gemm, c in pairs if c.rule is not None}
            recipe = normalize_if_valid(recipes.make_split_recipe(parts), has_weight=has_weight)
            kept = all(t.format == "keep" for t in recipe.treatments)
            self._decided[key] = Decision(choices, None if kept else recipe)
        return self._decided[key]

    def _decide_idle_layers(
        self, site: Site, decisions: Decisions
    ) -> Iterator[tuple[tuple[Address, Layer], Decision]]:
        """Yields other decisions for layers in which a site does not run, so that loops are not split because of them.

        A layer gets the decision of the last running layer before it, if some running layer has the same path.
        """
        running = set(site.layers())
        last = decisions[site.address, next(site.layers())]
        paths = {site.paths(layer) for layer in running}
        for layer in site.all_layers():
            if layer in running:
                last = decisions[site.address, layer]
            elif site.paths(layer) in paths:
                yield (site.address, layer), last

    @cached_property
    def _rules(self) -> RuleDecisions:
        return RuleDecisions(self.policy, self.sites.masks)

    @cached_property
    def _decided(self) -> dict[tuple[Choices, bool], Decision]:
        """Cache of decisions without lowerings, by choices and whether there is a weight. Many layers share one."""
        return {}

    @cached_property
    def _lowered(self) -> dict[Hashable, Decision]:
        """Cache of decisions with lowerings, by everything that the queries depend on. Many sites share one."""
        return {}


def make_plan(policy: Policy, sites: Sites, execution: ExecutionOptions | None = None) -> Plan:
    return Plan(policy=policy, sites=sites, execution=execution or ExecutionOptions())


def gemm_queries(site: Site, recipe: Recipe) -> tuple[GemmQuery, GemmQuery, GemmQuery]:
    """The backend queries for the three products of a site. `recipe` is normalized."""
    m, n, k = site.m, site.n, site.k
    sizes = {Gemm.FPROP: (m, n, k), Gemm.DGRAD: (m, k, n), Gemm.WGRAD: (k, n, m)}
    operands: list[Any] = list(site.eqn.invars[:2])
    x, w = (str(v.aval.dtype) for v in (operands[::-1] if site.weight == "lhs" else operands))
    result: Any = site.eqn.outvars[0]
    dy = str(result.aval.dtype)
    types = {Gemm.FPROP: (x, w), Gemm.DGRAD: (dy, w), Gemm.WGRAD: (x, dy)}
    fprop, dgrad, wgrad = (
        GemmQuery(
            gemm=gemm,
            left=recipe.gemm_treatments(gemm)[0],
            right=recipe.gemm_treatments(gemm)[1],
            m=rows,
            n=columns,
            k=contracted,
            batch=site.batch,
            ragged=site.is_ragged,
            types=types[gemm],
        )
        for gemm, (rows, columns, contracted) in sizes.items()
    )
    return fprop, dgrad, wgrad
