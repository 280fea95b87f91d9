"""Bounds of a slice of layers or of a phase of training: whole numbers and percentages (`-4`, `82%`)."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from policyc.language.diagnostics import Span, span_field

MAX_DIGITS = 18
"""Maximum number of digits of a number in a policy, and of a layer index in a path. Such a number fits in 64 bits."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A whole number, or a percentage of some length."""

    value: Fraction
    percent: bool = False
    span: Span = span_field()

    def __str__(self) -> str:
        return f"{Decimal(self.value.numerator) / self.value.denominator:f}{'%' if self.percent else ''}"

    def position(self, size: int) -> int:
        """Returns the offset in a sequence of `size` elements. As in Python slices, a negative one is from the end.

        `-15%` is the same offset as `85%`, rounded down, so that `[:85%]` and `[-15%:]` do not overlap.
        """
        if not self.percent:
            return int(self.value)
        share = self.value if self.value >= 0 else 100 + self.value
        return int(size * share // 100)
