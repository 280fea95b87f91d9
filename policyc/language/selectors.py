"""Selectors as patterns over paths, and which paths they match.

In: a `Selector`. Out: `Pattern`s without braces, and whether one matches a `Path`. The one trap: an index has
three spellings, and all are one: `layers[3]`, `layers.3` and `layers_3` are the name `layers` with index 3,
in a path as in a selector. A glob sees an index as one character: `wi_*` and `wi_?` match `wi_0` and `wi_10`
alike.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from policyc.language.policy import Indices, Segment, Selector

INDEX_MARK = "\x01"
_TRAILING_INDEX = re.compile(r"(.*[^_])_(\d{1,18})", re.DOTALL)
_INDEX = re.compile(r"\d{1,18}")
_BRACES = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class Name:
    """One segment of a path. In a stack, `index` counts from 0 and `size` is the number of layers."""

    text: str
    index: int | None = None
    size: int | None = None

    def __str__(self) -> str:
        return self.text if self.index is None else f"{self.text}[{self.index}]"


Path = tuple[Name, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A glob of `*`, `?` and characters, with the layers it takes."""

    glob: str
    indices: Indices | None = None

    @property
    def any(self) -> bool:
        """Does it stand for any number of segments?"""
        return self.glob == "*" and self.indices is None

    @property
    def literal(self) -> bool:
        return "*" not in self.glob and "?" not in self.glob


@dataclass(frozen=True, slots=True)
class Pattern:
    """A selector without braces. Takes what is at or under what its pieces match."""

    pieces: tuple[Piece, ...]
    anchored: bool = False


def path(text: str, size: int | None = None) -> Path:
    """A path from its text. `size` is the number of layers of the stacks in it."""
    names: list[Name] = []
    for part in re.findall(r"[^.\[\]]+|\[\d+\]", text):
        index = part.strip("[]") if part.startswith("[") else part
        if _INDEX.fullmatch(index) and names and names[-1].index is None:
            names[-1] = Name(names[-1].text, int(index), size)
        elif found := _TRAILING_INDEX.fullmatch(part):
            names.append(Name(found[1], int(found[2]), size))
        else:
            names.append(Name(part))
    return tuple(names)


def patterns(selector: Selector) -> tuple[Pattern, ...]:
    """What a selector means, one pattern for each choice that its braces leave."""
    choices = [[(glob, s.indices) for glob in _alternatives(s)] for s in selector.segments]
    found = (_pattern(combined, selector.anchored) for combined in itertools.product(*choices))
    return tuple(dict.fromkeys(found))


def alternatives(selector: Selector) -> int:
    """How many patterns a selector may stand for."""
    count = 1
    for segment in selector.segments:
        for group in _BRACES.findall(segment.glob):
            count *= group.count(",") + 1
    return count


def matches(pattern: Pattern, names: Path) -> bool:
    """Is the path at or under what the pattern names?"""
    pieces, last = pattern.pieces, len(pattern.pieces)
    active = skip(pieces, {0})
    for name in names:
        if last in active:
            return True
        moved = set() if pattern.anchored else {0}
        for at in active:
            if pieces[at].any:
                moved.add(at)
            elif _takes(pieces[at], name):
                moved.add(at + 1)
        active = skip(pieces, moved)
    return last in active


def skip(pieces: tuple[Piece, ...], active: set[int]) -> set[int]:
    """A piece that stands for any number of segments may stand for none."""
    reached = set(active)
    for at in active:
        while at < len(pieces) and pieces[at].any:
            at += 1
            reached.add(at)
    return reached


def glob_matches(glob: str, text: str) -> bool:
    """`*` is any characters, `?` is one. Never worse than the product of both lengths, whatever the glob."""
    at, mark, star, retry = 0, 0, -1, 0
    while at < len(text):
        if mark < len(glob) and glob[mark] == "*":
            star, retry, mark = mark, at, mark + 1
        elif mark < len(glob) and glob[mark] in ("?", text[at]):
            at, mark = at + 1, mark + 1
        elif star >= 0:
            retry, mark = retry + 1, star + 1
            at = retry
        else:
            return False
    return not glob[mark:].strip("*")


def _takes(piece: Piece, name: Name) -> bool:
    if piece.indices is None:
        if glob_matches(piece.glob, name.text):
            return True
        return name.index is not None and glob_matches(piece.glob, f"{name.text}_{INDEX_MARK}")
    if name.index is None or not glob_matches(piece.glob, name.text):
        return False
    if name.size is None:
        return name.index == piece.indices.at
    return name.index in piece.indices.select(name.size)


def _alternatives(segment: Segment) -> Iterable[str]:
    """A glob for each choice that the braces of a segment leave."""
    parts = _BRACES.split(segment.glob)
    groups = [p.split(",") if i % 2 else [p] for i, p in enumerate(parts)]
    return dict.fromkeys("".join(choice) for choice in itertools.product(*groups))


def _is_index(glob: str, indices: Indices | None) -> bool:
    return indices is None and _INDEX.fullmatch(glob) is not None


def _pattern(combined: Iterable[tuple[str, Indices | None]], anchored: bool) -> Pattern:
    pieces: list[Piece] = []
    for glob, indices in combined:
        before = pieces[-1] if pieces else None
        indexed = _TRAILING_INDEX.fullmatch(glob) if indices is None else None
        if before and _is_index(glob, indices) and before.indices is None and not before.any:
            pieces[-1] = Piece(before.glob, Indices(at=int(glob)))
        elif indexed:
            pieces.append(Piece(indexed[1], Indices(at=int(indexed[2]))))
        elif not (before and before.any and (glob, indices) == ("*", None)):
            pieces.append(Piece(glob, indices))
    while pieces and pieces[-1].any:
        pieces.pop()
    if pieces and pieces[0].any:
        pieces, anchored = pieces[1:], False
    return Pattern(tuple(pieces), anchored and bool(pieces))
