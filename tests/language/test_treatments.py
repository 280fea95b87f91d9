"""Normalization of recipes: the rules that connect the options of the six operands; treatments in words."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from policyc import parse
from policyc.language.recipes import OPERANDS, Gemm, Recipe, Role, Treatment
from policyc.language.treatments import (
    describe_options,
    describe_treatment,
    find_recipe_problems,
    normalize_if_valid,
    normalize_recipe,
)

pytestmark = pytest.mark.any_jax


def recipe_of(text: str) -> Recipe:
    policy = parse(f"a -> {text}")
    return policy.resolver()(policy.rules[0].recipe)


@pytest.mark.parametrize(
    "text",
    [
        "keep",
        "bf16",
        "fp8",
        "mxfp8",
        "mxfp4(rht=wgrad, sr=grad)",
        "fp4(rht=wgrad, sr=grad)",
        "nvfp4(rht=wgrad, sr=grad, scale2d=weights)",
        "split(fprop=nvfp4(scale=four_over_six), bwd=nvfp4(rounding=ms_eden))",
    ],
)
def test_a_recipe_without_conflicts_is_not_changed(text):
    recipe = recipe_of(text)
    assert find_recipe_problems(recipe) == ()
    assert normalize_recipe(recipe) == normalize_if_valid(recipe) == recipe


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            "nvfp4(rht=wgrad.activations)",
            ("wgrad rotates one operand by 16 and the other by nothing: rht must name both or neither",),
        ),
        (
            "nvfp4(rht=fprop, scale2d=weights)",
            ("fprop rotates an operand that has 2D scales: leave it out of rht or of scale2d",),
        ),
    ],
)
def test_a_recipe_that_cannot_be_carried_out_has_problems(text, problems):
    recipe = recipe_of(text)
    assert find_recipe_problems(recipe)[: len(problems)] == problems
    with pytest.raises(ValueError, match="rotates"):
        normalize_recipe(recipe)
    assert normalize_if_valid(recipe) == recipe


def test_ms_eden_is_rounding_to_nearest_in_the_forward_product():
    recipe = normalize_recipe(recipe_of("nvfp4(rounding=ms_eden)"))
    assert {(t.rounding, t.rht) for t in recipe.gemm_treatments(Gemm.FPROP)} == {("rne", 0)}
    for gemm in (Gemm.DGRAD, Gemm.WGRAD):
        assert {(t.rounding, t.rht) for t in recipe.gemm_treatments(gemm)} == {("ms_eden", 128)}


def test_four_over_six_applies_to_forward_operands_that_are_rounded_to_nearest():
    recipe = normalize_recipe(recipe_of("nvfp4(scale=four_over_six, sr={grad,fprop.activations})"))
    scales = {operand: recipe.treatment(*operand).scale for operand in OPERANDS}
    assert [operand for operand, scale in scales.items() if scale == "four_over_six"] == [
        (Gemm.FPROP, Role.WEIGHT)
    ]


def test_a_2d_scaled_weight_is_the_same_in_dgrad_as_in_fprop():
    """Also if dgrad has other options: both products share one set of codes."""
    recipe = normalize_recipe(
        recipe_of("split(fprop=nvfp4(scale2d=weights), dgrad=nvfp4(scale2d=weights, sr=weights))")
    )
    weights = [recipe.treatment(gemm, Role.WEIGHT) for gemm in (Gemm.FPROP, Gemm.DGRAD)]
    assert weights[0] == weights[1]
    assert weights[0].tile2d
    assert weights[0].rounding == "rne"


def test_a_weight_without_2d_scales_may_differ_in_dgrad():
    recipe = recipe_of("split(fprop=nvfp4, dgrad=nvfp4(sr=weights))")
    assert normalize_recipe(recipe) == recipe
    assert recipe.treatment(Gemm.DGRAD, Role.WEIGHT).rounding == "sr"


def test_2d_tiles_have_one_outer_scale_per_tensor():
    recipe = recipe_of("nvfp4(outer=row)")
    tiled = Recipe(tuple(replace(t, tile2d=True) for t in recipe.treatments))
    assert {t.outer for t in normalize_recipe(recipe).treatments} == {"row"}
    assert {t.outer for t in normalize_recipe(tiled).treatments} == {"tensor"}


# ---- treatments in words


@pytest.mark.parametrize(
    ("text", "gradient", "weight"),
    [
        ("keep", "keep", "keep"),
        ("bf16", "bf16", "bf16"),
        ("fp8", "fp8 tensor e5m2", "fp8 tensor e4m3"),
        ("fp8(outer=row)", "fp8 row e5m2", "fp8 row e4m3"),
        ("fp8(sums=fast)", "fp8 tensor e5m2 sums=fast", "fp8 tensor e4m3 sums=fast"),
        ("fp4", "fp4 tensor", "fp4 tensor"),
        ("mxfp8", "mxfp8 1x32", "mxfp8 1x32"),
        ("mxfp4(scale_rounding=rceil)", "mxfp4 1x32 scale_rounding=rceil", "mxfp4 1x32 scale_rounding=rceil"),
        ("nvfp4(scale2d=weights, sr=grad)", "nvfp4 1x16 sr", "nvfp4 16x16"),
        ("nvfp4(rht=dgrad, rht_size=32)", "nvfp4 1x16 rht32", "nvfp4 1x16 rht32"),
        ("nvfp4(rounding=ms_eden)", "nvfp4 1x16 rht128 ms_eden", "nvfp4 1x16 rht128 ms_eden"),
        ("nvfp4(scale=four_over_six)", "nvfp4 1x16 four_over_six", "nvfp4 1x16 four_over_six"),
        ("nvfp4(rht=dgrad, rht_signs=random)", *2 * ("nvfp4 1x16 rht16 rht_signs=random",)),
        ("nvfp4(scale2d=all)", "nvfp4 16x16", "nvfp4 16x16"),
        ("nvfp4(block_scale=ue5m3)", "nvfp4_ue5m3 1x16", "nvfp4_ue5m3 1x16 outer=none"),
        ("nvfp4_ue5m3", "nvfp4_ue5m3 1x16", "nvfp4_ue5m3 1x16 outer=none"),
        ("fp8(outer=shared)", "fp8 tensor e5m2", "fp8 tensor e4m3 outer=shared"),
        ("nvfp4(backward=dequantized)", "bf16", "bf16 dequantized"),
        ("nvfp4(mean_split, outer=row)", "nvfp4 1x16 mean_split outer=row", "nvfp4 1x16 outer=row"),
    ],
)
def test_a_treatment_in_words(text, gradient, weight):
    """Both operands of dgrad, before rules connect them."""
    recipe = recipe_of(text)
    assert [describe_treatment(t) for t in recipe.gemm_treatments(Gemm.DGRAD)] == [gradient, weight]


def test_different_treatments_have_different_words():
    """Each field changes the words: a plan is compared by them."""
    (plain, _) = recipe_of("nvfp4").gemm_treatments(Gemm.DGRAD)
    (fp8, _) = recipe_of("fp8").gemm_treatments(Gemm.DGRAD)
    changes = {
        "rounding": "sr", "rht": 16, "tile2d": True, "scale": "four_over_six", "scale_rounding": "even",
        "mean_split": True, "outer": "row", "sums": "fast", "rht_signs": "none", "scale_error": "mae",
        "scale_bound": 448, "dequantized": True,
    }  # fmt: skip
    assert {field.name for field in fields(Treatment)} - {"format", "element"} == set(changes)
    treatments = [plain, *(replace(plain, **{name: value}) for name, value in changes.items())]
    assert len({describe_options(t) for t in treatments}) == len(treatments)
    assert describe_options(fp8) != describe_options(replace(fp8, element="e4m3"))
