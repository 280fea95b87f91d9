"""The output of a run: metrics.jsonl, a progress bar, TensorBoard, Weights & Biases.

The metrics of a step are read one step late, so that the device always has its next step before the host waits.
"""

import json
import math
import resource
import secrets
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import jax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from policyc.models.llama.configs import ConfigError, ModelConfig, RunConfig, import_library

# Dense bf16 TFLOP/s of a device, by a part of its name.
PEAKS = {"GB300": 2450, "GB200": 2450, "B300": 2250, "B200": 2250, "H200": 989, "H100": 989, "A100": 312}


def flops_per_token(config: ModelConfig, sequence: int) -> int:
    """Forward and backward: 6 for each weight of a GEMM, and attention's two products, half of which are masked."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer = config.width * (2 * q + 2 * kv + 3 * config.hidden)
    return 6 * (config.layers * layer + config.width * config.vocab) + 6 * config.layers * q * sequence


def peak_tflops(run: RunConfig) -> float | None:
    kind = jax.devices()[0].device_kind
    return run.peak_tflops or next((float(peak) for name, peak in PEAKS.items() if name in kind), None)


def memory_bytes() -> int:
    """The peak memory of the device, or of the process if the device does not report it."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class MetricsLog:
    """Writes the metrics of a run. Only the first process writes."""

    def __init__(self, stack: ExitStack, folder: Path, config: ModelConfig, run: RunConfig, start: int):
        self._run, self._peak, self._writes = run, peak_tflops(run), jax.process_index() == 0
        self._flops = flops_per_token(config, run.sequence)
        self._tokens = run.batch * run.sequence / jax.device_count()
        self._faults = 0  # in a row
        self._pending: tuple[int, dict[str, jax.Array], float] | None = None
        self.restart_clock()
        if not self._writes:
            return
        self._lines = stack.enter_context(_open_at_step(folder / "metrics.jsonl", start))
        writer = import_library("tensorboardX", "train").SummaryWriter
        self._board = stack.enter_context(writer(str(folder / "tensorboard"), purge_step=start + 1))
        self._wandb = None
        if run.wandb:
            options = {"project": run.wandb, "name": folder.name, "dir": folder, "id": _wandb_id(folder),
                       "resume": "allow", "config": vars(config) | vars(run)}  # fmt: skip
            self._wandb = stack.enter_context(import_library("wandb", "wandb").init(**options))
        columns = MofNCompleteColumn(), BarColumn(20), TextColumn("{task.description}"), TimeRemainingColumn()
        self._bar = stack.enter_context(Progress(*columns, disable=not sys.stdout.isatty()))
        self._task = self._bar.add_task("compiling", total=run.steps, completed=start)

    def record(self, step: int, metrics: dict[str, jax.Array], stall: float) -> None:
        """Takes the metrics of a step that is still running, and writes those of the step before it."""
        self.flush()
        self._pending = (step, metrics, stall)

    def flush(self) -> None:
        """Waits for the last step, and writes its metrics."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._write_step(*pending)

    def restart_clock(self) -> None:
        """Starts the time of a step now: what happened before is not counted."""
        self._clock = time.perf_counter()

    def _write_step(self, step: int, metrics: dict[str, jax.Array], stall: float) -> None:
        values = {name: value.item() for name, value in jax.device_get(metrics).items()}
        begin = self._clock
        self.restart_clock()
        fine, seconds = values.pop("fine"), self._clock - begin
        rate = self._tokens / seconds
        tflops = rate * self._flops / 1e12
        speed = {"step_seconds": seconds, "stall_seconds": stall, "tokens_per_second_per_device": rate,
                 "tflops_per_device": tflops, "memory_bytes": memory_bytes()}  # fmt: skip
        mfu = {"mfu": tflops / self._peak} if self._peak else {}
        self.write({"step": step, **values, **speed, **mfu})
        self._check_fault(step, fine, values)

    def _check_fault(self, step: int, fine: bool, values: dict[str, Any]) -> None:
        """Reports a faulty step. Stops the run as `--on-fault` and `--max-skips` ask."""
        run, scale = self._run, values["loss_scale"]
        if fine:
            self._faults = 0
        elif (
            run.loss_scale
            and math.isfinite(values["loss"])
            and scale >= 1
            and not math.isfinite(values["grad_norm"])
        ):
            self.print(
                f"step {step}: the scaled gradient overflows; skipped, and the loss scale is {scale:g} now"
            )
        else:
            self._faults += 1
            fault = f"step {step}: the loss is {values['loss']}, the gradient norm {values['grad_norm']}"
            if run.on_fault == "stop":
                raise ConfigError(f"{fault}. The weights are those before it; --on-fault skip continues")
            if self._faults >= run.max_skips:
                raise ConfigError(f"{fault}: {self._faults} faulty steps in a row. The weights are those before them; "
                                  "lower --learning-rate, or raise --max-skips")  # fmt: skip
            self.print(f"{fault}; skipped, {values['skipped']} in all")

    def write(self, row: dict[str, Any]) -> None:
        """Writes one line of metrics. A line without a loss is a validation."""
        if not self._writes:
            return
        self._lines.write(_as_json(row) + "\n")
        step, numbers = row["step"], {name: value for name, value in row.items() if name != "step"}
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)
        if self._wandb:
            self._wandb.log(numbers, step=step)
        if "loss" not in row:
            self.print(f"step {step}  " + "  ".join(f"{name} {value:.4f}" for name, value in numbers.items()))
            return
        speed = f"MFU {row['mfu']:.1%}" if "mfu" in row else f"{row['tflops_per_device']:.3g} TFLOP/s/device"
        text = f"loss {row['loss']:.4f}  {row['tokens_per_second_per_device']:.0f} tokens/s/device  {speed}"
        self._bar.update(self._task, completed=step, description=text)
        if self._bar.disable and (step % self._run.log_every == 0 or step in (1, self._run.steps)):
            self.print(f"step {step}/{self._run.steps}  {text}")

    def print(self, text: str) -> None:
        if self._writes:
            self._bar.console.out(text, highlight=False)


def _wandb_id(folder: Path) -> str:
    """The name under which Weights & Biases knows this run, the same after a restart."""
    path = folder / "wandb_id"
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text().strip()


def _open_at_step(path: Path, start: int) -> TextIO:
    """Opens a file of metrics at its end, without the lines after step `start`: those steps will run again."""
    kept, damaged = [], []
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            kept += [line] if json.loads(line)["step"] <= start else []
        except (ValueError, TypeError, KeyError):  # not UTF-8, not JSON, not an object, no step
            damaged.append(number)
    if damaged and damaged != [len(lines)]:  # the last line is torn where a run was killed while it wrote
        aside = path.with_suffix(".damaged.jsonl")
        shutil.copyfile(path, aside)
        print(f"warning: {path}: line {damaged[0]} is damaged ({len(damaged)} in all); a copy is in {aside}, and the "
              "run continues without them", file=sys.stderr)  # fmt: skip
    new = path.with_suffix(".new")
    new.write_bytes(b"".join(kept))
    return new.replace(path).open("a", buffering=1)  # line-buffered


def _as_json(row: dict[str, Any]) -> str:
    """A line of JSON, which has no NaN and no infinity: such a value is null, and `not_finite` has its name."""
    faulty = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
    if faulty:
        row = row | dict.fromkeys(faulty) | {"not_finite": faulty}
    return json.dumps(row, allow_nan=False)
