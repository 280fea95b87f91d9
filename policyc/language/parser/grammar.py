"""The grammar at work: trees out of text, and faults out of what it does not take.

In: text. Out: lark's trees, or a diagnostic in plain words. The one trap: offsets in a piece are offsets in the file
less its start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from lark import Lark, Token
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from policyc.language import bundled
from policyc.language.diagnostics import Diagnostic, SourceText, Span
from policyc.language.parser.statements import BRACKET_PATTERN

MAX_DEPTH = 32  # brackets in brackets


class _Newlines:
    """Drops the newlines that cannot end a statement."""

    always_accept = ("_SEP",)
    _CONTINUES = frozenset(
        {"COMMA", "ARROW", "EQUAL", "AT", "AND", "OR", "NOT", "WHERE", "COMPARE", "PERCENT", "DOT"}
    )

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        depth, before = 0, ""
        for token in stream:
            open_ended = depth > 0 or before in self._CONTINUES
            if token.type == "_SEP" and open_ended and ";" not in re.sub("#[^\n]*", "", token):
                continue
            depth += {"LPAR": 1, "LSQB": 1, "RPAR": -1, "RSQB": -1}.get(token.type, 0)
            before = token.type
            yield token


def parse_tree(text: str) -> Any:
    """The tree of a text, or lark's `UnexpectedInput`."""
    return _lark().parse(text)


@cache
def _lark() -> Lark:
    grammar = (bundled.data_folder("grammars") / "policy.lark").read_text(encoding="utf-8")
    return Lark(grammar, parser="lalr", start="policy", postlex=_Newlines())


_WORDS = {
    "ARROW": "'->'", "_SEP": "end of line", "SEGMENT": "a selector", "WORD": "a name", "COMMA": "','", "DOT": "'.'",
    "LPAR": "'('", "RPAR": "')'", "LSQB": "'['", "RSQB": "']'", "LBRACE": "'{'", "RBRACE": "'}'", "EQUAL": "'='",
    "AT": "'@'", "WHERE": "'where'", "EXPECT": "'expect'", "INT": "a number", "NUMBER": "a number", "SET": "'{...}'",
    "POINT": "a step or a percentage", "BOUND": "an index", "COLON": "':'", "STRING": "a file name in quotes",
    "COMPARE": "a comparison", "AND": "'and'", "OR": "'or'", "NOT": "'not'", "PERCENT": "'%'", "VALUE": "a value",
    "ANCHOR": "'^'", "$END": "end of file", "MORE_PRODUCTS": "', PRODUCT'",
    "IMPORT": "a statement", "RECIPE": "a statement", "AFTER": "a statement", "UNTIL": "a statement",
    "VARIANT": "a statement",
}  # fmt: skip

_MENDS = (
    (re.compile(r"=>|→|:="), "an arrow is written '->'"),
    (re.compile(r"&&?"), "write 'and'"),
    (re.compile(r"\|\|?"), "write 'or' in a predicate, {a,b} in a selector"),
    (re.compile(r"!"), "write 'not'"),
    (re.compile(r"//"), "a comment starts with '#'"),
    (re.compile(r"/"), "names are separated by dots"),
)


def explain_syntax_error(source: SourceText, error: UnexpectedInput, offset: int) -> Diagnostic:
    position: Any = error.pos_in_stream
    at = offset + max(position or 0, 0)
    expected: set[str] = set()
    if isinstance(error, UnexpectedToken):
        accepts: Any = error.accepts  # what the parser really takes; lark leaves it out at times
        expected, token = set(accepts or error.expected), error.token
        if token.type == "$END":
            at = offset + (token.end_pos or 0) if token.end_pos else len(source.text.rstrip())
            return syntax_diagnostic(source, at, at, "the text ends too early", _expectation(expected))
        end = at + max(1, len(token.rstrip()))
        seen = (
            "end of line" if token.type == "_SEP" and "#" not in token and ";" not in token else token.strip()
        )
    else:
        assert isinstance(error, UnexpectedCharacters)
        expected, seen, end = set(error.allowed or ()), source.text[at : at + 1], at + 1
    mend = next((text for pattern, text in _MENDS if pattern.match(source.text, at)), "")
    if seen == "=" and "COMPARE" in expected:
        mend = mend or "a comparison is written '=='"
    if seen.startswith(";") and "RPAR" in expected:
        mend = "options are separated by commas"
    shown = seen if seen == "end of line" else f"'{shorten(seen)}'"
    return syntax_diagnostic(source, at, end, f"unexpected {shown}", mend or _expectation(expected))


def shorten(text: str) -> str:
    first = text.splitlines()[0] if text.splitlines() else text
    return first if len(first) <= 40 else first[:39] + "…"


def _expectation(expected: set[str]) -> str:
    words = sorted({_WORDS.get(name, name) for name in expected - {"MORE_PRODUCTS"}})
    if "'->'" in words:
        words = ["'->'"]
    if "a statement" in words:
        words = ["a statement", *(w for w in words if w == "'}'")]
    return f"expected {' or '.join(words)}" if 0 < len(words) <= 5 else ""


def syntax_diagnostic(source: SourceText, start: int, end: int, message: str, help: str = "") -> Diagnostic:
    return Diagnostic(code="syntax-error", message=message, span=Span(source, start, end), help=help)


def has_syntax_error(found: tuple[Diagnostic, ...]) -> bool:
    """Is there a fault among them for which the grammar would not take the file?"""
    return any(d.code in ("syntax-error", "nested-too-deep") for d in found)


def check_depth(source: SourceText, start: int, end: int, depth: int = 0) -> Diagnostic | None:
    """A fault where brackets nest deeper than anyone writes by hand; what is not this deep cannot overflow."""
    for match in BRACKET_PATTERN.finditer(source.text, start, end):
        if match.group() in ("(", "[", "{"):
            depth += 1
        elif match.group() in (")", "]", "}"):
            depth = max(0, depth - 1)
        if depth > MAX_DEPTH:
            return Diagnostic(
                code="nested-too-deep",
                message=f"brackets are nested more than {MAX_DEPTH} deep",
                span=Span(source, match.start(), match.end()),
                help="name the inner recipes, or write several rules",
            )
    return None
