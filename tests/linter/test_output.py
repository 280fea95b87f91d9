"""The output formats: what people read, and what programs parse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from policyc.language.diagnostics import Diagnostic, Severity, SourceText, Span, plain
from policyc.linter import output
from tests.support.command import policyc

pytestmark = pytest.mark.any_jax


def format_diagnostics(output_format: str, *diagnostics: Diagnostic) -> str:
    return output.OUTPUT_FORMATS[output_format](diagnostics, plain)


# ---- json


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
