"""A rule quantizes the embedding of this model to 8 bits or fewer.

Some models look up tokens by a GEMM with one-hot rows. A broad rule matches this GEMM too. It takes almost no time,
and every token passes through it. Add a rule that keeps it.

The embedding is recognized by its one-hot operand or by its name. Checked only with `--against`.

## Bad

```policy
* -> fp8
```

## Good

```policy
* -> fp8
*embed* -> keep
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.lint.context import Context
from policyc.lint.finding import Finding
from policyc.lint.program import find_quantizing_rules, has_name
from policyc.lint.rule import LintRule
from policyc.lint.site_names import EMBEDDING_NAMES


def check(context: Context) -> Iterator[Finding]:
    for rule, site in find_quantizing_rules(context, lambda s: s.one_hot or has_name(s, EMBEDDING_NAMES)):
        yield Finding(
            span=rule.span,
            message=f"this rule quantizes the embedding ('{site.name}')",
            help="add a rule after it that keeps the embedding",
        )


RULES = (LintRule(code="quantized-embedding", doc=__doc__, check=check),)
