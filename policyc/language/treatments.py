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
def normalize_recipe(recipe: Recipe) -> Recipe:
    """Returns the recipe to carry out. Raises ValueError if it has problems.

    MS-EDEN applies to backward products only, four-over-six to forward products only. An outer scale per row does
    not apply to 2D tiles. A 2D-scaled weight is treated in dgrad as it is in fprop.
    """
    problems = find_recipe_problems(recipe)
    if problems:
        raise ValueError("; ".join(problems))
    return Recipe(tuple(_normalize_treatment(recipe, gemm, role) for gemm, role in OPERANDS))


def normalize_if_valid(recipe: Recipe) -> Recipe:
    """Returns the recipe to carry out, or the recipe as written if it has problems."""
    return recipe if find_recipe_problems(recipe) else normalize_recipe(recipe)


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
    if treatment.tile2d and treatment.outer == "row":
        treatment = replace(treatment, outer="tensor")
    return treatment


def treatment_words(treatment: Treatment) -> tuple[str, ...]:
    """What a treatment does beyond its format, in short words. Different treatments have different words.

    `1x16` is a scale per 16 elements, `2D` one per square tile.
    """
    format = FORMATS[treatment.format]
    if not format.is_quantized:
        return ()
    words = [treatment.element] if treatment.element else []
    if treatment.tile2d:
        words.append("2D")
    elif format.block:
        words.append(f"1x{format.block}")
    if treatment.rht:
        words.append(f"rht{treatment.rht}")
    if treatment.rounding != "rne":
        words.append(treatment.rounding)
    if treatment.headroom != 1:
        words.append(f"headroom {treatment.headroom}")
    if treatment.scale != "amax":
        words.append(treatment.scale)
    if format.scale == "e8m0" and treatment.scale_rounding != "floor":
        words.append(treatment.scale_rounding)
    if treatment.mean_split:
        words.append("mean split")
    if format.tensor_scale:
        words.append(f"outer {treatment.outer}")
    return tuple(words)
