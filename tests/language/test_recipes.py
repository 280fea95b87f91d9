"""Recipes: the treatment of each of the six operands, for every format and option."""

from __future__ import annotations

import dataclasses

import pytest

from policyc import parse
from policyc.language.recipes import OPERANDS, Gemm, Recipe, Role, Treatment

pytestmark = pytest.mark.any_jax

SIX = (
    "fprop.activation",
    "fprop.weight",
    "dgrad.gradient",
    "dgrad.weight",
    "wgrad.activation",
    "wgrad.gradient",
)


def recipe_of(text: str) -> Recipe:
    """The recipe that a text stands for."""
    policy = parse(f"mlp.* -> {text}")
    return policy.resolver()(policy.rules[0].recipe)


def by_name(recipe: Recipe) -> dict[str, Treatment]:
    """The treatments by the name of their operand."""
    return {name: recipe.treatment(Gemm(name.split(".")[0]), Role(name.split(".")[1])) for name in SIX}


def test_the_order_of_the_six_operands():
    assert [f"{gemm}.{role}" for gemm, role in OPERANDS] == list(SIX)


def test_the_recipe_of_nvidia_operand_by_operand():
    """arXiv:2509.25149: 2D tiles on weights, Hadamard transform in wgrad, stochastic rounding of gradients."""
    treatments = by_name(recipe_of("nvfp4(rht=wgrad, sr=grad, scale2d=weights)"))
    assert treatments == {
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
        ("fp4", "e2m1", "e2m1", 4),
        ("bf16", "bf16", "bf16", 16),
        ("f32", "f32", "f32", 32),
        ("keep", "", "", 0),
    ],
)
def test_the_treatment_of_every_format(format, element, gradient, bits):
    recipe = recipe_of(format)
    for name, treatment in by_name(recipe).items():
        assert treatment == Treatment(format=format, element=gradient if "gradient" in name else element)
    assert [recipe.bits(gemm) for gemm in Gemm] == [bits] * 3


GRADIENTS = {"dgrad.gradient", "wgrad.gradient"}
WEIGHTS = {"fprop.weight", "dgrad.weight"}
ACTIVATIONS = {"fprop.activation", "wgrad.activation"}
OPERAND_WORDS = [
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


@pytest.mark.parametrize(("words", "operands"), OPERAND_WORDS, ids=[t[0] for t in OPERAND_WORDS])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "fp4"])
def test_every_word_for_operands(format, words, operands):
    plain = by_name(recipe_of(format))
    rotated = by_name(recipe_of(f"{format}(rht={words})"))
    rounded = by_name(recipe_of(f"{format}(sr={words})"))
    for name in SIX:
        is_named = name in operands
        assert rotated[name] == dataclasses.replace(plain[name], rht=16 if is_named else 0)
        assert rounded[name] == dataclasses.replace(plain[name], rounding="sr" if is_named else "rne")


ALL_SIX = set(SIX)
EFFECTS = [
    # a recipe, the operands that its options change, and the changed fields
    ("nvfp4(rht=wgrad, rht_size=64)", {"wgrad.activation", "wgrad.gradient"}, {"rht": 64}),
    ("nvfp4(rht_size=64)", set(), {}),
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
    ("nvfp4(rht=wgrad, outer=bound)", {"wgrad.activation", "wgrad.gradient"}, {"rht": 16, "outer": "bound"}),
    ("nvfp4(outer=bound)", set(), {}),
    ("mxfp4(scale_rounding=rceil)", ALL_SIX, {"scale_rounding": "rceil"}),
    ("mxfp4(scale_rounding=floor)", set(), {}),
    ("fp8(grad=e4m3)", GRADIENTS, {"element": "e4m3"}),
    ("fp8(grad=e5m2)", set(), {}),
    ("fp8(sums=fast)", ALL_SIX, {"sums": "fast"}),
    ("fp8(sums=fp32)", set(), {}),
]


@pytest.mark.parametrize(("text", "operands", "change"), EFFECTS, ids=[e[0] for e in EFFECTS])
def test_the_effect_of_every_option(text, operands, change):
    plain = by_name(recipe_of(text.partition("(")[0]))
    expected = {n: dataclasses.replace(t, **(change if n in operands else {})) for n, t in plain.items()}
    assert by_name(recipe_of(text)) == expected


def test_split_takes_each_product_from_its_own_recipe():
    treatments = by_name(recipe_of("split(fprop=nvfp4(scale=four_over_six), wgrad=fp8)"))
    assert {name: t.format for name, t in treatments.items()} == {
        "fprop.activation": "nvfp4",
        "fprop.weight": "nvfp4",
        "dgrad.gradient": "keep",
        "dgrad.weight": "keep",
        "wgrad.activation": "fp8",
        "wgrad.gradient": "fp8",
    }
    assert treatments["fprop.weight"].scale == "four_over_six"
    assert recipe_of("split(fprop=nvfp4(sr=grad))") == recipe_of("split(fprop=nvfp4)")
    assert recipe_of("split(bwd=split(dgrad=fp8, wgrad=bf16))") == recipe_of("split(dgrad=fp8, wgrad=bf16)")


def test_bits_are_those_of_the_narrower_operand():
    recipe = recipe_of("split(fprop=nvfp4, dgrad=fp8)")
    assert [recipe.bits(gemm) for gemm in Gemm] == [4, 8, 0]
