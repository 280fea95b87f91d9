"""Weights or activations are rounded stochastically.

Stochastic rounding removes the bias of gradients, at the price of twice the error. The forward pass gains nothing
from it and pays the price: runs with stochastic weights or activations end clearly worse. Round only gradients
stochastically.

## Bad

```policy
mlp.* -> nvfp4(sr=all)
layers[-4:] -> bf16
```

## Good

```policy
mlp.* -> nvfp4(sr=grad)
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
        if treatment.rounding == "sr" and role is not Role.GRADIENT:
            yield context.report_option(
                applied,
                gemm,
                "sr",
                message=f"the {role} of {gemm} is rounded stochastically",
                help="round only gradients stochastically: sr=grad",
                replacement="sr=grad",
            )


RULES = (LintRule(code="stochastic-rounding-off-gradients", doc=__doc__, check=check),)
