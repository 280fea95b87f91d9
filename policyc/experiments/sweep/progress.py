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
    """A run, its progress and its metrics."""

    run: Run
    progress: Progress
    metrics: MetricsReader
    status: RunStatus | None = None

    @property
    def step(self) -> int:
        """The last step with a loss."""
        return self.metrics.step


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
        status = RunStatus.read(run.folder)
        metrics = MetricsReader(run.folder / METRICS_FILE)
        progress: Progress = "waiting"
        if status is not None and (status.state == "finished" or status.diverged):
            lost = status.state == "finished" and describe_lost_metrics(metrics, run.steps)
            progress = "waiting" if lost else status.state
        tracked.append(TrackedRun(run=run, progress=progress, metrics=metrics, status=status))
    return tracked


def settle_lost(run: Run, status: RunStatus, explanation: str = "") -> RunStatus:
    """Judges a run from its metrics: its job has ended, but its status still says `running`.

    The job was killed, or could not write the end because of a full disk, for example.
    """
    settled = replace(status, **asdict(judge_without_exit_code(run, explanation)))
    settled.write(run.folder)
    return settled
