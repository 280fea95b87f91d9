"""Reads values from untrusted files: JSON of killed runs, of other programs, of other people."""

from __future__ import annotations

from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policyc.base.files import open_file, parse_json, read_file
from policyc.base.text import count_noun, escape_controls
from policyc.experiments.sweep.metrics import parse_rows

JsonObject = dict[str, Any]
"""One line of `metrics.jsonl` or `stats.jsonl`, or a part of another JSON file."""

_MAX_NUMBER = 1e100  # larger numbers are not measurements, and their sums would overflow
_MAX_TEXT = 400  # characters of a text from a file


def read_text(path: Path, problems: list[str]) -> str | None:
    """Reads a file; None if it does not exist. A file that cannot be read is added to `problems`."""
    try:
        return read_file(path).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        problems.append(f"{path.name} is not a file")
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
    return None


def read_rows(path: Path, problems: list[str]) -> Iterator[JsonObject]:
    """Reads the rows of a file line by line. In the end, `problems` gets the number of lines that are left out."""
    lines = rows = 0

    def read_lines() -> Iterator[str]:
        nonlocal lines
        with TextIOWrapper(open_file(path), encoding="utf-8", errors="replace", newline="\n") as stream:
            for line in stream:
                lines += line != "\n"
                yield line

    try:
        for row in parse_rows(read_lines()):
            rows += 1
            yield row
        if rows < lines:
            problems.append(f"{count_noun(lines - rows, 'line')} of {path.name} could not be read")
        elif not rows:
            problems.append(f"{path.name} is empty")
    except FileNotFoundError:
        return
    except IsADirectoryError:
        problems.append(f"{path.name} is not a file")
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")


def read_object(path: Path, problems: list[str]) -> JsonObject | None:
    """Reads a JSON object; None if the file does not exist. A file with other content is added to `problems`."""
    text = read_text(path, problems)
    if text is None:
        return None
    try:
        value = parse_json(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        problems.append(f"{path.name} is not a JSON object")
        return None
    return value


def is_count(value: object) -> bool:
    """Whether a value is an integer that a float can hold exactly."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def as_number(value: object) -> float | None:
    """A number that can be plotted, or None. Tiny numbers become 0."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if not -_MAX_NUMBER < value < _MAX_NUMBER:  # also false for nan
        return None
    return float(value) if abs(value) > 1 / _MAX_NUMBER else 0.0


def as_numbers(column: NDArray[np.float64]) -> NDArray[np.float64]:
    """The numbers of a column as by `as_number`; NaN for None."""
    sizes = np.abs(column)
    return np.where(sizes < _MAX_NUMBER, np.where(sizes > 1 / _MAX_NUMBER, column, 0.0), np.nan)


def as_object(value: object) -> JsonObject:
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def as_objects(value: object) -> list[JsonObject]:
    return [item for item in as_list(value) if isinstance(item, dict)]


def as_text(value: object) -> str:
    """A string or a number as text for the page, cut to `_MAX_TEXT`; empty for other values."""
    return str(value)[:_MAX_TEXT] if isinstance(value, str | int | float) else ""


def escape_texts(value: Any) -> Any:
    """Escapes all texts in the data for the charts, as on the rest of the page: none can change the text direction."""
    if isinstance(value, dict):
        return {escape_texts(key): escape_texts(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [escape_texts(item) for item in value]
    return escape_controls(value) if isinstance(value, str) else value
