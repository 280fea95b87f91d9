"""A slice takes no layer of any stack.

Its start is not before its end, whatever the depth. The rule can match nothing.

## Bad

```policy
layers[8:4].mlp -> bf16
```

## Good

```policy
layers[4:8].mlp -> bf16
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Diagnostic
from policyc.lint.automata import example
from policyc.lint.context import Context


def check(context: Context) -> Iterator[Diagnostic]:
    for rule in context.rules:
        for segment in (s for selector in rule.selectors for s in selector.segments):
            if segment.indices is not None and example(segment.indices)[0] < 0:
                yield from context.report(
                    "empty-slice",
                    segment.indices.span,
                    f"{segment.indices} takes no layer, however many there are",
                    "the start comes before the end: [-4:] is the last four, [:4] the first four",
                )
