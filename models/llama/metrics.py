"""The metrics of a run: computes, writes and prints them, and stops the run at a fault.

The metrics of a step are read one step late, so that the device always has its next step before the host waits.
"""

import faulthandler
import math
import os
import platform
import resource
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from policyc.models.llama.configs import ConfigError, ModelConfig, RunConfig, runs_of_seeds
from policyc.models.llama.goodput import TimeAccount
from policyc.models.llama.model import param_specs
from policyc.models.llama.preemption import PREEMPTED
from policyc.models.llama.progress import ProgressLines
from policyc.models.llama.run_files import Row, RunFiles

INTERNAL = ("is_fine", "faults", "mean_loss", "padding")  # values of a step that are not in its line
# Dense bf16 TFLOP/s of a device, by a part of its name.
PEAKS = {"GB300": 2450, "GB200": 2450, "B300": 2250, "B200": 2250, "H200": 989, "H100": 989, "A100": 312}


def flops_per_token(config: ModelConfig, sequence: int) -> int:
    """FLOPs of forward and backward: 6 per weight of a GEMM, plus attention's two products, half of which are masked.

    Only the experts that a token is routed to count.
    """
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden = config.hidden * (config.experts_per_token if config.experts else 1)
    layer = config.width * (2 * q + 2 * kv + 3 * hidden + config.experts)
    return 6 * (config.layers * layer + config.width * config.vocab) + 6 * config.layers * q * sequence


def peak_tflops() -> float | None:
    kind = jax.devices()[0].device_kind
    return next((float(peak) for name, peak in PEAKS.items() if name in kind), None)


def memory_bytes() -> int:
    """The peak memory of the device, or of the process if the device does not report it."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class FaultError(ConfigError):
    """A faulty step stops the run. The devices have kept the state before it."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


def check_step(step: int, values: Row, run: RunConfig) -> str | None:
    """The message about a faulty step, or None. Raises FaultError if `--on-fault` or `--max-skips` ends the run."""
    if values["is_fine"]:
        return None
    loss, norm, mean, faults = (values[name] for name in ("loss", "grad_norm", "mean_loss", "faults"))
    if not faults:
        scale = values["loss_scale"]
        return f"step {step}: the scaled gradient overflowed; skipped, and the loss scale is now {scale:g}"
    fault = f"step {step}: the loss is {loss}, the gradient norm {norm}"
    if math.isfinite(loss) and math.isfinite(norm):
        is_spike = run.spike and loss > mean + run.spike
        spike = f"the loss {loss:.4f} is more than {run.spike:g} (--spike) above its mean {mean:.4f}"
        fault = f"step {step}: {spike if is_spike else 'stopped by an earlier fault'}"
    if run.on_fault == "stop":
        raise FaultError(f"{fault}; --on-fault skip continues without this step", step)
    if faults >= run.max_skips:
        remedy = "lower --learning-rate, or raise --max-skips"
        raise FaultError(f"{fault}: {faults} faulty steps in a row; {remedy}", step)
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
        self._run, self._peak, self._writes = run, peak_tflops(), jax.process_index() == 0
        self._flops = flops_per_token(config, run.sequence)
        self._tokens = run.batch * run.sequence  # per step and seed
        self._names = ["" if run.seeds is None else f"seed {one.seed}, " for one in runs_of_seeds(run)]
        self._errors: dict[int, FaultError] = {}  # of the seeds that stopped
        self._pending: tuple[int, dict[str, Any]] | None = None
        self._stall = 0.0  # seconds since the last line of a step
        self._since_line = (0, 0.0)  # tokens and seconds
        self.account = account
        self.progress: ProgressLines = ProgressLines(run, account, self._writes)
        account.switch("start")
        seconds = [account.seconds[name] for name in ("start", "compile")]
        self.progress.print(f"started in {sum(seconds):.1f} s, {seconds[1]:.1f} s of it compiling")
        account.resume(folders[0] / "metrics.jsonl", start)
        self._first: tuple[int, float] | None = None  # the first step of this process, and when it ended
        self._files: list[RunFiles] = []
        if self._writes:
            self._files = [RunFiles(stack, folder, config, run, start) for folder in folders]
        # The padding of each seed so far. Only the first process, which writes, needs it.
        self._padding = [0] * len(self._names)
        if run.packing == "whole" and self._writes:
            self._padding = [start * self._tokens - files.tokens_at_start for files in self._files]
        self.write_account(start)
        self.restart_clock()

    def record(self, step: int, metrics: dict[str, Any], stall: float) -> None:
        """Takes the metrics of a step that is still running, and writes those of the step before it.

        `stall` is how many seconds the devices waited for the data of this step. If the step before it is not written
        yet, they waited before its result was read, so the wait is part of that step's time.
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
        """Whether the devices have finished the last step."""
        arrays: Any = () if self._pending is None else jax.tree.leaves(self._pending[1])
        return all(array.is_ready() for array in arrays)

    def restart_clock(self) -> None:
        """Starts the clock of a step now. Earlier time is not counted."""
        self._begin, self._compiled = self.account.clock(), self.account.seconds["compile"]

    def raise_errors(self) -> None:
        """Raises FaultError if a seed has stopped."""
        if self._errors:
            raise FaultError("\n".join(map(str, self._errors.values())), list(self._errors.values())[-1].step)

    def _write_step(self, step: int, metrics: dict[str, Any]) -> None:
        with limit_step(step, self._run.step_timeout):
            arrays = jax.device_get(metrics)
        norms = arrays.pop("norms", None)
        values = self._split_seeds(arrays)
        begin, compiled = self._begin, self._compiled
        self.restart_clock()
        compile_seconds = self._compiled - compiled
        seconds = self._begin - begin - compile_seconds
        times = {"step_seconds": seconds, "stall_seconds": self._stall}
        self._stall = 0.0
        times |= {"compile_seconds": compile_seconds} if compile_seconds else {}
        rows = []
        for number, each in enumerate(values):
            tokens = self._tokens - each.get("padding", 0)
            self._padding[number] += each.get("padding", 0)
            if number == 0:
                self._since_line = (self._since_line[0] + tokens, self._since_line[1] + seconds)
            public = {name: value for name, value in each.items() if name not in INTERNAL}
            if norms is not None and step % self._run.norms_every == 0:
                public |= name_norms(
                    norms if self._run.seeds is None else jax.tree.map(itemgetter(number), norms)
                )
            rows.append({**self._counters(step, number), **public, **times, **self._speed(tokens, seconds)})
        self._write(rows)
        for number in self._running():
            self._check_seed(number, step, values[number])

    def _counters(self, step: int, number: int) -> Row:
        """The counters of a line: the step, and the tokens of a seed so far, without padding."""
        return {"step": step, "tokens": step * self._tokens - self._padding[number]}

    def _speed(self, tokens: int, seconds: float) -> Row:
        """Tokens per second, TFLOP/s and MFU per device, and the peak memory. No MFU if the device is unknown."""
        rate = (
            tokens / jax.device_count() / max(seconds, 1e-9)
        )  # the device may have finished while the host compiled
        tflops = rate * self._flops / 1e12
        speed = {
            "tokens_per_second_per_device": rate,
            "tflops_per_device": tflops,
            "memory_bytes": memory_bytes(),
        }
        return speed | ({"mfu": tflops / self._peak} if self._peak else {})

    def _running(self) -> list[int]:
        """The seeds that have not stopped."""
        return [number for number in range(len(self._names)) if number not in self._errors]

    def _split_seeds(self, values: dict[str, Any]) -> list[Row]:
        """The numbers of each seed. Without `--seeds` they have no axis of seeds."""
        arrays = {name: np.atleast_1d(value) for name, value in values.items()}
        return [{name: array[i].item() for name, array in arrays.items()} for i in range(len(self._names))]

    def _check_seed(self, number: int, step: int, values: Row) -> None:
        name = self._names[number]
        try:
            message = check_step(step, values, self._run)
        except FaultError as error:
            self._errors[number] = FaultError(f"{name}{error}", step)
            if not self._running():
                self.raise_errors()
            message = f"{error}\nthe other seeds continue"
        if message:
            self.progress.print(f"{name}{message}")

    def write_validation(self, step: int, losses: dict[str, Any]) -> None:
        """Writes a line of validation losses. It has no training loss."""
        self._write([self._counters(step, i) | each for i, each in enumerate(self._split_seeds(losses))])

    def marks(self, step: int) -> list[Row]:
        """The marks of the metrics up to a step, for its checkpoint: one per seed, none if another process writes."""
        return [files.mark(step) for files in self._files]

    def write_account(self, step: int) -> None:
        """Writes a line with the account of time so far. A restart continues from it."""
        row = {"time": self.account.wall_clock()} | self.account.as_row()
        row |= {"is_complete": True} if step == self._run.steps else {}
        for number, files in enumerate(self._files):
            files.write(self._counters(step, number) | row)

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
        # The mean since the last line: the time of a single step depends on what the host happens to wait for.
        mean = self._speed(*self._since_line)
        if self.progress.has_line(step):
            self._since_line = (0, 0.0)
        speed = (
            f"MFU {mean['mfu']:.1%}" if "mfu" in mean else f"{mean['tflops_per_device']:.3g} TFLOP/s/device"
        )
        eta = f"ETA {self._time_left(step)}"
        rate = f"{mean['tokens_per_second_per_device']:.0f} tokens/s/device"
        self.progress.show_step(step, f"{text('loss')}  {eta}  {rate}  {speed}")

    def _time_left(self, step: int) -> str:
        """The estimated time of the remaining steps: the mean of a step and its pauses, without compilation."""
        now = self.account.clock() - self.account.seconds["compile"]
        if self._first is None:
            self._first = step, now
            return "-:--:--"
        mean = (now - self._first[1]) / (step - self._first[0])
        return str(timedelta(seconds=round((self._run.steps - step) * mean)))


@contextmanager
def limit_step(step: int, seconds: float) -> Iterator[None]:
    """Ends the process if the result of a step takes longer than `seconds`; 0: never."""

    def end() -> None:
        print(f"step {step} has not finished after {seconds:g} s (--step-timeout), so this process ends: the same "
              "command resumes from the last checkpoint", file=sys.stderr)  # fmt: skip
        faulthandler.dump_traceback(all_threads=True)
        os._exit(PREEMPTED)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    if seconds:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def name_norms(norms: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Norms of parameters and gradients by parameter path, one per layer."""
    named: dict[str, dict[str, float]] = {}
    for kind, tree in norms.items():
        named[kind] = {}
        for path, value in jax.tree.leaves_with_path(tree):
            names = [str(getattr(entry, "key", getattr(entry, "idx", ""))) for entry in path]
            if np.ndim(value):  # layers are stacked
                named[kind] |= {
                    ".".join(["layers", str(i), *names[1:]]): float(v) for i, v in enumerate(value)
                }
            else:
                named[kind][".".join(names)] = float(value)
    return named


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """The number of parameters, and of those active for one token."""
    sizes = [(path, math.prod(spec.shape)) for path, spec in jax.tree.leaves_with_path(param_specs(config))]
    of_experts = sum(size for path, size in sizes if "['experts']" in jax.tree_util.keystr(path))
    total = sum(size for _, size in sizes)
    idle = of_experts * (config.experts - config.experts_per_token) // max(config.experts, 1)
    return total, total - idle


def describe_run(name: str, config: ModelConfig, run: RunConfig, data: str) -> Row:
    """The content of run.json, without the policy: the program, its settings and the machine."""
    versions = {package: version(package) for package in ("jax", "jaxlib", "numpy", "optax")}
    parameters, active_parameters = count_parameters(config)
    return {
        "program": "models/llama/train.py",
        "command": sys.orig_argv,
        "config": name,
        "seed": run.seed,
        "data": data,
        "metrics_every": 1,
        "settings": vars(config) | vars(run),
        "parameters": parameters,
        "active_parameters": active_parameters,
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "host": platform.node(),
        "versions": {"python": platform.python_version(), **versions},
    }
