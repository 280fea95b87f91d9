"""Runs the lint rules on a policy and removes the findings that comments suppress."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from policyc.language.diagnostics import Diagnostic
from policyc.language.loader import LoadedPolicy
from policyc.lint.context import DEFAULT_TARGET, Context
from policyc.lint.rules import ALL_CODES, LINT_RULES, load_program_rules
from policyc.lint.suppressions import Suppressions
from policyc.numerics.targets import Target

if TYPE_CHECKING:
    from policyc.compiler.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class LintResult:
    """The diagnostics of one policy, and the number of questions that exceeded their limits."""

    diagnostics: tuple[Diagnostic, ...]
    undecided: int = 0


def lint(
    loaded: LoadedPolicy,
    codes: Collection[str] = ALL_CODES,
    plan: Plan | None = None,
    target: Target = DEFAULT_TARGET,
) -> LintResult:
    """Checks a policy, and what it does to a program if a plan is given.

    Errors found while the policy was read are always reported, and then no rule runs.

    Args:
      loaded: the policy, as `parse_with_diagnostics` returns it.
      codes: the codes to look for.
      plan: what the policy does to a program. Without it, the rules that need a program do not run.
      target: the GPU on which the plan's speed is judged.
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
    reported = _drop_explained([d for d in diagnostics.values() if not suppressions.suppress(d)])
    checked = {
        code
        for code, rule in rules.items()
        if (rule.check is None or code in codes) and not rule.guesses_without_program
    }
    reported += [d for d in suppressions.check(ALL_CODES, checked) if d.code in codes]
    return LintResult(
        diagnostics=tuple(sorted(reported, key=lambda d: d.sort_key)), undecided=context.count_undecided()
    )


_REASONS = {"unmatched-rule": {"empty-slice", "impossible-predicate", "literal-default", "opaque-index"}}
"""Codes that are not reported about a rule if another finding about it gives the reason, and the codes of these."""


def _drop_explained(diagnostics: list[Diagnostic]) -> list[Diagnostic]:
    def is_explained(diagnostic: Diagnostic) -> bool:
        span, codes = diagnostic.span, _REASONS.get(diagnostic.code, ())
        return any(span.start <= d.span.start < span.end for d in reasons if d.code in codes)

    reasons = [d for d in diagnostics if any(d.code in codes for codes in _REASONS.values())]
    return [d for d in diagnostics if not is_explained(d)]
