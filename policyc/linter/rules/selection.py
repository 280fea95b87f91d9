"""Rules about selectors, conditions and phases that match nothing, or something other than what was meant."""

from __future__ import annotations

from collections.abc import Iterator

from policyc.base.text import closest_name
from policyc.language.diagnostics import Diagnostic, Edit, Fix, Span
from policyc.language.kinds import KINDS
from policyc.language.predicates import Flag, leaves
from policyc.language.recipes import GEMM_GROUPS, Gemm
from policyc.language.schedule import representative_steps
from policyc.language.selectors import Selector
from policyc.linter.context import Check, Context
from policyc.linter.examples import Budget, SearchTooLarge, example_index
from policyc.linter.samples import sample_attributes

_ALL_PRODUCTS = frozenset(Gemm)


def _check_ambiguous_products(context: Context) -> Iterator[Diagnostic]:
    for rule in context.rules:
        *others, last = rule.selectors
        if others and last.products != _ALL_PRODUCTS and all(s.products == _ALL_PRODUCTS for s in others):
            edits = tuple(_limit_products(s, last) for s in others)
            yield Diagnostic(
                span=last.span,
                message=f"the products apply to '{last}' only: the selectors before it match all three",
                help="name the products of each selector",
                fix=Fix(message="limit all selectors to these products", edits=edits, safe=False),
            )
        for before, selector in zip(rule.selectors, rule.selectors[1:], strict=False):
            product = closest_name(str(selector), GEMM_GROUPS) if len(selector.segments) == 1 else None
            if (
                before.products != _ALL_PRODUCTS
                and product is not None
                and selector.products == _ALL_PRODUCTS
            ):
                yield Diagnostic(
                    span=selector.span,
                    message=f"'{selector}' is read as a selector, not as a product",
                    help=f"did you mean the product '{product}'?",
                )


def _limit_products(selector: Selector, last: Selector) -> Edit:
    end = selector.span.end
    return Edit(Span(selector.span.source, end, end), f" @ {str(last).partition(' @ ')[2]}")


def _check_empty_slice(context: Context) -> Iterator[Diagnostic]:
    for rule in context.rules:
        for segment in (s for selector in rule.selectors for s in selector.segments):
            if segment.indices is not None and example_index(segment.indices) is None:
                yield Diagnostic(
                    span=segment.indices.span,
                    message=f"{segment.indices} selects no layer of any stack",
                    help="the start must be before the end: [-4:] is the last four, [:4] the first four",
                )


_MAX_STEPS = 200_000  # for the conditions of all rules


def _check_impossible_predicate(context: Context) -> Iterator[Diagnostic]:
    budget = Budget(_MAX_STEPS)
    for rule in context.rules:
        if rule.where is None:
            continue
        try:
            samples = sample_attributes((rule.where,), budget)
        except SearchTooLarge:
            context.undecided += 1
            continue
        is_possible = any(rule.where.holds(sample) for sample in samples)
        if not is_possible:
            flags = {leaf.name for leaf in leaves(rule.where) if isinstance(leaf, Flag)}
            help = "check its numbers"
            if "conv" in flags:
                help = "policyc leaves convolutions as they are: no site is a conv"
            elif flags & KINDS.keys():
                help = "check which kinds exclude each other"
            yield Diagnostic(span=rule.where.span, message="no GEMM satisfies this condition", help=help)


_WORDS = frozenset({"default", "all", "any", "everything", "else", "otherwise"})


def _check_literal_default(context: Context) -> Iterator[Diagnostic]:
    for rule in context.rules:
        for selector in rule.selectors:
            segment, *others = selector.segments
            if others or selector.anchored or segment.indices or segment.glob.lower() not in _WORDS:
                continue
            if context.matches_program(rule):  # the program has such a scope
                continue
            fix = Fix(message="replace it with '*'", edits=(Edit(segment.span, "*"),), safe=False)
            yield Diagnostic(
                span=segment.span,
                message=f"'{segment.glob}' matches only scopes named '{segment.glob}'",
                help="write '*' for every site",
                fix=fix,
            )


def _check_phase_never_holds(context: Context) -> Iterator[Diagnostic]:
    for rule in context.rules:
        moments = representative_steps(rule.when)
        if rule.when and not any(all(w.holds(*moment) for w in rule.when) for moment in moments):
            yield Diagnostic(
                span=rule.when[-1].span,
                message=f"no step satisfies '{' and '.join(map(str, rule.when))}'",
                help="'after' holds from its step on, 'until' holds before its step",
            )


CHECKS: dict[str, Check] = {
    "ambiguous-products": _check_ambiguous_products,
    "empty-slice": _check_empty_slice,
    "impossible-predicate": _check_impossible_predicate,
    "literal-default": _check_literal_default,
    "phase-never-holds": _check_phase_never_holds,
}
