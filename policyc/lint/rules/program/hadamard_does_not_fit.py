"""The contracted size is not a multiple of the Hadamard transform's length.

The transform runs over whole groups along the contracted size, which is m in wgrad. If that size is not a multiple of
the length, zeros are added. Transformer Engine does not accept such shapes at all: it needs rows in multiples of 64
and columns in multiples of 128. Use a shorter transform, or keep such sites. Checked only with `--against`.

## Bad

```policy
* -> nvfp4(rht=wgrad, rht_size=128, sr=grad)
```

## Good

```policy
* -> nvfp4(rht=wgrad, sr=grad)
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.lint.context import Context
from policyc.lint.finding import Finding
from policyc.lint.program import QuantizedProduct, contracted_size, report_sites
from policyc.lint.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    return report_sites(context, _describe)


def _describe(product: QuantizedProduct) -> tuple[str, str] | None:
    length = max(t.rht for t in product.recipe.gemm_treatments(product.gemm))
    dimension, size = contracted_size(product.site, product.gemm)
    if not length or size % length == 0:
        return None
    message = (
        f"{dimension} = {size} of '{product.site.name}' is not a multiple of {length}, "
        f"the length of the Hadamard transform in {product.gemm}"
    )
    return message, "use a shorter transform, or keep such sites"


RULES = (LintRule(code="hadamard-does-not-fit", doc=__doc__, check=check),)
