"""The rule by kind that says what a rule by names means: `* where mlp and layer >= -4` for `layers[-4:].mlp.*`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from policyc.compiler.kind_names import kind_of_module
from policyc.language.bounds import Bound
from policyc.language.policy import Rule
from policyc.language.predicates import AllOf, AnyOf, Comparison, Flag, Predicate, Term
from policyc.language.selectors import Indices, Pattern, SelectorSegment, expand_selector

_LAYER = Term(value="layer")


def as_rule_by_kind(rule: Rule) -> Rule | None:
    """A rule that takes sites by kind and block; None if a selector is about anything but all products of a kind."""
    patterns = [pattern for selector in rule.selectors for pattern in expand_selector(selector)]
    conditions = dict.fromkeys(_condition(pattern) for pattern in patterns)
    if None in conditions:
        return None
    alternatives = tuple(condition for condition in conditions if condition is not None)
    by_kind = alternatives[0] if len(alternatives) == 1 else AnyOf(operands=alternatives)
    selectors = dict.fromkeys(
        replace(selector, segments=(SelectorSegment(glob="*"),), anchored=False)
        for selector in rule.selectors
    )
    return replace(rule, selectors=tuple(selectors), where=_all_of(by_kind, rule.where))


def _condition(pattern: Pattern) -> Predicate | None:
    """The kind and the blocks that a pattern is about; None if it is about one matrix, or another choice of layers."""
    names = [segment.glob for segment in pattern.segments if not segment.is_wildcard]
    indices = [segment.indices for segment in pattern.segments if segment.indices is not None]
    kind = kind_of_module(names[-1]) if names else ""
    if not kind or len(indices) > 1 or any(i.step is not None for i in indices):
        return None
    return _all_of(Flag(name=kind), *(c for i in indices for c in _comparisons(i)))


def _comparisons(indices: Indices) -> Iterator[Predicate]:
    if indices.index is not None:
        yield Comparison(terms=(_LAYER, Term(value=Bound(Fraction(indices.index)))), operators=("==",))
    if indices.start is not None:
        yield Comparison(terms=(_LAYER, Term(value=indices.start)), operators=(">=",))
    if indices.stop is not None:
        yield Comparison(terms=(_LAYER, Term(value=indices.stop)), operators=("<",))


def _all_of(*predicates: Predicate | None) -> Predicate:
    operands: list[Predicate] = []
    for predicate in predicates:
        if predicate is not None:
            operands += predicate.operands if isinstance(predicate, AllOf) else [predicate]
    return operands[0] if len(operands) == 1 else AllOf(operands=tuple(operands))
