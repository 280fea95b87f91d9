"""Which sites a rule can still reach, by reasoning on sets and not on text.

In: rules. Out: the later rules that together take every site of an earlier one (`Cover.taken_by`), and
whether a rule repeats what holds already (`Cover.repeats`). A rule is a set of points: a path, one of the
three products, a moment of training, the sizes of a GEMM. Containment is decided by looking for a point that
is in the one and not in the others: over paths with automata, over sizes and moments by trying a point for
each combination of conditions. A found point is looked up among all rules, which either settles the matter or
adds the rule that takes it to the argument.

The one trap: every answer must hold for stacks of any depth. `classes` tries depths and indices around every
number in the slices, which is where answers change.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TypeVar

from policyc.language.policy import Rule
from policyc.language.predicates import Comparison, Predicate, SiteAttributes, comparisons
from policyc.language.recipes import Gemm, Recipe
from policyc.language.schedule import representative_steps
from policyc.language.selectors import DottedPath, PathSegment, Pattern, expand_selector, matches
from policyc.lint.automata import Budget, TooHard, outside, plainly_inside, witness

Answer = TypeVar("Answer")

_MOST_COVERING = 24
_MOST_SITES = 256  # combinations of sizes tried for one argument
_STEPS_EACH = 20_000
_LONGEST_PERIOD = 128
_MOST_TRIALS = 20_000
_TRIALS = 2  # of one condition, for the price of one step

_ANY: SiteAttributes = {"m": 1, "n": 1, "k": 1, "batch": 1, "flops": 1, "weight": True}


@dataclass(frozen=True, slots=True)
class Point:
    """One product of one GEMM at one moment."""

    path: DottedPath
    gemm: Gemm
    moment: tuple[int, int]
    site: SiteAttributes


class Claim:
    """A rule as a set of points. `varied` is its recipe under the variants that change it. Compares by identity."""

    __slots__ = ("order", "parts", "recipe", "rule", "varied")

    def __init__(self, rule: Rule, recipe: Recipe, varied: Mapping[str, Recipe], order: int) -> None:
        self.rule = rule
        self.recipe = recipe
        self.varied = varied
        self.order = order
        self.parts = tuple((p, s.products) for s in rule.selectors for p in expand_selector(s))

    def holds(self, moment: tuple[int, int], site: SiteAttributes) -> bool:
        """Is the rule in force then, for a GEMM of those sizes?"""
        rule = self.rule
        return all(w.holds(*moment) for w in rule.when) and (
            rule.where is None or rule.where.holds(site) is True
        )

    def takes(self, point: Point) -> bool:
        if not self.holds(point.moment, point.site):
            return False
        return any(point.gemm in products and matches(p, point.path) for p, products in self.parts)


class Cover:
    """Answers for one list of rules. `undecided` counts the questions given up as too hard."""

    def __init__(
        self,
        rules: Sequence[Rule],
        resolve: Callable[[Rule], Recipe],
        varied: Mapping[int, Mapping[str, Recipe]] = MappingProxyType({}),
        steps: int = 200_000,
    ) -> None:
        self.claims = tuple(Claim(r, resolve(r), varied.get(at, {}), at) for at, r in enumerate(rules))
        self.undecided = 0
        self._left = steps
        self._taken: dict[int, tuple[Claim, ...]] = {}
        self._index = _Index(self.claims)
        self._alike: dict[object, list[Claim]] = {}  # the claims of one recipe, in their order
        for claim in self.claims:
            self._alike.setdefault((claim.recipe, *claim.varied.items()), []).append(claim)

    def taken_by(self, claim: Claim) -> tuple[Claim, ...]:
        """Later rules that together take all that the claim takes; empty where something is left to it."""
        if claim.order not in self._taken:
            self._taken[claim.order] = self._ask(lambda budget: self._covering(claim, budget)[0], ())
        return self._taken[claim.order]

    def left_to(self, claim: Claim) -> Point | None:
        """A point that the claim decides about: the proof that no later rules take it all."""
        return self._ask(lambda budget: self._covering(claim, budget)[1], None)

    def repeats(self, claim: Claim) -> Claim | None:
        """An earlier rule that gives every site of the claim what the claim gives it, under every variant."""
        return self._ask(lambda budget: self._repeated(claim, budget), None)

    def decides(self, point: Point, budget: Budget) -> Claim | None:
        """The rule that decides about a point: the last that takes it."""
        return self._index.last(point, 0, len(self.claims), budget)

    def _ask(self, question: Callable[[Budget], Answer], otherwise: Answer) -> Answer:
        granted = min(_STEPS_EACH, self._left)
        budget = Budget(granted)
        try:
            return question(budget)
        except TooHard:
            self.undecided += 1
            return otherwise
        finally:
            self._left -= granted - max(budget.left, 0)

    def _covering(self, claim: Claim, budget: Budget) -> tuple[tuple[Claim, ...], Point | None]:
        covering: list[Claim] = []
        while len(covering) <= _MOST_COVERING:
            point = _left_over(claim, covering, budget)
            if point is None:
                return tuple(covering), None
            later = self._index.last(point, claim.order + 1, len(self.claims), budget)
            if later is None:
                return (), point
            covering.append(later)
        raise TooHard

    def _repeated(self, claim: Claim, budget: Budget) -> Claim | None:
        point = _left_over(claim, [], budget)
        last = None if point is None else self._index.last(point, 0, claim.order, budget)
        if last is None or not _same(last, claim) or _left_over(claim, [last], budget) is not None:
            return None
        return None if self._disagrees(claim, last.order + 1, claim.order) else last

    def _disagrees(self, claim: Claim, start: int, stop: int) -> bool:
        """Does a rule in a range of orders do something else? Selectors float, so any two can name one site."""
        for alike in self._alike.values():
            at = bisect_left(alike, start, key=lambda c: c.order)
            if at < len(alike) and alike[at].order < stop and not _same(alike[at], claim):
                return True
        return False


def _same(other: Claim, claim: Claim) -> bool:
    """Does the other do what the claim does, in every product that the claim takes, under every variant?"""
    pairs = [(other.recipe, claim.recipe)]
    for name in other.varied.keys() | claim.varied.keys():
        pairs += [(other.varied.get(name, other.recipe), claim.varied.get(name, claim.recipe))]
    return all(
        a is b or a.gemm_treatments(g) == b.gemm_treatments(g) for a, b in pairs for g in claim.rule.products
    )


def _left_over(claim: Claim, others: list[Claim], budget: Budget) -> Point | None:
    """A point that the claim takes and none of the others does."""
    rules = [claim.rule, *(c.rule for c in others)]
    times = representative_steps(tuple(dict.fromkeys(w for r in rules for w in r.when)))
    conditions = tuple(dict.fromkeys(r.where for r in rules if r.where is not None))
    budget.spend(trials(conditions) * len(conditions) // _TRIALS)
    sizes = sites(conditions)
    for moment, site in itertools.product(times, sizes):
        if not claim.holds(moment, site):
            continue
        active = [c for c in others if c.holds(moment, site)]
        for pattern, products in claim.parts:
            for gemm in (g for g in Gemm if g in products):
                rest = [p for c in active for p, taken in c.parts if gemm in taken]
                if any(plainly_inside(pattern, other) for other in rest):
                    continue
                path = outside(pattern, rest, budget) if rest else witness(pattern)
                if path is not None:
                    return Point(path, gemm, moment, site)
    return None


class _Index:
    """Finds the rules that take a point, by the rarest literal name in each of their patterns."""

    def __init__(self, claims: Sequence[Claim]) -> None:
        self._claims = claims
        self._orders: dict[_Key | None, list[int]] = {}
        keyed = [(claim, [_keys(p) for p, _ in claim.parts]) for claim in claims]
        common = Counter(key for _, parts in keyed for keys in parts for key in keys)
        for claim, parts in keyed:
            rarest = {min(keys, key=lambda k: common[k], default=None) for keys in parts}
            for key in rarest:
                self._orders.setdefault(key, []).append(claim.order)

    def last(self, point: Point, start: int, stop: int, budget: Budget) -> Claim | None:
        """The last claim in a range of orders that takes the point."""
        found = -1
        for key in {None, *(k for name in point.path for k in _spellings(name))}:
            orders = self._orders.get(key, [])
            for at in reversed(range(bisect_left(orders, start), bisect_left(orders, stop))):
                budget.spend(1)
                if orders[at] > found and self._claims[orders[at]].takes(point):
                    found = orders[at]
                    break
        return self._claims[found] if found >= 0 else None


_Key = tuple[str, int | None]


def _keys(pattern: Pattern) -> list[_Key]:
    return [(p.glob, p.indices.index if p.indices else None) for p in pattern.segments if p.is_literal]


def _spellings(name: PathSegment) -> Iterator[_Key]:
    yield (name.text, None)
    if name.index is not None and name.size is not None:
        yield (name.text, name.index)
        yield (name.text, name.index - name.size)


@lru_cache(maxsize=1024)
def sites(conditions: tuple[Predicate, ...]) -> tuple[SiteAttributes, ...]:
    """Sizes of a GEMM for each combination of conditions that can hold together. Every site has all attributes."""
    if not conditions:
        return (_ANY,)
    pools = _pools(conditions)
    if trials(conditions) > _MOST_TRIALS:
        raise TooHard
    found: dict[tuple[bool | None, ...], SiteAttributes] = {}
    for weight in (True, False):
        for numbers in itertools.product(*pools.values()):
            site = {**_ANY, **dict(zip(pools, numbers, strict=True)), "weight": weight}
            found.setdefault(tuple(c.holds(site) for c in conditions), site)
    if len(found) > _MOST_SITES:
        raise TooHard
    return tuple(found.values())


def trials(conditions: tuple[Predicate, ...]) -> int:
    """How many sizes `sites` tries."""
    return math.prod(map(len, _pools(conditions).values()))


@lru_cache(maxsize=1024)
def _pools(conditions: tuple[Predicate, ...]) -> dict[str, list[int]]:
    """For each size that the conditions speak of, the numbers to try. Sizes that are compared share their numbers."""
    groups: list[tuple[set[str], list[Comparison]]] = []
    for compare in (compare for c in conditions for compare in comparisons(c)):
        names = set[str]().union(*(t.variables for t in compare.terms))
        joined = [g for g in groups if g[0] & names]
        groups = [g for g in groups if not g[0] & names]
        groups.append((names.union(*(g[0] for g in joined)), [compare, *(c for g in joined for c in g[1])]))
    return {name: _numbers_near(compares, len(names)) for names, compares in groups for name in sorted(names)}


def _numbers_near(compares: list[Comparison], names: int) -> list[int]:
    """Numbers on both sides of every edge that the terms draw, and with every remainder that they ask for.

    Sizes that are compared with each other need room for all of them between two edges. Whether one size divides
    another has no edges: small numbers show what can be.
    """
    terms = [t for c in compares for t in c.terms]
    numbers = {t.value for t in terms if isinstance(t.value, int)}
    moduli = {t.modulus for t in terms if isinstance(t.modulus, int)}
    period = math.lcm(*moduli)
    if period > _LONGEST_PERIOD:
        raise TooHard
    found = {e + d for e in {1, *numbers} for d in range(-names, names * period + 1)}
    if any(isinstance(t.modulus, str) for t in terms):
        found.update(range(1, 33))
    return sorted(n for n in found if n > 0)
