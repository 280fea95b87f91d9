"""A rule changes a GEMM that the compiler cannot reach.

The body of a function with its own backward rule (`jax.custom_vjp`), of a Pallas kernel, or of a container that
the compiler does not know is not entered: what it computes there is not what a gradient runs. Rather than
skip such a GEMM, `policyc apply` refuses to run. Keep it explicitly.

## Bad

```policy
* -> fp8
```

## Good

```policy
* -> fp8
cross_entropy -> keep
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.compiler.plan_checks import inseparable_layers, opaque_sites
from policyc.language.diagnostics import Diagnostic, Severity
from policyc.lint.context import Context

SEVERITY = Severity.ERROR


def check(context: Context) -> Iterator[Diagnostic]:
    if context.plan is not None:
        found = (*opaque_sites(context.plan), *inseparable_layers(context.plan))
        yield from (d for d in found if context.mine(d.span))
