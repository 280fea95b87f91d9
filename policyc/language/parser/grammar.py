"""Runs the grammar: parses text into lark trees, and explains syntax errors.

When a piece of a file is parsed alone, lark counts offsets from the start of the piece.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lark import Lark, Token
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from policyc.base.files import cache_folder
from policyc.base.text import cache_by_text
from policyc.language import bundled
from policyc.language.diagnostics import Diagnostic, SourceText, Span
from policyc.language.parser.habits import explain_habit, find_error_site
from policyc.language.parser.statements import BRACKET_PATTERN

MAX_DEPTH = 32
"""Maximum nesting depth of brackets. The builder recurses, so deeper nesting could overflow the stack."""

_MAX_QUOTED = 40  # characters of a token or a line in a message
_MAX_EXPECTED = 5  # terminals listed in a message; more would not help


class _NewlineFilter:
    """Drops newlines that cannot end a statement. Runs between the lexer and the parser."""

    always_accept = ("_SEP",)
    _CONTINUES = frozenset(
        {"COMMA", "ARROW", "EQUAL", "AT", "AND", "OR", "NOT", "WHERE", "COMPARE", "PERCENT", "DOT"}
    )

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        depth, before = 0, ""
        for token in stream:
            continues = depth > 0 or before in self._CONTINUES
            if token.type == "_SEP" and continues and ";" not in re.sub("#[^\n]*", "", token):
                continue
            depth += {"LPAR": 1, "LSQB": 1, "RPAR": -1, "RSQB": -1}.get(token.type, 0)
            before = token.type
            yield token


@cache_by_text
def parse_tree(text: str) -> Any:
    """Returns the tree of a text. Raises lark's `UnexpectedInput`."""
    return _lark().parse(text)


@cache
def _lark() -> Lark:
    grammar = (bundled.data_folder("grammars") / "policy.lark").read_text(encoding="utf-8")
    options: dict[str, Any] = {"parser": "lalr", "start": "policy", "postlex": _NewlineFilter()}
    kept = _kept_tables()
    return Lark(grammar, **options) if kept is None else Lark(grammar, **options, cache=str(kept))


def _kept_tables() -> Path | None:
    """Path of lark's parser-table cache. Building the tables takes a third of the time of a lint.

    lark rebuilds them if the file is damaged or belongs to another grammar or version. None without a cache folder.
    """
    try:
        return cache_folder() / f"grammar_{sys.version_info.major}_{sys.version_info.minor}"
    except OSError:
        return None


_TERMINAL_NAMES = {
    "ARROW": "'->'", "_SEP": "end of line", "SEGMENT": "a selector", "WORD": "a name", "COMMA": "','", "DOT": "'.'",
    "LPAR": "'('", "RPAR": "')'", "LSQB": "'['", "RSQB": "']'", "LBRACE": "'{'", "RBRACE": "'}'", "EQUAL": "'='",
    "AT": "'@'", "WHERE": "'where'", "EXPECT": "'expect'", "INT": "a number", "NUMBER": "a number", "SET": "'{...}'",
    "NEGATIVE": "a number",
    "POINT": "a step or a percentage", "BOUND": "an index", "COLON": "':'", "STRING": "a file name in quotes",
    "COMPARE": "a comparison", "AND": "'and'", "OR": "'or'", "NOT": "'not'", "PERCENT": "'%'", "VALUE": "a value",
    "ANCHOR": "'^'", "$END": "end of file", "MORE_PRODUCTS": "', PRODUCT'",
    "IMPORT": "a statement", "RECIPE": "a statement", "AFTER": "a statement", "UNTIL": "a statement",
    "VARIANT": "a statement", "SEED": "a statement", "GROUP": "a statement",
}  # fmt: skip


def explain_syntax_error(source: SourceText, error: UnexpectedInput, offset: int) -> Diagnostic:
    """Returns the diagnostic for an error of lark. `offset` is the start of the parsed piece in the source."""
    position: Any = error.pos_in_stream
    start = offset + max(position or 0, 0)
    if isinstance(error, UnexpectedToken):
        accepts: Any = error.accepts  # what the parser really accepts; lark sometimes leaves it out
        expected, token = set(accepts or error.expected), error.token
        if token.type == "$END":
            end = offset + (token.end_pos or 0) if token.end_pos else len(source.text.rstrip())
            return syntax_diagnostic(source, end, end, "the text ends too early", _list_expected(expected))
        is_newline = token.type == "_SEP" and "#" not in token and ";" not in token
        end, unexpected = start + max(1, len(token.rstrip())), "end of line" if is_newline else token.strip()
    else:
        assert isinstance(error, UnexpectedCharacters)
        expected, unexpected, end = set(error.allowed or ()), source.text[start : start + 1], start + 1
    quoted = unexpected if unexpected == "end of line" else f"'{shorten(unexpected)}'"
    help = explain_habit(find_error_site(source.text, start, expected)) or _list_expected(expected)
    return syntax_diagnostic(source, start, end, f"unexpected {quoted}", help)


def _list_expected(expected: set[str]) -> str:
    """Lists the expected terminals. If there are many, lists only the end of the line, or the first few."""
    names = sorted({_TERMINAL_NAMES.get(name, name) for name in expected - {"MORE_PRODUCTS"}})
    if "'->'" in names:
        names = ["'->'"]
    if "a statement" in names:
        names = ["a statement", *(n for n in names if n == "'}'")]
    if len(names) > _MAX_EXPECTED:
        names = ["end of line"] if "_SEP" in expected else [*names[:_MAX_EXPECTED], "..."]
    return f"expected {' or '.join(names)}" if names else ""


def shorten(text: str) -> str:
    """Returns the first line of a text, cut to the longest length quoted in a message."""
    first = text.partition("\n")[0]
    return first if len(first) <= _MAX_QUOTED else first[: _MAX_QUOTED - 1] + "…"


def syntax_diagnostic(source: SourceText, start: int, end: int, message: str, help: str = "") -> Diagnostic:
    return Diagnostic(code="syntax-error", message=message, span=Span(source, start, end), help=help)


def has_syntax_error(diagnostics: Sequence[Diagnostic]) -> bool:
    """Whether one of the diagnostics explains why the grammar did not accept the file."""
    return any(d.code in ("syntax-error", "nested-too-deep") for d in diagnostics)


def check_depth(source: SourceText, start: int, end: int, depth: int = 0) -> Diagnostic | None:
    """Returns a diagnostic if brackets nest too deep between two offsets. `depth` is the nesting at the start."""
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
