"""A rule matches a different number of sites than it expects.

`expect N` states how many GEMMs a rule matches, counting every layer of a stack. The numbers differ if the model has
grown a layer, or if a name matches more than intended. `policyc apply` refuses to run such a policy. Correct the
selector or the number. Checked with a program and when a loss is compiled.

## Bad

```policy
mlp.* -> fp8 expect 97
```

## Good

```policy
mlp.* -> fp8 expect 96
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.compiler.plan_checks import unmet_expectations
from policyc.language.diagnostics import Severity
from policyc.linter.context import Context
from policyc.linter.finding import Finding
from policyc.linter.products import FIRST_LOSS_HINT, to_findings
from policyc.linter.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    if context.plan is not None:
        yield from to_findings(unmet_expectations(context.plan, hint=FIRST_LOSS_HINT))


RULES = (LintRule(code="expect-violated", doc=__doc__, check=check, severity=Severity.ERROR),)
