"""Writes metrics to metrics.jsonl, TensorBoard and Weights & Biases, and reads them at a restart."""

import hashlib
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from policyc.models.llama.configs import (
    ConfigError,
    ModelConfig,
    RunConfig,
    import_library,
    name_file,
    parse_json,
    read_file,
)

Row = dict[str, Any]  # one line of metrics


class RunFiles:
    """The metrics of one run: metrics.jsonl, and the same for TensorBoard and Weights & Biases."""

    tokens_at_start: int

    def __init__(self, stack: ExitStack, folder: Path, config: ModelConfig, run: RunConfig, start: int):
        lines, kept, self.tokens_at_start = _open_at_step(folder / "metrics.jsonl", start)
        self._lines = stack.enter_context(lines)
        self._size, self._hash = len(kept), hashlib.sha256(kept)
        self._step = start  # of the last line
        self._mark_before = self._mark()  # the mark before the lines of that step
        self._board = TensorBoardFile(folder / "tensorboard", start)
        stack.callback(self._board.close)
        self._wandb = None
        if run.wandb:
            options = {"project": run.wandb, "name": folder.name, "dir": folder, "id": _wandb_id(folder),
                       "resume": "allow", "config": vars(config) | vars(run)}  # fmt: skip
            self._wandb = stack.enter_context(import_library("wandb", "wandb").init(**options))

    def write(self, row: Row) -> None:
        line = _as_json(row) + "\n"
        with name_file(Path(self._lines.name)):
            self._lines.write(line)
        if row["step"] > self._step:
            self._step, self._mark_before = row["step"], self._mark()
        self._size += len(line)  # ASCII
        self._hash.update(line.encode())
        nested = {name: value for name, value in row.items() if isinstance(value, dict)}
        numbers = {name: value for name, value in row.items() if name not in ("step", "time", *nested)}
        numbers |= {f"{name}/{key}": number for name, each in nested.items() for key, number in each.items()}
        self._board.write(numbers, row["step"])
        if self._wandb:
            self._wandb.log(numbers, step=row["step"])

    def mark(self, step: int) -> Row:
        """The mark of the lines up to a step, the last one or the one before it, once they are on disk."""
        with name_file(Path(self._lines.name)):
            os.fsync(self._lines.fileno())
        return self._mark() if self._step <= step else self._mark_before

    def _mark(self) -> Row:
        return {"bytes": self._size, "sha256": self._hash.hexdigest()}


class TensorBoardFile:
    """Writes the metrics of steps for TensorBoard."""

    def __init__(self, folder: Path, start: int) -> None:
        self._folder, self._library = folder, import_library("tensorboardX", "train")
        with name_file(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = import_library("tensorboardX.event_file_writer", "train").EventsWriter(
                str(folder / "events")
            )
        # Makes TensorBoard discard later steps in earlier files: these steps run again.
        begin = self._library.proto.event_pb2.SessionLog(status=1)
        self._write(start + 1, session_log=begin)

    def write(self, numbers: Row, step: int) -> None:
        """Writes the finite numbers. TensorBoard cannot draw the others."""
        known = {name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}
        for name, value in known.items():
            if math.isfinite(value):
                self._write(step, summary=self._library.summary.scalar(name, value))
        with name_file(self._folder):
            self._writer.flush()

    def _write(self, step: int, **content: Any) -> None:
        event = self._library.proto.event_pb2.Event(wall_time=time.time(), step=step, **content)
        with name_file(self._folder):
            self._writer.write_event(event)

    def close(self) -> None:
        try:
            self._writer.close()
        except OSError as error:
            print(f"warning: {self._folder} is incomplete: {error}", file=sys.stderr)


def _wandb_id(folder: Path) -> str:
    """The id of this run in Weights & Biases, the same after a restart."""
    path = folder / "wandb_id"
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return read_file(path).decode().strip()


def check_metrics(folder: Path, step: int, mark: Row) -> None:
    """Raises ConfigError if metrics lack lines that they had when the checkpoint of a step was written."""
    path = folder / "metrics.jsonl"
    rows = [(line, row) for line, row in read_lines(path) if row and row["step"] <= step]
    kept = b"".join(line for line, _ in rows)
    if hashlib.sha256(kept[: mark["bytes"]]).hexdigest() != mark["sha256"]:
        lost = sorted(set(range(1, step + 1)) - {row["step"] for _, row in rows if "loss" in row})
        change = (
            f"{len(lost)} steps are missing, the first is step {lost[0]}" if lost else "lines have changed"
        )
        raise ConfigError(f"{path} is not what it was at the checkpoint of step {step}: {change}")


def read_lines(path: Path) -> Iterator[tuple[bytes, Row | None]]:
    """The lines of a file of metrics, each also as a row."""
    try:
        lines = read_file(path).splitlines(keepends=True)
    except FileNotFoundError:
        return
    yield from ((line, _parse(line)) for line in lines)


def _open_at_step(path: Path, start: int) -> tuple[TextIO, bytes, int]:
    """Opens a file of metrics for appending. Also returns its content, and the number of tokens up to step `start`.

    Lines after that step, which will run again, and damaged lines are moved to another file.
    """
    kept, removed, damaged, tokens = [], [], [], 0
    number = 0
    for number, (line, row) in enumerate(read_lines(path), start=1):
        if row is None:
            damaged.append(number)
        if row is None or row["step"] > start:
            removed.append(line)
            continue
        kept.append(line)
        tokens = row.get("tokens", 0)
    aside, new = path.with_suffix(".removed.jsonl"), path.with_suffix(".new")
    if damaged and damaged != [number]:  # the last line is torn if a run was killed while writing
        print(
            f"warning: {path}: line {damaged[0]} is damaged ({len(damaged)} in all): moved to {aside}",
            file=sys.stderr,
        )
    if removed:
        with name_file(aside), aside.open("ab") as file:
            file.writelines(line if line.endswith(b"\n") else line + b"\n" for line in removed)
    with name_file(new):
        new.write_bytes(content := b"".join(kept))
        return new.replace(path).open("a", buffering=1), content, tokens  # line-buffered


def copy_metrics(source: Path, folder: Path, step: int) -> None:
    """Copies the metrics up to a step of another run, but not its account of time."""
    rows = read_lines(source / "metrics.jsonl")
    kept = [line for line, row in rows if row and row["step"] <= step and "seconds" not in row]
    with name_file(folder / "metrics.jsonl"):
        (folder / "metrics.jsonl").write_bytes(b"".join(kept))


def _parse(line: bytes) -> Row | None:
    """A line of metrics; None if it is damaged: not UTF-8, not JSON, not an object, or without a step."""
    try:
        row: Row = parse_json(line)
        return row if isinstance(row["step"], int) and row["step"] >= 0 else None
    except (ValueError, TypeError, KeyError):
        return None


def _as_json(row: Row) -> str:
    """A line of JSON. NaN and infinities become null, and `not_finite` lists the names of those at the top level."""
    faulty = [name for name, value in row.items() if _is_not_finite(value)]
    nested = {name: value for name, value in row.items() if isinstance(value, dict)}
    for name, values in nested.items():
        row = row | {name: {key: None if _is_not_finite(value) else value for key, value in values.items()}}
    if faulty:
        row = row | dict.fromkeys(faulty) | {"not_finite": faulty}
    return json.dumps(row, allow_nan=False)


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
