"""What a recipe means for each operand, once its options have met the rules that bind them.

In: a `Recipe` as it was written. Out: one whose treatments can be carried out as they stand. The one trap:
a 2D-scaled weight has one set of codes, so whatever fprop does to it, dgrad does too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from policyc.language.recipes import OPERANDS, Gemm, Recipe, Role, Treatment


def problems(recipe: Recipe) -> tuple[str, ...]:
    """What is wrong with a recipe: each a sentence."""
    found = []
    for gemm in Gemm:
        first, second = (_bound(recipe, gemm, role) for g, role in OPERANDS if g is gemm)
        if first.rht != second.rht:
            found.append(
                f"{gemm} rotates one operand by {first.rht or 'nothing'} and the other by "
                f"{second.rht or 'nothing'}: rht must name both or neither"
            )
        if any(t.tile2d and t.rht for t in (first, second)):
            found.append(f"{gemm} rotates a weight that has 2D scales: leave it out of rht or of scale2d")
    return tuple(found)


@cache
def effective(recipe: Recipe) -> Recipe:
    """The recipe to carry out.

    MS-EDEN and four-over-six speak of backward and of forward operands only, an outer scale per row is not
    for 2D tiles, and a 2D-scaled weight is the same in dgrad as in fprop.
    """
    wrong = problems(recipe)
    if wrong:
        raise ValueError("; ".join(wrong))
    return Recipe(tuple(_bound(recipe, gemm, role) for gemm, role in OPERANDS))


def _bound(recipe: Recipe, gemm: Gemm, role: Role) -> Treatment:
    t = recipe.of(gemm, role)
    forward = recipe.of(Gemm.FPROP, Role.WEIGHT)
    both_2d = t.tile2d and forward.tile2d and forward.format == t.format
    if (gemm, role) == (Gemm.DGRAD, Role.WEIGHT) and both_2d and t.rounding != "ms_eden":
        return _bound(recipe, Gemm.FPROP, Role.WEIGHT)
    if t.rounding == "ms_eden" and gemm is Gemm.FPROP:
        t = replace(t, rounding="rne", rht=0)
    if t.rounding == "ms_eden":
        t = replace(t, tile2d=False)
    if t.scale == "four_over_six" and (gemm is not Gemm.FPROP or t.rounding != "rne"):
        t = replace(t, scale="amax")
    return replace(t, outer="tensor") if t.tile2d else t
