"""Source spans, diagnostics, and how they are printed.

Text from a policy or a program may contain terminal control characters: all of it is printed through `escape_controls`.
"""

from __future__ import annotations

import bisect
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from policyc.base.text import escape_controls

_MAX_QUOTED = 100  # characters of a quoted line: a policy may be one line of a megabyte
_MAX_PRINTED = 50  # diagnostics in the text of one exception
_MAX_MESSAGE = 400  # characters of a message: it may quote a name of a megabyte


class SourceText:
    """The text of a policy, and the path to print for it. Compared by identity."""

    __slots__ = ("_line_starts", "path", "text")

    def __init__(self, text: str, path: str = "<policy>") -> None:
        self.path: str = path
        self.text: str = text
        self._line_starts: list[int] | None = None

    def __repr__(self) -> str:
        return f"SourceText({self.path!r})"

    @property
    def line_starts(self) -> list[int]:
        """The offset of the first character of each line."""
        if self._line_starts is None:
            self._line_starts = [0, *(match.end() for match in re.finditer("\n", self.text))]
        return self._line_starts

    def position(self, offset: int) -> tuple[int, int]:
        """Returns the line and the column of an offset, both counted from 1."""
        line = bisect.bisect_right(self.line_starts, offset)
        return line, offset - self.line_starts[line - 1] + 1

    def line(self, number: int) -> str:
        """Returns the text of a line, without its line ending."""
        start = self.line_starts[number - 1]
        end = self.line_starts[number] - 1 if number < len(self.line_starts) else len(self.text)
        return self.text[start:end].rstrip("\r")


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range of characters in a `SourceText`."""

    source: SourceText
    start: int
    end: int

    @property
    def line(self) -> int:
        return self.source.position(self.start)[0]

    @property
    def column(self) -> int:
        return self.source.position(self.start)[1]

    @property
    def last_line(self) -> int:
        return self.source.position(max(self.start, self.end - 1))[0]

    @property
    def end_column(self) -> int:
        """The column just past the last character, on `last_line`."""
        line = self.last_line
        return self.end - self.source.line_starts[line - 1] + 1

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]

    @property
    def location(self) -> str:
        """`path:line:column`."""
        return f"{escape_controls(self.source.path)}:{self.line}:{self.column}"

    def to(self, other: Span) -> Span:
        """Returns the span from the start of this one to the end of another."""
        return Span(self.source, self.start, max(self.end, other.end))


NO_SPAN = Span(SourceText("", "<built>"), 0, 0)
"""The span of a node that was not read from a text."""


def span_field() -> Span:
    """Declares the `span` field of a node: optional, and left out of comparisons and of `repr`."""
    return field(default=NO_SPAN, compare=False, repr=False)


class Severity(StrEnum):
    """A policy with errors cannot be used; one with warnings can. A note is information and not a finding."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Edit:
    """Replaces the text of a span."""

    span: Span
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """Edits that correct a problem. A safe fix does not change the meaning of the policy."""

    message: str
    edits: tuple[Edit, ...]
    safe: bool


@dataclass(frozen=True, slots=True)
class Note:
    """Another place that explains a diagnostic."""

    span: Span
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostic:
    """One problem: where it is, what is wrong, and what to try.

    `sites` are the names of all sites of a program that it is about; the message names only the first. The check of a
    lint rule yields diagnostics without a code: the rule adds its code and its severity.
    """

    message: str
    span: Span
    code: str = ""
    severity: Severity = Severity.ERROR
    help: str = ""
    notes: tuple[Note, ...] = ()
    sites: tuple[str, ...] = ()
    fix: Fix | None = field(default=None, compare=False)

    @property
    def sort_key(self) -> tuple[str, int, int, str]:
        """Orders diagnostics by file and position."""
        return self.span.source.path, self.span.start, self.span.end, self.code

    def __str__(self) -> str:
        return render(self)


Paint = Callable[[str, str], str]
"""Colors a text. The first argument is its kind: error, warning, path, gutter, caret, help or note."""


def plain(_: str, text: str) -> str:
    """Returns the text without colors: the `Paint` for files and pipes."""
    return text


def render_headline(diagnostic: Diagnostic, paint: Paint = plain) -> str:
    """Returns `path:line:column: severity[code]: message`."""
    label = paint(diagnostic.severity, f"{diagnostic.severity}[{diagnostic.code}]")
    return f"{paint('path', diagnostic.span.location)}: {label}: {_format_message(diagnostic.message)}"


def render(diagnostic: Diagnostic, paint: Paint = plain) -> str:
    """Returns the diagnostic with the line it points at, a caret under the span, and its notes."""
    lines = [render_headline(diagnostic, paint)]
    lines += _quote(diagnostic.span, _format_message(diagnostic.help), paint, "caret")
    for note in diagnostic.notes:
        lines.append(
            f"{paint('path', note.span.location)}: {paint('note', 'note')}: {_format_message(note.message)}"
        )
        lines += _quote(note.span, "", paint, "note")
    if diagnostic.fix is not None:
        kind = "fix" if diagnostic.fix.safe else "unsafe fix"
        lines.append(f"{paint('help', kind)}: {_format_message(diagnostic.fix.message)}")
    return "\n".join(lines)


def _quote(span: Span, label: str, paint: Paint, kind: str) -> list[str]:
    """Returns the first line of a span, and carets with a label under it."""
    if not span.source.text:  # the file could not be read: there is nothing to quote
        return [f"  {paint('help', label)}"] if label else []
    number = span.line
    text = span.source.line(number)
    start = span.column - 1
    end = span.end_column - 1 if span.last_line == number else len(text)
    left = max(0, start - _MAX_QUOTED // 2) if len(text) > _MAX_QUOTED else 0
    right = min(len(text), left + _MAX_QUOTED)
    before, marked, after = text[left:start], text[start : min(end, right)], text[min(end, right) : right]
    head, tail = ("…" if left else ""), ("…" if right < len(text) else "")
    gutter = str(number)
    bar = paint("gutter", f"{gutter} |")
    blank = paint("gutter", " " * len(gutter) + " |")
    indent = " " * _width(head + escape_controls(before))
    caret = "^" * max(1, _width(escape_controls(marked)))
    pointer = f"{blank} {indent}{paint(kind, caret)}"
    quoted = f"{bar} {head}{escape_controls(before)}{escape_controls(marked)}{escape_controls(after)}{tail}"
    return [quoted, f"{pointer} {paint('help', label)}" if label else pointer]


def _format_message(text: str) -> str:
    """Truncates a message to `_MAX_MESSAGE` characters and escapes it."""
    return escape_controls(text if len(text) <= _MAX_MESSAGE else text[: _MAX_MESSAGE - 1] + "…")


def _width(text: str) -> int:
    """Returns the number of terminal columns of a printable text."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )


class PolicyError(Exception):
    """A policy cannot be used. Holds every diagnostic, not only the first."""

    def __init__(self, diagnostics: Sequence[Diagnostic]) -> None:
        self.diagnostics: tuple[Diagnostic, ...] = tuple(sorted(diagnostics, key=lambda d: d.sort_key))
        super().__init__(self.diagnostics)

    def __str__(self) -> str:
        printed = [render(d) for d in self.diagnostics[:_MAX_PRINTED]]
        hidden = len(self.diagnostics) - len(printed)
        return "\n".join([*printed, f"... and {hidden} more"] if hidden > 0 else printed)
