"""Checks for shadowed and redundant rules."""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Diagnostic, Fix, Note
from policyc.linter.context import Check, Context
from policyc.linter.edits import find_sibling, move_statement, remove_statement
from policyc.linter.wider import ResolvedRule, is_wider


def _check_redundant_rule(context: Context) -> Iterator[Diagnostic]:
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


_MOVE = "move it below the rule that overrides it"


def _check_shadowed_rule(context: Context) -> Iterator[Diagnostic]:
    for rule in (r for r in context.resolved_rules if context.in_this_file(r.rule.span)):
        later = context.find_overriding(rule)
        if later is not None:
            says_the_same = later.rule.recipe == rule.rule.recipe
            yield Diagnostic(
                span=rule.rule.span,
                message="this rule has no effect: a later rule overrides it on every site",
                help="remove it" if says_the_same else f"{_MOVE}, or remove it",
                notes=(Note(later.rule.span, f"this rule sets {later.rule.recipe}"),),
                fix=_removal(rule, safe=rule.rule.expect is None)
                if says_the_same
                else _move_or_remove(context, rule, later),
            )


def _removal(rule: ResolvedRule, *, safe: bool) -> Fix:
    return Fix(message="remove the rule", edits=(remove_statement(rule.rule.span),), safe=safe)


def _move_or_remove(context: Context, rule: ResolvedRule, later: ResolvedRule) -> Fix | None:
    """Returns the fix that moves a rule, or removes it if it would override the later one entirely.

    None if the rule cannot be moved without its block.
    """
    if is_wider(rule, later):
        return _removal(rule, safe=False)
    after = find_sibling(context.file.statements, rule.rule.span, later.rule.span)
    edits = () if after is None else move_statement(rule.rule.span, after)
    return Fix(message=_MOVE, edits=edits, safe=False) if edits else None


CHECKS: dict[str, Check] = {
    "redundant-rule": _check_redundant_rule,
    "shadowed-rule": _check_shadowed_rule,
}
