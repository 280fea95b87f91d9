"""Rules about rules that other rules make unnecessary."""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Diagnostic, Fix, Note
from policyc.linter.context import Check, Context
from policyc.linter.coverage import ResolvedRule
from policyc.linter.edits import find_sibling, move_statement, remove_statement


def _check_redundant_rule(context: Context) -> Iterator[Diagnostic]:
    coverage = context.coverage
    local_rules = [r for r in coverage.rules if context.in_this_file(r.rule.span)]
    # Both questions share one budget. Overridden rules come first: they are the more important finding.
    overridden = {r.index for r in local_rules if coverage.find_overriding_rules(r)}
    for rule in local_rules:
        earlier = _find_earlier_rule(context, rule)
        if earlier is not None and rule.index not in overridden:
            edits = (remove_statement(rule.rule.span),)
            is_safe = rule.rule.recipe == earlier.rule.recipe and rule.rule.expect is None
            yield Diagnostic(
                span=rule.rule.span,
                message="this rule changes nothing",
                help="remove it",
                notes=(Note(earlier.rule.span, "this rule already gives these sites the same recipe"),),
                fix=Fix(message="remove the rule", edits=edits, safe=is_safe),
            )


def _find_earlier_rule(context: Context, rule: ResolvedRule) -> ResolvedRule | None:
    """Returns an earlier rule that makes a rule redundant, under every variant.

    An earlier rule of this file that is itself overridden does not count: if two rules make each other unnecessary,
    `--fix` must keep one of them.
    """
    earlier = context.coverage.find_equivalent_earlier_rule(rule)
    if earlier is None:
        return None
    is_removed = context.in_this_file(earlier.rule.span) and context.coverage.find_overriding_rules(earlier)
    return None if is_removed else earlier


_MAX_NOTES = 3
_MOVE = "move it below the rules that override it"


def _check_shadowed_rule(context: Context) -> Iterator[Diagnostic]:
    for rule in (r for r in context.coverage.rules if context.in_this_file(r.rule.span)):
        overriding = context.coverage.find_overriding_rules(rule)
        if overriding:
            says_the_same = all(later.rule.recipe == rule.rule.recipe for later in overriding)
            yield Diagnostic(
                span=rule.rule.span,
                message="this rule has no effect: later rules override it on every site",
                help="remove it" if says_the_same else f"{_MOVE}, or remove it",
                notes=tuple(
                    Note(later.rule.span, f"this rule sets {later.rule.recipe}")
                    for later in overriding[:_MAX_NOTES]
                ),
                fix=_removal(rule, safe=rule.rule.expect is None)
                if says_the_same
                else _move_or_remove(context, rule, overriding),
            )


def _removal(rule: ResolvedRule, *, safe: bool) -> Fix:
    return Fix(message="remove the rule", edits=(remove_statement(rule.rule.span),), safe=safe)


def _move_or_remove(context: Context, rule: ResolvedRule, overriding: tuple[ResolvedRule, ...]) -> Fix | None:
    """Returns the fix that moves a rule, or removes it if it would override another one entirely.

    None if the rule cannot be moved without its block.
    """
    last = max(overriding, key=lambda later: later.index)
    if any(context.coverage.would_be_overridden(later, rule) for later in overriding):
        return _removal(rule, safe=False)
    after = find_sibling(context.file.statements, rule.rule.span, last.rule.span)
    edits = () if after is None else move_statement(rule.rule.span, after)
    return Fix(message=_MOVE, edits=edits, safe=False) if edits else None


CHECKS: dict[str, Check] = {
    "redundant-rule": _check_redundant_rule,
    "shadowed-rule": _check_shadowed_rule,
}
