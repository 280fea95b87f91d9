"""A variant changes nothing.

A sweep would spend a run on the same policy twice: its recipes are what they were, and its rules repeat what
holds.

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

from policyc.language.diagnostics import Diagnostic
from policyc.language.policy import Variant
from policyc.lint.context import Context
from policyc.lint.coverage import Cover

_MOST_WORK = 200_000  # rules times variants


def check(context: Context) -> Iterator[Diagnostic]:
    policy = context.policy
    if len(policy.rules) * len(policy.variants) > _MOST_WORK:
        context.undecided += len(policy.variants)
        return
    for variant in policy.variants:
        if context.mine(variant.span) and not _changes(context, variant):
            yield from context.report(
                "idle-variant",
                variant.span,
                f"the variant '{variant.name}' is the policy itself",
                "remove or mend it",
            )


def _changes(context: Context, variant: Variant) -> bool:
    before, after = context.policy, context.policy.variant(variant.name)
    old, new = before.resolver(), after.resolver()
    if any(old(r.recipe) != new(r.recipe) for r in before.rules):
        return True
    cover = Cover(after.rules, lambda rule: new(rule.recipe))
    return any(cover.repeats(claim) is None for claim in cover.claims[len(before.rules) :])
