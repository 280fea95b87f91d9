"""Applies the fixes of diagnostics to a text.

In: a text and what lint found in it. Out: the mended text. The one trap: fixes may touch the same place; the
first one wins, and the others get their turn when the mended text is linted again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from policyc.diagnostics import Diagnostic, Edit
from policyc.lint import Findings
from policyc.loader import Loaded

_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Mended:
    """A text after its fixes, and how many were applied."""

    text: str
    count: int


def mend(
    text: str, load: Callable[[str], Loaded], check: Callable[[Loaded], Findings], *, unsafe: bool = False
) -> Mended:
    """Fix, lint again, until there is nothing left to fix. A round that leaves more faults than it found is undone."""
    count = 0
    loaded = load(text)
    for _ in range(_ROUNDS):
        edits, applied = _choose(check(loaded).diagnostics, loaded, unsafe)
        if not applied:
            break
        changed = _apply(text, edits)
        after = load(changed)
        if len(after.found) > len(loaded.found):
            break
        text, loaded, count = changed, after, count + applied
    return Mended(text, count)


def _choose(found: Iterable[Diagnostic], loaded: Loaded, unsafe: bool) -> tuple[list[Edit], int]:
    chosen: list[Edit] = []
    applied = 0
    for diagnostic in found:
        fix = diagnostic.fix
        if fix is None or not (fix.safe or unsafe) or diagnostic.span.source is not loaded.file.source:
            continue
        if not any(_overlap(e, c) for e in fix.edits for c in chosen):
            chosen += fix.edits
            applied += 1
    return chosen, applied


def _overlap(one: Edit, other: Edit) -> bool:
    a, b = one.span, other.span
    return a.start <= b.end and b.start <= a.end


def _apply(text: str, edits: list[Edit]) -> str:
    for edit in sorted(edits, key=lambda e: e.span.start, reverse=True):
        text = text[: edit.span.start] + edit.text + text[edit.span.end :]
    return text
