"""The score products of attention are put in 4 bits.

`softmax(q k) v` is two GEMMs without a parameter. A rule over all of attention, or over everything, takes
them along with the projections; their error goes through an exponential. `where weight` leaves them out.

Decided by the names that models commonly have: yours may have others.

## Bad

```policy
attention.* -> nvfp4(sr=grad)
layers[-4:] -> bf16
```

## Good

```policy
attention.* where weight -> nvfp4(sr=grad)
layers[-4:] -> bf16
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Diagnostic
from policyc.lint.context import Context
from policyc.lint.sensitive import caught


def check(context: Context) -> Iterator[Diagnostic]:
    for rule, names in caught(context, "scores"):
        yield from context.report(
            "attention-scores-in-4-bits",
            rule.span,
            f"this rule puts the score products of attention ('{names[0]}') in 4 bits",
            "add 'where weight' to take the projections only",
        )
