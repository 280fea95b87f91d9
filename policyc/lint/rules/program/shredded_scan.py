"""A rule splits a scanned stack into many scans.

Each part of a split scan is compiled by itself, so that compilation takes longer with every part. Two or three are what
layer slices are for; more are reported. Seen only against a program.

## Bad

```policy
layers[::2].mlp -> fp8
```

## Good

```policy
layers[:-4].mlp -> fp8
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Diagnostic
from policyc.lint import program
from policyc.lint.context import Context

_MOST = 3


def check(context: Context) -> Iterator[Diagnostic]:
    for split in program.splits(context):
        if len(split.parts) > _MOST:
            yield from context.report(
                "shredded-scan",
                split.rule.span,
                f"the stack of '{split.name}' becomes {len(split.parts)} scans, each compiled by itself",
                "choose layers next to each other",
            )
