"""Parses the condition after `where`: comparisons and flags, joined by `and`, `or` and `not`."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import cast

from policyc.language.bounds import Bound
from policyc.language.diagnostics import Span
from policyc.language.kinds import FLAGS, suggest_word
from policyc.language.parser.cursor import MAX_DEPTH, Cursor, SyntaxFault, too_deep
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

_TRUTH_VALUES = ("true", "false")
_MIRRORED: dict[Operator, Operator] = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


class ConditionParser(Cursor):
    """Parses predicates. Each method reads what the rule of the grammar with its name describes."""

    def any_of(self) -> Predicate:
        start, operands = self.token.start, [self._all_of()]
        while self.accept("or", shown=""):
            operands.append(self._all_of())
        return operands[0] if len(operands) == 1 else AnyOf(operands=tuple(operands), span=self.since(start))

    def _all_of(self) -> Predicate:
        start, operands = self.token.start, [self._negation()]
        while self.accept("and", shown=""):
            operands.append(self._negation())
        return operands[0] if len(operands) == 1 else AllOf(operands=tuple(operands), span=self.since(start))

    def _negation(self) -> Predicate:
        starts = []
        while token := self.accept("not", shown=""):
            starts.append(token.start)
            if len(starts) > MAX_DEPTH:
                raise SyntaxFault(too_deep(self.span(token)))
        if self.open("("):
            predicate = self.any_of()
            self.close(")")
        else:
            predicate = self._compare()
        for start in reversed(starts):
            predicate = Not(operand=predicate, span=self.since(start))
        return predicate

    def _compare(self) -> Predicate:
        start, before = self.token.start, len(self.diagnostics)
        terms, operators = [self._term()], list[Operator]()
        while operator := self.accept(*_MIRRORED, shown=""):
            operators.append(cast(Operator, operator.text))
            terms.append(self._term())
        comparison = Comparison(terms=tuple(terms), operators=tuple(operators), span=self.since(start))
        if len(self.diagnostics) > before:
            return comparison
        if not operators:
            return self._flag(terms[0])
        flags = [t for t in terms if t.variables & {*FLAGS, *_TRUTH_VALUES}]
        if flags:
            words = [v for t in terms for v in sorted(t.variables) if v in FLAGS]
            help = f"write '{words[0]}' or 'not {words[0]}'" if words else "leave the comparison out"
            self.report("bad-predicate", flags[0].span, f"'{flags[0]}' is true or false, not a number", help)
        else:
            self._check_layer(comparison)
        return comparison

    def _flag(self, term: Term) -> Predicate:
        """A term without a comparison. Reports one that is not a flag."""
        name = str(term.value)
        if name in _TRUTH_VALUES:
            help = "leave 'where' out, or compare a size: k >= 1024"
            self.report("bad-predicate", term.span, f"'{term}' does not depend on the site", help)
        elif name in FLAGS and term.modulus is not None:
            help = f"write '{name}' or 'not {name}'"
            self.report("bad-predicate", term.span, f"'{name}' is true or false, not a number", help)
        elif name not in FLAGS:
            bound = "== 0" if term.modulus is not None else ">= -4" if name == "layer" else ">= 1024"
            message = f"'{term}' is a number, not true or false"
            self.report("bad-predicate", term.span, message, f"compare it: {term} {bound}")
        return Flag(name=name, span=term.span)

    def _check_layer(self, comparison: Comparison) -> None:
        """Checks that `layer` is compared only with numbers, and nothing else with bounds such as `-4` and `15%`."""
        for term in comparison.terms if comparison.reads_layer else ():
            if term.variables - {"layer"} or term.modulus == "layer":
                help = "write a number or a percentage: layer >= -4, layer < 15%"
                self.report("bad-predicate", term.span, "'layer' can only be compared with numbers", help)
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
            self.report("bad-predicate", bound.span, message, "layer >= -4 selects the last four blocks")
        elif is_percentage and operator not in ("<", ">="):
            message = f"'layer {operator} {bound}': percentages work only with '<' and '>='"
            help = f"layer < {bound} selects the blocks before it, layer >= {bound} the others"
            self.report("bad-predicate", bound.span, message, help)

    def _term(self) -> Term:
        start = self.token.start
        value, span = self._operand()
        sign = self.accept("%", shown="")
        if sign is None:
            return Term(value=self._number_value(value, span), span=span)
        if self.token.kind != "name" or self.token.text in ("and", "or"):  # `15%`, not `15 % k`
            if isinstance(value, str):
                self.report("bad-predicate", sign, "a remainder needs a divisor", f"write {value} % 16")
                return Term(value=value, span=span)
            bound = self.make_bound(value, span.to(self.span(sign)), True)
            return Term(value=bound, span=bound.span)
        divisor, divisor_span = self._operand()
        modulus = self._number_value(divisor, divisor_span)
        if modulus == 0 or isinstance(modulus, Bound):
            message = f"the divisor is {'zero' if modulus == 0 else 'a negative number'}"
            self.report("bad-predicate", divisor_span, message, "divide by 1 or more")
            modulus = 1
        return Term(value=self._number_value(value, span), modulus=modulus, span=self.since(start))

    def _operand(self) -> tuple[str | Fraction, Span]:
        if self.at_number:
            return self.number(signed=True)
        token = self.word()
        if token.text not in (*NUMERIC_ATTRIBUTES, *FLAGS, *_TRUTH_VALUES):
            help = suggest_word(token.text, NUMERIC_ATTRIBUTES)
            self.report("unknown-variable", token, f"sites have no attribute '{token.text}'", help)
        return token.text, self.span(token)

    def _number_value(self, value: str | Fraction, span: Span) -> str | int | Bound:
        """A negative number is a bound that counts from the last layer."""
        if isinstance(value, str):
            return value
        if value < 0:
            return self.make_bound(value, span, False)
        return self.require_whole(value, span, "dimensions and counts are whole numbers")
