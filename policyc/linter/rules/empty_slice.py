"""A slice selects no layer of any stack.

Its start is not before its end, whatever the depth of the stack, so the rule matches nothing. Exchange the two
numbers, or remove the rule.

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

from policyc.linter.automata import example_index
from policyc.linter.context import Context
from policyc.linter.finding import Finding
from policyc.linter.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    for rule in context.rules:
        for segment in (s for selector in rule.selectors for s in selector.segments):
            if segment.indices is not None and example_index(segment.indices) is None:
                yield Finding(
                    span=segment.indices.span,
                    message=f"{segment.indices} selects no layer of any stack",
                    help="the start must be before the end: [-4:] is the last four, [:4] the first four",
                )


RULES = (LintRule(code="empty-slice", doc=__doc__, check=check),)
