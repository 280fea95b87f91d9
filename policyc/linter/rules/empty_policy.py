"""A policy contains nothing.

It has no rule, no recipe and no variant, so every GEMM stays as it is. The file may have been cut off, or its rules
are all comments. To keep every GEMM on purpose, write that.

## Bad

```policy
# mlp.* -> fp8
```

## Good

```policy
* -> keep
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Span
from policyc.linter.context import Context
from policyc.linter.finding import Finding
from policyc.linter.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    policy = context.policy
    if not (policy.rules or policy.recipes or policy.variants):
        span = Span(policy.source, 0, 0)
        yield Finding(
            span=span, message="this policy contains nothing", help="write '* -> keep' if it is meant"
        )


RULES = (LintRule(code="empty-policy", doc=__doc__, check=check),)
