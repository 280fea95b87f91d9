"""MS-EDEN is asked of the forward product, where it does not apply.

MS-EDEN trades error for the absence of bias, which the forward pass has no use for. It is defined for backward
operands alone, and fprop is rounded to nearest without it: such a recipe says more than it does. Give the backward
products a recipe of their own with `split` or `@ bwd`.

## Bad

```policy
mlp.* -> nvfp4(rounding=ms_eden)
layers[-4:] -> bf16
```

## Good

```policy
mlp.* -> split(fprop=nvfp4, dgrad=nvfp4(rounding=ms_eden), wgrad=nvfp4(rounding=ms_eden))
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
        if Gemm.FPROP in applied.products and any(
            t.rounding == "ms_eden" for t in applied.recipe.gemm_treatments(Gemm.FPROP)
        ):
            yield from context.blame(
                "ms-eden-on-forward",
                applied,
                Gemm.FPROP,
                "rounding",
                "MS-EDEN does not apply to fprop, which is rounded to nearest without it",
                "use it for the backward products: split(fprop=nvfp4, dgrad=..., wgrad=...)",
            )
