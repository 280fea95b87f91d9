"""Edits of a policy's text, for the fixes that rules suggest."""

from __future__ import annotations

from collections.abc import Sequence

from policyc.language.diagnostics import Edit, Span
from policyc.language.parser import BlockStatement, Statement
from policyc.language.policy import RecipeCall


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


def move_statement(span: Span, after: Span) -> tuple[Edit, Edit]:
    """Returns the edits that move a statement below another one, together with the comment after it."""
    text, removal = span.source.text, remove_statement(span)
    right = after.end
    while right < len(text) and text[right] in " \t\r":
        right += 1
    if right < len(text) and text[right] not in "#\n":  # something else follows on the line
        return removal, Edit(Span(span.source, after.end, after.end), f"; {span.text}")
    newline = text.find("\n", right)
    line_end = len(text) if newline < 0 else newline
    moved = removal.span.text.rstrip("\n") if removal.span.text.endswith("\n") else span.text
    return removal, Edit(Span(span.source, line_end, line_end), f"\n{moved}")


def find_sibling(statements: Sequence[Statement], span: Span, other: Span) -> Span | None:
    """Returns the span of the statement at `other`, or of the one around it that is in the same block as `span`."""
    if any(s.span == span for s in statements):
        containing = (s.span for s in statements if s.span.start <= other.start and other.end <= s.span.end)
        return next(containing, None) if other.source is span.source else None
    blocks = (s for s in statements if isinstance(s, BlockStatement))
    return next((found for block in blocks if (found := find_sibling(block.body, span, other))), None)
