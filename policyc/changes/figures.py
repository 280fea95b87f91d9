"""Short names of linears, and figures as text."""

from __future__ import annotations

import re

from policyc.changes.model import DiffData

_TIMES = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_DOT_OUTSIDE_PARENTHESES = re.compile(r"\.(?![^(]*\))")


def short_name(diff: DiffData, linear: int) -> str:
    """As many of the last parts of a name as tell the linear from others of its stack."""
    stack = diff.linears[linear].stack
    names = [name_parts(other.name) for other in diff.linears if other.stack == stack]
    parts = name_parts(diff.linears[linear].name)
    for count in range(1, len(parts)):
        if sum(other[-count:] == parts[-count:] for other in names) == 1:
            return ".".join(parts[-count:])
    return ".".join(parts)


def name_parts(name: str) -> tuple[str, ...]:
    """The parts of a dotted name. `(train.py:8)` is one part, and so is `up (2)`."""
    return tuple(_DOT_OUTSIDE_PARENTHESES.split(name))


def format_seconds(seconds: float) -> str:
    """`3.00 ms`: three significant digits, in the largest unit that the rounded value reaches."""
    size, unit = next((u for u in _TIMES if seconds >= 0.9995 * u[0]), _TIMES[-1])
    return f"{f'{seconds / size:#.3g}'.rstrip('.')} {unit}"


def format_change(fraction: float) -> str:
    """`-27 %`, `+6.3 %`."""
    percent = 100 * fraction
    digits = 0 if abs(percent) >= 10 or not percent else 1
    return f"{percent:+.{digits}f} %"
