"""A rule puts the embedding of this model in 8 bits or fewer.

An embedding that is looked up by a product with one-hot rows is a GEMM like any other, and a broad rule takes it.
It costs next to no time, and everything passes through it. Seen only against a program, in which such a product
is known by its operand or by its name.

## Bad

```policy
* -> fp8
```

## Good

```policy
* -> fp8
*embed* -> keep
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Diagnostic
from policyc.lint import program
from policyc.lint.context import Context


def check(context: Context) -> Iterator[Diagnostic]:
    for rule, site in program.caught(context, lambda s: s.one_hot or program.named(s, "embedding")):
        yield from context.report(
            "quantized-embedding",
            rule.span,
            f"this rule quantizes the embedding ('{site.name}')",
            "add a rule behind it that keeps it",
        )
