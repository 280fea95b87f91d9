"""Rules about selectors, conditions and phases that match nothing, or something other than what was meant."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

from policyc.base.text import closest_name
from policyc.language.bounds import Bound
from policyc.language.diagnostics import Diagnostic, Edit, Fix, Span
from policyc.language.kinds import KINDS, possible_flags
from policyc.language.predicates import Comparison, Flag, Predicate, SiteAttributes, Term, leaves
from policyc.language.recipes import GEMM_GROUPS, Gemm
from policyc.language.schedule import representative_steps
from policyc.language.selectors import Indices, Selector
from policyc.linter.context import Context

_ALL_PRODUCTS = frozenset(Gemm)


def ambiguous_products(context: Context) -> Iterable[Diagnostic]:
    """Warning: Only the last of several selectors names products.

    `@` belongs to the selector before it: `a, b @ wgrad` matches all three products of `a`. This is easily read as if
    `@` applied to both selectors. Name the products of each selector, or write two rules.

    A selector after a comma that looks like a misspelled product is reported too.

    Bad:  q_proj, k_proj @ wgrad -> fp8
    Good: q_proj @ wgrad, k_proj @ wgrad -> fp8
    """
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


def empty_slice(context: Context) -> Iterable[Diagnostic]:
    """Warning: A slice selects no layer of any stack.

    Its start is not before its end, and both count from the same end of the stack, so the rule matches nothing. Swap
    the two numbers, or remove the rule.

    Bad:  layers[8:4].mlp -> bf16
    Good: layers[4:8].mlp -> bf16
    Instead of: unmatched-rule
    """
    for rule in context.rules:
        for segment in (s for selector in rule.selectors for s in selector.segments):
            if segment.indices is not None and _is_empty(segment.indices):
                yield Diagnostic(
                    span=segment.indices.span,
                    message=f"{segment.indices} selects no layer of any stack",
                    help="the start must be before the end: [-4:] is the last four, [:4] the first four",
                )


def _is_empty(indices: Indices) -> bool:
    """Whether a slice is known to select nothing in any stack: its bounds count from one end, and do not ascend."""
    start, stop = (None if bound is None else _place(bound) for bound in (indices.start, indices.stop))
    if start == ("%", Fraction(100)) or stop in (("%", Fraction(0)), ("first", Fraction(0))):
        return True
    return start is not None and stop is not None and start[0] == stop[0] and start[1] >= stop[1]


def _place(bound: Bound) -> tuple[str, Fraction]:
    """Returns from where a bound counts, and its value."""
    if bound.percent:
        return "%", bound.value if bound.value >= 0 else 100 + bound.value
    return "first" if bound.value >= 0 else "last", bound.value


def impossible_predicate(context: Context) -> Iterable[Diagnostic]:
    """Warning: A condition can never hold.

    No GEMM satisfies it, so the rule matches nothing. `m`, `n`, `k`, `batch` and `flops` are at least 1. A site is at
    most one of `mlp`, `attention`, `scores`, `router`, `embedding` and `head`: to match both `mlp` and `head`, write
    `mlp or head`. No site is a `conv`: policyc leaves convolutions as they are. Kinds are checked together, and each
    size or layer is compared with numbers alone: `m < n and n < m` is not reported. Correct the condition, or remove
    the rule.

    Bad:  mlp.* where k > 4096 and k < 1024 -> bf16
    Good: mlp.* where k > 1024 and k < 4096 -> bf16
    Instead of: unmatched-rule
    """
    for rule in context.rules:
        if rule.where is not None and _is_impossible(rule.where):
            flags = {leaf.name for leaf in leaves(rule.where) if isinstance(leaf, Flag)}
            help = "check its numbers"
            if "conv" in flags:
                help = "policyc leaves convolutions as they are: no site is a conv"
            elif flags & KINDS.keys():
                help = "check which kinds exclude each other"
            yield Diagnostic(span=rule.where.span, message="no site satisfies this condition", help=help)


def _is_impossible(condition: Predicate) -> bool:
    """Whether a condition is known to be false for every kind of site, or for every value of one attribute."""
    terms = [t for leaf in leaves(condition) if isinstance(leaf, Comparison) for t in leaf.terms]
    words = {"block", *(leaf.name for leaf in leaves(condition) if isinstance(leaf, Flag))}

    def is_false(known: SiteAttributes) -> bool:
        outside = {"layer": None, "layers": None}
        samples = (
            {**known, **flags, **({} if flags["block"] else outside)}
            for flags in possible_flags(frozenset(words))
        )
        return all(condition.holds(sample) is False for sample in samples)

    def is_never(name: str) -> bool:
        values = _values_near_bounds(terms, least=0 if name == "layer" else 1)
        return bool(values) and all(is_false({name: value}) for value in values)

    return is_false({}) or any(map(is_never, sorted({name for term in terms for name in term.variables})))


_MAX_WORK = 20_000  # numbers tried for one attribute, times terms


def _values_near_bounds(terms: list[Term], *, least: int) -> set[int]:
    """Returns numbers on both sides of every number in some terms, with every remainder; none if they are too many."""
    numbers = {least, *(t.value for t in terms if isinstance(t.value, int))}
    period = math.lcm(*(t.modulus for t in terms if isinstance(t.modulus, int)))
    if len(numbers) * (period + 2) * len(terms) > _MAX_WORK:
        return set()
    return {v for n in numbers for v in range(n - 1, n + period + 1) if v >= least}


_WORDS = frozenset({"default", "all", "any", "everything", "else", "otherwise"})


def literal_default(context: Context) -> Iterable[Diagnostic]:
    """Warning: A selector is a word such as `default`, which matches only scopes of that name.

    Other configuration languages use `default` for everything that no other rule matches. Here it is the name of a
    scope, and the rule matches nothing in most models. Write `*` for every site, as the first rule: later rules
    override it.

    If a scope has this name, write `*.default`.

    Bad:  default -> bf16
          mlp.* -> fp8
    Good: * -> bf16
          mlp.* -> fp8
    Instead of: unmatched-rule
    Without a program: it is also reported if your model has a scope of this name.
    """
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


def phase_never_holds(context: Context) -> Iterable[Diagnostic]:
    """Warning: A phase of the schedule contains no step.

    `after` holds from its step on, `until` holds before its step. `until 0`, `after 100%`, or an `until` inside a
    later `after` contain no step, so their rules never apply. Correct the bounds, or remove the block.

    Bad:  mlp.* -> fp8
          after 90% { until 50% { mlp.* -> bf16 } }
    Good: mlp.* -> fp8
          after 50% { until 90% { mlp.* -> bf16 } }
    """
    for rule in context.rules:
        moments = representative_steps(rule.when)
        if rule.when and not any(all(w.holds(*moment) for w in rule.when) for moment in moments):
            yield Diagnostic(
                span=rule.when[-1].span,
                message=f"no step satisfies '{' and '.join(map(str, rule.when))}'",
                help="'after' holds from its step on, 'until' holds before its step",
            )
