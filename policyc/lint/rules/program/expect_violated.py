"""A rule matches another number of sites than it expects.

`expect N` says how many GEMMs a rule is about, every layer of a stack counted. A model that has grown a layer, or
a name that catches more than was meant, shows here before anything runs. `policyc apply` refuses to run then.

## Bad

```policy
mlp.* -> fp8 expect 97
```

## Good

```policy
mlp.* -> fp8 expect 96
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.compiler.plan_checks import unmet_expectations
from policyc.language.diagnostics import Diagnostic, Severity
from policyc.lint.context import Context

SEVERITY = Severity.ERROR


def check(context: Context) -> Iterator[Diagnostic]:
    if context.plan is not None:
        yield from (d for d in unmet_expectations(context.plan) if context.mine(d.span))
