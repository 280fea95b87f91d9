"""Diagnostics as text: caret, window on long lines, escapes, suggestions, and the limit on long lists."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policyc import PolicyError, parse
from policyc.base.text import closest_name, did_you_mean
from policyc.language.diagnostics import Diagnostic, Edit, Fix, Note, Severity, SourceText, Span, render

pytestmark = pytest.mark.any_jax


def parse_error_lines(text: str) -> list[str]:
    """The lines of the error that parsing a text raises."""
    with pytest.raises(PolicyError) as caught:
        parse(text)
    return str(caught.value).split("\n")


def render_at(text: str, part: str) -> list[str]:
    """The lines of a diagnostic at a part of a text."""
    start = text.index(part)
    span = Span(SourceText(text, "x.policy"), start, start + len(part))
    return render(Diagnostic(code="c", message="m", span=span)).split("\n")


@pytest.mark.parametrize("offset", [0, 37, 500_000, 999_990])
def test_a_line_of_a_megabyte_is_printed_through_a_window(offset):
    text = "x" * offset + "BAD" + "y" * (10**6 - offset)
    head, line, caret = render_at(text, "BAD")
    assert head == f"x.policy:1:{offset + 1}: error[c]: m"
    assert len(line) < 120
    start = caret.index("^")
    assert line[start : start + 3] == "BAD"
    assert caret.count("^") == 3
    assert ("…x" in line) == (offset > 100)
    assert line.endswith("y…") == (offset < 999_990)


def test_an_error_about_a_name_of_a_megabyte_is_short():
    lines = parse_error_lines("a -> " + "x" * 10**6)
    assert all(len(line) < 600 for line in lines)
    assert lines[1].startswith("1 | a -> xxx")


@given(st.lists(st.integers(0, 0x10FFFF).map(chr)).map("".join))
def test_control_characters_are_never_printed(text):
    source = SourceText(text, text)
    span = Span(source, 0, len(text))
    diagnostic = Diagnostic(code="c", message=text, help=text, span=span, notes=(Note(span, text),))
    assert all(line.isprintable() for line in render(diagnostic).split("\n"))


def test_notes_and_fixes_are_printed_and_every_part_is_painted():
    source = SourceText("one two three", "x.policy")
    diagnostic = Diagnostic(
        code="some-fault",
        message="what",
        span=Span(source, 4, 7),
        severity=Severity.WARNING,
        help="try",
        notes=(Note(Span(source, 0, 3), "see"),),
        fix=Fix(message="repair", edits=(Edit(Span(source, 0, 1), ""),), safe=True),
    )
    assert render(diagnostic).split("\n") == [
        "x.policy:1:5: warning[some-fault]: what",
        "1 | one two three",
        "  |     ^^^ try",
        "x.policy:1:1: note: see",
        "1 | one two three",
        "  | ^^^",
        "fix: repair",
    ]
    painted = render(diagnostic, lambda kind, text: f"<{kind}:{text}>")
    for kind in ("warning", "path", "gutter", "caret", "help", "note"):
        assert f"<{kind}:" in painted


# ---- the exception


def test_an_error_prints_at_most_50_diagnostics():
    assert "more" not in str(PolicyError(make_diagnostics(50)))
    text = str(PolicyError(make_diagnostics(60)))
    assert text.count("error[") == 50
    assert text.endswith("... and 10 more")


def make_diagnostics(count: int) -> list[Diagnostic]:
    source = SourceText("x" * count)
    return [Diagnostic(code="c", message="m", span=Span(source, i, i + 1)) for i in range(count)]


def test_the_diagnostics_of_an_error_are_in_the_order_of_the_text():
    diagnostics = make_diagnostics(9)
    assert PolicyError(diagnostics[::-1]).diagnostics == tuple(diagnostics)


def test_an_error_can_be_pickled():
    with pytest.raises(PolicyError) as caught:
        parse("a => b")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# ---- positions


@given(st.text(st.sampled_from("ab\n\r"), max_size=40))
def test_positions_agree_with_counting_line_breaks(text):
    source = SourceText(text)
    for offset in range(len(text) + 1):
        before = text[:offset]
        line, column = source.position(offset)
        assert line == before.count("\n") + 1
        assert column == offset - (before.rfind("\n") + 1) + 1
        assert source.line(line) == text.split("\n")[line - 1].rstrip("\r")


# ---- suggestions


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("nvfp5", ["nvfp4", "mxfp4", "bf16"], "nvfp4"),
        ("NVFP4", ["nvfp4", "bf16"], "nvfp4"),
        ("gard", ["grad", "all"], "grad"),
        ("zzz", ["grad", "all"], None),
        ("x" * 65, ["x" * 64], None),
        ("", ["a"], None),
    ],
)
def test_the_closest_name(name, known, expected):
    assert closest_name(name, known) == expected


def test_without_a_close_name_a_short_list_is_printed():
    assert did_you_mean("zzz", ["one", "two"]) == "known: one, two"
    assert did_you_mean("zzz", [f"name{i}" for i in range(13)]) == ""
    assert did_you_mean("zzz", []) == ""
