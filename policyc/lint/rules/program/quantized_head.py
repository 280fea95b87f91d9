"""A rule quantizes the output head of this model to 8 bits or fewer.

The head computes the logits from the last hidden state. It is a few percent of the FLOPs, and its errors go directly
into the loss. Published recipes keep it in high precision. Add a rule that keeps it.

The head is recognized by its name, by a weight that it shares with the embedding, or as the last and widest GEMM of
the loss. Checked only with `--against`.

## Bad

```policy
* -> fp8
```

## Good

```policy
* -> fp8
lm_head -> keep
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.lint.context import Context
from policyc.lint.finding import Finding
from policyc.lint.program import find_quantizing_rules, is_head
from policyc.lint.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    for rule, site in find_quantizing_rules(context, lambda s: is_head(context, s)):
        yield Finding(
            span=rule.span,
            message=f"this rule quantizes the output head ('{site.name}')",
            help="add a rule after it that keeps the head",
        )


RULES = (LintRule(code="quantized-head", doc=__doc__, check=check),)
