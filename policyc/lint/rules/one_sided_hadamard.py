"""Only one operand of a product is rotated: the product is wrong.

A Hadamard transform along the contraction cancels out because both operands go through it. On one of them
alone it does not cancel: the result is another number, not a less precise one.

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

from policyc.language.diagnostics import Diagnostic, Severity
from policyc.language.recipes import Gemm
from policyc.lint.context import Context

SEVERITY = Severity.ERROR


def check(context: Context) -> Iterator[Diagnostic]:
    for applied in context.applied:
        for gemm in (g for g in Gemm if g in applied.products):
            first, second = applied.recipe.gemm_treatments(gemm)
            if first.rht != second.rht:
                yield from context.blame(
                    "one-sided-hadamard",
                    applied,
                    gemm,
                    "rht",
                    f"one operand of {gemm} is rotated and the other is not",
                    "rotate both or none: rht=wgrad",
                    better="rht=wgrad",
                )
