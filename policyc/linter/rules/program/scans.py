"""Scans that a policy splits."""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Diagnostic
from policyc.linter.context import Context
from policyc.linter.products import MAX_SCAN_PARTS, find_scan_splits
from policyc.linter.rule import Check


def _check_shredded_scan(context: Context) -> Iterator[Diagnostic]:
    for split in find_scan_splits(context):
        if len(split.parts) > MAX_SCAN_PARTS:
            yield Diagnostic(
                span=split.rule.span,
                message=f"the stack of '{split.names[0]}' becomes {len(split.parts)} scans, each compiled separately",
                help="select layers that are next to each other",
                sites=split.names,
            )


def _check_split_scan(context: Context) -> Iterator[Diagnostic]:
    for split in find_scan_splits(context):
        if len(split.parts) > MAX_SCAN_PARTS:
            continue  # a shredded-scan
        parts = [f"{p.start}-{p.stop - 1}" if len(p) > 1 else str(p.start) for p in split.parts]
        phase = f" ({split.phase})" if split.phase != "always" else ""
        yield Diagnostic(
            span=split.rule.span,
            message=f"the stack of '{split.names[0]}' becomes {len(parts)} scans: iterations {', '.join(parts)}{phase}",
            sites=split.names,
        )


CHECKS: dict[str, Check] = {
    "shredded-scan": _check_shredded_scan,
    "split-scan": _check_split_scan,
}
