"""Transformer Engine does not support the shape of a GEMM.

Its NVFP4 GEMMs need a contracted size in multiples of 32, other sizes in multiples of 16, and no batch dimension (so
nothing under `vmap`). Its Hadamard transform needs bfloat16, contracted sizes in multiples of 64 and other sizes in
multiples of 128. Other shapes run on another backend, with the same result. Change the sizes, or keep such GEMMs.

Only 4-bit rules are checked, with the limits that `--backend te` uses. Checked only with
a program.

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

from collections.abc import Iterator, Sequence

from policyc.compiler.plan import Plan, gemm_queries
from policyc.language.diagnostics import Severity
from policyc.linter.context import Context
from policyc.linter.finding import Finding
from policyc.linter.products import QuantizedProduct, report_sites
from policyc.linter.rule import LintRule
from policyc.numerics.backends import te
from policyc.numerics.backends.choice import Obstacle


def check(context: Context) -> Iterator[Finding]:
    return report_sites(context, _describe, _suggest)


def _describe(product: QuantizedProduct) -> str | None:
    obstacle = _find_obstacle(product)
    if obstacle is None:
        return None
    return f"{product.gemm} of '{product.site.name}' would run on another backend: {obstacle.reason}"


def _suggest(_: Plan, products: Sequence[QuantizedProduct]) -> str:
    obstacles = (_find_obstacle(product) for product in products)
    remedies = dict.fromkeys(obstacle.remedy for obstacle in obstacles if obstacle is not None)
    return f"with --backend te: {'; '.join(remedies)}"


def _find_obstacle(product: QuantizedProduct) -> Obstacle | None:
    query = next(q for q in gemm_queries(product.site, product.recipe) if q.gemm is product.gemm)
    if any(t.format != "nvfp4" for t in (query.left, query.right)):
        return None
    return te.shape_obstacle(query)


RULES = (LintRule(code="transformer-engine-shape", doc=__doc__, check=check, severity=Severity.NOTE),)
