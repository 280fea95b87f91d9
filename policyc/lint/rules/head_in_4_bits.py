"""The head is put in 4 bits.

The logits feed the loss directly. Every published recipe keeps the head in high precision.

Decided by the names that models commonly have: yours may have others.

## Bad

```policy
lm_head -> nvfp4(sr=grad)
layers[-4:] -> bf16
```

## Good

```policy
lm_head -> bf16
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Diagnostic
from policyc.lint.context import Context
from policyc.lint.sensitive import caught, exception


def check(context: Context) -> Iterator[Diagnostic]:
    for rule, names in caught(context, "head"):
        yield from context.report(
            "head-in-4-bits",
            rule.span,
            f"this rule puts the head ('{names[0]}') in 4 bits",
            f"add a rule after it: {exception(names)}",
        )
