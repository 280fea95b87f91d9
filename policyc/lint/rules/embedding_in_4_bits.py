"""The embedding is put in 4 bits.

Where a model looks tokens up by a matrix product with one-hot rows, its embedding is a GEMM like any other,
and a catch-all rule takes it. It costs next to no time and everything passes through it.

Decided by the names that models commonly have: yours may have others.

## Bad

```policy
embed_tokens -> nvfp4(sr=grad)
layers[-4:] -> bf16
```

## Good

```policy
embed_tokens -> bf16
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Diagnostic
from policyc.lint.context import Context
from policyc.lint.sensitive import caught, exception


def check(context: Context) -> Iterator[Diagnostic]:
    for rule, names in caught(context, "embedding"):
        yield from context.report(
            "embedding-in-4-bits",
            rule.span,
            f"this rule puts the embedding ('{names[0]}') in 4 bits",
            f"add a rule after it: {exception(names)}",
        )
