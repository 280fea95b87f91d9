"""A variant does not change the policy.

Its seed and its recipes are equal to those that they replace, and its rules repeat existing ones. A sweep would train
the same policy twice. Remove the variant, or correct it.

## Bad

```policy
recipe nv = fp8
mlp.* -> nv
variant e5m2 { recipe nv = fp8(grad=e5m2) }
```

## Good

```policy
recipe nv = fp8
mlp.* -> nv
variant e4m3 { recipe nv = fp8(grad=e4m3) }
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.policy import Variant
from policyc.linter.context import Context
from policyc.linter.coverage import Coverage
from policyc.linter.finding import Finding
from policyc.linter.rule import LintRule

_MAX_WORK = 200_000  # rules times variants


def check(context: Context) -> Iterator[Finding]:
    policy = context.policy
    if len(policy.rules) * len(policy.variants) > _MAX_WORK:
        context.undecided += len(policy.variants)
        return
    for variant in policy.variants:
        if context.in_this_file(variant.span) and not _changes_policy(context, variant):
            yield Finding(
                span=variant.span,
                message=f"the variant '{variant.name}' does not change the policy",
                help="remove it or correct it",
            )


def _changes_policy(context: Context, variant: Variant) -> bool:
    before, after = context.policy, context.policy.variant(variant.name)
    resolve_before, resolve_after = before.resolver(), after.resolver()
    if before.seed != after.seed:
        return True
    if any(resolve_before(r.recipe) != resolve_after(r.recipe) for r in before.rules):
        return True
    coverage = Coverage(after.rules, lambda rule: resolve_after(rule.recipe))
    added_rules = coverage.rules[len(before.rules) :]
    changes = any(coverage.find_equivalent_earlier_rule(rule) is None for rule in added_rules)
    context.undecided += coverage.undecided
    return changes


RULES = (LintRule(code="idle-variant", doc=__doc__, check=check),)
