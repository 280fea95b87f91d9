"""A rule quantizes the output head of this model to 8 bits.

The head computes the logits from the last hidden state. It is a few percent of the FLOPs, and its errors go directly
into the loss. Published recipes keep it in high precision. Add a rule that keeps it.

The head is recognized by its name, by a weight that it shares with the embedding, or as the last and widest GEMM of
the loss. In 4 bits it is a `head-in-4-bits`. Checked only with a program.

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

from policyc.linter.context import Context
from policyc.linter.finding import Finding
from policyc.linter.products import is_head, report_in_8_bits
from policyc.linter.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    return report_in_8_bits(context, lambda site: is_head(context, site), "output head")


RULES = (LintRule(code="quantized-head", doc=__doc__, check=check),)
