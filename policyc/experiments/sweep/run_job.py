"""Executes one run of a sweep inside a submitit job, on this machine or on Slurm.

The job starts the program of the run, writes its output to `log.txt`, and writes `status.json` when the state changes.
On a signal, or when the sweep that started it on this machine ends, it sends the program SIGTERM. The program can then
save a checkpoint, and is killed after a grace period. If the job is killed, so is the program (on Linux).
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from types import FrameType
from typing import TextIO

from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import DelayedSubmission

from policyc.experiments.sweep.judge import EXIT_PREEMPTED, describe_lost_metrics, judge_end
from policyc.experiments.sweep.locks import hold_lock
from policyc.experiments.sweep.metrics import MetricsReader, convert_metrics
from policyc.experiments.sweep.run import LOG_FILE, METRICS_FILE, Run, RunEnd, RunStatus

GRACE_VARIABLE = "POLICYC_STOP_GRACE"
"""Environment variable: how many seconds a stopped program may take to save before it is killed."""

DEFAULT_GRACE = 60  # seconds: a step and a checkpoint of a small model
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_POLL_SECONDS = 0.1
_CONVERT_SECONDS = 5.0  # between two conversions of another trainer's metrics
_GOOD_EXITS = (0, EXIT_PREEMPTED, 130)  # 130: the bundled trainer saved on SIGINT
_LAST_WORDS_SECONDS = 30  # for the first process to notice and report a failed one before Slurm ends it
_LOCK_SECONDS = 30  # beyond the grace period: for an earlier attempt to write its status


class RankFailed(Exception):
    """A process of a mesh failed. Slurm ends the others when its job ends with an error."""


@dataclass(slots=True)
class RunJob:
    """One attempt of a run, as the function of a submitit job.

    Attributes:
      run: the run.
      environment: variables to set for the program, or to remove (None), on top of the environment of the job.
      grace: seconds that a stopped program gets to save.
      ends_with_sweep: stop the program when standard input ends, which the sweep holds open.
    """

    run: Run
    environment: Mapping[str, str | None]
    grace: float = DEFAULT_GRACE
    ends_with_sweep: bool = False
    _signal: int | None = None  # the signal that asked this job to stop
    _deadline: float = math.inf  # when the program is killed
    _metrics_fault: str = ""  # why the metrics of another trainer could not be converted the last time

    def __call__(self) -> None:
        """Runs the program to its end. Does nothing if it has finished: Slurm restarts a job whose node failed."""
        run, requeue = self.run, signal.getsignal(signal.SIGUSR2)
        if self.ends_with_sweep and sys.platform == "linux":
            _die_with_parent()
        run.folder.mkdir(parents=True, exist_ok=True)
        status = RunStatus.read(run.folder)
        if status is not None and status.state == "finished":
            metrics = MetricsReader(run.folder / METRICS_FILE)
            if not describe_lost_metrics(metrics, run.steps):
                return
        for number in _STOP_SIGNALS:
            signal.signal(number, self._note_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
        if rank := 0 if self.ends_with_sweep else JobEnvironment().global_rank:
            self._run_rank(rank)
            return
        with hold_lock(run.folder, "run", sys.stderr.write, self.grace + _LOCK_SECONDS) as lock:
            end = self._run(lock)
        if callable(requeue) and not self.ends_with_sweep and end.state == "preempted":
            requeue(signal.SIGUSR2, None)  # submitit's handler, which calls `checkpoint`

    def checkpoint(self) -> DelayedSubmission | None:
        """What Slurm runs when it starts the job again; None if someone cancelled it, which sends the same signal."""
        words = ["squeue", "--noheader", f"--jobs={JobEnvironment().job_id}", "--format=%T"]
        state = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
        again = RunJob(self.run, self.environment, self.grace)
        return DelayedSubmission(again) if state == "RUNNING" else None

    def _run(self, lock: int) -> RunEnd:
        """Runs the program, which inherits the lock. Returns how it ended."""
        begin, status = time.monotonic(), self._first_status()
        status.write(self.run.folder)
        with (self.run.folder / LOG_FILE).open("a", encoding="utf-8") as log:
            if status.attempt > 1:
                log.write(f"--- attempt {status.attempt}, {status.started}\n")
                log.flush()
            log_start = log.tell()
            code = self._run_program(log, (lock,))
        seconds = status.seconds + time.monotonic() - begin
        status = replace(status, exit=code, ended=_now(), seconds=seconds)
        end = judge_end(self.run, code, self._signal, log_start)
        if code == 0 and self._metrics_fault:
            end = RunEnd(state="failed", reason=self._metrics_fault)
        replace(status, **asdict(end)).write(self.run.folder)
        return end

    def _run_rank(self, rank: int) -> None:
        """Runs a process with a rank above 0, which writes no status. Raises RankFailed."""
        with (self.run.folder / f"log.{rank}.txt").open("a", encoding="utf-8") as log:
            code = self._run_program(log)
        if code not in _GOOD_EXITS:
            time.sleep(_LAST_WORDS_SECONDS)
            raise RankFailed(f"process {rank} ended with exit code {code}")

    def _first_status(self) -> RunStatus:
        """The status of a run that starts. It includes the number and the time of earlier attempts."""
        earlier = RunStatus.read(self.run.folder)
        return RunStatus(
            state="running",
            started=_now(),
            command=self.run.command,
            host=socket.gethostname(),
            pid=os.getpid(),
            seconds=earlier.seconds if earlier else 0.0,
            attempt=earlier.attempt + 1 if earlier else 1,
        )

    def _note_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signal = self._signal or number

    def _run_program(self, log: TextIO, descriptors: Sequence[int] = ()) -> int:
        """Runs the program, converts its metrics meanwhile, and stops it on request. Returns its exit code."""
        try:
            process = subprocess.Popen(
                self.run.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env={**program_environment(self.environment), **self.run.environment}, cwd=self.run.cwd,
                start_new_session=True, pass_fds=descriptors,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # safe without threads
            )  # fmt: skip
        except OSError as error:
            log.write(f"cannot start {self.run.command[0]}: {error}\n")
            return 127
        next_conversion = 0.0
        try:
            while process.poll() is None:
                if self._signal is None and self.ends_with_sweep and select.select([0], [], [], 0)[0]:
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
                self._deadline = time.monotonic() + self.grace
                os.killpg(process.pid, signal.SIGTERM)
            elif time.monotonic() > self._deadline:
                os.killpg(process.pid, signal.SIGKILL)

    def _convert_metrics(self) -> None:
        if self.run.metrics_source is None:
            return
        self._metrics_fault = ""
        try:
            convert_metrics(self.run.metrics_source, self.run.folder / METRICS_FILE)
        except (OSError, ValueError) as error:
            self._metrics_fault = str(error)


_CHANGED = ("CUDA_VISIBLE_DEVICES", "PYTHONSAFEPATH")
"""Environment variables that a local job has other values of than the process that started it."""


def original_environment() -> dict[str, str | None]:
    """The values of these variables here, for the program; None if one is not set."""
    return {name: os.environ.get(name) for name in _CHANGED}


def program_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """The environment of a job without submitit's variables, and with some changes. None removes a variable."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SUBMITIT_")}
    return {name: value for name, value in {**inherited, **changes}.items() if value is not None}


_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Makes Linux kill this process when its parent ends."""
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


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
