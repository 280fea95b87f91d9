"""A weight has both a Hadamard transform and 2D scales.

2D scales exist so that a weight and its transpose share their codes. A transform along one axis breaks this: the
transpose would need a transform along the other axis. Transform wgrad only, which has no weight operand.

## Bad

```policy
mlp.* -> nvfp4(rht={dgrad,wgrad}, sr=grad, scale2d=weights)
layers[-4:] -> bf16
```

## Good

```policy
mlp.* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)
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
    help = "transform wgrad only, which has no weight: rht=wgrad"
    return context.report_products(_describe_fault, "rht", help=help, replacement="rht=wgrad")


def _describe_fault(recipe: Recipe, gemm: Gemm) -> str | None:
    if gemm is Gemm.WGRAD:  # it has no weight
        return None
    weight = recipe.treatment(gemm, Role.WEIGHT)
    has_both = weight.rht and weight.tile2d
    return f"the weight of {gemm} has 2D scales and a Hadamard transform" if has_both else None


RULES = (LintRule(code="hadamard-on-2d-weight", doc=__doc__, check=check),)
