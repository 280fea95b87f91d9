"""Normalizes recipes: applies the rules that connect the options of the six operands.

A 2D-scaled operand has one set of codes, so both GEMMs that read it must treat it alike.
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
        elif first.rht and (first.has_random_signs, first.rht_signs) != (
            second.has_random_signs,
            second.rht_signs,
        ):
            problems.append(
                f"{gemm} rotates its operands by different signs: rht_signs must be the same for both"
            )
        if any(t.tile2d and t.rht for t in (first, second)):
            problems.append(
                f"{gemm} rotates an operand that has 2D scales: leave it out of rht or of scale2d"
            )
    for gemm, role in (operand for operand in OPERANDS if recipe.treatment(*operand).dequantized):
        t = _normalize_treatment(recipe, Gemm.FPROP, role)
        if t.format == "keep" or t.is_random or t.rht or t.mean_split or t.outer == "row":
            problems.append(
                f"{gemm} decodes the {role} that fprop reads (backward=dequantized), which must be rounded to nearest, "
                "without rht, mean_split, outer=row or keep"
            )
    return tuple(problems)


@cache
def normalize_recipe(recipe: Recipe, *, has_weight: bool = True) -> Recipe:
    """Returns the recipe to carry out. Raises ValueError if it has problems.

    MS-EDEN applies only to dgrad and wgrad, four-over-six only to operands of fprop that are rounded to nearest. An
    outer scale per row does not apply to 2D tiles. An outer scale is shared only by weights that are rounded to nearest
    and not rotated. A 2D-scaled weight is treated in dgrad as it is in fprop; so are an activation in wgrad, and a
    gradient in wgrad as in dgrad. In a product of two activations, fprop treats both as its activation. Then dgrad has
    no shared scale, and 2D scales only if activations have them.
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
    tile2d = dgrad.tile2d and treatments[Gemm.FPROP, Role.ACTIVATION].tile2d
    treatments[Gemm.DGRAD, Role.WEIGHT] = replace(dgrad, tile2d=tile2d, outer=outer)
    return Recipe(tuple(treatments.values()))


def _normalize_treatment(recipe: Recipe, gemm: Gemm, role: Role) -> Treatment:
    treatment = recipe.treatment(gemm, role)
    first_gemm = Gemm.DGRAD if role is Role.GRADIENT else Gemm.FPROP
    first = recipe.treatment(first_gemm, role)
    both_2d = treatment.tile2d and first.tile2d and first.format == treatment.format
    if gemm is not first_gemm and both_2d and treatment.rounding != "ms_eden":
        return _normalize_treatment(recipe, first_gemm, role)
    if treatment.rounding == "ms_eden" and gemm is Gemm.FPROP:
        treatment = replace(treatment, rounding="rne", rht=0)
    if treatment.rounding == "ms_eden":
        treatment = replace(treatment, tile2d=False)
    if treatment.scale == "four_over_six" and (gemm is not Gemm.FPROP or treatment.rounding != "rne"):
        treatment = replace(treatment, scale="amax")
    if treatment.scale == "amax":
        treatment = replace(treatment, scale_error="mse", scale_bound=256)
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
        return ("dequantized",) if treatment.dequantized else ()
    rows = format.block if treatment.tile2d else 1
    is_per_row = treatment.outer == "row" and not format.block
    words = {
        f"{rows}x{format.block}" if format.block else "row" if is_per_row else "tensor": True,
        treatment.element: "grad" in format.options,
        f"rht{treatment.rht}": treatment.rht > 0,
        f"rht_signs={treatment.rht_signs}": treatment.rht_signs != "fixed",
        treatment.rounding: treatment.rounding != "rne",
        treatment.scale: treatment.scale != "amax",
        f"scale_error={treatment.scale_error}": treatment.scale_error != "mse",
        f"scale_bound={treatment.scale_bound}": treatment.scale_bound != 256,
        f"scale_rounding={treatment.scale_rounding}": treatment.scale_rounding != "floor",
        "mean_split": treatment.mean_split,
        f"outer={treatment.outer}": treatment.outer != "tensor" and not is_per_row,
        f"sums={treatment.sums}": treatment.sums != "fp32",
        "dequantized": treatment.dequantized,
    }
    return tuple(word for word, applies in words.items() if applies)


def describe_treatment(treatment: Treatment) -> str:
    """Returns the format of a treatment and its options: `nvfp4 16x16`, `nvfp4 1x16 rht16 sr`."""
    return " ".join((treatment.format, *describe_options(treatment)))
