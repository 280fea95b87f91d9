"""A rule matches no site of the model.

A name that is misspelt, or that another framework uses, selects nothing, and what it should have changed is kept
as it is. Seen only against a program (`policyc lint POLICY --against SCRIPT`), whose real paths it suggests.

## Bad

```policy
mpl.* -> fp8
```

## Good

```policy
mlp.* -> fp8
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.compiler.plan_checks import unmatched_rules
from policyc.language.diagnostics import Diagnostic
from policyc.lint.context import Context


def check(context: Context) -> Iterator[Diagnostic]:
    if context.plan is not None:
        yield from (d for d in unmatched_rules(context.plan) if context.mine(d.span))
