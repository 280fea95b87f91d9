"""Builds what all nodes share from lark's trees: spans and numbers.

When a piece of a file is parsed alone, `offset` is the start of the piece in the file.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from lark import Tree

from policyc.language.bounds import MAX_DIGITS, Bound
from policyc.language.diagnostics import Diagnostic, SourceText, Span


class NodeBuilder:
    """Builds nodes from trees. Collects diagnostics instead of raising them."""

    def __init__(self, source: SourceText) -> None:
        self.source = source
        self.offset = 0
        self.diagnostics: list[Diagnostic] = []

    def span(self, node: Any) -> Span:
        """Returns the span of a tree or a token."""
        first = last = node
        while isinstance(first, Tree):
            first = first.children[0]
        while isinstance(last, Tree):
            last = last.children[-1] or last.children[-2]  # an optional part that is absent is None
        return Span(self.source, self.offset + first.start_pos, self.offset + last.end_pos)

    def _report(self, code: str, place: Any, message: str, help: str = "") -> None:
        """`place` is a span, a tree or a token."""
        span = place if isinstance(place, Span) else self.span(place)
        self.diagnostics.append(Diagnostic(code=code, message=message, span=span, help=help))

    def _bound(self, token: Any, sign: Any = None) -> Bound:
        """Builds a number or a percentage. `sign` is the `%` after it, if that is a token of its own."""
        text = token.replace("_", "").rstrip("%")
        percent = sign is not None or token.endswith("%")
        if "e" in text.lower():
            self._report(
                "number-out-of-range", token, "a percentage with an exponent", "write it in full: 15%"
            )
            text = "0"
        if len(text) > MAX_DIGITS:
            self._report(
                "number-out-of-range", token, "this number is too long", f"{MAX_DIGITS} digits at most"
            )
            text = "0"
        value = Fraction(text)
        if percent and abs(value) > 100:
            self._report("number-out-of-range", token, "more than 100%", "percentages go up to 100%")
        if not percent and value.denominator != 1:
            self._report(
                "number-out-of-range",
                token,
                "not a whole number",
                f"write a whole number, or a percentage: {_as_percentage(value)}",
            )
        return Bound(
            value, percent, self.span(token) if sign is None else self.span(token).to(self.span(sign))
        )

    def _integer(self, token: Any) -> int:
        text = token.replace("_", "").lower()
        mantissa, _, exponent = text.partition("e")
        is_too_large = len(mantissa) > MAX_DIGITS or len(exponent) > 2 or int(exponent or 0) > MAX_DIGITS
        value = Fraction(0) if is_too_large else Fraction(mantissa) * 10 ** int(exponent or 0)
        if is_too_large or value >= 10**MAX_DIGITS:  # it would print as a number that the parser rejects
            help = f"{MAX_DIGITS} digits at most"
            self._report("number-out-of-range", token, "this number is too large", help)
            return 0
        if value.denominator != 1:
            self._report(
                "number-out-of-range", token, "not a whole number", "dimensions and counts are whole"
            )
        return int(value)


def _as_percentage(value: Fraction) -> str:
    """Returns the percentage that a number stands for. A number below 1 is a fraction: 0.82 is 82%."""
    return str(Bound(value * 100 if abs(value) < 1 else value, True))
