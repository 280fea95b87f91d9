"""The contracted size of a quantized GEMM is not a multiple of the block.

Blocks of 16 (NVFP4) or 32 (MX formats) run along the contracted size: k in fprop, n in dgrad, m in wgrad. If that
size is not a multiple of the block, zeros are added. The result is exact, but the GPU does the work of the larger
size. Keep such GEMMs, or change the size. Checked only with a program.

## Bad

```policy
* -> mxfp8
```

## Good

```policy
* -> mxfp8
* where k % 32 != 0 -> keep
```
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from policyc.compiler.plan import Plan
from policyc.language.formats import FORMATS
from policyc.linter.context import Context
from policyc.linter.finding import Finding
from policyc.linter.products import QuantizedProduct, report_sites, suggest_keeping
from policyc.linter.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    return report_sites(context, _describe, _suggest)


def _describe(product: QuantizedProduct) -> str | None:
    block, (dimension, size) = _block_size(product), product.contracted
    if not block or size % block == 0:
        return None
    padding = -size % block
    return (
        f"{dimension} = {size} of '{product.site.name}' is padded to {size + padding} in {product.gemm} "
        f"({padding / size:.0%} more work)"
    )


def _suggest(plan: Plan, products: Sequence[QuantizedProduct]) -> str:
    uneven = dict.fromkeys(f"{p.contracted[0]} % {_block_size(p)} != 0" for p in products)
    return f"change the size, or {suggest_keeping(plan, products, ' or '.join(uneven))}"


def _block_size(product: QuantizedProduct) -> int:
    return max(FORMATS[t.format].block for t in product.recipe.gemm_treatments(product.gemm))


RULES = (LintRule(code="padded-gemm", doc=__doc__, check=check),)
