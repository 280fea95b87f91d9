"""MS-EDEN rounding is set on the forward product, where it is not applied.

MS-EDEN accepts a larger error to remove the bias, and the forward pass does not need that. So MS-EDEN is defined for
backward operands only, and fprop is rounded to nearest, so the recipe is misleading. Give the backward products their
own recipe with `split` or `@ bwd`.

## Bad

```policy
mlp.* -> nvfp4(rounding=ms_eden)
layers[-4:] -> bf16
```

## Good

```policy
mlp.* -> split(fprop=nvfp4, dgrad=nvfp4(rounding=ms_eden), wgrad=nvfp4(rounding=ms_eden))
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
    help = "use it for the backward products: split(fprop=nvfp4, dgrad=..., wgrad=...)"
    return context.report_products(_describe_fault, "rounding", help=help)


def _describe_fault(recipe: Recipe, gemm: Gemm) -> str | None:
    if gemm is not Gemm.FPROP or all(t.rounding != "ms_eden" for t in recipe.gemm_treatments(gemm)):
        return None
    return "MS-EDEN is not applied to fprop, which is rounded to nearest"


RULES = (LintRule(code="ms-eden-on-forward", doc=__doc__, check=check),)
