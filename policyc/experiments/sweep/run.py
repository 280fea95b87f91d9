"""A run of a sweep, and `status.json` in its folder, which says how far it is. The job of the run writes that."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from policyc.base.files import atomic_write, open_file, read_json

STATUS_FILE = "status.json"
METRICS_FILE = "metrics.jsonl"
LOG_FILE = "log.txt"
LOCK_FILE = ".lock"

POLICY_FILE = "policy.policy"  # in the folder of a variant
MANIFEST_FILE = "sweep.json"
PAGE_FILE = "report.html"
JOBS_FOLDER = ".jobs"  # submitit's files
SWEEP_FILES = (MANIFEST_FILE, PAGE_FILE, LOCK_FILE, JOBS_FOLDER)  # in the folder of a sweep

SEED_VARIABLE = "POLICYC_SEED"
STEPS_VARIABLE = "POLICYC_STEPS"
RUN_DIR_VARIABLE = "POLICYC_RUN_DIR"
VARIANT_VARIABLE = "POLICYC_VARIANT"

State = Literal["running", "finished", "failed", "preempted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One process of a sweep: a variant with one seed.

    Attributes:
      variant: the name of the edited policy.
      folder: the folder of its files, absolute.
      command: the command line of the process.
      environment: variables to set, on top of the environment of the job.
      cwd: the folder in which the process starts.
      steps: the step at which the run is complete; None if it is not known.
      metrics_source: the metrics file of another trainer, as KIND=PATH; None for a program that writes our lines.
    """

    variant: str
    seed: int
    folder: Path
    command: tuple[str, ...]
    environment: Mapping[str, str]
    cwd: Path
    steps: int | None = None
    metrics_source: str | None = None

    @property
    def name(self) -> str:
        """The name in messages, such as `te_nvfp4 seed 3`."""
        return f"{self.variant} seed {self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended and why, or that it has not ended. `diverged` means that its last losses are not finite."""

    state: State | Literal["unfinished"]
    reason: str = ""
    diverged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The content of `status.json`.

    Attributes:
      state: running, finished, failed, or preempted (stopped from outside: the same command continues it).
      exit: the exit code of the process; negative for a signal; None while it runs.
      reason: why the run failed or stopped.
      diverged: whether the run ended with a loss that is not finite. Such a run is a result, and is not repeated.
      started: when the last attempt started, as ISO 8601 in UTC.
      ended: when it ended.
      seconds: the total time of all attempts.
      attempt: how often the run was started.
      host: the machine of the last attempt.
      pid: the process on that machine that runs the program and writes this file.
    """

    state: State
    command: tuple[str, ...]
    started: str = ""
    host: str = ""
    pid: int | None = None
    exit: int | None = None
    reason: str = ""
    diverged: bool = False
    ended: str | None = None
    seconds: float = 0.0
    attempt: int = 1

    def write(self, folder: Path) -> None:
        write_json(folder / STATUS_FILE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> RunStatus | None:
        """Reads `status.json`; None if the run has not started. Unknown keys are ignored.

        Also None if the file is damaged, for example by a power failure: such a run is run again.
        """
        try:
            values = read_json(folder / STATUS_FILE)
            if values["state"] not in get_args(State):
                return None
            known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
            return cls(**known | {"command": tuple(values["command"])})
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            return None


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replaces a JSON file atomically."""
    with atomic_write(path) as stream:
        stream.write((json.dumps(values, indent=1) + "\n").encode())


def tail_lines(path: Path, count: int, most_bytes: int = 16_384, start: int = 0) -> list[str]:
    """The last lines of a file that are not empty, without reading all of it. Skips the bytes before `start`."""
    try:
        with open_file(path) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(start, size - most_bytes))
            text = stream.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    # A progress bar writes many states of one line, separated by carriage returns.
    lines = (line.rstrip().rsplit("\r", 1)[-1] for line in text.split("\n"))
    return [line for line in lines if line.strip()][-count:]
