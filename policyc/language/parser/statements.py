"""The statements of a policy file, as written.

Spans are not compared: equal statements may come from different places.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from policyc.language.diagnostics import SourceText, Span
from policyc.language.groups import GroupDef
from policyc.language.parser.lexer import Token
from policyc.language.policy import RecipeDef, Rule, Seed
from policyc.language.schedule import StepCondition


@dataclass(frozen=True, slots=True)
class ImportStatement:
    """`import "FILE"`."""

    path: str
    span: Span = field(compare=False)

    def __str__(self) -> str:
        quote = "'" if '"' in self.path else '"'
        return f"import {quote}{self.path}{quote}"


@dataclass(frozen=True, slots=True)
class VersionStatement:
    """`policyc N`: the version of the language that a file is written in."""

    version: int
    span: Span = field(compare=False)

    def __str__(self) -> str:
        return f"policyc {self.version}"


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


Statement = VersionStatement | ImportStatement | Seed | RecipeDef | GroupDef | Rule | BlockStatement


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """The statements of a file, as written, and all of its tokens."""

    source: SourceText
    statements: tuple[Statement, ...]
    tokens: tuple[Token, ...] = field(compare=False, repr=False)

    @property
    def comments(self) -> tuple[Token, ...]:
        return tuple(token for token in self.tokens if token.kind == "comment")
