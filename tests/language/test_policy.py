"""What a policy means: the six treatments of each recipe, predicates, schedules, variants, printing."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policyc import parse
from policyc.language.bounds import Bound
from policyc.language.policy import Policy, RecipeCall
from policyc.language.predicates import AllOf, AnyOf, Comparison, HasWeight, Not, Term, comparisons
from policyc.language.recipes import OPERANDS, Gemm, Recipe, Role, Treatment
from policyc.language.schedule import StepCondition
from tests.support.strategies import policies, predicates

SIX = (
    "fprop.activation",
    "fprop.weight",
    "dgrad.gradient",
    "dgrad.weight",
    "wgrad.activation",
    "wgrad.gradient",
)


def recipe(text: str) -> Recipe:
    policy = parse(f"mlp.* -> {text}")
    return policy.resolver()(policy.rules[0].recipe)


def by_name(found: Recipe) -> dict[str, Treatment]:
    return {name: found.treatment(Gemm(name.split(".")[0]), Role(name.split(".")[1])) for name in SIX}


def test_the_six_operands():
    assert [f"{gemm}.{role}" for gemm, role in OPERANDS] == list(SIX)


# ---- treatments

NVFP4 = Treatment(format="nvfp4", element="e2m1")


def test_the_recipe_of_nvidia_operand_by_operand():
    """docs/recipes.md, after arXiv:2509.25149: tiles on weights, transform in wgrad, stochastic gradients."""
    found = by_name(recipe("nvfp4(rht=wgrad, sr=grad, scale2d=weights)"))
    assert found == {
        "fprop.activation": Treatment(format="nvfp4", element="e2m1", rounding="rne", rht=0, tile2d=False),
        "fprop.weight": Treatment(format="nvfp4", element="e2m1", rounding="rne", rht=0, tile2d=True),
        "dgrad.gradient": Treatment(format="nvfp4", element="e2m1", rounding="sr", rht=0, tile2d=False),
        "dgrad.weight": Treatment(format="nvfp4", element="e2m1", rounding="rne", rht=0, tile2d=True),
        "wgrad.activation": Treatment(format="nvfp4", element="e2m1", rounding="rne", rht=16, tile2d=False),
        "wgrad.gradient": Treatment(format="nvfp4", element="e2m1", rounding="sr", rht=16, tile2d=False),
    }


@pytest.mark.parametrize(
    ("format", "element", "gradient", "bits"),
    [
        ("nvfp4", "e2m1", "e2m1", 4),
        ("mxfp4", "e2m1", "e2m1", 4),
        ("mxfp8", "e4m3", "e4m3", 8),
        ("fp8", "e4m3", "e5m2", 8),
        ("bf16", "bf16", "bf16", 16),
        ("f32", "f32", "f32", 32),
        ("keep", "", "", 0),
    ],
)
def test_formats(format, element, gradient, bits):
    found = recipe(format)
    for name, treatment in by_name(found).items():
        assert treatment == Treatment(format=format, element=gradient if "gradient" in name else element)
    assert [found.bits(gemm) for gemm in Gemm] == [bits] * 3


GRADIENTS = {"dgrad.gradient", "wgrad.gradient"}
WEIGHTS = {"fprop.weight", "dgrad.weight"}
ACTIVATIONS = {"fprop.activation", "wgrad.activation"}
TARGETS = [
    ("none", set()),
    ("all", set(SIX)),
    ("fprop", {"fprop.activation", "fprop.weight"}),
    ("dgrad", {"dgrad.gradient", "dgrad.weight"}),
    ("wgrad", {"wgrad.activation", "wgrad.gradient"}),
    ("bwd", {"dgrad.gradient", "dgrad.weight", "wgrad.activation", "wgrad.gradient"}),
    ("weights", WEIGHTS),
    ("activations", ACTIVATIONS),
    ("grad", GRADIENTS),
    ("fprop.weights", {"fprop.weight"}),
    ("wgrad.activations", {"wgrad.activation"}),
    ("dgrad.grad", {"dgrad.gradient"}),
    ("{dgrad.grad,wgrad.grad}", GRADIENTS),
    ("{fprop,weights}", {"fprop.activation", "fprop.weight", "dgrad.weight"}),
    ("weight", WEIGHTS),
    ("activation", ACTIVATIONS),
    ("gradient", GRADIENTS),
    ("gradients", GRADIENTS),
    ("grads", GRADIENTS),
    ("dgrad.gradients", {"dgrad.gradient"}),
]


@pytest.mark.parametrize(("words", "operands"), TARGETS, ids=[t[0] for t in TARGETS])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_words_for_operands(format, words, operands):
    plain = by_name(recipe(format))
    rotated = by_name(recipe(f"{format}(rht={words})"))
    rounded = by_name(recipe(f"{format}(sr={words})"))
    for name in SIX:
        taken = name in operands
        assert rotated[name] == dataclasses.replace(plain[name], rht=16 if taken else 0)
        assert rounded[name] == dataclasses.replace(plain[name], rounding="sr" if taken else "rne")


ALL_SIX = set(SIX)
EFFECTS = [
    # an option, the operands it changes, and how
    ("nvfp4(rht=wgrad, rht_size=64)", {"wgrad.activation", "wgrad.gradient"}, {"rht": 64}),
    ("nvfp4(rht_size=64)", set(), {}),
    ("nvfp4(sr=grad, sr_headroom=17/16)", GRADIENTS, {"rounding": "sr", "headroom": Fraction(17, 16)}),
    ("nvfp4(sr=grad, sr_headroom=1.0625)", GRADIENTS, {"rounding": "sr", "headroom": Fraction(17, 16)}),
    ("nvfp4(sr_headroom=17/16)", set(), {}),
    ("nvfp4(scale2d=weights)", WEIGHTS, {"tile2d": True}),
    ("nvfp4(scale2d=none)", set(), {}),
    ("nvfp4(scale=four_over_six)", ALL_SIX, {"scale": "four_over_six"}),
    ("nvfp4(scale=amax)", set(), {}),
    ("nvfp4(rounding=rne)", set(), {}),
    ("nvfp4(rounding=ms_eden)", ALL_SIX, {"rounding": "ms_eden", "rht": 128}),
    ("nvfp4(rounding=ms_eden, rht_size=16)", ALL_SIX, {"rounding": "ms_eden", "rht": 128}),
    ("nvfp4(mean_split)", ACTIVATIONS | GRADIENTS, {"mean_split": True}),
    ("nvfp4(mean_split=on)", ACTIVATIONS | GRADIENTS, {"mean_split": True}),
    ("nvfp4(mean_split=off)", set(), {}),
    ("nvfp4(outer=row)", ALL_SIX, {"outer": "row"}),
    ("nvfp4(outer=tensor)", set(), {}),
    ("mxfp4(scale_rounding=rceil)", ALL_SIX, {"scale_rounding": "rceil"}),
    ("mxfp4(scale_rounding=floor)", set(), {}),
    ("fp8(grad=e4m3)", GRADIENTS, {"element": "e4m3"}),
    ("fp8(grad=e5m2)", set(), {}),
]


@pytest.mark.parametrize(("text", "operands", "change"), EFFECTS, ids=[e[0] for e in EFFECTS])
def test_options(text, operands, change):
    plain = by_name(recipe(text.partition("(")[0]))
    expected = {n: dataclasses.replace(t, **(change if n in operands else {})) for n, t in plain.items()}
    assert by_name(recipe(text)) == expected


def test_split_takes_each_product_from_its_own_recipe():
    found = by_name(recipe("split(fprop=nvfp4(scale=four_over_six), wgrad=fp8)"))
    assert {name: t.format for name, t in found.items()} == {
        "fprop.activation": "nvfp4",
        "fprop.weight": "nvfp4",
        "dgrad.gradient": "keep",
        "dgrad.weight": "keep",
        "wgrad.activation": "fp8",
        "wgrad.gradient": "fp8",
    }
    assert found["fprop.weight"].scale == "four_over_six"
    assert recipe("split(fprop=nvfp4(sr=grad))") == recipe("split(fprop=nvfp4)")
    assert recipe("split(bwd=split(dgrad=fp8, wgrad=bf16))") == recipe("split(dgrad=fp8, wgrad=bf16)")


def test_bits_are_those_of_the_narrower_operand():
    found = recipe("split(fprop=nvfp4, dgrad=fp8)")
    assert [found.bits(gemm) for gemm in Gemm] == [4, 8, 0]


# ---- predicates

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
def test_predicates_by_hand(text, expected):
    where = parse(f"* where {text} -> bf16").rules[0].where
    assert where.holds(SITE) is expected


def truth(node, site):
    """Python's own logic, on a site of which all is known."""
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
    return eval(chain)  # numbers and comparisons only


_sites = st.fixed_dictionaries(
    {name: st.integers(1, 20) for name in ("m", "n", "k", "batch", "flops")} | {"weight": st.booleans()}
)


@given(predicates, _sites)
@settings(max_examples=200)
def test_predicates_against_python(predicate, site):
    assert predicate.holds(site) is truth(predicate, site)


@given(predicates, _sites, st.sets(st.sampled_from(["m", "n", "k", "batch", "flops", "weight"])))
@settings(max_examples=200)
def test_what_is_not_known_decides_nothing_that_it_could_change(predicate, site, hidden):
    """An answer on a part of the attributes stands whatever the others are."""
    known = {name: value for name, value in site.items() if name not in hidden}
    answer = predicate.holds(known)
    assert answer is None or answer is truth(predicate, site)
    if not hidden:
        assert answer is not None


def test_division_by_an_attribute_that_is_zero_is_undecided():
    where = Comparison(terms=(Term(value="k", modulus="n"), Term(value=0)), operators=("==",))
    assert where.holds({"k": 4, "n": 0}) is None


def test_comparisons_are_found_wherever_they_stand():
    where = parse("* where not (k == 1 or weight and m < n) -> bf16").rules[0].where
    assert [str(c) for c in comparisons(where)] == ["k == 1", "m < n"]


# ---- schedules and variants


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
def test_after_and_until_share_the_training(text, total, first):
    rules = parse(f"after {text} {{ a -> bf16 }}\nuntil {text} {{ b -> bf16 }}").rules
    (after,), (until,) = (r.when for r in rules)
    for step in range(total):
        assert after.holds(step, total) is (step >= first)
        assert until.holds(step, total) is (step < first)


def test_schedules_nest_from_the_outside_in():
    policy = parse("after 10% { a -> bf16; until 20% { b -> bf16 }; c -> bf16 }\nd -> bf16")
    after = StepCondition(kind="after", bound=Bound(Fraction(10), True))
    until = StepCondition(kind="until", bound=Bound(Fraction(20), True))
    assert [r.when for r in policy.rules] == [(after,), (after, until), (after,), ()]
    assert policy.step_conditions == (after, until)


def test_a_variant_replaces_recipes_and_appends_rules():
    policy = parse(
        "recipe a = fp8; x -> a; variant v { recipe a = bf16; recipe b = f32; y -> b }; variant w {}"
    )
    edited = policy.variant("v")
    assert edited.named_recipes == {"a": RecipeCall(name="bf16"), "b": RecipeCall(name="f32")}
    assert [str(r) for r in edited.rules] == ["x -> a", "y -> b"]
    assert policy.named_recipes == {"a": RecipeCall(name="fp8")}
    assert policy.variant("w").rules == policy.rules


@pytest.mark.parametrize(("text", "known"), [("variant a {}; variant b {}", "a, b"), ("", "none")])
def test_a_variant_that_is_not_there(text, known):
    with pytest.raises(KeyError, match=rf"no variant named 'c' \(variants: {known}\)"):
        parse(text).variant("c")


# ---- printing, freezing, layers


@pytest.mark.parametrize(
    "text",
    [
        "^layers[-15%:].mlp.*, {q,k}_proj @ fprop, wgrad where k % 16 != 0 and (m < n or weight) -> keep expect 3\n",
        "recipe a = split(fprop=nvfp4(sr={grad,weights}, mean_split), wgrad=fp8)\n* -> a\n",
        "after 82.5% {\n    until 1000 {\n        a -> bf16\n        b -> fp8\n    }\n}\n",
        "* -> bf16\nvariant a {\n    recipe b = bf16\n    after 5 {\n        * -> b\n    }\n}\nvariant c {}\n",
        "layers[::2] @ bwd -> bf16\nlayers[:] -> bf16\nlayers[1:2:3] -> bf16\n",
        "* where not not weight -> bf16\n* where 1 <= k % n < 3 -> bf16\n",
    ],
)
def test_this_is_how_a_policy_prints(text):
    assert str(parse(text)) == text


@given(policies())
@settings(max_examples=40)
def test_policies_can_be_hashed_and_not_changed(policy):
    again = parse(str(policy))
    assert hash(again) == hash(policy)
    with pytest.raises(dataclasses.FrozenInstanceError):
        again.rules = ()


def test_spans_do_not_count():
    assert parse("a -> bf16") == parse("\n\n   a   ->  bf16   # no")
    assert parse("a -> bf16") != parse("a -> fp8")
    assert repr(parse("a -> bf16")) == repr(parse("\n a -> bf16"))
    assert Policy() == parse("")


def test_the_policy_knows_nothing_of_lark():
    code = "import sys, policyc.language.policy, policyc.language.selectors; sys.exit('lark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
