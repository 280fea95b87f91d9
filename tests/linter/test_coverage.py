"""Coverage compared with the oracle, which enumerates every point of a small universe.

Soundness matters most: a rule that is called overridden but decides a single point would be removed by `--fix`. It is
tested on the universe of the oracle. Completeness needs no universe: if no later rules override a rule, there must be
a point that it decides, and the oracle looks up that point. `find_equivalent_earlier_rule` is not complete: it
sees only one earlier rule that covers the whole of a later one, and gives up if a rule between them treats any site
differently.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache

import pytest

from policyc import parse
from policyc.language.loader import parse_with_diagnostics
from policyc.language.policy import Policy, Rule
from policyc.language.predicates import Predicate
from policyc.language.recipes import Gemm
from policyc.language.selectors import parse_path
from policyc.linter.context import Context
from policyc.linter.coverage import Coverage, Point, ResolvedRule, find_uncovered_point
from policyc.linter.engine import lint
from policyc.linter.examples import Budget, SearchTooLarge
from policyc.linter.samples import sample_attributes
from tests.support.policy_oracle import (
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
def make_coverage(text: str) -> tuple[Policy, Coverage]:
    """The policy and its coverage. The tests share the random policies, so each is parsed once."""
    loaded = parse_with_diagnostics(text)
    assert not loaded.diagnostics, loaded.diagnostics[0]
    return loaded.policy, Context(loaded).coverage


def overridden_rules(text: str) -> list[int]:
    """The indices of the rules that later ones override everywhere."""
    _, coverage = make_coverage(text)
    return [rule.index for rule in coverage.rules if coverage.find_overriding_rules(rule)]


def redundant_rules(text: str) -> list[int]:
    _, coverage = make_coverage(text)
    return [rule.index for rule in coverage.rules if coverage.find_equivalent_earlier_rule(rule)]


def find_deciding_rule(rules: tuple[Rule, ...], point: Point) -> int | None:
    """The last rule that matches a point, according to the oracle."""
    site = tuple((segment.text, segment.index, segment.size) for segment in point.path)
    for index in reversed(range(len(rules))):
        rule = rules[index]
        is_scheduled = all(w.holds(*point.moment) for w in rule.when)
        meets_condition = rule.where is None or rule.where.holds(point.attributes)
        matches = any(point.gemm in s.products and selector_matches(s, site) for s in rule.selectors)
        if is_scheduled and meets_condition and matches:
            return index
    return None


def seed_name(seeds: range) -> str:
    return f"{seeds.start}-{seeds.stop}"


@pytest.mark.parametrize("seeds", SEEDS, ids=seed_name)
def test_an_overridden_rule_decides_no_point_of_the_oracle(seeds: range) -> None:
    for seed in seeds:
        text = random_policy(random.Random(seed))
        policy, coverage = make_coverage(text)
        for rule in coverage.rules:
            overriding = [later.index for later in coverage.find_overriding_rules(rule)]
            if not overriding:
                continue
            assert min(overriding) > rule.index
            for bits in matched_bits(policy.rules):
                remaining = bits[rule.index]
                for index in overriding:
                    remaining &= ~bits[index]
                assert not remaining, f"seed {seed}: {rule.rule} is not covered by {overriding}\n{text}"


def find_decided_point(policy: Policy, coverage: Coverage, rule: ResolvedRule) -> Point | None:
    """A point that a rule decides, according to the oracle. Raises SearchTooLarge."""
    budget, later = Budget(20_000), []
    while (point := find_uncovered_point(rule, later, budget)) is not None:
        index = find_deciding_rule(policy.rules, point)
        assert index is not None
        if index == rule.index:
            return point
        later.append(coverage.rules[index])
    return None


@pytest.mark.parametrize("seeds", SEEDS, ids=seed_name)
def test_a_rule_that_is_not_overridden_decides_a_point(seeds: range) -> None:
    undecided = 0
    for seed in seeds:
        text = random_policy(random.Random(seed))
        policy, coverage = make_coverage(text)
        for rule in coverage.rules:
            if coverage.find_overriding_rules(rule):
                continue
            try:
                point = find_decided_point(policy, coverage, rule)
            except SearchTooLarge:
                undecided += 1
                continue
            if point is None and not coverage.undecided:
                hint = f"seed {seed}: {rule.rule} decides nothing\n{text}"
                assert not any(bits[rule.index] for bits in matched_bits(policy.rules)), hint
        undecided += coverage.undecided
    assert undecided <= len(seeds) // 10  # a question may be too hard, but not often


@pytest.mark.parametrize("seeds", SEEDS, ids=seed_name)
def test_a_policy_without_its_redundant_rules_treats_every_point_alike(seeds: range) -> None:
    for seed in seeds:
        text = random_policy(random.Random(seed), recipes=("fp8", "r1", "r2"))
        policy, coverage = make_coverage(text)
        for rule in coverage.rules:
            if coverage.find_equivalent_earlier_rule(rule) is None:
                continue
            for variant in (policy, *(policy.variant(v.name) for v in policy.variants)):
                without = replace(
                    variant, rules=variant.rules[: rule.index] + variant.rules[rule.index + 1 :]
                )
                assert not policies_differ(variant, without), f"seed {seed}: {rule.rule}\n{text}"


def test_the_random_policies_contain_overridden_and_redundant_rules() -> None:
    """Random rules that never cover each other would prove nothing."""
    overridden = together = redundant = 0
    for seed in range(200):
        _, coverage = make_coverage(random_policy(random.Random(seed)))
        overridden += sum(bool(coverage.find_overriding_rules(rule)) for rule in coverage.rules)
        together += sum(len(coverage.find_overriding_rules(rule)) > 1 for rule in coverage.rules)
        _, coverage = make_coverage(random_policy(random.Random(seed), recipes=("fp8", "r1", "r2")))
        redundant += sum(coverage.find_equivalent_earlier_rule(rule) is not None for rule in coverage.rules)
    assert overridden > 20
    assert together > 3
    assert redundant > 10


@pytest.mark.parametrize("seed", range(6))
def test_the_oracle_matches_all_names_at_once_as_it_matches_each(seed: int) -> None:
    selectors = [s for rule in parse(random_policy(random.Random(seed))).rules for s in rule.selectors]
    for selector in selectors:
        bits = site_name_bits(selector)
        assert [bits >> n & 1 for n in range(len(SITE_NAMES))] == [
            selector_matches(selector, name) for name in SITE_NAMES
        ]


# ---- conditions. Those of steps: tests/language/test_schedule.py


CONDITIONS = (
    "k >= 16", "k % 16 == 0", "k % 16 != 0", "m < n", "n < k", "m < k", "k % n == 0", "n != 1", "k != n", "weight",
    "m >= 1000", "n > 1000", "k == 1024", "1024 <= k < 4096", "m % 3 == 1", "m == n", "batch > 1",
)  # fmt: skip
SIZES = (1, 2, 3, 4, 8, 15, 16, 17, 32, 48, 999, 1000, 1001, 1002, 1008, 1024, 2048, 4096, 5000)
GEMMS = [
    {"m": m, "n": n, "k": k, "batch": batch, "flops": 2 * m * n * k, "weight": bool((m + n) % 2)}
    for m, n, k, batch in itertools.product(SIZES, SIZES, SIZES, (1, 2))
]


def parse_condition(text: str) -> Predicate:
    condition = parse(f"a where {text} -> bf16").rules[0].where
    assert condition is not None
    return condition


@cache
def holds_for_gemms(text: str) -> tuple[bool | None, ...]:
    condition = parse_condition(text)
    return tuple(condition.holds(gemm) for gemm in GEMMS)


@pytest.mark.parametrize("seed", range(20))
def test_every_combination_of_conditions_that_a_gemm_meets_has_a_sample(seed: int) -> None:
    texts = random.Random(seed).sample(CONDITIONS, 3)
    conditions = tuple(map(parse_condition, texts))
    try:
        samples = {
            tuple(c.holds(a) for c in conditions) for a in sample_attributes(conditions, Budget(10**9))
        }
    except SearchTooLarge:  # only with conditions between all three sizes
        assert len({v for c in conditions for v in ("m", "n", "k") if v in str(c)}) == 3
        return
    assert set(zip(*map(holds_for_gemms, texts), strict=True)) <= samples, texts


KIND_CONDITIONS = (
    "mlp", "not mlp", "experts", "mlp and not experts", "attention", "attention or scores", "head", "embedding or head",
    "router", "conv", "weight", "not weight", "block", "block and weight", "not (mlp or attention)",
    "mlp and layer >= -4",
    "layer >= -4", "layer >= -8", "layer < -4", "layer < 4", "layer >= 4", "layer > 4", "layer <= -4", "layer != 0",
    "layer == -1", "layer == 9", "2 <= layer < -8", "-8 <= layer < 10", "layer < 15%", "layer >= -15%", "layer < 85%",
    "12.5% <= layer < 50%", "layer % 2 == 0", "layer % 6 < 4", "layer % 3 == 1 or head", "not layer >= 4",
)  # fmt: skip
PLACES = make_places([*range(1, 34), 48, 64, 81])


@cache
def holds_at_places(text: str) -> tuple[bool | None, ...]:
    condition = parse_condition(text)
    return tuple(condition.holds(place) for place in PLACES)


@pytest.mark.parametrize("seed", range(20))
def test_the_samples_of_kinds_and_layers_are_those_of_all_places(seed: int) -> None:
    """Each combination of conditions that a place meets has a sample, and each sample is a place."""
    texts = random.Random(seed).sample(KIND_CONDITIONS, 3)
    conditions = tuple(map(parse_condition, texts))
    samples = {tuple(c.holds(a) for c in conditions): a for a in sample_attributes(conditions, Budget(10**9))}
    assert set(zip(*map(holds_at_places, texts), strict=True)) <= samples.keys(), texts
    for sample in samples.values():
        place = {name: value for name, value in sample.items() if name in PLACES[0]}
        assert place in make_places([] if place["layers"] is None else [place["layers"]]), place


# ---- examples


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ("mlp -> fp8; mlp.* -> bf16", [0]),
        ("mlp -> fp8; mlp.up -> bf16", []),
        ("mlp -> fp8; ^mlp -> bf16", []),
        ("^mlp -> fp8; mlp -> bf16", [0]),
        ("up_proj -> fp8; *_proj -> bf16", [0]),
        ("a.*.b -> fp8; a -> bf16", [0]),
        ("{a,b} -> fp8; a -> bf16; b -> bf16", [0]),
        ("{a,b} -> fp8; a -> bf16", []),
        ("layers[-4:] -> fp8; layers[-8:] -> bf16", [0]),
        ("layers[:4] -> fp8; layers[0] -> bf16; layers[1] -> bf16; layers[2:4] -> bf16", [0]),
        ("layers -> fp8; layers[:50%] -> bf16; layers[50%:] -> bf16", []),  # `layers` may be outside a stack
        ("layers[:] -> fp8; layers[:50%] -> bf16; layers[50%:] -> bf16", [0]),
        ("layers[:85%] -> fp8; layers[-15%:] -> bf16; layers[:85%] -> bf16", [0]),
        ("layers[-1.5%:] -> fp8; layers[-1] -> bf16", []),  # two of 80 layers
        ("layers[3] -> fp8; layers_3 -> bf16", [0]),
        ("layers[::2] -> fp8; layers[::4] -> bf16; layers[2::4] -> bf16", [0]),
        ("a -> fp8; a @ fprop -> bf16; a @ bwd -> bf16", [0]),
        ("a -> fp8; a @ fprop -> bf16; a @ wgrad -> bf16", []),
        ("a -> fp8; a where weight -> bf16; a where not weight -> bf16", [0]),
        ("a -> fp8; a where k >= 16 -> bf16; a where k < 16 -> bf16", [0]),
        ("a where k % 32 == 0 -> fp8; a where k % 16 == 0 -> bf16", [0]),
        ("a where m < n and n < k -> fp8; a where m < k -> bf16", [0]),
        ("a -> fp8; after 50% { a -> bf16 }; until 50% { a -> bf16 }", [0]),
        ("a -> fp8; after 50% { a -> bf16 }; until 49% { a -> bf16 }", []),
        ("after 1000 { a -> fp8 }; after 50% { a -> bf16 }", []),
        ("a -> fp8; * -> keep", [0]),
        ("*a*b*c*d*e*f*g*h*i*j*k*.??? -> fp8; ????? -> bf16; * -> keep", [0, 1]),
        ("a.?* -> fp8; a.? -> bf16; a.??* -> bf16", [0]),
        ("x_?[:2] -> fp8; x_* -> bf16", [0]),
        ("* where mlp -> fp8; * where head -> bf16", []),
        ("* where mlp -> fp8; * where head -> bf16; * where not head -> f32", [0]),
        ("* where experts -> fp8; * where mlp -> bf16", [0]),
        ("* where mlp -> fp8; * where experts -> bf16", []),
        ("* where mlp -> fp8; * where weight -> bf16", [0]),
        ("* where scores -> fp8; * where not weight -> bf16", [0]),
        ("* where head -> fp8; * where weight -> bf16", []),
        ("* where mlp -> fp8; * where block -> bf16", []),  # an MLP need not be in a block
        ("* where layer >= 0 -> fp8; * where block -> bf16", [0]),
        ("* where not block -> fp8; * where not layer >= 4 -> bf16", [0]),
        ("* where layer >= -4 -> fp8; * where layer >= -8 -> bf16", [0]),
        ("* where layer >= -4 -> fp8; * where layer >= 4 -> bf16", []),  # in a stack of 4
        ("* where layer == -1 -> fp8; * where layer >= -15% -> bf16", [0]),
        ("* where block -> fp8; * where layer < 85% -> bf16; * where layer >= -15% -> bf16", [0]),
        ("* where layer % 4 == 1 -> fp8; * where layer % 2 == 1 -> bf16", [0]),
        ("* where layer < 4 -> fp8; layers[:4] -> bf16", []),  # of another stack, perhaps
    ],
)  # fmt: skip
def test_which_rules_are_overridden(text: str, indices: list[int]) -> None:
    assert overridden_rules(text) == indices


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ("mlp -> fp8; mlp.up -> fp8", [1]),
        ("mlp -> fp8; mlp.up -> bf16; mlp.up -> fp8", []),
        ("mlp -> fp8; attention -> bf16; mlp.up -> fp8", []),  # a site may be inside both
        ("mlp -> fp8; attention -> fp8; mlp.up -> fp8", [2]),
        ("mlp -> fp8; mlp @ wgrad -> split(fprop=bf16, bwd=fp8)", [1]),
        ("mlp @ fprop -> fp8; mlp -> fp8", []),
        ("recipe r = fp8; mlp -> fp8; mlp.up -> r", [1]),
        ("recipe r = fp8; mlp -> fp8; mlp.up -> r; variant v { recipe r = bf16 }", []),
        ("recipe r = fp8; mlp -> r; mlp.up -> r; variant v { recipe r = bf16 }", [1]),
        ("recipe r = fp8; mlp -> r; a -> fp8; mlp.up -> r; variant v { recipe r = bf16 }", []),
        ("after 50% { mlp -> fp8 }; mlp -> fp8", []),
        ("mlp -> fp8; after 50% { mlp -> fp8 }", [1]),
        ("mlp -> fp8; mlp where weight -> fp8", [1]),
        ("mlp -> keep", []),
    ],
)  # fmt: skip
def test_which_rules_are_redundant(text: str, indices: list[int]) -> None:
    assert redundant_rules(text) == indices


def test_a_question_that_is_too_hard_is_counted_as_undecided() -> None:
    _, coverage = make_coverage("a where k % 127 == 0 and k % 113 == 0 -> fp8; a -> bf16")
    assert not coverage.find_overriding_rules(coverage.rules[0])
    assert coverage.undecided == 1


def test_all_questions_share_one_budget() -> None:
    policy = parse("".join(f"*a{i}*.*b{i}* -> fp8\n" for i in range(40)))
    resolve = policy.resolver()
    coverage = Coverage(policy.rules, lambda rule: resolve(rule.recipe), steps=100)
    assert not any(coverage.find_overriding_rules(rule) for rule in coverage.rules)
    assert coverage.undecided > 20


def test_a_layer_of_a_stack_of_unknown_depth_is_decided_by_its_index() -> None:
    _, coverage = make_coverage("layers[3] -> fp8; layers[4] -> bf16; layers[-1] -> bf16")
    point = Point(path=parse_path("layers[3].up"), gemm=Gemm.FPROP, moment=(0, 1), attributes={})
    assert coverage.find_deciding_rule(point, Budget(100)) is coverage.rules[0]


def test_an_added_rule_that_is_too_hard_is_counted_as_undecided() -> None:
    """Its variant may change nothing. Without the count, this would not be said."""
    text = "a -> bf16; variant v { a where k % 127 == 0 and k % 113 == 0 -> bf16 }"
    result = lint(parse_with_diagnostics(text), codes=["idle-variant"])
    assert (result.diagnostics, result.undecided) == ((), 1)


# ---- limits


TERMS = [f"k == {7 * i}" for i in range(10_000)]
NAMES = [f"a{i}" for i in range(2000)]


@pytest.mark.parametrize(
    "text",
    [
        f"* where {' or '.join(TERMS)} -> fp8\nmlp -> bf16\n",
        f"* where {' < '.join(['k'] * 10_000)} -> fp8\nmlp -> bf16\n",
        f"{', '.join(f'{n}.*' for n in NAMES)} -> fp8\n{', '.join(NAMES)} -> bf16\n",
    ],
    ids=["or", "chain", "selectors"],
)
@pytest.mark.slow
def test_what_is_compared_in_pairs_is_linted_in_seconds(text: str) -> None:
    """Without limits, the time is quadratic: 1,600 terms took 19 seconds. `benchmarks/large_policies.py` has more."""
    loaded = parse_with_diagnostics(text)
    with at_most(15):
        result = lint(loaded)
    assert loaded.diagnostics == ()
    assert result.undecided > 0


def test_a_large_condition_does_not_use_up_the_limit_of_the_others() -> None:
    large = " or ".join(f"k == {7 * i}" for i in range(1_500))
    text = f"a where {large} -> fp8\nb where k > 4096 and k < 1024 -> bf16\n"
    assert [d.code for d in lint(parse_with_diagnostics(text)).diagnostics] == ["impossible-predicate"]


# ---- hashes


def test_the_cost_of_a_question_does_not_depend_on_hashes() -> None:
    """Policies that differ only in their names cost the same. The order of a set of names differs between them."""

    def cost(prefix: str) -> int:
        one, other, third = (f"{prefix}{letter}" for letter in "abc")
        rules = [f"{one} -> fp8"] * 5 + [f"{other} where k > 9 -> fp8"] * 3 + [f"{third} -> fp8"] * 2
        context = Context(parse_with_diagnostics("\n".join([*rules, f"{one}.x -> bf16"])))
        budget = Budget(1_000)
        path = parse_path(f"{one}.{other}.{third}")
        point = Point(path=path, gemm=Gemm.FPROP, moment=(0, 1), attributes={"k": 1})
        assert context.coverage.find_deciding_rule(point, budget) is not None
        return 1_000 - budget.remaining

    assert len({cost(f"n{number}_") for number in range(20)}) == 1
