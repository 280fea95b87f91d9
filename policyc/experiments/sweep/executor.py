"""Executors, which start runs: their interface, and an executor for processes on this machine.

An executor starts `python -m policyc.experiments.sweep.wrapper FOLDER` somewhere. That process writes `status.json`.
So a run outlives the sweep that started it, and the next sweep in the same folder takes it over.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from policyc.base.python import PYTHON
from policyc.experiments.sweep.liveness import is_locked
from policyc.experiments.sweep.run import LOG_FILE, STOP_FILE, Run, RunStatus


class Executor(Protocol):
    """Starts runs and knows which of them are queued or running. How a run ended is in its `status.json`."""

    @property
    def slots(self) -> int:
        """How many runs may be active at a time."""

    def start(self, run: Run) -> None:
        """Starts a run, or puts it into a queue. Writes `launch.json`. Raises OSError if that fails."""

    def is_active(self, run: Run) -> bool:
        """Whether the run is queued or running. An earlier executor may have started it."""

    def stop(self, runs: Sequence[Run]) -> str:
        """Asks runs to stop, and returns at once. The runs save what they can, and become `preempted`.

        Returns an empty string, or a message if the runs go on without the sweep instead.
        """


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
        # In its own session: Ctrl-C in the terminal reaches only the sweep, which then stops its runs cleanly.
        with (run.folder / LOG_FILE).open("ab") as log:  # for errors of the wrapper itself
            self._processes[run.folder] = subprocess.Popen(
                [*PYTHON, "-m", "policyc.experiments.sweep.wrapper", str(run.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def is_active(self, run: Run) -> bool:
        process = self._processes.get(run.folder)
        if process is not None and process.poll() is None:
            return True
        status = RunStatus.read(run.folder)
        if status is not None and status.state == "running" and is_locked(run.folder):  # of an earlier sweep
            self._note_gpus(run)
            return True
        self._gpus.pop(run.folder, None)
        return False

    def stop(self, runs: Sequence[Run]) -> str:
        for run in runs:
            (run.folder / STOP_FILE).touch()
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

    def _note_gpus(self, run: Run) -> None:
        """Marks the GPUs of a run that an earlier sweep started as used."""
        if run.folder not in self._gpus and self._gpu_groups:
            self._gpus[run.folder] = Run.read(run.folder).environment.get("CUDA_VISIBLE_DEVICES", "")


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
