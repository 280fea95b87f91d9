"""The output formats: what people read, and what programs parse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from policyc.language.diagnostics import Diagnostic, Edit, Fix, Note, Severity, SourceText, Span, plain
from policyc.linter import output
from tests.support.command import policyc

pytestmark = pytest.mark.any_jax

SOURCE = SourceText("première -> fp9\nmlp.* ->\n  fp8(grad=e4m3,\n  grad=e4m3)\n", "dir/a b.policy")
DIAGNOSTIC = Diagnostic(
    code="unknown-format",
    message="no format named 'fp9'",
    span=Span(SOURCE, 12, 15),
    help="did you mean 'fp8'?",
    notes=(Note(Span(SOURCE, 16, 54), "elsewhere"),),
    fix=Fix(message="replace it", edits=(Edit(Span(SOURCE, 12, 15), "fp8"),), safe=False),
)
LOCATION = {"path": "dir/a b.policy", "line": 1, "column": 13, "end_line": 1, "end_column": 16}
NOTE_LOCATION = {"path": "dir/a b.policy", "line": 2, "column": 1, "end_line": 4, "end_column": 13}


def format_diagnostics(output_format: str, *diagnostics: Diagnostic) -> str:
    return output.OUTPUT_FORMATS[output_format](diagnostics, plain)


@pytest.mark.parametrize(
    ("errors", "warnings", "fixes", "files", "line"),
    [
        (0, 0, 0, 1, "1 policy: no findings"),
        (0, 0, 0, 2, "2 policies: no findings"),
        (1, 0, 0, 1, "1 policy: 1 error"),
        (2, 1, 0, 3, "3 policies: 2 errors and 1 warning"),
        (0, 2, 0, 1, "1 policy: 2 warnings"),
        (0, 2, 2, 1, "1 policy: 2 warnings; 2 fixable with --fix"),
    ],
)
def test_the_summary_counts_policies_findings_and_fixes(
    errors: int, warnings: int, fixes: int, files: int, line: str
) -> None:
    span = Span(SOURCE, 0, 1)
    safe = Fix(message="", edits=(), safe=True)
    severities = [Severity.ERROR] * errors + [Severity.WARNING] * warnings
    diagnostics = [
        Diagnostic(code="c", message="m", span=span, severity=s, fix=safe if number < fixes else None)
        for number, s in enumerate(severities)
    ]
    assert output.summarize(diagnostics, files) == line


# ---- json


def test_json_has_every_field() -> None:
    (item,) = json.loads(format_diagnostics("json", DIAGNOSTIC))
    assert item == {
        "code": "unknown-format",
        "severity": "error",
        "message": "no format named 'fp9'",
        **LOCATION,
        "help": "did you mean 'fp8'?",
        "notes": [{"message": "elsewhere", **NOTE_LOCATION}],
        "sites": [],
        "fix": {"message": "replace it", "safe": False, "edits": [{**LOCATION, "text": "fp8"}]},
    }


def test_json_of_a_diagnostic_without_fix_and_notes() -> None:
    (item,) = json.loads(
        format_diagnostics("json", Diagnostic(code="c", message="m", span=Span(SOURCE, 0, 0)))
    )
    assert item["fix"] is None
    assert item["notes"] == []
    assert (item["line"], item["column"], item["end_line"], item["end_column"]) == (1, 1, 1, 1)


def test_the_edits_in_json_give_the_same_text_as_fix(tmp_path: Path) -> None:
    """A program can apply them by their lines and columns."""
    path = tmp_path / "a.policy"
    path.write_text(
        "é.b -> fp8\né -> fp8\nü -> split(\n    fprop=fp8,  # über\n    dgrad=fp8)\n", encoding="utf-8"
    )
    text = path.read_text(encoding="utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    edits = [e for d in json.loads(policyc("lint", path, "--format", "json").out) for e in d["fix"]["edits"]]
    for e in sorted(edits, key=lambda e: (e["line"], e["column"]), reverse=True):
        start = starts[e["line"] - 1] + e["column"] - 1
        end = starts[e["end_line"] - 1] + e["end_column"] - 1
        text = text[:start] + e["text"] + text[end:]
    policyc("lint", path, "--fix", "--unsafe-fixes")
    assert path.read_text(encoding="utf-8") == text


def test_json_is_ascii() -> None:
    """So it is valid in every encoding of the output."""
    odd = Diagnostic(code="unknown-format", message="深層", span=Span(SourceText("深", "深.policy"), 0, 1))
    assert format_diagnostics("json", odd).isascii()


# ---- github


def test_github_prints_one_command_per_line() -> None:
    text = format_diagnostics("github", DIAGNOSTIC)
    assert text == (
        "::error file=dir/a b.policy,line=1,endLine=1,col=13,endColumn=16,title=unknown-format::"
        "no format named 'fp9'%0Adid you mean 'fp8'?\n"
    )


def test_github_escapes_characters_that_end_a_value_or_the_command() -> None:
    source = SourceText("x", "a:b,c%d\ne.policy")
    odd = Diagnostic(
        code="c",
        message="100% wrong::error\r\n::set-output\x1b[31m",
        span=Span(source, 0, 1),
        severity=Severity.WARNING,
    )
    text = format_diagnostics("github", odd)
    assert text.count("\n") == 1
    assert text.startswith("::warning file=a%3Ab%2Cc%25d%0Ae.policy,line=1,")
    assert text.endswith("::100%25 wrong::error%0D%0A::set-output\\x1b[31m\n")
