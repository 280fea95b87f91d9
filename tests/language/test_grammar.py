"""The parser accepts what `grammars/policy.lark` accepts, with the lexer that lark makes from its terminals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import assume, example, given, settings
from lark import Lark, Token
from lark.exceptions import UnexpectedInput

from policyc.language.bundled import bundled_policies, data_folder
from policyc.language.diagnostics import SourceText
from policyc.language.parser import read_statements
from tests.support.strategies import damaged_texts, texts

pytestmark = pytest.mark.any_jax

NOT_IN_THE_GRAMMAR = ("split() names no product", "'.' is not allowed between braces")
CONTINUES = {"COMMA", "ARROW", "EQUAL", "AT", "AND", "OR", "NOT", "WHERE", "COMPARE", "PERCENT", "DOT"}


class NewlineFilter:
    """Drops the newlines that cannot end a statement."""

    always_accept = ("_SEP",)

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        depth, before = 0, ""
        for token in stream:
            continues = depth > 0 or before in CONTINUES
            if token.type == "_SEP" and continues and ";" not in re.sub("#[^\n]*", "", token):
                continue
            depth += {"LPAR": 1, "LSQB": 1, "RPAR": -1, "RSQB": -1}.get(token.type, 0)
            before = token.type
            yield token


@cache
def lark() -> Lark:
    grammar = (data_folder("grammars") / "policy.lark").read_text(encoding="utf-8")
    return Lark(grammar, parser="lalr", start="policy", postlex=NewlineFilter())


def grammar_accepts(text: str) -> bool:
    try:
        lark().parse(text)
    except UnexpectedInput:
        return False
    return True


def find_syntax_errors(text: str) -> set[str]:
    _, diagnostics = read_statements(SourceText(text))
    assume(all(d.code != "nested-too-deep" for d in diagnostics))
    return {d.message for d in diagnostics if d.code == "syntax-error"} - {*NOT_IN_THE_GRAMMAR}


@given(texts())
@settings(max_examples=40)
def test_the_grammar_accepts_every_spelling(drawn):
    assert grammar_accepts(drawn[1])


@given(damaged_texts())
@settings(max_examples=150)
@example("a -> b # c\n-> d")
@example("variant x {} a -> b; after 5 % { c -> d } e -> f")
def test_the_parser_accepts_what_the_grammar_accepts(text):
    assert (not find_syntax_errors(text)) == grammar_accepts(text)


@pytest.mark.parametrize("name", bundled_policies())
def test_the_grammar_accepts_the_bundled_policies(name):
    assert grammar_accepts(bundled_policies()[name].read_text(encoding="utf-8"))
