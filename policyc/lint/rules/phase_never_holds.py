"""A phase of the schedule never comes.

`after` holds from its step on, `until` before it. `until 0`, `after 100%`, or an `until` inside a later
`after` leave no step at all: the rules in them are never in force.

## Bad

```policy
mlp.* -> fp8
after 90% { until 50% { mlp.* -> bf16 } }
```

## Good

```policy
mlp.* -> fp8
after 50% { until 90% { mlp.* -> bf16 } }
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Diagnostic
from policyc.language.schedule import representative_steps
from policyc.lint.context import Context


def check(context: Context) -> Iterator[Diagnostic]:
    for rule in context.rules:
        if rule.when and not any(
            all(w.holds(*moment) for w in rule.when) for moment in representative_steps(rule.when)
        ):
            yield from context.report(
                "phase-never-holds",
                rule.when[-1].span,
                f"no step is {' and '.join(map(str, rule.when))}",
                "'after' holds from its step on, 'until' before it",
            )
