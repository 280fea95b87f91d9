"""Reads a file that the grammar does not accept, statement by statement, so that one error does not hide the next.

The end of a statement is a guess, because the error may be in the text that would have ended it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from lark.exceptions import UnexpectedInput

from policyc.language.diagnostics import Span
from policyc.language.parser.builder import StatementBuilder
from policyc.language.parser.grammar import (
    check_depth,
    explain_syntax_error,
    parse_tree,
    shorten,
    syntax_diagnostic,
)
from policyc.language.parser.statements import (
    STRING_PATTERN,
    BlockStatement,
    Statement,
    is_open_ended,
)
from policyc.language.schedule import StepCondition

_WORD_END = r"(?![\w?*~.\[{]|-(?!>))"  # as in the grammar: the word is not the start of a selector
_HEADER = re.compile(rf"(after|until|variant){_WORD_END}[^\n;#{{}}]*\{{")
_GROUP = r"group(?=[ \t\r\f]+[^\W\d]\w*[ \t\r\f]*=)"
_KEYWORD = re.compile(
    rf"[ \t\r\f]*((import|recipe|after|until|variant){_WORD_END}|seed(?=[ \t\r\f]*=)|{_GROUP}|\}})"
)
_OBJECT = re.compile(r"\{\s*[\"']")  # in JSON: the whole object is one error, not one per line
_ARROW_IN_LINE = re.compile(r"[^\n#;]*->")
_CLOSING_BRACKET_IN_LINE = re.compile(r"(?:(?!->)[^\n#(){}\[\]])*[)\]]")
_ARROW_FIRST = re.compile(r"[ \t\r\f]*->")
_BLANK = " \t\r\f\n"  # the grammar's whitespace; Python's `strip` knows more characters
_BETWEEN_STATEMENTS = re.compile(rf"(?:[{_BLANK};]|#[^\n]*)+")
_TOKEN = re.compile(
    rf"""{STRING_PATTERN}|(?<!\S)/\*|#[^\n]*|->|[(\[{{)\]}}]|[\n;]|[^"'#()\[\]{{}}\n;/-]+|.""", re.DOTALL
)
_MAX_BLOCK_COMMENT = 4_000  # characters searched for the end of a block comment, so that many are cheap


@dataclass(slots=True)
class _OpenBlock:
    """A block whose closing brace has not been seen. Its header is None if it has an error, or if it is the file."""

    header: StepCondition | str | None
    start: int
    body: list[Statement]


def recover(builder: StatementBuilder, position: int) -> tuple[Statement, ...]:
    """Returns the valid statements after a position. The builder collects the diagnostics of the others.

    Blocks are opened and closed here, so that each statement inside them is parsed alone too.
    """
    source, text = builder.source, builder.source.text
    open_blocks = [_OpenBlock(None, position, [])]
    while True:
        blank = _BETWEEN_STATEMENTS.match(text, position)
        position = blank.end() if blank else position
        if position >= len(text):
            break
        header = _HEADER.match(text, position)
        depth = len(open_blocks) - 1
        if text[position] == "}":
            _close_block(builder, open_blocks, position)
            position += 1
        elif header:
            too_deep = check_depth(source, position, header.end(), depth)
            if too_deep is not None:
                builder.diagnostics.append(too_deep)
                return ()
            (block,) = _parse_piece(builder, position, header.end(), closing="\n}") or (None,)
            open_header = block.header if isinstance(block, BlockStatement) else None
            open_blocks.append(_OpenBlock(open_header, position, []))
            position = header.end()
        else:
            end = _find_statement_end(text, position)
            too_deep = check_depth(source, position, end, depth)
            if too_deep is not None:
                builder.diagnostics.append(too_deep)
            else:
                open_blocks[-1].body.extend(_parse_piece(builder, position, end))
            position = end
    for unclosed in open_blocks[1:]:
        end = unclosed.start + len(shorten(text[unclosed.start :]))
        builder.diagnostics.append(
            syntax_diagnostic(source, unclosed.start, end, "this block is never closed", "add '}'")
        )
    return tuple(open_blocks[0].body)


def _close_block(builder: StatementBuilder, open_blocks: list[_OpenBlock], position: int) -> None:
    """Ends the innermost block at a closing brace."""
    if len(open_blocks) == 1:
        builder.diagnostics.append(
            syntax_diagnostic(
                builder.source, position, position + 1, "unexpected '}'", "no block is open here"
            )
        )
        return
    block = open_blocks.pop()
    if block.header is not None:
        span = Span(builder.source, block.start, position + 1)
        open_blocks[-1].body.append(BlockStatement(block.header, tuple(block.body), span))


def _find_statement_end(text: str, start: int) -> int:
    """Guesses where the statement at `start` ends, from brackets and line ends.

    A statement also ends before a line that looks like another statement: one that starts with a keyword, or that has
    an arrow when this one has an arrow already. It goes on if the next line starts with the arrow that this one lacks,
    because that is one error and not two.
    """
    depth, position, end = 0, start, start  # `end` follows the last text that is neither blank nor comment
    is_object = _OBJECT.match(text, start) is not None
    searched = start  # no block comment ends before this position
    has_arrow = _KEYWORD.match(text, start) is not None  # a statement with a keyword needs no arrow
    while position < len(text):
        match = _TOKEN.match(text, position)
        assert match is not None
        token = match.group()
        if token == "/*":  # not a comment in a policy, but one error, not one per line
            limit = match.end() + _MAX_BLOCK_COMMENT
            close = text.find("*/", max(match.end(), searched), limit)
            searched = limit - 1 if close < 0 else searched
            position = end = close + 2 if close >= 0 else match.end()
            continue
        if token in ("(", "[", "{"):
            depth += 1
        elif token in (")", "]", "}"):
            if token == "}" and depth == 0:
                return position
            depth = max(0, depth - 1)
        elif token == ";":
            if depth == 0 or not _CLOSING_BRACKET_IN_LINE.match(text, position):
                return end
        elif token == "->":
            has_arrow = True
        elif token == "\n":
            continues = depth > 0 or is_open_ended(text, start, end)
            if not continues and (has_arrow or not _ARROW_FIRST.match(text, position + 1)):
                return end
            next_line = position + 1
            starts_anew = _KEYWORD.match(text, next_line) or (
                has_arrow and _ARROW_IN_LINE.match(text, next_line)
            )
            if starts_anew and not (is_object and depth > 0):
                return end
        if token.strip(_BLANK) and not token.startswith("#"):
            end = position + len(token.rstrip(_BLANK))
        position = match.end()
    return end


def _parse_piece(builder: StatementBuilder, start: int, end: int, closing: str = "") -> tuple[Statement, ...]:
    """Parses the text between two offsets alone. `closing` is appended to complete it."""
    try:
        tree = parse_tree(builder.source.text[start:end] + closing)
    except UnexpectedInput as error:
        diagnostic = explain_syntax_error(builder.source, error, start)
        if diagnostic.span.start >= end:
            span = Span(builder.source, end, end)
            diagnostic = replace(diagnostic, span=span, message="this statement ends too early")
        builder.diagnostics.append(diagnostic)
        return ()
    return builder.read(tree, start)
