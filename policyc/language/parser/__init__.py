"""Parses the text of one policy file into statements. Only this package imports lark.

A file that the grammar accepts is parsed as a whole. Any other file is cut into statements, and each is parsed alone. A
statement with an error is left out, so a `PolicyFile` that comes with diagnostics is incomplete.
"""

from __future__ import annotations

from lark.exceptions import UnexpectedInput

from policyc.language.diagnostics import Diagnostic, SourceText
from policyc.language.parser.builder import StatementBuilder
from policyc.language.parser.grammar import check_depth, explain_syntax_error, has_syntax_error, parse_tree
from policyc.language.parser.recovery import recover
from policyc.language.parser.statements import (
    MAX_FILE_BYTES,
    BlockStatement,
    ImportStatement,
    PolicyFile,
    Statement,
    comment_ranges,
)

__all__ = [
    "MAX_FILE_BYTES",
    "BlockStatement",
    "ImportStatement",
    "PolicyFile",
    "Statement",
    "comment_ranges",
    "read_statements",
]


def read_statements(source: SourceText) -> tuple[PolicyFile, tuple[Diagnostic, ...]]:
    """The statements of a text that could be read, and what is wrong with the others."""
    builder = StatementBuilder(source)
    try:
        tree = parse_tree(source.text)
    except UnexpectedInput as error:
        first = explain_syntax_error(source, error, 0)
        statements = recover(builder)
        found = tuple(builder.found)
        return PolicyFile(source, statements), found if has_syntax_error(found) else (first, *found)
    deep = check_depth(source, 0, len(source.text))
    if deep is not None:
        return PolicyFile(source, ()), (deep,)
    return PolicyFile(source, builder.statements(tree.children)), tuple(builder.found)
