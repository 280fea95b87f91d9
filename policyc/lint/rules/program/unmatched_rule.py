"""A rule matches no site of the model.

A misspelled name, or a name that another framework uses, matches nothing, and the sites that the rule was written for
stay as they are. Correct the name: the message suggests real paths of the program. If a rule is meant for other
models, write `expect 0`.

A rule that quantizes to 8 bits or fewer is an error, and `policyc apply` refuses to run it. Any other rule is a
warning. The first loss of the program is checked, with `--against` only: `policyc lint POLICY --against SCRIPT`.

## Bad

```policy
mpl.* -> fp8
```

## Good

```policy
mlp.* -> fp8
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.compiler.plan_checks import unmatched_quantizing_rules, unmatched_rules
from policyc.language.diagnostics import Severity
from policyc.lint.context import Context
from policyc.lint.finding import Finding
from policyc.lint.program import FIRST_LOSS_HINT, to_findings
from policyc.lint.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    if context.plan is None:
        return
    quantizing = tuple(unmatched_quantizing_rules(context.plan, hint=FIRST_LOSS_HINT))
    others = (d for d in unmatched_rules(context.plan) if d.span not in {q.span for q in quantizing})
    yield from to_findings(quantizing, Severity.ERROR)
    yield from to_findings(others)


RULES = (LintRule(code="unmatched-rule", doc=__doc__, check=check),)
