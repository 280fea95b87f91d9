"""Fixes: what `--fix` and `--unsafe-fixes` write, and that safe fixes keep the meaning and the comments of a policy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest

from policyc import Policy, parse
from policyc.language.diagnostics import Diagnostic, Edit, Fix
from policyc.language.loader import LoadedPolicy, parse_with_diagnostics
from policyc.language.parser import lex
from policyc.linter.api import Findings, lint_loaded
from policyc.linter.fixes import FixedText, apply_fixes
from tests.support.command import ROOT
from tests.support.linting import TAIL, fix_text
from tests.support.policy_oracle import policies_differ, random_policy

pytestmark = pytest.mark.any_jax


@pytest.mark.parametrize(
    "before", ["a -> fp8\na.b -> fp8", "\ufeffa -> fp8\na.b -> fp8\n", "a -> fp8\n    # allow: shadowed-rule"]
)
def test_a_text_is_fixed_whatever_its_ends_are(before: str) -> None:
    """Without a line break at the end, and with a byte order mark. Other fixes are in tests/ui/cases."""
    assert fix_text(before) == "a -> fp8\n"


TEXTS = sorted((ROOT / "tests/ui/policies/lint").glob("*.policy"))
FIXED = [
    # one per line: a fix that would have no effect in these products is not offered
    f"attention.wo @ fprop -> nvfp4(rht=fprop)\n{TAIL}\n",
    f"attention.wo @ fprop -> nvfp4(sr=all)\n{TAIL}\n",
    f"attention.wo -> split(fprop=nvfp4(rht=fprop), bwd=nvfp4(sr=grad))\n{TAIL}\n",
    f"attention.wo @ dgrad -> nvfp4(rht=dgrad.grad, sr=grad)\n{TAIL}\n",
    *(path.read_text(encoding="utf-8") for path in TEXTS),
]


@pytest.mark.parametrize("before", FIXED, ids=lambda text: text.partition("\n")[0][:40])
def test_a_fix_removes_its_finding_and_adds_none(before: str) -> None:
    """With one exception: a policy that could not be read may have findings when it can."""
    findings = lint_loaded(parse_with_diagnostics(before))
    fixed = apply_fixes(before, parse_with_diagnostics, lint_loaded, unsafe=True)
    remaining = lint_loaded(parse_with_diagnostics(fixed.text))
    assert (fixed.count > 0) == any(d.fix is not None for d in findings)
    assert not [d for d in remaining if d.fix is not None], fixed.text
    was_readable = not parse_with_diagnostics(before).diagnostics
    assert not was_readable or {d.code for d in remaining} <= {d.code for d in findings}, fixed.text


def test_only_selected_codes_are_fixed() -> None:
    text = "recipe r = fp8\na -> fp8\na.b -> fp8\n"
    assert fix_text(text, codes={"unused-recipe"}, unsafe=True) == "a -> fp8\na.b -> fp8\n"
    assert fix_text(text, codes={"shadowed-rule"}, unsafe=True) == text


@pytest.mark.parametrize("replacement", ["mlp => fp8", "mlp -> fp9", "mlp -> ("])
def test_a_fix_that_would_break_the_file_is_not_applied(replacement: str) -> None:
    """No rule has such a fix. If one ever has, the file must stay valid."""

    def check(loaded: LoadedPolicy) -> Sequence[Diagnostic]:
        span = loaded.file.statements[0].span
        fix = Fix(message="break it", edits=(Edit(span, replacement),), safe=True)
        return (Diagnostic(code="shadowed-rule", message="m", span=span, fix=fix),)

    assert apply_fixes("mlp -> fp8\n", parse_with_diagnostics, check).text == "mlp -> fp8\n"


def random_untidy_policy(rng: random.Random) -> str:
    """A random policy with faults that have safe fixes, with comments in many places and an irregular layout."""
    policy = random_policy(rng, recipes=("fp8", "fp8", "r1", "bf16", "split(fprop=fp8)", "split(bwd=bf16,)"))
    lines = ["recipe idle1 = idle2", "recipe idle2 = fp8"] if rng.random() < 0.5 else []
    for number, line in enumerate(policy.splitlines()):
        if rng.random() < 0.3:
            lines.append(f"# own line {number}")
        if rng.random() < 0.2:
            line = line.replace("-> fp8", "-> fp8(grad=e4m3, grad=e4m3)")
        if rng.random() < 0.2:
            line = line.replace("{ ", "{\n    ").replace(" }", "\n}")
        if rng.random() < 0.2:
            line = f"{line}; {line}" if "->" in line and "variant" not in line else line
        if rng.random() < 0.3:
            line += rng.choice(
                (f"  # behind {number}", "  # allow: shadowed-rule", "  # allow: redundant-rule, idle-option")
            )
        lines.append(line)
    return "\n".join(lines) + "\n"


def comments_on_own_lines(text: str) -> list[str]:
    comments = [token.text for token in lex(text) if token.kind == "comment"]
    return [comment for comment in comments if comment.startswith("# own line")]


def recipes_of(policy: Policy) -> set[str]:
    """The recipes that the rules of a policy set."""
    return {repr(policy.resolver()(rule.recipe).treatments) for rule in policy.rules}


class CachedLinter:
    """Parses and lints each text once."""

    def __init__(self) -> None:
        self.load = cache(parse_with_diagnostics)
        self._results: dict[int, Findings] = {}  # by identity: `load` keeps the policies alive

    def lint(self, loaded: LoadedPolicy) -> Findings:
        if id(loaded) not in self._results:
            self._results[id(loaded)] = lint_loaded(loaded)
        return self._results[id(loaded)]

    def fix(self, text: str) -> FixedText:
        return apply_fixes(text, self.load, self.lint)


SEEDS = [range(start, start + 20) for start in range(0, 60, 20)]


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"{seeds.start}-{seeds.stop}")
def test_safe_fixes_keep_the_meaning_and_the_comments(seeds: range) -> None:
    count = 0
    for seed in seeds:
        before = random_untidy_policy(random.Random(seed))
        linter = CachedLinter()
        fixed = linter.fix(before)
        after, count = fixed.text, count + fixed.count
        hint = f"seed {seed}\n{before}\n->\n{after}"
        loaded = linter.load(after)
        assert not loaded.diagnostics, hint
        remaining = [d for d in linter.lint(loaded) if d.fix is not None and d.fix.safe]
        assert not remaining, hint
        assert linter.fix(after).text == after, hint
        original = parse(before.replace("grad=e4m3, grad=e4m3", "grad=e4m3"))
        assert [v.name for v in loaded.policy.variants] == [v.name for v in original.variants]
        assert not policies_differ(original, loaded.policy), hint
        for name in (v.name for v in original.variants):
            assert not policies_differ(original.variant(name), loaded.policy.variant(name)), f"{name}: {hint}"
        assert comments_on_own_lines(after) == comments_on_own_lines(before), hint
        # A policy that imports this one may redefine its recipes, so rules that agree by chance must stay.
        redefined = "variant importing { recipe r1 = keep; recipe r2 = fp8(grad=e4m3) }\n"
        imported = [parse(text + redefined).variant("importing") for text in (str(original), after)]
        assert not policies_differ(*imported), hint
        # A rule that says something of its own is never deleted.
        assert recipes_of(loaded.policy) == recipes_of(original), hint
    assert count > len(seeds)  # the policies do have faults
