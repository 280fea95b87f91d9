"""Comments that allow a finding on purpose: `# allow: CODE, CODE -- reason`.

In: the comments of a file. Out: which findings they allow, and which of them allow nothing. Behind a
statement, a comment speaks of that statement; on a line of its own, of the next one. The one trap: a
suppression of a rule that did not run is not unused.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator
from functools import cache

from policyc.language.diagnostics import Diagnostic, Edit, Fix, Severity, Span, did_you_mean
from policyc.language.parser import BlockStatement, PolicyFile, Statement, comment_ranges

_ALLOW = re.compile(r"#\s*allow:\s*(?P<codes>[\w-]+(?:\s*,\s*[\w-]+)*)")


class Suppressions:
    """The suppressions of one file."""

    def __init__(self, file: PolicyFile) -> None:
        self._file = file
        self._comments: list[Span] = []  # whole comments, one entry for each code in them
        self._codes: list[Span] = []
        self._used: list[bool] = []
        self._by_line: dict[int, list[int]] = {}
        source = file.source
        found = [(e, m) for s, e in comment_ranges(source.text) if (m := _ALLOW.search(source.text, s, e))]
        lines = _lines(file.statements) if found else []
        starts = [first for first, _ in lines]
        for end, match in found:
            start = match.start()
            at, column = source.position(start)
            alone = not source.line(at)[: column - 1].strip()
            for code in re.finditer(r"[\w-]+", match["codes"]):
                offset = match.start("codes")
                self._codes.append(Span(source, offset + code.start(), offset + code.end()))
                self._comments.append(Span(source, start, end))
                self._used.append(False)
                for line in _range(lines, starts, at, alone):
                    self._by_line.setdefault(line, []).append(len(self._codes) - 1)

    def allows(self, diagnostic: Diagnostic) -> bool:
        found = False
        if diagnostic.span.source is self._file.source:
            for line in range(diagnostic.span.line, diagnostic.span.last_line + 1):
                for number in self._by_line.get(line, ()):
                    if self._codes[number].text == diagnostic.code:
                        self._used[number] = found = True
        return found

    def report(self, known: Collection[str], ran: Collection[str]) -> Iterator[Diagnostic]:
        """Suppressions of codes that do not exist, and those that allow nothing of what was looked for."""
        suggest = cache(lambda name: did_you_mean(name, known))
        together = Counter(comment.start for comment in self._comments)
        for code, comment, used in zip(self._codes, self._comments, self._used, strict=True):
            if code.text not in known:
                yield Diagnostic(
                    code="unknown-suppression",
                    message=f"no rule has the code '{code.text}'",
                    span=code,
                    severity=Severity.WARNING,
                    help=suggest(code.text) or "'policyc explain' lists the codes",
                )
            elif not used and code.text in ran:
                yield Diagnostic(
                    code="unused-suppression",
                    message=f"there is no '{code.text}' here to allow",
                    span=code,
                    severity=Severity.WARNING,
                    help="remove it",
                    fix=Fix(
                        message="remove the suppression",
                        edits=(self._removal(code, comment, together[comment.start] > 1),),
                        safe=True,
                    ),
                )

    def _removal(self, code: Span, comment: Span, others: bool) -> Edit:
        text = self._file.source.text
        if others:
            after = re.compile(r"\s*,\s*").match(text, code.end)
            if after:
                return Edit(Span(code.source, code.start, after.end()), "")
            return Edit(Span(code.source, text.rindex(",", 0, code.start), code.end), "")
        start, end = comment.start, comment.end
        while start > 0 and text[start - 1] in " \t":
            start -= 1
        if (start == 0 or text[start - 1] == "\n") and text[end : end + 1] == "\n":
            end += 1
        return Edit(Span(code.source, start, end), "")


def _lines(statements: tuple[Statement, ...]) -> list[tuple[int, int]]:
    """First and last line of every statement; of a block, only its head."""
    found: list[tuple[int, int]] = []
    for statement in statements:
        span = statement.span
        if isinstance(statement, BlockStatement):
            found.append((span.line, span.line))
            found += _lines(statement.body)
        else:
            found.append((span.line, span.last_line))
    return found


def _range(lines: list[tuple[int, int]], starts: list[int], at: int, alone: bool) -> range:
    """The lines that a comment on line `at` speaks of; `alone` if nothing stands before it there."""
    after = bisect_left(starts, at + 1)
    if after > 0 and lines[after - 1][1] >= at:
        return range(lines[after - 1][0], at + 2 if alone else at + 1)
    if alone and after < len(lines):
        return range(lines[after][0], lines[after][1] + 1)
    return range(at, at + 1)
