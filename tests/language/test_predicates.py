"""Predicates of `where`, against Python's own logic, and with unknown attributes."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policyc import parse
from policyc.language import kinds
from policyc.language.bounds import Bound
from policyc.language.kinds import KINDS, flags_of, possible_flags
from policyc.language.predicates import AllOf, AnyOf, Comparison, Flag, Not, Term, leaves
from tests.support.strategies import FLAGS, predicates

pytestmark = pytest.mark.any_jax


def truth(node, site):
    """The value of a predicate in Python's own logic, for a site whose attributes are all known."""
    match node:
        case Flag():
            return site[node.name]
        case Not():
            return not truth(node.operand, site)
        case AllOf():
            return all(truth(o, site) for o in node.operands)
        case AnyOf():
            return any(truth(o, site) for o in node.operands)

    if site["layer"] is None and "layer" in str(node):
        return False

    def number(value):
        if isinstance(
            value, Bound
        ):  # the index at which Python's own slice starts or ends, if it is in the stack
            share = (value.value + 100 if value.value < 0 else value.value) / 100
            end = math.floor(share * site["layers"]) if value.percent else int(value.value)
            return end if end >= 0 else site["layers"] + end
        return site[value] if isinstance(value, str) else value

    values = [
        number(t.value) if t.modulus is None else number(t.value) % number(t.modulus) for t in node.terms
    ]
    chain = "".join(
        f"{value} {operator} " for value, operator in zip(values, (*node.operators, ""), strict=True)
    )
    return eval(chain)  # contains only numbers and comparisons


@st.composite
def _draw_sites(draw):
    sizes = {name: draw(st.integers(1, 20)) for name in ("m", "n", "k", "batch", "flops")}
    layers = draw(st.none() | st.integers(1, 12))
    layer = None if layers is None else draw(st.integers(0, layers - 1))
    return sizes | {name: draw(st.booleans()) for name in FLAGS} | {"layer": layer, "layers": layers}


_sites = _draw_sites()


@given(
    predicates, _sites, st.sets(st.sampled_from(["m", "n", "k", "batch", "flops", "layer", "layers", *FLAGS]))
)
@settings(max_examples=120)
def test_predicates_agree_with_python_also_if_some_attributes_are_unknown(predicate, site, hidden):
    """If some attributes decide a predicate, no value of the others changes the answer."""
    assert predicate.holds(site) is truth(predicate, site)
    known = {name: value for name, value in site.items() if name not in hidden}
    assert predicate.holds(known) in (None, truth(predicate, site))


def test_a_remainder_of_division_by_zero_is_undecided():
    where = Comparison(terms=(Term(value="k", modulus="n"), Term(value=0)), operators=("==",))
    assert where.holds({"k": 4, "n": 0}) is None


def test_comparisons_and_flags_are_found_at_every_depth():
    where = parse("* where not (k == 1 or weight and m < n) -> bf16").rules[0].where
    assert [str(leaf) for leaf in leaves(where)] == ["k == 1", "weight", "m < n"]


# ---- layers


def holds(text, **site):
    return parse(f"* where {text} -> bf16").rules[0].where.holds(site)


def test_a_site_outside_blocks_has_no_layer():
    """Every comparison with `layer` is false there. A layer that is not known decides nothing."""
    for condition in ("layer >= -4", "layer < -4", "layer != 3", "layer == layer", "layer % 2 == 0"):
        assert holds(condition, layer=None, layers=None) is False
        assert holds(f"not {condition}", layer=None, layers=None) is True
        assert holds(condition) is None
    assert holds("layer >= -4", layer=3) is None  # of an unknown number
    assert holds("layer >= 2", layer=3) is True


# ---- kinds


def test_the_kinds_are_those_of_the_documentation():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "language.md").read_text(encoding="utf-8")
    rows = dict(
        re.findall(
            r"^\| `(\w+)` \| (.*?) \|$", page.partition("### Kinds")[2].partition("\n## ")[0], re.MULTILINE
        )
    )
    assert rows == {kind.word: kind.meaning for kind in KINDS.values()}
    assert set(rows) | {"weight"} == set(FLAGS) == set(kinds.FLAGS)


def test_which_kinds_are_possible_together():
    possible = possible_flags(frozenset(FLAGS) - {"block"})
    true_words = {frozenset(word for word in FLAGS if flags[word] and word != "block") for flags in possible}
    assert true_words == set(map(frozenset, [
        (), ("weight",), ("mlp", "weight"), ("mlp", "experts", "weight"), ("attention", "weight"), ("scores",),
        ("router", "weight"), ("embedding",), ("embedding", "weight"), ("head",), ("head", "weight"),
    ]))  # fmt: skip


def test_a_kind_brings_what_it_implies():
    true_words = {word for word, is_true in flags_of("experts", "block").items() if is_true}
    assert true_words == {"experts", "mlp", "weight", "block"}
