"""Shows a sweep: a live table in a terminal (otherwise a line for each event), and the failures at the end."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from policyc.base.text import escape_controls, format_seconds
from policyc.experiments.sweep.metrics import MetricsReader, trailing_steps
from policyc.experiments.sweep.progress import SweepResult, TrackedRun
from policyc.experiments.sweep.run import LOG_FILE, tail_lines

_REFRESH_SECONDS = 2.0  # gaps are computed again this often
_LOG_LINES = 8  # lines of a failed run that are shown


# ---- losses, and gaps to a baseline paired by seed and step


def metrics_by_seed(runs: Sequence[TrackedRun], variant: str) -> dict[int, MetricsReader]:
    """The metrics of a variant by seed."""
    return {run.run.seed: run.metrics for run in runs if run.run.variant == variant}


def trailing_loss(reader: MetricsReader) -> float:
    """The mean loss of the last steps; NaN before the first."""
    steps = _last_steps(reader, reader)
    return math.fsum(reader.losses[step] for step in steps) / len(steps) if steps else math.nan


def compute_gaps(runs: Sequence[TrackedRun], variant: str, baseline: str) -> list[float]:
    """The gap of a variant to a baseline for each seed that both have, up to the last step that both have.

    Failed runs have no gap.
    """
    runs = [run for run in runs if run.progress != "failed"]
    base = metrics_by_seed(runs, baseline)
    differences = []
    for seed, reader in metrics_by_seed(runs, variant).items():
        steps = _last_steps(reader, base[seed]) if seed in base else []
        if steps:
            pairs = (reader.losses[step] - base[seed].losses[step] for step in steps)
            differences.append(math.fsum(pairs) / len(steps))
    return differences


def _last_steps(one: MetricsReader, other: MetricsReader) -> list[int]:
    """The last steps for which two runs both have a loss, as many as the report averages."""
    last = min(one.step, other.step)
    count = trailing_steps(min(len(one.losses), len(other.losses)))
    common = (step for step in reversed(one.losses) if step <= last and step in other.losses)
    return list(islice(common, count))


# ---- the display


class SweepDisplay:
    """Context manager that shows a sweep: a live table in a terminal, otherwise a line when a run starts or ends."""

    def __init__(self, console: Console, runs: Sequence[TrackedRun], baselines: Sequence[str]) -> None:
        self._console, self._runs, self._baselines = console, tuple(runs), tuple(baselines)
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._next = 0.0
        self._begin = time.monotonic()
        self._steps_before = sum(run.step for run in runs)

    def __enter__(self) -> SweepDisplay:
        if self._live is not None:
            self._live.start()
            self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.update("", refresh=True)  # the summary of the sweep follows
            self._live.stop()

    def start(self, run: TrackedRun) -> None:
        """Shows that a run was started."""
        if self._live is None:
            self.say(f"{run.run.name}: started")
        self._draw()

    def end(self, run: TrackedRun) -> None:
        """Shows how a run ended."""
        if self._live is None:
            gaps = [(b, compute_gaps(self._runs, run.run.variant, b)) for b in self._baselines]
            shown = [f"gap to {b} {format_gaps(gap)}" for b, gap in gaps if gap and b != run.run.variant]
            self.say("; ".join([describe_end(run), *shown]))
            self.say(self.summary())
        elif run.progress != "finished":
            self.say(describe_end(run))
        self._draw()

    def refresh(self) -> None:
        """Redraws the table if it is out of date. Called about twice a second."""
        if time.monotonic() >= self._next:
            self._draw()

    def say(self, text: str, indent: str = "", style: str = "") -> None:
        """Prints a message."""
        self._console.print(Text(indent + escape_controls(text), style=style), soft_wrap=True)

    def _draw(self) -> None:
        if self._live is not None:
            self._next = time.monotonic() + _REFRESH_SECONDS
            self._live.update(Group(self.table(), Text(self.summary(), style="dim")), refresh=True)

    def print_result(self, result: SweepResult) -> None:
        """Prints the table, and every run that failed with the last lines of its log."""
        self._console.print(self.table())
        self.say(self.summary(is_over=True))
        for run in result.failed:
            log = run.run.folder / LOG_FILE
            self.say(describe_end(run), indent="\n", style="bold red")
            for line in (*tail_lines(log, _LOG_LINES), str(log)):
                self.say(line, indent="    ")

    # ---- what it shows

    def summary(self, *, is_over: bool = False) -> str:
        """One line: how many runs are in which state, and the time left unless the sweep is over."""
        states = Counter(run.progress for run in self._runs)
        counts = [f"{states['finished']} of {len(self._runs)} runs finished"]
        counts += [
            f"{states[state]} {state}" for state in ("running", "failed", "preempted") if states[state]
        ]
        left = None if is_over else self.seconds_left()
        return ", ".join(counts) + ("" if left is None else f"; about {format_seconds(left)} left")

    def seconds_left(self) -> float | None:
        """Estimated from the steps since this sweep was started, compilation included; None if unknown."""
        open_runs = [run for run in self._runs if run.progress in ("running", "waiting")]
        steps = sum(run.step for run in self._runs) - self._steps_before
        if steps <= 0 or not open_runs or any(run.run.steps is None for run in open_runs):
            return None
        remaining = sum((run.run.steps or 0) - run.step for run in open_runs)
        return remaining * (time.monotonic() - self._begin) / steps

    def table(self) -> Table:
        """One row per variant."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("variant", overflow="fold")
        gaps = [f"gap to {escape_controls(name)}" for name in self._baselines]
        for name in ("runs", "step", "loss", *gaps):
            table.add_column(Text(name), justify="right", no_wrap=True)
        for variant in dict.fromkeys(run.run.variant for run in self._runs):
            table.add_row(Text(escape_controls(variant)), *self._cells(variant))
        return table

    def _cells(self, variant: str) -> list[RenderableType]:
        runs = [run for run in self._runs if run.run.variant == variant]
        finished, failed = (sum(run.progress == state for run in runs) for state in ("finished", "failed"))
        counts = Text(f"{finished}/{len(runs)}")
        if failed:
            counts.append(f" {failed} failed", style="bold red")
        alive = [run for run in runs if run.progress != "failed"]
        losses = [
            trailing_loss(reader) for reader in metrics_by_seed(alive, variant).values() if reader.losses
        ]
        loss = f"{math.fsum(losses) / len(losses):.4f}" if losses else "-"
        gaps = [compute_gaps(self._runs, variant, b) if b != variant else [] for b in self._baselines]
        return [counts, _step_text(runs), loss, *map(format_gaps, gaps)]


def _step_text(runs: Sequence[TrackedRun]) -> str:
    """The steps of the active runs; if none is active, the furthest step reached."""
    running = [run for run in runs if run.progress == "running"]
    if running:
        total = running[0].run.steps
        return ", ".join(str(run.step) for run in running) + ("" if total is None else f"/{total}")
    return str(max(run.step for run in runs)) if any(run.step for run in runs) else "-"


def format_gaps(gaps: Sequence[float]) -> str:
    """`+0.0123 ±0.0040 (3)`: mean, half of the 95 % interval of at least two seeds, and the number of seeds."""
    if not gaps:
        return "-"
    mean = math.fsum(gaps) / len(gaps)
    if len(gaps) < 2:
        return f"{mean:+.4f} (1)"
    from policyc.experiments.statistics import paired_interval

    low, high = paired_interval(gaps)
    return f"{mean:+.4f} ±{float(high - low) / 2:.4f} ({len(gaps)})"


def describe_end(run: TrackedRun) -> str:
    """One line about a run that ended."""
    status = run.status
    text = f"{run.run.name}: {run.progress}"
    if status is None:
        return text
    if run.progress == "preempted" or status.diverged:
        return f"{text}, {status.reason}"
    if run.progress != "finished":
        return f"{text} at step {run.step}: {status.reason}"
    return f"{text}, loss {trailing_loss(run.metrics):.4f}, {format_seconds(status.seconds)}"
