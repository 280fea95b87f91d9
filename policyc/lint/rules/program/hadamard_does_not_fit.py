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
from policyc.lint.program import contracted_size, quantized_products
from policyc.lint.rule import Finding, LintRule


def check(context: Context) -> Iterator[Finding]:
    seen: set[tuple[int, str]] = set()
    for product in quantized_products(context):
        name, gemm = product.site.name, product.gemm
        length = max(t.rht for t in product.recipe.gemm_treatments(gemm))
        dimension, size = contracted_size(product.site, gemm)
        if length and size % length and (product.rule_index, name) not in seen:
            seen.add((product.rule_index, name))
            yield Finding(
                span=context.policy.rules[product.rule_index].span,
                message=f"{dimension} = {size} of '{name}' is not a multiple of {length}, "
                f"the length of the Hadamard transform in {gemm}",
                help="use a shorter transform, or keep such sites",
            )


RULES = (LintRule(code="hadamard-does-not-fit", doc=__doc__, check=check),)
