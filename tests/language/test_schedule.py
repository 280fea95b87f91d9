"""Conditions on the training step: `after` and `until`, nested blocks, and representative steps."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policyc import parse
from policyc.language.bounds import Bound
from policyc.language.schedule import StepCondition, representative_steps

pytestmark = pytest.mark.any_jax


def condition(kind: str, value: int, percent: bool = False) -> StepCondition:
    return StepCondition(kind=kind, bound=Bound(Fraction(value), percent))


@pytest.mark.parametrize(
    ("text", "total", "first"),
    [
        ("1_000", 10_000, 1000),
        ("82%", 10_000, 8200),
        ("0", 10, 0),
        ("0%", 10, 0),
        ("100%", 10, 10),
        ("15%", 7, 2),
    ],
)
def test_every_step_is_either_after_or_until(text, total, first):
    rules = parse(f"after {text} {{ a -> bf16 }}\nuntil {text} {{ b -> bf16 }}").rules
    (after,), (until,) = (r.when for r in rules)
    for step in range(total):
        assert after.holds(step, total) is (step >= first)
        assert until.holds(step, total) is (step < first)


def test_conditions_of_nested_blocks_start_with_the_outermost():
    policy = parse("after 10% { a -> bf16; until 20% { b -> bf16 }; c -> bf16 }\nd -> bf16")
    after, until = condition("after", 10, percent=True), condition("until", 20, percent=True)
    assert [r.when for r in policy.rules] == [(after,), (after, until), (after,), ()]
    assert policy.step_conditions == (after, until)


_conditions = st.builds(condition, st.sampled_from(["after", "until"]), st.integers(0, 100), st.booleans())


@given(_conditions, st.integers(1, 300), st.data())
def test_the_opposite_holds_exactly_where_the_condition_does_not(one, total, data):
    step = data.draw(st.integers(0, total - 1))
    assert one.opposite.holds(step, total) is not one.holds(step, total)
    assert one.opposite.opposite == one


def test_without_conditions_there_is_one_representative_step():
    assert len(representative_steps(())) == 1


@pytest.mark.parametrize(
    ("conditions", "combinations"),
    [
        ([condition("after", 100)], {(False,), (True,)}),
        ([condition("after", 0)], {(True,)}),
        ([condition("after", 100, True)], {(False,)}),
        ([condition("after", 50, True), condition("until", 50, True)], {(False, True), (True, False)}),
        ([condition("after", 10), condition("after", 20)], {(False, False), (True, False), (True, True)}),
        (
            [
                condition("after", 100),
                condition("after", 50, True),
            ],  # which comes first depends on the length
            {(False, False), (False, True), (True, False), (True, True)},
        ),
    ],
)
def test_every_possible_combination_of_conditions_has_a_representative_step(conditions, combinations):
    steps = representative_steps(tuple(conditions))
    assert {tuple(c.holds(*step) for c in conditions) for step in steps} == combinations
    assert len(steps) == len(combinations)


@given(st.lists(_conditions, max_size=3), st.integers(1, 300), st.data())
def test_no_combination_of_conditions_is_missed(conditions, total, data):
    step = data.draw(st.integers(0, total - 1))
    represented = {tuple(c.holds(*s) for c in conditions) for s in representative_steps(tuple(conditions))}
    assert tuple(c.holds(step, total) for c in conditions) in represented
