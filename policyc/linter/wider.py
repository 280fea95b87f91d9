"""Finds rules with the same or a wider selector than another rule: they match whatever it matches, in every program.

A pattern is wider than another if the other one contains its names in a row. The slices of the wider rule, the terms of
its condition and those of its phase are all in the other one. The comparison is textual: globs are names, and two rules
together are not compared with a third. With a program, the plan says which rules decide nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from policyc.language.policy import Rule
from policyc.language.predicates import AllOf
from policyc.language.recipes import Gemm, Recipe
from policyc.language.selectors import Selector, expand_selector

_Key = tuple[str, frozenset[Gemm]]
"""A pattern as text, without its products, and these."""

_MAX_TERMS = 4  # of a condition whose subsets are all looked up; of longer ones, single terms and the whole


@dataclass(frozen=True, slots=True, eq=False)
class ResolvedRule:
    """A rule with its patterns, and its recipe by variant. The key None is the policy without a variant."""

    rule: Rule
    index: int
    recipes: dict[str | None, Recipe]
    patterns: tuple[Selector, ...]

    @property
    def recipe(self) -> Recipe:
        return self.recipes[None]


def resolve_rule(rule: Rule, index: int, recipes: dict[str | None, Recipe]) -> ResolvedRule:
    patterns = tuple(pattern for selector in rule.selectors for pattern in expand_selector(selector))
    return ResolvedRule(rule, index, recipes, patterns)


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


class WiderRules:
    """Finds wider rules in a policy by hashing: the time does not depend on how many rules there are."""

    def __init__(self, rules: Sequence[ResolvedRule]) -> None:
        self._rules = rules
        self._indices: dict[frozenset[_Key], dict[frozenset[object], list[int]]] = {}
        self._lengths = sorted({len(pattern.segments) for rule in rules for pattern in rule.patterns})
        self._wider: dict[Selector, set[_Key]] = {}
        for rule in rules:
            keys = frozenset(map(_as_key, rule.patterns))
            for patterns in {keys, *(frozenset((key,)) for key in keys)}:
                by_condition = self._indices.setdefault(patterns, {})
                by_condition.setdefault(frozenset(_terms(rule.rule)), []).append(rule.index)

    def find_last(self, rule: ResolvedRule, start: int, stop: int) -> ResolvedRule | None:
        """Returns the last rule from index `start` to `stop` that is wider than a rule, if any."""
        keys = frozenset(map(_as_key, rule.patterns))
        wider = set.intersection(*map(self._wider_keys, rule.patterns))
        terms = _terms(rule.rule)
        sizes = range(len(terms) + 1) if len(terms) <= _MAX_TERMS else (0, 1, len(terms))
        conditions = [frozenset(subset) for size in sizes for subset in combinations(terms, size)]
        last = -1
        for patterns in (keys, *(frozenset((key,)) for key in wider)):
            by_condition = self._indices.get(patterns, {})
            for condition in conditions:
                indices = by_condition.get(condition, [])
                before = bisect_left(indices, stop)
                last = max(last, indices[before - 1] if before else -1)
        return self._rules[last] if last >= start else None

    def _wider_keys(self, pattern: Selector) -> set[_Key]:
        """The keys of possible wider patterns, itself included. All patterns are from `expand_selector`."""
        if pattern not in self._wider:
            names, bare = [str(s) for s in pattern.segments], [s.glob for s in pattern.segments]
            parts = {
                mark + ".".join(segments[start : start + length])
                for segments in (names, bare)
                for length in self._lengths
                for start in range(len(segments) - length + 1)
                for mark in ({"^" * pattern.anchored, ""} if length and not start else {""})
            }
            others = [gemm for gemm in Gemm if gemm not in pattern.products]
            more = [frozenset(m) for count in range(len(others) + 1) for m in combinations(others, count)]
            self._wider[pattern] = {(part, pattern.products | extra) for part in parts for extra in more}
        return self._wider[pattern]


def _terms(rule: Rule) -> tuple[object, ...]:
    """The terms of which all must hold for a rule to apply."""
    where = rule.where.operands if isinstance(rule.where, AllOf) else (rule.where,)
    return tuple({*(term for term in where if term is not None), *rule.when})


def _as_key(pattern: Selector) -> _Key:
    return "^" * pattern.anchored + ".".join(map(str, pattern.segments)), pattern.products
