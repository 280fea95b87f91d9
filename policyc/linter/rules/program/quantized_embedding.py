"""A rule quantizes the embedding of this model to 8 bits.

Some models look up tokens by a GEMM with one-hot rows. A broad rule matches this GEMM too. It takes almost no time,
and every token passes through it. Add a rule that keeps it.

The embedding is recognized by its one-hot operand or by its name. In 4 bits it is an `embedding-in-4-bits`. Checked
only with a program.

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

from policyc.linter.context import Context
from policyc.linter.finding import Finding
from policyc.linter.products import is_embedding, report_in_8_bits
from policyc.linter.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    return report_in_8_bits(context, is_embedding, "embedding")


RULES = (LintRule(code="quantized-embedding", doc=__doc__, check=check),)
