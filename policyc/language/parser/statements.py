"""What a policy file consists of, as written, and where its comments are.

In: nothing but text. Out: the types that the rest of this package makes. The one trap: two statements are equal
wherever they stand; their spans do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from policyc.language.diagnostics import SourceText, Span
from policyc.language.policy import RecipeDef, Rule, When

LONGEST = 16 * 2**20  # bytes of a policy file
STRING = r"""\"[^"\n]*\"|'[^'\n]*'"""
BRACKETS = re.compile(rf"{STRING}|#[^\n]*|[(\[{{)\]}}]")


@dataclass(frozen=True, slots=True)
class Import:
    """`import "FILE"`."""

    path: str
    span: Span = field(compare=False)

    def __str__(self) -> str:
        quote = "'" if '"' in self.path else '"'
        return f"import {quote}{self.path}{quote}"


@dataclass(frozen=True, slots=True)
class Block:
    """`after`, `until` or `variant`, and the statements between its braces."""

    header: When | str
    body: tuple[Statement, ...]
    span: Span = field(compare=False)

    @property
    def head(self) -> str:
        return f"variant {self.header}" if isinstance(self.header, str) else str(self.header)


Statement = Import | RecipeDef | Rule | Block


@dataclass(frozen=True, slots=True)
class File:
    """The statements of a file, as written."""

    source: SourceText
    statements: tuple[Statement, ...]


def comments(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of every comment."""
    for match in BRACKETS.finditer(text):
        if match.group().startswith("#"):
            yield match.span()
