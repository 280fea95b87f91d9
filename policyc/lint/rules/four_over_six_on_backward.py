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

from policyc.language.recipes import Gemm
from policyc.lint.context import Context
from policyc.lint.finding import Finding
from policyc.lint.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    for applied in context.applied_recipes:
        for gemm in (Gemm.DGRAD, Gemm.WGRAD):
            is_set = any(t.scale == "four_over_six" for t in applied.recipe.gemm_treatments(gemm))
            if gemm in applied.products and is_set:
                yield context.report_option(
                    applied,
                    gemm,
                    "scale",
                    message=f"four_over_six is not applied to {gemm}",
                    help="use it for fprop: split(fprop=nvfp4(scale=four_over_six), dgrad=..., wgrad=...)",
                )


RULES = (LintRule(code="four-over-six-on-backward", doc=__doc__, check=check),)
