"""Reads the folder of one run: its metrics as columns, and its other files.

Unreadable parts are left out, and listed in `problems`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from policyc.experiments.report.values import (
    JsonObject,
    as_number,
    as_numbers,
    as_object,
    as_objects,
    as_text,
    is_count,
    read_object,
    read_rows,
)
from policyc.experiments.sweep.run import LOG_FILE, METRICS_FILE, STATUS_FILE, RunEnd, tail_lines

Column = NDArray[np.float64]

LAST_LINES = 12  # of the log of a failed run

_ALIASES = {"val_loss": "validation_loss", "tokens_per_second": "tokens_per_second_total"}
"""Alternative names of metrics, mapped to ours."""

STEP_METRICS = (
    "loss", "grad_norm", "learning_rate", "step_seconds", "stall_seconds", "tokens_per_second_per_device",
    "tokens_per_second_total", "tflops_per_device", "mfu", "memory_bytes", "skipped", "tokens",
)  # fmt: skip
EVALUATION_METRICS = ("validation_loss", "validation_loss_evaluated_in_bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Metrics over steps: columns of equal length, NaN where a line has no number."""

    step: Column
    columns: dict[str, Column]

    def column(self, name: str) -> Column | None:
        """A metric, or None if no line has it."""
        return self.columns.get(name)

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """The files of a run, as far as they could be read.

    Attributes:
      steps: one row per training step; the last line of a step counts. Of a long run, a row stands for several steps.
      figures: what was computed from all steps.
      evaluations: one row per validation.
      account: the last metrics line that says where the time of the run went; empty if there is none.
      stats: rows of `stats.jsonl`.
      plan, about, status: `plan.json`, `run.json` and `status.json`.
      log_tail: the last lines of `log.txt`.
      planned_steps: the step at which the run is complete; None if it is not known.
      end: how the run ended, judged together with the other runs of its sweep.
    """

    folder: Path
    variant: str
    seed: int | None
    steps: Table
    evaluations: Table
    figures: JsonObject = field(default_factory=dict)
    account: JsonObject = field(default_factory=dict)
    stats: tuple[JsonObject, ...] = ()
    plan: JsonObject | None = None
    about: JsonObject = field(default_factory=dict)
    status: JsonObject = field(default_factory=dict)
    log_tail: tuple[str, ...] = ()
    planned_steps: int | None = None
    problems: tuple[str, ...] = ()
    end: RunEnd = RunEnd(state="unfinished")

    @property
    def name(self) -> str:
        """The name for display, such as `te_nvfp4 seed 3`."""
        return self.variant if self.seed is None else f"{self.variant} seed {self.seed}"

    @property
    def last_step(self) -> int:
        return int(self.steps.step[-1]) if len(self.steps) else 0

    @property
    def devices(self) -> int | None:
        count = self.about.get("devices")
        return count if isinstance(count, int) and is_count(count) and count > 0 else None

    def tokens_at(self, steps: Column) -> Column | None:
        """The number of tokens seen after each of some steps; None if it is not known.

        Interpolated between the logged steps. A validation after the last of them is placed at the mean rate.
        """
        column = self.steps.column("tokens")
        if column is None or not len(column) or not np.isfinite(column).all():
            return None
        between = np.interp(steps, [0, *self.steps.step], [0, *column])
        after = np.maximum(steps - self.last_step, 0) * (column[-1] / max(self.last_step, 1))
        return np.asarray(between + after, float)


def read_run(
    folder: Path, *, variant: str, seed: int | None = None, planned_steps: int | None = None
) -> RunData:
    """Reads what a run has written so far. A folder without metrics is a run without steps."""
    problems: list[str] = []
    steps, evaluations = _Columns(STEP_METRICS, "loss"), _Columns(EVALUATION_METRICS, "validation_loss")
    account: JsonObject = {}
    for row in read_rows(folder / METRICS_FILE, problems):
        for alias, name in _ALIASES.items():
            if alias in row:
                row[name] = row.pop(alias)
        steps.append(row)
        evaluations.append(row)
        if as_object(row.get("seconds")):
            account = row
    about = read_object(folder / "run.json", problems) or {}
    status = read_object(folder / STATUS_FILE, problems) or {}
    settings = as_object(about.get("settings"))
    if planned_steps is None and is_count(settings.get("steps")):
        planned_steps = settings["steps"]
    has_failed = status.get("state") in ("failed", "preempted")
    stats = tuple(read_rows(folder / "stats.jsonl", problems))
    problems += filter(None, [describe_zero_gradients(stats)])
    return RunData(
        folder=folder,
        variant=variant,
        seed=seed,
        steps=steps.table(),
        evaluations=evaluations.table(),
        account=account,
        stats=stats,
        plan=_read_plan(folder / "plan.json", problems),
        about=about,
        status=status,
        log_tail=_read_log_tail(folder / LOG_FILE, problems) if has_failed else (),
        planned_steps=planned_steps,
        problems=tuple(problems),
    )


def describe_zero_gradients(rows: Iterable[JsonObject]) -> str:
    """Names the parameters whose gradient is zero only under the policy; empty if there are none."""
    layers: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.get("is_zero"):
            layers.setdefault(str(row.get("parameter")), {})[str(row.get("layer"))] = None
    names = (
        f"'{name}'" + (f" (layers {', '.join(at)})" if "None" not in at else "")
        for name, at in layers.items()
    )
    return f"under the policy, the gradient of {', '.join(names)} is zero" if layers else ""


class _Columns:
    """Collects the rows that have one metric, as columns: 8 bytes a number."""

    def __init__(self, names: Sequence[str], required: str) -> None:
        self._required = required
        self._columns = {name: array("d") for name in ("step", *names)}
        self._appends = [(name, column.append) for name, column in self._columns.items()]

    def append(self, row: JsonObject) -> None:
        if self._required in row:
            for name, append in self._appends:
                value = row.get(name, math.nan)
                if type(value) is not float:  # the usual case
                    number = as_number(value)
                    value = math.nan if number is None else number
                append(value)

    def table(self) -> Table:
        """The rows, sorted by step. If a step was run again, the last row counts."""
        columns = {name: as_numbers(np.array(column)) for name, column in self._columns.items()}
        steps = columns.pop("step")
        unique, last = np.unique(steps[::-1], return_index=True)
        if len(unique) < len(steps) or (np.diff(steps) < 0).any():
            columns = {name: column[::-1][last] for name, column in columns.items()}
        known = {n: c for n, c in columns.items() if n == self._required or not np.isnan(c).all()}
        return Table(step=unique, columns=known)


def _read_plan(path: Path, problems: list[str]) -> JsonObject | None:
    text = read_object(path, problems)
    if text is not None and not as_objects(text.get("sites")):
        problems.append(f"{path.name} is not a plan with sites")
        return None
    return text


def _read_log_tail(path: Path, problems: list[str]) -> tuple[str, ...]:
    try:
        return tuple(as_text(line) for line in tail_lines(path, LAST_LINES))
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return ()


def judge_run(run: RunData, longest: int) -> RunEnd:
    """How a run ended, from its metrics and its status. `longest` is the last step of any run of the sweep.

    A run without a status and without a known number of steps is taken as finished if no other run went further.
    """
    target = run.planned_steps or longest
    progress = f"step {run.last_step:,} of {target:,}"
    if reason := run.figures["divergence"]:
        return RunEnd(state="failed", reason=reason, diverged=True)
    state, reason = run.status.get("state"), as_text(run.status.get("reason"))
    if state == "failed":
        return RunEnd(state="failed", reason=reason or "no reason is known")
    if state in ("running", "preempted"):
        return RunEnd(state="unfinished", reason=f"{state}, {progress}")
    if not len(run.steps):
        if state == "finished":
            return RunEnd(state="failed", reason=f"it has finished, but its {METRICS_FILE} has no steps")
        return RunEnd(state="unfinished", reason="not started")
    if run.figures["lost_lines"]:
        return RunEnd(state="unfinished", reason=run.figures["lost_lines"])
    if state == "finished" or run.last_step >= target:
        return RunEnd(state="finished")
    return RunEnd(state="unfinished", reason=progress)
