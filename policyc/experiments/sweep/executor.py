"""How runs are started: the interface of executors, and processes on this machine.

An executor starts `python -m policyc.experiments.sweep.wrapper FOLDER` somewhere. That process writes `status.json`.
So a run outlives the sweep that started it, and the next sweep in the same folder takes it over.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from policyc.experiments.sweep.locks import is_locked
from policyc.experiments.sweep.run import Run, RunStatus

WRAPPER_MODULE = "policyc.experiments.sweep.wrapper"


class Executor(Protocol):
    """Starts runs and knows which of them are queued or running. How a run ended is in its `status.json`."""

    @property
    def slots(self) -> int:
        """How many runs may be active at a time."""

    def start(self, run: Run) -> None:
        """Starts a run, or puts it into a queue. Writes `launch.json`. Raises OSError if that fails."""

    def is_active(self, run: Run) -> bool:
        """Is the run queued or running, whether this executor or an earlier one started it?"""

    def stop(self, runs: Sequence[Run]) -> None:
        """Asks runs to stop, and returns at once. They save what they can, and become `preempted`."""

    def describe_left(self, runs: Sequence[Run]) -> str:
        """What stays behind if the sweep is interrupted; empty if its runs must be stopped then."""


def wrapper_command(run: Run) -> list[str]:
    """The words of the process that runs a run and writes its status."""
    return [sys.executable, "-m", WRAPPER_MODULE, str(run.folder)]


class LocalExecutor:
    """Runs processes on this machine, each with its own GPUs if the machine has some.

    Args:
      jobs: how many runs at a time.
      gpu_groups: the GPUs of each run, as values of CUDA_VISIBLE_DEVICES; empty on a machine without GPUs. With more
        jobs than groups, runs share GPUs.
    """

    def __init__(self, jobs: int, gpu_groups: Sequence[str] = ()) -> None:
        self.slots = jobs
        self._gpu_groups = tuple(gpu_groups)
        self._processes: dict[Path, subprocess.Popen[bytes]] = {}
        self._gpus: dict[Path, str] = {}

    def start(self, run: Run) -> None:
        run.write(self._choose_gpus(run))
        # A session of its own: Ctrl-C in the terminal reaches the sweep, which stops its runs in order.
        self._processes[run.folder] = subprocess.Popen(
            wrapper_command(run),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def is_active(self, run: Run) -> bool:
        process = self._processes.get(run.folder)
        if process is not None and process.poll() is None:
            return True
        status = RunStatus.read(run.folder)
        is_running = status is not None and status.state == "running"
        # Of an earlier sweep, or the wrapper was killed and its child lives.
        if is_running and is_locked(run.folder):
            self._note_gpus(run)
            return True
        self._gpus.pop(run.folder, None)
        return False

    def stop(self, runs: Sequence[Run]) -> None:
        for run in runs:
            process = self._processes.get(run.folder)
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
            elif is_locked(run.folder) and (status := RunStatus.read(run.folder)) is not None:
                _signal_wrapper(status)

    def describe_left(self, runs: Sequence[Run]) -> str:  # noqa: ARG002  # the interface
        return ""

    def _choose_gpus(self, run: Run) -> dict[str, str]:
        """The variables that give a run the GPUs with the fewest runs on them."""
        if not self._gpu_groups:
            return {}
        used = list(self._gpus.values())
        group = min(self._gpu_groups, key=used.count)
        self._gpus[run.folder] = group
        sharing = -(-self.slots // len(self._gpu_groups))
        # JAX takes 75 % of a GPU's memory when it starts; runs that share a GPU divide 90 %.
        shared = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / sharing:.3f}"} if sharing > 1 else {}
        return {"CUDA_VISIBLE_DEVICES": group, **shared}

    def _note_gpus(self, run: Run) -> None:
        """Marks the GPUs of a run that an earlier sweep started as used."""
        if run.folder not in self._gpus and self._gpu_groups:
            self._gpus[run.folder] = Run.read(run.folder).environment.get("CUDA_VISIBLE_DEVICES", "")


def _signal_wrapper(status: RunStatus) -> None:
    """Asks the wrapper of an earlier sweep to stop. Does nothing if it is on another machine, or gone."""
    if status.host != socket.gethostname():
        return
    if WRAPPER_MODULE in _read_command(status.pid):  # its number may belong to another process by now
        os.kill(status.pid, signal.SIGTERM)


def _read_command(pid: int) -> str:
    """The command line of a process; empty if there is none. Small containers have no `ps`, macOS has no `/proc`."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except FileNotFoundError:
        words = ["ps", "-o", "command=", "-p", str(pid)]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return ""
