"""The contracted size is not a multiple of the Hadamard transform's length.

The transform runs over whole groups along the contracted size, which is m in wgrad. If that size is not a multiple of
the length, zeros are added. Transformer Engine does not accept such shapes at all: it needs rows in multiples of 64
and columns in multiples of 128. Use a shorter transform, or keep such sites.

A transform that is no longer than a block of the format is not reported: `padded-gemm` reports the same sizes. Checked
only with a program.

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

from collections.abc import Iterator, Sequence

from policyc.compiler.plan import Plan
from policyc.language.formats import FORMATS
from policyc.language.recipes import OPTIONS
from policyc.linter.context import Context
from policyc.linter.finding import Finding
from policyc.linter.products import QuantizedProduct, report_sites, suggest_keeping
from policyc.linter.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    return report_sites(context, _describe, _suggest)


def _describe(product: QuantizedProduct) -> str | None:
    treatments = product.recipe.gemm_treatments(product.gemm)
    length, block = _length(product), max(FORMATS[t.format].block for t in treatments)
    dimension, size = product.contracted
    if length <= block or size % length == 0:  # a size that does not fit the block is a padded-gemm
        return None
    return (
        f"{dimension} = {size} of '{product.site.name}' is not a multiple of {length}, "
        f"the length of the Hadamard transform in {product.gemm}"
    )


def _suggest(plan: Plan, products: Sequence[QuantizedProduct]) -> str:
    """A length that divides all sizes, if the recipe can have one. MS-EDEN has a fixed length."""
    uneven = dict.fromkeys(f"{p.contracted[0]} % {_length(p)} != 0" for p in products)
    keep = suggest_keeping(plan, products, " or ".join(uneven))
    is_fixed = any(t.rounding == "ms_eden" for p in products for t in p.recipe.gemm_treatments(p.gemm))
    lengths = [int(choice) for choice in OPTIONS["rht_size"].choices]
    shorter = [n for n in lengths if all(n < _length(p) and p.contracted[1] % n == 0 for p in products)]
    if shorter and not is_fixed:
        return f"write rht_size={max(shorter)}, or {keep}"
    return f"change the size, or {keep}"


def _length(product: QuantizedProduct) -> int:
    return max(t.rht for t in product.recipe.gemm_treatments(product.gemm))


RULES = (LintRule(code="hadamard-does-not-fit", doc=__doc__, check=check),)
