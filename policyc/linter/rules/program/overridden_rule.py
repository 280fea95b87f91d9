"""Later rules override a rule on all of its sites in this model.

For another model the rule could have an effect (otherwise it is a `shadowed-rule`), but in this one it decides
nothing. Move it below the rules that override it, or remove it. A common cause is a slice of layers, such as
`layers[-4:]`, in a model that has no more layers than that: a percentage (`layers[-15%:]`) leaves some in any model.

If the rule quantizes, and a slice or a condition is part of the reason, it is an error: `policyc apply` refuses to run
instead of quantizing nothing. Checked with a program and when a loss is compiled.

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

from policyc.compiler.idle_rules import find_deciding_rules, idle_rules
from policyc.compiler.plan import Plan
from policyc.language.diagnostics import Note
from policyc.linter.context import Context
from policyc.linter.finding import Finding
from policyc.linter.products import name_sites
from policyc.linter.rule import LintRule

_CODE = "overridden-rule"
_MAX_NOTES = 3


def check(context: Context) -> Iterator[Finding]:
    plan = context.plan
    if plan is None:
        return
    deciding, overriding = find_deciding_rules(plan)
    refused = {d.span: d for d in idle_rules(plan) if d.code == _CODE}
    for index, rule in enumerate(plan.policy.rules):
        if index in deciding or index not in overriding:  # without a phase, a rule is not overridden either
            continue
        if not context.coverage.find_overriding_rules(context.coverage.rules[index]):  # else a shadowed-rule
            count, diagnostic = plan.counts[index], refused.get(rule.span)
            sites = f"all of its {count} sites" if count > 1 else "its only site"
            later = sorted(overriding[index])[:_MAX_NOTES]
            yield Finding(
                span=rule.span,
                message=diagnostic.message
                if diagnostic
                else f"later rules override this rule on {sites} in this model",
                help=diagnostic.help
                if diagnostic
                else "move it below the rules that override it, or remove it",
                notes=tuple(Note(plan.policy.rules[i].span, "this rule is later") for i in later),
                sites=_name_matched_sites(plan, index),
                severity=diagnostic.severity if diagnostic else None,
            )


def _name_matched_sites(plan: Plan, rule: int) -> tuple[str, ...]:
    return name_sites(s for s in plan.sites if any(plan.matched[s.address, la][rule] for la in s.layers()))


RULES = (LintRule(code=_CODE, doc=__doc__, check=check),)
