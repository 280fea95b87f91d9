"""The statements of a policy file, as written, and the positions of its comments.

Spans are not compared: equal statements may come from different places.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from policyc.base.text import cache_by_text
from policyc.language.diagnostics import SourceText, Span
from policyc.language.groups import GroupDef
from policyc.language.policy import RecipeDef, Rule, Seed
from policyc.language.schedule import StepCondition

STRING_PATTERN = r"""\"[^"\n]*\"|'[^'\n]*'"""
BRACKET_PATTERN = re.compile(rf"{STRING_PATTERN}|#[^\n]*|[(\[{{)\]}}]")
"""Matches a string, a comment or a bracket, so that brackets inside strings and comments are not counted."""


@dataclass(frozen=True, slots=True)
class ImportStatement:
    """`import "FILE"`."""

    path: str
    span: Span = field(compare=False)

    def __str__(self) -> str:
        quote = "'" if '"' in self.path else '"'
        return f"import {quote}{self.path}{quote}"


@dataclass(frozen=True, slots=True)
class BlockStatement:
    """An `after`, `until` or `variant` block. The header is a condition, or the name of the variant."""

    header: StepCondition | str
    body: tuple[Statement, ...]
    span: Span = field(compare=False)

    @property
    def head(self) -> str:
        """The text before the opening brace."""
        return f"variant {self.header}" if isinstance(self.header, str) else str(self.header)


Statement = ImportStatement | Seed | RecipeDef | GroupDef | Rule | BlockStatement


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """The statements of a file, as written."""

    source: SourceText
    statements: tuple[Statement, ...]


_CODE = re.compile(r"[ \t\r\f]*((?:[^#\"']+|\"[^\"]*\"|'[^']*'|[\"'])*)")
_STRING = re.compile(STRING_PATTERN)
_OPEN_END = re.compile(r"(?:,|->|=|@|%|<|>|\.|\b(and|or|not|where))\Z")
_OPEN_END_WINDOW = 16  # characters: longer than any match of _OPEN_END; limited, so that long lines are cheap


def find_pieces(text: str) -> Iterator[tuple[int, int, bool]]:
    """Yields the start and the end of each piece of a text, and whether the piece is complete.

    A piece ends with a line that closes its brackets and completes a statement; most pieces are one statement. Between
    pieces there are only blanks and comments. The grammar accepts a text if it accepts all of its pieces. Only the last
    piece can be incomplete, and the grammar accepts no incomplete piece.
    """
    start, depth, end = None, 0, 0
    for line in text.split("\n"):
        line_start, end = end, end + len(line) + 1
        has_code, opened, goes_on = _measure_line(line)
        if not has_code:
            continue
        start = line_start if start is None else start
        depth += opened
        if depth <= 0 and not goes_on:
            yield start, min(end, len(text)), True
            start, depth = None, 0
    if start is not None:
        yield start, len(text), False


@cache_by_text  # an editor calls this after each key, which changes one line
def _measure_line(line: str) -> tuple[bool, int, bool]:
    """Returns whether a line has code, its opening minus its closing brackets, and whether its statement continues."""
    code = _CODE.match(line)[1].rstrip(" \t\r\f")  # type: ignore[index]  # it matches every line
    bare = _STRING.sub("", code) if '"' in code or "'" in code else code
    opened = sum(map(bare.count, "([{")) - sum(map(bare.count, ")]}"))
    return bool(code), opened, is_open_ended(bare, 0, len(bare))


def is_open_ended(text: str, start: int, end: int) -> bool:
    """Whether the statement between two offsets continues on the next line. The text must not end in a blank."""
    found = _OPEN_END.search(text, max(start, end - _OPEN_END_WINDOW), end)
    if found is None or not found[1]:
        return found is not None
    before = found.start() - 1
    while before >= start and text[before] in " \t\r\f":
        before -= 1
    return before < start or text[before] not in "=>,.^@"  # after these the word is a name


def comment_ranges(text: str) -> Iterator[tuple[int, int]]:
    """Yields the start and the end of every comment."""
    for match in BRACKET_PATTERN.finditer(text):
        if match.group().startswith("#"):
            yield match.span()
