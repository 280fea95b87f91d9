"""Set reasoning against the slow way: what a `Coverage` claims, every point of a small universe must bear out.

Soundness is the direction that matters: a rule called shadowed that wins a single point would be removed by `--fix`.
It is tested on the universe of `oracle`. Completeness needs no universe: where a `Coverage` says that something is left
to a rule, it must show a point, and the point is looked up the slow way. `repeats` is complete for nothing: it sees one
earlier rule that covers the whole of a later one, and gives up where a rule between them gives any site something else.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from policyc import parse
from policyc.language.loader import parse_with_diagnostics
from policyc.language.policy import Policy, Rule
from policyc.language.schedule import representative_steps
from policyc.language.selectors import Indices
from policyc.lint.automata import SearchTooLarge, example_index, index_classes
from policyc.lint.context import Context
from policyc.lint.coverage import Coverage, Point, sample_attributes
from tests.support.oracle import differ, frames, random_policy, taken

FEW = [range(at, at + 25) for at in range(0, 250, 25)]
MANY = [range(at, at + 250) for at in range(1_000, 3_500, 250)]
SEEDS = [*FEW, *(pytest.param(seeds, marks=pytest.mark.slow) for seeds in MANY)]


def cover(text: str) -> tuple[Policy, Coverage]:
    loaded = parse_with_diagnostics(text)
    assert not loaded.diagnostics, loaded.diagnostics[0]
    return loaded.policy, Context(loaded).coverage


def shadowed(text: str) -> list[int]:
    """The places of the rules that later ones cover whole."""
    _, found = cover(text)
    return [c.index for c in found.rules if found.find_overriding_rules(c)]


def repeated(text: str) -> list[int]:
    _, found = cover(text)
    return [c.index for c in found.rules if found.find_equivalent_earlier_rule(c)]


def decided_by(rules: tuple[Rule, ...], point: Point) -> int | None:
    """The last rule that takes a point, the slow way."""
    site = tuple((n.text, n.index, n.size) for n in point.path)
    for at in reversed(range(len(rules))):
        rule = rules[at]
        in_force = all(w.holds(*point.moment) for w in rule.when)
        meets = rule.where is None or rule.where.holds(point.attributes)
        if in_force and meets and any(point.gemm in s.products and taken(s, site) for s in rule.selectors):
            return at
    return None


def seed_name(seeds: range) -> str:
    return f"{seeds.start}-{seeds.stop}"


@pytest.mark.parametrize("seeds", SEEDS, ids=seed_name)
def test_what_is_called_covered_wins_no_point(seeds: range) -> None:
    for seed in seeds:
        text = random_policy(random.Random(seed))
        policy, found = cover(text)
        for claim in found.rules:
            covering = [c.index for c in found.find_overriding_rules(claim)]
            if not covering:
                continue
            assert min(covering) > claim.index
            for frame in frames(policy.rules):
                left = frame.bits[claim.index]
                for at in covering:
                    left &= ~frame.bits[at]
                assert not left, (
                    f"seed {seed}: {policy.rules[claim.index]} is not covered by {covering}\n{text}"
                )


@pytest.mark.parametrize("seeds", SEEDS, ids=seed_name)
def test_what_is_not_called_covered_has_a_point_to_show(seeds: range) -> None:
    undecided = 0
    for seed in seeds:
        text = random_policy(random.Random(seed))
        policy, found = cover(text)
        for claim in found.rules:
            if found.find_overriding_rules(claim):
                assert found.find_decided_point(claim) is None
                continue
            point = found.find_decided_point(claim)
            if point is not None:
                assert decided_by(policy.rules, point) == claim.index, (
                    f"seed {seed}: {claim.rule}, {point}\n{text}"
                )
            elif not found.undecided:
                assert not any(frame.bits[claim.index] for frame in frames(policy.rules)), (
                    f"seed {seed}\n{text}"
                )
        undecided += found.undecided
    assert undecided <= len(seeds) // 10  # too hard is an answer, but not a common one


@pytest.mark.parametrize("seeds", SEEDS, ids=seed_name)
def test_without_what_is_called_redundant_the_policy_decides_alike(seeds: range) -> None:
    for seed in seeds:
        text = random_policy(random.Random(seed), recipes=("fp8", "r1", "r2"))
        policy, found = cover(text)
        for claim in found.rules:
            if found.find_equivalent_earlier_rule(claim) is None:
                continue
            for whole in (policy, *(policy.variant(v.name) for v in policy.variants)):
                rest = whole.rules[: claim.index] + whole.rules[claim.index + 1 :]
                assert not differ(whole, replace(whole, rules=rest)), f"seed {seed}: {claim.rule}\n{text}"


def test_the_random_policies_put_all_this_to_the_test() -> None:
    """Random rules that never covered each other would prove nothing."""
    covered = redundant = together = 0
    for seed in range(100):
        _, found = cover(random_policy(random.Random(seed)))
        covered += sum(bool(found.find_overriding_rules(c)) for c in found.rules)
        together += sum(len(found.find_overriding_rules(c)) > 1 for c in found.rules)
        _, found = cover(random_policy(random.Random(seed), recipes=("fp8", "r1", "r2")))
        redundant += sum(found.find_equivalent_earlier_rule(c) is not None for c in found.rules)
    assert covered > 20
    assert together > 3
    assert redundant > 10


# ---- the parts of a point


SLICES = (
    "[0]", "[7]", "[-1]", "[-8]", "[:4]", "[4:]", "[-4:]", "[:-4]", "[4:8]", "[-8:-4]", "[::2]", "[1::3]", "[2:20:5]",
    "[-15%:]", "[:85%]", "[15%:]", "[:15%]", "[12.5%:87.5%]", "[-1.5%:]", "[1%:2%]", "[99%:-1]", "[:3%]", "[50%:]",
    "[60:]", "[-60:]", "[80:100]",
)  # fmt: skip


def indices(text: str) -> Indices:
    found = parse(f"s{text} -> bf16").rules[0].selectors[0].segments[0].indices
    assert found is not None
    return found


@pytest.mark.parametrize("seed", range(40))
def test_every_combination_of_slices_up_to_any_real_depth_is_known(seed: int) -> None:
    """126 layers is the deepest model there is; 150 leaves room."""
    chosen = [indices(text) for text in random.Random(seed).sample(SLICES, 4)]
    known = {inside for inside, _ in index_classes(frozenset(chosen))}
    for depth in range(1, 151):
        members = [(s, set(s.select(depth))) for s in chosen]
        for index in range(depth):
            inside = frozenset(s for s, taken_by_it in members if index in taken_by_it)
            assert inside in known, f"layer {index} of {depth} is in {[str(s) for s in inside]} of {chosen}"


@pytest.mark.parametrize("seed", range(10))
def test_the_example_of_a_combination_of_slices_is_one(seed: int) -> None:
    chosen = frozenset(indices(text) for text in random.Random(seed).sample(SLICES, 4))
    for inside, (index, depth) in index_classes(chosen):
        assert inside == {s for s in chosen if index in s.select(depth)}


@pytest.mark.parametrize(
    ("text", "empty"),
    [
        ("[4:8]", False), ("[8:4]", True), ("[4:4]", True), ("[-4:-8]", True), ("[:0]", True), ("[-1:0]", True),
        ("[0.5%:0.6%]", False), ("[10:1%]", False), ("[50%:50%]", True), ("[60%:50%]", True), ("[100%:]", True),
        ("[-10:1%]", True), ("[99.5%:-1]", False), ("[999999:]", False), ("[-100%:]", False), ("[:-100%]", True),
        ("[5:-5]", False), ("[-5:5]", False), ("[100:101:7]", False),
    ],
)  # fmt: skip
def test_a_slice_has_an_example_unless_it_is_empty(text: str, empty: bool) -> None:
    example = example_index(indices(text))
    assert (example is None) is empty
    if example is not None:
        index, depth = example
        assert index in indices(text).select(depth)


CONDITIONS = (
    "k >= 16", "k % 16 == 0", "k % 16 != 0", "m < n", "n < k", "m < k", "k % n == 0", "n != 1", "k != n", "weight",
    "m >= 1000", "n > 1000", "k == 1024", "1024 <= k < 4096", "m % 3 == 1", "m == n", "batch > 1",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_every_combination_of_conditions_that_a_gemm_meets_is_known(seed: int) -> None:
    rng = random.Random(seed)
    texts = rng.sample(CONDITIONS, 3)
    chosen = tuple(parse(f"a where {text} -> bf16").rules[0].where for text in texts)
    try:
        known = {tuple(c.holds(site) for c in chosen) for site in sample_attributes(chosen)}
    except SearchTooLarge:
        assert len({v for c in chosen for v in ("m", "n", "k") if v in str(c)}) == 3  # only then
        return
    sizes = (1, 2, 3, 4, 8, 15, 16, 17, 32, 48, 999, 1000, 1001, 1002, 1008, 1024, 2048, 4096, 5000)
    for m, n, k, batch in rng.sample([*itertools.product(sizes, sizes, sizes, (1, 2))], 3_000):
        site = {"m": m, "n": n, "k": k, "batch": batch, "flops": 2 * m * n * k, "weight": bool((m + n) % 2)}
        assert tuple(c.holds(site) for c in chosen) in known, f"{texts}: {site}"


PHASES = (
    "after 50%",
    "until 82%",
    "after 82%",
    "after 1000",
    "until 1000",
    "after 1500",
    "until 99.9%",
    "until 10",
)


@pytest.mark.parametrize("phases", list(itertools.combinations(PHASES, 3)), ids=", ".join)
def test_every_combination_of_phases_that_a_step_is_in_is_known(phases: tuple[str, ...]) -> None:
    chosen = tuple(parse(f"{phase} {{ a -> bf16 }}").rules[0].when[0] for phase in phases)
    known = {tuple(w.holds(*moment) for w in chosen) for moment in representative_steps(chosen)}
    for total in (1, 2, 9, 10, 11, 50, 1000, 1001, 1220, 1500, 1800, 1830, 2000, 3000, 10_000):
        for step in {*range(0, total, 7), total - 1, *(s for s in (999, 1000, 1499, 1500) if s < total)}:
            assert tuple(w.holds(step, total) for w in chosen) in known, f"step {step} of {total}"


# ---- examples, each for what it shows


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("mlp -> fp8; mlp.* -> bf16", [0]),
        ("mlp.up -> fp8; mlp -> bf16", [0]),
        ("mlp -> fp8; mlp.up -> bf16", []),
        ("mlp -> fp8; ^mlp -> bf16", []),
        ("^mlp -> fp8; mlp -> bf16", [0]),
        ("up_proj -> fp8; *_proj -> bf16", [0]),
        ("a.*.b -> fp8; a -> bf16", [0]),
        ("{a,b} -> fp8; a -> bf16; b -> bf16", [0]),
        ("{a,b} -> fp8; a -> bf16", []),
        ("a, b -> fp8; b, a -> bf16", [0]),
        ("layers[-4:] -> fp8; layers[-8:] -> bf16", [0]),
        ("layers[-8:] -> fp8; layers[-4:] -> bf16", []),
        ("layers[:4] -> fp8; layers[0] -> bf16; layers[1] -> bf16; layers[2:4] -> bf16", [0]),
        ("layers -> fp8; layers[:50%] -> bf16; layers[50%:] -> bf16", []),  # `layers` may stand in no stack
        ("layers[:] -> fp8; layers[:50%] -> bf16; layers[50%:] -> bf16", [0]),
        ("layers[:85%] -> fp8; layers[-15%:] -> bf16; layers[:85%] -> bf16", [0]),
        ("layers[-1.5%:] -> fp8; layers[-1] -> bf16", []),  # two of 80 layers
        ("layers[3] -> fp8; layers_3 -> bf16", [0]),
        ("layers.3 -> fp8; layers[3] -> bf16", [0]),
        ("layers[::2] -> fp8; layers[::4] -> bf16; layers[2::4] -> bf16", [0]),
        ("a -> fp8; a @ fprop -> bf16; a @ bwd -> bf16", [0]),
        ("a -> fp8; a @ fprop -> bf16; a @ wgrad -> bf16", []),
        ("a -> fp8; a where weight -> bf16; a where not weight -> bf16", [0]),
        ("a -> fp8; a where k >= 16 -> bf16; a where k < 16 -> bf16", [0]),
        ("a -> fp8; a where k >= 16 -> bf16; a where k < 15 -> bf16", []),
        ("a where k % 32 == 0 -> fp8; a where k % 16 == 0 -> bf16", [0]),
        ("a where k % 16 == 0 -> fp8; a where k % 32 == 0 -> bf16", []),
        ("a where m < n and n < k -> fp8; a where m < k -> bf16", [0]),
        ("a -> fp8; after 50% { a -> bf16 }; until 50% { a -> bf16 }", [0]),
        ("a -> fp8; after 50% { a -> bf16 }; until 49% { a -> bf16 }", []),
        ("after 90% { a -> fp8 }; after 50% { a -> bf16 }", [0]),
        ("after 1000 { a -> fp8 }; after 50% { a -> bf16 }", []),
        ("a -> fp8; * -> keep", [0]),
    ],
)  # fmt: skip
def test_which_rules_are_shadowed(text: str, places: list[int]) -> None:
    assert shadowed(text) == places


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("mlp -> fp8; mlp.up -> fp8", [1]),
        ("mlp -> fp8; mlp.up -> bf16; mlp.up -> fp8", []),
        ("mlp -> fp8; attention -> bf16; mlp.up -> fp8", []),  # a site may be under both
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
def test_which_rules_are_redundant(text: str, places: list[int]) -> None:
    assert repeated(text) == places


def test_what_is_too_hard_is_counted_and_not_guessed() -> None:
    _, found = cover("a where k % 127 == 0 and k % 113 == 0 -> fp8; a -> bf16")
    assert not found.find_overriding_rules(found.rules[0])
    assert found.undecided == 1


def test_a_cover_has_a_budget_for_all_its_answers() -> None:
    policy = parse("".join(f"*a{i}*.*b{i}* -> fp8\n" for i in range(40)))
    resolve = policy.resolver()
    found = Coverage(policy.rules, lambda rule: resolve(rule.recipe), steps=100)
    assert not any(found.find_overriding_rules(c) for c in found.rules)
    assert found.undecided > 20
