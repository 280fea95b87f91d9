"""Writes metrics to metrics.jsonl, TensorBoard and Weights & Biases."""

import json
import math
import secrets
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import jax

from policyc.models.llama.configs import (
    ModelConfig,
    RunConfig,
    import_library,
    name_file,
    parse_json,
    read_file,
)

Row = dict[str, Any]  # one line of metrics


class RunFiles:
    """The files of one run: metrics.jsonl, and the same for TensorBoard and Weights & Biases."""

    tokens_at_start: int

    def __init__(self, stack: ExitStack, folder: Path, config: ModelConfig, run: RunConfig, start: int):
        lines, self.tokens_at_start = _open_at_step(folder / "metrics.jsonl", start)
        self._lines = stack.enter_context(lines)
        self._board = TensorBoardFile(folder / "tensorboard", start)
        stack.callback(self._board.close)
        self._wandb = None
        if run.wandb:
            options = {"project": run.wandb, "name": folder.name, "dir": folder, "id": _wandb_id(folder),
                       "resume": "allow", "config": vars(config) | vars(run)}  # fmt: skip
            self._wandb = stack.enter_context(import_library("wandb", "wandb").init(**options))

    def write(self, row: Row) -> None:
        with name_file(Path(self._lines.name)):
            self._lines.write(_as_json(row) + "\n")
        nested = {name: value for name, value in row.items() if isinstance(value, dict)}
        numbers = {name: value for name, value in row.items() if name not in ("step", "time", *nested)}
        numbers |= {f"{name}/{key}": number for name, each in nested.items() for key, number in each.items()}
        self._board.write(numbers, row["step"])
        if self._wandb:
            self._wandb.log(numbers, step=row["step"])


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


def _open_at_step(path: Path, start: int) -> tuple[TextIO, int]:
    """Opens a file of metrics for appending. Also returns the number of tokens up to step `start`.

    Lines after that step, which will run again, and damaged lines are moved to another file.
    """
    kept, removed, damaged, tokens = [], [], [], 0
    lines = read_file(path).splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is None:
            damaged.append(number)
        if row is None or row["step"] > start:
            removed.append(line)
            continue
        kept.append(line)
        tokens = row.get("tokens", 0)
    aside, new = path.with_suffix(".removed.jsonl"), path.with_suffix(".new")
    if damaged and damaged != [len(lines)]:  # the last line is torn if a run was killed while writing
        print(
            f"warning: {path}: line {damaged[0]} is damaged ({len(damaged)} in all): moved to {aside}",
            file=sys.stderr,
        )
    if removed:
        with name_file(aside), aside.open("ab") as file:
            file.writelines(line if line.endswith(b"\n") else line + b"\n" for line in removed)
    with name_file(new):
        new.write_bytes(b"".join(kept))
        return new.replace(path).open("a", buffering=1), tokens  # line-buffered


def copy_metrics(checkpoint: Path, folder: Path, step: int, is_one_of_seeds: bool) -> None:
    """Copies the metrics up to a checkpoint of another run, but not its account of time."""
    run = checkpoint.resolve().parents[1]
    path = (run.parent / folder.name if is_one_of_seeds else run) / "metrics.jsonl"
    if jax.process_index() == 0 and path.exists():
        rows = [(line, _parse(line)) for line in read_file(path).splitlines(keepends=True)]
        kept = [line for line, row in rows if row and row["step"] <= step and "seconds" not in row]
        with name_file(folder / "metrics.jsonl"):
            (folder / "metrics.jsonl").write_bytes(b"".join(kept))


def _parse(line: bytes) -> Row | None:
    """A line of metrics; None if it is damaged: not UTF-8, not JSON, not an object, or without a step."""
    try:
        row: Row = parse_json(line)
        return row if row["step"] >= 0 else None
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
