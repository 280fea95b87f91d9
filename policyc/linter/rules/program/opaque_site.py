"""A rule changes a GEMM that the compiler cannot rewrite.

The compiler does not enter a function with its own backward rule (`jax.custom_vjp`), a Pallas kernel, or a container
that it does not know: what the function computes is not what its gradient runs. `policyc apply` refuses to run
instead of skipping such a GEMM silently. Add a rule that keeps it. Checked with a program and when a loss is
compiled.

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
from policyc.language.diagnostics import Severity
from policyc.linter.context import Context
from policyc.linter.finding import Finding
from policyc.linter.products import to_findings
from policyc.linter.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    if context.plan is not None:
        yield from to_findings((*opaque_sites(context.plan), *inseparable_layers(context.plan)))


RULES = (LintRule(code="opaque-site", doc=__doc__, check=check, severity=Severity.ERROR),)
