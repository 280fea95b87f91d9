"""A condition can never hold.

No sizes meet it. `m`, `n`, `k`, `batch` and `flops` are at least 1.

## Bad

```policy
mlp.* where k > 4096 and k < 1024 -> bf16
```

## Good

```policy
mlp.* where k > 1024 and k < 4096 -> bf16
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Diagnostic
from policyc.lint.automata import TooHard
from policyc.lint.context import Context
from policyc.lint.coverage import sites, trials

_MOST_TRIALS = 200_000  # sizes tried, for all the conditions of a policy


def check(context: Context) -> Iterator[Diagnostic]:
    left = _MOST_TRIALS
    for rule in context.rules:
        if rule.where is None:
            continue
        try:
            left -= trials((rule.where,))
            possible = left < 0 or any(rule.where.holds(site) for site in sites((rule.where,)))
            context.undecided += left < 0
        except TooHard:
            context.undecided += 1
            continue
        if not possible:
            yield from context.report(
                "impossible-predicate", rule.where.span, "no GEMM meets this condition", "check its numbers"
            )
