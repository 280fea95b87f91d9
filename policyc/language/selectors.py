"""Selectors, the dotted paths of sites, and which paths a selector matches.

A layer index has three spellings, in a path and in a selector: `layers[3]`, `layers.3` and `layers_3` are all index 3
of `layers`. To a glob, an index is one character: `wi_*` and `wi_?` match both `wi_0` and `wi_10`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from policyc.language.bounds import MAX_DIGITS, Bound
from policyc.language.diagnostics import Span, span_field
from policyc.language.recipes import GEMM_GROUPS, Gemm

INDEX_MARK = "\x01"
"""The one character that stands for an index when a glob is matched. No name contains it."""

_INDEX = re.compile(rf"[0-9]{{1,{MAX_DIGITS}}}")
_TRAILING_INDEX = re.compile(rf"(.*[^_])_([0-9]{{1,{MAX_DIGITS}}})", re.DOTALL)
_BRACES = re.compile(r"\{([^{}]*)\}")


# ---- selectors, as written


@dataclass(frozen=True, slots=True, kw_only=True)
class Indices:
    """The layers taken from a stack: `[3]`, `[-4:]`, `[::2]`, `[-15%:]`.

    Either `index` is set (one layer), or any of `start`, `stop` and `step` (a slice).
    """

    index: int | None = None
    start: Bound | None = None
    stop: Bound | None = None
    step: int | None = None
    span: Span = span_field()

    def __str__(self) -> str:
        if self.index is not None:
            return f"[{self.index}]"
        start, stop = self.start or "", self.stop or ""
        return f"[{start}:{stop}]" if self.step is None else f"[{start}:{stop}:{self.step}]"

    def select(self, size: int) -> range:
        """Returns the indices taken from a stack of `size` layers."""
        if self.index is not None:
            index = self.index if self.index >= 0 else size + self.index
            return range(index, index + 1) if 0 <= index < size else range(0)
        start = None if self.start is None else self.start.position(size)
        stop = None if self.stop is None else self.stop.position(size)
        return range(size)[start : stop : self.step]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorSegment:
    """One glob between two dots, with the layers it takes. A lone `*` matches any number of path segments."""

    glob: str
    indices: Indices | None = None
    span: Span = span_field()

    def __str__(self) -> str:
        return f"{self.glob}{self.indices or ''}"

    @property
    def is_wildcard(self) -> bool:
        """Whether it matches any number of path segments."""
        return self.glob == "*" and self.indices is None

    @property
    def is_literal(self) -> bool:
        """Whether its glob matches only one text."""
        return "*" not in self.glob and "?" not in self.glob


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """Selects sites by scope or parameter path, and all or some of their three products."""

    segments: tuple[SelectorSegment, ...]
    anchored: bool = False
    products: frozenset[Gemm] = frozenset(Gemm)
    span: Span = span_field()

    def __str__(self) -> str:
        path = ("^" if self.anchored else "") + ".".join(map(str, self.segments))
        if self.products == frozenset(Gemm):
            return path
        for word in ("bwd", "fprop", "dgrad", "wgrad"):
            if self.products == GEMM_GROUPS[word]:
                return f"{path} @ {word}"
        return f"{path} @ {', '.join(g for g in Gemm if g in self.products)}"


# ---- paths


class PathSegment(NamedTuple):
    """One name of a path. In a stack, `index` counts from 0 and `size` is the number of layers."""

    text: str
    index: int | None = None  # type: ignore[assignment]  # hides a method of tuples
    size: int | None = None

    def __str__(self) -> str:
        return self.text if self.index is None else f"{self.text}[{self.index}]"


DottedPath = tuple[PathSegment, ...]


def is_index(text: str) -> bool:
    """Whether the text is a layer index when it follows a name."""
    return _INDEX.fullmatch(text) is not None


def read_segments(texts: Iterable[str], size: int | None = None) -> DottedPath:
    """Reads the texts between the dots of a path. `layers_3`, and `layers` followed by `3`, are index 3 of `layers`.

    `size` is the number of layers of every stack in the path, if known.
    """
    segments: list[PathSegment] = []
    for text in texts:
        if is_index(text) and segments and segments[-1].index is None:
            segments[-1] = PathSegment(segments[-1].text, int(text), size)
        elif trailing := _TRAILING_INDEX.fullmatch(text):
            segments.append(PathSegment(trailing[1], int(trailing[2]), size))
        else:
            segments.append(PathSegment(text))
    return tuple(segments)


def parse_path(text: str, size: int | None = None) -> DottedPath:
    """Parses a dotted path. `size` is the number of layers of every stack in it, if known."""
    return read_segments(re.findall(r"[^.\[\]]+", text), size)


# ---- matching


def expand_selector(selector: Selector) -> tuple[Selector, ...]:
    """Expands a selector into patterns: selectors without braces, one for each combination of alternatives.

    Indices in names (`layers_3`, `layers.3`) become indices of the segments. `matches` takes only patterns.
    """
    choices = [[(glob, s.indices) for glob in _expand_braces(s)] for s in selector.segments]
    expanded = (_make_pattern(choice, selector) for choice in itertools.product(*choices))
    return tuple(dict.fromkeys(expanded))


def takes_index(selector: Selector) -> bool:
    """Whether a selector takes layers by index, in brackets or in a name (`layers_3`)."""
    return any(s.indices for pattern in expand_selector(selector) for s in pattern.segments)


def count_alternatives(selector: Selector) -> int:
    """Returns the number of combinations of alternatives in the braces of a selector, without expanding them."""
    count = 1
    for segment in selector.segments:
        if "{" in segment.glob:
            for group in _BRACES.findall(segment.glob):
                count *= group.count(",") + 1
    return count


def matches(pattern: Selector, path: DottedPath) -> bool:
    """Whether a pattern from `expand_selector` matches the path, or a scope that contains it.

    Runs the pattern as a nondeterministic automaton: `active` holds the pattern segments that may match next.
    """
    segments, end = pattern.segments, len(pattern.segments)
    active = skip_wildcards(segments, {0})
    for name in path:
        if end in active:
            return True
        following = set() if pattern.anchored else {0}
        for position in active:
            if segments[position].is_wildcard:
                following.add(position)
            elif _segment_matches(segments[position], name):
                following.add(position + 1)
        active = skip_wildcards(segments, following)
    return end in active


def skip_wildcards(segments: tuple[SelectorSegment, ...], active: set[int]) -> set[int]:
    """Adds the positions reached when wildcards match no path segment."""
    reached = set(active)
    for position in active:
        while position < len(segments) and segments[position].is_wildcard:
            position += 1
            reached.add(position)
    return reached


def glob_matches(glob: str, text: str) -> bool:
    """Whether a glob of `*` (any characters) and `?` (one character) matches a text.

    The time is at most proportional to the product of both lengths, because only the last `*` is ever retried.
    """
    if "*" not in glob and "?" not in glob:  # most globs are plain names
        return glob == text
    i, j = 0, 0  # positions in the text and in the glob
    star, retry = -1, 0  # the last `*` in the glob, and where in the text its match ends
    while i < len(text):
        if j < len(glob) and glob[j] == "*":
            star, retry, j = j, i, j + 1
        elif j < len(glob) and glob[j] in ("?", text[i]):
            i, j = i + 1, j + 1
        elif star >= 0:
            retry, j = retry + 1, star + 1
            i = retry
        else:
            return False
    return not glob[j:].strip("*")


def _segment_matches(segment: SelectorSegment, name: PathSegment) -> bool:
    if not glob_segment_matches(segment, name):
        return False
    if segment.indices is None or name.index is None:
        return True
    if name.size is None:
        return name.index == segment.indices.index
    return name.index in segment.indices.select(name.size)


def glob_segment_matches(segment: SelectorSegment, name: PathSegment) -> bool:
    """Whether a segment of a pattern matches a name. If the segment takes indices, the name may have any index."""
    if segment.indices is not None:
        return name.index is not None and glob_matches(segment.glob, name.text)
    is_match = glob_matches(segment.glob, name.text)
    return is_match or (name.index is not None and glob_matches(segment.glob, f"{name.text}_{INDEX_MARK}"))


def _expand_braces(segment: SelectorSegment) -> Iterable[str]:
    """Returns the distinct globs that the braces of a segment expand to."""
    parts = _BRACES.split(segment.glob)
    groups = [p.split(",") if i % 2 else [p] for i, p in enumerate(parts)]
    return dict.fromkeys("".join(choice) for choice in itertools.product(*groups))


def _make_pattern(choice: Iterable[tuple[str, Indices | None]], selector: Selector) -> Selector:
    """Reads indices out of globs (`layers_3`, `layers.3`), and drops wildcards that change nothing."""
    segments: list[SelectorSegment] = []
    anchored = selector.anchored
    for glob, indices in choice:
        before = segments[-1] if segments else None
        trailing = _TRAILING_INDEX.fullmatch(glob) if indices is None else None
        takes_index = before is not None and before.indices is None and not before.is_wildcard
        if before is not None and takes_index and indices is None and is_index(glob):
            segments[-1] = SelectorSegment(glob=before.glob, indices=Indices(index=int(glob)))
        elif trailing:
            segments.append(SelectorSegment(glob=trailing[1], indices=Indices(index=int(trailing[2]))))
        elif not (before and before.is_wildcard and (glob, indices) == ("*", None)):
            segments.append(SelectorSegment(glob=glob, indices=indices))
    while segments and segments[-1].is_wildcard:
        segments.pop()
    if segments and segments[0].is_wildcard:
        segments, anchored = segments[1:], False
    anchored = anchored and bool(segments)
    return Selector(segments=tuple(segments), anchored=anchored, products=selector.products)
