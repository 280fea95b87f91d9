"""Decides whether a selector pattern is contained in the union of other patterns.

Patterns become automata over the characters of a path. A path is written as its segments, each ended by a dot. An index
is written as an underscore and one symbol. The symbol stands for a class of indices that the slices of the patterns
cannot tell apart.

A subset construction can take exponential time, so every search is charged to a `Budget`.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from policyc.language.selectors import (
    DottedPath,
    Indices,
    PathSegment,
    Pattern,
    PatternSegment,
    glob_matches,
    skip_wildcards,
)

Symbol = str | int
"""A character, or the number of an index class."""

StateKind = Literal["before", "glob", "index", "end", "skip"]
"""Before a segment, inside its glob, after the underscore of an index, after the index, in a segment that `*` skips."""

State = tuple[StateKind, int, int]
"""A state of a pattern automaton: its kind, the index of the segment, and the offset in the glob of the segment."""


class SearchTooLarge(Exception):
    """A search would exceed its limits."""


class Budget:
    """The steps that searches may still take. One step takes about as long as matching one pattern with one path."""

    def __init__(self, steps: int) -> None:
        self.remaining: int = steps

    def spend(self, steps: int) -> None:
        self.remaining -= steps
        if self.remaining < 0:
            raise SearchTooLarge


_STEPS_PER_NODE = 10  # one node of the search costs about this many steps


def find_uncovered_path(pattern: Pattern, others: Iterable[Pattern], budget: Budget) -> DottedPath | None:
    """Returns a path that the pattern matches and none of the others does, or None if there is none.

    Searches the product of the pattern's automaton and the subset construction of the others, breadth first.
    """
    automaton, other_automata = _Automaton(pattern), [_Automaton(p) for p in others]
    alphabet = _Alphabet([automaton, *other_automata], budget)
    start = frozenset((n, state) for n, a in enumerate(other_automata) for state in a.close({a.start}))
    queue: deque[_Node] = deque()
    predecessors: dict[_Node, tuple[_Node | None, Symbol]] = {}
    for state in automaton.close({automaton.start}):
        node = (state, start, "start")
        predecessors[node] = (None, "")
        queue.append(node)
    while queue:
        budget.spend(_STEPS_PER_NODE)
        node = queue.popleft()
        state, other_states, shape = node
        for symbol in alphabet.symbols:
            next_shape = _next_shape(shape, symbol)
            next_states = automaton.step(state, symbol, alphabet) if next_shape else ()
            if not next_states:
                continue
            next_others = frozenset(
                (n, target)
                for n, source in other_states
                for target in other_automata[n].step(source, symbol, alphabet)
            )
            for next_state in next_states:
                ends_path = symbol == "." and automaton.accepts(next_state)
                if ends_path and not any(other_automata[n].accepts(s) for n, s in next_others):
                    return alphabet.decode([*_symbols_to(node, predecessors), symbol])
                successor = (next_state, next_others, next_shape)
                if successor not in predecessors:
                    predecessors[successor] = (node, symbol)
                    queue.append(successor)
    return None


def is_obviously_contained(pattern: Pattern, other: Pattern) -> bool:
    """Returns True if a quick test shows that `other` matches every path of `pattern`. False means unknown."""
    last = len(other.segments)
    active = skip_wildcards(other.segments, {0})
    for segment in pattern.segments:
        reached = set() if other.anchored else {0}
        for index in active - {last}:
            if other.segments[index].is_wildcard:
                reached.add(index)
            elif not segment.is_wildcard and _is_segment_contained(segment, other.segments[index]):
                reached.add(index + 1)
        active = skip_wildcards(other.segments, reached) | (active & {last})
    return last in active and (pattern.anchored or not other.anchored)


def _is_segment_contained(segment: PatternSegment, other: PatternSegment) -> bool:
    same_name = segment.glob == other.glob or (segment.is_literal and glob_matches(other.glob, segment.glob))
    return same_name and (other.indices is None or other.indices == segment.indices)


def example_path(pattern: Pattern) -> DottedPath:
    """Returns a simple path that the pattern matches."""
    path = tuple(_example_name(segment) for segment in pattern.segments if not segment.is_wildcard)
    return path or (PathSegment("x"),)


def _example_name(segment: PatternSegment) -> PathSegment:
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


_Node = tuple[State, frozenset[tuple[int, State]], str]
"""A state of the pattern, the states of the others by their number, and the shape of the current segment."""


def _symbols_to(node: _Node, predecessors: dict[_Node, tuple[_Node | None, Symbol]]) -> list[Symbol]:
    """Returns the symbols on the way from the start to a node."""
    symbols: list[Symbol] = []
    before, symbol = predecessors[node]
    while before is not None:
        symbols.append(symbol)
        before, symbol = predecessors[before]
    return symbols[::-1]


def _next_shape(shape: str, symbol: Symbol) -> str:
    """Returns the shape of the current segment after one more symbol, or "" if no path has such a segment."""
    if isinstance(symbol, int):
        return "indexed" if shape == "underscore" else ""
    if symbol == ".":
        return "" if shape == "start" else "start"
    if shape == "indexed":
        return ""
    return "underscore" if symbol == "_" and shape != "start" else "name"


class _Alphabet:
    """The symbols that some automata distinguish."""

    def __init__(self, automata: list[_Automaton], budget: Budget) -> None:
        segments = [p for automaton in automata for p in automaton.segments]
        letters = {c for p in segments for c in p.glob} - {"*", "?"}
        other = next(c for c in map(chr, itertools.count(ord("x"))) if c not in letters and c.isalpha())
        slices = frozenset(p.indices for p in segments if p.indices is not None)
        self.index_classes = index_classes(slices, budget) if slices else ((frozenset[Indices](), (0, 1)),)
        self.symbols: tuple[Symbol, ...] = (
            other, ".", "_", *sorted(letters - {"_"}), *range(len(self.index_classes)),
        )  # fmt: skip

    def decode(self, symbols: list[Symbol]) -> DottedPath:
        """Returns the path that the symbols spell, with an example for each index class."""
        names, text, index = [], "", None
        for symbol in symbols:
            if isinstance(symbol, int):
                index, text = self.index_classes[symbol][1], text[:-1]
            elif symbol == ".":
                names.append(PathSegment(text) if index is None else PathSegment(text, *index))
                text, index = "", None
            else:
                text += symbol
        return tuple(names)


class _Automaton:
    """A pattern as a nondeterministic finite automaton."""

    def __init__(self, pattern: Pattern) -> None:
        anywhere = PatternSegment("*")
        lead = () if pattern.anchored else (anywhere,)
        self.segments = (*lead, *pattern.segments, anywhere)
        self.start: State = ("before", 0, 0)
        self._last = len(self.segments) - 1
        self._steps: dict[tuple[State, Symbol], tuple[State, ...]] = {}

    def accepts(self, state: State) -> bool:
        return state == ("before", self._last, 0)

    def step(self, state: State, symbol: Symbol, alphabet: _Alphabet) -> tuple[State, ...]:
        """Returns the states after reading a symbol."""
        key = (state, symbol)
        if key not in self._steps:
            self._steps[key] = tuple(self.close(self._transitions(state, symbol, alphabet)))
        return self._steps[key]

    def close(self, states: Iterable[State]) -> list[State]:
        """Adds all states that are reached without reading a symbol. The order does not depend on hashes."""
        reached = set(states)
        pending = list(reached)
        while pending:
            kind, index, offset = pending.pop()
            segment = self.segments[index]
            following: State | None = None
            if kind == "before" and segment.is_wildcard and index < self._last:
                following = ("before", index + 1, 0)
            elif kind == "before" and not segment.is_wildcard:
                following = ("glob", index, 0)
            elif kind == "glob" and offset < len(segment.glob) and segment.glob[offset] == "*":
                following = ("glob", index, offset + 1)
            if following is not None and following not in reached:
                reached.add(following)
                pending.append(following)
        return sorted(reached)

    def _transitions(self, state: State, symbol: Symbol, alphabet: _Alphabet) -> Iterator[State]:
        kind, index, offset = state
        segment = self.segments[index]
        if kind == "skip" or (kind == "before" and segment.is_wildcard):
            yield ("before", index, 0) if symbol == "." else ("skip", index, 0)
        elif kind == "end" and symbol == ".":
            yield ("before", index + 1, 0)
        elif kind == "index" and isinstance(symbol, int):
            if segment.indices is None or segment.indices in alphabet.index_classes[symbol][0]:
                yield ("end", index, 0)
        elif kind == "glob":
            yield from self._glob_transitions(segment, index, offset, symbol)

    def _glob_transitions(
        self, segment: PatternSegment, index: int, offset: int, symbol: Symbol
    ) -> Iterator[State]:
        if offset == len(segment.glob):
            if symbol == "." and segment.indices is None:
                yield ("before", index + 1, 0)
            elif symbol == "_":
                yield ("index", index, 0)
        elif symbol == ".":
            return
        elif segment.glob[offset] == "*":
            yield ("glob", index, offset)
        elif segment.glob[offset] in ("?", symbol):
            yield ("glob", index, offset + 1)


IndexClass = tuple[frozenset[Indices], tuple[int, int]]
"""The slices that select an index, and an example: an index and the depth of its stack."""

_SMALL_NUMBER = 40  # bounds up to here are covered by trying every depth up to twice their size
_MAX_STEP_REACH = 40  # indices tried beside each edge of a slice with a step


_EVALUATIONS_PER_STEP = 20  # tests of one index with one slice, in the time of one step
_MAX_EVALUATIONS = 400_000  # for one set of slices


def index_classes(slices: frozenset[Indices], budget: Budget) -> tuple[IndexClass, ...]:
    """Returns every combination of slices that some index of some stack is in, each with an example."""
    try:
        classes, evaluations = find_index_classes(slices)
    except SearchTooLarge:
        budget.spend(_MAX_EVALUATIONS // _EVALUATIONS_PER_STEP)
        raise
    budget.spend(evaluations // _EVALUATIONS_PER_STEP)
    return classes


@lru_cache(maxsize=4096)
def find_index_classes(slices: frozenset[Indices]) -> tuple[tuple[IndexClass, ...], int]:
    """Returns the index classes, and how many indices were tested with how many slices."""
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
    """Returns the depths around which the slices change their order.

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
