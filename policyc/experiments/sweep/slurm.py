"""Executes the runs of a sweep as Slurm jobs.

The comment of a job is the folder of its run, so a sweep finds the jobs of an earlier one. submitit writes, submits and
requeues the jobs. It asks `sacct` for their states, which needs an accounting database: `squeue` is asked here instead.
How a run ended is in its `status.json`; if a job ended without writing that, Slurm's reason is shown.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, JobPaths

from policyc.base.python import PYTHON
from policyc.base.text import did_you_mean
from policyc.experiments.sweep.run import JOBS_FOLDER, Run, RunStatus
from policyc.experiments.sweep.run_job import DEFAULT_GRACE, RunJob

_DEFAULT_JOBS = 100  # clusters limit how many jobs of a user may wait
_POLL_SECONDS = 5.0  # for all runs together; administrators ask users not to query every second
_SLURM_TIMEOUT = 60.0  # a restarting controller takes some seconds to answer
_FILE_SYSTEM_SECONDS = 60.0  # NFS caches a folder for up to a minute
_ANY_NUMBER = 10**6  # of time limits that a run may reach
_ENDED = frozenset({"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
                    "PREEMPTED", "REVOKED", "TIMEOUT"})  # fmt: skip
_NEVER_STARTS = ("launch failed requeued held", "BadConstraints", "DependencyNeverSatisfied")
_EXPLANATIONS = {
    "BOOT_FAIL": "did not start: its node did not boot",
    "CANCELLED": "was cancelled",
    "NODE_FAIL": "ended: its node failed",
    "OUT_OF_MEMORY": "ran out of memory",
    "TIMEOUT": "reached its time limit and could not be requeued",
}


# ---- options

_NUMBERS = {
    "nodes": "nodes of a run",
    "gpus": "GPUs on each node",
    "tasks": "processes on each node; default: one per GPU if a run has several GPUs, as JAX expects under Slurm",
    "cpus": "CPUs of each process",
    "time": "time limit in minutes; a longer run is requeued and continues from its checkpoint",
    "grace": f"seconds that a run gets to save before it is requeued ({DEFAULT_GRACE})",
}
_TEXTS = ("partition", "account", "qos", "mem", "constraint", "nodelist", "exclude", "reservation")
"""Options that are passed to Slurm unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """The resources of one run. `sbatch` holds the options that are passed to Slurm unchanged."""

    time: int
    nodes: int = 1
    gpus: int = 0
    tasks: int = 1
    cpus: int | None = None
    grace: int = DEFAULT_GRACE
    sbatch: tuple[tuple[str, str], ...] = ()

    @property
    def processes(self) -> int:
        """How many processes one run has."""
        return self.nodes * self.tasks

    def parameters(self) -> dict[str, Any]:
        """The parameters of submitit's executor."""
        return {
            "time": self.time,
            "nodes": self.nodes,
            "ntasks_per_node": self.tasks,
            "cpus_per_task": self.cpus,
            # Not gpus-per-task: JAX selects the GPU by the number of its process, so it must see all GPUs of a node.
            "gpus_per_node": self.gpus or None,
            # The job kills a program that does not stop within `grace` seconds, and then writes the status.
            "signal_delay_s": self.grace + 30,
            "setup": ["trap : TERM"],  # SIGTERM reaches the run, which saves; the script waits for it
            "srun_args": ["--kill-on-bad-exit=1"],  # a process that fails ends the others
            "additional_parameters": {"requeue": True, **dict(self.sbatch)},
            "stderr_to_stdout": True,
        }


def parse_slurm_options(texts: Sequence[str]) -> SlurmOptions:
    """Reads `partition=long,gpus=8`. Raises one ValueError that lists all errors."""
    values: dict[str, Any] = {}
    sbatch: list[tuple[str, str]] = []
    errors: list[str] = []
    for word in (word.strip() for text in texts for word in text.split(",")):
        name, equals, value = word.partition("=")
        if name not in (*_NUMBERS, *_TEXTS):
            errors.append(f"no option '{name}': {did_you_mean(name, (*_NUMBERS, *_TEXTS))}")
        elif not equals or not value:
            errors.append(f"'{name}' has no value: write {name}=VALUE")
        elif name in _TEXTS:
            sbatch.append((name, value))
        elif not value.isdecimal() or (int(value) == 0 and name != "gpus"):
            errors.append(f"{name}={value}: expected a number ({_NUMBERS[name]})")
        else:
            values[name] = int(value)
    if "time" not in values and not errors:
        errors.append("time is missing: give the time limit of a run in minutes, such as time=240")
    if errors:
        raise ValueError("--slurm: " + "; ".join(errors))
    nodes, gpus = values.get("nodes", 1), values.get("gpus", 0)
    values.setdefault("tasks", gpus if nodes * gpus > 1 else 1)
    return SlurmOptions(**values, sbatch=tuple(sbatch))


def check_program(options: SlurmOptions, config: str | None, words: Sequence[str]) -> None:
    """Raises ValueError if a run of the bundled trainer has several processes but lacks `--distributed`."""
    if config is not None and options.processes > 1 and "--distributed" not in words:
        raise ValueError(
            f"--slurm: a run has {options.processes} processes ({options.nodes} x {options.tasks}): add "
            "--distributed to the options of the trainer, or give tasks=1"
        )


# ---- jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """One line of the queue. Slurm keeps a job in it for some minutes after its end."""

    id: str
    state: str
    reason: str = ""

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDED

    @property
    def never_starts(self) -> bool:
        return self.state == "PENDING" and self.reason in _NEVER_STARTS


class SlurmQueue:
    """The jobs of this user. Queries Slurm at most every few seconds."""

    def __init__(self) -> None:
        self._asked = time.monotonic()
        self._answers = True
        self._jobs = _ask_queue()

    def find(self, run: Run) -> QueuedJob | None:
        """The last job of a run. If Slurm does not answer, its last answer counts."""
        now = time.monotonic()
        if now - self._asked > _POLL_SECONDS:
            self._asked = now
            try:
                self._jobs = _ask_queue()
                self._answers = True
            except OSError as error:
                if self._answers:  # one warning per outage
                    sys.stderr.write(
                        f"policyc: warning: {error}; until Slurm answers, no run counts as ended\n"
                    )
                self._answers = False
        return self._jobs.get(str(run.folder))

    def add(self, run: Run, job: QueuedJob) -> None:
        """Adds a job that was submitted after the last query."""
        self._jobs[str(run.folder)] = job


def _ask_queue() -> dict[str, QueuedJob]:
    """The jobs by their comment, the folder of a run; the newest of each. Raises OSError."""
    # The comment comes last: it is a path, which may hold the separator.
    answer = _run_slurm("squeue", "--noheader", "--me", "--states=all", "--format=%A|%T|%r|%k")
    lines = sorted((line.split("|", 3) for line in answer.splitlines()), key=lambda line: int(line[0]))
    return {text: QueuedJob(id=id, state=state, reason=reason) for id, state, reason, text in lines}


def _run_slurm(*words: str) -> str:
    """Runs a Slurm command, and returns its output. Raises OSError with Slurm's message."""
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=_SLURM_TIMEOUT, check=True)
    except subprocess.CalledProcessError as error:
        raise OSError(f"{words[0]}: {error.stderr.strip() or error}") from None
    except subprocess.TimeoutExpired:
        raise OSError(f"{words[0]}: Slurm did not answer within {_SLURM_TIMEOUT:.0f} s") from None
    return answer.stdout


class SlurmExecutor:
    """Submits runs as Slurm jobs. Raises ValueError without Slurm, OSError if Slurm does not answer."""

    def __init__(self, out: Path, options: SlurmOptions, jobs: int | None = None) -> None:
        if shutil.which("sbatch") is None:
            raise ValueError("--slurm: there is no sbatch on this machine: run the sweep on a login node")
        if {"%", "\n"} & set(str(out)):
            raise ValueError(
                f"--slurm: Slurm replaces '%' in the names of files: choose another --folder than {out}"
            )
        self.slots: int = jobs or _DEFAULT_JOBS
        self._folder = out / JOBS_FOLDER
        self._grace = options.grace
        self._executor = submitit.SlurmExecutor(
            self._folder, max_num_timeout=_ANY_NUMBER, python=shlex.join(PYTHON)
        )
        self._executor.update_parameters(**{k: v for k, v in options.parameters().items() if v is not None})
        self._queue = SlurmQueue()  # fails now if Slurm does not answer
        self._started: set[str] = set()  # the jobs that this sweep started or took over
        self._ends: dict[str, float] = {}  # when a job was first seen to have ended without a last status

    def start(self, run: Run) -> None:
        name = f"policyc-{run.variant}-{run.seed}"
        self._executor.update_parameters(job_name=name, comment=str(run.folder))
        try:
            job = self._executor.submit(RunJob(run, {}, self._grace))
        except FailedJobError as error:
            raise OSError(f"{run.name} could not be submitted: {str(error).strip()}") from None
        self._started.add(job.job_id)
        self._queue.add(run, QueuedJob(id=job.job_id, state="PENDING"))

    def is_active(self, run: Run) -> bool:
        job = self._queue.find(run)
        if job is None:
            return False
        if job.never_starts:
            _run_slurm("scancel", job.id)
            return False
        if job.has_ended:
            return self._may_see_end(run, job)
        if job.id not in self._started and not JobPaths(self._folder, job.id).submitted_pickle.exists():
            _run_slurm("scancel", job.id)  # the sweep was killed in the moment after `sbatch`
            return False
        self._started.add(job.id)
        return True

    def _may_see_end(self, run: Run, job: QueuedJob) -> bool:
        """Whether the last status of a job may still arrive: network file systems show new files with a delay."""
        status = RunStatus.read(run.folder)
        if job.id not in self._started or job.state not in ("COMPLETED", "FAILED"):
            return False
        if status is not None and status.state != "running":
            return False
        first_seen = self._ends.setdefault(job.id, time.monotonic())
        return time.monotonic() - first_seen < _FILE_SYSTEM_SECONDS

    def explain(self, run: Run) -> str:
        job = self._queue.find(run)
        if job is None:
            return "Slurm no longer knows its job"
        if job.never_starts:
            return f"Slurm job {job.id} will never start: {job.reason}"
        reason = _EXPLANATIONS.get(job.state, f"ended as {job.state}")
        return f"Slurm job {job.id} {reason}; see {JobPaths(self._folder, job.id).stdout}"

    def stop(self, runs: Sequence[Run]) -> str:
        if not runs:
            return ""
        ids = [job.id for run in runs if (job := self._queue.find(run)) is not None]
        return (
            f"{len(ids)} Slurm jobs stay in the queue: the same command finds them again; "
            f"'scancel {' '.join(ids)}' ends them"
        )
