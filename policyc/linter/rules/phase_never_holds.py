"""A phase of the schedule contains no step.

`after` holds from its step on, `until` holds before its step. `until 0`, `after 100%`, or an `until` inside a later
`after` contain no step, so their rules never apply. Correct the bounds, or remove the block.

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

from policyc.language.schedule import representative_steps
from policyc.linter.context import Context
from policyc.linter.finding import Finding
from policyc.linter.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    for rule in context.rules:
        moments = representative_steps(rule.when)
        if rule.when and not any(all(w.holds(*moment) for w in rule.when) for moment in moments):
            yield Finding(
                span=rule.when[-1].span,
                message=f"no step is {' and '.join(map(str, rule.when))}",
                help="'after' holds from its step on, 'until' holds before its step",
            )


RULES = (LintRule(code="phase-never-holds", doc=__doc__, check=check),)
