"""A 4-bit format has no block scales.

`fp4` has one scale per tensor: the largest number of the tensor sets the step for all others. Its squared error is
twice that of `nvfp4` on normal numbers, eight times on Laplace's, and more if there are outliers. No GPU multiplies
it, so it is not faster either. It exists for ablations of block scales. Use `nvfp4`, or allow the finding.

## Bad

```policy
mlp.* -> fp4(rht=wgrad, sr=grad)
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

from policyc.language.formats import FORMATS
from policyc.language.recipes import Gemm, Recipe
from policyc.lint.context import Context
from policyc.lint.finding import Finding
from policyc.lint.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    return context.report_products(_describe_fault, "", help="write nvfp4; allow this in an ablation")


def _describe_fault(recipe: Recipe, gemm: Gemm) -> str | None:
    for treatment in recipe.gemm_treatments(gemm):
        if treatment.bits == 4 and not FORMATS[treatment.format].block:
            return f"{treatment.format} has one scale per tensor, which is too coarse for 4 bits"
    return None


RULES = (LintRule(code="no-block-scales", doc=__doc__, check=check),)
