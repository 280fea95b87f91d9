"""A rule splits a scanned stack into several scans.

A scan has one body for all its layers. If a policy treats layers differently, the scan becomes consecutive scans,
each with its own body. The results are the same, and compilation takes a little longer. This is not a fault: the note
makes a split at an unexpected layer visible. If you did not intend it, correct the slice. More than three parts are
reported as `shredded-scan`. Checked only with a program.

## Bad

```policy
layers[3:-4].mlp -> fp8  # three parts, although the first three layers were not meant to differ
```

## Good

```policy
layers[:-4].mlp -> fp8
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Severity
from policyc.linter.context import Context
from policyc.linter.finding import Finding
from policyc.linter.products import MAX_SCAN_PARTS, find_scan_splits
from policyc.linter.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    for split in find_scan_splits(context):
        if len(split.parts) > MAX_SCAN_PARTS:
            continue  # a shredded-scan
        parts = [f"{p.start}-{p.stop - 1}" if len(p) > 1 else str(p.start) for p in split.parts]
        phase = f" ({split.phase})" if split.phase != "always" else ""
        yield Finding(
            span=split.rule.span,
            message=f"the stack of '{split.names[0]}' becomes {len(parts)} scans: iterations {', '.join(parts)}{phase}",
            sites=split.names,
        )


RULES = (LintRule(code="split-scan", doc=__doc__, check=check, severity=Severity.NOTE),)
