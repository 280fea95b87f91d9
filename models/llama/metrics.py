"""What a run tells: a line of JSON for every step, a progress bar, TensorBoard, Weights & Biases.

In: what a step measured, still on the device. Out: numbers, one step late, so that the device always has its next step
before anybody waits for the last. The one trap: after a crash steps are done again; their old lines are removed first.
"""

import json
import resource
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import jax
from llama.configs import BadRun, Model, Run, library
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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
    """Everything that is told about a run. Only the first process tells it."""

    def __init__(self, stack: ExitStack, folder: Path, c: Model, run: Run, start: int) -> None:
        self._run, self._peak, self._main = run, peak_tflops(run), jax.process_index() == 0
        self._flops = flops_per_token(c, run.sequence)
        self._tokens = run.batch * run.sequence / jax.device_count()
        self._pending: tuple[Any, ...] = ()
        self.clock = time.perf_counter()  # when the step at hand began
        if not self._main:
            return
        self._lines = stack.enter_context(_continued(folder / "metrics.jsonl", start))
        writer = library("tensorboardX", "train").SummaryWriter
        self._board = stack.enter_context(writer(str(folder / "tensorboard"), purge_step=start + 1))
        self._wandb = None
        if run.wandb:
            about = {"project": run.wandb, "name": folder.name, "dir": folder, "config": vars(c) | vars(run)}
            self._wandb = stack.enter_context(library("wandb", "wandb").init(**about))
        shown = MofNCompleteColumn(), BarColumn(20), TextColumn("{task.description}"), TimeRemainingColumn()
        self._bar = stack.enter_context(Progress(*shown, disable=not sys.stdout.isatty()))
        self._task = self._bar.add_task("compiling", total=run.steps, completed=start)

    def later(self, *sent: Any) -> None:
        """Takes a step that was just sent to the device, its measurements and its stall; reads the one before it."""
        before, self._pending = self._pending, sent
        if before:
            self._read(*before)

    def _read(self, step: int, measured: dict[str, jax.Array], stall: float) -> None:
        values = {name: value.item() for name, value in jax.device_get(measured).items()}
        before, self.clock = self.clock, time.perf_counter()
        fine, seconds = values.pop("fine"), self.clock - before
        rate = self._tokens / seconds
        tflops = rate * self._flops / 1e12
        speed = {"step_seconds": seconds, "stall_seconds": stall, "tokens_per_second_per_device": rate,
                 "tflops_per_device": tflops, "memory_bytes": memory_bytes()}  # fmt: skip
        mfu = {"mfu": tflops / self._peak} if self._peak else {}
        self.write({"step": step, **values, **speed, **mfu})
        if not fine:
            said = f"step {step}: the loss is {values['loss']}, the gradient norm {values['grad_norm']}"
            if self._run.on_fault == "stop":
                raise BadRun(f"{said}. The weights are those before it; --on-fault skip would go on")
            self.say(f"{said}; skipped, {values['skipped']} in all")

    def write(self, row: dict[str, Any]) -> None:
        if not self._main:
            return
        self._lines.write(json.dumps(row) + "\n")
        step, numbers = row["step"], {k: v for k, v in row.items() if k != "step"}
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)
        if self._wandb:
            self._wandb.log(numbers, step=step)
        if "loss" not in row:
            self.say(f"step {step}  " + "  ".join(f"{k} {v:.4f}" for k, v in numbers.items()))
            return
        speed = f"MFU {row['mfu']:.1%}" if "mfu" in row else f"{row['tflops_per_device']:.3g} TFLOP/s/device"
        text = f"loss {row['loss']:.4f}  {row['tokens_per_second_per_device']:.0f} tokens/s/device  {speed}"
        self._bar.update(self._task, completed=step, description=text)
        if self._bar.disable and (step % self._run.log_every == 0 or step in (1, self._run.steps)):
            self.say(f"step {step}/{self._run.steps}  {text}")

    def say(self, text: str) -> None:
        if self._main:
            self._bar.console.out(text, highlight=False)


def _continued(path: Path, start: int) -> Any:
    """The file of lines, open at its end, without what comes after a step: those steps are done again."""
    kept = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        with suppress(ValueError):  # the run was killed while it wrote this line
            kept += [line] if json.loads(line)["step"] <= start else []
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(kept))
    return fresh.replace(path).open("a", buffering=1)  # a line is written whole, and at once
