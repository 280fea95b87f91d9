"""Formats a policy file, and keeps its comments.

Arrows of neighbouring rules are aligned. A block on one line stays on one line. A statement with a comment inside it
stays as it was written, because the layout has no place for such a comment.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from policyc.language.diagnostics import SourceText
from policyc.language.parser import BlockStatement, PolicyFile, Statement, read_statements
from policyc.language.policy import Rule

_INDENT = "    "
_MAX_WIDTH = 100  # columns: a wider block is written on several lines, and a wider selector is not aligned


@dataclass(frozen=True, slots=True)
class _Line:
    """A line to print. Lines with a `tail` are aligned at the arrow before it."""

    depth: int
    head: str
    tail: str | None = None
    comment: str = ""


def format_text(text: str) -> str | None:
    """Returns the formatted text; None if it has errors. Its meaning and its comments do not change."""
    file, diagnostics = read_statements(SourceText(text))
    return None if diagnostics else format_file(file)


def format_file(file: PolicyFile) -> str:
    """Returns the formatted text of a file that has no errors."""
    printer = _Printer(file)
    printer.print_items(file.statements, len(file.source.text), 0)
    return _join_lines(printer.lines)


class _Printer:
    """Collects the lines to print. `end` is where the last printed item ends."""

    def __init__(self, file: PolicyFile) -> None:
        self.lines: list[_Line] = []
        self.end = 0
        self._text = file.source.text
        self._comments = deque((comment.start, comment.end) for comment in file.comments)  # not printed yet

    def print_items(self, statements: tuple[Statement, ...], end: int, depth: int) -> None:
        """Prints the statements and comments of the file or of a block, up to an offset."""
        first_line = len(self.lines)
        for statement in statements:
            start = statement.span.start
            self._print_own_line_comments(start, depth, first_line)
            self._print_gap(start, depth, first_line)
            self._print_statement(statement, depth)
        self._print_own_line_comments(end, depth, first_line)

    def _print_statement(self, statement: Statement, depth: int) -> None:
        start, end = statement.span.start, statement.span.end
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
        self.end = end
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
        self.end = self._text.index("{", start) + 1
        self._add_trailing_comment()
        self.print_items(block.body, end - 1, depth + 1)
        self.lines.append(_Line(depth, "}"))

    def _print_own_line_comments(self, until: int, depth: int, first_line: int) -> None:
        """Prints the comments up to an offset, each on a line of its own."""
        while self._comments and self._comments[0][0] < until:
            start, end = self._comments.popleft()
            self._print_gap(start, depth, first_line)
            self.lines.append(_Line(depth, self._text[start:end].rstrip()))
            self.end = end

    def _add_trailing_comment(self) -> None:
        """Adds a comment that follows on the same line to the line just printed."""
        if self._comments:
            start, end = self._comments[0]
            if start >= self.end and not self._text[self.end : start].strip(" \t\r\f;"):
                self._comments.popleft()
                self.lines[-1] = replace(self.lines[-1], comment=self._text[start:end].rstrip())
                self.end = end

    def _print_gap(self, start: int, depth: int, first_line: int) -> None:
        """Collapses the empty lines before an item into one. Drops those before the first item and atop a block."""
        if len(self.lines) > first_line and self._text.count("\n", self.end, start) > 1:
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
    """Whether a line belongs to a group of rules at this depth. A comment on its own line does not end the group."""
    return line.depth == depth and (line.tail is not None or line.head.startswith("#"))


def _print_line(line: _Line, column: int) -> str:
    text = line.head if line.tail is None else f"{line.head:<{column}} -> {line.tail}"
    if line.comment:
        text += f"  {line.comment}"
    return f"{_INDENT * line.depth}{text}" if text else ""
