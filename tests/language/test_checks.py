"""Checks of names and options. What they say about faulty policies is in tests/ui/policies/language."""

from __future__ import annotations

import pytest

from policyc.language.checks import Definitions, DiagnosticCollector, check_definitions
from policyc.language.diagnostics import Diagnostic
from policyc.language.formats import FORMATS
from policyc.language.loader import parse_with_diagnostics
from policyc.language.policy import RecipeCall, RecipeDef
from policyc.language.recipes import OPTIONS

pytestmark = pytest.mark.any_jax


def summary(text: str) -> list[tuple[str, str]]:
    """The code of each diagnostic, and the text that it points at."""
    return [(d.code, d.span.text) for d in parse_with_diagnostics(text).diagnostics]


def fixed(diagnostic: Diagnostic) -> str:
    """The text after the fix."""
    assert diagnostic.fix is not None
    text = diagnostic.span.source.text
    for edit in sorted(diagnostic.fix.edits, key=lambda e: e.span.start, reverse=True):
        text = text[: edit.span.start] + edit.text + text[edit.span.end :]
    return text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a -> nv; recipe nv = other; recipe other = bf16", []),
        # a variant knows the recipes of the policy, and nothing else does
        ("recipe r = bf16; variant v { a -> r }", []),
        ("a -> r; variant v { recipe r = bf16 }", [("unknown-recipe", "r")]),
        ("variant v { recipe r = bf16 }; variant w { a -> r }", [("unknown-recipe", "r")]),
        # a variant is checked against the recipes it redefines
        ("recipe a = b; recipe b = bf16; variant v { recipe b = fp8 }", []),
        ("recipe a = b; recipe b = bf16; variant v { recipe b = a }", [("recipe-cycle", "b")]),
        # a diamond of references is not a cycle
        ("recipe a = split(fprop=b, dgrad=c); recipe b = d; recipe c = d; recipe d = bf16", []),
    ],
)
def test_names_of_variants_and_recipes(text, expected):
    assert summary(text) == expected


@pytest.mark.parametrize(
    ("text", "expected", "safe"),
    [
        ("recipe linear = bf16\na -> liner", "recipe linear = bf16\na -> linear", False),
        ("a -> nvfp5(sr=grad)", "a -> nvfp4(sr=grad)", False),
        ("a -> fp8(grad=e4m3, grad=e4m3)", "a -> fp8(grad=e4m3)", True),
        ("a -> fp8(grad=e4m3, grad=e5m2)", "a -> fp8(grad=e4m3)", False),
    ],
)
def test_fixes(text, expected, safe):
    """Removing a second setting is safe only if both settings are the same."""
    (found,) = parse_with_diagnostics(text).diagnostics
    assert fixed(found) == expected
    assert found.fix.safe is safe


@pytest.mark.parametrize("text", ["a -> fp8(grad=e4m3, # why\n grad=e4m3)", "a -> fp16"])
def test_what_has_no_fix(text):
    """A comment would be lost. bf16 has the size of fp16, but neither its precision nor its range."""
    (found,) = parse_with_diagnostics(text).diagnostics
    assert found.fix is None


@pytest.mark.parametrize(
    "text",
    [
        *(
            f"{f.name}({option}={(OPTIONS[option].choices or ('on',))[0]})"
            for f in FORMATS.values()
            for option in f.options
        ),
        "nvfp4(rounding=ms_eden, sr=none, rht=none, scale2d=none, scale=amax)",
        "nvfp4(scale=four_over_six, sr=grad)",
        "nvfp4(scale2d=none, outer=row)",
        "fp8(outer=row, grad=e4m3)",
        "nvfp4(rht=wgrad, sr=grad, scale2d=weights)",
    ],
)
def test_options_that_go_together(text):
    assert summary(f"a -> {text}") == []


@pytest.mark.parametrize(
    ("selector", "codes"),
    [
        ("{a,b}" * 10, []),
        ("{a,b}" * 11, ["too-many-alternatives"]),
        (".".join(["{a,b,c,d}"] * 6), ["too-many-alternatives"]),
    ],
)
def test_braces_stand_for_at_most_1024_selectors(selector, codes):
    assert [code for code, _ in summary(f"x, {selector} -> bf16")] == codes


def test_nodes_that_were_not_read_from_a_text_are_checked_too():
    collector = DiagnosticCollector()
    base = Definitions(recipes={"r": RecipeDef(name="r", recipe=RecipeCall(name="nvfp5"))})
    check_definitions(collector, base, [])
    (found,) = collector.diagnostics
    assert str(found).startswith("<built>:1:1: error[unknown-format]")
