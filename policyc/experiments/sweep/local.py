"""Executors start runs as submitit jobs. This module has their interface, and the jobs of this machine.

A local job ends with the process that started it, so a sweep that is killed leaves no process. submitit starts its
processes with no GPUs, in the terminal's session and with the working folder first in `sys.path`: what it passes on is
set here.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import submitit

from policyc.base.python import PYTHON
from policyc.experiments.sweep.locks import Lifeline
from policyc.experiments.sweep.run import JOBS_FOLDER, Run
from policyc.experiments.sweep.run_job import RunJob, original_environment, read_grace

_NO_TIME_LIMIT = 10 * 365 * 24 * 60  # minutes. submitit ends a local job after 2 by default


class Executor(Protocol):
    """Starts runs and knows which of them are queued or running. How a run ended is in its `status.json`."""

    @property
    def slots(self) -> int:
        """How many runs may be active at a time."""

    def start(self, run: Run) -> None:
        """Starts a run, or puts it into a queue. Raises OSError if that fails."""

    def is_active(self, run: Run) -> bool:
        """Whether the run is queued or running. An earlier executor may have started it."""

    def explain(self, run: Run) -> str:
        """What is known of the end of a run that did not write it."""

    def stop(self, runs: Sequence[Run]) -> str:
        """Asks all active runs to stop, and returns at once. The runs save what they can, and become `preempted`.

        Returns an empty string, or a message if the runs go on without the sweep instead.
        """


def submit_local(folder: Path, function: Callable[[], Any]) -> submitit.Job[Any]:
    """Starts a job on this machine. Ctrl-C in the terminal does not reach it, and no code of the working folder."""
    executor = submitit.LocalExecutor(folder, python=shlex.join(PYTHON))
    executor.update_parameters(timeout_min=_NO_TIME_LIMIT, stderr_to_stdout=True)
    terminal = {signal.SIGINT, signal.SIGHUP}
    safe_path = os.environ.get("PYTHONSAFEPATH")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, terminal)  # processes inherit what is blocked
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        return executor.submit(function)
    finally:
        if safe_path is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = safe_path
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class LocalExecutor:
    """Runs processes on this machine, each with its own GPUs if the machine has some.

    Args:
      out: the folder of the sweep.
      jobs: how many runs at a time.
      gpu_groups: the GPUs of each run, as values of CUDA_VISIBLE_DEVICES; empty on a machine without GPUs. With more
        jobs than groups, runs share GPUs.
    """

    def __init__(self, out: Path, jobs: int, gpu_groups: Sequence[str] = ()) -> None:
        self.slots: int = jobs
        self._folder = out / JOBS_FOLDER
        self._gpu_groups = tuple(gpu_groups)
        self._jobs: dict[Path, submitit.Job[Any]] = {}
        self._gpus: dict[Path, str] = {}
        self._grace = read_grace(os.environ)
        self._lifeline: Lifeline | None = None

    def start(self, run: Run) -> None:
        if self._lifeline is None:
            shutil.rmtree(self._folder, ignore_errors=True)  # an earlier sweep's
            self._lifeline = Lifeline()
        environment = {**original_environment(), **self._choose_gpus(run)}
        job = RunJob(run, environment, self._grace, ends_with_sweep=True)
        self._jobs[run.folder] = submit_local(self._folder, job)

    def is_active(self, run: Run) -> bool:
        job = self._jobs.get(run.folder)
        if job is not None and not job.done():
            return True
        self._gpus.pop(run.folder, None)
        return False

    def explain(self, run: Run) -> str:
        return f"see {self._jobs[run.folder].paths.stdout}; is the disk full?"

    def stop(self, runs: Sequence[Run]) -> str:
        del runs
        if self._lifeline is not None:
            self._lifeline.cut()
        return ""

    def _choose_gpus(self, run: Run) -> dict[str, str]:
        """Assigns the GPUs with the fewest runs to a run. Returns the environment variables for that."""
        if not self._gpu_groups:
            return {}
        used = list(self._gpus.values())
        group = min(self._gpu_groups, key=used.count)
        self._gpus[run.folder] = group
        sharing = -(-self.slots // len(self._gpu_groups))
        # JAX takes 75 % of a GPU's memory when it starts; runs that share a GPU divide 90 %.
        shared = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / sharing:.3f}"} if sharing > 1 else {}
        return {"CUDA_VISIBLE_DEVICES": group, **shared}


# ---- GPUs


def find_gpus(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The GPUs that runs may use, as values for CUDA_VISIBLE_DEVICES. Empty without NVIDIA GPUs.

    CUDA_VISIBLE_DEVICES limits them, and JAX_PLATFORMS may exclude them. JAX is not loaded: it would take their memory.
    """
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.lower().split(",")):
        return ()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(device.strip() for device in visible.split(",") if device.strip() not in ("", "-1"))
    try:
        words = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        listed = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(listed.stdout.split()) if listed.returncode == 0 else ()


def group_gpus(gpus: tuple[str, ...], per_run: int) -> tuple[str, ...]:
    """Groups the GPUs, one group per run; empty without GPUs. Raises ValueError if there are too few for one run."""
    if per_run > max(1, len(gpus)):
        raise ValueError(f"--gpus-per-run {per_run}: this machine has {len(gpus)}")
    return tuple(",".join(gpus[i : i + per_run]) for i in range(0, len(gpus) - per_run + 1, per_run))
