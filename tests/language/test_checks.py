"""Checks of names and options. What they say about faulty policies is in tests/ui/policies/language."""

from __future__ import annotations

import pytest

from policyc.language.checks import Definitions, DiagnosticCollector, check_definitions
from policyc.language.formats import FORMATS
from policyc.language.loader import parse_with_diagnostics
from policyc.language.policy import RecipeCall, RecipeDef
from policyc.language.recipes import OPTIONS

pytestmark = pytest.mark.any_jax


def summary(text: str) -> list[tuple[str, str]]:
    """The code of each diagnostic, and the text that it points at."""
    return [(d.code, d.span.text) for d in parse_with_diagnostics(text).diagnostics]


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
