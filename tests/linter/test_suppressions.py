"""Suppression comments: which findings they suppress, which of them are reported, and how `--fix` removes them."""

from __future__ import annotations

import pytest

from tests.support.linting import TAIL, fix_text, lint_codes

pytestmark = pytest.mark.any_jax


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        # behind the statement, or on its own line above it
        ("a.b -> bf16  # allow: shadowed-rule\na -> fp8", []),
        ("# allow: shadowed-rule\na.b -> bf16\na -> fp8", []),
        ("# allow: shadowed-rule\n\n# and a word on why\n\na.b -> bf16\na -> fp8", []),
        ("a.b -> bf16  # allow: shadowed-rule -- an example, for the docs\na -> fp8", []),
        ("a.b -> bf16  #allow:shadowed-rule\na -> fp8", []),
        ("a.b -> bf16  # the old way  # allow: shadowed-rule\na -> fp8", []),
        # not on another line
        ("a.b -> bf16\na -> fp8  # allow: shadowed-rule", ["shadowed-rule", "unused-suppression"]),
        ("a.b -> bf16\n# allow: shadowed-rule\na -> fp8", ["shadowed-rule", "unused-suppression"]),
        # not another code
        ("a.b -> bf16  # allow: redundant-rule\na -> fp8", ["shadowed-rule", "unused-suppression"]),
        # several
        (f"a -> nvfp4(rht=fprop)  # allow: hadamard-outside-wgrad, nearest-rounded-gradient\n{TAIL}", []),
        (f"a -> nvfp4  # allow: nearest-rounded-gradient, shadowed-rule -- two\n{TAIL}", ["unused-suppression"]),
        ("a -> fp8  # allow: no-such-rule, shadowed-rule", ["unknown-suppression", "unused-suppression"]),
        # a statement of several lines: behind any of them, or on its own line before the one with the fault
        (f"recipe r = nvfp4(\n    sr=all,  # allow: stochastic-rounding-off-gradients\n)\na -> r\n{TAIL}", []),
        (f"recipe r = nvfp4(\n    sr=all,\n)  # allow: stochastic-rounding-off-gradients\na -> r\n{TAIL}", []),
        (f"# allow: stochastic-rounding-off-gradients\nrecipe r = nvfp4(\n    sr=all,\n)\na -> r\n{TAIL}", []),
        (f"recipe r = nvfp4(\n    # allow: stochastic-rounding-off-gradients\n    sr=all,\n)\na -> r\n{TAIL}", []),
        # blocks
        ("a -> fp8\nvariant v {\n    a -> fp8\n}  # allow: idle-variant\nb -> fp8", []),
        ("a -> fp8\nvariant v {  # allow: idle-variant\n    a -> fp8\n}\nb -> fp8", []),
        ("a -> fp8\n# allow: idle-variant\nvariant v {\n    a -> fp8\n}\nb -> fp8", []),
        (f"a -> fp8\nvariant v {{\n    a -> nvfp4  # allow: nearest-rounded-gradient\n    {TAIL}\n}}", []),
        (f"a -> fp8\nvariant v {{ a -> nvfp4; {TAIL} }}  # allow: nearest-rounded-gradient", []),
        ("after 50% { until 50% { a -> fp8 } }  # allow: phase-never-holds", []),
        # an error found while reading cannot be suppressed
        ("a -> fp9  # allow: unknown-format", ["unknown-format"]),
        ("a -> fp8  # allow: unknown-format", ["unused-suppression"]),
        # not a suppression
        ("a -> fp8  # this would allow: shadowed-rule", []),
        ("a -> fp8  # allow:", []),
    ],
)  # fmt: skip
def test_a_comment_suppresses_findings_on_its_statement(text: str, codes: list[str]) -> None:
    assert lint_codes(text) == codes


def test_a_suppression_of_a_rule_that_did_not_run_is_not_unused() -> None:
    text = "a -> fp8  # allow: shadowed-rule"
    assert lint_codes(text, codes={"unused-suppression", "redundant-rule"}) == []
    assert lint_codes(text, codes={"unused-suppression", "shadowed-rule"}) == ["unused-suppression"]
    assert lint_codes(text, codes={"shadowed-rule"}) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a -> fp8  # allow: shadowed-rule\n", "a -> fp8\n"),
        ("# allow: shadowed-rule\na -> fp8\n", "a -> fp8\n"),
        ("a -> fp8  # allow: shadowed-rule -- why\nb -> fp8\n", "a -> fp8\nb -> fp8\n"),
        ("a -> fp8  # said  # allow: shadowed-rule\n", "a -> fp8  # said\n"),
        ("a -> fp8  # allow: shadowed-rule, redundant-rule\n", "a -> fp8\n"),
        ("a -> fp8  # allow: no-such-rule\n", "a -> fp8  # allow: no-such-rule\n"),
        (f"a -> nvfp4  # allow: shadowed-rule, nearest-rounded-gradient -- why\n{TAIL}\n",
         f"a -> nvfp4  # allow: nearest-rounded-gradient -- why\n{TAIL}\n"),
        (f"a -> nvfp4  # allow: nearest-rounded-gradient, shadowed-rule\n{TAIL}\n",
         f"a -> nvfp4  # allow: nearest-rounded-gradient\n{TAIL}\n"),
        ("a -> fp8\n    # allow: shadowed-rule", "a -> fp8\n"),
    ],
)  # fmt: skip
def test_fix_removes_unused_suppressions(before: str, after: str) -> None:
    assert fix_text(before) == after
