"""Patterns as automata over the characters of a path: is one inside others?

In: `Pattern`s. Out: a path that is in one and in none of the others, or None. A path is read as its segments,
each closed by a dot; an index is an underscore and one symbol, which stands for all indices that the slices
at hand cannot tell apart. The one trap: subset automata can be exponential, so every search is charged to a
`Budget`.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import lru_cache

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

State = tuple[str, int, int]
"""Where in a pattern: (kind, piece, place in the glob).

B before a piece; G inside its glob; I after the underscore that leads an index; E after the index; S inside a segment
that is skipped.
"""


class TooHard(Exception):
    """The search would take too long."""


class Budget:
    """Steps that searches may still take. A step is about the time it takes to match one pattern and one path."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise TooHard


_STATE = 10  # steps that one state of a search costs


def outside(pattern: Pattern, others: Iterable[Pattern], budget: Budget) -> DottedPath | None:
    """A path that the pattern matches and none of the others does."""
    machines = [_Machine(pattern), *(_Machine(p) for p in others)]
    world = _World(machines)
    first, rest = machines[0], machines[1:]
    start = (frozenset((n, s) for n, m in enumerate(rest) for s in m.close({m.start})), "start")
    queue: deque[_Node] = deque()
    came: dict[_Node, tuple[_Node | None, Symbol]] = {}
    for state in first.close({first.start}):
        node = (state, *start)
        came[node] = (None, "")
        queue.append(node)
    while queue:
        budget.spend(_STATE)
        node = queue.popleft()
        state, subset, shape = node
        for symbol in world.alphabet:
            shaped = _shape(shape, symbol)
            moved = first.step(state, symbol, world) if shaped else ()
            if not moved:
                continue
            reached = frozenset((n, t) for n, s in subset for t in rest[n].step(s, symbol, world))
            for target in moved:
                ends = symbol == "." and first.accepts(target)
                if ends and not any(rest[n].accepts(s) for n, s in reached):
                    return world.path([*_trace(came, node), symbol])
                if (successor := (target, reached, shaped)) not in came:
                    came[successor] = (node, symbol)
                    queue.append(successor)
    return None


def plainly_inside(pattern: Pattern, other: Pattern) -> bool:
    """Can it be seen at a glance that all the pattern matches, the other does? True is certain; False may be wrong."""
    last = len(other.segments)
    active = skip_wildcards(other.segments, {0})
    for piece in pattern.segments:
        moved = set() if other.anchored else {0}
        for at in active - {last}:
            if other.segments[at].is_wildcard:
                moved.add(at)
            elif not piece.is_wildcard and _piece_inside(piece, other.segments[at]):
                moved.add(at + 1)
        active = skip_wildcards(other.segments, moved) | (active & {last})
    return last in active and (pattern.anchored or not other.anchored)


def _piece_inside(piece: PatternSegment, other: PatternSegment) -> bool:
    named = piece.glob == other.glob or (piece.is_literal and glob_matches(other.glob, piece.glob))
    return named and (other.indices is None or other.indices == piece.indices)


def witness(pattern: Pattern) -> DottedPath:
    """A path that the pattern matches, as plain as can be."""
    names = [_plain(piece) for piece in pattern.segments if not piece.is_wildcard]
    return tuple(names) or (PathSegment("x"),)


def _plain(piece: PatternSegment) -> PathSegment:
    text = piece.glob.replace("*", "").replace("?", "x") or "x"
    return PathSegment(text) if piece.indices is None else PathSegment(text, *example(piece.indices))


def example(indices: Indices) -> tuple[int, int]:
    """An index that a slice takes, and the depth of a stack of which it does; index -1 if there is none."""
    numbers = sorted({abs(n) for n in _numbers(indices)})
    depths = itertools.chain((n + 1 for n in numbers), range(1, 102), sorted(_depths(frozenset({indices}))))
    return next(((taken[0], depth) for depth in depths if (taken := indices.select(depth))), (-1, 1))


_Node = tuple[State, frozenset[tuple[int, State]], str]
"""A state of the pattern, those of the others, and the shape of the segment so far."""


def _trace(came: dict[_Node, tuple[_Node | None, Symbol]], node: _Node) -> list[Symbol]:
    """The symbols that led to a node."""
    symbols: list[Symbol] = []
    before, symbol = came[node]
    while before is not None:
        symbols.append(symbol)
        before, symbol = came[before]
    return symbols[::-1]


def _shape(shape: str, symbol: Symbol) -> str:
    """What a segment looks like after one more symbol; empty where no path looks like that."""
    if isinstance(symbol, int):
        return "indexed" if shape == "underscore" else ""
    if symbol == ".":
        return "" if shape == "start" else "start"
    if shape == "indexed":
        return ""
    return "underscore" if symbol == "_" and shape != "start" else "name"


class _World:
    """The symbols that matter to some machines, and what an index symbol stands for."""

    def __init__(self, machines: list[_Machine]) -> None:
        pieces = [p for m in machines for p in m.pieces]
        letters = {c for p in pieces for c in p.glob} - {"*", "?"}
        other = next(c for c in map(chr, itertools.count(ord("x"))) if c not in letters and c.isalpha())
        slices = frozenset(p.indices for p in pieces if p.indices is not None)
        self.classes = classes(slices) if slices else ((frozenset[Indices](), (0, 1)),)
        self.alphabet: tuple[Symbol, ...] = (
            other, ".", "_", *sorted(letters - {"_"}), *range(len(self.classes)),
        )  # fmt: skip

    def path(self, symbols: list[Symbol]) -> DottedPath:
        names, text, index = [], "", None
        for symbol in symbols:
            if isinstance(symbol, int):
                index, text = self.classes[symbol][1], text[:-1]
            elif symbol == ".":
                names.append(PathSegment(text) if index is None else PathSegment(text, *index))
                text, index = "", None
            else:
                text += symbol
        return tuple(names)


class _Machine:
    """A pattern as a nondeterministic automaton."""

    def __init__(self, pattern: Pattern) -> None:
        anywhere = PatternSegment("*")
        lead = () if pattern.anchored else (anywhere,)
        self.pieces = (*lead, *pattern.segments, anywhere)
        self.start: State = ("B", 0, 0)
        self._last = len(self.pieces) - 1
        self._known: dict[tuple[State, Symbol], tuple[State, ...]] = {}

    def accepts(self, state: State) -> bool:
        return state == ("B", self._last, 0)

    def step(self, state: State, symbol: Symbol, world: _World) -> tuple[State, ...]:
        key = (state, symbol)
        if key not in self._known:
            self._known[key] = tuple(self.close(self._moves(state, symbol, world)))
        return self._known[key]

    def close(self, states: Iterable[State]) -> set[State]:
        """With all states that are reached without reading."""
        reached = set(states)
        waiting = list(reached)
        while waiting:
            kind, at, place = waiting.pop()
            piece = self.pieces[at]
            free: State | None = None
            if kind == "B" and piece.is_wildcard and at < self._last:
                free = ("B", at + 1, 0)
            elif kind == "B" and not piece.is_wildcard:
                free = ("G", at, 0)
            elif kind == "G" and place < len(piece.glob) and piece.glob[place] == "*":
                free = ("G", at, place + 1)
            if free is not None and free not in reached:
                reached.add(free)
                waiting.append(free)
        return reached

    def _moves(self, state: State, symbol: Symbol, world: _World) -> Iterator[State]:
        kind, at, place = state
        piece = self.pieces[at]
        if kind == "S" or (kind == "B" and piece.is_wildcard):
            yield ("B", at, 0) if symbol == "." else ("S", at, 0)
        elif kind == "E" and symbol == ".":
            yield ("B", at + 1, 0)
        elif kind == "I" and isinstance(symbol, int):
            if piece.indices is None or piece.indices in world.classes[symbol][0]:
                yield ("E", at, 0)
        elif kind == "G":
            yield from self._glob_moves(piece, at, place, symbol)

    def _glob_moves(self, piece: PatternSegment, at: int, place: int, symbol: Symbol) -> Iterator[State]:
        if place == len(piece.glob):
            if symbol == "." and piece.indices is None:
                yield ("B", at + 1, 0)
            elif symbol == "_":
                yield ("I", at, 0)
        elif symbol == ".":
            return
        elif piece.glob[place] == "*":
            yield ("G", at, place)
        elif piece.glob[place] in ("?", symbol):
            yield ("G", at, place + 1)


Class = tuple[frozenset[Indices], tuple[int, int]]
"""The slices that take an index, and an index and a depth of which that is so."""


@lru_cache(maxsize=4096)
def classes(slices: frozenset[Indices]) -> tuple[Class, ...]:
    """Every combination of slices that some index of some stack is in, with an example of each."""
    found: dict[frozenset[Indices], tuple[int, int]] = {}
    ordered = sorted(slices, key=str)
    small = 2 * max((abs(n) for s in ordered for n in _numbers(s) if abs(n) <= 40), default=0) + 50
    steps = math.lcm(*(s.step for s in ordered if s.step is not None))
    reach = 1 if steps == 1 else min(steps, 40) + 3
    for depth in sorted({*range(1, small), *_depths(slices)}):
        taken = [s.select(depth) for s in ordered]
        places: Iterable[int] = range(depth)
        if depth > small:
            edges = {e for t in taken if t for e in (t[0], t[-1])} | {0, depth - 1}
            near = {e + d for e in edges for d in range(-reach, reach + 1)}
            places = sorted(p for p in near if 0 <= p < depth)
        for place in places:
            inside = frozenset(s for s, t in zip(ordered, taken, strict=True) if place in t)
            found.setdefault(inside, (place, depth))
    return tuple((inside, place) for inside, place in found.items())


_DEEPEST = 160  # with percentages, every depth up to here is tried: no model has more layers
_MOST_NUMBERS = 16


def _depths(slices: frozenset[Indices]) -> set[int]:
    """Depths around which the slices change places: where two bounds meet, or a share first holds a layer."""
    numbers = {abs(n) for s in slices for n in _numbers(s)}
    bounds = {b for s in slices for b in (s.start, s.stop) if b is not None and b.percent}
    shares = {b.value if b.value >= 0 else 100 + b.value for b in bounds}
    meet = {m for n in numbers for m in (n, 2 * n)}
    if len(numbers) <= _MOST_NUMBERS:
        meet |= {a + b for a, b in itertools.combinations(numbers, 2)}
    gaps = {abs(a - b) for a, b in itertools.combinations({*shares, Fraction(0), Fraction(100)}, 2)}
    if shares and len(gaps) <= _MOST_NUMBERS**2:
        meet |= {
            math.ceil(n * 100 / g) for g in gaps for n in {1, 2, *(n + d for n in numbers for d in (0, 1))}
        }
    found = {m + d for m in meet for d in (-1, 0, 1, 2)}
    return {d for d in found if d > 0} | set(range(1, _DEEPEST) if shares else ())


def _numbers(indices: Indices) -> Iterator[int]:
    if indices.index is not None:
        yield indices.index
    for bound in (indices.start, indices.stop):
        if bound is not None and not bound.percent:
            yield int(bound.value)
    if indices.step is not None:
        yield indices.step
