"""Helpers for messages: escapes, counts with nouns, times, suggestions for misspelled names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_TIMES = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_MAX_NAME_FOR_SUGGESTION = 64  # characters: a longer unknown name gets no suggestion, to save time


def escape_controls(text: str) -> str:
    """Replaces control characters, which a terminal would act on."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c == "\t" else f"\\x{ord(c):02x}" for c in text)


def escape_lines(text: str) -> str:
    """Replaces control characters, except line breaks."""
    return "\n".join(map(escape_controls, text.split("\n")))


def count_noun(number: int, noun: str) -> str:
    """Returns a number and a noun: `1 convolution`, `2 products of int8`."""
    head, of, rest = noun.partition(" of ")
    return f"{number} {head}{'' if number == 1 else 's'}{of}{rest}"


def parse_count(text: str) -> float:
    """Reads a large number: 15T, 300B or 1e12. Raises ValueError."""
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([kmbt]?)", text, re.IGNORECASE)
    try:
        count = float(match[1]) * 1000.0 ** " kmbt".index(match[2].lower() or " ") if match else 0.0
    except ValueError:
        count = 0.0
    if not 1 <= count <= 1e18:
        raise ValueError(f"'{text}' is not a number of tokens: expected one such as 300B, 15T or 1e12")
    return count


def count_others(number: int) -> str:
    """Returns the end of a message that names the first of this many things: `, and 2 more`."""
    return f", and {number - 1} more" if number > 1 else ""


def as_ranges(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Groups ascending numbers into ranges (first, last)."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return tuple(ranges)


def format_ranges(ranges: tuple[tuple[int, int], ...]) -> str:
    """Formats ranges: `0-2,5`."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def format_seconds(seconds: float) -> str:
    """Formats a time with three significant digits, in the largest unit that the rounded value reaches: `3.00 ms`."""
    size, unit = next((u for u in _TIMES if seconds >= 0.9995 * u[0]), _TIMES[-1])
    return f"{f'{seconds / size:#.3g}'.rstrip('.')} {unit}"


def format_change(*fractions: float) -> str:
    """Formats a relative change, or its two bounds, in percent: `-27 %`, `+6.3 %`, `-17 to -25 %`."""
    percents = [100 * fraction for fraction in fractions]
    ends = [f"{percent:+.{0 if abs(percent) >= 10 or not percent else 1}f}" for percent in percents]
    return f"{' to '.join(dict.fromkeys(ends))} %"


def format_ratio(*ratios: float, sign: str = "x") -> str:
    """Formats a ratio, or its two bounds: `1.37x`, `1.23 to 1.37x`."""
    return f"{' to '.join(dict.fromkeys(f'{ratio:.2f}' for ratio in ratios))}{sign}"


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that the writer most likely meant, if one is similar enough."""
    if len(name) > _MAX_NAME_FOR_SUGGESTION:
        return None
    candidates = [k for k in known if abs(len(k) - len(name)) <= max(2, len(name) // 2)]
    by_folded = {k.casefold(): k for k in reversed(candidates)}
    closest = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[closest[0]] if closest else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the help for an unknown name: the closest known name, or all of them if they are at most 12."""
    names = list(known)
    closest = closest_name(name, names)
    if closest is not None:
        return f"did you mean '{closest}'?"
    if 0 < len(names) <= 12:
        return f"known: {', '.join(names)}"
    return ""
