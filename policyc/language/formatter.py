"""A policy file in its one layout, comments kept.

In: a `PolicyFile` without faults. Out: its text, formatted. Arrows of neighbouring rules stand in one column; a
block that was written on one line stays on one. The one trap: a comment inside a statement has no place in
the layout, so such a statement stays as it was written.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from policyc.language.parser import BlockStatement, PolicyFile, Statement, comment_ranges, read_statements
from policyc.language.policy import Rule

_INDENT = "    "
_WIDEST = 100  # a block or a column of arrows wider than this is broken up


@dataclass(slots=True)
class _Line:
    """A line to print. Lines with a `tail` are aligned at the arrow before it."""

    depth: int
    head: str
    tail: str | None = None
    comment: str = ""


def format_file(file: PolicyFile) -> str:
    """The text of a file in its one layout. Means the same and holds the same comments."""
    printer = _Printer(file)
    printer.body(file.statements, 0, len(file.source.text), 0)
    text = _assemble(printer.lines)
    _verify(file, text)
    return text


def _verify(file: PolicyFile, text: str) -> None:
    """A formatter that changes a policy would be worse than none: look before handing anything back."""
    again, found = read_statements(type(file.source)(text, file.source.path))
    kept = [text[a:b].rstrip() for a, b in comment_ranges(text)]
    before = [file.source.text[a:b].rstrip() for a, b in comment_ranges(file.source.text)]
    if found or again.statements != file.statements or kept != before:
        raise AssertionError(f"formatting {file.source.path} would change it: this is a fault of policyc")


class _Printer:
    def __init__(self, file: PolicyFile) -> None:
        self.text = file.source.text
        self.comments = deque(comment_ranges(self.text))
        self.lines: list[_Line] = []
        self._end = 0  # where the last thing printed ends in the text

    def body(self, statements: tuple[Statement, ...], start: int, end: int, depth: int) -> None:
        """The statements and comments between two offsets."""
        self._end = start
        first = len(self.lines)
        for statement in statements:
            self._loose(statement.span.start, depth, first)
            self._gap(statement.span.start, depth, first)
            self._statement(statement, depth)
        self._loose(end, depth, first)

    def _statement(self, statement: Statement, depth: int) -> None:
        span = statement.span
        self._end = span.end
        inner = bool(self.comments) and self.comments[0][0] < span.end
        if isinstance(statement, BlockStatement):
            self._block(statement, depth, inner)
        elif inner:
            while self.comments and self.comments[0][0] < span.end:
                self.comments.popleft()
            written = self.text[span.start : span.end].split("\n")
            self.lines += [_Line(depth if i == 0 else 0, line.rstrip()) for i, line in enumerate(written)]
        elif isinstance(statement, Rule):
            self.lines.append(_Line(depth, statement.head, statement.tail))
        else:
            self.lines.append(_Line(depth, str(statement)))
        self._end = span.end
        self._trailing()

    def _block(self, block: BlockStatement, depth: int, commented: bool) -> None:
        span = block.span
        if not block.body and not commented:
            self.lines.append(_Line(depth, f"{block.head} {{}}"))
            return
        if "\n" not in self.text[span.start : span.end] and (line := _one_line(block)):
            self.lines.append(_Line(depth, line))
            return
        self.lines.append(_Line(depth, f"{block.head} {{"))
        opened = self.text.index("{", span.start) + 1
        self._end = opened
        self._trailing()
        self.body(block.body, self._end, span.end - 1, depth + 1)
        self.lines.append(_Line(depth, "}"))

    def _loose(self, until: int, depth: int, first: int) -> None:
        """Comments on lines of their own."""
        while self.comments and self.comments[0][0] < until:
            start, end = self.comments.popleft()
            self._gap(start, depth, first)
            self.lines.append(_Line(depth, self.text[start:end].rstrip()))
            self._end = end

    def _trailing(self) -> None:
        """A comment behind what was just printed."""
        if self.comments:
            start, end = self.comments[0]
            if start >= self._end and not self.text[self._end : start].strip(" \t\r\f;"):
                self.comments.popleft()
                self.lines[-1].comment = self.text[start:end].rstrip()
                self._end = end

    def _gap(self, start: int, depth: int, first: int) -> None:
        """One empty line where there were some, but none at the top of a file or a block."""
        if len(self.lines) > first and self.text.count("\n", self._end, start) > 1:
            self.lines.append(_Line(depth, ""))


def _one_line(block: BlockStatement) -> str:
    parts = [_one_line(s) if isinstance(s, BlockStatement) else str(s) for s in block.body]
    line = f"{block.head} {{ {'; '.join(parts)} }}"
    return line if all(parts) and len(line) <= _WIDEST else ""


def _assemble(lines: list[_Line]) -> str:
    printed: list[str] = []
    at = 0
    while at < len(lines):
        end = at
        while end < len(lines) and _joins(lines[end], lines[at].depth):
            end += 1
        group = lines[at : max(end, at + 1)]
        heads = [len(line.head) for line in group if line.tail is not None and len(line.head) <= _WIDEST]
        column = max(heads, default=0)
        printed += [_print(line, column) for line in group]
        at += len(group)
    return "".join(f"{line}\n" for line in printed)


def _joins(line: _Line, depth: int) -> bool:
    return line.depth == depth and (line.tail is not None or line.head.startswith("#"))


def _print(line: _Line, column: int) -> str:
    text = line.head if line.tail is None else f"{line.head:<{column}} -> {line.tail}"
    if line.comment:
        text += f"  {line.comment}"
    return f"{_INDENT * line.depth}{text}" if text else ""
