"""Faults of rules, most of which also stop the compiler: no effect, an unmet `expect`, or sites it cannot change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from policyc.compiler.planning.idle_rules import find_deciding_rules, idle_rules
from policyc.compiler.planning.plan_checks import (
    inseparable_layers,
    name_sites,
    opaque_indices,
    opaque_sites,
    uncertain_kinds,
    unknown_blocks,
    unmet_expectations,
)
from policyc.language.diagnostics import Diagnostic, Note
from policyc.linter.context import Check, Context
from policyc.linter.products import FIRST_LOSS_HINT

_MAX_NOTES = 3


def _check_overridden_rule(context: Context) -> Iterator[Diagnostic]:
    plan = context.program_plan
    deciding, overriding = find_deciding_rules(plan)
    refused = {d.span: d for d in idle_rules(plan) if d.code == "overridden-rule"}
    for index, rule in enumerate(plan.policy.rules):
        if index in deciding or index not in overriding:  # a rule active in no phase is not overridden
            continue
        if context.find_overriding(context.resolved_rules[index]) is None:  # else: shadowed-rule
            count = plan.counts[index]
            sites = f"all {count} of its sites" if count > 1 else "its only site"
            found = refused.get(rule.span) or Diagnostic(
                span=rule.span,
                message=f"later rules override this rule on {sites} in this model",
                help="move it below the rules that override it, or remove it",
            )
            later = sorted(overriding[index])[:_MAX_NOTES]
            yield replace(
                found,
                notes=tuple(Note(plan.policy.rules[i].span, "this rule overrides it") for i in later),
                sites=name_sites(site for site, _ in plan.matched_layers(index)),
            )


def _check_unmatched_rule(context: Context) -> Iterator[Diagnostic]:
    idle = idle_rules(context.program_plan, hint=FIRST_LOSS_HINT)
    return (d for d in idle if d.code == "unmatched-rule")


CHECKS: dict[str, Check] = {
    "expect-violated": lambda context: unmet_expectations(context.program_plan, hint=FIRST_LOSS_HINT),
    "opaque-index": lambda context: chain(
        opaque_indices(context.program_plan), unknown_blocks(context.program_plan)
    ),
    "opaque-kind": lambda context: uncertain_kinds(context.program_plan),
    "opaque-site": lambda context: chain(
        opaque_sites(context.program_plan), inseparable_layers(context.program_plan)
    ),
    "overridden-rule": _check_overridden_rule,
    "unmatched-rule": _check_unmatched_rule,
}
