"""A recipe is defined and never used.

No rule, recipe or variant names it: perhaps a rule was meant to. A file without rules is a library of
recipes, and may hold more than anyone uses. `--fix` removes the definition.

## Bad

```policy
recipe nv = fp8(grad=e4m3)
mlp.* -> fp8
```

## Good

```policy
recipe nv = fp8(grad=e4m3)
mlp.* -> nv
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Diagnostic, Fix
from policyc.language.policy import recipe_calls
from policyc.lint.context import Context, removal


def check(context: Context) -> Iterator[Diagnostic]:
    policy = context.policy
    rules = [*policy.rules, *(r for v in policy.variants for r in v.rules)]
    defs = [*policy.recipes, *(d for v in policy.variants for d in v.recipes)]
    written = [*(r.recipe for r in rules), *(d.recipe for d in defs)]
    named = {u.name for node in written for u in recipe_calls(node)}
    for definition in policy.recipes if rules else ():
        if definition.name not in named:
            yield from context.report(
                "unused-recipe",
                definition.span,
                f"nothing uses the recipe '{definition.name}'",
                "use it or remove it",
                fix=Fix(message="remove the recipe", edits=(removal(definition.span),), safe=True),
            )
