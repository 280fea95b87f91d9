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
from policyc.lint.program import name_sites
from policyc.lint.rule import LintRule

_MAX_NOTES = 3


def check(context: Context) -> Iterator[Finding]:
    plan = context.plan
    if plan is None:
        return
    deciding, overriding = _find_deciding_rules(plan)
    for index, rule in enumerate(plan.policy.rules):
        if index in deciding or index not in overriding:  # without a phase, a rule is not overridden either
            continue
        if not context.coverage.find_overriding_rules(context.coverage.rules[index]):  # else a shadowed-rule
            count = plan.counts[index]
            sites = f"all of its {count} sites" if count > 1 else "its only site"
            later = sorted(overriding[index])[:_MAX_NOTES]
            yield Finding(
                span=rule.span,
                message=f"later rules override this rule on {sites} in this model",
                help="move it below the rules that override it, or remove it",
                notes=tuple(Note(plan.policy.rules[i].span, "this rule is later") for i in later),
                sites=_name_matched_sites(plan, index),
            )


def _name_matched_sites(plan: Plan, rule: int) -> tuple[str, ...]:
    return name_sites(s for s in plan.sites if any(plan.matched[s.address, la][rule] for la in s.layers()))


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
