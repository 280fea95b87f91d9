"""A Hadamard transform is applied in fprop or dgrad.

In wgrad the transform runs along the tokens and spreads their outliers. In fprop and dgrad no benefit has been
measured. There it costs a pass over the operands, and a weight can no longer share its codes between fprop and dgrad.
Transform wgrad only.

## Bad

```policy
mlp.* -> nvfp4(rht=all, sr=grad)
layers[-4:] -> bf16
```

## Good

```policy
mlp.* -> nvfp4(rht=wgrad, sr=grad)
layers[-4:] -> bf16
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.recipes import Gemm, Recipe
from policyc.lint.context import Context
from policyc.lint.finding import Finding
from policyc.lint.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    help = "transform wgrad only: rht=wgrad"
    return context.report_products(_describe_fault, "rht", help=help, replacement="rht=wgrad")


def _describe_fault(recipe: Recipe, gemm: Gemm) -> str | None:
    operands = recipe.gemm_treatments(gemm)
    has_transform = any(t.rht and t.rounding != "ms_eden" for t in operands)
    has_2d_weight = any(t.rht and t.tile2d for t in operands)  # reported by hadamard-on-2d-weight
    if gemm is Gemm.WGRAD or has_2d_weight or not has_transform:
        return None
    return f"{gemm} has a Hadamard transform"


RULES = (LintRule(code="hadamard-outside-wgrad", doc=__doc__, check=check),)
