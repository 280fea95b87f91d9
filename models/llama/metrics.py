"""The metrics of a run: metrics.jsonl, TensorBoard, Weights & Biases, and what is printed of them.

The metrics of a step are read one step late, so that the device always has its next step before the host waits.
"""

import errno
import json
import math
import os
import platform
import resource
import secrets
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from policyc.models.llama.configs import ConfigError, ModelConfig, RunConfig, import_library, runs_of_seeds
from policyc.models.llama.goodput import Row, TimeAccount, TimeLeft
from policyc.models.llama.model import param_specs
from policyc.models.llama.progress import ProgressLine

# Dense bf16 TFLOP/s of a device, by a part of its name.
PEAKS = {"GB300": 2450, "GB200": 2450, "B300": 2250, "B200": 2250, "H200": 989, "H100": 989, "A100": 312}


def flops_per_token(config: ModelConfig, sequence: int) -> int:
    """Forward and backward: 6 for each weight of a GEMM, and attention's two products, half of which are masked.

    Of the experts, only those of a token count.
    """
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden = config.hidden * (config.experts_per_token if config.experts else 1)
    layer = config.width * (2 * q + 2 * kv + 3 * hidden + config.experts)
    return 6 * (config.layers * layer + config.width * config.vocab) + 6 * config.layers * q * sequence


def peak_tflops(run: RunConfig) -> float | None:
    kind = jax.devices()[0].device_kind
    return run.peak_tflops or next((float(peak) for name, peak in PEAKS.items() if name in kind), None)


def memory_bytes() -> int:
    """The peak memory of the device, or of the process if the device does not report it."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class RunFiles:
    """The files of one run: metrics.jsonl, and the same for TensorBoard and Weights & Biases."""

    def __init__(self, stack: ExitStack, folder: Path, config: ModelConfig, run: RunConfig, start: int):
        lines, self.tokens_at_start = _open_at_step(folder / "metrics.jsonl", start)
        self._lines = stack.enter_context(lines)
        writer = import_library("tensorboardX", "train").SummaryWriter
        # With a queue without a limit: its writes do not wait for a thread that an error may end at any time.
        self._board = writer(str(folder / "tensorboard"), purge_step=start + 1, max_queue=0)
        stack.callback(self._close_board)
        self._wandb = None
        if run.wandb:
            options = {"project": run.wandb, "name": folder.name, "dir": folder, "id": _wandb_id(folder),
                       "resume": "allow", "config": vars(config) | vars(run)}  # fmt: skip
            self._wandb = stack.enter_context(import_library("wandb", "wandb").init(**options))

    def write(self, row: Row) -> None:
        try:
            self._lines.write(_as_json(row) + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._lines.name) from None
        nested = {f"seconds/{name}": value for name, value in row.get("seconds", {}).items()}
        step, others = row["step"], ("step", "time", "seconds")
        numbers = {name: value for name, value in row.items() if name not in others} | nested
        if not self._board.file_writer.event_writer._worker.is_alive():
            # An error of writing ended this thread. Without it, the queue would only grow.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._board.logdir)
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)
        if self._wandb:
            self._wandb.log(numbers, step=step)

    def _close_board(self) -> None:
        try:
            self._board.close()
        except OSError as error:
            # Else the library tries it again when Python exits, with two tracebacks.
            writer = self._board.file_writer.event_writer
            writer._closed = True
            if writer._worker.is_alive():
                writer._worker.stop()
            print(f"warning: {self._board.logdir} is not complete: {error}", file=sys.stderr)


class FaultCheck:
    """Decides, step after step, whether the faults of one seed stop it. `name` begins its messages."""

    def __init__(self, run: RunConfig, name: str) -> None:
        self._run, self._name = run, name
        self._faults = 0  # in a row

    def check(self, step: int, fine: bool, values: Row) -> str | None:
        """What to print about a step, None if it is fine. Raises ConfigError as `--on-fault`, `--max-skips` ask."""
        run, scale = self._run, values["loss_scale"]
        if fine:
            self._faults = 0
            return None
        loss, norm = values["loss"], values["grad_norm"]
        if run.loss_scale and math.isfinite(loss) and scale >= 1 and not math.isfinite(norm):
            overflow = f"{self._name}step {step}: the scaled gradient overflows"
            return f"{overflow}; skipped, and the loss scale is {scale:g} now"
        self._faults += 1
        fault = f"{self._name}step {step}: the loss is {loss}, the gradient norm {norm}"
        if run.on_fault == "stop":
            raise ConfigError(f"{fault}. The weights are those before it; --on-fault skip continues")
        if self._faults >= run.max_skips:
            raise ConfigError(f"{fault}: {self._faults} faulty steps in a row. The weights are those before them; "
                              "lower --learning-rate, or raise --max-skips")  # fmt: skip
        return f"{fault}; skipped, {values['skipped']} in all"


class MetricsLog:
    """Writes the metrics of a run, or of several seeds, each to its folder. Only the first process writes.

    A seed that stops writes no more. The others continue, and the log raises its error at the end.
    """

    def __init__(
        self,
        stack: ExitStack,
        folders: Sequence[Path],
        config: ModelConfig,
        run: RunConfig,
        start: int,
        account: TimeAccount,
    ):
        self._run, self._peak, self._writes = run, peak_tflops(run), jax.process_index() == 0
        self._flops = flops_per_token(config, run.sequence)
        self._tokens = run.batch * run.sequence  # of a step, of one seed
        names = ["" if run.seeds is None else f"seed {one.seed}, " for one in runs_of_seeds(run)]
        self._checks = [FaultCheck(run, name) for name in names]
        self._errors: dict[int, ConfigError] = {}  # of the seeds that stopped
        self._pending: tuple[int, dict[str, jax.Array]] | None = None
        self._stall = 0.0  # seconds since the last line of a step
        self.account = account
        account.resume(folders[0] / "metrics.jsonl", start)
        self._time_left = TimeLeft(account)
        self.progress = ProgressLine(stack, run, start, account, self._writes)
        self._files: list[RunFiles] = []
        if self._writes:
            self._files = [RunFiles(stack, folder, config, run, start) for folder in folders]
        # The padding of each seed so far. Only the first process writes, and needs to know.
        self._padding = [0] * len(self._checks)
        if run.packing == "whole" and self._writes:
            self._padding = [start * self._tokens - files.tokens_at_start for files in self._files]
        self.write_account(start)
        self.restart_clock()

    def record(self, step: int, metrics: dict[str, jax.Array], stall: float) -> None:
        """Takes the metrics of a step that is still running, and writes those of the step before it.

        `stall` is for how many seconds the devices waited for the data of this step. If the step before it is not
        written yet, that was before its result was read, so it is a part of that step's time.
        """
        self._stall += stall
        self.flush()
        self._pending = (step, metrics)

    def flush(self) -> None:
        """Waits for the last step, and writes its metrics."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._write_step(*pending)

    def is_idle(self) -> bool:
        """Have the devices finished the last step?"""
        arrays: Any = () if self._pending is None else self._pending[1].values()
        return all(array.is_ready() for array in arrays)

    def restart_clock(self) -> None:
        """Starts the time of a step now: what happened before is not counted."""
        self._begin, self._compiled = self.account.clock(), self.account.seconds["compile"]

    def raise_errors(self) -> None:
        """Raises if a seed stopped."""
        if self._errors:
            raise ConfigError("\n".join(map(str, self._errors.values())))

    def _write_step(self, step: int, metrics: dict[str, jax.Array]) -> None:
        values = self._split_seeds(jax.device_get(metrics))
        begin, compiled = self._begin, self._compiled
        self.restart_clock()
        compile_seconds = self._compiled - compiled
        seconds = self._begin - begin - compile_seconds
        if not compile_seconds:
            self._time_left.add_step(seconds)
        times = {"step_seconds": seconds, "stall_seconds": self._stall}
        self._stall = 0.0
        times |= {"compile_seconds": compile_seconds} if compile_seconds else {}
        are_fine = [each.pop("fine") for each in values]
        rows = []
        for number, each in enumerate(values):
            padding = each.pop("padding", 0)
            self._padding[number] += padding
            speed = self._speed((self._tokens - padding) / jax.device_count() / seconds)
            rows.append({**self._place(step, number), **each, **times, **speed})
        self._write(rows)
        for number in self._running():
            self._check_seed(number, step, are_fine[number], values[number])

    def _place(self, step: int, number: int) -> Row:
        """Where a line of a seed is: its step, and the number of tokens so far, without padding."""
        return {"step": step, "tokens": step * self._tokens - self._padding[number]}

    def _speed(self, rate: float) -> Row:
        """What follows from the tokens per second and device."""
        tflops = rate * self._flops / 1e12
        speed = {
            "tokens_per_second_per_device": rate,
            "tflops_per_device": tflops,
            "memory_bytes": memory_bytes(),
        }
        return speed | ({"mfu": tflops / self._peak} if self._peak else {})

    def _running(self) -> list[int]:
        """The seeds that have not stopped."""
        return [number for number in range(len(self._checks)) if number not in self._errors]

    def _split_seeds(self, values: dict[str, Any]) -> list[Row]:
        """The numbers of each seed. Without `--seeds` they have no axis of seeds."""
        arrays = {name: np.atleast_1d(value) for name, value in values.items()}
        return [{name: array[i].item() for name, array in arrays.items()} for i in range(len(self._checks))]

    def _check_seed(self, number: int, step: int, fine: bool, values: Row) -> None:
        try:
            message = self._checks[number].check(step, fine, values)
        except ConfigError as error:
            self._errors[number] = error
            if not self._running():
                self.raise_errors()
            message = f"{error}\nthe other seeds continue"
        if message:
            self.progress.print(message)

    def write_validation(self, step: int, losses: dict[str, Any]) -> None:
        """Writes a line without a loss."""
        self._write([self._place(step, i) | each for i, each in enumerate(self._split_seeds(losses))])

    def write_account(self, step: int) -> None:
        """Writes a line on where the time of the run went up to now. A restart continues from it."""
        row = {"time": self.account.wall_clock()} | self.account.as_row()
        row |= {"is_complete": True} if step == self._run.steps else {}
        for number, files in enumerate(self._files):
            files.write(self._place(step, number) | row)

    def _write(self, rows: Sequence[Row]) -> None:
        """Writes a line of metrics for each seed that has not stopped, and prints all of them as one line."""
        if not self._writes:
            return
        for number in self._running():
            self._files[number].write(rows[number] | {"time": self.account.wall_clock()})
        self._print([rows[number] for number in self._running()])

    def _print(self, rows: Sequence[Row]) -> None:
        first, step = rows[0], rows[0]["step"]

        def text(name: str) -> str:
            return f"{name} " + ", ".join(f"{row[name]:.4f}" for row in rows)

        if "loss" not in first:
            names = [name for name in first if name not in ("step", "tokens")]
            self.progress.print(f"step {step}  " + "  ".join(map(text, names)))
            return
        speed = (
            f"MFU {first['mfu']:.1%}"
            if "mfu" in first
            else f"{first['tflops_per_device']:.3g} TFLOP/s/device"
        )
        eta = f"ETA {self._time_left.predict(self._run.steps - step)}"
        rate = f"{first['tokens_per_second_per_device']:.0f} tokens/s/device"
        self.progress.show_step(step, f"{text('loss')}  {eta}  {rate}  {speed}")


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """The number of parameters, and of those that compute a token: of the experts, only the token's."""
    sizes = [(path, math.prod(spec.shape)) for path, spec in jax.tree.leaves_with_path(param_specs(config))]
    of_experts = sum(size for path, size in sizes if "['experts']" in jax.tree_util.keystr(path))
    total = sum(size for _, size in sizes)
    idle = of_experts * (config.experts - config.experts_per_token) // max(config.experts, 1)
    return total, total - idle


def describe_run(name: str, config: ModelConfig, run: RunConfig, data: str) -> Row:
    """The content of run.json, without the policy: what was run, with which settings, on what."""
    versions = {package: version(package) for package in ("jax", "jaxlib", "numpy", "optax")}
    parameters, active_parameters = count_parameters(config)
    return {
        "program": "models/llama/train.py",
        "command": sys.orig_argv,
        "config": name,
        "seed": run.seed,
        "data": data,
        "settings": vars(config) | vars(run),
        "parameters": parameters,
        "active_parameters": active_parameters,
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "host": platform.node(),
        "versions": {"python": platform.python_version(), **versions},
    }


def _wandb_id(folder: Path) -> str:
    """The name under which Weights & Biases knows this run, the same after a restart."""
    path = folder / "wandb_id"
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text().strip()


def _open_at_step(path: Path, start: int) -> tuple[TextIO, int]:
    """Opens a file of metrics at its end, without the lines after step `start`: those steps will run again.

    Also returns the number of tokens up to there.
    """
    kept, damaged, tokens = [], [], 0
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if row["step"] <= start:
                kept.append(line)
                tokens = row.get("tokens", 0)
        except (ValueError, TypeError, KeyError):  # not UTF-8, not JSON, not an object, no step
            damaged.append(number)
    if damaged and damaged != [len(lines)]:  # the last line is torn where a run was killed while it wrote
        aside = path.with_suffix(".damaged.jsonl")
        shutil.copyfile(path, aside)
        print(f"warning: {path}: line {damaged[0]} is damaged ({len(damaged)} in all); a copy is in {aside}, and the "
              "run continues without them", file=sys.stderr)  # fmt: skip
    new = path.with_suffix(".new")
    new.write_bytes(b"".join(kept))
    return new.replace(path).open("a", buffering=1), tokens  # line-buffered


def _as_json(row: dict[str, Any]) -> str:
    """A line of JSON, which has no NaN and no infinity: such a value is null, and `not_finite` has its name."""
    faulty = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
    if faulty:
        row = row | dict.fromkeys(faulty) | {"not_finite": faulty}
    return json.dumps(row, allow_nan=False)
