"""Parses the text of one policy file into statements.

Statements with errors are left out, so a `PolicyFile` that comes with diagnostics may be incomplete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from policyc.language.diagnostics import Diagnostic, SourceText, Span
from policyc.language.parser.builder import StatementParser
from policyc.language.parser.grammar import MAX_DEPTH, syntax_error, too_deep
from policyc.language.parser.lexer import BLOCKS, KEYWORDS, Token, find_keyword, lex, split_statements
from policyc.language.parser.statements import (
    BlockStatement,
    ImportStatement,
    PolicyFile,
    Statement,
    VersionStatement,
)
from policyc.language.schedule import StepCondition

__all__ = [
    "KEYWORDS",
    "MAX_DEPTH",
    "BlockStatement",
    "ImportStatement",
    "PolicyFile",
    "Statement",
    "StatementParser",
    "Token",
    "VersionStatement",
    "find_keyword",
    "lex",
    "read_statements",
    "split_statements",
]


@dataclass(slots=True)
class _OpenBlock:
    """A block whose closing brace has not been seen. Its header is None if it has an error, or if it is the file."""

    header: StepCondition | str | None
    head: Span
    body: list[Statement]


class Parser(Protocol):
    """What `read_statements` needs of a parser."""

    diagnostics: list[Diagnostic]

    def statement(self, tokens: Sequence[Token]) -> Statement | None: ...
    def header(self, tokens: Sequence[Token]) -> StepCondition | str | None: ...


def read_statements(
    source: SourceText, parser: Parser | None = None
) -> tuple[PolicyFile, tuple[Diagnostic, ...]]:
    """Returns the statements of a text that could be read, and the diagnostics of the others."""
    tokens = tuple(lex(source.text))
    parser = parser or StatementParser(source)
    blocks = [_OpenBlock(None, Span(source, 0, 0), [])]
    for statement in split_statements(tokens):
        first, last = statement[0], statement[-1]
        if first.text == "}":
            if len(blocks) > 1:
                _close(blocks, last.end)
            else:
                span = Span(source, first.start, first.end)
                parser.diagnostics.append(syntax_error(span, "unexpected '}'", "no block is open here"))
        elif find_keyword(statement) in BLOCKS:
            header = parser.header(statement)
            if last.text == "{":
                blocks.append(_OpenBlock(header, Span(source, first.start, last.end), []))
            if len(blocks) > MAX_DEPTH + 1:
                parser.diagnostics.append(too_deep(blocks[-1].head))
                break
        elif (parsed := parser.statement(statement)) is not None:
            blocks[-1].body.append(parsed)
    else:
        for block in blocks[1:]:
            parser.diagnostics.append(syntax_error(block.head, "this block is never closed", "add '}'"))
    while len(blocks) > 1:
        _close(blocks, len(source.text))
    return PolicyFile(source, tuple(blocks[0].body), tokens), tuple(parser.diagnostics)


def _close(blocks: list[_OpenBlock], end: int) -> None:
    """Ends the innermost block at an offset. A block whose header has an error is left out."""
    block = blocks.pop()
    if block.header is not None:
        span = Span(block.head.source, block.head.start, end)
        blocks[-1].body.append(BlockStatement(block.header, tuple(block.body), span))
