"""A rule quantizes the embedding of this model to 8 bits.

Some models look up tokens by a GEMM with one-hot rows. A broad rule matches this GEMM too. It takes almost no time,
and every token passes through it. Add a rule that keeps it.

The embedding is recognized by its one-hot operand or by its name. In 4 bits it is an `embedding-in-4-bits`. Checked
only with `--against`.

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

from policyc.compiler.plan_checks import suggest_recipe
from policyc.lint.context import Context
from policyc.lint.finding import Finding
from policyc.lint.program import EIGHT_BITS, count_others, find_quantizing_rules, is_embedding, name_sites
from policyc.lint.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    if context.plan is None:
        return
    for rule, sites in find_quantizing_rules(context, is_embedding, EIGHT_BITS):
        names = name_sites(sites)
        yield Finding(
            span=context.policy.rules[rule].span,
            message=f"this rule quantizes the embedding ('{names[0]}'){count_others(names)}",
            help=suggest_recipe(context.plan, rule, sites, "keep"),
            sites=names,
        )


RULES = (LintRule(code="quantized-embedding", doc=__doc__, check=check),)
