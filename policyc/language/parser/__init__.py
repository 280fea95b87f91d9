"""Text -> statements. The only importer of lark.

In: the text of one policy file. Out: a `File` of statements, and every fault found on the way. A file that the grammar
takes whole is read in one go; one that it does not take is cut into statements, and each is tried alone. The one trap:
a faulty statement is left out, so that a `File` with faults is not the whole file.
"""

from __future__ import annotations

from lark.exceptions import UnexpectedInput

from policyc.language.diagnostics import Diagnostic, SourceText
from policyc.language.parser.grammar import explains, parse, syntax_error, too_deep
from policyc.language.parser.nodes import Builder
from policyc.language.parser.recovery import recover
from policyc.language.parser.statements import LONGEST, Block, File, Import, Statement, comments

__all__ = ["LONGEST", "Block", "File", "Import", "Statement", "comments", "read"]


def read(source: SourceText) -> tuple[File, tuple[Diagnostic, ...]]:
    """The statements of a text that could be read, and what is wrong with the others."""
    builder = Builder(source)
    try:
        tree = parse(source.text)
    except UnexpectedInput as error:
        first = syntax_error(source, error, 0)
        statements = recover(builder)
        found = tuple(builder.found)
        return File(source, statements), found if explains(found) else (first, *found)
    deep = too_deep(source, 0, len(source.text))
    if deep is not None:
        return File(source, ()), (deep,)
    return File(source, builder.statements(tree.children)), tuple(builder.found)
