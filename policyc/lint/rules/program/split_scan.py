"""A rule splits a scanned stack into several scans.

A scan has one body for all its layers. Where a policy treats layers differently, it becomes consecutive scans, each
with a body of its own: results are the same, and compilation takes a little longer. Nothing is wrong with that: it is
said so that a cut in an unexpected place is seen. Seen only against a program.

## Bad

```policy
layers[3:-4].mlp -> fp8  # three parts, where the first three layers were not meant to differ
```

## Good

```policy
layers[:-4].mlp -> fp8
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Diagnostic, Severity
from policyc.lint import program
from policyc.lint.context import Context

SEVERITY = Severity.NOTE
_SHOWN = 6


def check(context: Context) -> Iterator[Diagnostic]:
    for split in program.splits(context):
        shown = ", ".join(
            f"{p.start}-{p.stop - 1}" if len(p) > 1 else str(p.start) for p in split.parts[:_SHOWN]
        )
        more = ", ..." if len(split.parts) > _SHOWN else ""
        during = f" ({split.phase})" if split.phase != "always" else ""
        yield from context.report(
            "split-scan",
            split.rule.span,
            f"the stack of '{split.name}' becomes {len(split.parts)} scans: layers {shown}{more}{during}",
        )
