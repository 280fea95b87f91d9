"""Policy x Sites -> Plan: which rule decides about every product of every GEMM, and which rules it beat.

In: a policy and the sites of a loss. Out: a `Plan`, or its faults as diagnostics. The one trap: a rule is
counted by what it matches and not by what it wins: `expect` speaks of the sites that a selector names.

A policy with a schedule has one decision for each phase. A `Phase` is which of the schedule's conditions hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from policyc.compiler.sites import Address, Layer, Site, Sites
from policyc.language import recipes
from policyc.language.diagnostics import Diagnostic, PolicyError, Severity, closest_name
from policyc.language.policy import Policy, Rule
from policyc.language.recipes import Gemm, Recipe
from policyc.language.schedule import representative_steps
from policyc.language.selectors import DottedPath, expand_selector, matches
from policyc.language.treatments import find_recipe_problems, normalize_if_valid
from policyc.numerics import backends
from policyc.numerics.backends.choice import (
    PLAIN,
    GemmQuery,
    Lowering,
    Machine,
    Obstacle,
    choose,
    machine_here,
    machine_of,
)
from policyc.numerics.targets import Target

Phase = tuple[bool, ...]
"""For each condition of the schedule, in the order of `Policy.step_conditions`: does it hold?"""

_SHOWN = 3  # sites named in one message


@dataclass(frozen=True, slots=True)
class Choice:
    """The rule that decides about a product, and those it beat, the nearest first: places in the policy."""

    rule: int | None
    beaten: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one layer of a site. A recipe of None leaves it as it is."""

    choices: tuple[Choice, Choice, Choice]
    recipe: Recipe | None
    lowerings: tuple[Lowering, Lowering, Lowering] = (PLAIN, PLAIN, PLAIN)

    def of(self, gemm: Gemm) -> Choice:
        return self.choices[list(Gemm).index(gemm)]

    def runs(self, gemm: Gemm) -> Lowering:
        return self.lowerings[list(Gemm).index(gemm)]


Decisions = Mapping[tuple[Address, Layer], Decision]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionOptions:
    """How products are to run: by which backend, for which target (None: the devices here), emulated or not at all."""

    backend: str = "auto"
    target: Target | None = None
    require_native: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every site with what the policy makes of it, and how that runs: on a target, or else on the devices here."""

    policy: Policy
    sites: Sites
    execution: ExecutionOptions
    _known: dict[Phase, Decisions] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that the schedule can be in, the earliest first."""
        conditions = self.policy.step_conditions
        found = dict.fromkeys(
            tuple(w.holds(step, total) for w in conditions)
            for step, total in sorted(representative_steps(conditions), key=lambda m: m[0] / m[1])
        )
        return tuple(found) or ((),)

    def phase(self, step: int, total: int | None) -> Phase:
        """The phase at a step. A percentage needs the length of the training to be known."""
        if total is None:
            found = [
                Diagnostic(
                    code="schedule-without-step",
                    message="this is a share of the training, and the program does not say how long that is",
                    span=w.span,
                    help="call policyc.set_step(n, total=N): total is the number of steps in all",
                )
                for w in self.policy.step_conditions
                if w.bound.percent
            ]
            if found:
                raise PolicyError(found)
        return tuple(w.holds(step, total or 1) for w in self.policy.step_conditions)

    def label(self, phase: Phase) -> str:
        held = zip(self.policy.step_conditions, phase, strict=True)
        return " and ".join(str(w if holds else w.opposite) for w, holds in held) or "always"

    def in_force(self, at: int, phase: Phase) -> bool:
        """Does a rule apply in a phase?"""
        held = dict(zip(self.policy.step_conditions, phase, strict=True))
        return all(held[w] for w in self.policy.rules[at].when)

    @cached_property
    def matched(self) -> Mapping[tuple[Address, Layer], tuple[frozenset[Gemm], ...]]:
        """For each layer of each site, the products that each rule matches, whenever it is in force."""
        matcher = _Matcher(self.policy.rules)
        return {(s.address, layer): matcher(s, layer) for s in self.sites for layer in s.layers()}

    def decisions(self, phase: Phase = ()) -> Decisions:
        """What happens to every layer of every site in a phase."""
        if phase not in self._known:
            live = [self.in_force(at, phase) for at in range(len(self.policy.rules))]
            self._known[phase] = {
                key: self._placed(key[0], self._decide(found, live)) for key, found in self.matched.items()
            }
        return self._known[phase]

    @cached_property
    def machine(self) -> Machine:
        """What the products are to run on."""
        return machine_here() if self.execution.target is None else machine_of(self.execution.target)

    def _placed(self, address: Address, decision: Decision) -> Decision:
        """A decision with how each product runs."""
        if decision.recipe is None:
            return decision
        key = (address, decision)
        if key not in self._decided:
            asks = asked(self._site[address], decision.recipe)
            fprop, dgrad, wgrad = (choose(self.execution.backend, ask, self.machine) for ask in asks)
            self._decided[key] = replace(decision, lowerings=(fprop, dgrad, wgrad))
        return self._decided[key]

    @cached_property
    def _site(self) -> dict[Address, Site]:
        return {site.address: site for site in self.sites}

    def _decide(self, found: tuple[frozenset[Gemm], ...], live: list[bool]) -> Decision:
        key = (found, tuple(live))
        if key not in self._decided:
            chosen: list[Choice] = []
            for gemm in Gemm:
                taken = [at for at in reversed(range(len(found))) if live[at] and gemm in found[at]]
                chosen.append(Choice(taken[0], tuple(taken[1:])) if taken else Choice(None))
            parts = {
                g: self.resolved[c.rule] for g, c in zip(Gemm, chosen, strict=True) if c.rule is not None
            }
            recipe = recipes.make_split_recipe(parts)
            kept = all(t.format == "keep" for t in recipe.treatments)
            self._decided[key] = Decision((chosen[0], chosen[1], chosen[2]), None if kept else recipe)
        return self._decided[key]

    @cached_property
    def _decided(self) -> dict[Any, Decision]:
        return {}

    @cached_property
    def resolved(self) -> tuple[Recipe, ...]:
        resolve = self.policy.resolver()
        return tuple(resolve(rule.recipe) for rule in self.policy.rules)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many sites each rule matches, every layer counted."""
        found = [0] * len(self.policy.rules)
        for products in self.matched.values():
            for at, taken in enumerate(products):
                found[at] += bool(taken)
        return tuple(found)

    @property
    def quantized(self) -> bool:
        """Does any phase change anything?"""
        return any(d.recipe is not None for phase in self.phases for d in self.decisions(phase).values())

    def check(self, *, may_miss: bool = False) -> None:
        """Raises every fault that stops the policy from being applied to this loss.

        `may_miss` lets a rule match nothing, whatever it expects: another loss of the program is meant by it.
        """
        found = [
            *expectations(self, may_miss=may_miss),
            *opaque_sites(self),
            *divided_stacks(self),
            *bad_recipes(self),
            *missing_libraries(self),
        ]
        if self.execution.require_native:
            found += not_native(self)
        if found:
            raise PolicyError(found)


def make_plan(policy: Policy, sites: Sites, execution: ExecutionOptions | None = None) -> Plan:
    return Plan(policy=policy, sites=sites, execution=execution or ExecutionOptions())


def asked(site: Site, recipe: Recipe) -> tuple[GemmQuery, GemmQuery, GemmQuery]:
    """The three products of a site, as a backend is asked about them."""
    chosen = normalize_if_valid(recipe)
    m, n, k = site.m, site.n, site.k
    sizes = {Gemm.FPROP: (m, n, k), Gemm.DGRAD: (m, k, n), Gemm.WGRAD: (k, n, m)}
    x, w = (str(v.aval.dtype) for v in site.eqn.invars[:2][:: -1 if site.weight == "lhs" else 1])
    dy = str(site.eqn.outvars[0].aval.dtype)
    types = {Gemm.FPROP: (x, w), Gemm.DGRAD: (dy, w), Gemm.WGRAD: (x, dy)}
    fprop, dgrad, wgrad = (
        GemmQuery(
            gemm=gemm,
            left=chosen.gemm_treatments(gemm)[0],
            right=chosen.gemm_treatments(gemm)[1],
            m=rows,
            n=columns,
            k=contracted,
            batch=site.batch,
            ragged=site.kind == "ragged",
            types=types[gemm],
        )
        for gemm, (rows, columns, contracted) in sizes.items()
    )
    return fprop, dgrad, wgrad


class _Matcher:
    """Which products of a site each rule takes. Paths repeat, so what is found is kept."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self._rules = rules
        self._parts = [
            tuple((p, s.products) for s in rule.selectors for p in expand_selector(s)) for rule in rules
        ]
        self._known: dict[DottedPath, tuple[frozenset[Gemm], ...]] = {}
        self._holds: dict[Address, tuple[bool, ...]] = {}

    def __call__(self, site: Site, layer: Layer) -> tuple[frozenset[Gemm], ...]:
        if site.address not in self._holds:
            given = site.attributes
            self._holds[site.address] = tuple(
                r.where is None or r.where.holds(given) is True for r in self._rules
            )
        found = [self._taken(path) for path in site.paths(layer)]
        joined = found[0] if len(found) == 1 else tuple(a.union(*b) for a, *b in zip(*found, strict=True))
        holds = self._holds[site.address]
        return tuple(products if ok else frozenset() for products, ok in zip(joined, holds, strict=True))

    def _taken(self, path: DottedPath) -> tuple[frozenset[Gemm], ...]:
        if path not in self._known:
            self._known[path] = tuple(
                frozenset[Gemm]().union(*(products for p, products in parts if matches(p, path)))
                for parts in self._parts
            )
        return self._known[path]


# ---- faults


def expectations(plan: Plan, *, may_miss: bool = False) -> Iterator[Diagnostic]:
    """Rules that match another number of sites than they expect."""
    for rule, count in zip(plan.policy.rules, plan.counts, strict=True):
        if rule.expect is not None and rule.expect != count and (count or not may_miss):
            yield Diagnostic(
                code="expect-violated",
                message=f"this rule expects {rule.expect} site{'s'[: rule.expect != 1]} and matches {count}",
                span=rule.span,
                help=_other_loss(suggestion(plan, rule))
                if not count
                else f"expect {count}, if that is right",
            )


def _other_loss(help: str) -> str:
    return f"{help}; or if another loss of the program has them: --multiple-losses"


def opaque_sites(plan: Plan) -> Iterator[Diagnostic]:
    """Rules that change a GEMM which the compiler cannot reach."""
    blamed: dict[int, list[Site]] = {}
    for site in (s for s in plan.sites if s.opaque):
        for phase, layer in itertools.product(plan.phases, site.layers()):
            decision = plan.decisions(phase)[site.address, layer]
            for gemm, choice in zip(Gemm, decision.choices, strict=True):
                changed = decision.recipe is not None and decision.recipe.bits(gemm) != 0
                if choice.rule is not None and changed and site not in blamed.setdefault(choice.rule, []):
                    blamed[choice.rule].append(site)
    for at, sites in blamed.items():
        if not sites:
            continue
        rule, first = plan.policy.rules[at], sites[0]
        where = f" ({first.place})" if first.place else ""
        more = f", and {len(sites) - 1} more" if len(sites) > 1 else ""
        yield Diagnostic(
            code="opaque-site",
            message=f"the GEMM '{first.name}'{where} cannot be changed: it is inside {first.opaque}{more}",
            span=rule.span,
            help=f"keep it with a rule behind this one: {_keeping(first)} -> keep",
        )


def divided_stacks(plan: Plan) -> Iterator[Diagnostic]:
    """Rules that treat the layers of one device otherwise than those of another, which run the same program."""
    blamed: dict[int, Site] = {}
    for site in (s for s in plan.sites if any(stack.devices for stack in s.stacks)):
        for phase in plan.phases:
            for rule in _told_apart(plan.decisions(phase), site):
                blamed.setdefault(rule, site)
    for at, site in sorted(blamed.items()):
        devices = max(s.size for s in site.stacks if s.devices)
        yield Diagnostic(
            code="opaque-site",
            message=f"the layers of '{site.name}' are divided over {devices} devices, which run one program "
            "(shard_map): they cannot be told apart by index",
            span=plan.policy.rules[at].span,
            help="choose layers at the same place on every device, or all of them",
        )


def _told_apart(decisions: Decisions, site: Site) -> Iterator[int]:
    """The last of the rules that decide otherwise about a layer than about its counterpart on the first device."""
    for layer in site.layers():
        first = tuple(0 if s.devices else i for s, i in zip(site.stacks, layer, strict=True))
        one, other = decisions[site.address, first], decisions[site.address, layer]
        if one.recipe != other.recipe:
            yield max(c.rule for d in (one, other) for c in d.choices if c.rule is not None)


def _keeping(site: Site) -> str:
    path = site.parameters[0].path if site.parameters else site.scope.path
    return ".".join(n.text for n in path) or f"* where k == {site.k} and n == {site.n}"


def bad_recipes(plan: Plan) -> Iterator[Diagnostic]:
    """Recipes whose options contradict each other on some product."""
    for rule, recipe in zip(plan.policy.rules, plan.resolved, strict=True):
        for sentence in find_recipe_problems(recipe):
            yield Diagnostic(code="contradictory-options", message=sentence, span=rule.recipe.span)


def not_native(plan: Plan) -> Iterator[Diagnostic]:
    """Rules by which a product would be emulated."""
    blamed: dict[tuple[int, Obstacle], dict[tuple[str, Gemm], None]] = {}
    for phase in plan.phases:
        for (address, _), decision in plan.decisions(phase).items():
            site = plan._site[address]
            for gemm in (g for g in Gemm if g in site.products):
                rule, runs = decision.of(gemm).rule, decision.runs(gemm)
                if rule is not None and not runs.native and runs.obstacle is not None:
                    blamed.setdefault((rule, runs.obstacle), {})[site.name, gemm] = None
    for (at, obstacle), products in blamed.items():
        name, gemm = next(iter(products))
        more = f", and {len(products) - 1} more" if len(products) > 1 else ""
        yield Diagnostic(
            code="not-native",
            message=f"{gemm} of '{name}' would be emulated{more}: {obstacle.reason}",
            span=plan.policy.rules[at].span,
            help=obstacle.remedy,
        )


def missing_libraries(plan: Plan) -> Iterator[Diagnostic]:
    """Backends that are to run something here, and whose library is not installed."""
    if plan.execution.target is not None:
        return
    blamed: dict[str, int] = {}
    for phase in plan.phases:
        for decision in plan.decisions(phase).values():
            for gemm in Gemm:
                rule, runs = decision.of(gemm).rule, decision.runs(gemm)
                if rule is not None and runs.backend:
                    blamed.setdefault(runs.backend, rule)
    for backend, at in blamed.items():
        lacking = backends.load(backend).missing()
        if lacking:
            yield Diagnostic(
                code="missing-library",
                message=lacking,
                span=plan.policy.rules[at].span,
                help="--backend auto runs it by XLA",
            )


def unmatched_rules(plan: Plan) -> Iterator[Diagnostic]:
    """Rules that match no site of the loss."""
    for rule, count in zip(plan.policy.rules, plan.counts, strict=True):
        if not count and rule.expect is None:
            yield Diagnostic(
                code="unmatched-rule",
                message="no site of this model matches this rule",
                span=rule.span,
                severity=Severity.WARNING,
                help=suggestion(plan, rule),
            )


def suggestion(plan: Plan, rule: Rule) -> str:
    """What the writer of a rule that matches nothing may have meant, from the real paths."""
    if not len(plan.sites):
        return "the loss has no GEMM at all"
    names = list(dict.fromkeys(n.text for s in plan.sites for p in _all_paths(s) for n in p))
    for selector in rule.selectors:
        for segment in selector.segments:
            if segment.glob == "*" or segment.glob in names:
                continue
            near = closest_name(segment.glob, names)
            if near is not None:
                return f"did you mean '{near}' for '{segment.glob}'?"
    indexed = any(segment.indices for s in rule.selectors for segment in s.segments)
    if indexed and not any(n.index is not None for s in plan.sites for p in _layer_paths(s) for n in p):
        return "nothing in this model is a stack: no path has an index"
    shown = list(dict.fromkeys(s.name for s in plan.sites))
    more = f", ... ({len(shown)} in all)" if len(shown) > _SHOWN else ""
    return f"paths here are like {', '.join(shown[:_SHOWN])}{more}"


def _all_paths(site: Site) -> Iterable[DottedPath]:
    return (site.scope.path, *(p.path for p in site.parameters))


def _layer_paths(site: Site) -> Iterable[DottedPath]:
    return site.paths(next(iter(site.layers()), ()))
