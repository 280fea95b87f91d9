"""Comments that suppress findings: `# allow: CODE, CODE -- reason`.

A comment after a statement applies to that statement. A comment on a line of its own applies to the next statement.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass

from policyc.language.diagnostics import Diagnostic, Span
from policyc.language.parser import BlockStatement, PolicyFile, Statement, comment_ranges

_ALLOW = re.compile(r"#\s*allow:\s*(?P<codes>[\w-]+(?:\s*,\s*[\w-]+)*)")


@dataclass(slots=True)
class Suppression:
    """One code in a suppression comment."""

    code: Span
    comment: Span
    is_used: bool = False


class Suppressions:
    """The suppressions of one file."""

    def __init__(self, file: PolicyFile) -> None:
        self._file = file
        self.all: list[Suppression] = []
        self._by_line: dict[int, list[Suppression]] = {}
        source = file.source
        allow_comments = [
            (end, m)
            for start, end in comment_ranges(source.text)
            if (m := _ALLOW.search(source.text, start, end))
        ]
        lines = _statement_lines(file.statements) if allow_comments else []
        first_lines = [first for first, _ in lines]
        for end, match in allow_comments:
            comment = Span(source, match.start(), end)
            line, column = source.position(comment.start)
            is_alone = not source.line(line)[: column - 1].strip()
            covered_lines = _covered_lines(lines, first_lines, line, is_alone)
            for code in re.finditer(r"[\w-]+", match["codes"]):
                offset = match.start("codes")
                span = Span(source, offset + code.start(), offset + code.end())
                suppression = Suppression(span, comment)
                self.all.append(suppression)
                for covered_line in covered_lines:
                    self._by_line.setdefault(covered_line, []).append(suppression)

    def suppress(self, diagnostic: Diagnostic) -> bool:
        """Returns whether a comment suppresses the diagnostic, and marks the comment as used."""
        span = diagnostic.span
        if span.source is not self._file.source:
            return False
        is_suppressed = False
        for line in range(span.line, span.last_line + 1):
            for suppression in self._by_line.get(line, ()):
                if suppression.code.text == diagnostic.code:
                    suppression.is_used = is_suppressed = True
        return is_suppressed


def _statement_lines(statements: tuple[Statement, ...]) -> list[tuple[int, int]]:
    """Returns the first and last line of every statement. For a block, both are the line of its header."""
    lines: list[tuple[int, int]] = []
    for statement in statements:
        span = statement.span
        if isinstance(statement, BlockStatement):
            lines.append((span.line, span.line))
            lines += _statement_lines(statement.body)
        else:
            lines.append((span.line, span.last_line))
    return lines


def _covered_lines(lines: list[tuple[int, int]], first_lines: list[int], line: int, is_alone: bool) -> range:
    """Returns the lines that a comment on `line` applies to. `is_alone`: nothing is before it on its line."""
    after = bisect_left(first_lines, line + 1)
    if after > 0 and lines[after - 1][1] >= line:
        return range(lines[after - 1][0], line + 2 if is_alone else line + 1)
    if is_alone and after < len(lines):
        return range(lines[after][0], lines[after][1] + 1)
    return range(line, line + 1)
