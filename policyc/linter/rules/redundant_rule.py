"""A rule gives its sites the recipe that they already have.

An earlier rule matches all sites of this rule, its recipe does the same to every product, and no rule in between does
something else. The policy and its variants mean the same without this rule. Remove it.

`--fix` removes the rule if both rules name the same recipe. If they name recipes that are equal today, or if the rule
has an `expect`, which still counts sites, `--unsafe-fixes` removes it.

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

from policyc.language.diagnostics import Fix, Note
from policyc.linter.context import Context
from policyc.linter.coverage import ResolvedRule
from policyc.linter.edits import remove_statement
from policyc.linter.finding import Finding
from policyc.linter.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    coverage = context.coverage
    local_rules = [r for r in coverage.rules if context.in_this_file(r.rule.span)]
    # Both questions share one budget. Overridden rules come first: they are the more important finding.
    overridden = {r.index for r in local_rules if coverage.find_overriding_rules(r)}
    for rule in local_rules:
        earlier = _find_earlier_rule(context, rule)
        if earlier is not None and rule.index not in overridden:
            edits = (remove_statement(rule.rule.span),)
            is_safe = rule.rule.recipe == earlier.rule.recipe and rule.rule.expect is None
            yield Finding(
                span=rule.rule.span,
                message="this rule changes nothing",
                help="remove it",
                notes=(Note(earlier.rule.span, "its sites have this recipe from here"),),
                fix=Fix(message="remove the rule", edits=edits, safe=is_safe),
            )


def _find_earlier_rule(context: Context, rule: ResolvedRule) -> ResolvedRule | None:
    """Returns an earlier rule that makes a rule redundant, under every variant.

    An earlier rule of this file that is overridden itself does not count: of two rules that make each other
    unnecessary, `--fix` must keep one.
    """
    earlier = context.coverage.find_equivalent_earlier_rule(rule)
    if earlier is None:
        return None
    is_removed = context.in_this_file(earlier.rule.span) and context.coverage.find_overriding_rules(earlier)
    return None if is_removed else earlier


RULES = (LintRule(code="redundant-rule", doc=__doc__, check=check),)
