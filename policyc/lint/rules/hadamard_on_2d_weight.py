"""A weight is both rotated and scaled in 2D.

2D scales exist so that a weight and its transpose share codes. A rotation along one axis destroys that: the
transpose would have to be rotated along the other.

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

from policyc.language.diagnostics import Diagnostic
from policyc.language.recipes import Role
from policyc.lint.context import Context


def check(context: Context) -> Iterator[Diagnostic]:
    for applied, gemm, role, treatment in context.operands():
        if role is Role.WEIGHT and treatment.rht and treatment.tile2d:
            yield from context.blame(
                "hadamard-on-2d-weight",
                applied,
                gemm,
                "rht",
                f"the 2D-scaled weight of {gemm} is rotated",
                "rotate wgrad only, which has no weight: rht=wgrad",
                better="rht=wgrad",
            )
