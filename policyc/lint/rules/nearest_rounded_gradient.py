"""A 4-bit gradient is rounded to nearest.

Rounding to nearest sets small gradients to zero, with the same bias at every step, and this error adds up over a run.
Use stochastic rounding (`sr=grad`), or `rounding=ms_eden` on the backward products in `nvfp4`. On a small model the
difference may be hidden by noise. On a long run it is not.

## Bad

```policy
mlp.* -> nvfp4(rht=wgrad)
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

from policyc.language.recipes import Gemm, Recipe, Role
from policyc.lint.context import Context
from policyc.lint.finding import Finding
from policyc.lint.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    return context.report_products(_describe_fault, "sr", help="add sr=grad", replacement="sr=grad")


def _describe_fault(recipe: Recipe, gemm: Gemm) -> str | None:
    if gemm is Gemm.FPROP:  # it has no gradient
        return None
    treatment = recipe.treatment(gemm, Role.GRADIENT)
    if treatment.bits != 4 or treatment.rounding != "rne":
        return None
    return f"the gradient of {gemm} is rounded to nearest in {treatment.format}"


RULES = (LintRule(code="nearest-rounded-gradient", doc=__doc__, check=check),)
