"""Which recipes a server can run: what it has no format for, and the edit of the policy that would do."""

from __future__ import annotations

from policyc.language.formats import FORMATS
from policyc.language.recipes import Gemm, Recipe, Treatment
from policyc.serving.formats import BLOCK, BOUNDS


def find_obstacle(recipe: Recipe | None, k: int) -> str:
    """Why the forward GEMM of a recipe has no counterpart in a server, and the edit that would do; empty if it has one.

    A linear whose forward GEMM is not quantized is stored as it is. `k` is the length of the contracted dimension.
    """
    if recipe is None:
        return ""
    activation, weight = recipe.gemm_treatments(Gemm.FPROP)
    if weight.format == activation.format and not FORMATS[weight.format].is_quantized:
        return ""
    roundings = (weight.rounding, activation.rounding)
    obstacles = {
        f"servers here read nvfp4 and fp8, not {weight.format}: write nvfp4 or fp8": weight.format
        not in BOUNDS,
        "fprop rounds stochastically, which no server does: write sr=grad": "sr" in roundings,
        "fprop rotates its operands, which loaders do not: write rht=wgrad": bool(
            weight.rht or activation.rht
        ),
        "fprop splits off the mean of x, which no server does: leave out mean_split": activation.mean_split,
        "the weight has a scale per row, and files have one per tensor: write outer=tensor": weight.outer
        == "row",
        "the activation has 16x16 tiles, and servers have 1x16 blocks: write scale2d=weights": activation.tile2d,
        f"K is {k}, and blocks of {BLOCK} must fill it: write bf16 where k % {BLOCK} != 0": (
            weight.format == "nvfp4" and k % BLOCK != 0
        ),
    }
    return next((text for text, applies in obstacles.items() if applies), "")


def is_served_quantized(recipe: Recipe | None) -> bool:
    """Whether the weight of the forward GEMM is stored as codes."""
    return recipe is not None and FORMATS[_weight(recipe).format].is_quantized


def served_format(recipe: Recipe | None) -> str:
    """The format of the stored weight; empty if it is stored as it is."""
    return _weight(recipe).format if recipe is not None and is_served_quantized(recipe) else ""


def _weight(recipe: Recipe) -> Treatment:
    return recipe.gemm_treatments(Gemm.FPROP)[1]
