"""A 4-bit gradient is rounded to nearest.

Small gradients then vanish in the same direction every step, and the error adds up over a run. Use stochastic
rounding (`sr=grad`) or, in `nvfp4`, `rounding=ms_eden` on the backward products. On small models the
difference can drown in noise; on long runs it does not.

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

from policyc.language.diagnostics import Diagnostic
from policyc.language.recipes import Role
from policyc.lint.context import Context


def check(context: Context) -> Iterator[Diagnostic]:
    for applied, gemm, role, treatment in context.operands():
        if role is Role.GRADIENT and treatment.bits == 4 and treatment.rounding == "rne":
            yield from context.blame(
                "nearest-rounded-gradient",
                applied,
                gemm,
                "sr",
                f"the gradient of {gemm} is rounded to nearest in {treatment.format}",
                "add sr=grad",
                better="sr=grad",
            )
