"""A Hadamard transform is put on fprop or dgrad.

In wgrad the transform spreads outliers over tokens, where they are. In fprop and dgrad it gives nothing that
was ever measured, costs a pass over the operands, and keeps a weight from having one set of codes for both.

## Bad

```policy
mlp.* -> nvfp4(rht=all, sr=grad)
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
from policyc.language.recipes import Gemm
from policyc.lint.context import Context


def check(context: Context) -> Iterator[Diagnostic]:
    for applied in context.applied:
        for gemm in (Gemm.FPROP, Gemm.DGRAD):
            operands = applied.recipe.gemm_treatments(gemm)
            rotated = any(t.rht and t.rounding != "ms_eden" for t in operands)
            tiled = any(t.rht and t.tile2d for t in operands)  # hadamard-on-2d-weight says more about those
            if gemm in applied.products and rotated and not tiled:
                yield from context.blame(
                    "hadamard-outside-wgrad",
                    applied,
                    gemm,
                    "rht",
                    f"{gemm} is rotated",
                    "rotate wgrad only: rht=wgrad",
                    better="rht=wgrad",
                )
