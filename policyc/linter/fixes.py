"""Edits of a policy's text that rules suggest, and their application.

If two fixes touch the same place, only the one that is later in the text is applied. The other one is applied when the
fixed text is linted again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policyc.language.diagnostics import Diagnostic, Edit, Span
from policyc.language.loader import LoadedPolicy
from policyc.language.policy import RecipeCall

_MAX_ROUNDS = 40  # more than the longest chain of recipes: each round removes one unused recipe from it


@dataclass(frozen=True, slots=True)
class FixedText:
    """A text after its fixes, and the number of fixes applied."""

    text: str
    count: int


def apply_fixes(
    text: str,
    load: Callable[[str], LoadedPolicy],
    check: Callable[[LoadedPolicy], Sequence[Diagnostic]],
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
        edits, applied = _select_edits(check(loaded), loaded, unsafe)
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


# ---- edits


def set_option(call: RecipeCall, option: str, text: str) -> Edit:
    """Returns the edit that sets an option of a format."""
    setting = next((s for s in call.settings if s.name == option), None)
    if setting is not None:
        return Edit(setting.span, text)
    source, end = call.span.source, call.span.end
    if call.settings:
        last = call.settings[-1].span
        return Edit(Span(source, last.end, last.end), f", {text}")
    return Edit(Span(source, call.span.start + len(call.name), end), f"({text})")


def remove_statement(span: Span) -> Edit:
    """Returns the edit that removes a statement, together with its line if nothing else is on it."""
    text, source = span.source.text, span.source
    start, end = span.start, span.end
    left = start
    while left > 0 and text[left - 1] in " \t":
        left -= 1
    right = end
    while right < len(text) and text[right] in " \t\r":
        right += 1
    starts_line = left == 0 or text[left - 1] == "\n"
    if right < len(text) and text[right] == ";":
        return Edit(Span(source, start, right + 1), "")
    if starts_line and (right >= len(text) or text[right] in "#\n"):
        newline = text.find("\n", right)
        return Edit(Span(source, left, len(text) if newline < 0 else newline + 1), "")
    if left > 0 and text[left - 1] == ";":
        return Edit(Span(source, left - 1, end), "")
    return Edit(span, "")
