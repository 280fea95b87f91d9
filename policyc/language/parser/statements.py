"""What a policy file consists of, as written, and where its comments are.

In: nothing but text. Out: the types that the rest of this package makes. The one trap: two statements are equal
wherever they stand; their spans do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from policyc.language.diagnostics import SourceText, Span
from policyc.language.policy import RecipeDef, Rule
from policyc.language.schedule import StepCondition

MAX_FILE_BYTES = 16 * 2**20  # bytes of a policy file
STRING_PATTERN = r"""\"[^"\n]*\"|'[^'\n]*'"""
BRACKET_PATTERN = re.compile(rf"{STRING_PATTERN}|#[^\n]*|[(\[{{)\]}}]")


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
    """`after`, `until` or `variant`, and the statements between its braces."""

    header: StepCondition | str
    body: tuple[Statement, ...]
    span: Span = field(compare=False)

    @property
    def head(self) -> str:
        return f"variant {self.header}" if isinstance(self.header, str) else str(self.header)


Statement = ImportStatement | RecipeDef | Rule | BlockStatement


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """The statements of a file, as written."""

    source: SourceText
    statements: tuple[Statement, ...]


def comment_ranges(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of every comment."""
    for match in BRACKET_PATTERN.finditer(text):
        if match.group().startswith("#"):
            yield match.span()
