"""Finds examples: a path that one pattern matches and others do not, an index that a slice selects.

To decide whether some patterns together match every path of another one, the paths of that pattern are tried. There are
infinitely many, but the patterns can tell only finitely many apart. Wildcards are spelled with a letter that occurs in
no pattern: a pattern that matches this letter does so by a wildcard, so it matches any other letter there too. All
lengths that the patterns can tell apart are tried, and one index of each class that their slices cannot tell apart.

There can be many combinations, so every search is charged to a `Budget`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache

from policyc.language.selectors import DottedPath, Indices, PathSegment, Selector, SelectorSegment, matches


class SearchTooLarge(Exception):
    """A search would exceed its limits."""


class Budget:
    """The steps that searches may still take. One step takes about as long as matching one pattern with one path."""

    def __init__(self, steps: int) -> None:
        self.remaining: int = steps

    def spend(self, steps: int) -> None:
        """Deducts steps. If fewer remain, raises SearchTooLarge and deducts none."""
        if steps > self.remaining:
            raise SearchTooLarge
        self.remaining -= steps


# ---- paths


def find_uncovered_path(pattern: Selector, others: Sequence[Selector], budget: Budget) -> DottedPath | None:
    """Returns a path that the pattern matches and none of the others does, or None if there is none."""
    if any(all(segment.is_wildcard for segment in other.segments) for other in others):
        return None  # `*` needs no search, however many paths the pattern has
    for path in _Speller(pattern, others, budget).paths():
        for other in others:
            budget.spend(1)
            if matches(other, path):
                break
        else:
            return path
    return None


class _Speller:
    """Spells the paths of a pattern that some other patterns can tell apart.

    Paths are as short as possible, because a pattern that matches a path also matches every continuation of it. Names
    have an index only if the pattern asks for one, because a segment that matches a name without an index also matches
    it with one.
    """

    def __init__(self, pattern: Selector, others: Sequence[Selector], budget: Budget) -> None:
        self._pattern, self._budget = pattern, budget
        segments = [segment for p in (pattern, *others) for segment in p.segments]
        letters = {letter for segment in segments for letter in segment.glob}
        self._letter = next(
            c for c in map(chr, itertools.count(ord("x"))) if c not in letters and c.isalpha()
        )
        # Longer runs of this letter, or of names made of it, need a wildcard, which matches any number of them.
        self._run = 1 + max((s.glob.count("?") for p in others for s in p.segments), default=0)
        self._names = 1 + max((len(p.segments) for p in others), default=0)
        # A pattern that is not anchored matches after any names if it matches without them.
        self._names_before = 1 + max((len(p.segments) for p in others if p.anchored), default=-1)
        slices = frozenset(segment.indices for segment in segments if segment.indices is not None)
        self._classes = index_classes(slices, budget) if slices else ()

    def paths(self) -> Iterator[DottedPath]:
        segments = list(self._pattern.segments)
        while segments and segments[-1].is_wildcard:
            segments.pop()
        before = 0 if self._pattern.anchored else self._names_before
        parts = [self._any_names(0 if segments else 1, max(before, 0 if segments else 1))]
        parts += [self._any_names(0, self._names) if s.is_wildcard else self._spell(s) for s in segments]
        for choice in itertools.product(*parts):
            yield tuple(name for names in choice for name in names)

    def _any_names(self, least: int, most: int) -> list[DottedPath]:
        names = [PathSegment(self._letter * length) for length in range(self._run, 0, -1)]
        self._budget.spend(sum(len(names) ** n for n in range(least, most + 1)))
        return [path for n in range(least, most + 1) for path in itertools.product(names, repeat=n)]

    def _spell(self, segment: SelectorSegment) -> list[DottedPath]:
        """Returns names that a segment of the pattern matches, each as a path."""
        choices = [
            [self._letter * length for length in range(self._run, -1, -1)]
            if part == "*"
            else [part.replace("?", self._letter)]
            for part in re.split(r"(\*)", segment.glob)
        ]
        texts = filter(None, ("".join(choice) for choice in itertools.product(*choices)))
        indices: list[tuple[int, int] | tuple[()]] = [()]
        if segment.indices is not None:
            indices = [example for members, example in self._classes if segment.indices in members]
        self._budget.spend(math.prod(map(len, choices)) * len(indices))
        return [(PathSegment(text, *index),) for text in texts for index in indices]


def example_path(pattern: Selector) -> DottedPath:
    """Returns a simple path that the pattern matches."""
    path = tuple(_example_name(segment) for segment in pattern.segments if not segment.is_wildcard)
    return path or (PathSegment("x"),)


def _example_name(segment: SelectorSegment) -> PathSegment:
    text = segment.glob.replace("*", "").replace("?", "x") or "x"
    if segment.indices is None:
        return PathSegment(text)
    return PathSegment(text, *(example_index(segment.indices) or (-1, 1)))  # -1: an index that no stack has


def example_index(indices: Indices) -> tuple[int, int] | None:
    """Returns an index that a slice selects and the depth of the stack, or None if it selects nothing in any stack."""
    numbers = sorted({abs(n) for n in _numbers(indices)})
    depths = itertools.chain(
        (n + 1 for n in numbers), range(1, 102), sorted(_critical_depths(frozenset({indices})))
    )
    return next(((selected[0], depth) for depth in depths if (selected := indices.select(depth))), None)


# ---- indices

IndexClass = tuple[frozenset[Indices], tuple[int, int]]
"""The slices that select the indices of a class, and an example: an index and the depth of its stack."""

_SMALL_NUMBER = 40  # bounds up to here are covered by trying every depth up to twice their size
_MAX_STEP_REACH = 40  # indices tried on each side of an edge of a slice with a step


_EVALUATIONS_PER_STEP = 20  # tests of one index with one slice that take as long as one step
_MAX_EVALUATIONS = 400_000  # for one set of slices


def index_classes(slices: frozenset[Indices], budget: Budget) -> tuple[IndexClass, ...]:
    """Returns each combination of slices that select the same index of some stack, with an example of the index."""
    try:
        classes, evaluations = find_index_classes(slices)
    except SearchTooLarge:
        budget.spend(_MAX_EVALUATIONS // _EVALUATIONS_PER_STEP)
        raise
    budget.spend(evaluations // _EVALUATIONS_PER_STEP)
    return classes


@lru_cache(maxsize=4096)
def find_index_classes(slices: frozenset[Indices]) -> tuple[tuple[IndexClass, ...], int]:
    """Returns the index classes, and the number of tests of an index with a slice."""
    evaluations = 0
    examples: dict[frozenset[Indices], tuple[int, int]] = {}
    ordered = sorted(slices, key=str)
    small_numbers = (abs(n) for s in ordered for n in _numbers(s) if abs(n) <= _SMALL_NUMBER)
    small_depth = 2 * max(small_numbers, default=0) + 50
    period = math.lcm(*(s.step for s in ordered if s.step is not None))
    reach = 1 if period == 1 else min(period, _MAX_STEP_REACH) + 3
    for depth in sorted({*range(1, small_depth), *_critical_depths(slices)}):
        selections = [s.select(depth) for s in ordered]
        candidates: Iterable[int] = range(depth)
        if depth > small_depth:
            ends = {end for selected in selections if selected for end in (selected[0], selected[-1])}
            edges = {0, depth - 1, *ends}
            near = {e + d for e in edges for d in range(-reach, reach + 1)}
            candidates = sorted(i for i in near if 0 <= i < depth)
        candidates = tuple(candidates)
        evaluations += len(candidates) * len(ordered)
        if evaluations > _MAX_EVALUATIONS:
            raise SearchTooLarge
        for index in candidates:
            members = frozenset(
                s for s, selected in zip(ordered, selections, strict=True) if index in selected
            )
            examples.setdefault(members, (index, depth))
    return tuple(examples.items()), evaluations


_MAX_DEPTH = 160  # with percentages, every depth up to here is tried: no model has more layers
_MAX_NUMBERS = 16  # with more numbers, pairs of them are not combined: there would be too many


def _critical_depths(slices: frozenset[Indices]) -> set[int]:
    """Returns the depths around which the order of the slices' bounds changes.

    At these depths two bounds meet, or a percentage selects its first layer.
    """
    numbers = {abs(n) for s in slices for n in _numbers(s)}
    bounds = {b for s in slices for b in (s.start, s.stop) if b is not None and b.percent}
    shares = {b.value if b.value >= 0 else 100 + b.value for b in bounds}
    crossings = {m for n in numbers for m in (n, 2 * n)}
    if len(numbers) <= _MAX_NUMBERS:
        crossings |= {a + b for a, b in itertools.combinations(numbers, 2)}
    gaps = {abs(a - b) for a, b in itertools.combinations({*shares, Fraction(0), Fraction(100)}, 2)}
    if shares and len(gaps) <= _MAX_NUMBERS**2:
        layers = {1, 2, *(n + d for n in numbers for d in (0, 1))}
        crossings |= {math.ceil(n * 100 / gap) for gap in gaps for n in layers}
    depths = {c + d for c in crossings for d in (-1, 0, 1, 2)}
    return {d for d in depths if d > 0} | set(range(1, _MAX_DEPTH) if shares else ())


def _numbers(indices: Indices) -> Iterator[int]:
    """Yields the integers of a slice."""
    if indices.index is not None:
        yield indices.index
    for bound in (indices.start, indices.stop):
        if bound is not None and not bound.percent:
            yield int(bound.value)
    if indices.step is not None:
        yield indices.step
