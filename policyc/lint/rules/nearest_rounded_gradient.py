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

from policyc.language.recipes import Role
from policyc.lint.context import Context
from policyc.lint.finding import Finding
from policyc.lint.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    for applied, gemm, role, treatment in context.operand_treatments():
        if role is Role.GRADIENT and treatment.bits == 4 and treatment.rounding == "rne":
            yield context.report_option(
                applied,
                gemm,
                "sr",
                message=f"the gradient of {gemm} is rounded to nearest in {treatment.format}",
                help="add sr=grad",
                replacement="sr=grad",
            )


RULES = (LintRule(code="nearest-rounded-gradient", doc=__doc__, check=check),)
