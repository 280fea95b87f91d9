"""The lexer: splits the text of a policy into tokens, and the tokens into statements.

Nothing else reads the text of a policy. The parser, the formatter, the linter and editors all start from these tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

KEYWORDS = ("policyc", "import", "seed", "recipe", "group", "after", "until", "variant")
"""Words that start a statement."""

BLOCKS = frozenset({"after", "until", "variant"})
OPENING, CLOSING = frozenset("([{"), frozenset(")]}")

_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*)|(?P<string>"[^"\n]*"|'[^'\n]*')|(?P<newline>\n)"""
    r"""|(?P<name>(?:[\w?*~]|-(?!>))+)|(?P<sign>->|[=!<>]=|[^ \t\r\f])""",
    re.VERBOSE,
)
_WORD = re.compile(r"[^\W\d]\w*")
_CONTINUE = frozenset({",", "->", "=", "@", "==", "!=", "<=", ">=", "<", ">", "%", "."})
_CONTINUE_CONDITION = frozenset({"and", "or", "not", "where"})
_BEFORE_NAMES = frozenset({"=", "->", ",", ".", "^", "@"})


class Token(NamedTuple):
    """A piece of the text. A `name` is a word, a number or a glob: letters, digits and `_?*~-`."""

    kind: Literal["comment", "string", "newline", "name", "sign", "end"]
    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    @property
    def is_word(self) -> bool:
        """Whether it can name a recipe, a group, a variant or an option."""
        return self.kind == "name" and _WORD.fullmatch(self.text) is not None


def lex(text: str) -> list[Token]:
    """Splits a text into tokens. Only blanks lie between them."""
    return [
        Token(match.lastgroup, match.group(), match.start())  # type: ignore[arg-type]  # each match has a group
        for match in _TOKEN.finditer(text)
    ]


def find_keyword(statement: Sequence[Token]) -> str:
    """Returns the keyword that a statement starts with; empty for a rule. A rule may start with a scope named so."""
    if not statement or statement[0].text not in KEYWORDS:
        return ""
    first, second, third = (*(token.text for token in statement[:3]), "", "")[:3]
    if first == "policyc":
        return first if second[:1].isdecimal() else ""
    if first == "seed":
        return first if second == "=" else ""
    if first == "group":
        return first if third == "=" and statement[1].is_word else ""
    is_scope = second in (".", "[", "{") and statement[1].start == statement[0].end
    return "" if is_scope else first


def split_statements(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    """Yields the tokens of each statement, without comments and newlines.

    The head of a block ends with its opening brace, and a closing brace is a statement of its own. A newline ends a
    statement, unless a bracket is open or an operator, a comma or an arrow is next to it. A bracket that is never
    closed ends where the next statement starts, so that one error does not hide the next.
    """
    statement: list[Token] = []
    brackets: list[str] = []
    has_arrow = False
    for number, token in enumerate(tokens):
        text, ends = token.text, False
        if token.kind == "name":
            statement.append(token)
            continue
        if token.kind == "comment":
            continue
        if token.kind == "newline":
            ends = not _continues(statement, brackets, has_arrow, tokens, number + 1)
        elif text == "}" and "{" not in brackets:
            if statement:
                yield statement
            statement, ends = [token], True
        elif text == ";" and not brackets:
            ends = True
        else:
            statement.append(token)
            if text in OPENING:
                brackets.append(text)
                ends = text == "{" and len(brackets) == 1 and find_keyword(statement) in BLOCKS
            elif text in CLOSING and brackets:
                while brackets.pop() != "{" and text == "}":
                    pass
            elif text == "->":
                has_arrow = True
        if ends:
            if statement:
                yield statement
            statement, brackets, has_arrow = [], [], False
    if statement:
        yield statement


def _continues(
    statement: list[Token], brackets: list[str], has_arrow: bool, tokens: Sequence[Token], next: int
) -> bool:
    """Whether a statement continues after a newline. `next` is the number of the first token of the next line."""
    if not statement:
        return False
    last = statement[-1].text
    is_open = last in _CONTINUE or (
        last in _CONTINUE_CONDITION and len(statement) > 1 and statement[-2].text not in _BEFORE_NAMES
    )
    is_before_arrow = next < len(tokens) and tokens[next].text == "->" and not has_arrow
    if not (brackets or is_open or is_before_arrow):
        return False
    keyword = find_keyword(statement)
    if is_before_arrow and not keyword:
        return True
    if keyword in BLOCKS or "{" in brackets[-1:] or not (brackets or is_open):
        return False
    return not _starts_statement(tokens, next, has_arrow or keyword != "")


def _starts_statement(tokens: Sequence[Token], first: int, has_arrow: bool) -> bool:
    """Whether a line is the start of a statement and not the rest of one that `has_arrow`, or needs none."""
    line: list[Token] = []
    for number in range(first, len(tokens)):
        if tokens[number].kind == "newline" or tokens[number].text == ";":
            break
        line.append(tokens[number])
    if has_arrow and any(token.text == "->" for token in line):
        return True
    keyword, second = find_keyword(line), line[1] if len(line) > 1 else None
    if not keyword or second is None:
        return False
    if keyword == "import":
        return second.text[0] in "\"'"
    if keyword in ("after", "until"):
        return second.text[0].isdecimal()
    return keyword in ("group", "seed") or (second.is_word and len(line) > 2 and line[2].text in ("=", "{"))
