"""What the tasks of a Slurm job do. submitit unpickles a `SlurmTask` in each of them and calls it.

Each task runs the wrapper. Slurm may send a signal to the process of submitit only, so it is passed on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from policyc.experiments.sweep.run import Run, RunStatus
from policyc.experiments.sweep.wrapper import EXIT_PREEMPTED, wrapper_command

_GOOD_EXITS = (0, EXIT_PREEMPTED, 130)  # 130: the bundled trainer saved on SIGINT
_LAST_WORDS_SECONDS = 30  # the first task sees that another one is dead, and says so, before Slurm kills it


class SlurmTask:
    """A run as a job. Because it has `checkpoint`, submitit requeues it before its time limit."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._early_signal: int | None = None  # one that came before there was a process

    def __call__(self) -> None:
        run = Run.read(Path(self._folder))
        rank = int(os.environ.get("SLURM_PROCID", "0"))
        if rank == 0 and _read_state(run) == "finished":
            return
        # In the first task submitit itself handles the other signals, and then calls `checkpoint`.
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2) if rank else (signal.SIGTERM,):
            signal.signal(number, self._pass_on)
        code = self._run(wrapper_command(run, rank))
        if rank == 0 and _read_state(run) == "preempted":
            requeue(os.environ["SLURM_JOB_ID"])
        elif rank == 0 and code:
            raise RuntimeError(f"the run ended with exit code {code}: see {run.folder}")
        elif rank and code not in _GOOD_EXITS:
            time.sleep(_LAST_WORDS_SECONDS)
            raise RuntimeError(f"task {rank} ended with exit code {code}: see {run.folder}/log.{rank}.txt")

    def checkpoint(self) -> Any:
        """Called by submitit on SIGUSR2, in the first task. Returns what to run after the job was requeued."""
        from submitit.helpers import DelayedSubmission

        self._pass_on(signal.SIGTERM, None)
        if self._process is not None:
            _wait(self._process.pid)
        return DelayedSubmission(SlurmTask(self._folder))

    def _run(self, command: Sequence[str]) -> int:
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        if self._early_signal is not None:
            self._pass_on(self._early_signal, None)
        _wait(self._process.pid)
        return self._process.wait()

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        if self._process is None:
            self._early_signal = number
            return
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, number)


def _read_state(run: Run) -> str:
    status = RunStatus.read(run.folder)
    return "" if status is None else status.state


def _wait(pid: int) -> None:
    """Waits for a process to end. Unlike `Popen.wait`, it can be called in a handler that interrupts it."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def requeue(job: str) -> None:
    """Puts the job back into the queue, unless Slurm is ending it.

    A job that ends in the grace time of its preemption is complete for Slurm, which would not requeue it. A job that
    someone cancelled gets the same signal, and must not come back: its state is CANCELLED by then.
    """
    words = ["squeue", "--noheader", f"--jobs={job}", "--format=%T"]
    state = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    if state == "RUNNING":
        subprocess.run(["scontrol", "requeue", job], check=True)
