"""The formatter: one layout, the same statements and comments, and no change the second time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings

from policyc.language.bundled import bundled_policies
from policyc.language.diagnostics import SourceText
from policyc.language.formatter import format_text
from policyc.language.loader import parse_with_diagnostics
from policyc.language.parser import read_statements
from tests.support.strategies import texts

pytestmark = pytest.mark.any_jax


def fmt(text: str) -> str:
    file, diagnostics = read_statements(SourceText(text))
    assert not diagnostics
    return format_text(file.source.text)


def comments_of(text: str) -> list[str]:
    """The comments of a text without a '#' in a string."""
    return [line[line.index("#") :].rstrip() for line in text.split("\n") if "#" in line]


@given(texts())
@settings(max_examples=12)
def test_formatting_keeps_policy_and_comments_and_is_idempotent(drawn):
    policy, text, comments = drawn
    formatted = fmt(text)
    assert parse_with_diagnostics(formatted).policy == policy
    assert comments_of(formatted) == comments
    assert fmt(formatted) == formatted


@given(texts(commented=False))  # a statement with a comment inside keeps its empty lines
@settings(max_examples=12)
def test_no_trailing_spaces_and_no_repeated_empty_lines(drawn):
    _, text, _ = drawn
    lines = fmt(text).split("\n")
    assert lines.pop() == ""  # the text ends with a newline, and no empty line follows it
    assert "" not in (lines[:1] + lines[-1:])
    assert not any(a == b == "" for a, b in pairwise(lines))
    assert not any(line != line.rstrip() for line in lines)


@pytest.mark.parametrize("name", sorted(bundled_policies()))
def test_bundled_policies_are_formatted(name):
    text = bundled_policies()[name].read_text(encoding="utf-8")
    assert fmt(text) == text


@pytest.mark.parametrize("character", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\r"])
def test_a_comment_is_one_line_whatever_characters_it_contains(character):
    text = f"a -> nvfp4(  # one{character}line\n    sr=grad)\n# also{character}one\n"
    assert fmt(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "a -> unknown(x=y, z={p,q})",
        "a -> nvfp4(x=1.2.3, y={3/4})",
        'import "../nope"',
        "variant a { variant b {} }",
        "recipe bf16 = bf16",
    ],
)
def test_a_policy_with_unknown_names_is_formatted_too(text):
    assert parse_with_diagnostics(text).diagnostics
    assert fmt(fmt(text)) == fmt(text)
