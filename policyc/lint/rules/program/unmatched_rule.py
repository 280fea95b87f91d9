"""A rule matches no site of the model.

A misspelled name, or a name that another framework uses, matches nothing, and the sites that the rule was written for
stay as they are. Correct the name: the message suggests real paths of the program. Checked only with `--against`:
`policyc lint POLICY --against SCRIPT`.

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

from policyc.compiler.plan_checks import unmatched_rules
from policyc.lint.context import Context
from policyc.lint.finding import Finding
from policyc.lint.program import to_findings
from policyc.lint.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    if context.plan is not None:
        yield from to_findings(unmatched_rules(context.plan))


RULES = (LintRule(code="unmatched-rule", doc=__doc__, check=check),)
