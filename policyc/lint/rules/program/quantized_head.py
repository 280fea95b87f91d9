"""A rule puts the output head of this model in 8 bits or fewer.

The head turns the last hidden state into logits. Published recipes keep it in high precision; it is a few
percent of the FLOPs and its errors go straight into the loss. Seen only against a program, in which it is known by its
name, by sharing its weight with the embedding, or as the last and widest GEMM of the loss.

## Bad

```policy
* -> fp8
```

## Good

```policy
* -> fp8
lm_head -> keep
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Diagnostic
from policyc.lint import program
from policyc.lint.context import Context


def check(context: Context) -> Iterator[Diagnostic]:
    for rule, site in program.caught(context, lambda s: program.is_head(context, s)):
        yield from context.report(
            "quantized-head",
            rule.span,
            f"this rule quantizes the output head ('{site.name}')",
            "add a rule behind it that keeps it",
        )
