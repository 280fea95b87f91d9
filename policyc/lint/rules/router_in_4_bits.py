"""The router of a mixture of experts is put in 4 bits.

A router is tiny, and an error in it sends tokens to other experts.

Decided by the names that models commonly have: yours may have others.

## Bad

```policy
moe.* -> nvfp4(sr=grad)
layers[-4:] -> bf16
```

## Good

```policy
moe.* -> nvfp4(sr=grad)
moe.{router,gate} -> bf16
layers[-4:] -> bf16
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Diagnostic
from policyc.lint.context import Context
from policyc.lint.sensitive import caught, exception


def check(context: Context) -> Iterator[Diagnostic]:
    for rule, names in caught(context, "router"):
        yield from context.report(
            "router-in-4-bits",
            rule.span,
            f"this rule puts the router ('{names[0]}') in 4 bits",
            f"add a rule after it: {exception(names)}",
        )
