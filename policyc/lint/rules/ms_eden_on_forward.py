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

from policyc.language.recipes import Gemm
from policyc.lint.context import Context
from policyc.lint.finding import Finding
from policyc.lint.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    for applied in context.applied_recipes:
        is_set = any(t.rounding == "ms_eden" for t in applied.recipe.gemm_treatments(Gemm.FPROP))
        if Gemm.FPROP in applied.products and is_set:
            yield context.report_option(
                applied,
                Gemm.FPROP,
                "rounding",
                message="MS-EDEN is not applied to fprop, which is rounded to nearest",
                help="use it for the backward products: split(fprop=nvfp4, dgrad=..., wgrad=...)",
            )


RULES = (LintRule(code="ms-eden-on-forward", doc=__doc__, check=check),)
