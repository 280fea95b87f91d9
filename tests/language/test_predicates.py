"""Predicates of `where`, against Python's own logic, and with unknown attributes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policyc import parse
from policyc.language.predicates import AllOf, AnyOf, Comparison, HasWeight, Not, Term, comparisons
from tests.support.strategies import predicates

SITE = {"m": 4096, "n": 1024, "k": 4090, "batch": 1, "flops": 34359738368, "weight": True}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("weight", True),
        ("not weight", False),
        ("k % 16 != 0", True),
        ("1024 <= k < 4096", True),
        ("1024 <= k < 4090", False),
        ("m > n > 1023", True),
        ("m % n == 0", True),
        ("m == n or k % 2 == 0", True),
        ("weight and not (n < 512 or k < 512)", True),
        ("flops >= 1e9 and batch == 1", True),
        ("not weight or k != k", False),
    ],
)
def test_examples(text, expected):
    where = parse(f"* where {text} -> bf16").rules[0].where
    assert where.holds(SITE) is expected


def truth(node, site):
    """The value of a predicate in Python's own logic, for a site whose attributes are all known."""
    match node:
        case HasWeight():
            return site["weight"]
        case Not():
            return not truth(node.operand, site)
        case AllOf():
            return all(truth(o, site) for o in node.operands)
        case AnyOf():
            return any(truth(o, site) for o in node.operands)

    def number(value):
        return site[value] if isinstance(value, str) else value

    values = [
        number(t.value) if t.modulus is None else number(t.value) % number(t.modulus) for t in node.terms
    ]
    chain = "".join(
        f"{value} {operator} " for value, operator in zip(values, (*node.operators, ""), strict=True)
    )
    return eval(chain)  # contains only numbers and comparisons


_sites = st.fixed_dictionaries(
    {name: st.integers(1, 20) for name in ("m", "n", "k", "batch", "flops")} | {"weight": st.booleans()}
)


@given(predicates, _sites)
@settings(max_examples=200)
def test_predicates_agree_with_python(predicate, site):
    assert predicate.holds(site) is truth(predicate, site)


@given(predicates, _sites, st.sets(st.sampled_from(["m", "n", "k", "batch", "flops", "weight"])))
@settings(max_examples=200)
def test_an_answer_does_not_depend_on_unknown_attributes(predicate, site, hidden):
    """If some attributes decide a predicate, no value of the others changes the answer."""
    known = {name: value for name, value in site.items() if name not in hidden}
    answer = predicate.holds(known)
    assert answer is None or answer is truth(predicate, site)
    if not hidden:
        assert answer is not None


def test_a_remainder_of_division_by_zero_is_undecided():
    where = Comparison(terms=(Term(value="k", modulus="n"), Term(value=0)), operators=("==",))
    assert where.holds({"k": 4, "n": 0}) is None


def test_comparisons_are_found_at_every_depth():
    where = parse("* where not (k == 1 or weight and m < n) -> bf16").rules[0].where
    assert [str(c) for c in comparisons(where)] == ["k == 1", "m < n"]
