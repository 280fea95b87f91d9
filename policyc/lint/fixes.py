"""Applies the fixes of diagnostics to a text.

In: a text and what lint found in it. Out: the mended text. The one trap: fixes may touch the same place; the
first one wins, and the others get their turn when the mended text is linted again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from policyc.language.diagnostics import Diagnostic, Edit
from policyc.language.loader import LoadedPolicy
from policyc.lint.engine import Findings

_ROUNDS = 40  # more than recipes can name each other in a chain


@dataclass(frozen=True, slots=True)
class Mended:
    """A text after its fixes, and how many were applied."""

    text: str
    count: int


def mend(
    text: str,
    load: Callable[[str], LoadedPolicy],
    check: Callable[[LoadedPolicy], Findings],
    *,
    unsafe: bool = False,
) -> Mended:
    """Fix, lint again, until there is nothing left to fix. A round that brings a new fault is undone."""
    count = 0
    text = text.removeprefix("\ufeff")  # spans do not count it
    loaded = load(text)
    for _ in range(_ROUNDS):
        edits, applied = _choose(check(loaded).diagnostics, loaded, unsafe)
        if not applied:
            break
        changed = _apply(text, edits)
        after = load(changed)
        if not _codes(after) <= _codes(loaded):
            break
        text, loaded, count = changed, after, count + applied
    return Mended(text, count)


def _choose(found: Iterable[Diagnostic], loaded: LoadedPolicy, unsafe: bool) -> tuple[list[Edit], int]:
    chosen: list[Edit] = []  # in the order of the text
    applied = 0
    for diagnostic in found:
        fix = diagnostic.fix
        if fix is None or not (fix.safe or unsafe) or diagnostic.span.source is not loaded.file.source:
            continue
        if not any(_overlaps(edit, chosen) for edit in fix.edits):
            for edit in fix.edits:
                insort(chosen, edit, key=_start)
            applied += 1
    return chosen, applied


def _start(edit: Edit) -> int:
    return edit.span.start


def _overlaps(edit: Edit, chosen: list[Edit]) -> bool:
    """Does an edit touch one of those chosen, which do not touch each other?"""
    at = bisect_left(chosen, edit.span.start, key=_start)
    return any(
        edit.span.start <= other.span.end and other.span.start <= edit.span.end
        for other in chosen[max(at - 1, 0) : at + 1]
    )


def _apply(text: str, edits: list[Edit]) -> str:
    parts, at = [], 0
    for edit in edits:
        parts += [text[at : edit.span.start], edit.text]
        at = edit.span.end
    return "".join([*parts, text[at:]])


def _codes(loaded: LoadedPolicy) -> Counter[str]:
    return Counter(d.code for d in loaded.diagnostics)
