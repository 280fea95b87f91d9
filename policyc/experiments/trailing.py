"""Over how many steps the loss at the end of a run is averaged: the same in the live table and in the report."""

from __future__ import annotations

TRAILING_FRACTION = 0.05  # of a run's steps, at its end
LEAST_TRAILING = 10  # steps: the loss of a single batch is mostly noise


def trailing_steps(steps: int) -> int:
    """How many of the last steps count, after so many steps."""
    return max(LEAST_TRAILING, round(TRAILING_FRACTION * steps))
