"""Transformer Engine does not support the shape of a GEMM.

Its NVFP4 GEMMs need a contracted size in multiples of 32, other sizes in multiples of 16, and no batch dimension (so
nothing under `vmap`). Its Hadamard transform needs bfloat16, contracted sizes in multiples of 64 and other sizes in
multiples of 128. Other shapes run on another backend, with the same result. Change the sizes, or keep such GEMMs.

Only 4-bit rules are checked, once for each site, with the limits that `--backend te` uses. Checked only with
`--against`.

## Bad

```policy
* -> nvfp4(rht=wgrad, sr=grad)
```

## Good

```policy
* -> nvfp4(rht=wgrad, sr=grad)
* where k % 32 != 0 -> keep
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.compiler.plan import gemm_queries
from policyc.language.diagnostics import Severity
from policyc.lint.context import Context
from policyc.lint.program import quantized_products
from policyc.lint.rule import Finding, LintRule
from policyc.numerics.backends import te
from policyc.numerics.backends.choice import GemmQuery


def check(context: Context) -> Iterator[Finding]:
    seen: set[tuple[int, str]] = set()
    for product in quantized_products(context):
        name, gemm = product.site.name, product.gemm
        query = next(q for q in gemm_queries(product.site, product.recipe) if q.gemm is gemm)
        obstacle = _find_obstacle(query)
        if obstacle and (product.rule_index, name) not in seen:
            seen.add((product.rule_index, name))
            yield Finding(
                span=context.policy.rules[product.rule_index].span,
                message=f"{gemm} of '{name}' would run on another backend: {obstacle}",
            )


def _find_obstacle(query: GemmQuery) -> str:
    """Returns why Transformer Engine does not support a 4-bit product, or ""."""
    if any(t.format != "nvfp4" for t in (query.left, query.right)):
        return ""
    obstacle = te.misfit(query)
    return obstacle.reason if obstacle else ""


RULES = (LintRule(code="transformer-engine-shape", doc=__doc__, check=check, severity=Severity.NOTE),)
