"""A condition can never hold.

No GEMM has sizes that satisfy it, so the rule matches nothing. `m`, `n`, `k`, `batch` and `flops` are at least 1.
Correct the numbers, or remove the rule.

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

from policyc.lint.automata import SearchTooLarge
from policyc.lint.context import Context
from policyc.lint.coverage import count_evaluations, sample_attributes
from policyc.lint.finding import Finding
from policyc.lint.rule import LintRule

_MAX_EVALUATIONS = 400_000  # comparisons evaluated for all conditions of a policy


def check(context: Context) -> Iterator[Finding]:
    remaining = _MAX_EVALUATIONS
    for rule in context.rules:
        if rule.where is None:
            continue
        try:
            cost = count_evaluations((rule.where,))
            is_undecided = cost > remaining
            remaining -= 0 if is_undecided else cost
            is_possible = is_undecided or any(rule.where.holds(a) for a in sample_attributes((rule.where,)))
        except SearchTooLarge:
            is_undecided = is_possible = True
        context.undecided += is_undecided
        if not is_possible:
            yield Finding(
                span=rule.where.span, message="no GEMM satisfies this condition", help="check its numbers"
            )


RULES = (LintRule(code="impossible-predicate", doc=__doc__, check=check),)
