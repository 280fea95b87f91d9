"""Checks of names and options: statements in, diagnostics out. No file is read, and nothing is compiled."""

from __future__ import annotations

import pytest

from policyc.language.checks import Definitions, DiagnosticCollector, check_definitions
from policyc.language.diagnostics import Diagnostic, SourceText
from policyc.language.formats import FORMATS
from policyc.language.parser import read_statements
from policyc.language.policy import RecipeCall, RecipeDef, Rule
from policyc.language.recipes import OPTIONS

pytestmark = pytest.mark.any_jax


def definitions(text: str) -> Definitions:
    """The recipes and rules of a text that has nothing else in it."""
    file, diagnostics = read_statements(SourceText(text))
    assert not diagnostics
    collected = Definitions()
    for statement in file.statements:
        if isinstance(statement, RecipeDef):
            collected.recipes[statement.name] = statement
        else:
            assert isinstance(statement, Rule)
            collected.rules.append(statement)
    return collected


def diagnose(base: str, *variants: str) -> list[Diagnostic]:
    """The diagnostics of a policy and its variants."""
    collector = DiagnosticCollector()
    check_definitions(collector, definitions(base), [definitions(v) for v in variants])
    return collector.diagnostics


def only(base: str, *variants: str) -> Diagnostic:
    (diagnostic,) = diagnose(base, *variants)
    return diagnostic


def summary(base: str, *variants: str) -> list[tuple[str, str]]:
    """The code of each diagnostic, and the text that it points at."""
    return [(d.code, d.span.text) for d in diagnose(base, *variants)]


def fixed(diagnostic: Diagnostic) -> str:
    """The text after the fix."""
    assert diagnostic.fix is not None
    text = diagnostic.span.source.text
    for edit in sorted(diagnostic.fix.edits, key=lambda e: e.span.start, reverse=True):
        text = text[: edit.span.start] + edit.text + text[edit.span.end :]
    return text


# ---- names


NAMES = [
    # the policy, its variants, the code and the text of each diagnostic, part of the last one's help, the fixed text
    ("a -> nv; recipe nv = other; recipe other = bf16", (), [], "", ""),
    ("recipe linear = bf16\na -> liner", (), [("unknown-recipe", "liner")], "did you mean 'linear'?",
     "recipe linear = bf16\na -> linear"),
    ("a -> nvfp5(sr=grad)", (), [("unknown-format", "nvfp5")], "did you mean 'nvfp4'?", "a -> nvfp4(sr=grad)"),
    ("a -> something(sr=grad)", (), [("unknown-format", "something")], f"formats: {', '.join(FORMATS)}", ""),
    ("recipe r = zzz1\na -> split(fprop=zzz2, dgrad=split(dgrad=zzz3))", (),
     [("unknown-recipe", f"zzz{i}") for i in (1, 2, 3)], "", ""),
    ("recipe nv = nvfp4\na -> nv(sr=grad)", (), [("unknown-option", "sr=grad")], "give them where 'nv' is defined", ""),
    # a variant knows the recipes of the policy, and nothing else does
    ("recipe r = bf16", ("a -> r",), [], "", ""),
    ("a -> r", ("recipe r = bf16",), [("unknown-recipe", "r")], "", ""),
    ("", ("recipe r = bf16", "a -> r"), [("unknown-recipe", "r")], "", ""),
    # a variant is checked against the recipes it redefines
    ("recipe a = b; recipe b = bf16", ("recipe b = fp8",), [], "", ""),
    ("recipe a = b; recipe b = bf16", ("recipe b = a",), [("recipe-cycle", "b")], "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("base", "variants", "summaries", "help", "after"), NAMES)
def test_names_are_found_or_reported_with_the_closest_one(base, variants, summaries, help, after):
    assert summary(base, *variants) == summaries
    for found in diagnose(base, *variants)[-1:]:
        assert help in found.help
        assert not after or (fixed(found), found.fix.safe) == (after, False)


def test_only_the_first_fifty_unknown_names_get_a_suggestion():
    text = "recipe name = bf16\n" + "a -> nbme\n" * 60
    helps = [d.help for d in diagnose(text)]
    assert helps.count("did you mean 'name'?") == 50
    assert len(helps) == 60


# ---- chains


@pytest.mark.parametrize(
    ("text", "cycle"),
    [
        ("recipe a = a", "a -> a"),
        ("recipe a = b; recipe b = a", "a -> b -> a"),
        ("recipe a = b; recipe b = c; recipe c = b", "b -> c -> b"),
        ("recipe a = split(fprop=bf16, wgrad=a)", "a -> a"),
    ],
)
def test_a_cycle_is_reported_once_with_its_names(text, cycle):
    found = only(text)
    assert found.code == "recipe-cycle"
    assert found.message == f"this recipe refers to itself: {cycle}"


def test_recipes_that_share_another_are_no_cycle():
    assert diagnose("recipe a = split(fprop=b, dgrad=c); recipe b = d; recipe c = d; recipe d = bf16") == []


@pytest.mark.parametrize(("length", "codes"), [(32, []), (33, ["nested-too-deep"])])
def test_a_chain_has_at_most_32_recipes(length, codes):
    chain = "".join(f"recipe r{i} = r{i + 1}\n" for i in range(1, length)) + f"recipe r{length} = bf16\n"
    assert [d.code for d in diagnose(chain)] == codes


def test_the_variants_share_a_limit_of_steps_from_recipe_to_recipe():
    """Each variant takes 64 steps, two for each of 32 recipes: 700 variants stay below 100,000 steps, 4,000 do not."""
    chain = (
        "".join(f"recipe r{i} = split(fprop=r{i + 1}, bwd=bf16)\n" for i in range(30)) + "recipe r30 = bf16\n"
    )
    assert diagnose(chain, *["recipe x = r0"] * 700) == []
    found = diagnose(chain, *["recipe x = r0"] * 4000)
    assert [d.code for d in found] == ["nested-too-deep"]
    assert found[0].message == "resolving the recipes of the variants takes too many steps"


# ---- options


@pytest.mark.parametrize(("format", "option"), [(f.name, o) for f in FORMATS.values() for o in f.options])
def test_every_option_of_a_format_is_known(format, option):
    choices = OPTIONS[option].choices
    value = choices[0] if choices else "on"
    assert diagnose(f"a -> {format}({option}={value})") == []


@pytest.mark.parametrize(
    ("text", "help"),
    [
        ("fp8(rht=wgrad)", "it is an option of nvfp4, mxfp4, fp4"),
        ("nvfp4(scale2e=weights)", "did you mean 'scale2d'?"),
        ("fp8(zzz=1)", "known: grad, outer, sums"),
        ("bf16(zzz=1)", "'bf16' takes no options"),
    ],
)
def test_an_unknown_option_says_what_is_known(text, help):
    found = only(f"a -> {text}")
    assert (found.code, found.help) == ("unknown-option", help)


@pytest.mark.parametrize(
    ("text", "message", "help"),
    [
        ("nvfp4(sr=gard)", "'sr' cannot be 'gard'", "did you mean 'grad'?"),
        ("nvfp4(sr={grad,zzz})", "'sr' cannot be 'zzz'", "expected one of none, all, fprop"),
        ("nvfp4(rht_size=17)", "'rht_size' cannot be '17'", "expected one of 16, 32, 64, 128"),
        ("nvfp4(rht_size)", "'rht_size' needs a value", "expected one of 16, 32, 64, 128"),
        ("nvfp4(scale={amax,four_over_six})", "'scale' takes only one value", "expected one of amax"),
        ("nvfp4(mean_split=maybe)", "'mean_split' cannot be 'maybe'", "expected on or off"),
    ],
)
def test_an_invalid_value_says_what_is_expected(text, message, help):
    found = only(f"a -> {text}")
    assert (found.code, found.message) == ("unknown-value", message)
    assert found.help.startswith(help)


@pytest.mark.parametrize(
    ("text", "expected", "safe"),
    [
        ("a -> fp8(grad=e4m3, grad=e4m3)", "a -> fp8(grad=e4m3)", True),
        ("a -> fp8(grad=e4m3, grad=e5m2)", "a -> fp8(grad=e4m3)", False),
    ],
)
def test_a_second_setting_of_an_option_can_be_removed(text, expected, safe):
    """The fix is safe only if both settings are the same."""
    found = only(text)
    assert found.code == "duplicate-option"
    assert [n.message for n in found.notes] == ["first given here"]
    assert found.fix is not None
    assert found.fix.safe is safe
    assert fixed(found) == expected


def test_a_second_setting_after_a_comment_has_no_fix():
    assert only("a -> fp8(grad=e4m3, # why\n grad=e4m3)").fix is None


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("nvfp4(rounding=ms_eden, sr=grad)", "rounding=ms_eden", "sr=grad"),
        ("nvfp4(rounding=ms_eden, rht=wgrad)", "rounding=ms_eden", "rht=wgrad"),
        ("nvfp4(rounding=ms_eden, scale2d=weights)", "rounding=ms_eden", "scale2d=weights"),
        ("nvfp4(rounding=ms_eden, scale=four_over_six)", "rounding=ms_eden", "scale=four_over_six"),
        ("nvfp4(rounding=ms_eden, outer=bound)", "rounding=ms_eden", "outer=bound"),
        ("nvfp4(scale=four_over_six, sr=all)", "scale=four_over_six", "sr=all"),
        ("nvfp4(scale=four_over_six, sr={fprop,bwd})", "scale=four_over_six", "sr={fprop,bwd}"),
        ("nvfp4(scale2d=weights, outer=row)", "scale2d=weights", "outer=row"),
    ],
)
def test_options_that_exclude_each_other(text, first, second):
    found = only(f"a -> {text}")
    assert (found.code, found.span.text) == ("contradictory-options", second)
    assert [n.span.text for n in found.notes] == [first]


def test_a_bound_needs_a_format_that_rotates():
    found = only("a -> fp8(outer=bound)")
    assert (found.code, found.span.text, found.notes) == ("contradictory-options", "outer=bound", ())
    assert "fp8 has no rht" in found.message


@pytest.mark.parametrize("option", ["rht", "sr"])
def test_none_excludes_every_other_word(option):
    found = only(f"a -> nvfp4({option}={{none,grad}})")
    assert (found.code, found.notes) == ("contradictory-options", ())
    assert found.message == f"'{option}' cannot be 'none' and something else"


@pytest.mark.parametrize(
    "text",
    [
        "nvfp4(rounding=ms_eden, sr=none, rht=none, scale2d=none, scale=amax)",
        "nvfp4(scale=four_over_six, sr=grad)",
        "nvfp4(scale2d=none, outer=row)",
        "fp8(outer=row)",
        "fp8(outer=row, grad=e4m3)",
        "nvfp4(rht=wgrad, sr=grad, scale2d=weights)",
    ],
)
def test_options_that_go_together(text):
    assert diagnose(f"a -> {text}") == []


# ---- selectors


@pytest.mark.parametrize(
    ("selector", "codes"),
    [
        ("{a,b}" * 10, []),
        ("{a,b}" * 11, ["too-many-alternatives"]),
        (".".join(["{a,b,c,d}"] * 5), []),
        (".".join(["{a,b,c,d}"] * 6), ["too-many-alternatives"]),
    ],
)
def test_braces_stand_for_at_most_1024_selectors(selector, codes):
    assert [d.code for d in diagnose(f"x, {selector} -> bf16")] == codes


# ---- the collector


def test_nodes_that_were_not_read_from_a_text_are_checked_too():
    collector = DiagnosticCollector()
    base = Definitions(recipes={"r": RecipeDef(name="r", recipe=RecipeCall(name="nvfp5"))})
    check_definitions(collector, base, [])
    (found,) = collector.diagnostics
    assert found.code == "unknown-format"
    assert str(found).startswith("<built>:1:1: error[unknown-format]")
