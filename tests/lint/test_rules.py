"""The linter: each rule's page and fixture, the bundled policies, suppressions, fixes, and how it grows.

The fixtures are policies with one kind of fault each, in the forms it takes, and the text that `policyc lint` prints
about them. After a change that is meant, `UPDATE_SNAPSHOTS=1 pytest tests/test_lint.py` writes the texts anew: read the
diff.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from policyc import load, parse
from policyc.language import bundled
from policyc.language.diagnostics import Diagnostic, Edit, Fix, Severity
from policyc.language.formatter import format_file
from policyc.language.loader import LoadedPolicy, parse_with_diagnostics
from policyc.language.parser import comment_ranges
from policyc.lint.engine import LintResult, lint
from policyc.lint.fixes import apply_fixes
from policyc.lint.rules import LINT_RULES
from tests.support.command import policyc
from tests.support.oracle import differ, random_policy

FIXTURES = Path(__file__).parent / "fixtures"
READING = {code for code, rule in LINT_RULES.items() if rule.check is None} - {
    "unused-suppression",
    "unknown-suppression",
}
IN_FILES = {"unreadable-file", "import-cycle", "too-many-imports"}
"""Faults that no text has by itself."""


def found(text: str, **options: set[str]) -> list[str]:
    """The codes that lint finds in a text, in the order of the text."""
    return [d.code for d in lint(parse_with_diagnostics(text), **options).diagnostics]


def mended(text: str, *, unsafe: bool = False, codes: set[str] | None = None) -> str:
    return apply_fixes(
        text, parse_with_diagnostics, lambda loaded: lint(loaded, codes or set(LINT_RULES)), unsafe=unsafe
    ).text


def example(code: str, kind: str) -> str:
    blocks = re.findall(
        rf"^## {kind}\n\n```policy\n(.*?)^```$", LINT_RULES[code].page, re.DOTALL | re.MULTILINE
    )
    assert len(blocks) == 1, f"{code} needs one example under '## {kind}'"
    return blocks[0]


# ---- every rule: a page, a bad and a good example, a fixture


@pytest.mark.parametrize("code", LINT_RULES)
def test_a_page_starts_with_a_title_and_says_why(code: str) -> None:
    title, empty, reason, *_ = LINT_RULES[code].page.splitlines()
    assert re.fullmatch(r"[A-Za-z].*\.", title)
    assert not empty
    assert reason
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code)


@pytest.mark.parametrize("code", [c for c in LINT_RULES if c not in IN_FILES])
def test_the_bad_example_has_that_fault_and_no_other(code: str) -> None:
    assert set(found(example(code, "Bad"))) == {code}


@pytest.mark.parametrize("code", LINT_RULES)
def test_the_good_example_is_clean(code: str) -> None:
    assert found(example(code, "Good")) == []


def test_the_bad_examples_that_need_files(tmp_path: Path) -> None:
    cycle = tmp_path / "a.policy"
    cycle.write_text(example("import-cycle", "Bad"))
    assert {d.code for d in parse_with_diagnostics(cycle.read_text(), path=cycle).diagnostics} == {
        "import-cycle"
    }
    assert found(example("too-many-imports", "Bad") * 257) == ["too-many-imports"]
    unreadable = tmp_path / "b.policy"
    unreadable.write_bytes(example("unreadable-file", "Bad").encode("utf-16"))
    ran = policyc("lint", unreadable, "--format", "concise")
    assert (ran.code, ran.out.count("unreadable-file")) == (2, 1)


@pytest.mark.parametrize("code", LINT_RULES)
def test_the_fixture_prints_as_it_did(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FIXTURES)
    ran = policyc("lint", f"{code}.policy")
    snapshot = FIXTURES / f"{code}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        snapshot.write_text(ran.out, encoding="utf-8")
    assert ran.out == snapshot.read_text(encoding="utf-8")
    assert set(re.findall(r": (?:error|warning)\[([\w-]+)\]: ", ran.out)) == {code}
    assert not re.search(r"^/", ran.out, re.MULTILINE), "a snapshot holds no path of this machine"
    assert ran.code == (2 if code == "unreadable-file" else 1)


def test_every_fixture_belongs_to_a_rule() -> None:
    assert {p.stem for p in FIXTURES.glob("*.*")} == set(LINT_RULES)


@pytest.mark.parametrize("code", LINT_RULES)
def test_a_diagnostic_is_as_severe_as_its_page_says(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FIXTURES)
    words = set(re.findall(r": (error|warning)\[", policyc("lint", f"{code}.policy").out))
    assert words == {str(LINT_RULES[code].severity)}
    assert code not in READING or LINT_RULES[code].severity is Severity.ERROR


@pytest.mark.parametrize("code", LINT_RULES)
def test_every_finding_says_what_to_try(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FIXTURES)
    if code != "unreadable-file":
        text = Path(f"{code}.policy").read_text(encoding="utf-8")
        for diagnostic in lint(parse_with_diagnostics(text, path=f"{code}.policy")).diagnostics:
            assert diagnostic.help, diagnostic


# ---- the bundled policies


ELEVEN = {
    "te_nvfp4", "te_nvfp4_no_rht", "llama_nvfp4", "llama3_8b_nvfp4", "nvfp4_paper_12b", "nvfp4_late_switch", "quartet2",
    "fp8", "mxfp8", "mxfp4", "bf16",
}  # fmt: skip
BUNDLED = list(bundled.bundled_policies().items())


def test_the_eleven_are_there() -> None:
    assert bundled.bundled_policies().keys() >= ELEVEN


@pytest.mark.parametrize(("name", "path"), BUNDLED, ids=[name for name, _ in BUNDLED])
class TestBundled:
    """Every policy that ships."""

    def test_is_clean(self, name: str, path: Path) -> None:
        ran = policyc("lint", name)
        assert (ran.code, ran.out) == (0, "")

    def test_is_laid_out(self, name: str, path: Path) -> None:
        loaded = parse_with_diagnostics(path.read_text(encoding="utf-8"), path=path)
        assert format_file(loaded.file) == path.read_text(encoding="utf-8")

    def test_prints_and_parses_to_itself(self, name: str, path: Path) -> None:
        policy = load(name)
        assert parse(str(policy)) == policy
        assert load(path) == policy

    def test_says_what_it_is_for(self, name: str, path: Path) -> None:
        header = path.read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
        assert all(line.startswith("#") for line in header)
        assert re.fullmatch(r"# [A-Za-z].*\.", header[0])
        words = [line.split(":")[0] for line in header if re.match(r"# \w+:  ", line)]
        assert words == ["# Intent", "# Source", "# Expect"]

    def test_resolves_under_every_variant(self, name: str, path: Path) -> None:
        policy = load(name)
        for whole in (policy, *(policy.variant(v.name) for v in policy.variants)):
            resolve = whole.resolver()
            assert all(len(resolve(rule.recipe).treatments) == 6 for rule in whole.rules)
            assert parse(str(whole)) == whole


# ---- what rules see, beyond their fixtures


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        # a library is judged where it is written, not where it is imported
        ('import "te_nvfp4"', []),
        ('import "te_nvfp4"\nlayers[-4:] -> bf16', []),
        ('import "te_nvfp4"\nrecipe nv = nvfp4(scale2d=weights)', ["nearest-rounded-gradient"]),
        # variants
        ("mlp -> fp8\nvariant v { mlp -> nvfp4; layers[-4:] -> bf16 }", ["nearest-rounded-gradient"]),
        ("recipe r = fp8\nmlp -> fp8\nmlp.up -> r\nvariant v { recipe r = bf16 }", []),
        ("recipe r = fp8\nmlp -> r\nmlp.up -> r\nvariant v { recipe r = bf16 }", ["redundant-rule"]),
        ("mlp -> fp8\nvariant v { layers[4:2] -> bf16 }", ["empty-slice"]),
        ("recipe r = fp8\nmlp -> bf16\nvariant v { mlp -> r }", []),
        # of two equal rules, the one that has no effect is reported, and only that
        ("mlp -> fp8\nattention -> fp8\nmlp -> fp8", ["shadowed-rule"]),
        # a recipe file
        ("recipe a = fp8\nrecipe b = bf16", []),
        # stacks of other names, slices of other kinds
        ("mlp.* -> nvfp4(sr=grad)\nblocks[-2:] -> bf16", []),
        ("mlp.* -> nvfp4(sr=grad)\nlayers[:2] -> bf16", ["no-high-precision-tail"]),
        ("mlp.* -> nvfp4(sr=grad)\nlayers[-15%:].mlp.* -> bf16", []),
        ("layers[:-4].mlp.* -> nvfp4(sr=grad)", []),
        ("mlp.* @ bwd -> nvfp4(sr=grad)", []),
        # the score products have no weight
        ("attention where weight -> fp8", []),
        ("* -> mxfp4(sr=grad)\n*embed*, *head, *router*, gate, output*, logits*, to_logits, wte -> bf16\n"
         "layers[-4:] -> bf16", ["attention-scores-in-4-bits"]),
        # conditions between sizes
        ("* where m < n and n < k -> bf16", []),
        ("* where m < n and n < k and k < m -> bf16", ["impossible-predicate"]),
        ("* where k % n == 0 and k != n and n != 1 -> bf16", []),
        # shares of deep stacks
        ("layers[0.5%:0.6%] -> bf16", []),
        ("layers[-1.5%:] -> fp8\nlayers[-1] -> bf16", []),
        # one operand of a product rotated by one recipe, and by the other through a split
        ("mlp -> split(fprop=nvfp4, bwd=nvfp4(rht=wgrad, sr=grad))\nlayers[-4:] -> bf16", []),
        # a fault in reading hides what only a whole policy shows
        ("mlp -> fp8\nmlp -> bf17\nmlp -> bf16", ["unknown-format"]),
        ("", []),
        ("# nothing but a comment", []),
    ],
)  # fmt: skip
def test_what_is_found(text: str, codes: list[str]) -> None:
    assert found(text) == codes


def test_both_places_are_shown_when_two_rules_disagree() -> None:
    (diagnostic,) = lint(parse_with_diagnostics("a.b -> bf16\na -> fp8")).diagnostics
    assert diagnostic.span.text == "a.b -> bf16"
    assert [(n.span.text, n.message) for n in diagnostic.notes] == [("a -> fp8", "this rule sets fp8")]


def test_a_faulty_import_is_reported_with_the_place_that_imports_it(tmp_path: Path) -> None:
    (tmp_path / "lib.policy").write_text("mlp -> fp9\n")
    (diagnostic,) = parse_with_diagnostics('import "lib"\n', path=tmp_path / "main.policy").diagnostics
    assert diagnostic.code == "unknown-format"
    assert Path(diagnostic.span.source.path).name == "lib.policy"


# ---- suppressions


TAIL = "layers[-4:] -> bf16"


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        # behind the statement, or on a line of its own above it
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
        # a statement of several lines: behind any of them, or on a line of its own before the one at fault
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
        # a fault in reading cannot be allowed
        ("a -> fp9  # allow: unknown-format", ["unknown-format"]),
        ("a -> fp8  # allow: unknown-format", ["unused-suppression"]),
        # not a suppression
        ("a -> fp8  # this would allow: shadowed-rule", []),
        ("a -> fp8  # allow:", []),
    ],
)  # fmt: skip
def test_suppressions(text: str, codes: list[str]) -> None:
    assert found(text) == codes


def test_a_suppression_of_a_rule_that_did_not_run_is_not_unused() -> None:
    text = "a -> fp8  # allow: shadowed-rule"
    assert found(text, codes={"unused-suppression", "redundant-rule"}) == []
    assert found(text, codes={"unused-suppression", "shadowed-rule"}) == ["unused-suppression"]
    assert found(text, codes={"shadowed-rule"}) == []


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
def test_fix_removes_what_is_unused(before: str, after: str) -> None:
    assert mended(before) == after


# ---- fixes


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a.b -> bf16\na -> fp8\n", "a -> fp8\n"),
        ("# own\na.b -> bf16  # of the rule\n# other\na -> fp8\n", "# own\n# other\na -> fp8\n"),
        ("a.b -> bf16; a -> fp8\n", " a -> fp8\n"),
        ("a -> fp8; a.b -> fp8\n", "a -> fp8\n"),
        ("a -> fp8; a.b -> fp8; c -> fp8\n", "a -> fp8;  c -> fp8\n"),
        ("a -> fp8\nafter 50% { a.b -> fp8 }\n", "a -> fp8\nafter 50% {  }\n"),
        ("a -> fp8\nafter 50% {\n    a.b -> fp8\n}\n", "a -> fp8\nafter 50% {\n}\n"),
        ("a -> fp8\nafter 50% { a.b -> fp8\n    c -> bf16 }\n", "a -> fp8\nafter 50% { \n    c -> bf16 }\n"),
        ("a -> fp8\na.b,\n  a.c ->\n    fp8\nc -> bf16\n", "a -> fp8\nc -> bf16\n"),
        ("a -> fp8\na.b -> fp8", "a -> fp8\n"),
        ("recipe r = fp8\na -> fp8\n", "a -> fp8\n"),
        ("recipe r = s\nrecipe s = t\nrecipe t = fp8\na -> fp8\n", "a -> fp8\n"),
        ("a -> split(fprop=fp8, dgrad=fp8)\n", "a -> split(fprop=fp8, dgrad=fp8, wgrad=keep)\n"),
        ("a -> split(fprop=fp8,)\n", "a -> split(fprop=fp8, dgrad=keep, wgrad=keep,)\n"),
        ("a -> split(\n    fprop=fp8,  # on\n)\n", "a -> split(\n    fprop=fp8, dgrad=keep, wgrad=keep,  # on\n)\n"),
        ("a -> split(wgrad=fp8(grad=e4m3) )\n", "a -> split(wgrad=fp8(grad=e4m3), fprop=keep, dgrad=keep )\n"),
        ("a -> fp8(grad=e4m3, grad=e4m3)\n", "a -> fp8(grad=e4m3)\n"),
        ("a -> fp8(grad=e4m3, grad=e4m3, grad=e4m3,)\n", "a -> fp8(grad=e4m3,)\n"),
        ("a -> fp8(grad=e4m3,  # why, why\n  grad=e4m3)\n", "a -> fp8(grad=e4m3  # why, why\n  )\n"),
        # of two rules that make each other needless, one stays
        ("a -> fp8\nb -> fp8\na -> fp8\n", "b -> fp8\na -> fp8\n"),
        ("a -> fp8\na -> fp8\na -> fp8\n", "a -> fp8\n"),
        # what is not safe is left alone
        ("a.b -> bf16 expect 3\na -> fp8\n", "a.b -> bf16 expect 3\na -> fp8\n"),
        ("a -> fp8(grad=e4m3, grad=e5m2)\n", "a -> fp8(grad=e4m3, grad=e5m2)\n"),
        ("a -> fp9\n", "a -> fp9\n"),
        # a file with other faults is mended as far as it goes
        ("a -> fp8(grad=e4m3, grad=e4m3)\nb -> fp9\n", "a -> fp8(grad=e4m3)\nb -> fp9\n"),
        ("\ufeffa -> fp8\na.b -> fp8\n", "a -> fp8\n"),
    ],
)  # fmt: skip
def test_fixes(before: str, after: str) -> None:
    assert mended(before) == after
    assert mended(after) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a -> fp9\n", "a -> fp8\n"),
        ("a.b -> bf16 expect 3\na -> fp8\n", "a -> fp8\n"),
        ("q, k @ wgrad -> fp8\n", "q @ wgrad, k @ wgrad -> fp8\n"),
        (f"a -> nvfp4\n{TAIL}\n", f"a -> nvfp4(sr=grad)\n{TAIL}\n"),
        (f"a -> nvfp4()\n{TAIL}\n", f"a -> nvfp4(sr=grad)\n{TAIL}\n"),
        (f"a -> nvfp4(rht=wgrad)\n{TAIL}\n", f"a -> nvfp4(rht=wgrad, sr=grad)\n{TAIL}\n"),
        (f"a -> nvfp4(rht=wgrad,)\n{TAIL}\n", f"a -> nvfp4(rht=wgrad, sr=grad,)\n{TAIL}\n"),
        (f"a -> nvfp4(rht=all, sr=all)\n{TAIL}\n", f"a -> nvfp4(rht=wgrad, sr=grad)\n{TAIL}\n"),
        (f"a -> nvfp4(rht=wgrad.grad, sr=grad)\n{TAIL}\n", f"a -> nvfp4(rht=wgrad, sr=grad)\n{TAIL}\n"),
        ("a -> fp8(grad=e4m3, grad=e5m2)\n", "a -> fp8(grad=e4m3)\n"),
    ],
)  # fmt: skip
def test_unsafe_fixes_only_when_asked_for(before: str, after: str) -> None:
    assert mended(before) == before
    assert mended(before, unsafe=True) == after
    assert found(after) == []


def test_only_what_was_selected_is_mended() -> None:
    text = "recipe r = fp8\na -> fp8\na.b -> fp8\n"
    assert mended(text, codes={"unused-recipe"}) == "a -> fp8\na.b -> fp8\n"
    assert mended(text, codes={"shadowed-rule"}) == text


@pytest.mark.parametrize("replacement", ["mlp => fp8", "mlp -> fp9", "mlp -> ("])
def test_a_fix_that_would_break_the_file_is_not_applied(replacement: str) -> None:
    """No rule has such a fix; if one ever has, the file stays whole."""

    def check(loaded: LoadedPolicy) -> LintResult:
        span = loaded.file.statements[0].span
        fix = Fix(message="break it", edits=(Edit(span, replacement),), safe=True)
        return LintResult(diagnostics=(Diagnostic(code="shadowed-rule", message="m", span=span, fix=fix),))

    assert apply_fixes("mlp -> fp8\n", parse_with_diagnostics, check).text == "mlp -> fp8\n"


def untidy(rng: random.Random) -> str:
    """A random policy with faults that have safe fixes, comments all over, and no one layout."""
    lines = random_policy(rng, recipes=("fp8", "fp8", "r1", "bf16", "split(fprop=fp8)", "split(bwd=bf16,)"))
    out = ["recipe idle1 = idle2", "recipe idle2 = fp8"] if rng.random() < 0.5 else []
    for number, line in enumerate(lines.splitlines()):
        if rng.random() < 0.3:
            out.append(f"# own {number}")
        if rng.random() < 0.2:
            line = line.replace("-> fp8", "-> fp8(grad=e4m3, grad=e4m3)")
        if rng.random() < 0.2:
            line = line.replace("{ ", "{\n    ").replace(" }", "\n}")
        if rng.random() < 0.2:
            line = f"{line}; {line}" if "->" in line and "variant" not in line else line
        if rng.random() < 0.3:
            line += rng.choice(
                (f"  # at {number}", "  # allow: shadowed-rule", "  # allow: redundant-rule, idle-option")
            )
        out.append(line)
    return "\n".join(out) + "\n"


SEEDS = [
    range(60),
    *(pytest.param(range(at, at + 200), marks=pytest.mark.slow) for at in range(1_000, 2_000, 200)),
]


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"{seeds.start}-{seeds.stop}")
def test_safe_fixes_keep_the_meaning_and_the_comments(seeds: range) -> None:
    count = 0
    for seed in seeds:
        before = untidy(random.Random(seed))
        result = apply_fixes(before, parse_with_diagnostics, lint)
        after, count = result.text, count + result.count
        hint = f"seed {seed}\n{before}\n->\n{after}"
        loaded = parse_with_diagnostics(after)
        assert not loaded.diagnostics, hint
        left = [d for d in lint(loaded).diagnostics if d.fix is not None and d.fix.safe]
        assert not left, hint
        assert mended(after) == after, hint
        was = parse(before.replace("grad=e4m3, grad=e4m3", "grad=e4m3"))
        assert [v.name for v in loaded.policy.variants] == [v.name for v in was.variants]
        for name in (None, *(v.name for v in was.variants)):
            one = was if name is None else was.variant(name)
            other = loaded.policy if name is None else loaded.policy.variant(name)
            assert not differ(one, other), f"{name}: {hint}"
        said = [before[a:b] for a, b in comment_ranges(before) if before[a:b].startswith("# own")]
        assert [after[a:b] for a, b in comment_ranges(after) if after[a:b].startswith("# own")] == said, hint
    assert count > len(seeds)


# ---- growth


def lines(count: int) -> dict[str, str]:
    """Policies of many statements, each hard in its own way."""
    many = range(count)
    return {
        "distinct": "".join(f"layers[{i}].mlp.up{i}x -> fp8\n" for i in many),
        "same": "mlp.up -> fp8\n" * count,
        "globs": "".join(f"*a{i}x*.b* -> fp8\n" for i in many),
        "conditions": "".join(f"a{i}x where k % 16 == {i % 16} and n > {i} -> fp8\n" for i in many),
        "phases": "".join(f"after {i} {{ mlp -> fp8 }}\n" for i in many),
        "shares": "".join(f"layers[-{i * 90 / count:.3f}%:].a{i}x -> fp8\n" for i in many),
        "recipes": "".join(f"recipe r{i} = fp8\na{i}x -> r{i}\n" for i in range(count // 2)),
        "variants": "".join(f"a{i}x -> fp8\nvariant v{i} {{ a{i}x -> bf16 }}\n" for i in range(count // 2)),
        "one variant": "* -> bf16\nvariant v {\n" + "".join(f"a{i}x -> fp8\n" for i in many) + "}\n",
        "suppressions": "".join(f"a{i}x -> fp8  # allow: shadowed-rule, shadowed-rul{i}\n" for i in many),
        "splits": "".join(f"a{i}x -> split(fprop=nvfp4)\n" for i in many),
    }


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def in_proportion(work: Callable[[int], Callable[[], object]]) -> None:
    """Ten thousand take less than twenty times what a thousand do, where less than a second counts as one."""
    taken = seconds(work(10_000))
    assert taken < 20 or taken < 20 * seconds(work(1_000))


@pytest.mark.slow
@pytest.mark.parametrize("kind", lines(2))
def test_ten_thousand_rules_take_ten_times_as_long_as_a_thousand(kind: str) -> None:
    """Twice that is allowed. What is quadratic takes a hundred times as long.

    Questions about reach have a budget for the whole policy, so these grow less than ten times.
    """
    in_proportion(lambda count: partial(lint, parse_with_diagnostics(lines(count)[kind])))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["same", "suppressions", "splits"])
def test_ten_thousand_fixes_take_ten_times_as_long_as_a_thousand(kind: str) -> None:
    """As above; each round of fixes reads the text again, and there are a few."""
    in_proportion(lambda count: partial(mended, lines(count)[kind]))


@pytest.mark.slow
def test_a_megabyte_is_read_and_linted_in_proportion() -> None:
    def work(count: int) -> Callable[[], object]:
        line = "decoder.layers[3].mlp.{gate,up,down}_proj where weight and k % 16 == 0 -> fp8(grad=e4m3)  # a comment\n"
        return lambda: lint(parse_with_diagnostics(line * (100 * count // len(line))))

    in_proportion(work)
