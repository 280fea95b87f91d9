"""Which rule of a policy decides about each product of a site, in each phase of the schedule.

Loads no JAX: a `Plan` decides so about the sites of a loss, and a `ListPlan` about those of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from policyc.language.policy import Policy, Rule
from policyc.language.predicates import SiteAttributes
from policyc.language.recipes import Gemm
from policyc.language.schedule import StepCondition, representative_steps
from policyc.language.selectors import DottedPath, Pattern, expand_selector, matches

MatchedProducts = tuple[frozenset[Gemm], ...]
"""For each rule of a policy: the products of a site that it matches."""

Phase = tuple[bool, ...]
"""For each condition of the schedule, in the order of `Policy.step_conditions`: does it hold?"""


@dataclass(frozen=True, slots=True)
class Choice:
    """The rule that decides about a product, and those it overrides, the nearest first: indices into the policy."""

    rule: int | None
    overridden: tuple[int, ...] = ()


Choices = tuple[Choice, Choice, Choice]
"""One for each product, in the order of `Gemm`."""


class MatchableSite(Protocol):
    """What matching needs of a site."""

    @property
    def address(self) -> Hashable: ...

    def paths(self, layer: tuple[int, ...]) -> tuple[DottedPath, ...]: ...

    def attributes(self, layer: tuple[int, ...]) -> SiteAttributes: ...


class RuleDecisions:
    """The phases of a policy, the products of a site that its rules match, and which of them decides.

    Results are cached: many layers match the same rules.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._decided: dict[tuple[MatchedProducts, Phase], Choices] = {}

    @cached_property
    def match(self) -> Callable[[MatchableSite, tuple[int, ...]], MatchedProducts]:
        """Finds the products of a layer of a site that each rule matches."""
        return _Matcher(self._policy.rules)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that the schedule can be in, the earliest first."""
        conditions = self._policy.step_conditions
        phases = dict.fromkeys(
            tuple(c.holds(step, total) for c in conditions)
            for step, total in sorted(representative_steps(conditions), key=lambda m: m[0] / m[1])
        )
        return tuple(phases) or ((),)

    def label(self, phase: Phase) -> str:
        pairs = zip(self._policy.step_conditions, phase, strict=True)
        return " and ".join(str(c if holds else c.opposite) for c, holds in pairs) or "always"

    def in_force(self, rule: int, phase: Phase) -> bool:
        """Does a rule apply in a phase?"""
        when = self._policy.rules[rule].when
        return not when or all(phase[self._numbers[condition]] for condition in when)

    @cached_property
    def _numbers(self) -> dict[StepCondition, int]:
        return {condition: number for number, condition in enumerate(self._policy.step_conditions)}

    def decide(self, matched: MatchedProducts, phase: Phase) -> Choices:
        """The choices where each rule matches these products: the last rule in force decides."""
        key = (matched, phase)
        if key not in self._decided:
            live = [r for r in reversed(range(len(matched))) if matched[r] and self.in_force(r, phase)]
            fprop, dgrad, wgrad = (_choose([r for r in live if gemm in matched[r]]) for gemm in Gemm)
            self._decided[key] = fprop, dgrad, wgrad
        return self._decided[key]


def _choose(rules: list[int]) -> Choice:
    return Choice(rules[0], tuple(rules[1:])) if rules else Choice(None)


class _Matcher:
    """Finds the products of a site that each rule matches. Results are cached by path, since paths repeat."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self._rules = rules
        self._patterns = [
            [(p, _literals(p), s.products) for s in rule.selectors for p in expand_selector(s)]
            for rule in rules
        ]
        self._by_path: dict[DottedPath, Mapping[int, frozenset[Gemm]]] = {}
        self._conditions: dict[tuple[Hashable, int | None, int], bool] = {}

    def __call__(self, site: MatchableSite, layer: tuple[int, ...]) -> MatchedProducts:
        matched = [frozenset[Gemm]()] * len(self._rules)
        attributes = site.attributes(layer)
        for path in site.paths(layer):
            for rule, products in self._match(path).items():
                if self._holds(rule, site, attributes):
                    matched[rule] = matched[rule] | products
        return tuple(matched)

    def _holds(self, rule: int, site: MatchableSite, attributes: SiteAttributes) -> bool:
        """Whether the `where` of a rule holds."""
        where = self._rules[rule].where
        if where is None:
            return True
        key = site.address, attributes.get("layer"), rule
        if key not in self._conditions:
            self._conditions[key] = where.holds(attributes) is True
        return self._conditions[key]

    def _match(self, path: DottedPath) -> Mapping[int, frozenset[Gemm]]:
        """The products that rules match by a path, without their `where`; only of the rules that match any."""
        if path not in self._by_path:
            names = {name.text for name in path}
            by_rule: dict[int, frozenset[Gemm]] = {}
            for rule, patterns in enumerate(self._patterns):
                for pattern, literals, products in patterns:
                    if literals <= names and matches(pattern, path):
                        by_rule[rule] = by_rule.get(rule, frozenset()) | products
            self._by_path[path] = by_rule
        return self._by_path[path]


def _literals(pattern: Pattern) -> frozenset[str]:
    """The names that a path must contain to match: most rules are about other paths, and are ruled out by them."""
    return frozenset(segment.glob for segment in pattern.segments if segment.is_literal)
