"""Executes the runs of a sweep as Slurm jobs.

The job id of a run is kept in `slurm.json` in its folder, and the comment of the job is that folder. So a sweep finds
the jobs of an earlier one. Slurm's queue tells which jobs are active. How a run ended is in its `status.json`; if a job
ended without writing that, this module writes it.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from policyc.base.files import read_json
from policyc.base.text import did_you_mean
from policyc.experiments.sweep.liveness import is_locked
from policyc.experiments.sweep.run import LOG_FILE, Run, RunStatus, write_json
from policyc.experiments.sweep.wrapper import DEFAULT_GRACE, GRACE_VARIABLE

JOB_FILE = "slurm.json"

_DEFAULT_JOBS = 100  # clusters limit how many jobs of a user may wait
_POLL_SECONDS = 5.0  # for all runs together; administrators ask users not to query every second
_SLURM_TIMEOUT = 60.0  # a restarting controller takes some seconds to answer
_FILE_SYSTEM_SECONDS = 60.0  # NFS caches a folder for up to a minute
_ENDED = frozenset({"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
                    "PREEMPTED", "REVOKED", "TIMEOUT"})  # fmt: skip
_NEVER_STARTS = ("launch failed requeued held", "BadConstraints", "DependencyNeverSatisfied")
_EXPLANATIONS = {
    "BOOT_FAIL": "its node did not boot",
    "CANCELLED": "it was cancelled",
    "NODE_FAIL": "its node failed",
    "OUT_OF_MEMORY": "out of memory",
    "TIMEOUT": "it reached its time limit and could not be requeued",
    "": "it vanished: Slurm no longer knows it",
}

_SCRIPT = """#!/bin/sh
# Slurm's SIGTERM reaches the run, which saves. This script waits for it.
trap : TERM
srun --kill-on-bad-exit=1 \
  sh -c 'exec "$0" -P -m policyc.experiments.sweep.wrapper "$1" "$SLURM_PROCID"' {python} {folder}
code=$?
# A job that ends in the grace time of its preemption is complete for Slurm, which would not requeue it. A job that
# someone cancelled gets the same signal, and must not come back: its state is CANCELLED by then.
if grep -q '"state": "preempted"' {folder}/status.json &&
  [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""
"""The script of a job. With `--kill-on-bad-exit`, a process that fails ends the others."""


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

    def sbatch_words(self) -> list[str]:
        """The options of `sbatch`."""
        values = {
            "time": self.time,
            "nodes": self.nodes,
            "ntasks-per-node": self.tasks,
            "cpus-per-task": self.cpus,
            # Not gpus-per-task: JAX selects the GPU by the number of its process, so it must see all GPUs of a node.
            "gpus-per-node": self.gpus or None,
            # The wrapper kills a program that does not stop within `grace` seconds, and then writes the status.
            "signal": f"USR2@{self.grace + 30}",
            **dict(self.sbatch),
        }
        return ["--requeue", *(f"--{name}={value}" for name, value in values.items() if value is not None)]


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
class SlurmJob:
    """The content of `slurm.json`.

    Attributes:
      id: the id of the job.
      attempts: how often the run was started before this job, to recognize a status that is from an earlier attempt.
    """

    id: str
    attempts: int = 0

    def write(self, folder: Path) -> None:
        write_json(folder / JOB_FILE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> SlurmJob | None:
        """Reads `slurm.json`; None if it is missing or damaged. The job can still be found by its comment."""
        try:
            return cls(**read_json(folder / JOB_FILE))
        except (FileNotFoundError, ValueError, TypeError):
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """One line of the queue. Slurm keeps a job in it for some minutes after its end."""

    id: str
    state: str
    reason: str
    comment: str

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDED

    @property
    def never_starts(self) -> bool:
        return self.state == "PENDING" and self.reason in _NEVER_STARTS


class SlurmQueue:
    """The jobs of this user. Queries Slurm at most every few seconds."""

    def __init__(self) -> None:
        self._jobs: dict[str, QueuedJob] | None = None
        self._asked = 0.0
        self._answers = True

    def jobs(self) -> dict[str, QueuedJob]:
        """The jobs by id. If Slurm does not answer, returns its last answer; raises OSError if there is none."""
        now = time.monotonic()
        if self._jobs is None or now - self._asked > _POLL_SECONDS:
            self._asked = now
            try:
                self._jobs = _ask_queue()
                self._answers = True
            except OSError as error:
                if self._jobs is None:
                    raise
                if self._answers:  # one warning per outage
                    sys.stderr.write(
                        f"policyc: warning: {error}; until Slurm answers, no run counts as ended\n"
                    )
                self._answers = False
        return self._jobs

    def add(self, job: QueuedJob) -> None:
        """Adds a job that was submitted after the last query."""
        self._jobs = {**(self._jobs or {}), job.id: job}


def _ask_queue() -> dict[str, QueuedJob]:
    # The comment comes last: it is a path, which may hold the separator.
    answer = _run_slurm("squeue", "--noheader", "--me", "--states=all", "--format=%A|%T|%r|%k")
    lines = (line.split("|", 3) for line in answer.splitlines())
    jobs = (QueuedJob(id=id, state=state, reason=reason, comment=text) for id, state, reason, text in lines)
    return {job.id: job for job in jobs}


def _run_slurm(*words: str, script: str = "") -> str:
    """Runs a Slurm command with `script` as its input, and returns its output. Raises OSError with Slurm's message."""
    try:
        answer = subprocess.run(
            words, input=script, capture_output=True, text=True, timeout=_SLURM_TIMEOUT, check=True
        )
    except subprocess.CalledProcessError as error:
        raise OSError(f"{words[0]}: {error.stderr.strip() or error}") from None
    except subprocess.TimeoutExpired:
        raise OSError(f"{words[0]}: Slurm did not answer within {_SLURM_TIMEOUT:.0f} s") from None
    return answer.stdout


class SlurmExecutor:
    """Submits runs as Slurm jobs. Raises ValueError without Slurm, OSError if Slurm does not answer."""

    def __init__(self, options: SlurmOptions, jobs: int | None = None) -> None:
        if shutil.which("sbatch") is None:
            raise ValueError("--slurm: there is no sbatch on this machine: run the sweep on a login node")
        self.slots: int = jobs or _DEFAULT_JOBS
        self._options = options
        self._queue = SlurmQueue()
        self._jobs: dict[Path, SlurmJob] = {}
        self._ends: dict[str, float] = {}  # when a job was first seen to have ended without a last status
        self._queue.jobs()  # fails now if Slurm does not answer

    def start(self, run: Run) -> None:
        run.write({GRACE_VARIABLE: str(self._options.grace)})
        status = RunStatus.read(run.folder)
        job = SlurmJob(id=self._submit(run), attempts=status.attempt if status else 0)
        job.write(run.folder)
        self._jobs[run.folder] = job
        self._queue.add(QueuedJob(id=job.id, state="PENDING", reason="", comment=str(run.folder)))

    def is_active(self, run: Run) -> bool:
        job = self._find_job(run)
        if job is None:
            return is_locked(run.folder)  # a sweep without Slurm started it
        queued = self._queue.jobs().get(job.id)
        if queued is not None and queued.never_starts:
            _run_slurm("scancel", job.id)
            self._settle(run, job, queued.state, f"it will never start: {queued.reason}")
            return False
        if queued is not None and not queued.has_ended:
            return True
        state = queued.state if queued is not None else ""
        if state in ("COMPLETED", "FAILED") and self._may_see_end(run, job):
            return True
        self._settle(run, job, state, _EXPLANATIONS.get(state, f"it ended as {state}"))
        return False

    def _may_see_end(self, run: Run, job: SlurmJob) -> bool:
        """Whether the wrapper's last status may still arrive: network file systems show new files with a delay."""
        status = RunStatus.read(run.folder)
        if status is not None and status.attempt > job.attempts and status.state != "running":
            return False
        first_seen = self._ends.setdefault(job.id, time.monotonic())
        return time.monotonic() - first_seen < _FILE_SYSTEM_SECONDS

    def stop(self, runs: Sequence[Run]) -> str:
        ids = [job.id for run in runs if (job := self._find_job(run)) is not None]
        return (
            f"{len(ids)} Slurm jobs stay in the queue: the same command finds them again; "
            f"'scancel {' '.join(ids)}' ends them"
        )

    def _submit(self, run: Run) -> str:
        """Submits a run. Returns the id of its job."""
        words = [
            "sbatch",
            "--parsable",
            f"--job-name=policyc-{run.variant}-{'-'.join(map(str, run.seeds))}",
            f"--comment={run.folder}",
            f"--output={str(run.folder / LOG_FILE).replace('%', '%%')}",  # what the job prints itself, not the program
            "--open-mode=append",
            *self._options.sbatch_words(),
        ]
        script = _SCRIPT.format(python=shlex.quote(sys.executable), folder=shlex.quote(str(run.folder)))
        try:
            answer = _run_slurm(*words, script=script)
        except OSError as error:
            raise OSError(f"{run.name} could not be submitted: {error}") from None
        return answer.strip().partition(";")[0]  # the name of a cluster may follow

    def _find_job(self, run: Run) -> SlurmJob | None:
        """The last job of a run, or None. If a sweep was killed before it noted the id, the comment finds the job."""
        if run.folder not in self._jobs:
            job = SlurmJob.read(run.folder)
            comment = str(run.folder)
            active = [q for q in self._queue.jobs().values() if q.comment == comment and not q.has_ended]
            if active and (job is None or job.id != active[-1].id):
                status = RunStatus.read(run.folder)
                earlier = status.attempt - (status.state == "running") if status else 0
                job = SlurmJob(id=active[-1].id, attempts=earlier)
                job.write(run.folder)
            if job is None:
                return None
            self._jobs[run.folder] = job
        return self._jobs[run.folder]

    def _settle(self, run: Run, job: SlurmJob, state: str, reason: str) -> None:
        """Writes how a run ended if its wrapper could not, or did not know that its job was cancelled."""
        status = RunStatus.read(run.folder)
        if has_end(status, job, state):
            return
        status = status or RunStatus(state="failed", command=run.command)
        for folder in run.folders:
            replace(status, state="failed", reason=f"Slurm job {job.id}: {reason}").write(folder)


def has_end(status: RunStatus | None, job: SlurmJob, state: str) -> bool:
    """Whether a status says how the run ended. `state` is the last one of its job in the queue."""
    if status is None or status.attempt <= job.attempts:
        return False
    return status.state in ("finished", "failed") or (status.state == "preempted" and state != "CANCELLED")
