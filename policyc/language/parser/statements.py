"""The statements of a policy file, as written, and where its comments are.

Spans are not compared: equal statements may come from different places.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from policyc.language.diagnostics import SourceText, Span
from policyc.language.groups import GroupDef
from policyc.language.policy import RecipeDef, Rule, Seed
from policyc.language.schedule import StepCondition

STRING_PATTERN = r"""\"[^"\n]*\"|'[^'\n]*'"""
BRACKET_PATTERN = re.compile(rf"{STRING_PATTERN}|#[^\n]*|[(\[{{)\]}}]")
"""A string, a comment or a bracket, so that brackets inside strings and comments are not counted."""


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


_LINE = re.compile(r"[ \t\r\f]*((?:[^#\n\"']+|\"[^\"\n]*\"|'[^'\n]*'|[\"'])*)(?:#[^\n]*)?(?:\n|\Z)")
_STRING = re.compile(STRING_PATTERN)
OPEN_ENDED = re.compile(r"(,|->|=|@|%|<|>|\.|\band|\bor|\bnot|\bwhere)\Z")
"""The end of a line that does not end a statement."""
OPEN_END_WINDOW = 16  # characters: longer than any match of OPEN_ENDED; a constant, so that lines are cheap


def find_pieces(text: str) -> Iterator[tuple[int, int, bool]]:
    """Yields the start and the end of each piece of a text. What is between them is blank, or has only a comment.

    A piece ends with a line that closes its brackets: mostly it is one statement. The grammar accepts a text if it
    accepts all of its pieces. The third value is false for a last piece that has no end: the grammar accepts no such.
    """
    start, depth = None, 0
    for line in _LINE.finditer(text):
        code = line.group(1).rstrip(" \t\r\f")
        if not code:
            continue
        start = line.start() if start is None else start
        bare = _STRING.sub("", code) if '"' in code or "'" in code else code
        depth += sum(map(bare.count, "([{")) - sum(map(bare.count, ")]}"))
        if depth <= 0 and not OPEN_ENDED.search(bare, max(0, len(bare) - OPEN_END_WINDOW)):
            yield start, line.end(), True
            start, depth = None, 0
    if start is not None:
        yield start, len(text), False


def comment_ranges(text: str) -> Iterator[tuple[int, int]]:
    """Yields the start and the end of every comment."""
    for match in BRACKET_PATTERN.finditer(text):
        if match.group().startswith("#"):
            yield match.span()
