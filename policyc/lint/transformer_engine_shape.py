"""Transformer Engine does not take the shape of a GEMM.

Its NVFP4 GEMMs want a contracted size that is a multiple of 32 and no batch dimension (so nothing under `vmap`); its
Hadamard transform wants bfloat16 with rows in multiples of 64 and columns in multiples of 128. Other shapes run by
another backend, with the same result. Said of 4-bit rules only, once for each site. Seen only against a program.

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

from policyc.diagnostics import Diagnostic, Severity
from policyc.lint import graph
from policyc.lint.context import Context
from policyc.recipes import Gemm, Recipe
from policyc.sites import Site

SEVERITY = Severity.NOTE
_CONTRACTED, _ROWS, _COLUMNS = 32, 64, 128


def check(context: Context) -> Iterator[Diagnostic]:
    seen: set[tuple[int, str]] = set()
    for at, site, gemm, recipe in graph.quantized(context):
        found = next(_misfits(site, gemm, recipe), "")
        if found and (at, site.name) not in seen:
            seen.add((at, site.name))
            yield from context.report(
                "transformer-engine-shape",
                context.policy.rules[at].span,
                f"Transformer Engine does not take {gemm} of '{site.name}': {found}",
            )


def _misfits(site: Site, gemm: Gemm, recipe: Recipe) -> Iterator[str]:
    treatments = recipe.product(gemm)
    if any(t.format != "nvfp4" for t in treatments):
        return
    letter, size = graph.contracted(site, gemm)
    if size % _CONTRACTED:
        yield f"{letter} = {size} is no multiple of {_CONTRACTED}"
    if site.batch > 1:
        yield f"it has a batch of {site.batch}"
    if not any(t.rht for t in treatments):
        return
    if any(str(a.aval.dtype) != "bfloat16" for a in site.eqn.invars[:2]):
        yield "the Hadamard transform wants bfloat16"
    rows = {"m": site.m, "k": site.k, "n": site.n}
    if size % _ROWS:
        yield f"the Hadamard transform wants {letter} = {size} to be a multiple of {_ROWS}"
    for other in (name for name in rows if name != letter):
        if rows[other] % _COLUMNS:
            yield f"the Hadamard transform wants {other} = {rows[other]} to be a multiple of {_COLUMNS}"
