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
from tests.support.linting import fix_text, follow_help, lint_codes

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
    ("text", "codes"),
    [
        # an imported library is not reported
        ('import "te_nvfp4"', []),
        ('import "te_nvfp4"\nlayers[-4:] -> bf16', []),
        ('import "te_nvfp4"\nrecipe nv = nvfp4(scale2d=weights)', ["nearest-rounded-gradient"]),
        # variants
        ("mlp -> fp8\nvariant v { mlp -> nvfp4; layers[-4:] -> bf16 }", ["nearest-rounded-gradient"]),
        ("mlp -> fp8\nvariant v { layers[4:2] -> bf16 }", ["empty-slice"]),
        ("recipe r = fp8\nmlp -> bf16\nvariant v { mlp -> r }", []),
        # of two equal rules, only the one without effect is reported
        ("mlp -> fp8\nattention -> fp8\nmlp -> fp8", ["shadowed-rule"]),
        # a recipe file
        ("recipe a = fp8\nrecipe b = bf16", []),
        # stacks of other names, slices of other kinds
        ("mlp.* -> nvfp4(sr=grad)\nblocks[-2:] -> bf16", []),
        ("mlp.* -> nvfp4(sr=grad)\nlayers[:2] -> bf16", ["no-high-precision-tail"]),
        ("mlp.* -> nvfp4(sr=grad)\nlayers[-15%:].mlp.* -> bf16", []),
        ("layers[:-4].mlp.* -> nvfp4(sr=grad)", []),
        ("mlp.* @ bwd -> nvfp4(sr=grad)", []),
        ("mlp.* -> nvfp4(sr=grad)\n* where layer >= -4 -> bf16", []),
        ("mlp.* -> nvfp4(sr=grad)\n* where layer < 4 -> bf16", ["no-high-precision-tail"]),
        ("* where mlp -> nvfp4(sr=grad)", ["no-high-precision-tail"]),
        ("* where mlp -> nvfp4(sr=grad)\n* where mlp and layer >= -4 -> bf16", []),
        ("* where mlp -> nvfp4(sr=grad)\n* where attention and layer >= -4 -> bf16", ["no-high-precision-tail"]),
        ("* where mlp and layer < -4 -> nvfp4(sr=grad)", []),
        ("* where block and weight and not router -> nvfp4(sr=grad)", ["no-high-precision-tail"]),
        ("* -> nvfp4(sr=grad)\n* where not mlp -> bf16", ["no-high-precision-tail"]),
        ("* -> nvfp4(sr=grad)\n* where not mlp or layer >= -4 -> bf16", []),
        ("* -> nvfp4(sr=grad)\n* where not mlp -> bf16\n* where mlp and layer >= -2 -> bf16", []),
        # sensitive sites, by kind
        ("* where head -> nvfp4(sr=grad)", ["quantized-head"]),
        ("* where scores -> mxfp4(sr=grad)", ["attention-scores-in-4-bits"]),
        ("* where weight and not (head or embedding or router) -> nvfp4(sr=grad)\n* where layer >= -4 -> bf16", []),
        ("* where block and weight -> nvfp4(sr=grad)\n* where layer >= -4 -> bf16", ["router-in-4-bits"]),
        ("* where not weight -> bf16\n* -> nvfp4(sr=grad)\n* where not mlp or layer >= -4 -> bf16", ["shadowed-rule"]),
        ("* where mlp and head -> bf16", ["impossible-predicate"]),
        # the score products have no weight operand
        ("attention where weight -> fp8", []),
        ("* -> mxfp4(sr=grad)\n*embed*, *head, *router*, gate, output*, logits*, to_logits, wte -> bf16\n"
         "layers[-4:] -> bf16", ["attention-scores-in-4-bits"]),
        # everything in 4 bits is one finding, unless its recipe has another fault
        ("* -> nvfp4", ["everything-in-4-bits"]),
        ("mlp -> fp8  # allow: shadowed-rule -- a test\n* -> mxfp4", ["everything-in-4-bits"]),
        ("* -> nvfp4(rht=wgrad)", ["everything-in-4-bits", "nearest-rounded-gradient"]),
        ("* -> nvfp4 # allow: everything-in-4-bits -- an ablation", []),
        ("* @ fprop -> nvfp4\n* where block or head or scores -> bf16", ["quantized-embedding"]),
        ("* -> nvfp4(sr=grad)\n* where layer >= -4 or not weight or head or router -> bf16", ["quantized-embedding"]),
        # conditions between sizes
        ("* where m < n and n < k -> bf16", []),
        ("* where m < n and n < k and k < m -> bf16", []),
        ("* where k % n == 0 and k != n and n != 1 -> bf16", []),
        # percentages of deep stacks
        ("layers[0.5%:0.6%] -> bf16", []),
        # a transform on both operands of one product, through a split
        ("mlp -> split(fprop=nvfp4, bwd=nvfp4(rht=wgrad, sr=grad))\nlayers[-4:] -> bf16", []),
        # an error while reading hides other findings
        ("mlp -> fp8\nmlp -> bf17\nmlp -> bf16", ["unknown-format"]),
        ("", ["empty-policy"]),
    ],
)  # fmt: skip
def test_findings_beyond_the_texts(text: str, codes: list[str]) -> None:
    assert lint_codes(text) == codes


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


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("* -> nvfp4", "* where {} -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)"),
        ("recipe r = mxfp4\n* -> r", "recipe r = mxfp4(rht=wgrad, sr=grad)\n* where {} -> r"),
        ("* -> nvfp4(sr=grad)", "* where {} -> nvfp4(sr=grad)"),
        ("* -> nvfp4(sr=grad) expect 9", "* -> nvfp4(sr=grad) expect 9"),
    ],
)
def test_one_fix_restricts_what_is_in_4_bits_and_writes_the_published_options(
    before: str, after: str
) -> None:
    assert lint_codes(before) == ["everything-in-4-bits"]
    assert fix_text(before) == before
    assert fix_text(before, unsafe=True) == after.format("(mlp or attention) and layer < -4")
