"""Later rules take every site that a rule matches in this model.

The rule is not shadowed for every model (that is `shadowed-rule`), but in this one it decides about nothing.
Seen only against a program.

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

from policyc.language.diagnostics import Diagnostic, Note
from policyc.lint.context import Context


def check(context: Context) -> Iterator[Diagnostic]:
    plan = context.plan
    if plan is None:
        return
    decided, takers = set[int](), dict[int, set[int]]()
    for phase in plan.phases:
        for decision in plan.decisions(phase).values():
            for choice in decision.choices:
                if choice.rule is not None:
                    decided.add(choice.rule)
                    for beaten in choice.overridden:
                        takers.setdefault(beaten, set()).add(choice.rule)
    for at, rule in enumerate(plan.policy.rules):
        if plan.counts[at] and at not in decided:
            later = sorted(takers.get(at, ()))
            yield from context.report(
                "overridden-rule",
                rule.span,
                f"later rules take all {plan.counts[at]} sites of this rule in this model",
                "move it below what overrides it, or remove it",
                notes=tuple(Note(plan.policy.rules[i].span, "this one is later") for i in later[:3]),
            )
