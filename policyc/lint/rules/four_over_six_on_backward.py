"""A four_over_six scale is set on a backward product, where it is not applied.

Choosing the better of two scales minimizes the error of a block, but it biases the result. In the forward pass the
lower error is worth it. In the backward pass the bias would add up, as with rounding to nearest. So `four_over_six`
is defined for forward operands only, and backward products ignore it, so the recipe is misleading. Give the forward
product its own recipe with `split` or `@ fprop`.

## Bad

```policy
mlp.* -> nvfp4(scale=four_over_six, sr=grad)
layers[-4:] -> bf16
```

## Good

```policy
mlp.* -> split(fprop=nvfp4(scale=four_over_six), dgrad=nvfp4(sr=grad), wgrad=nvfp4(rht=wgrad, sr=grad))
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
    help = "use it for fprop: split(fprop=nvfp4(scale=four_over_six), dgrad=..., wgrad=...)"
    return context.report_products(_describe_fault, "scale", help=help)


def _describe_fault(recipe: Recipe, gemm: Gemm) -> str | None:
    if gemm is Gemm.FPROP or all(t.scale != "four_over_six" for t in recipe.gemm_treatments(gemm)):
        return None
    return f"four_over_six is not applied to {gemm}"


RULES = (LintRule(code="four-over-six-on-backward", doc=__doc__, check=check),)
