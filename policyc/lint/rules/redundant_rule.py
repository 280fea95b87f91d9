"""A rule gives its sites what they have already.

An earlier rule covers this one whole, with a recipe that does the same to every product, and nothing between
the two says otherwise. The policy means the same without it, and so do its variants.

`--fix` removes the rule, unless it has an `expect`, which still counts sites.

## Bad

```policy
mlp.* -> fp8
mlp.up -> fp8
```

## Good

```policy
mlp.* -> fp8
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Diagnostic, Fix, Note
from policyc.lint.context import Context, removal


def check(context: Context) -> Iterator[Diagnostic]:
    for claim in context.cover.claims:
        earlier = context.redundant(claim) if context.mine(claim.rule.span) else None
        if earlier is not None and not context.cover.taken_by(claim):
            yield from context.report(
                "redundant-rule",
                claim.rule.span,
                "this rule changes nothing",
                "remove it",
                notes=(Note(earlier.rule.span, "its sites have this recipe from here"),),
                fix=Fix(
                    message="remove the rule",
                    edits=(removal(claim.rule.span),),
                    safe=claim.rule.expect is None,
                ),
            )
