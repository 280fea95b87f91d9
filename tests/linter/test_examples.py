"""Index classes and example indices of slices, compared with trying every index of every stack."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest

from policyc import parse
from policyc.language.selectors import Indices
from policyc.linter.examples import Budget, example_index, index_classes

pytestmark = pytest.mark.any_jax

SLICES = (
    "[0]", "[7]", "[-1]", "[-8]", "[:4]", "[4:]", "[-4:]", "[:-4]", "[4:8]", "[-8:-4]", "[::2]", "[1::3]", "[2:20:5]",
    "[-15%:]", "[:85%]", "[15%:]", "[:15%]", "[12.5%:87.5%]", "[-1.5%:]", "[1%:2%]", "[99%:-1]", "[:3%]", "[50%:]",
    "[60:]", "[-60:]", "[80:100]",
)  # fmt: skip


@cache
def parse_indices(text: str) -> Indices:
    indices = parse(f"s{text} -> bf16").rules[0].selectors[0].segments[0].indices
    assert indices is not None
    return indices


@cache
def selects(text: str) -> tuple[bool, ...]:
    """Whether a slice selects a layer, for every layer of every stack of up to 150 layers.

    The deepest published model has 126 layers.
    """
    indices = parse_indices(text)
    selections = ((depth, indices.select(depth)) for depth in range(1, 151))
    return tuple(index in selected for depth, selected in selections for index in range(depth))


@pytest.mark.parametrize("seed", range(40))
def test_every_combination_of_slices_in_a_real_stack_has_a_class(seed: int) -> None:
    texts = random.Random(seed).sample(SLICES, 4)
    slices = [parse_indices(text) for text in texts]
    classes = {members for members, _ in index_classes(frozenset(slices), Budget(10**9))}
    for flags in set(zip(*map(selects, texts), strict=True)):
        assert frozenset(itertools.compress(slices, flags)) in classes, f"{flags} of {texts}"


@pytest.mark.parametrize("seed", range(10))
def test_the_example_of_a_class_is_in_its_slices_and_in_no_other(seed: int) -> None:
    slices = frozenset(parse_indices(text) for text in random.Random(seed).sample(SLICES, 4))
    for members, (index, depth) in index_classes(slices, Budget(10**9)):
        assert members == {s for s in slices if index in s.select(depth)}


@pytest.mark.parametrize(
    ("text", "empty"),
    [
        ("[4:8]", False), ("[8:4]", True), ("[4:4]", True), ("[-4:-8]", True), ("[:0]", True), ("[-1:0]", True),
        ("[0.5%:0.6%]", False), ("[10:1%]", False), ("[50%:50%]", True), ("[60%:50%]", True), ("[100%:]", True),
        ("[-10:1%]", True), ("[99.5%:-1]", False), ("[999999:]", False), ("[-100%:]", False), ("[:-100%]", True),
        ("[5:-5]", False), ("[-5:5]", False), ("[100:101:7]", False),
    ],
)  # fmt: skip
def test_a_slice_has_an_example_index_unless_it_is_empty(text: str, empty: bool) -> None:
    example = example_index(parse_indices(text))
    assert (example is None) is empty
    if example is not None:
        index, depth = example
        assert index in parse_indices(text).select(depth)
