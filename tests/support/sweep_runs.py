"""Sweeps without processes: an executor that writes the files of its runs itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from policyc.experiments.sweep.run import METRICS_FILE, Run, RunStatus, State

Behaviour = Callable[[Run], tuple[State, list[float]]]
"""The outcome of a run: the state in which it ends, and its losses until then."""


def write_metrics(folder: Path, losses: Sequence[float], *, tokens: int | None = 100, **extra: float) -> Path:
    """Writes one line per step. `extra` is the same in every step."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"step": n, "loss": float(loss), **extra} for n, loss in enumerate(losses, start=1)]
    for row in rows if tokens is not None else ():
        row["tokens"] = tokens * row["step"]
    (folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def write_status(folder: Path, state: State, **values: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    status = {"state": state, "started": "2026-01-01T00:00:00+00:00", "command": ["x"], "host": "h"}
    (folder / "status.json").write_text(json.dumps({**status, **values}), encoding="utf-8")


class FakeExecutor:
    """Ends every run one poll after its start, as `behave` says. Runs of variant `lasting` end when stopped."""

    def __init__(self, behave: Behaviour, slots: int = 1, lasting: str = "") -> None:
        self._lasting = lasting
        self.slots = slots
        self.started: list[str] = []
        self.stopped: list[str] = []
        self.left = ""  # the work that is left running after an interrupt
        self.most_active = 0
        self._behave = behave
        self._active: dict[Path, Run] = {}

    def start(self, run: Run) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        self.started.append(run.name)
        self._active[run.folder] = run
        self.most_active = max(self.most_active, len(self._active))

    def is_active(self, run: Run) -> bool:
        if run.variant == self._lasting and run.name not in self.stopped:
            return run.folder in self._active
        if self._active.pop(run.folder, None) is None:
            return False
        state, losses = self._behave(run)
        write_metrics(run.folder, losses)
        write_status(run.folder, state, reason="a reason", diverged=False, seconds=1.0)
        return False

    def explain(self, run: Run) -> str:
        return f"see the jobs of {run.name}"

    def stop(self, runs: Sequence[Run]) -> str:
        self.stopped += [] if self.left else [run.name for run in runs]
        return self.left


class SilentDisplay:
    """Records the lines that it is told to show."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def start(self, run: object) -> None: ...

    def end(self, run: object) -> None: ...

    def refresh(self) -> None: ...

    def say(self, text: str) -> None:
        self.lines.append(text)


def make_run(out: Path, variant: str = "bf16", seed: int = 0, steps: int | None = 3) -> Run:
    folder = out / variant / f"seed{seed}"
    return Run(
        variant=variant, seed=seed, folder=folder, command=("true",), environment={}, cwd=out, steps=steps
    )


def read_state(folder: Path) -> str:
    status = RunStatus.read(folder)
    return "none" if status is None else status.state
