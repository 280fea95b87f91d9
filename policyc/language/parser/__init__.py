"""Parses the text of one policy file into statements. Only this package imports lark.

A file is parsed statement by statement, so that after an edit only one of them is parsed again. Statements with errors
are left out, so a `PolicyFile` that comes with diagnostics may be incomplete.
"""

from __future__ import annotations

from lark.exceptions import UnexpectedInput

from policyc.base.text import cache_by_text
from policyc.language.diagnostics import Diagnostic, SourceText
from policyc.language.parser.builder import StatementBuilder
from policyc.language.parser.confusables import check_confusables
from policyc.language.parser.grammar import (
    check_depth,
    explain_syntax_error,
    has_syntax_error,
    parse_tree,
)
from policyc.language.parser.recovery import recover
from policyc.language.parser.statements import (
    BlockStatement,
    ImportStatement,
    PolicyFile,
    Statement,
    comment_ranges,
    find_pieces,
)

__all__ = [
    "BlockStatement",
    "ImportStatement",
    "PolicyFile",
    "Statement",
    "comment_ranges",
    "find_pieces",
    "read_piece",
    "read_statements",
]


def read_statements(source: SourceText) -> tuple[PolicyFile, tuple[Diagnostic, ...]]:
    """Returns the statements of a text that could be read, and the diagnostics of the others."""
    builder, statements, tree = StatementBuilder(source), list[Statement](), None
    for start, end, _ in find_pieces(source.text):
        first_error = check_depth(source, start, end)
        try:
            tree = None if first_error else parse_tree(source.text[start:end])
        except UnexpectedInput as error:
            first_error = explain_syntax_error(source, error, start)
        if first_error is not None:
            statements += recover(builder, start)
            if not has_syntax_error(builder.diagnostics):
                builder.diagnostics.append(first_error)
            break
        statements += builder.read(tree, start)
    return PolicyFile(source, tuple(statements)), (*check_confusables(source), *builder.diagnostics)


@cache_by_text
def read_piece(text: str) -> tuple[Statement, ...] | None:
    """Returns the statements of a piece of a text; None if it has errors. Their spans count from its start.

    The results are cached, so after an edit only the changed pieces are read. `read_statements` builds all statements
    again, because their positions changed.
    """
    source = SourceText(text, "")
    if check_depth(source, 0, len(text)) is not None or check_confusables(source):
        return None
    try:
        tree = parse_tree(text)
    except UnexpectedInput:
        return None
    builder = StatementBuilder(source)
    statements = builder.read(tree, 0)
    return None if builder.diagnostics else statements
