"""Conditions on the training step: the headers of `after` and `until` blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from policyc.language.bounds import Bound
from policyc.language.diagnostics import Span, span_field


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCondition:
    """`after BOUND`: from that step on. `until BOUND`: up to that step, not including it."""

    kind: Literal["after", "until"]
    bound: Bound
    span: Span = span_field()

    def __str__(self) -> str:
        return f"{self.kind} {self.bound}"

    @property
    def opposite(self) -> StepCondition:
        """The condition that holds exactly where this one does not."""
        kind: Literal["after", "until"] = "until" if self.kind == "after" else "after"
        return StepCondition(kind=kind, bound=self.bound, span=self.span)

    def holds(self, step: int, total: int) -> bool:
        """Whether the condition holds at this step of a training run of `total` steps."""
        reached = 100 * step >= self.bound.value * total if self.bound.percent else step >= self.bound.value
        return reached if self.kind == "after" else not reached


@lru_cache(maxsize=1024)
def representative_steps(conditions: tuple[StepCondition, ...]) -> tuple[tuple[int, int], ...]:
    """Returns one `(step, total)` for each combination of the conditions that can hold together.

    `total` is the length of the training run. The lengths tried are a few round numbers, and those around which a
    boundary given as a step coincides with one given as a percentage.
    """
    steps = {int(c.bound.value) for c in conditions if not c.bound.percent}
    percentages = {c.bound.value for c in conditions if c.bound.percent}
    totals = {10, 100, 10_000, 10_000_000, *(s + offset for s in steps for offset in (0, 1, 2))}
    totals.update(
        int(s * 100 / p) + offset for s in steps for p in percentages if p > 0 for offset in (-1, 0, 1, 2)
    )
    representatives: dict[tuple[bool, ...], tuple[int, int]] = {}
    for total in sorted(t for t in totals if t > 0):
        boundaries = {0, total - 1, *steps, *(math.ceil(p * total / 100) for p in percentages)}
        for step in sorted({b + offset for b in boundaries for offset in (-1, 0, 1)}):
            if 0 <= step < total:
                combination = tuple(c.holds(step, total) for c in conditions)
                representatives.setdefault(combination, (step, total))
    return tuple(representatives.values()) or ((0, 1),)
