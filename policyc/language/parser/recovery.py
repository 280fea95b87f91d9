"""A file that the grammar does not take, read statement by statement: one mistake does not hide the next.

In: a builder and its source. Out: the statements that could be read; the faults of the others are the builder's. The
one trap: where a statement ends is a guess, since the mistake may be in what would have ended it.
"""

from __future__ import annotations

import re
from dataclasses import replace

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
from policyc.language.parser.statements import STRING_PATTERN, BlockStatement, Statement
from policyc.language.schedule import StepCondition

_HEADER = re.compile(r"(after|until|variant)(?![\w?*~.\[{]|-(?!>))[^\n;#{}]*\{")
_KEYWORD = re.compile(r"[ \t\r\f]*((import|recipe|after|until|variant)(?![\w?*~.\[{]|-(?!>))|\})")
_ARROW_AHEAD = re.compile(r"[^\n#;]*->")
_CLOSES = re.compile(r"(?:(?!->)[^\n#(){}\[\]])*[)\]]")
_ARROW_FIRST = re.compile(r"[ \t\r\f]*->")
_BLANK = " \t\r\f\n"  # not what else Python strips: the grammar does not
_SKIP = re.compile(rf"(?:[{_BLANK};]|#[^\n]*)+")
_STEP = re.compile(rf"""{STRING_PATTERN}|#[^\n]*|->|[(\[{{)\]}}]|[\n;]|[^"'#()\[\]{{}}\n;-]+|.""", re.DOTALL)
_OPEN_ENDED = re.compile(r"(,|->|=|@|%|<|>|\.|\band|\bor|\bnot|\bwhere)\Z")


def recover(builder: StatementBuilder) -> tuple[Statement, ...]:
    """Read statement by statement. Blocks are opened and closed here, so that their statements are tried alone too."""
    text = builder.source.text
    stack: list[tuple[StepCondition | str | None, list[Statement], int]] = [(None, [], 0)]
    at = 0
    while True:
        skipped = _SKIP.match(text, at)
        at = skipped.end() if skipped else at
        if at >= len(text):
            break
        header = _HEADER.match(text, at)
        if text[at] == "}":
            if len(stack) > 1:
                opened, body, start = stack.pop()
                if opened is not None:
                    stack[-1][1].append(
                        BlockStatement(opened, tuple(body), Span(builder.source, start, at + 1))
                    )
            else:
                builder.found.append(
                    syntax_diagnostic(builder.source, at, at + 1, "unexpected '}'", "nothing is open here")
                )
            at += 1
        elif header:
            deep = check_depth(builder.source, at, header.end(), len(stack) - 1)
            if deep is not None:
                builder.found.append(deep)
                return ()
            (block,) = _piece(builder, at, header.end(), closing="\n}") or (None,)
            stack.append((block.header if isinstance(block, BlockStatement) else None, [], at))
            at = header.end()
        else:
            end = _statement_end(text, at)
            deep = check_depth(builder.source, at, end, len(stack) - 1)
            if deep is not None:
                builder.found.append(deep)
            else:
                stack[-1][1].extend(_piece(builder, at, end))
            at = end
    for _, _, start in stack[1:]:
        line = shorten(text[start:])
        builder.found.append(
            syntax_diagnostic(
                builder.source, start, start + len(line), "this block is never closed", "add '}'"
            )
        )
    return tuple(stack[0][1])


def _statement_end(text: str, at: int) -> int:
    """Where the statement that starts at `at` ends, if brackets and line ends can be trusted.

    They cannot where a line that looks like the start of another statement follows: a word that opens one, or a second
    arrow. Nor where the next line starts with the arrow that this one lacks: that is one fault, not two.
    """
    depth, start, solid = 0, at, at  # `solid` is the end of what is neither space nor comment
    arrow = _KEYWORD.match(text, at) is not None
    while at < len(text):
        match = _STEP.match(text, at)
        assert match is not None
        piece = match.group()
        if piece in ("(", "[", "{"):
            depth += 1
        elif piece in (")", "]", "}"):
            if piece == "}" and depth == 0:
                return at
            depth = max(0, depth - 1)
        elif piece == ";":
            if depth == 0 or not _CLOSES.match(text, at):
                return solid
        elif piece == "->":
            arrow = True
        elif piece == "\n":
            goes_on = depth > 0 or _OPEN_ENDED.search(text, max(start, solid - 16), solid)
            if not goes_on and (arrow or not _ARROW_FIRST.match(text, at + 1)):
                return solid
            if _KEYWORD.match(text, at + 1) or (arrow and _ARROW_AHEAD.match(text, at + 1)):
                return solid
        if piece.strip(_BLANK) and not piece.startswith("#"):
            solid = at + len(piece.rstrip(_BLANK))
        at = match.end()
    return solid


def _piece(builder: StatementBuilder, start: int, end: int, closing: str = "") -> tuple[Statement, ...]:
    try:
        tree = parse_tree(builder.source.text[start:end] + closing)
    except UnexpectedInput as error:
        syntax_diagnostic = explain_syntax_error(builder.source, error, start)
        if syntax_diagnostic.span.start >= end:
            place = Span(builder.source, end, end)
            syntax_diagnostic = replace(
                syntax_diagnostic, span=place, message="this statement ends too early"
            )
        builder.found.append(syntax_diagnostic)
        return ()
    builder.offset = start
    statements = builder.statements(tree.children)
    builder.offset = 0
    return statements
