"""Which rule of a policy decides about each product of a site, in each phase of the schedule.

Loads no JAX: a `Plan` decides so about the sites of a loss, and a `ListPlan` about those of a file.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from policyc.language.policy import Policy, Rule
from policyc.language.predicates import SiteAttributes
from policyc.language.recipes import Gemm
from policyc.language.schedule import representative_steps
from policyc.language.selectors import DottedPath, expand_selector, matches

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
        self.match = _Matcher(policy.rules)

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
        holds = dict(zip(self._policy.step_conditions, phase, strict=True))
        return all(holds[condition] for condition in self._policy.rules[rule].when)

    def decide(self, matched: MatchedProducts, phase: Phase) -> Choices:
        """The choices where each rule matches these products: the last rule in force decides."""
        key = (matched, phase)
        if key not in self._decided:
            live = [r for r in reversed(range(len(matched))) if self.in_force(r, phase)]
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
            tuple((p, s.products) for s in rule.selectors for p in expand_selector(s)) for rule in rules
        ]
        self._by_path: dict[DottedPath, MatchedProducts] = {}
        self._conditions: dict[tuple[Hashable, int | None], tuple[bool, ...]] = {}

    def __call__(self, site: MatchableSite, layer: tuple[int, ...]) -> MatchedProducts:
        by_path = [self._match(path) for path in site.paths(layer)]
        joined = (
            by_path[0] if len(by_path) == 1 else tuple(a.union(*b) for a, *b in zip(*by_path, strict=True))
        )
        holds = self._conditions_at(site, layer)
        return tuple(products if ok else frozenset() for products, ok in zip(joined, holds, strict=True))

    def _conditions_at(self, site: MatchableSite, layer: tuple[int, ...]) -> tuple[bool, ...]:
        """Whether the `where` of each rule holds."""
        attributes = site.attributes(layer)
        key = site.address, attributes.get("layer")
        if key not in self._conditions:
            self._conditions[key] = tuple(
                rule.where is None or rule.where.holds(attributes) is True for rule in self._rules
            )
        return self._conditions[key]

    def _match(self, path: DottedPath) -> MatchedProducts:
        if path not in self._by_path:
            self._by_path[path] = tuple(
                frozenset[Gemm]().union(*(products for p, products in parts if matches(p, path)))
                for parts in self._patterns
            )
        return self._by_path[path]
