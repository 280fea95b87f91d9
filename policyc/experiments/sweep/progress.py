"""The state of the runs of a sweep, read from their folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from policyc.experiments.sweep.judge import describe_lost_metrics, judge_without_exit_code
from policyc.experiments.sweep.metrics import MetricsReader
from policyc.experiments.sweep.run import METRICS_FILE, Run, RunStatus

Progress = Literal["waiting", "running", "finished", "failed", "preempted"]


@dataclass(slots=True, kw_only=True)
class TrackedRun:
    """A run, its progress, and the metrics of its seeds."""

    run: Run
    progress: Progress
    readers: tuple[MetricsReader, ...]
    status: RunStatus | None = None

    @property
    def step(self) -> int:
        """The step that all seeds of the run have reached."""
        return min(reader.step for reader in self.readers)

    def update(self) -> None:
        for reader in self.readers:
            reader.update()


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """How a sweep ended. `stopped` says why it ended before all runs did; empty if all ended."""

    runs: tuple[TrackedRun, ...]
    stopped: Literal["", "interrupted", "early failures"] = ""

    @property
    def failed(self) -> list[TrackedRun]:
        return [run for run in self.runs if run.progress == "failed"]

    @property
    def unfinished(self) -> list[TrackedRun]:
        return [run for run in self.runs if run.progress not in ("finished", "failed")]


def track_runs(runs: Sequence[Run]) -> list[TrackedRun]:
    """Reads the state of runs from their folders. A run that failed without diverging is waiting again."""
    tracked = []
    for run in runs:
        status = read_status(run)
        progress: Progress = "waiting"
        if status is not None and (status.state == "finished" or status.diverged):
            lost = status.state == "finished" and any(describe_lost_metrics(f, run) for f in run.folders)
            progress = "waiting" if lost else status.state
        readers = tuple(MetricsReader(folder / METRICS_FILE) for folder in run.folders)
        tracked.append(TrackedRun(run=run, progress=progress, readers=readers, status=status))
    return tracked


def read_status(run: Run, *, has_ended: bool = False) -> RunStatus | None:
    """The status of a run. If it has several seeds, that of the seed furthest from its end.

    If the status of a run that has ended is still `running`, its job was killed, or could not write the end because of
    a full disk, for example. The end is then judged from the metrics.
    """
    statuses = []
    for folder in run.folders:
        status = RunStatus.read(folder)
        if has_ended and status is not None and status.state == "running":
            status = replace(status, **asdict(judge_without_exit_code(folder, run)))
            status.write(folder)
        statuses.append(status)
    return max(statuses, key=_distance_from_end)


def _distance_from_end(status: RunStatus | None) -> int:
    if status is None:
        return 4
    return {"finished": 0, "failed": 1 if status.diverged else 2, "preempted": 3, "running": 3}[status.state]
