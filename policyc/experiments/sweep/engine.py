"""Executes the runs of a sweep until all have ended, and continues what an earlier sweep left unfinished.

The engine keeps no state: everything is in the folders of the runs. Killing it loses nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from policyc.base.text import count_noun
from policyc.experiments.sweep.live import SweepDisplay
from policyc.experiments.sweep.local import Executor
from policyc.experiments.sweep.locks import note_signals
from policyc.experiments.sweep.progress import SweepResult, TrackedRun, settle_lost
from policyc.experiments.sweep.run import RunStatus

_POLL_SECONDS = 0.5
_MOST_EARLY_FAILURES = 3  # runs in a row that fail before their first step: the others would fail too


class Engine:
    """Starts runs as slots become free, and watches them."""

    def __init__(self, tracked: Sequence[TrackedRun], executor: Executor, display: SweepDisplay) -> None:
        self._tracked, self._executor, self._display = tuple(tracked), executor, display
        # The first signal stops the runs cleanly. A second one ends the sweep at once.
        self._signals: list[int] = []
        self._early_failures = 0

    def run(self) -> SweepResult:
        """Runs everything that is waiting. Returns when all runs have ended, or after an interrupt."""
        with note_signals() as self._signals:
            self._adopt_active()
            self._start_waiting()
            while self._select("running") and not self._signals:
                self._display.refresh()
                time.sleep(_POLL_SECONDS)
                self._watch()
                if not self._signals and self._may_start():
                    self._start_waiting()
            self._stop_all()
        if self._signals:
            return SweepResult(runs=self._tracked, stopped="interrupted")
        return SweepResult(runs=self._tracked, stopped="early failures" if self._select("waiting") else "")

    def _may_start(self) -> bool:
        """False after several early failures, unless a run is past its first step: then the program itself works."""
        has_progress = any(run.step for run in self._select("running"))
        return has_progress or self._early_failures < _MOST_EARLY_FAILURES

    def _select(self, progress: str) -> list[TrackedRun]:
        return [run for run in self._tracked if run.progress == progress]

    def _adopt_active(self) -> None:
        """Takes over the jobs of an earlier sweep that are still in Slurm's queue."""
        adopted = [run for run in self._select("waiting") if self._executor.is_active(run.run)]
        for run in adopted:
            run.progress = "running"
        if adopted:
            self._display.say(f"{count_noun(len(adopted), 'run')} of an earlier sweep taken over")
        for run in self._select("waiting"):
            if run.status is not None and run.status.state == "running":
                self._settle_earlier(run, run.status)

    def _settle_earlier(self, run: TrackedRun, status: RunStatus) -> None:
        """Settles a run of an earlier sweep whose end is unknown: it runs again, unless it is complete or diverged."""
        run.status = settle_lost(run.run, status)
        if run.status.state == "finished" or run.status.diverged:
            run.progress = run.status.state
            self._display.say(f"{run.run.name} is not run again: {run.status.reason}")
        else:
            self._display.say(f"{run.run.name} is run again: {run.status.reason}")

    def _start_waiting(self) -> None:
        free = self._executor.slots - len(self._select("running"))
        for run in self._select("waiting")[: max(0, free)]:
            self._executor.start(run.run)
            run.progress = "running"
            self._display.start(run)

    def _watch(self) -> None:
        for run in self._select("running"):
            is_active = self._executor.is_active(run.run)  # before its metrics are read for the last time
            run.metrics.update()
            if not is_active:
                self._settle(run)
                self._display.end(run)

    def _settle(self, run: TrackedRun) -> None:
        """Reads how a run ended. If its status is still `running`, judges from its metrics."""
        status = RunStatus.read(run.run.folder)
        if status is None or status == run.status:  # left by an earlier attempt
            reason = f"it did not start: {self._executor.explain(run.run)}"
            status = RunStatus(state="failed", command=run.run.command, reason=reason)
        elif status.state == "running":
            status = settle_lost(run.run, status, self._executor.explain(run.run))
        run.status, run.progress = status, status.state
        is_early = status.state == "failed" and run.step == 0
        self._early_failures = self._early_failures + 1 if is_early else 0

    # ---- stopping

    def _stop_all(self) -> None:
        """Stops the runs, and waits while they finish a step and save. Jobs of Slurm go on instead."""
        active = self._select("running")
        if text := self._executor.stop([run.run for run in active]):
            self._display.say(text)
            return
        if active:
            stopping = count_noun(len(active), "run")
            self._display.say(f"stopping {stopping}, with time to save; Ctrl-C again to quit at once")
        with contextlib.suppress(KeyboardInterrupt):
            while self._select("running"):
                self._watch()
                self._display.refresh()
                time.sleep(_POLL_SECONDS)
