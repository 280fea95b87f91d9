"""Selectors against an oracle that expands braces one at a time, uses regular expressions for globs, and searches paths
by brute force.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policyc import parse
from policyc.language.bounds import Bound
from policyc.language.selectors import (
    Indices,
    PathSegment,
    Selector,
    SelectorSegment,
    count_alternatives,
    expand_selector,
    glob_matches,
    is_index,
    matches,
    parse_path,
    read_segments,
)

pytestmark = pytest.mark.any_jax

# ---- the oracle


def expand(globs: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Every choice that the braces leave. Expands the first pair of braces and recurses for the rest."""
    for i, glob in enumerate(globs):
        braces = re.search(r"\{([^{}]*)\}", glob)
        if braces:
            choices = [glob[: braces.start()] + word + glob[braces.end() :] for word in braces[1].split(",")]
            return [e for choice in choices for e in expand((*globs[:i], choice, *globs[i + 1 :]))]
    return [globs]


def regex_matches(glob: str, text: str) -> bool:
    pattern = "".join({"*": ".*", "?": "."}.get(c) or re.escape(c) for c in glob)
    return re.fullmatch(pattern, text, re.DOTALL) is not None


def bound_position(bound: Bound | None, size: int) -> int | None:
    if bound is None or not bound.percent:
        return None if bound is None else int(bound.value)
    percent = bound.value if bound.value >= 0 else bound.value + 100
    return math.floor(size * percent / 100)


def select(indices: Indices, size: int) -> list[int]:
    layers = list(range(size))
    if indices.index is not None:
        return [layers[indices.index]] if -size <= indices.index < size else []
    return layers[bound_position(indices.start, size) : bound_position(indices.stop, size) : indices.step]


def segment_matches(glob: str, indices: Indices | None, name: PathSegment) -> bool:
    if indices is None:
        return regex_matches(glob, name.text) or (
            name.index is not None and regex_matches(glob, f"{name.text}_\x01")
        )
    if name.index is None or not regex_matches(glob, name.text):
        return False
    return name.index in select(indices, name.size) if name.size is not None else name.index == indices.index


def prefix_matches(pieces: list[tuple[str, Indices | None]], names: tuple[PathSegment, ...]) -> bool:
    if not pieces:
        return True
    (glob, indices), *rest = pieces
    if glob == "*" and indices is None:
        return any(prefix_matches(rest, names[i:]) for i in range(len(names) + 1))
    return bool(names) and segment_matches(glob, indices, names[0]) and prefix_matches(rest, names[1:])


def oracle(selector: Selector, names: tuple[PathSegment, ...]) -> bool:
    starts = [names] if selector.anchored else [names[i:] for i in range(len(names) + 1)]
    indices = [s.indices for s in selector.segments]
    return any(
        prefix_matches(list(zip(globs, indices, strict=True)), start)
        for globs in expand(tuple(s.glob for s in selector.segments))
        for start in starts
    )


# ---- strategies: few letters, so that matches are frequent; no digits, whose spellings have their own tests

_text = st.text("ab_", min_size=1, max_size=3)
_size = st.integers(1, 6)
_names = st.one_of(
    st.builds(PathSegment, _text, st.none(), st.none()),
    st.builds(PathSegment, _text, st.integers(0, 5), st.none()),
    _size.flatmap(lambda size: st.builds(PathSegment, _text, st.integers(0, size - 1), st.just(size))),
)
_paths = st.lists(_names, min_size=1, max_size=4).map(tuple)
_word = st.text("ab_?*", max_size=3)
_globs = st.one_of(
    st.just("*"),
    _word.filter(bool),
    st.tuples(_word, st.lists(_word, min_size=1, max_size=3), _word).map(
        lambda t: f"{t[0]}{{{','.join(t[1])}}}{t[2]}"
    ),
)
_bounds = st.one_of(
    st.integers(-7, 7).map(lambda n: Bound(Fraction(n))),
    st.sampled_from(["-100", "-50", "-33.3", "-15", "0", "10", "15", "50", "66.6", "85", "100"]).map(
        lambda p: Bound(Fraction(p), True)
    ),
)
_indices = st.one_of(
    st.integers(-7, 7).map(lambda n: Indices(index=n)),
    st.builds(
        Indices, start=st.none() | _bounds, stop=st.none() | _bounds, step=st.none() | st.integers(1, 3)
    ),
)
_selectors = st.builds(
    Selector,
    segments=st.lists(
        st.builds(SelectorSegment, glob=_globs, indices=st.one_of(st.none(), st.none(), _indices)),
        min_size=1,
        max_size=4,
    ).map(tuple),
    anchored=st.booleans(),
)


def selected(selector: Selector, names: tuple[PathSegment, ...]) -> bool:
    return any(matches(pattern, names) for pattern in expand_selector(selector))


@given(_selectors, _paths)
@settings(max_examples=150)
def test_matching_agrees_with_the_oracle(selector, names):
    assert selected(selector, names) == oracle(selector, names)


@given(_selectors)
def test_the_count_of_alternatives_is_a_bound_on_the_patterns(selector):
    assert (
        len(expand_selector(selector))
        <= len(expand(tuple(s.glob for s in selector.segments)))
        == count_alternatives(selector)
    )


def test_a_glob_with_many_stars_takes_little_time():
    assert not glob_matches("a*" * 200 + "b", "a" * 5000)


# ---- examples


def one(text: str) -> Selector:
    return parse(f"{text} -> bf16").rules[0].selectors[0]


SPELLINGS = ("layers[3]", "layers.3", "layers_3")


@pytest.mark.parametrize("written", SPELLINGS)
@pytest.mark.parametrize("named", SPELLINGS)
def test_an_index_has_three_spellings(written, named):
    other = named.replace("3", "4")
    for size in (None, 12):
        assert selected(one(f"{written}.mlp"), parse_path(f"decoder.{named}.mlp.up", size))
        assert not selected(one(f"{written}.mlp"), parse_path(f"decoder.{other}.mlp.up", size))


def test_braces_may_contain_indices():
    selector = one("layers_{3,5}.mlp")
    assert [i for i in range(8) if selected(selector, parse_path(f"layers.{i}.mlp", 8))] == [3, 5]


@pytest.mark.parametrize(("digits", "expected"), [(1, True), (18, True), (19, False)])
def test_an_index_has_at_most_18_digits(digits, expected):
    """In a path and in a selector, in all three spellings."""
    number = "7" * digits
    assert is_index(number) is expected
    for spelling in (f"layers_{number}", f"layers.{number}", f"layers[{number}]"):
        assert (parse_path(spelling)[0].index is not None) is expected
    for spelling in (f"layers_{number}", f"layers.{number}"):
        (pattern,) = expand_selector(one(spelling))
        assert (pattern.segments[0].indices is not None) is expected


def test_a_path_is_read_from_its_segments():
    assert read_segments(["layers", "3", "wi_0"], 4) == (PathSegment("layers", 3, 4), PathSegment("wi", 0, 4))
    assert read_segments(["a", "3", "4"]) == (PathSegment("a", 3), PathSegment("4"))
    assert parse_path("a[3][4]") == read_segments(["a", "3", "4"])
    assert read_segments([]) == parse_path("") == ()


def test_not_every_number_is_an_index():
    assert parse_path("layers__3") == (PathSegment("layers__3"),)
    assert parse_path("3.x") == (PathSegment("3"), PathSegment("x"))
    assert parse_path("a3") == (PathSegment("a3"),)
    assert parse_path("a[3]")[0] == PathSegment("a", 3)


@pytest.mark.parametrize(
    ("written", "size", "expected"),
    [
        ("[-1]", 4, [3]),
        ("[4]", 4, []),
        ("[-5]", 4, []),
        ("[-4:]", 6, [2, 3, 4, 5]),
        ("[-4:]", 3, [0, 1, 2]),
        ("[::2]", 5, [0, 2, 4]),
        ("[3:1]", 5, []),
        # docs/reference/language.md, the table of percentages
        ("[-15%:]", 32, [27, 28, 29, 30, 31]),
        ("[:15%]", 32, [0, 1, 2, 3]),
        ("[-15%:]", 62, list(range(52, 62))),
        ("[:15%]", 62, list(range(9))),
        ("[-15%:]", 6, [5]),
        ("[:15%]", 6, []),
        ("[12.5%:87.5%]", 8, [1, 2, 3, 4, 5, 6]),
        ("[-100%:]", 7, list(range(7))),
    ],
)
def test_examples_of_slices(written, size, expected):
    indices = one(f"layers{written}").segments[0].indices
    assert list(indices.select(size)) == expected


@given(st.integers(1, 500), st.integers(1, 9999))
def test_a_percentage_with_decimals_and_its_complement_take_every_layer_once(depth, hundredths):
    head = Indices(stop=Bound(Fraction(hundredths, 100), True))
    tail = Indices(start=Bound(Fraction(hundredths - 10_000, 100), True))
    assert [*head.select(depth), *tail.select(depth)] == list(range(depth))
