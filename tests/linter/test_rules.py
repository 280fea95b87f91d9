"""The lint rules: each has a page with a bad and a good example, a policy with its fault, and one that is near.

The policies are in `tests/ui/policies/lint` and, for rules that need a program, in `programs`.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest

from policyc.language.loader import parse_with_diagnostics
from policyc.linter import rules
from policyc.linter.api import lint_loaded
from policyc.linter.rules import ALL_RULES, LintRule
from tests.support.command import ROOT, policyc
from tests.support.linting import follow_help, lint_codes

pytestmark = pytest.mark.any_jax

TEXTS = ROOT / "tests" / "ui" / "policies" / "lint"
PROGRAMS = Path(__file__).parent / "programs"
NEEDS_FILES = {"unreadable-file", "unknown-variant", "import-cycle"}
"""The codes that a text alone cannot have."""

each_rule = pytest.mark.parametrize("rule", ALL_RULES.values(), ids=list(ALL_RULES))


def test_every_public_function_of_the_folder_is_a_rule() -> None:
    modules = [
        import_module(module.name)
        for module in walk_packages(rules.__path__, f"{rules.__name__}.")
        if not module.ispkg
    ]
    functions = {
        (module.__name__, name.replace("_", "-"))
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }
    assert functions == {(rule.module, rule.code) for rule in ALL_RULES.values() if rule.module}


def test_every_reported_code_has_a_page() -> None:
    """Also those that the parser and the compiler report."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "policyc").rglob("*.py"))
    assert set(re.findall(r'code="([a-z-]+)"', source)) - {"internal-error"} <= ALL_RULES.keys()


def example(rule: LintRule, kind: str) -> str:
    (block,) = re.findall(rf"^## {kind}\n\n```policy\n(.*?)^```$", rule.page, re.DOTALL | re.MULTILINE)
    return block


@each_rule
def test_a_page_has_a_title_an_explanation_and_examples(rule: LintRule) -> None:
    title, empty, explanation, *_ = rule.page.splitlines()
    assert re.fullmatch(r"[A-Za-z].*\.", title)
    assert not empty
    assert explanation
    assert rule.explains <= ALL_RULES.keys()
    if not rule.needs_program:
        assert set(lint_codes(example(rule, "Bad"))) == {rule.code} or rule.code in NEEDS_FILES
        assert lint_codes(example(rule, "Good")) == []


def test_the_bad_examples_that_need_files(tmp_path: Path) -> None:
    cycle = tmp_path / "a.policy"
    cycle.write_text(example(ALL_RULES["import-cycle"], "Bad"))
    diagnostics = parse_with_diagnostics(cycle.read_text(), path=cycle).diagnostics
    assert {d.code for d in diagnostics} == {"import-cycle"}
    unreadable = tmp_path / "b.policy"
    unreadable.write_bytes(example(ALL_RULES["unreadable-file"], "Bad").encode("utf-16"))
    ran = policyc("lint", unreadable, "--format", "concise")
    assert (ran.code, ran.out.count("unreadable-file")) == (2, 1)


@each_rule
def test_a_rule_has_a_text_with_its_fault_and_a_near_one_without(rule: LintRule) -> None:
    if not rule.module:
        return  # reported by the parser or the compiler, which have their own tests
    folder = PROGRAMS if rule.needs_program else TEXTS
    found = (folder / f"{rule.code}.txt").read_text(encoding="utf-8")
    findings = set(re.findall(r"^\S+: (\w+)\[([\w-]+)\]: ", found, re.MULTILINE))
    assert {code for _, code in findings} == {rule.code}
    assert str(rule.severity) in {severity for severity, _ in findings} or rule.code == "unmatched-rule"
    assert (folder / f"{rule.code}-near.txt").read_text(encoding="utf-8") == ""


# ---- beyond the texts


@pytest.mark.parametrize(
    "text",
    [
        "* where weight -> nvfp4(sr=grad)",
        "* where mlp -> nvfp4(sr=grad)",
        "* where head -> nvfp4(sr=grad)",
        "* where scores -> nvfp4(sr=grad)",
        "* where block -> nvfp4(sr=grad)",
        "{mlp,moe}.* -> nvfp4(sr=grad)",
        "* where k > 1 -> nvfp4(sr=grad)",
        "lm_head -> mxfp4(sr=grad)",
        "embed*, wte -> nvfp4(sr=grad)",
        "attention where k > 1 -> nvfp4(sr=grad)",
    ],
)
def test_a_policy_in_4_bits_has_no_findings_after_what_they_suggest(text: str) -> None:
    findings = lint_loaded(parse_with_diagnostics(text))
    assert findings
    for _ in range(6):
        if not findings:
            break
        text = follow_help(text, findings[0].help)
        findings = lint_loaded(parse_with_diagnostics(text))
    assert not findings, text


def test_a_suppression_of_a_rule_that_did_not_run_is_not_unused() -> None:
    text = "a -> fp8  # allow: shadowed-rule"
    assert lint_codes(text, codes={"unused-suppression", "redundant-rule"}) == []
    assert lint_codes(text, codes={"unused-suppression", "shadowed-rule"}) == ["unused-suppression"]
    assert lint_codes(text, codes={"shadowed-rule"}) == []
