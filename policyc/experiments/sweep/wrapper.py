"""Executes one run of a sweep: `python -m policyc.experiments.sweep.wrapper FOLDER [RANK]`.

Starts the command of `launch.json`, writes its output to `log.txt`, and writes `status.json` when the state changes. On
SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGUSR2, or if there is a file `stop` in the folder, it sends the program SIGTERM.
The program can then save a checkpoint, and is killed after a grace period. If this process is killed, so is the program
(on Linux), so that no program is left that nobody can stop.

In a job with several processes, those with a RANK above 0 write `log.RANK.txt` and no status. The exit code is 0 if the
run finished or was stopped: Slurm ends the other processes of a job when one ends with an error.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TextIO

from policyc.experiments.sweep.liveness import FolderBusy, hold_lock
from policyc.experiments.sweep.metrics import MetricsReader, convert_metrics, describe_divergence
from policyc.experiments.sweep.run import (
    LOG_FILE,
    METRICS_FILE,
    STOP_FILE,
    Run,
    RunEnd,
    RunStatus,
    tail_lines,
)

GRACE_VARIABLE = "POLICYC_STOP_GRACE"
"""Environment variable: how many seconds a stopped program may take to save before it is killed."""

EXIT_PREEMPTED = 75
"""EX_TEMPFAIL: the program received a scheduler's signal, and saved."""

DEFAULT_GRACE = 60  # seconds: a step and a checkpoint of a small model
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_POLL_SECONDS = 0.1
_CONVERT_SECONDS = 5.0  # between two conversions of another trainer's metrics
_EXIT_BUSY = 75  # EX_TEMPFAIL: another process runs this run
_GOOD_EXITS = (0, EXIT_PREEMPTED, 130)  # 130: the bundled trainer saved on SIGINT
_LAST_WORDS_SECONDS = 30  # for the first process to notice and report a failed one before Slurm ends it
_LOG_LINES = 40  # lines that are searched for the reason of a failure
_DIAGNOSTIC = ": error["
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory", "MemoryError", "OUT_OF_MEMORY")


def main() -> int:
    if len(sys.argv) not in (2, 3):
        sys.stderr.write("usage: python -m policyc.experiments.sweep.wrapper FOLDER [RANK]\n")
        return 2
    folder = Path(sys.argv[1]).absolute()
    run = Run.read(folder)
    statuses = [RunStatus.read(folder) for folder in run.folders]
    has_finished = all(status is not None and status.state == "finished" for status in statuses)
    if has_finished and not any(describe_lost_metrics(folder, run) for folder in run.folders):
        return 0  # Slurm restarts a job whose node failed
    if len(sys.argv) == 3 and int(sys.argv[2]) > 0:
        return _Wrapper(run).run_rank(int(sys.argv[2]))
    try:
        with hold_lock(folder, "run", lambda text: sys.stderr.write(f"warning: {text}\n")) as lock:
            return _Wrapper(run).run(lock)
    except FolderBusy as error:
        sys.stderr.write(f"{error}\n")
        return _EXIT_BUSY


class _Wrapper:
    """One attempt of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._signal: int | None = None  # the signal that asked this process to stop
        self._deadline = math.inf  # when the program is killed
        self._metrics_fault = ""  # why the metrics of another trainer could not be converted the last time
        self._log_start = 0  # bytes of the log that are from earlier attempts
        self._grace = read_grace({**os.environ, **run.environment})
        for number in _STOP_SIGNALS:
            signal.signal(number, self._note_signal)

    def run(self, lock: int) -> int:
        """Runs the program to its end. Returns 0 unless it failed. The program inherits the lock."""
        begin, status = time.monotonic(), self._first_status()
        for folder in self._run.folders:
            status.write(folder)
        with (self._run.folder / LOG_FILE).open("a", encoding="utf-8") as log:
            if status.attempt > 1:
                log.write(f"--- attempt {status.attempt}, {status.started}\n")
                log.flush()
            self._log_start = log.tell()
            code = self._run_program(log, (lock,))
        seconds = status.seconds + time.monotonic() - begin
        status = replace(status, exit=code, ended=_now(), seconds=seconds)
        ends = self._judge(code)
        for folder, end in zip(self._run.folders, ends, strict=True):
            replace(status, **asdict(end)).write(folder)
        return int(any(end.state == "failed" for end in ends))

    def run_rank(self, rank: int) -> int:
        """Runs a process with a rank above 0 to its end. Returns 0 unless it failed."""
        with (self._run.folder / f"log.{rank}.txt").open("a", encoding="utf-8") as log:
            code = self._run_program(log)
        if code in _GOOD_EXITS:
            return 0
        time.sleep(_LAST_WORDS_SECONDS)
        return 1

    def _first_status(self) -> RunStatus:
        """The status of a run that starts. It includes the number and the time of earlier attempts."""
        earlier = RunStatus.read(self._run.folder)
        return RunStatus(
            state="running",
            started=_now(),
            command=self._run.command,
            host=socket.gethostname(),
            pid=os.getpid(),
            seconds=earlier.seconds if earlier else 0.0,
            attempt=earlier.attempt + 1 if earlier else 1,
        )

    def _note_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signal = self._signal or number

    def _run_program(self, log: TextIO, descriptors: Sequence[int] = ()) -> int:
        """Runs the program, converts its metrics meanwhile, and stops it on request. Returns its exit code."""
        environment = {**os.environ, **self._run.environment}
        try:
            process = subprocess.Popen(
                self._run.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=environment, cwd=self._run.cwd, start_new_session=True, pass_fds=descriptors,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # safe without threads
            )  # fmt: skip
        except OSError as error:
            log.write(f"cannot start {self._run.command[0]}: {error}\n")
            return 127
        next_conversion = 0.0
        try:
            while process.poll() is None:
                if self._signal is None and (self._run.folder / STOP_FILE).exists():
                    self._signal = signal.SIGTERM
                if self._signal is not None:
                    self._stop(process)
                if time.monotonic() >= next_conversion:
                    self._convert_metrics()
                    next_conversion = time.monotonic() + _CONVERT_SECONDS
                time.sleep(_POLL_SECONDS)
        finally:
            with suppress(ProcessLookupError):  # what the program left running, such as data loaders
                os.killpg(process.pid, signal.SIGKILL)
        self._convert_metrics()
        return process.returncode

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        """Sends SIGTERM to the program once, and kills it when the grace period is over."""
        with suppress(ProcessLookupError):
            if self._deadline == math.inf:
                self._deadline = time.monotonic() + self._grace
                os.killpg(process.pid, signal.SIGTERM)
            elif time.monotonic() > self._deadline:
                os.killpg(process.pid, signal.SIGKILL)

    def _convert_metrics(self) -> None:
        if self._run.metrics_source is None:
            return
        self._metrics_fault = ""
        try:
            convert_metrics(self._run.metrics_source, self._run.folder / METRICS_FILE)
        except (OSError, ValueError) as error:
            self._metrics_fault = str(error)

    def _judge(self, code: int) -> list[RunEnd]:
        """How each seed ended."""
        if code == 0 and self._metrics_fault:
            return [RunEnd(state="failed", reason=self._metrics_fault)]  # such a program has one seed
        return judge_seeds(self._run, code, self._signal, self._log_start)


_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Makes Linux kill the program when this process ends. Called in the child before the program starts."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def read_grace(environment: Mapping[str, str]) -> float:
    """How many seconds a stopped program may take to save. Raises ValueError."""
    text = environment.get(GRACE_VARIABLE, str(DEFAULT_GRACE))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{GRACE_VARIABLE} is '{text}': expected a number of seconds")
    return seconds


def judge_seeds(run: Run, code: int, stop_signal: int | None, log_start: int = 0) -> list[RunEnd]:
    """How each seed of a run ended. If one diverged, that explains the exit code, which then counts as 0 for all."""
    ends = [judge_end(folder, run, code, stop_signal, log_start) for folder in run.folders]
    if not any(end.diverged for end in ends):
        return ends
    return [judge_end(folder, run, 0, stop_signal, log_start) for folder in run.folders]


def judge_end(folder: Path, run: Run, code: int, stop_signal: int | None, log_start: int = 0) -> RunEnd:
    """How a run ended, from its exit code, its metrics and its log.

    A program that exits with 0 has finished only if its metrics reach the last step with a finite loss. The log before
    `log_start` is from earlier attempts, which may have failed for another reason.
    """
    metrics = MetricsReader(folder / METRICS_FILE)
    losses, step = metrics.losses, metrics.step
    if reason := describe_divergence(losses):
        return RunEnd(state="failed", reason=reason, diverged=True)
    is_complete = bool(losses) and (run.steps is None or step >= run.steps)
    lost = metrics.describe_lost_lines(run.steps) if is_complete else ""
    if code == 0 and is_complete and not lost:
        return RunEnd(state="finished")
    if stop_signal is not None or code == EXIT_PREEMPTED:
        name = "a signal" if stop_signal is None else signal.Signals(stop_signal).name
        reason = f"stopped by {name} at step {step}"
        return RunEnd(state="preempted", reason=reason)
    if code != 0:
        return RunEnd(state="failed", reason=_explain_exit(code, run.folder / LOG_FILE, log_start))
    if not losses:
        reason = f"the program wrote no line with 'step' and 'loss' to {folder / METRICS_FILE}"
        return RunEnd(state="failed", reason=reason)
    return RunEnd(state="failed", reason=lost or f"the program ended at step {step} of {run.steps}")


def describe_lost_metrics(folder: Path, run: Run) -> str:
    """Describes what the metrics of a finished run have lost since it ended; empty if nothing."""
    metrics = MetricsReader(folder / METRICS_FILE)
    return metrics.describe_lost_lines(run.steps) if metrics.losses else "its metrics are lost"


def judge_without_exit_code(folder: Path, run: Run) -> RunEnd:
    """How a run ended whose exit code is lost. It has finished if its metrics are complete.

    A run that validates must also have validated its last step, because it may have been killed before that.
    """
    end = judge_end(folder, run, 0, None)
    if end.diverged:
        return end
    lost = "its exit code is not known, because its wrapper was killed or could not write it (a full disk?)"
    if run.steps is None:
        return RunEnd(state="failed", reason=f"{lost}; its number of steps is not known either (--steps)")
    if end.state != "finished":
        return RunEnd(state="failed", reason=f"{lost}; {end.reason}")
    validated = MetricsReader(folder / METRICS_FILE).validated
    if validated is not None and validated < run.steps:
        reason = f"{lost}; its last validation is of step {validated} of {run.steps}"
        return RunEnd(state="failed", reason=reason)
    return RunEnd(state="finished", reason=f"{lost}; its metrics are complete")


def _explain_exit(code: int, log: Path, log_start: int) -> str:
    lines = tail_lines(log, _LOG_LINES, start=log_start)
    if any(word in line for line in lines for word in _OUT_OF_MEMORY):
        return "out of memory"
    if code < 0:
        hint = " (by the system if memory ran out)" if -code == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}"
    # A diagnostic of policyc ends with the location in the policy, so its first line says more than its last.
    message = next((line for line in reversed(lines) if _DIAGNOSTIC in line), lines[-1] if lines else "")
    return f"exit code {code}" + (f": {message.strip()[:200]}" if message else "")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    sys.exit(main())
