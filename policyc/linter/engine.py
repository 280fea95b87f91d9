"""Runs the lint rules on a policy and removes the findings that comments suppress."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from policyc.language.diagnostics import Diagnostic, Span
from policyc.language.loader import LoadedPolicy
from policyc.linter.context import DEFAULT_TARGET, Context
from policyc.linter.rules import ALL_CODES, LINT_RULES, load_program_rules
from policyc.linter.suppressions import Suppressions
from policyc.numerics.targets import Target

if TYPE_CHECKING:
    from policyc.compiler.planning.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class LintResult:
    """The diagnostics of one policy."""

    diagnostics: tuple[Diagnostic, ...]


def lint(
    loaded: LoadedPolicy,
    codes: Collection[str] = ALL_CODES,
    plan: Plan | None = None,
    target: Target = DEFAULT_TARGET,
) -> LintResult:
    """Checks a policy, and what it does to a program if a plan is given.

    Errors found while reading the policy are always reported. If there are any, no rule runs.

    Args:
      loaded: the policy, as `parse_with_diagnostics` returns it.
      codes: the codes to check.
      plan: what the policy does to a program. Without it, the rules that need a program do not run.
      target: the GPU for which the plan's speed is predicted.
    """
    if loaded.diagnostics:
        return LintResult(diagnostics=loaded.diagnostics)
    context = Context(loaded, plan, target)
    rules = LINT_RULES if plan is None else LINT_RULES | load_program_rules()
    diagnostics: dict[object, Diagnostic] = {}  # a rule may find the same fault twice, under two variants
    for rule in (r for r in rules.values() if r.code in codes):
        for diagnostic in rule.run(context):
            diagnostics.setdefault((diagnostic.sort_key, diagnostic.sites), diagnostic)
    suppressions = Suppressions(loaded.file)
    reported = [d for d in _drop_explained(diagnostics.values()) if not suppressions.suppress(d)]
    checked = {
        code
        for code, rule in rules.items()
        if (rule.check is None or code in codes) and not rule.guesses_without_program
    }
    reported += [d for d in suppressions.check(ALL_CODES, checked) if d.code in codes]
    return LintResult(diagnostics=tuple(sorted(reported, key=lambda d: d.sort_key)))


_EXPLAINED = {
    "empty-slice": {"unmatched-rule"},
    "impossible-predicate": {"unmatched-rule"},
    "literal-default": {"unmatched-rule"},
    "opaque-index": {"unmatched-rule"},
    "opaque-kind": {"unmatched-rule"},
    "everything-in-4-bits": {
        "attention-scores-in-4-bits",
        "embedding-in-4-bits",
        "head-in-4-bits",
        "nearest-rounded-gradient",
        "no-high-precision-tail",
        "router-in-4-bits",
    },
}
"""For each code that gives a reason: the codes of its effects, which are not reported about the same text."""


def _drop_explained(diagnostics: Collection[Diagnostic]) -> list[Diagnostic]:
    reasons = [d for d in diagnostics if d.code in _EXPLAINED]

    def is_explained(diagnostic: Diagnostic) -> bool:
        return any(diagnostic.code in _EXPLAINED[d.code] and _covers(d, diagnostic.span) for d in reasons)

    return [d for d in diagnostics if not is_explained(d)]


def _covers(reason: Diagnostic, span: Span) -> bool:
    """Whether the reason starts inside a span, or its fix rewrites that span."""
    edits = () if reason.fix is None else reason.fix.edits
    return span.start <= reason.span.start < span.end or any(edit.span == span for edit in edits)
