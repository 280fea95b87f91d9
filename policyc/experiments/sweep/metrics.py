"""Reads the metrics lines of runs, and converts the metrics files of other trainers to them.

A line is a JSON object. A line with `step` and `loss` is a training step; a line without `loss` is a validation.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from policyc.base.files import atomic_write, open_file, parse_json, read_file

Row = dict[str, Any]

_LOSSES = ("loss", "validation_loss", "val_loss", "learning/loss")
_MOST_STEPS = 2**53  # floats represent all integers below it


TRAILING_FRACTION = 0.05  # of a run's steps, at its end
LEAST_TRAILING = 10  # steps: the loss of a single batch is mostly noise


class MetricsReader:
    """Reads a metrics file, and follows it: `update` reads only the lines that were added.

    Attributes:
      losses: the loss of every step so far, in the order in which they were written.
      step: the last step with a loss; 0 before the first.
      last_step: the last step with a line.
      validated: the last step that was validated; None if none was.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._restart(None)
        self.update()

    def _restart(self, identity: int | None) -> None:
        self._identity, self._offset, self._rest = identity, 0, b""
        self.losses: dict[int, float] = {}
        self.step: int = 0
        self.last_step: int = 0
        self.validated: int | None = None

    def update(self) -> None:
        """Reads the new lines. A file that was replaced or shortened, as after a resume, is read from its start."""
        try:
            stream = open_file(self._path)
        except FileNotFoundError:
            self._restart(None)
            return
        with stream:
            self._read(stream)

    def _read(self, stream: BinaryIO) -> None:
        file = os.fstat(stream.fileno())
        if file.st_ino != self._identity or file.st_size < self._offset:
            self._restart(file.st_ino)
        stream.seek(self._offset)
        lines = (self._rest + (data := stream.read())).split(b"\n")
        self._offset += len(data)
        self._rest = lines[-1]  # may be the start of a line that is still being written
        for row in parse_rows(lines):
            step = row["step"]
            self.last_step = max(step, self.last_step)
            if "loss" in row:
                self.losses.pop(step, None)  # a run that was resumed runs some steps again
                self.losses[step] = row["loss"]
                self.step = step
            if "validation_loss" in row or "val_loss" in row:
                self.validated = max(step, self.validated or step)

    def describe_lost_lines(self, planned: int | None) -> str:
        """Describes what the metrics lack if the run has finished; empty if nothing is known to be missing."""
        try:
            about = json.loads(self._path.with_name("run.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            about = None  # not every program writes one
        return describe_lost_lines(self.losses, self.last_step, about, planned)


def parse_rows(lines: Iterable[bytes | str]) -> Iterator[Row]:
    """Yields the rows of metrics lines. Skips other lines, such as one that a killed run did not finish."""
    for line in lines:
        row = _parse_object(line if isinstance(line, str) else line.decode(errors="replace"))
        step = row.get("step")
        if type(step) is not int:  # the usual case
            row["step"] = step = read_integer(step)
        for name in _LOSSES:
            if name in row and type(row[name]) is not float:  # the usual case
                row[name] = loss = _read_loss(row[name])
                step = None if loss is None else step
        if step is not None and abs(step) < _MOST_STEPS:
            yield row


_scan: Callable[[str, int], tuple[Any, int]] = json.scanner.make_scanner(json.JSONDecoder())  # type: ignore[attr-defined]  # typeshed lacks it
"""Parses the JSON at a position of a text, in half of the time of `json.loads`, which looks for spaces first."""


def _parse_object(line: str) -> Row:
    """The JSON object that a line consists of; an empty one for any other line."""
    try:
        value, end = _scan(line, 0)
        if line[end:].strip():
            return {}
    except (ValueError, StopIteration, RecursionError):
        try:
            value = parse_json(line)  # spaces before it
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}


def read_integer(value: object) -> int | None:
    """Reads an integer that may be written as a float, such as a step; None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    is_integer = abs(value) < _MOST_STEPS and int(value) == value  # the first is false for nan and infinity
    return int(value) if is_integer else None


def _read_loss(value: object) -> float | None:
    """The loss in a line; None if it is not a number. JSON has no NaN and no infinity: null stands for both."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def trailing_steps(steps: int) -> int:
    """The number of steps over which the final loss of a run is averaged, in the live table and in the report."""
    return max(LEAST_TRAILING, round(TRAILING_FRACTION * steps))


def describe_divergence(losses: dict[int, float]) -> str:
    """Describes since when the loss of a run is not finite; empty if its last loss is finite."""
    first = None
    for step, loss in reversed(losses.items()):
        if math.isfinite(loss):
            break
        first = step
    return "" if first is None else f"diverged: the loss is not finite from step {first:,} on"


def describe_lost_lines(steps: Collection[int], last: int, about: object, planned: int | None) -> str:
    """Describes what the metrics of a run that has finished lack; empty if nothing is known to be missing.

    `steps` have a loss, and `last` has the last line. `planned` should be the last step. `about` is run.json, whose
    `metrics_every` is the number of steps between two lines.
    """
    if planned is not None and last < planned:
        return f"its metrics end at step {last:,} of {planned:,}"
    every = read_integer(about.get("metrics_every")) if isinstance(about, dict) else None
    lost = last // every - sum(step % every == 0 for step in steps) if every and every > 0 else 0
    return f"its metrics lack {lost:,} steps" if lost > 0 else ""


# ---- other trainers


_MAXTEXT_NAMES = {
    "learning/loss": "loss",
    "learning/grad_norm": "grad_norm",
    "learning/current_learning_rate": "learning_rate",
    "perf/step_time_seconds": "step_seconds",
    "perf/per_device_tokens_per_sec": "tokens_per_second_per_device",
    "perf/per_device_tflops_per_sec": "tflops_per_device",
}


def _read_maxtext(path: Path) -> list[Row]:
    """Reads MaxText's `metrics_file`. Its steps count from 0, ours from 1. Raises ValueError if steps are missing.

    MaxText empties the file when an evaluation begins, so evaluation must be off.
    """
    rows: dict[int, Row] = {}
    for row in parse_rows(read_file(path).split(b"\n")):
        if "learning/loss" in row:  # after a resume, MaxText appends steps that it ran before
            rows[row["step"]] = row
    if sorted(rows) != list(range(len(rows))):
        raise ValueError(f"{path} lacks steps: MaxText empties it when it evaluates; set eval_interval=-1")
    converted, tokens = [], 0
    for step, row in sorted(rows.items()):
        if (weights := read_integer(row.get("learning/total_weights"))) is None:
            raise ValueError(f"{path} has no number learning/total_weights (tokens) for step {step}")
        tokens += weights
        values = {name: row[theirs] for theirs, name in _MAXTEXT_NAMES.items() if theirs in row}
        converted.append({"step": step + 1, "tokens": tokens, **values})
    return converted


_READERS: dict[str, Callable[[Path], list[Row]]] = {"maxtext": _read_maxtext}
"""Readers of other trainers' metrics, by the kind that `--metrics KIND=PATH` names."""


def parse_metrics_source(text: str) -> tuple[str, Path]:
    """Splits KIND=PATH. Raises ValueError if there is no such kind."""
    kind, _, path = text.partition("=")
    if kind not in _READERS or not path:
        raise ValueError(f"'{text}' is not KIND=PATH, for example maxtext={{out}}/maxtext.jsonl; "
                         f"kinds: {', '.join(_READERS)}")  # fmt: skip
    return kind, Path(path)


def convert_metrics(source: str, target: Path) -> None:
    """Writes the metrics of another trainer as our lines, if the trainer has written any. Raises ValueError."""
    kind, path = parse_metrics_source(source)
    if not path.exists():
        return
    rows = _READERS[kind](path)
    with atomic_write(target) as stream:
        stream.write("".join(json.dumps(row) + "\n" for row in rows).encode())
