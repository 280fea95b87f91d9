"""Highlighters have the words of the language: those of the grammar, and of the tables."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("pygments")

from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Error, Keyword, Name, Number, Operator

from policyc.editor import words
from policyc.editor.pygments_lexer import PolicyLexer
from policyc.language.bundled import bundled_policies, data_folder

pytestmark = pytest.mark.any_jax

GRAMMAR = (data_folder("grammars") / "policy.lark").read_text(encoding="utf-8")
TEXTMATE = json.loads(
    (data_folder("grammars") / "vscode" / "syntaxes" / "policy.tmLanguage.json").read_text(encoding="utf-8")
)["repository"]


def test_the_keywords_are_those_of_the_grammar() -> None:
    in_grammar = set(re.findall(r"^[A-Z]+\.5: /([a-z]+)", GRAMMAR, re.MULTILINE))
    assert in_grammar == {*words.STATEMENTS, *words.CLAUSES, *words.OPERATORS}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("statement", words.STATEMENTS),
        ("clause", words.CLAUSES),
        ("operator", words.OPERATORS),
        ("product", words.PRODUCTS),
        ("option", words.OPTION_NAMES),
        ("recipe", words.RECIPES),
        ("attribute", words.ATTRIBUTES),
    ],
)
def test_textmate_has_the_same_words(rule: str, expected: tuple[str, ...]) -> None:
    alternatives = re.search(r"\((\w+(?:\|\w+)*)\)", TEXTMATE[rule]["match"])
    assert alternatives is not None
    assert sorted(alternatives[1].split("|")) == sorted(expected)


def test_pygments_finds_the_lexer_by_its_name() -> None:
    assert get_lexer_by_name("policy").name == PolicyLexer.name


def tokens(text: str) -> list[tuple[str, object]]:
    return [(value, kind) for kind, value in PolicyLexer().get_tokens(text) if value.strip()]


def test_pygments_tells_words_apart_by_their_place() -> None:
    found = tokens("recipe nv = nvfp4(sr=grad)  # recipe\nrecipe.up @ wgrad where mlp and k == 16 -> nv\n")
    assert found[0] == ("recipe", Keyword.Declaration)
    assert ("nvfp4", Name.Builtin) in found
    assert ("sr", Name.Attribute) in found
    assert ("# recipe", Comment.Single) in found
    assert found[[kind for _, kind in found].index(Comment.Single) + 1] == ("recipe", Name)
    expected = {
        ("wgrad", Keyword.Constant),
        ("where", Keyword),
        ("mlp", Name.Variable.Global),
        ("16", Number),
    }
    assert {*expected, ("and", Operator.Word), ("->", Operator)} <= {*found}


@pytest.mark.parametrize("name", bundled_policies())
def test_pygments_reads_every_bundled_policy(name: str) -> None:
    text = bundled_policies()[name].read_text(encoding="utf-8")
    assert "".join(value for _, value in PolicyLexer(stripnl=False).get_tokens(text)) == text
    assert Error not in {kind for _, kind in tokens(text)}
