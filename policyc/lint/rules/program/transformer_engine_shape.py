"""Transformer Engine does not take the shape of a GEMM.

Its NVFP4 GEMMs want a contracted size that is a multiple of 32, others that are multiples of 16, and no batch dimension
(so nothing under `vmap`); its Hadamard transform wants bfloat16, with contracted sizes in multiples of 64 and others in
multiples of 128. Other shapes run by another backend, with the same result. Said of 4-bit rules only, once for each
site, and with the limits of `--backend te` itself. Seen only against a program.

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
from typing import TYPE_CHECKING

from policyc.compiler.plan import gemm_queries
from policyc.language.diagnostics import Diagnostic, Severity
from policyc.lint import program
from policyc.lint.context import Context

if TYPE_CHECKING:
    from policyc.numerics.backends.choice import GemmQuery

SEVERITY = Severity.NOTE


def check(context: Context) -> Iterator[Diagnostic]:
    seen: set[tuple[int, str]] = set()
    for at, site, gemm, recipe in program.quantized(context):
        ask = next(one for one in gemm_queries(site, recipe) if one.gemm is gemm)
        found = _misfit(ask)
        if found and (at, site.name) not in seen:
            seen.add((at, site.name))
            yield from context.report(
                "transformer-engine-shape",
                context.policy.rules[at].span,
                f"{gemm} of '{site.name}' would run by another backend: {found}",
            )


def _misfit(ask: GemmQuery) -> str:
    from policyc.numerics.backends import te  # imports JAX; a program that is linted has done so before

    if any(t.format != "nvfp4" for t in (ask.left, ask.right)):
        return ""
    found = te.misfit(ask)
    return found.reason if found else ""
