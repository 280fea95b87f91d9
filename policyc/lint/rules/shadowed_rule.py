"""Later rules override a rule on every site, so it has no effect.

Later rules override earlier ones. A rule that is overridden everywhere is often an exception that was written too
early. Move it below the rules that override it, or remove it.

The linter compares the sets of sites that selectors match, not their text. Several later rules may cover a rule
together, by path, index, product, condition or phase. If a policy is too large to decide every case, `policyc lint`
prints how many questions it left open.

`--fix` removes the rule, except if it has an `expect`, which still counts sites.

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

from policyc.language.diagnostics import Fix, Note
from policyc.lint.context import Context
from policyc.lint.edits import remove_statement
from policyc.lint.finding import Finding
from policyc.lint.rule import LintRule

_MAX_NOTES = 3


def check(context: Context) -> Iterator[Finding]:
    for rule in (r for r in context.coverage.rules if context.in_this_file(r.rule.span)):
        overriding = context.coverage.find_overriding_rules(rule)
        if overriding:
            has_same_recipe = all(later.recipe == rule.recipe for later in overriding)
            edits = (remove_statement(rule.rule.span),)
            yield Finding(
                span=rule.rule.span,
                message="this rule has no effect: later rules override it on every site",
                help="remove it"
                if has_same_recipe
                else "move it below the rules that override it, or remove it",
                notes=tuple(
                    Note(later.rule.span, f"this rule sets {later.rule.recipe}")
                    for later in overriding[:_MAX_NOTES]
                ),
                fix=Fix(message="remove the rule", edits=edits, safe=rule.rule.expect is None),
            )


RULES = (LintRule(code="shadowed-rule", doc=__doc__, check=check),)
