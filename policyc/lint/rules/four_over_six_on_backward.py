"""four_over_six is asked of a backward product, where it does not apply.

Choosing the better of two scales minimizes the error of a block and thereby biases it. Forward that pays;
backward the bias would add up, as with rounding to nearest. It is defined for forward operands alone, and left
out of backward products: such a recipe says more than it does. Give the forward product a recipe of its own with
`split` or `@ fprop`.

## Bad

```policy
mlp.* -> nvfp4(scale=four_over_six, sr=grad)
layers[-4:] -> bf16
```

## Good

```policy
mlp.* -> split(fprop=nvfp4(scale=four_over_six), dgrad=nvfp4(sr=grad), wgrad=nvfp4(rht=wgrad, sr=grad))
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
        for gemm in (Gemm.DGRAD, Gemm.WGRAD):
            chosen = any(t.scale == "four_over_six" for t in applied.recipe.gemm_treatments(gemm))
            if gemm in applied.products and chosen:
                yield from context.blame(
                    "four-over-six-on-backward",
                    applied,
                    gemm,
                    "scale",
                    f"four_over_six does not apply to {gemm}, and is left out there",
                    "use it for fprop: split(fprop=nvfp4(scale=four_over_six), dgrad=..., wgrad=...)",
                )
