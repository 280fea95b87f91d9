"""A condition can never hold.

No GEMM satisfies it, so the rule matches nothing. `m`, `n`, `k`, `batch` and `flops` are at least 1. A site is at most
one of `mlp`, `attention`, `scores`, `router`, `embedding`, `head` and `conv`: where you mean both `mlp` and `head`,
write `mlp or head`. `layer` is compared for stacks of any depth. Correct the condition, or remove the rule.

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

from policyc.language.kinds import KINDS
from policyc.language.predicates import Flag, leaves
from policyc.linter.automata import SearchTooLarge
from policyc.linter.context import Context
from policyc.linter.finding import Finding
from policyc.linter.rule import LintRule
from policyc.linter.samples import count_evaluations, sample_attributes

_MAX_EVALUATIONS = 400_000  # comparisons evaluated for all conditions of a policy
_COST_OF_FAILURE = 20_000  # comparisons evaluated in the time after which a search gives up


def check(context: Context) -> Iterator[Finding]:
    remaining = _MAX_EVALUATIONS
    for rule in context.rules:
        if rule.where is None:
            continue
        try:
            cost = count_evaluations((rule.where,)) if remaining > 0 else remaining + 1
            is_undecided = cost > remaining
            remaining -= 0 if is_undecided else cost
            is_possible = is_undecided or any(rule.where.holds(a) for a in sample_attributes((rule.where,)))
        except SearchTooLarge:
            is_undecided = is_possible = True
            remaining -= _COST_OF_FAILURE
        context.undecided += is_undecided
        if not is_possible:
            has_kinds = any(isinstance(leaf, Flag) and leaf.name in KINDS for leaf in leaves(rule.where))
            help = "check which kinds exclude each other" if has_kinds else "check its numbers"
            yield Finding(span=rule.where.span, message="no GEMM satisfies this condition", help=help)


RULES = (LintRule(code="impossible-predicate", doc=__doc__, check=check),)
