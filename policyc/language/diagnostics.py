"""Where something is written, what is wrong with it, and how to say so.

In: offsets into a text. Out: `Diagnostic`s that print themselves with a caret. The one trap: text from a
policy file is hostile to a terminal, so every quoted line passes `_visible` before it is printed.
"""

from __future__ import annotations

import bisect
import difflib
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

_WINDOW = 100  # characters of a quoted line: a policy may be one line of a megabyte
_SHOWN = 50  # diagnostics in the text of one exception
_SENTENCE = 400  # characters of a message: it may quote a name of a megabyte
_LONGEST_NAME = 64  # names longer than this get no suggestion


class SourceText:
    """A policy's text and where it came from. Compares by identity."""

    __slots__ = ("_starts", "path", "text")

    def __init__(self, text: str, path: str = "<policy>") -> None:
        self.path = path
        self.text = text
        self._starts: list[int] | None = None

    def __repr__(self) -> str:
        return f"Source({self.path!r})"

    @property
    def starts(self) -> list[int]:
        """Offset of the first character of each line."""
        if self._starts is None:
            self._starts = [0]
            self._starts += [i + 1 for i, c in enumerate(self.text) if c == "\n"]
        return self._starts

    def position(self, offset: int) -> tuple[int, int]:
        """Line and column of an offset, both from 1."""
        line = bisect.bisect_right(self.starts, offset)
        return line, offset - self.starts[line - 1] + 1

    def line(self, number: int) -> str:
        """The text of a line, without its line ending."""
        start = self.starts[number - 1]
        end = self.starts[number] - 1 if number < len(self.starts) else len(self.text)
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
        """Column just past the last character, on `last_line`."""
        line = self.last_line
        return self.end - self.source.starts[line - 1] + 1

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]

    @property
    def place(self) -> str:
        return f"{_visible(self.source.path)}:{self.line}:{self.column}"

    def to(self, other: Span) -> Span:
        """The span from here to the end of another."""
        return Span(self.source, self.start, max(self.end, other.end))


class Severity(StrEnum):
    """Errors stop a policy from being used, warnings do not, and notes are no findings: they only tell."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace the text of a span."""

    span: Span
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """Edits that mend a fault. A safe fix leaves the meaning of the policy as it is."""

    message: str
    edits: tuple[Edit, ...]
    safe: bool


@dataclass(frozen=True, slots=True)
class Note:
    """Another place that has to do with a diagnostic."""

    span: Span
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostic:
    """One fault: what, where, and what to try."""

    code: str
    message: str
    span: Span
    severity: Severity = Severity.ERROR
    help: str = ""
    notes: tuple[Note, ...] = ()
    fix: Fix | None = field(default=None, compare=False)

    @property
    def order(self) -> tuple[str, int, int, str]:
        return self.span.source.path, self.span.start, self.span.end, self.code

    def __str__(self) -> str:
        return render(self)


Paint = Callable[[str, str], str]
"""Colours a text, given what it is: error, warning, path, gutter, caret, help or note."""


def plain(_: str, text: str) -> str:
    """The `Paint` that paints nothing."""
    return text


def headline(diagnostic: Diagnostic, paint: Paint = plain) -> str:
    """`path:line:column: severity[code]: message`."""
    label = paint(diagnostic.severity, f"{diagnostic.severity}[{diagnostic.code}]")
    return f"{paint('path', diagnostic.span.place)}: {label}: {_sentence(diagnostic.message)}"


def render(diagnostic: Diagnostic, paint: Paint = plain) -> str:
    """The diagnostic with the line it is about, a caret under the fault, and its notes."""
    lines = [headline(diagnostic, paint)]
    lines += _quote(diagnostic.span, _sentence(diagnostic.help), paint, "caret")
    for note in diagnostic.notes:
        lines.append(f"{paint('path', note.span.place)}: {paint('note', 'note')}: {_sentence(note.message)}")
        lines += _quote(note.span, "", paint, "note")
    if diagnostic.fix is not None:
        kind = "fix" if diagnostic.fix.safe else "unsafe fix"
        lines.append(f"{paint('help', kind)}: {_sentence(diagnostic.fix.message)}")
    return "\n".join(lines)


def _quote(span: Span, label: str, paint: Paint, kind: str) -> list[str]:
    if not span.source.text:  # a file that could not be read: there is nothing to quote
        return [f"  {paint('help', label)}"] if label else []
    number = span.line
    text = span.source.line(number)
    start = span.column - 1
    end = span.end_column - 1 if span.last_line == number else len(text)
    left = max(0, start - _WINDOW // 2) if len(text) > _WINDOW else 0
    right = min(len(text), left + _WINDOW)
    before, marked, after = text[left:start], text[start : min(end, right)], text[min(end, right) : right]
    head, tail = ("…" if left else ""), ("…" if right < len(text) else "")
    gutter = str(number)
    bar = paint("gutter", f"{gutter} |")
    blank = paint("gutter", " " * len(gutter) + " |")
    indent = " " * _width(head + _visible(before))
    caret = "^" * max(1, _width(_visible(marked)))
    pointer = f"{blank} {indent}{paint(kind, caret)}"
    quoted = f"{bar} {head}{_visible(before)}{_visible(marked)}{_visible(after)}{tail}"
    return [quoted, f"{pointer} {paint('help', label)}" if label else pointer]


def _visible(text: str) -> str:
    """Text with nothing in it that a terminal obeys."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c == "\t" else f"\\x{ord(c):02x}" for c in text)


def _sentence(text: str) -> str:
    """A message as it is printed: visible, and not longer than anyone reads."""
    return _visible(text if len(text) <= _SENTENCE else text[: _SENTENCE - 1] + "…")


def _width(text: str) -> int:
    """Terminal columns that a printable text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )


class PolicyError(Exception):
    """A policy cannot be used. Holds every fault found, not only the first."""

    def __init__(self, diagnostics: Sequence[Diagnostic]) -> None:
        self.diagnostics = tuple(sorted(diagnostics, key=lambda d: d.order))
        super().__init__(self.diagnostics)

    def __str__(self) -> str:
        shown = [render(d) for d in self.diagnostics[:_SHOWN]]
        hidden = len(self.diagnostics) - len(shown)
        return "\n".join([*shown, f"... and {hidden} more"] if hidden > 0 else shown)


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that the writer most likely meant."""
    if len(name) > _LONGEST_NAME:
        return None
    near = [k for k in known if abs(len(k) - len(name)) <= max(2, len(name) // 2)]
    by_folded = {k.casefold(): k for k in reversed(near)}
    found = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Help for an unknown name: the closest known one, else all of them if they are few."""
    names = list(known)
    found = closest(name, names)
    if found is not None:
        return f"did you mean '{found}'?"
    if 0 < len(names) <= 12:
        return f"known: {', '.join(names)}"
    return ""
