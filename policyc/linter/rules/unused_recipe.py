"""A recipe is defined but never used.

No rule, recipe or variant names it. Perhaps a rule was meant to use it. Use the recipe, or remove it. A policy that
imports this file may use it too, so only `--unsafe-fixes` removes it.

A file without rules is a library of recipes and is not checked.

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

from policyc.language.diagnostics import Fix
from policyc.language.policy import recipe_calls
from policyc.linter.context import Context
from policyc.linter.edits import remove_statement
from policyc.linter.finding import Finding
from policyc.linter.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    policy = context.policy
    rules = [*policy.rules, *(r for v in policy.variants for r in v.rules)]
    definitions = [*policy.recipes, *(d for v in policy.variants for d in v.recipes)]
    nodes = [*(r.recipe for r in rules), *(d.recipe for d in definitions)]
    used = {call.name for node in nodes for call in recipe_calls(node)}
    for definition in policy.recipes if rules else ():
        if definition.name not in used:
            yield Finding(
                span=definition.span,
                message=f"nothing uses the recipe '{definition.name}'",
                help="use it or remove it",
                fix=Fix(message="remove the recipe", edits=(remove_statement(definition.span),), safe=False),
            )


RULES = (LintRule(code="unused-recipe", doc=__doc__, check=check),)
