"""Later rules take every site of a rule: it does nothing.

Later rules override earlier ones, so an exception goes after what it excepts. A rule that is overridden
everywhere is most often an exception written too early.

This is decided on the sets that the selectors stand for, not on their text: several rules may cover one
together, by path, index, product, condition or phase. Where a policy is too large for that, `policyc lint`
says how many questions it left open.

`--fix` removes the rule, unless it has an `expect`, which still counts sites.

## Bad

```policy
layers[-4:].mlp.* -> bf16
mlp.* -> fp8
```

## Good

```policy
mlp.* -> fp8
layers[-4:].mlp.* -> bf16
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Diagnostic, Fix, Note
from policyc.lint.context import Context, removal


def check(context: Context) -> Iterator[Diagnostic]:
    for claim in context.cover.claims:
        taken = context.cover.taken_by(claim) if context.mine(claim.rule.span) else ()
        if taken:
            same = all(t.recipe == claim.recipe for t in taken)
            help = "remove it" if same else "move it below what overrides it, or remove it"
            safe = claim.rule.expect is None
            yield from context.report(
                "shadowed-rule",
                claim.rule.span,
                "no site is left to this rule: later rules take them all",
                help,
                notes=tuple(Note(t.rule.span, f"this one gives {t.rule.recipe}") for t in taken[:3]),
                fix=Fix(message="remove the rule", edits=(removal(claim.rule.span),), safe=safe),
            )
