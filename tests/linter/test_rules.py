"""The lint rules: each has a page with a bad and a good example, and a fixture.

A fixture is a policy with the faults of one rule, and the text that `policyc lint` prints for it. After an intended
change, `UPDATE_SNAPSHOTS=1 pytest tests/linter/test_rules.py` writes the texts again. Read the diff.
"""

from __future__ import annotations

import contextlib
import os
import re
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from pkgutil import iter_modules

import pytest

from policyc.language.diagnostics import Severity
from policyc.language.loader import parse_with_diagnostics
from policyc.linter import rules
from policyc.linter.engine import lint
from policyc.linter.rules import ALL_CODES, ALL_RULES, LINT_RULES, program
from tests.support.command import CommandResult, policyc
from tests.support.linting import fix_text, follow_help, lint_codes

pytestmark = pytest.mark.any_jax

FIXTURES = Path(__file__).parent / "fixtures"
FOUND_WHILE_READING = {code for code, rule in LINT_RULES.items() if rule.check is None} - {
    "unused-suppression",
    "unknown-suppression",
}
NEEDS_FILES = {"unreadable-file", "unknown-variant", "import-cycle"}
"""The codes that a text alone cannot have."""


# ---- the registry


def test_every_check_has_a_page() -> None:
    modules = [
        import_module(f"{package.__name__}.{module.name}")
        for package in (rules, program)
        for module in iter_modules(package.__path__)
        if not module.ispkg
    ]
    codes = [code for module in modules for code in module.CHECKS]
    assert len(codes) == len(set(codes)) > 30
    assert set(codes) <= set(ALL_CODES)


def test_every_heading_of_the_document_is_a_code() -> None:
    """A page whose heading is misspelt would be lost."""
    document = resources.files("policyc.linter").joinpath("pages.md").read_text(encoding="utf-8")
    headings = re.findall(
        r"^# (.*)$", re.sub(r"^```.*?^```$", "", document, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    assert headings == [f"{rule.code} ({rule.severity})" for rule in ALL_RULES.values()]


# ---- pages


def example(code: str, kind: str) -> str:
    blocks = re.findall(
        rf"^## {kind}\n\n```policy\n(.*?)^```$", LINT_RULES[code].page, re.DOTALL | re.MULTILINE
    )
    assert len(blocks) == 1, f"{code} needs one example under '## {kind}'"
    return blocks[0]


@pytest.mark.parametrize("code", LINT_RULES)
def test_a_page_has_a_title_and_an_explanation(code: str) -> None:
    title, empty, explanation, *_ = LINT_RULES[code].page.splitlines()
    assert re.fullmatch(r"[A-Za-z].*\.", title)
    assert not empty
    assert explanation
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code)


@pytest.mark.parametrize("code", [c for c in LINT_RULES if c not in NEEDS_FILES])
def test_the_bad_example_has_this_fault_and_no_other(code: str) -> None:
    assert set(lint_codes(example(code, "Bad"))) == {code}


@pytest.mark.parametrize("code", LINT_RULES)
def test_the_good_example_is_clean(code: str) -> None:
    assert lint_codes(example(code, "Good")) == []


def test_the_bad_examples_that_need_files(tmp_path: Path) -> None:
    cycle = tmp_path / "a.policy"
    cycle.write_text(example("import-cycle", "Bad"))
    diagnostics = parse_with_diagnostics(cycle.read_text(), path=cycle).diagnostics
    assert {d.code for d in diagnostics} == {"import-cycle"}
    unreadable = tmp_path / "b.policy"
    unreadable.write_bytes(example("unreadable-file", "Bad").encode("utf-16"))
    ran = policyc("lint", unreadable, "--format", "concise")
    assert (ran.code, ran.out.count("unreadable-file")) == (2, 1)


# ---- fixtures


@cache
def lint_fixture(code: str) -> CommandResult:
    """What `policyc lint` prints for a fixture. Each is linted once for all tests."""
    with contextlib.chdir(FIXTURES):
        variant = ":no_rth" if code == "unknown-variant" else ""
        return policyc("lint", f"{code}.policy{variant}")


@pytest.mark.parametrize("code", LINT_RULES)
def test_the_fixture_prints_its_snapshot(code: str) -> None:
    ran = lint_fixture(code)
    snapshot = FIXTURES / f"{code}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        snapshot.write_text(ran.out, encoding="utf-8")
    assert ran.out == snapshot.read_text(encoding="utf-8")
    assert set(re.findall(r": (?:error|warning)\[([\w-]+)\]: ", ran.out)) == {code}
    assert not re.search(r"^/", ran.out, re.MULTILINE), "a snapshot must not contain an absolute path"
    assert ran.code == (2 if code in ("unreadable-file", "unknown-variant") else 1)


def test_every_fixture_belongs_to_a_rule() -> None:
    assert {p.stem for p in FIXTURES.glob("*.*")} == set(LINT_RULES)


@pytest.mark.parametrize("code", LINT_RULES)
def test_a_diagnostic_has_the_severity_of_its_rule(code: str) -> None:
    severities = set(re.findall(r": (error|warning)\[", lint_fixture(code).out))
    assert severities == {str(LINT_RULES[code].severity)}
    assert code not in FOUND_WHILE_READING or LINT_RULES[code].severity is Severity.ERROR


@pytest.mark.parametrize("code", [c for c in LINT_RULES if c != "unreadable-file"])
def test_every_finding_says_what_to_try(code: str) -> None:
    with contextlib.chdir(FIXTURES):
        text = Path(f"{code}.policy").read_text(encoding="utf-8")
        for diagnostic in lint(parse_with_diagnostics(text, path=f"{code}.policy")).diagnostics:
            assert diagnostic.help, diagnostic


# ---- beyond the fixtures


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
        ("* where head -> nvfp4(sr=grad)", ["head-in-4-bits"]),
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
        ("* @ fprop -> nvfp4\n* where block or head or scores -> bf16", ["embedding-in-4-bits"]),
        ("* -> nvfp4(sr=grad)\n* where layer >= -4 or not weight or head or router -> bf16", ["embedding-in-4-bits"]),
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
def test_findings_beyond_the_fixtures(text: str, codes: list[str]) -> None:
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
    ],
)
def test_a_policy_in_4_bits_has_no_findings_after_what_they_suggest(text: str) -> None:
    findings = lint(parse_with_diagnostics(text)).diagnostics
    assert findings
    for _ in range(6):
        if not findings:
            break
        text = follow_help(text, findings[0].help)
        findings = lint(parse_with_diagnostics(text)).diagnostics
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
