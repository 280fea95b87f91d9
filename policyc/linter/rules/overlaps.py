"""Checks for shadowed and redundant rules."""

from __future__ import annotations

from collections.abc import Iterable

from policyc.language.diagnostics import Diagnostic, Fix, Note
from policyc.linter.context import Context
from policyc.linter.fixes import remove_statement
from policyc.linter.wider import ResolvedRule


def redundant_rule(context: Context) -> Iterable[Diagnostic]:
    """Warning: A rule gives its sites the recipe that they already have.

    An earlier rule has the same or a wider selector (as for `shadowed-rule`), its recipe does the same to every
    product, and all rules in between have its recipe. The policy and its variants mean the same without this rule.
    Remove it.

    `--fix` removes the rule if both rules name the same recipe. If they name recipes that are equal today, or if the
    rule has an `expect`, which still counts sites, `--unsafe-fixes` removes it.

    Bad:  mlp.* -> fp8
          mlp.up -> fp8
    Good: mlp.* -> fp8
    """
    for rule in (r for r in context.resolved_rules if context.in_this_file(r.rule.span)):
        earlier = context.find_repeated(rule)
        if earlier is None or context.find_overriding(rule) is not None:
            continue
        if context.in_this_file(earlier.rule.span) and context.find_overriding(earlier) is not None:
            continue  # of two rules that make each other unnecessary, `--fix` keeps one
        is_safe = rule.rule.recipe == earlier.rule.recipe and rule.rule.expect is None
        yield Diagnostic(
            span=rule.rule.span,
            message="this rule changes nothing",
            help="remove it",
            notes=(Note(earlier.rule.span, "this rule already gives these sites the same recipe"),),
            fix=_removal(rule, safe=is_safe),
        )


def shadowed_rule(context: Context) -> Iterable[Diagnostic]:
    """Warning: A later rule overrides a rule on every site, so it has no effect.

    Later rules override earlier ones. A rule that is overridden everywhere is often an exception that was written too
    early. Move it below the rule that overrides it, or remove it.

    The later rule has the same selector or a wider one, whose names occur in a row in the selector of this rule. This
    rule has its slices and all terms of its condition and phase. Only single rules are compared: several later rules
    may override a rule together. With a program, `overridden-rule` finds every rule that decides nothing.

    `--fix` removes the rule if the later rule names the same recipe. If it also has an `expect`, which still counts
    sites, `--unsafe-fixes` does.

    Bad:  layers[-4:].mlp.* -> bf16
          mlp.* -> fp8
    Good: mlp.* -> fp8
          layers[-4:].mlp.* -> bf16
    """
    for rule in (r for r in context.resolved_rules if context.in_this_file(r.rule.span)):
        later = context.find_overriding(rule)
        if later is not None:
            says_the_same = later.rule.recipe == rule.rule.recipe
            yield Diagnostic(
                span=rule.rule.span,
                message="this rule has no effect: a later rule overrides it on every site",
                help="remove it"
                if says_the_same
                else "move it below the rule that overrides it, or remove it",
                notes=(Note(later.rule.span, f"this rule sets {later.rule.recipe}"),),
                fix=_removal(rule, safe=rule.rule.expect is None) if says_the_same else None,
            )


def _removal(rule: ResolvedRule, *, safe: bool) -> Fix:
    return Fix(message="remove the rule", edits=(remove_statement(rule.rule.span),), safe=safe)
