"""How faults are shown: caret, window, escapes, suggestions, and an end to long lists."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policyc import PolicyError, parse
from policyc.language.diagnostics import (
    Diagnostic,
    Edit,
    Fix,
    Note,
    Severity,
    SourceText,
    Span,
    closest_name,
    did_you_mean,
    render,
)


def shown(text: str) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        parse(text)
    return str(caught.value).split("\n")


def marked(text: str, part: str, **more) -> list[str]:
    """The lines that show a fault at a part of a text."""
    start = text.index(part)
    span = Span(SourceText(text, "x.policy"), start, start + len(part))
    return render(Diagnostic(code="c", message="m", span=span, **more)).split("\n")


def test_the_example_of_the_style_guide():
    assert shown("\n\nmlp.* -> nvfp5") == [
        "<policy>:3:10: error[unknown-format]: no format named 'nvfp5'",
        "3 | mlp.* -> nvfp5",
        "  |          ^^^^^ did you mean 'nvfp4'?",
        "unsafe fix: replace it by 'nvfp4'",
    ]


@pytest.mark.parametrize(
    ("text", "line", "caret"),
    [
        ("a\tb", "1 | a b", "  |   ^"),
        ("\t\tb", "1 |   b", "  |   ^"),
        ("名前 b", "1 | 名前 b", "  |      ^"),
        ("e\u0301 b", "1 | e\u0301 b", "  |   ^"),
        ("\x1b[31m b", "1 | \\x1b[31m b", "  |          ^"),
        ("\u202e b", "1 | \\x202e b", "  |        ^"),
        ("x" * 30 + " b", "1 | " + "x" * 30 + " b", "  | " + " " * 31 + "^"),
    ],
)
def test_the_caret_stands_under_the_fault(text, line, caret):
    assert marked(text, "b")[1:] == [line, caret]


def test_the_caret_is_as_wide_as_what_it_marks():
    assert marked("a 名前\tb c", "名前\tb")[1:] == ["1 | a 名前 b c", "  |   ^^^^^^"]


def test_a_fault_over_several_lines_is_marked_to_the_end_of_the_first():
    assert marked("a(b\nc)d", "(b\nc)")[1:] == ["1 | a(b", "  |  ^^"]


def test_the_gutter_is_as_wide_as_the_number():
    assert marked("\n" * 99 + "bad", "bad")[1:] == ["100 | bad", "    | ^^^"]


def test_a_fault_at_the_end_of_the_text():
    assert shown("mlp.* ->")[1:] == ["1 | mlp.* ->", "  |         ^ expected a name"]
    assert shown("mlp.* ->\n\n")[1:] == ["1 | mlp.* ->", "  |         ^ expected a name"]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_line_ends_are_not_shown(line_end):
    assert shown(f"a -> bf16{line_end}b => bf16{line_end}c -> bf16")[1] == "2 | b => bf16"


@pytest.mark.parametrize("where", [0, 37, 500_000, 999_990])
def test_a_line_of_a_megabyte_is_shown_through_a_window(where):
    text = "x" * where + "BAD" + "y" * (10**6 - where)
    head, line, caret = marked(text, "BAD")
    assert head == f"x.policy:1:{where + 1}: error[c]: m"
    assert len(line) < 120
    at = caret.index("^")
    assert line[at : at + 3] == "BAD"
    assert caret.count("^") == 3
    assert ("…x" in line) == (where > 100)
    assert line.endswith("y…") == (where < 999_990)


def test_a_megabyte_in_the_wrong_place():
    lines = shown("a -> " + "x" * 10**6)
    assert all(len(line) < 600 for line in lines)
    assert lines[1].startswith("1 | a -> xxx")


@given(st.lists(st.integers(0, 0x10FFFF).map(chr)).map("".join))
def test_nothing_that_a_terminal_obeys_is_printed(text):
    source = SourceText(text, text)
    span = Span(source, 0, len(text))
    fault = Diagnostic(code="c", message=text, help=text, span=span, notes=(Note(span, text),))
    assert all(line.isprintable() for line in render(fault).split("\n"))


def test_hostile_text_is_escaped_in_real_faults():
    text = "\n".join(shown("a -> bf16\nb -> \x1b]0;title\x07\n\u202eq \x00 -> x"))
    assert all(line.isprintable() for line in text.split("\n"))
    assert "\\x1b" in text


def test_notes_and_fixes():
    source = SourceText("one two three", "x.policy")
    fault = Diagnostic(
        code="some-fault",
        message="what",
        span=Span(source, 4, 7),
        severity=Severity.WARNING,
        help="try",
        notes=(Note(Span(source, 0, 3), "see"),),
        fix=Fix(message="mend", edits=(Edit(Span(source, 0, 1), ""),), safe=True),
    )
    assert render(fault).split("\n") == [
        "x.policy:1:5: warning[some-fault]: what",
        "1 | one two three",
        "  |     ^^^ try",
        "x.policy:1:1: note: see",
        "1 | one two three",
        "  | ^^^",
        "fix: mend",
    ]
    painted = render(fault, lambda kind, text: f"<{kind}:{text}>")
    for kind in ("warning", "path", "gutter", "caret", "help", "note"):
        assert f"<{kind}:" in painted


# ---- the exception


def test_an_exception_of_many_faults_is_cut_short():
    with pytest.raises(PolicyError) as caught:
        parse("a => b\n" * 60)
    assert len(caught.value.diagnostics) == 60
    text = str(caught.value)
    assert text.count("error[") == 50
    assert text.endswith("... and 10 more")


def test_an_exception_of_few_faults_is_not():
    assert "more" not in str(PolicyError(PolicyError(_faults(50)).diagnostics))
    assert str(PolicyError(_faults(51))).endswith("... and 1 more")


def _faults(count: int) -> list[Diagnostic]:
    source = SourceText("x" * count)
    return [Diagnostic(code="c", message="m", span=Span(source, i, i + 1)) for i in range(count)]


def test_faults_come_in_the_order_of_the_text():
    faults = _faults(9)
    assert PolicyError(faults[::-1]).diagnostics == tuple(faults)


def test_an_exception_survives_pickling():
    with pytest.raises(PolicyError) as caught:
        parse("a => b")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# ---- positions


@given(st.text(st.sampled_from("ab\n\r"), max_size=40))
def test_positions_against_counting(text):
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


def test_without_a_close_name_a_short_list_is_shown():
    assert did_you_mean("zzz", ["one", "two"]) == "known: one, two"
    assert did_you_mean("zzz", [f"name{i}" for i in range(13)]) == ""
    assert did_you_mean("zzz", []) == ""
