"""A rule splits a scanned stack into many scans.

Each part of a split scan is compiled separately, so compilation takes longer with every part. Two or three parts are
normal for layer slices. More are reported. Select layers that are next to each other. Checked only with a program.

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

from policyc.linter.context import Context
from policyc.linter.finding import Finding
from policyc.linter.products import MAX_SCAN_PARTS, find_scan_splits
from policyc.linter.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    for split in find_scan_splits(context):
        if len(split.parts) > MAX_SCAN_PARTS:
            yield Finding(
                span=split.rule.span,
                message=f"the stack of '{split.names[0]}' becomes {len(split.parts)} scans, each compiled separately",
                help="select layers that are next to each other",
                sites=split.names,
            )


RULES = (LintRule(code="shredded-scan", doc=__doc__, check=check),)
