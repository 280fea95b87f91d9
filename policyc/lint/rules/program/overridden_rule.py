"""Later rules override a rule on all of its sites in this model.

For another model the rule could have an effect (otherwise it is a `shadowed-rule`), but in this one it decides
nothing. Move it below the rules that override it, or remove it. Checked only with `--against`.

## Bad

```policy
mlp.up -> fp8
mlp.* where k > 1024 -> nvfp4(sr=grad)
```

## Good

```policy
mlp.* where k > 1024 -> nvfp4(sr=grad)
mlp.up -> fp8
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.compiler.plan import Plan
from policyc.language.diagnostics import Note
from policyc.lint.context import Context
from policyc.lint.finding import Finding
from policyc.lint.rule import LintRule

_MAX_NOTES = 3


def check(context: Context) -> Iterator[Finding]:
    plan = context.plan
    if plan is None:
        return
    deciding, overriding = _find_deciding_rules(plan)
    for index, rule in enumerate(plan.policy.rules):
        if plan.counts[index] and index not in deciding:
            later = sorted(overriding.get(index, ()))[:_MAX_NOTES]
            yield Finding(
                span=rule.span,
                message=f"later rules override this rule on all of its {plan.counts[index]} sites in this model",
                help="move it below the rules that override it, or remove it",
                notes=tuple(Note(plan.policy.rules[i].span, "this rule is later") for i in later),
            )


def _find_deciding_rules(plan: Plan) -> tuple[set[int], dict[int, set[int]]]:
    """Returns the rules that decide some site, and for each rule those that override it on some site."""
    deciding, overriding = set[int](), dict[int, set[int]]()
    for phase in plan.phases:
        for decision in plan.decisions(phase).values():
            for choice in decision.choices:
                if choice.rule is not None:
                    deciding.add(choice.rule)
                    for overridden in choice.overridden:
                        overriding.setdefault(overridden, set()).add(choice.rule)
    return deciding, overriding


RULES = (LintRule(code="overridden-rule", doc=__doc__, check=check),)
