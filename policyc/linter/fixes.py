"""Applies the fixes of diagnostics to the text of a policy.

If two fixes touch the same place, only the one that is later in the text is applied, so that rules which are moved to
the same place keep their order. The other fix is applied when the fixed text is linted again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policyc.language.diagnostics import Diagnostic, Edit
from policyc.language.loader import LoadedPolicy
from policyc.linter.engine import LintResult

_MAX_ROUNDS = 40  # more than the longest chain of recipes: each round removes one unused recipe from it


@dataclass(frozen=True, slots=True)
class FixedText:
    """A text after its fixes, and the number of fixes applied."""

    text: str
    count: int


def apply_fixes(
    text: str,
    load: Callable[[str], LoadedPolicy],
    check: Callable[[LoadedPolicy], LintResult],
    *,
    unsafe: bool = False,
) -> FixedText:
    """Applies fixes and lints again until nothing is left to fix.

    A round that adds an error, or leads back to an earlier text, is undone.
    """
    count = 0
    text = text.removeprefix("\ufeff")  # the byte order mark: spans do not count it
    loaded = load(text)
    seen = {text}
    for _ in range(_MAX_ROUNDS):
        edits, applied = _select_edits(check(loaded).diagnostics, loaded, unsafe)
        if not applied:
            break
        fixed_text = _apply_edits(text, edits)
        reloaded = load(fixed_text)
        if fixed_text in seen or not _count_codes(reloaded) <= _count_codes(loaded):
            break
        seen.add(fixed_text)
        text, loaded, count = fixed_text, reloaded, count + applied
    return FixedText(text, count)


def _select_edits(
    diagnostics: Sequence[Diagnostic], loaded: LoadedPolicy, unsafe: bool
) -> tuple[list[Edit], int]:
    """Returns edits that do not overlap, in the order of the text, and the number of fixes they belong to."""
    selected: list[Edit] = []
    applied = 0
    for diagnostic in reversed(diagnostics):
        fix = diagnostic.fix
        if fix is None or not (fix.safe or unsafe) or diagnostic.span.source is not loaded.file.source:
            continue
        if not any(_overlaps(edit, selected) for edit in fix.edits):
            for edit in fix.edits:
                insort(selected, edit, key=_start)
            applied += 1
    return selected, applied


def _start(edit: Edit) -> int:
    return edit.span.start


def _overlaps(edit: Edit, selected: list[Edit]) -> bool:
    """Returns whether an edit touches one of the selected edits, which are sorted and do not touch each other."""
    position = bisect_left(selected, edit.span.start, key=_start)
    return any(
        edit.span.start <= other.span.end and other.span.start <= edit.span.end
        for other in selected[max(position - 1, 0) : position + 1]
    )


def _apply_edits(text: str, edits: list[Edit]) -> str:
    parts, end = [], 0
    for edit in edits:
        parts += [text[end : edit.span.start], edit.text]
        end = edit.span.end
    return "".join([*parts, text[end:]])


def _count_codes(loaded: LoadedPolicy) -> Counter[str]:
    return Counter(d.code for d in loaded.diagnostics)
