"""Weights or activations are rounded at random.

Stochastic rounding keeps gradients unbiased, at the price of twice the error. In the forward pass there is no
average to protect, only the price: runs with stochastic weights or activations end clearly worse.

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

from policyc.language.diagnostics import Diagnostic
from policyc.language.recipes import Role
from policyc.lint.context import Context


def check(context: Context) -> Iterator[Diagnostic]:
    for applied, gemm, role, treatment in context.operands():
        if treatment.rounding == "sr" and role is not Role.GRADIENT:
            yield from context.blame(
                "stochastic-rounding-off-gradients",
                applied,
                gemm,
                "sr",
                f"the {role} of {gemm} is rounded at random",
                "round gradients at random, all else to nearest: sr=grad",
                better="sr=grad",
            )
