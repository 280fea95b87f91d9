"""Formats a policy file, and keeps its comments.

Arrows of neighbouring rules are aligned. A block on one line stays on one line. A statement with a comment inside it
stays as it was written, because the layout has no place for such a comment.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from policyc.language.parser import (
    BlockStatement,
    PieceReader,
    PolicyFile,
    Statement,
    comment_ranges,
    find_pieces,
)
from policyc.language.policy import Rule

_INDENT = "    "
_MAX_WIDTH = 100  # columns: a wider block is written on several lines, and a wider selector is not aligned


@dataclass(slots=True)
class _Line:
    """A line to print. Lines with a `tail` are aligned at the arrow before it."""

    depth: int
    head: str
    tail: str | None = None
    comment: str = ""


def format_file(file: PolicyFile) -> str:
    """Returns the formatted text of a file without errors. Its meaning and its comments do not change."""
    text = format_text(file.source.text)
    assert text is not None
    return text


def format_text(text: str) -> str | None:
    """Returns the formatted text; None if it has errors."""
    pieces = _read(text)
    if pieces is None:
        return None
    printer = _Printer(text)
    printer.print_file(pieces)
    formatted = _join_lines(printer.lines)
    if formatted != text:
        _verify(text, pieces, formatted)
    return formatted


_Piece = tuple[int, tuple[Statement, ...]]


def _read(text: str) -> list[_Piece] | None:
    """The statements of a text by pieces, with the offsets of the pieces; None if the text has errors."""
    reader, pieces = PieceReader(), []
    for start, end, is_closed in find_pieces(text):
        statements = reader.read(text[start:end]) if is_closed else None
        if statements is None:
            return None
        pieces.append((start, statements))
    return pieces


def _verify(text: str, pieces: list[_Piece], formatted: str) -> None:
    """Raises an AssertionError if the formatted text has other statements or other comments than the text."""
    again = _read(formatted)
    is_same = again is not None and _statements(again) == _statements(pieces)
    if not is_same or _comments(formatted) != _comments(text):
        raise AssertionError("formatting this policy would change it: this is a bug in policyc")


def _statements(pieces: list[_Piece]) -> list[Statement]:
    return [statement for _, statements in pieces for statement in statements]


def _comments(text: str) -> list[str]:
    return [text[start:end].rstrip() for start, end in comment_ranges(text)]


class _Printer:
    """Collects the lines to print.

    `_piece` is the offset of the piece that is printed, and `_end` that of the end of the last printed item.
    """

    def __init__(self, text: str) -> None:
        self.lines: list[_Line] = []
        self._text = text
        self._comments = deque(comment_ranges(text))  # not printed yet
        self._piece = self._end = 0

    def print_file(self, pieces: list[_Piece]) -> None:
        for self._piece, statements in pieces:
            self._print_statements(statements, 0, 0)
        self._print_own_line_comments(len(self._text), 0, 0)

    def _print_body(self, block: BlockStatement, end: int, depth: int) -> None:
        """Prints the statements and comments of a block."""
        first_line = len(self.lines)
        self._print_statements(block.body, depth, first_line)
        self._print_own_line_comments(end, depth, first_line)

    def _print_statements(self, statements: tuple[Statement, ...], depth: int, first_line: int) -> None:
        for statement in statements:
            start = self._piece + statement.span.start
            self._print_own_line_comments(start, depth, first_line)
            self._print_gap(start, depth, first_line)
            self._print_statement(statement, depth)

    def _print_statement(self, statement: Statement, depth: int) -> None:
        start, end = self._piece + statement.span.start, self._piece + statement.span.end
        has_comment = bool(self._comments) and self._comments[0][0] < end
        if isinstance(statement, BlockStatement):
            self._print_block(statement, start, end, depth, has_comment)
        elif has_comment:
            while self._comments and self._comments[0][0] < end:
                self._comments.popleft()
            written = self._text[start:end].split("\n")
            self.lines += [_Line(depth if i == 0 else 0, line.rstrip()) for i, line in enumerate(written)]
        elif isinstance(statement, Rule):
            self.lines.append(_Line(depth, statement.head, statement.tail))
        else:
            self.lines.append(_Line(depth, str(statement)))
        self._end = end
        self._add_trailing_comment()

    def _print_block(
        self, block: BlockStatement, start: int, end: int, depth: int, has_comment: bool
    ) -> None:
        if not block.body and not has_comment:
            self.lines.append(_Line(depth, f"{block.head} {{}}"))
            return
        if "\n" not in self._text[start:end] and (line := _print_on_one_line(block)):
            self.lines.append(_Line(depth, line))
            return
        self.lines.append(_Line(depth, f"{block.head} {{"))
        self._end = self._text.index("{", start) + 1
        self._add_trailing_comment()
        self._print_body(block, end - 1, depth + 1)
        self.lines.append(_Line(depth, "}"))

    def _print_own_line_comments(self, until: int, depth: int, first_line: int) -> None:
        """Prints the comments up to an offset, each on a line of its own."""
        while self._comments and self._comments[0][0] < until:
            start, end = self._comments.popleft()
            self._print_gap(start, depth, first_line)
            self.lines.append(_Line(depth, self._text[start:end].rstrip()))
            self._end = end

    def _add_trailing_comment(self) -> None:
        """Adds a comment that follows on the same line to the line just printed."""
        if self._comments:
            start, end = self._comments[0]
            if start >= self._end and not self._text[self._end : start].strip(" \t\r\f;"):
                self._comments.popleft()
                self.lines[-1].comment = self._text[start:end].rstrip()
                self._end = end

    def _print_gap(self, start: int, depth: int, first_line: int) -> None:
        """Prints one empty line for any number of them, except at the top of a file or a block."""
        if len(self.lines) > first_line and self._text.count("\n", self._end, start) > 1:
            self.lines.append(_Line(depth, ""))


def _print_on_one_line(block: BlockStatement) -> str:
    """Returns a block as one line, or an empty string if it is too wide."""
    parts = [_print_on_one_line(s) if isinstance(s, BlockStatement) else str(s) for s in block.body]
    line = f"{block.head} {{ {'; '.join(parts)} }}"
    return line if all(parts) and len(line) <= _MAX_WIDTH else ""


def _join_lines(lines: list[_Line]) -> str:
    """Returns the text of the lines, with the arrows of each group of neighbouring rules in one column."""
    printed: list[str] = []
    start = 0
    while start < len(lines):
        end = start
        while end < len(lines) and _is_in_group(lines[end], lines[start].depth):
            end += 1
        group = lines[start : max(end, start + 1)]
        widths = [len(line.head) for line in group if line.tail is not None and len(line.head) <= _MAX_WIDTH]
        column = max(widths, default=0)
        printed += [_print_line(line, column) for line in group]
        start += len(group)
    return "".join(f"{line}\n" for line in printed)


def _is_in_group(line: _Line, depth: int) -> bool:
    """Rules of one depth form a group. Comments on lines of their own do not end it."""
    return line.depth == depth and (line.tail is not None or line.head.startswith("#"))


def _print_line(line: _Line, column: int) -> str:
    text = line.head if line.tail is None else f"{line.head:<{column}} -> {line.tail}"
    if line.comment:
        text += f"  {line.comment}"
    return f"{_INDENT * line.depth}{text}" if text else ""
