"""Builds spans, numbers and the predicates of `where` from lark's trees."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any, cast

from lark import Token, Tree

from policyc.language.bounds import MAX_DIGITS, Bound
from policyc.language.diagnostics import Diagnostic, SourceText, Span
from policyc.language.kinds import FLAGS, suggest_word
from policyc.language.parser.grammar import MAX_DEPTH
from policyc.language.predicates import (
    NUMERIC_ATTRIBUTES,
    AllOf,
    AnyOf,
    Comparison,
    Flag,
    Not,
    Operator,
    Predicate,
    Term,
)


class NodeBuilder:
    """Builds nodes from trees. Collects diagnostics instead of raising them."""

    def __init__(self, source: SourceText) -> None:
        self.source = source
        self.diagnostics: list[Diagnostic] = []

    def span(self, node: Any) -> Span:
        """Returns the span of a tree or a token."""
        first = last = node
        while isinstance(first, Tree):
            first = first.children[0]
        while isinstance(last, Tree):
            last = last.children[-1] or last.children[-2]  # an optional part that is absent is None
        return Span(self.source, first.start_pos, last.end_pos)

    def _report(self, code: str, place: Any, message: str, help: str = "") -> None:
        """`place` is a span, a tree or a token."""
        span = place if isinstance(place, Span) else self.span(place)
        self.diagnostics.append(Diagnostic(code=code, message=message, span=span, help=help))

    def _number(self, token: Any) -> Fraction:
        """Reads a number: `4_096`, `1e9`, `2.5`, `-4`. Reports one that is too large, and returns 0 for it."""
        text = token.replace("_", "").lower()
        if text.isdecimal() and len(text) <= MAX_DIGITS:
            return Fraction(int(text))
        mantissa, _, exponent = text.partition("e")
        is_too_large = len(mantissa.lstrip("-")) > MAX_DIGITS or int(exponent[:4] or 0) > MAX_DIGITS
        value = Fraction(0) if is_too_large else Fraction(mantissa) * 10 ** int(exponent or 0)
        if is_too_large or abs(value) >= 10**MAX_DIGITS:  # it would print as a number that is rejected
            help = f"{MAX_DIGITS} digits at most"
            self._report("number-out-of-range", token, "this number is too large", help)
            return Fraction(0)
        return value

    def _integer(self, token: Any) -> int:
        value = self._number(token)
        if value.denominator != 1:
            help = "dimensions and counts are whole numbers"
            self._report("number-out-of-range", token, "not a whole number", help)
        return int(value)

    def _bound(self, token: Any, sign: Any = None) -> Bound:
        """Builds a number, or a percentage if there is a `sign` after it."""
        value, span = self._number(token), self.span(token)
        if sign is not None:
            span = span.to(self.span(sign))
            if abs(value) > 100:
                self._report("number-out-of-range", span, "more than 100%", "percentages go up to 100%")
        elif value.denominator != 1:
            share = Bound(value * 100 if abs(value) < 1 else value, True)  # 0.82 is meant as 82%
            help = f"write a whole number, or a percentage: {share}"
            self._report("number-out-of-range", span, "not a whole number", help)
        return Bound(value, sign is not None, span)


_TRUTH_VALUES = ("true", "false")
_MIRRORED: dict[Operator, Operator] = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


class ConditionBuilder(NodeBuilder):
    """Builds predicates."""

    def _any_of(self, tree: Any) -> Predicate:
        operands = tuple(self._all_of(c) for c in tree.children if isinstance(c, Tree))
        return operands[0] if len(operands) == 1 else AnyOf(operands=operands, span=self.span(tree))

    def _all_of(self, tree: Any) -> Predicate:
        operands = tuple(self._negation(c) for c in tree.children if isinstance(c, Tree))
        return operands[0] if len(operands) == 1 else AllOf(operands=operands, span=self.span(tree))

    def _negation(self, tree: Any) -> Predicate:
        *nots, operand = tree.children
        predicate = (
            self._any_of(operand.children[1]) if operand.data == "parentheses" else self._compare(operand)
        )
        if len(nots) > MAX_DEPTH:
            self._report(
                "nested-too-deep",
                nots[0],
                f"'not' more than {MAX_DEPTH} times in a row",
                "each pair cancels out",
            )
            return predicate
        for token in reversed(nots):
            predicate = Not(operand=predicate, span=self.span(token).to(self.span(operand)))
        return predicate

    def _compare(self, tree: Any) -> Predicate:
        before = len(self.diagnostics)
        terms = tuple(self._term(c) for c in tree.children if isinstance(c, Tree))
        # The grammar accepts only operators here.
        operators = tuple(cast(Operator, str(c)) for c in tree.children if isinstance(c, Token))
        comparison = Comparison(terms=terms, operators=operators, span=self.span(tree))
        if len(self.diagnostics) > before:
            return comparison
        if len(terms) == 1:
            return self._flag(terms[0])
        flags = [t for t in terms if t.variables & {*FLAGS, *_TRUTH_VALUES}]
        if flags:
            words = [v for t in terms for v in sorted(t.variables) if v in FLAGS]
            help = f"write '{words[0]}' or 'not {words[0]}'" if words else "leave the comparison out"
            message = f"'{flags[0]}' is true or false, not a number"
            self._report("bad-predicate", flags[0].span, message, help)
        else:
            self._check_layer(comparison)
        return comparison

    def _flag(self, term: Term) -> Predicate:
        """Builds a flag from a term without a comparison. Reports a term that is not a flag."""
        name = str(term.value)
        if name in _TRUTH_VALUES:
            help = "leave 'where' out, or compare a size: k >= 1024"
            self._report("bad-predicate", term.span, f"'{term}' does not depend on the site", help)
        elif name in FLAGS and term.modulus is not None:
            message = f"'{name}' is true or false, not a number"
            self._report("bad-predicate", term.span, message, f"write '{name}' or 'not {name}'")
        elif name not in FLAGS:
            bound = "== 0" if term.modulus is not None else ">= -4" if name == "layer" else ">= 1024"
            self._report(
                "bad-predicate",
                term.span,
                f"'{term}' is a number, not true or false",
                f"compare it: {term} {bound}",
            )
        return Flag(name=name, span=term.span)

    def _check_layer(self, comparison: Comparison) -> None:
        """Checks that `layer` is compared only with numbers, and nothing else with bounds such as `-4` and `15%`."""
        for term in comparison.terms if comparison.reads_layer else ():
            if term.variables - {"layer"} or term.modulus == "layer":
                help = "write a number or a percentage: layer >= -4, layer < 15%"
                self._report("bad-predicate", term.span, "'layer' can only be compared with numbers", help)
                return
        for operator, (left, right) in zip(comparison.operators, pairwise(comparison.terms), strict=True):
            self._check_bound(left, right, _MIRRORED[operator])
            self._check_bound(right, left, operator)

    def _check_bound(self, bound: Term, other: Term, operator: Operator) -> None:
        """Checks a link of a comparison: `other operator bound`."""
        if not isinstance(bound.value, Bound):
            return
        is_percentage = bound.value.percent
        if other.value != "layer" or other.modulus is not None or bound.modulus is not None:
            noun = "a percentage" if is_percentage else "a negative number"
            message = f"only 'layer' can be compared with {noun}"
            self._report("bad-predicate", bound.span, message, "layer >= -4 selects the last four blocks")
        elif is_percentage and operator not in ("<", ">="):
            message = f"'layer {operator} {bound}': percentages work only with '<' and '>='"
            help = f"layer < {bound} selects the blocks before it, layer >= {bound} the others"
            self._report("bad-predicate", bound.span, message, help)

    def _term(self, tree: Any) -> Term:
        first, *rest = tree.children
        span = self.span(tree)
        if len(rest) == 1:
            return Term(value=self._percentage(first, rest[0]), span=span)
        modulus = self._operand(rest[1]) if rest else None
        value = self._operand(first)
        if modulus == 0 or isinstance(modulus, Bound):
            divisor = "zero" if modulus == 0 else "a negative number"
            message = f"the divisor is {divisor}"
            self._report("bad-predicate", rest[1], message, "divide by 1 or more")
            modulus = 1
        return Term(value=value, modulus=modulus, span=span)

    def _percentage(self, token: Any, sign: Any) -> str | Bound:
        if token.type == "WORD":
            self._report("bad-predicate", sign, "a remainder needs a divisor", f"write {token} % 16")
            return str(token)
        return self._bound(token, sign)

    def _operand(self, token: Any) -> str | int | Bound:
        if token.type == "NUMBER":
            return self._integer(token)
        if token.type == "NEGATIVE":
            bound = self._bound(token)
            return bound if bound.value < 0 else int(bound.value)
        if token not in (*NUMERIC_ATTRIBUTES, *FLAGS, *_TRUTH_VALUES):
            help = suggest_word(token, NUMERIC_ATTRIBUTES)
            self._report("unknown-variable", token, f"sites have no attribute '{token}'", help)
        return str(token)
