"""Wider rules compared with the oracle, which enumerates every point of a small universe.

A rule that is called overridden or redundant must be so at every point: `--fix` removes it. Rules may be missed.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from policyc import parse
from policyc.language.loader import parse_with_diagnostics
from policyc.language.policy import Policy
from policyc.language.predicates import Predicate
from policyc.linter.context import Context
from tests.support.linting import lint_codes
from tests.support.policy_oracle import (
    FLAGS,
    SITE_NAMES,
    make_places,
    matched_bits,
    policies_differ,
    random_policy,
    selector_matches,
    site_name_bits,
)
from tests.support.processor_time import at_most

pytestmark = pytest.mark.any_jax

SEEDS = [range(start, start + 25) for start in range(0, 250, 25)]


@cache
def make_context(text: str) -> tuple[Policy, Context]:
    """The policy and its context. The tests share the random policies, so each is parsed once."""
    loaded = parse_with_diagnostics(text)
    assert not loaded.diagnostics, loaded.diagnostics[0]
    return loaded.policy, Context(loaded)


def overridden_rules(text: str) -> list[int]:
    _, context = make_context(text)
    return [rule.index for rule in context.resolved_rules if context.find_overriding(rule)]


def redundant_rules(text: str) -> list[int]:
    _, context = make_context(text)
    return [rule.index for rule in context.resolved_rules if context.find_repeated(rule)]


def seed_name(seeds: range) -> str:
    return f"{seeds.start}-{seeds.stop}"


@pytest.mark.parametrize("seeds", SEEDS, ids=seed_name)
def test_an_overridden_rule_decides_no_point_of_the_oracle(seeds: range) -> None:
    for seed in seeds:
        text = random_policy(random.Random(seed))
        policy, context = make_context(text)
        for rule in context.resolved_rules:
            later = context.find_overriding(rule)
            if later is not None:
                assert later.index > rule.index
                for bits in matched_bits(policy.rules):
                    assert not bits[rule.index] & ~bits[later.index], f"seed {seed}: {rule.rule}\n{text}"


@pytest.mark.parametrize("seeds", SEEDS, ids=seed_name)
def test_a_policy_without_its_redundant_rules_treats_every_point_alike(seeds: range) -> None:
    for seed in seeds:
        text = random_policy(random.Random(seed), recipes=("fp8", "r1", "r2"))
        policy, _ = make_context(text)
        for index in redundant_rules(text):
            for variant in (policy, *(policy.variant(v.name) for v in policy.variants)):
                without = replace(variant, rules=variant.rules[:index] + variant.rules[index + 1 :])
                assert not policies_differ(variant, without), f"seed {seed}: {policy.rules[index]}\n{text}"


def test_the_random_policies_contain_overridden_and_redundant_rules() -> None:
    """Random rules that never cover each other would prove nothing."""
    texts = [random_policy(random.Random(seed)) for seed in range(200)]
    alike = [random_policy(random.Random(seed), recipes=("fp8", "r1", "r2")) for seed in range(200)]
    assert sum(len(overridden_rules(text)) for text in texts) > 10
    assert sum(len(redundant_rules(text)) for text in alike) > 5


@pytest.mark.parametrize("seed", range(6))
def test_the_oracle_matches_all_names_at_once_as_it_matches_each(seed: int) -> None:
    selectors = [s for rule in parse(random_policy(random.Random(seed))).rules for s in rule.selectors]
    for selector in selectors:
        bits = site_name_bits(selector)
        assert [bits >> n & 1 for n in range(len(SITE_NAMES))] == [
            selector_matches(selector, name) for name in SITE_NAMES
        ]


# ---- conditions and slices. Conditions of steps: tests/language/test_schedule.py


SIZES = (1, 2, 3, 15, 16, 17, 32, 1000, 1023, 1024, 4096)
PLACES = make_places([1, 2, 4, 5, 9])
TERMS = (
    "k >= 16", "k % 16 == 0", "k % 16 != 0", "k < 16", "k == 1024", "k % 4 == 1", "1024 <= k < 4096", "m < n", "n < m",
    "weight", "not weight", "mlp", "experts", "head", "scores", "block", "not block", "layer < 2", "layer >= 4",
    "layer >= -2", "layer % 2 == 1", "not (layer < 4)", "not (mlp or attention)", "k == 1 or m == 1",
)  # fmt: skip


def parse_condition(text: str) -> Predicate:
    condition = parse(f"a where {text} -> bf16").rules[0].where
    assert condition is not None
    return condition


@pytest.mark.parametrize("seed", range(4))
def test_a_condition_that_is_called_impossible_holds_for_no_gemm(seed: int) -> None:
    rng, impossible = random.Random(seed), 0
    assert {name for place in PLACES for name in place} >= set(FLAGS)
    for _ in range(40):
        text = " and ".join(rng.sample(TERMS, rng.randint(2, 3)))
        if lint_codes(f"a where {text} -> bf16", ["impossible-predicate"]):
            impossible += 1
            condition = parse_condition(text)
            gemms = ({"m": m, "n": n, "k": k} for k in SIZES for m, n in ((1, 1), (1, 2), (2, 1), (3, 16)))
            assert not any(condition.holds({**gemm, **place}) for gemm in gemms for place in PLACES), text
    assert impossible > 3


@pytest.mark.parametrize(
    ("text", "empty"),
    [
        ("[4:8]", False), ("[8:4]", True), ("[4:4]", True), ("[-4:-8]", True), ("[:0]", True), ("[-1:0]", True),
        ("[0.5%:0.6%]", False), ("[10:1%]", False), ("[50%:50%]", True), ("[60%:50%]", True), ("[100%:]", True),
        ("[99.5%:-1]", False), ("[999999:]", False), ("[-100%:]", False), ("[:-100%]", True), ("[-15%:90%]", False),
        ("[5:-5]", False), ("[-5:5]", False), ("[100:101:7]", False), ("[0:]", False), ("[-90%:5%]", True),
    ],
)  # fmt: skip
def test_a_slice_that_is_called_empty_selects_nothing(text: str, empty: bool) -> None:
    assert lint_codes(f"s{text} -> bf16", ["empty-slice"]) == ["empty-slice"] * empty
    indices = parse(f"s{text} -> bf16").rules[0].selectors[0].segments[0].indices
    assert indices is not None
    assert not (empty and any(indices.select(depth) for depth in range(1, 300)))


# ---- large policies


@pytest.mark.parametrize(
    ("line", "overridden", "redundant"),
    [
        ("layers[{i}].mlp.up{i}x -> fp8", 0, 0),
        ("mlp.up, q -> fp8", 4_999, 4_999),
        ("*a{i}x*.b* -> fp8", 0, 0),
        ("x where k % 16 == {m} and n > {i} -> fp8", 0, 0),
        ("after {i} {{ mlp -> fp8 }}; mlp.up{i}x -> bf16", 0, 0),
        ("a{i}x where k == 3 -> nvfp4(sr=grad)", 0, 0),
        ("x where mlp and k > {i} -> fp8; x where k > {i} -> bf16", 5_000, 0),
    ],
)
@pytest.mark.slow
def test_five_thousand_rules_are_compared_in_seconds(line: str, overridden: int, redundant: int) -> None:
    text = "\n".join(line.format(i=i, m=i % 16) for i in range(5_000))
    with at_most(30):
        codes = Counter(lint_codes(text))
    assert codes["shadowed-rule"] == overridden
    _, context = make_context(text)
    assert sum(context.find_repeated(rule) is not None for rule in context.resolved_rules) == redundant
