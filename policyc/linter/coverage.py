"""Decides which sites a rule can still reach after the rules that follow it.

A rule is treated as a set of points. A point is a path, one of the three products, a moment of training and the
attributes of a GEMM. To decide whether other rules cover a rule, `Coverage` searches for a point that the rule matches
and the others do not. It searches paths as `examples` does, and attributes and moments by trying one point for each
combination of conditions. If it finds a point, it looks up the rule that decides it among all rules. Either no later
rule matches the point, which settles the question, or that later rule joins the others and the search continues.

Without a program, the kind and the layer of a site are unknown, so every possible combination is tried. An index in a
path and `layer` in a condition are independent, because a model can have several stacks.

The answers hold for stacks of any depth: `index_classes` tries the depths and indices around every number in the
slices, where the answers can change.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from policyc.language.policy import Rule
from policyc.language.predicates import SiteAttributes
from policyc.language.recipes import Gemm, Recipe
from policyc.language.schedule import representative_steps
from policyc.language.selectors import DottedPath, PathSegment, Selector, expand_selector, matches
from policyc.linter.examples import (
    Budget,
    SearchTooLarge,
    example_path,
    find_uncovered_path,
)
from policyc.linter.samples import EVALUATIONS_PER_STEP, count_comparisons, sample_attributes

Answer = TypeVar("Answer")

# Limits that keep the time for a policy proportional to its size.
_MAX_COVERING_RULES = 24  # later rules that together cover one rule
_MAX_STEPS_PER_QUESTION = 20_000
_MAX_STEPS = 200_000  # for all questions about one list of rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One product of one GEMM at one moment: a step and the number of steps in total."""

    path: DottedPath
    gemm: Gemm
    moment: tuple[int, int]
    attributes: SiteAttributes


class ResolvedRule:
    """A rule with its resolved recipe, the recipes that variants give it instead, and its index in the policy.

    Compares by identity.
    """

    __slots__ = ("index", "match_steps", "patterns", "recipe", "rule", "variant_recipes")

    def __init__(self, rule: Rule, recipe: Recipe, variant_recipes: Mapping[str, Recipe], index: int) -> None:
        self.rule: Rule = rule
        self.recipe: Recipe = recipe
        self.variant_recipes: Mapping[str, Recipe] = variant_recipes
        self.index: int = index
        self.patterns: tuple[Selector, ...] = tuple(p for s in rule.selectors for p in expand_selector(s))
        self.match_steps: int = len(self.patterns) + count_comparisons(rule.where) // EVALUATIONS_PER_STEP

    def recipe_under(self, variant: str) -> Recipe:
        """Returns the recipe of the rule under a variant."""
        return self.variant_recipes.get(variant, self.recipe)

    def is_active(self, moment: tuple[int, int], attributes: SiteAttributes) -> bool:
        """Returns whether the schedule and the condition of the rule hold."""
        condition = self.rule.where
        is_scheduled = all(w.holds(*moment) for w in self.rule.when)
        return is_scheduled and (condition is None or condition.holds(attributes) is True)

    def matches(self, point: Point) -> bool:
        if not self.is_active(point.moment, point.attributes):
            return False
        return any(point.gemm in p.products and matches(p, point.path) for p in self.patterns)


class Coverage:
    """Answers questions about one list of rules. `undecided` counts the questions that exceeded their limits."""

    def __init__(
        self,
        rules: Sequence[Rule],
        resolve: Callable[[Rule], Recipe],
        variant_recipes: Mapping[int, Mapping[str, Recipe]] = MappingProxyType({}),
        steps: int = _MAX_STEPS,
    ) -> None:
        self.rules: tuple[ResolvedRule, ...] = tuple(
            ResolvedRule(rule, resolve(rule), variant_recipes.get(index, {}), index)
            for index, rule in enumerate(rules)
        )
        self.undecided: int = 0
        self._remaining_steps = steps
        self._overriding: dict[int, tuple[ResolvedRule, ...]] = {}
        self._index = _RuleIndex(self.rules)
        self._by_recipe: dict[object, list[ResolvedRule]] = {}  # in the order of the policy
        for rule in self.rules:
            self._by_recipe.setdefault((rule.recipe, *rule.variant_recipes.items()), []).append(rule)

    def find_overriding_rules(self, rule: ResolvedRule) -> tuple[ResolvedRule, ...]:
        """Returns later rules that together match every point of a rule; () if the rule decides one, or undecided."""
        if rule.index not in self._overriding:
            self._overriding[rule.index] = self._ask(lambda budget: self._find_overriding(rule, budget), ())
        return self._overriding[rule.index]

    def find_equivalent_earlier_rule(self, rule: ResolvedRule) -> ResolvedRule | None:
        """Returns an earlier rule that gives every point of a rule the same recipe, under every variant, if any."""
        return self._ask(lambda budget: self._find_equivalent(rule, budget), None)

    def find_deciding_rule(self, point: Point, budget: Budget) -> ResolvedRule | None:
        """Returns the rule that decides a point: the last one that matches it."""
        return self._index.find_last_match(point, 0, len(self.rules), budget)

    def _ask(self, question: Callable[[Budget], Answer], default: Answer) -> Answer:
        steps = min(_MAX_STEPS_PER_QUESTION, self._remaining_steps)
        budget = Budget(steps)
        try:
            budget.spend(1)  # without steps left, nothing is computed
            answer = question(budget)
        except SearchTooLarge:
            self.undecided += 1
            self._remaining_steps -= steps
            return default
        self._remaining_steps -= steps - budget.remaining
        return answer

    def would_be_overridden(self, rule: ResolvedRule, moved: ResolvedRule) -> bool:
        """Returns whether a rule would have no effect if an earlier one were moved below it. True if undecided."""
        return self._ask(lambda budget: bool(self._find_overriding(rule, budget, moved)), True)

    def _find_overriding(
        self, rule: ResolvedRule, budget: Budget, *moved: ResolvedRule
    ) -> tuple[ResolvedRule, ...]:
        """Returns the rules that override a rule: rules after it, and rules that would be moved there."""
        overriding = list(moved)
        while len(overriding) <= _MAX_COVERING_RULES:
            point = find_uncovered_point(rule, overriding, budget)
            if point is None:
                return tuple(overriding)
            later = self._index.find_last_match(point, rule.index + 1, len(self.rules), budget)
            if later is None:
                return ()
            overriding.append(later)
        raise SearchTooLarge

    def _find_equivalent(self, rule: ResolvedRule, budget: Budget) -> ResolvedRule | None:
        point = find_uncovered_point(rule, [], budget)
        earlier = None if point is None else self._index.find_last_match(point, 0, rule.index, budget)
        if earlier is None or not _treats_alike(earlier, rule):
            return None
        if find_uncovered_point(rule, [earlier], budget) is not None:
            return None
        return None if self._any_differs(rule, earlier.index + 1, rule.index) else earlier

    def _any_differs(self, rule: ResolvedRule, start: int, stop: int) -> bool:
        """Returns whether any rule from index `start` to `stop` treats its sites differently.

        Their selectors are not compared: a selector matches anywhere in a path, so any two can match the same site.
        """
        for group in self._by_recipe.values():
            position = bisect_left(group, start, key=lambda r: r.index)
            if (
                position < len(group)
                and group[position].index < stop
                and not _treats_alike(group[position], rule)
            ):
                return True
        return False


def _treats_alike(other: ResolvedRule, rule: ResolvedRule) -> bool:
    """Returns whether `other` does the same as `rule` to every product of `rule`, under every variant."""
    variants = other.variant_recipes.keys() | rule.variant_recipes.keys()
    pairs = [
        (other.recipe, rule.recipe),
        *((other.recipe_under(name), rule.recipe_under(name)) for name in variants),
    ]
    return all(
        a is b or a.gemm_treatments(g) == b.gemm_treatments(g) for a, b in pairs for g in rule.rule.products
    )


def find_uncovered_point(rule: ResolvedRule, others: Sequence[ResolvedRule], budget: Budget) -> Point | None:
    """Returns a point that the rule matches and none of the others does."""
    rules = [rule.rule, *(other.rule for other in others)]
    schedule = tuple(dict.fromkeys(w for r in rules for w in r.when))
    conditions = tuple(dict.fromkeys(r.where for r in rules if r.where is not None))
    samples = sample_attributes(conditions, budget)
    for moment, attributes in itertools.product(representative_steps(schedule), samples):
        if not rule.is_active(moment, attributes):
            continue
        active = [other for other in others if other.is_active(moment, attributes)]
        covering_by_gemm = {
            gemm: [p for other in active for p in other.patterns if gemm in p.products] for gemm in Gemm
        }
        for pattern in rule.patterns:
            for gemm in (g for g in Gemm if g in pattern.products):
                covering = covering_by_gemm[gemm]
                path = find_uncovered_path(pattern, covering, budget) if covering else example_path(pattern)
                if path is not None:
                    return Point(path=path, gemm=gemm, moment=moment, attributes=attributes)
    return None


_Key = tuple[str, int | None]
"""A literal name, and its index if the pattern has one."""


class _RuleIndex:
    """Finds the rules that match a point, by the rarest literal name in each of their patterns."""

    def __init__(self, rules: Sequence[ResolvedRule]) -> None:
        self._rules = rules
        self._by_key: dict[_Key | None, list[int]] = {}
        keyed = [(rule, [_literal_keys(p) for p in rule.patterns]) for rule in rules]
        frequency = Counter(key for _, patterns_keys in keyed for keys in patterns_keys for key in keys)
        for rule, patterns_keys in keyed:
            rarest = {min(keys, key=lambda k: frequency[k], default=None) for keys in patterns_keys}
            for key in rarest:
                self._by_key.setdefault(key, []).append(rule.index)

    def find_last_match(self, point: Point, start: int, stop: int, budget: Budget) -> ResolvedRule | None:
        """Returns the last rule from index `start` to `stop` that matches the point."""
        last = -1
        # Not a set: the order decides what is charged to the budget, and must not depend on hashes.
        for key in dict.fromkeys((None, *(k for name in point.path for k in _name_keys(name)))):
            indices = self._by_key.get(key, [])
            for position in reversed(range(bisect_left(indices, start), bisect_left(indices, stop))):
                budget.spend(self._rules[indices[position]].match_steps)
                if indices[position] > last and self._rules[indices[position]].matches(point):
                    last = indices[position]
                    break
        return self._rules[last] if last >= 0 else None


def _literal_keys(pattern: Selector) -> list[_Key]:
    return [(p.glob, p.indices.index if p.indices else None) for p in pattern.segments if p.is_literal]


def _name_keys(name: PathSegment) -> Iterator[_Key]:
    """Yields the keys of patterns that can match a name: without an index, and with its index from either end."""
    yield (name.text, None)
    if name.index is not None:
        yield (name.text, name.index)
        if name.size is not None:
            yield (name.text, name.index - name.size)
