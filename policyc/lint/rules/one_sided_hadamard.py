"""Only one operand of a product has a Hadamard transform, so the product is wrong.

A Hadamard transform along the contraction cancels out if both operands go through it. With one transformed operand it
does not cancel: the result is a different number, not a less precise one. Transform both operands or none.

## Bad

```policy
mlp.* -> nvfp4(rht=wgrad.grad, sr=grad)
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

from policyc.language.diagnostics import Severity
from policyc.language.recipes import Gemm, Recipe
from policyc.lint.context import Context
from policyc.lint.finding import Finding
from policyc.lint.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    help = "transform both or none: rht=wgrad"
    return context.report_products(_describe_fault, "rht", help=help, replacement="rht=wgrad")


def _describe_fault(recipe: Recipe, gemm: Gemm) -> str | None:
    left, right = recipe.gemm_treatments(gemm)
    return None if left.rht == right.rht else f"only one operand of {gemm} has a Hadamard transform"


RULES = (LintRule(code="one-sided-hadamard", doc=__doc__, check=check, severity=Severity.ERROR),)
