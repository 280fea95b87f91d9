"""Runs the grammar: parses the tokens of a statement into a tree of lark, and explains syntax errors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Any, Literal

from lark import Lark, Token
from lark.exceptions import UnexpectedToken
from lark.lexer import Lexer

from policyc.language import bundled
from policyc.language.diagnostics import Diagnostic, SourceText, Span
from policyc.language.parser import lexer
from policyc.language.parser.habits import explain_habit
from policyc.language.recipes import GEMM_GROUPS

MAX_DEPTH = 16
"""Nesting of brackets, blocks and imports, and length of a chain of recipes."""

_WINDOW = 200  # characters around an error in which habits are looked for
_NUMBER = re.compile(r"-?[0-9][0-9_]*(\.[0-9]+)?([eE][0-9]+)?")
_WORDS = {word: word.upper() for word in ("where", "expect", "and", "or", "not")}
_SIGNS = {
    "->": "ARROW", "^": "ANCHOR", "{": "LBRACE", "}": "RBRACE", "[": "LSQB", "]": "RSQB", "(": "LPAR", ")": "RPAR",
    ":": "COLON", "%": "PERCENT", "=": "EQUAL", ",": "COMMA", ".": "DOT", "@": "AT",
    **dict.fromkeys(("==", "!=", "<=", ">=", "<", ">"), "COMPARE"),
}  # fmt: skip
_SHOWN = {
    **{terminal: f"'{sign}'" for sign, terminal in _SIGNS.items()}, **{t: f"'{word}'" for word, t in _WORDS.items()},
    "COMPARE": "a comparison", "SEGMENT": "a selector", "WORD": "a name", "NUMBER": "a number", "NEGATIVE": "a number",
    "STRING": "a file name in quotes", "SET": "'{...}'", "VALUE": "a value", "$END": "end of line",
    "MORE_PRODUCTS": "','",
}  # fmt: skip
_OPTIONAL = {"PERCENT", "ANCHOR", "AND", "OR", "NOT", "COMPARE"}
"""Terminals that a message lists only as a last resort."""


class _Terminals(Lexer):
    """Names the terminals that the tokens of a statement are, which depends on what the grammar accepts there."""

    __future_interface__ = 2

    def __init__(self, lexer_conf: object) -> None:
        del lexer_conf  # the terminals' patterns: the text is split into tokens already

    def lex(self, lexer_state: Any, parser_state: Any) -> Iterator[Token]:
        tokens: Sequence[lexer.Token] = lexer_state.text
        states, position = parser_state.parse_conf.parse_table.states, 0
        while position < len(tokens):
            terminal, end = _name_terminal(tokens, position, states[parser_state.position])
            used = tokens[position:end]
            text = used[0].text if len(used) == 1 else "".join(token.text for token in used)
            yield Token(terminal, text, start_pos=used[0].start, end_pos=used[-1].end)
            position = end


def _name_terminal(tokens: Sequence[lexer.Token], first: int, accepted: Collection[str]) -> tuple[str, int]:
    """Returns the terminal that starts at a token, and the number of the token after it."""
    token, text = tokens[first], tokens[first].text
    if token.kind == "string":
        return "STRING", first + 1
    if first == 0 and (keyword := lexer.find_keyword(tokens)):
        return keyword.upper(), 1
    if "SEGMENT" in accepted and (end := _glue(tokens, first, "", "{")) > first:
        return "SEGMENT", end
    if text == "{" and "SET" in accepted and (end := _skip_braces(tokens, first, ",./")) > first:
        return "SET", end
    if token.kind == "name":
        if _WORDS.get(text) in accepted:
            return _WORDS[text], first + 1
        end = _glue(tokens, first, "./" if "VALUE" in accepted else ".", "")
        glued = "".join(token.text for token in tokens[first:end])
        if "NUMBER" in accepted and _NUMBER.fullmatch(glued):
            return "NEGATIVE" if glued.startswith("-") else "NUMBER", end
        if "VALUE" in accepted and (end > first + 1 or text[0].isdecimal()):
            return "VALUE", end
        return "WORD" if token.is_word else "NAME", first + 1
    if text == "," and "MORE_PRODUCTS" in accepted and first + 1 < len(tokens):
        end = _glue(tokens, first + 1, ".", "{[")
        if tokens[first + 1].text in GEMM_GROUPS and end == first + 2:
            return "MORE_PRODUCTS", end
    return _SIGNS.get(text, "SIGN"), first + 1


def _glue(tokens: Sequence[lexer.Token], first: int, signs: str, braces: str) -> int:
    """Returns the end of the names, signs and `{...}` that start at a token and have nothing between them."""
    end = first
    while end < len(tokens) and (end == first or tokens[end].start == tokens[end - 1].end):
        token = tokens[end]
        if token.kind == "name" or (end > first and token.text and token.text in signs):
            end += 1
        elif token.text and token.text in braces:
            after = _skip_braces(tokens, end, ",.") if token.text == "{" else end + 1
            if after == end:
                break
            end = after
        else:
            break
    return end


def _skip_braces(tokens: Sequence[lexer.Token], first: int, signs: str) -> int:
    """Returns the end of a list of names in braces; its start if there is something else in them."""
    for number in range(first + 1, len(tokens)):
        if tokens[number].text == "}":
            return number + 1
        if tokens[number].kind != "name" and tokens[number].text not in signs:
            break
    return first


@cache
def _lark() -> Lark:
    grammar = (bundled.data_folder("grammars") / "policy.lark").read_text(encoding="utf-8")
    return Lark(grammar, parser="lalr", lexer=_Terminals, start=["statement", "header"])


def parse_tree(tokens: Sequence[lexer.Token], start: Literal["statement", "header"]) -> Any:
    """Returns the tree of a statement, or of the header of a block. Raises lark's `UnexpectedToken`."""
    return _lark().parse(tokens, start)


def explain_syntax_error(
    source: SourceText, tokens: Sequence[lexer.Token], error: UnexpectedToken
) -> Diagnostic:
    """Returns the diagnostic for an error of lark in a statement."""
    accepts: Any = error.accepts  # what the parser really accepts; `expected` has more
    end, token = tokens[-1].end, error.token
    is_at_end = token.type == "$END"
    start = end if is_at_end else token.start_pos
    before = source.text[max(tokens[0].start, start - _WINDOW) : start]
    after = source.text[start : min(end, start + _WINDOW)]
    shown = {_SHOWN.get(terminal, terminal.lower()) for terminal in accepts}
    help = explain_habit(before, after, shown) or _list_expected(accepts)
    message = "this statement ends too early" if is_at_end else f"unexpected '{token}'"
    return syntax_error(Span(source, start, end if is_at_end else token.end_pos), message, help)


def _list_expected(accepts: set[str]) -> str:
    names = {_SHOWN.get(terminal, "a statement") for terminal in accepts - _OPTIONAL or accepts}
    listed = ["'->'"] if "'->'" in names else ["a selector"] if "a statement" in names else sorted(names)
    return f"expected {' or '.join(listed)}" if listed else ""


def syntax_error(span: Span, message: str, help: str = "") -> Diagnostic:
    return Diagnostic(code="syntax-error", message=message, span=span, help=help)


def too_deep(span: Span) -> Diagnostic:
    help = "name the inner recipes, or write several rules"
    message = f"nested more than {MAX_DEPTH} deep"
    return Diagnostic(code="nested-too-deep", message=message, span=span, help=help)


def find_deepest(tokens: Sequence[lexer.Token]) -> lexer.Token | None:
    """Returns the first bracket that nests deeper than `MAX_DEPTH`."""
    depth = 0
    for token in tokens:
        depth += (token.text in lexer.OPENING) - (token.text in lexer.CLOSING)
        if depth > MAX_DEPTH:
            return token
    return None
