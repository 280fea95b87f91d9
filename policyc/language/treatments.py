"""Normalizes recipes: applies the rules that connect the options of the six operands.

A 2D-scaled weight has one set of codes, so dgrad must treat it exactly as fprop does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from policyc.language.formats import FORMATS
from policyc.language.recipes import OPERANDS, Gemm, Recipe, Role, Treatment


def find_recipe_problems(recipe: Recipe) -> tuple[str, ...]:
    """Returns a sentence for each reason why a recipe cannot be carried out."""
    problems = []
    for gemm in Gemm:
        first, second = (_normalize_treatment(recipe, gemm, role) for g, role in OPERANDS if g is gemm)
        if first.rht != second.rht:
            problems.append(
                f"{gemm} rotates one operand by {first.rht or 'nothing'} and the other by "
                f"{second.rht or 'nothing'}: rht must name both or neither"
            )
        if any(t.tile2d and t.rht for t in (first, second)):
            problems.append(f"{gemm} rotates a weight that has 2D scales: leave it out of rht or of scale2d")
    return tuple(problems)


@cache
def normalize_recipe(recipe: Recipe, *, has_weight: bool = True) -> Recipe:
    """Returns the recipe to carry out. Raises ValueError if it has problems.

    MS-EDEN applies only to dgrad and wgrad, four-over-six only to operands of fprop that are rounded to nearest. An
    outer scale per row does not apply to 2D tiles. An outer scale is shared only by weights that are rounded to nearest
    and not rotated. A 2D-scaled weight is treated in dgrad as it is in fprop. In a product of two activations, fprop
    treats both as its activation, and dgrad has neither 2D scales nor a shared one.
    """
    recipe = recipe if has_weight else _without_weight(recipe)
    problems = find_recipe_problems(recipe)
    if problems:
        raise ValueError("; ".join(problems))
    return Recipe(tuple(_normalize_treatment(recipe, gemm, role) for gemm, role in OPERANDS))


@cache
def normalize_if_valid(recipe: Recipe, *, has_weight: bool = True) -> Recipe:
    """Returns the recipe to carry out, or the recipe as written if it has problems."""
    return recipe if find_recipe_problems(recipe) else normalize_recipe(recipe, has_weight=has_weight)


def _without_weight(recipe: Recipe) -> Recipe:
    treatments = dict(zip(OPERANDS, recipe.treatments, strict=True))
    treatments[Gemm.FPROP, Role.WEIGHT] = treatments[Gemm.FPROP, Role.ACTIVATION]
    dgrad = treatments[Gemm.DGRAD, Role.WEIGHT]
    outer = "tensor" if dgrad.outer == "shared" else dgrad.outer
    treatments[Gemm.DGRAD, Role.WEIGHT] = replace(dgrad, tile2d=False, outer=outer)
    return Recipe(tuple(treatments.values()))


def _normalize_treatment(recipe: Recipe, gemm: Gemm, role: Role) -> Treatment:
    treatment = recipe.treatment(gemm, role)
    forward = recipe.treatment(Gemm.FPROP, Role.WEIGHT)
    both_2d = treatment.tile2d and forward.tile2d and forward.format == treatment.format
    if (gemm, role) == (Gemm.DGRAD, Role.WEIGHT) and both_2d and treatment.rounding != "ms_eden":
        return _normalize_treatment(recipe, Gemm.FPROP, Role.WEIGHT)
    if treatment.rounding == "ms_eden" and gemm is Gemm.FPROP:
        treatment = replace(treatment, rounding="rne", rht=0)
    if treatment.rounding == "ms_eden":
        treatment = replace(treatment, tile2d=False)
    if treatment.scale == "four_over_six" and (gemm is not Gemm.FPROP or treatment.rounding != "rne"):
        treatment = replace(treatment, scale="amax")
    is_fixed = treatment.rounding == "rne" and not treatment.rht
    if (treatment.tile2d and treatment.outer == "row") or (treatment.outer == "shared" and not is_fixed):
        treatment = replace(treatment, outer="tensor")
    return treatment


def describe_options(treatment: Treatment) -> tuple[str, ...]:
    """Describes a treatment, apart from its format, in short words: `1x16`, `rht16`, `sr`.

    The first word is what shares a scale: a block (`1x16`, `16x16`), a `row` or the `tensor`. The element type follows
    if the format has several, then the options that are not at their defaults. Different treatments of the same format
    have different words. A format without scales has no words.
    """
    format = FORMATS[treatment.format]
    if not format.is_quantized:
        return ()
    rows = format.block if treatment.tile2d else 1
    is_per_row = treatment.outer == "row" and not format.block
    words = {
        f"{rows}x{format.block}" if format.block else "row" if is_per_row else "tensor": True,
        treatment.element: "grad" in format.options,
        f"rht{treatment.rht}": treatment.rht > 0,
        treatment.rounding: treatment.rounding != "rne",
        treatment.scale: treatment.scale != "amax",
        f"scale_rounding={treatment.scale_rounding}": treatment.scale_rounding != "floor",
        "mean_split": treatment.mean_split,
        f"outer={treatment.outer}": treatment.outer != "tensor" and not is_per_row,
        f"sums={treatment.sums}": treatment.sums != "fp32",
    }
    return tuple(word for word, applies in words.items() if applies)


def describe_treatment(treatment: Treatment) -> str:
    """Returns the format of a treatment and its options: `nvfp4 16x16`, `nvfp4 1x16 rht16 sr`."""
    return " ".join((treatment.format, *describe_options(treatment)))
