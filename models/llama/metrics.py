"""What a run tells: a line of JSON for every step, a progress bar, TensorBoard, Weights & Biases.

In: what a step measured, still on the device. Out: numbers, one step late, so that the device always has its next
step before anybody waits for the last. The one trap: a run that goes on after a crash repeats steps; their old
lines are removed first.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import jax
from llama.configs import BadRun, Model, Run

# Dense bf16 TFLOP/s of a device, by a part of its name.
PEAKS = {"GB300": 2450, "GB200": 2450, "B300": 2250, "B200": 2250, "H200": 989, "H100": 989, "A100": 312}


def flops_per_token(c: Model, sequence: int) -> int:
    """Forward and backward: 6 for each weight of a GEMM, and attention's two products, half of them masked."""
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    layer = c.width * (2 * q + 2 * kv + 3 * c.hidden)
    return 6 * (c.layers * layer + c.width * c.vocab) + 6 * c.layers * q * sequence


def peak_tflops(run: Run) -> float | None:
    kind = jax.devices()[0].device_kind
    return run.peak_tflops or next((float(v) for k, v in PEAKS.items() if k in kind), None)


def memory_bytes() -> int:
    """The most that was in use: on the device, or of the process where the device does not say."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Log:
    """Everything that is told about a run."""

    def __init__(self, folder: Path, c: Model, run: Run, start: int) -> None:
        self._run, self._peak, self._main = run, peak_tflops(run), jax.process_index() == 0
        self._tokens = run.batch * run.sequence / jax.device_count()
        self._flops = flops_per_token(c, run.sequence)
        self._pending: tuple[int, dict[str, jax.Array], float] | None = None
        self._ready = time.perf_counter()
        self.last: dict[str, Any] = {}
        if self._main:
            self._lines = _continued(folder / "metrics.jsonl", start)
            self._board = _board(folder / "tensorboard")
            self._bar = _bar(run, start)
            self._wandb = _wandb(run, folder)

    def later(self, step: int, measured: dict[str, jax.Array], stall: float) -> None:
        """A step that was just sent to the device. The one before it is read."""
        before, self._pending = self._pending, (step, measured, stall)
        if before is not None:
            self._read(*before)

    def flush(self) -> None:
        """Reads what is left; waits for it."""
        if self._pending is not None:
            self._read(*self._pending)
            self._pending = None

    def restart_clock(self) -> None:
        """What lies between two steps and is no training (a checkpoint, a validation) is nobody's step time."""
        self._ready = time.perf_counter()

    def _read(self, step: int, measured: dict[str, jax.Array], stall: float) -> None:
        values = {name: value.item() for name, value in jax.device_get(measured).items()}
        now = time.perf_counter()
        seconds, self._ready = now - self._ready, now
        fine = values.pop("fine")
        rate = self._tokens / seconds
        tflops = rate * self._flops / 1e12
        row = {"step": step, **values, "step_seconds": seconds, "stall_seconds": stall,
               "tokens_per_second_per_device": rate, "tflops_per_device": tflops,
               "mfu": tflops / self._peak if self._peak else None, "memory_bytes": memory_bytes()}  # fmt: skip
        self.write(row)
        self.last = row
        if not fine:
            said = f"step {step}: the loss is {values['loss']}, the gradient norm {values['grad_norm']}"
            if self._run.on_fault == "stop":
                raise BadRun(
                    f"{said}. The weights are those before it; --on-fault skip goes on after such steps"
                )
            if self._main:
                self._say(f"{said}; skipped, {values['skipped']} in all")

    def write(self, row: dict[str, Any]) -> None:
        if not self._main:
            return
        self._lines.write(json.dumps({k: v for k, v in row.items() if v is not None}) + "\n")
        self._lines.flush()
        numbers = {k: v for k, v in row.items() if k != "step" and isinstance(v, int | float)}
        if self._board is not None:
            self._board(row["step"], numbers)
        if self._wandb is not None:
            self._wandb.log(numbers, step=row["step"])
        if self._bar is not None:
            self._bar(row)
        elif "validation_loss" in row:
            self._say(f"step {row['step']}  " + "  ".join(f"{k} {v:.4f}" for k, v in numbers.items()))
        elif "loss" in row and (
            row["step"] % self._run.log_every == 0 or row["step"] in (1, self._run.steps)
        ):
            self._say(
                f"step {row['step']}/{self._run.steps}  loss {row['loss']:.4f}  grad {row['grad_norm']:.3f}  "
                f"{row['tokens_per_second_per_device']:.0f} tokens/s/device  "
                f"{row['tflops_per_device']:.3g} TFLOP/s/device"
                + (f"  MFU {row['mfu']:.1%}" if row["mfu"] else "")
            )

    def _say(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        if self._main:
            self._lines.close()
            for part in (self._board, self._bar):
                if part is not None:
                    part.close()
            if self._wandb is not None:
                self._wandb.finish()


def _continued(path: Path, start: int) -> Any:
    """The file of lines, open at its end, without what comes after a step: those steps are done again."""
    if path.exists():
        kept = []
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the run was killed while it wrote this line
            if row["step"] <= start:
                kept.append(line + "\n")
        fresh = path.with_suffix(".new")
        fresh.write_text("".join(kept))
        os.replace(fresh, path)
    return path.open("a")


class _Board:
    """TensorBoard's files, through its own writer."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._writer = (
            event_pb2.Event,
            summary_pb2.Summary,
            EventFileWriter(str(folder)),
        )

    def __call__(self, step: int, numbers: dict[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._writer.add_event(
            self._event(step=step, wall_time=time.time(), summary=self._summary(value=values))
        )

    def close(self) -> None:
        self._writer.close()


def _board(folder: Path) -> _Board | None:
    try:
        return _Board(folder)
    except ImportError:
        return None


class _Bar:
    """A progress bar with the last numbers beside it."""

    def __init__(self, run: Run, start: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
        )  # fmt: skip
        self._task = self._progress.add_task("train", total=run.steps, completed=start, text="compiling")
        self._progress.start()

    def __call__(self, row: dict[str, Any]) -> None:
        if "loss" in row:
            mfu = f"  MFU {row['mfu']:.1%}" if row["mfu"] else ""
            text = f"loss {row['loss']:.4f}  {row['tokens_per_second_per_device']:.0f} tokens/s/device{mfu}"
            self._progress.update(self._task, completed=row["step"], text=text)
        else:
            numbers = "  ".join(f"{k} {v:.4f}" for k, v in row.items() if isinstance(v, float))
            self._progress.console.print(f"step {row['step']}  {numbers}")

    def close(self) -> None:
        self._progress.stop()


def _bar(run: Run, start: int) -> _Bar | None:
    if not sys.stdout.isatty():
        return None
    try:
        return _Bar(run, start)
    except ImportError:
        return None


def _wandb(run: Run, folder: Path) -> Any:
    if run.wandb is None:
        return None
    try:
        import wandb
    except ImportError:
        raise BadRun("--wandb needs the package wandb: pip install wandb") from None
    return wandb.init(project=run.wandb, dir=str(folder), name=folder.name, resume="allow")
