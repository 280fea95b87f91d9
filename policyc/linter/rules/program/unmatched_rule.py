"""A rule matches no site of the model.

A misspelled name, or a name that another framework uses, matches nothing, and the sites that the rule was written for
stay as they are. Correct the name: the message suggests real paths of the program. If a rule is meant for other
models, write `expect 0`.

A rule that quantizes to 8 bits or fewer is an error, and so is one that protects layers by index from rules that
quantize, such as `layers[-4:].* -> bf16`: `policyc apply` refuses to run them. Any other rule is a warning. The first
loss of the program is checked, with `policyc lint POLICY PROGRAM` and when a loss is compiled.

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

from policyc.compiler.idle_rules import idle_rules
from policyc.linter.context import Context
from policyc.linter.finding import Finding
from policyc.linter.products import FIRST_LOSS_HINT, to_findings
from policyc.linter.rule import LintRule

_CODE = "unmatched-rule"


def check(context: Context) -> Iterator[Finding]:
    if context.plan is not None:
        idle = idle_rules(context.plan, hint=FIRST_LOSS_HINT)
        yield from to_findings(d for d in idle if d.code == _CODE)


RULES = (LintRule(code=_CODE, doc=__doc__, check=check),)
