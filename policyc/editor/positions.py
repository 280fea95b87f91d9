"""Offsets in a text as positions of the language server protocol: lines from 0, columns in UTF-16 code units."""

from __future__ import annotations

from policyc.editor.json_rpc import Json
from policyc.language.diagnostics import SourceText, Span


def to_position(source: SourceText, offset: int) -> Json:
    """The position of an offset."""
    line, column = source.position(offset)
    start = source.line_starts[line - 1]
    return {"line": line - 1, "character": _utf16_length(source.text[start : start + column - 1])}


def to_range(span: Span) -> Json:
    """The range of a span."""
    return {"start": to_position(span.source, span.start), "end": to_position(span.source, span.end)}


def to_offset(source: SourceText, position: Json) -> int:
    """The offset of a position. One beyond the end of a line or of the text is at that end."""
    if position["line"] >= len(source.line_starts):
        return len(source.text)
    start = source.line_starts[position["line"]]
    units = 0
    line = source.line(position["line"] + 1)
    for count, character in enumerate(line):
        if units >= position["character"]:
            return start + count
        units += _utf16_length(character)
    return start + len(line)


def _utf16_length(text: str) -> int:
    return len(text) if text.isascii() else sum(2 if ord(c) > 0xFFFF else 1 for c in text)
