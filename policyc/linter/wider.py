"""Compares the selectors, conditions and schedules of rules: which rule is at least as wide as another?

A rule that is called wider matches whatever the other one matches, in every program. The comparison is not complete:
`layers[-8:]` is not known to be wider than `layers[-4:]`, nor are two rules together compared with a third. With a
program, the plan says which rules decide nothing.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from policyc.language.policy import Rule
from policyc.language.predicates import AllOf, Predicate
from policyc.language.recipes import Gemm, Recipe
from policyc.language.schedule import StepCondition
from policyc.language.selectors import (
    PathSegment,
    Selector,
    SelectorSegment,
    expand_selector,
    glob_segment_matches,
    skip_wildcards,
)


@dataclass(frozen=True, slots=True, eq=False)
class ResolvedRule:
    """A rule with its patterns, the terms of its condition, and its recipe under each variant; `None` is no variant."""

    rule: Rule
    index: int
    recipes: dict[str | None, Recipe]
    patterns: tuple[Selector, ...]
    terms: frozenset[Predicate]

    @property
    def recipe(self) -> Recipe:
        return self.recipes[None]


def resolve_rule(rule: Rule, index: int, recipes: dict[str | None, Recipe]) -> ResolvedRule:
    terms = rule.where.operands if isinstance(rule.where, AllOf) else (rule.where,)
    patterns = tuple(pattern for selector in rule.selectors for pattern in expand_selector(selector))
    return ResolvedRule(rule, index, recipes, patterns, frozenset(term for term in terms if term is not None))


def treats_alike(other: ResolvedRule, rule: ResolvedRule) -> bool:
    """Whether `other` does the same as `rule` to every product of `rule`, under every variant."""
    return all(
        are_equal(
            other.recipes.get(name, other.recipe), rule.recipes.get(name, rule.recipe), rule.rule.products
        )
        for name in other.recipes.keys() | rule.recipes.keys()
    )


def are_equal(one: Recipe, other: Recipe, products: Iterable[Gemm]) -> bool:
    return one is other or all(one.gemm_treatments(g) == other.gemm_treatments(g) for g in products)


def is_wider(wide: ResolvedRule, narrow: ResolvedRule) -> bool:
    """Whether a rule is known to match whatever another one matches."""
    return (
        wide.terms <= narrow.terms
        and _is_active_whenever(wide, narrow)
        and all(any(covers(pattern, other) for pattern in wide.patterns) for other in narrow.patterns)
    )


def _is_active_whenever(wide: ResolvedRule, narrow: ResolvedRule) -> bool:
    return all(any(_implies(other, condition) for other in narrow.rule.when) for condition in wide.rule.when)


def _implies(one: StepCondition, other: StepCondition) -> bool:
    if one.kind != other.kind or one.bound.percent != other.bound.percent:
        return False
    first, last = (other, one) if one.kind == "after" else (one, other)
    return first.bound.value <= last.bound.value


def covers(wide: Selector, narrow: Selector) -> bool:
    """Whether a pattern is known to match all paths and products of another one. Both are from `expand_selector`.

    Runs `wide` as `selectors.matches` does, with the segments of `narrow` instead of names.
    """
    if not narrow.products <= wide.products:
        return False
    segments, end = _segments(wide), len(_segments(wide))
    active = skip_wildcards(segments, {0})
    for segment in _segments(narrow):
        if end in active:
            return True
        following = {p for p in active if segments[p].is_wildcard}
        if (
            not segment.is_wildcard
        ):  # a wildcard stands for any number of names, which only a wildcard matches
            following |= {p + 1 for p in active - following if _segment_covers(segments[p], segment)}
        active = skip_wildcards(segments, following)
    return end in active


def _segments(pattern: Selector) -> tuple[SelectorSegment, ...]:
    return pattern.segments if pattern.anchored else (SelectorSegment(glob="*"), *pattern.segments)


def _segment_covers(wide: SelectorSegment, narrow: SelectorSegment) -> bool:
    """Whether `wide` is known to match all names of `narrow`; neither is a wildcard.

    Matches the glob of `narrow` as a name. Only `*` matches a `*` in it, unless `wide` has a `?`.
    """
    if wide == narrow:
        return True
    if wide.indices not in (None, narrow.indices) or ("?" in wide.glob and "*" in narrow.glob):
        return False
    return glob_segment_matches(wide, PathSegment(narrow.glob, None if narrow.indices is None else 0))


class WiderRules:
    """Finds wider rules in a policy. Patterns are looked up by the rarest name that they require."""

    def __init__(self, rules: Sequence[ResolvedRule]) -> None:
        self._rules = rules
        self._users: dict[Selector, set[int]] = {}
        for rule in rules:
            for pattern in rule.patterns:
                self._users.setdefault(pattern, set()).add(rule.index)
        names = {p: [(s.glob, s.indices) for s in p.segments if s.is_literal] for p in self._users}
        frequency = Counter(name for required in names.values() for name in required)
        self._by_name: dict[object, list[tuple[str, Selector]]] = {}
        for pattern, required in names.items():
            rarest = min(required, key=lambda name: frequency[name], default=None)
            parts = (part for s in pattern.segments for part in re.split(r"[*?]", s.glob))
            self._by_name.setdefault(rarest, []).append((max(parts, key=len, default=""), pattern))
        self._covering: dict[tuple[Selector, ...], list[int]] = {}

    def find_last(self, rule: ResolvedRule, start: int, stop: int) -> ResolvedRule | None:
        """Returns the last rule from index `start` to `stop` that is wider than a rule, if any."""
        if rule.patterns not in self._covering:
            self._covering[rule.patterns] = sorted(set.intersection(*map(self._find_covering, rule.patterns)))
        indices = self._covering[rule.patterns]
        later_first = reversed(indices[bisect_left(indices, start) : bisect_left(indices, stop)])
        rules = (self._rules[index] for index in later_first)
        possible = (other for other in rules if other.terms <= rule.terms)
        return next((other for other in possible if _is_active_whenever(other, rule)), None)

    def _find_covering(self, pattern: Selector) -> set[int]:
        """Returns the indices of the rules with a pattern that covers a pattern."""
        names = {None, *(name for s in pattern.segments for name in ((s.glob, None), (s.glob, s.indices)))}
        text = "".join(f"{s.glob}_." for s in pattern.segments)  # `x_?` matches every index of `x`
        candidates = (wide for name in names for part, wide in self._by_name.get(name, ()) if part in text)
        return set().union(*(self._users[wide] for wide in candidates if covers(wide, pattern)))
