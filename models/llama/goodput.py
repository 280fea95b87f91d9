"""Where the time of a run goes, including the processes before a restart.

Goodput is the fraction of a run's time spent in steps that no restart had to repeat.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from policyc.models.llama.configs import ACTIVITIES
from policyc.models.llama.run_files import Row, read_lines

Clock = Callable[[], float]

# Activities that interrupt the steps, as the progress line names them.
PAUSES = {"checkpoint": "the checkpoint", "eval": "validation", "export": "the export", "other": "telemetry"}
# Lowering and XLA's compilation. Tracing is excluded: the durations of nested traces overlap.
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILE_EVENTS = (LOWERED, "/jax/core/compile/backend_compile_duration")


class TimeAccount:
    """The seconds of a run by activity. Every moment of its processes belongs to one activity.

    Attributes:
      seconds: keyed by the names in ACTIVITIES.
      restarts: how often the run was restarted.
      lost_steps: steps that had to be computed again. Only steps whose metrics were written are counted.
      on_lowered: called when JAX has lowered a function, before XLA compiles it.
    """

    def __init__(self, clock: Clock = time.perf_counter, wall_clock: Clock = time.time) -> None:
        self.clock: Clock = clock
        self.wall_clock: Clock = wall_clock
        self.seconds: dict[str, float] = dict.fromkeys(ACTIVITIES, 0.0)
        self.restarts: int = 0
        self.lost_steps: int = 0
        self.on_lowered: Callable[[], None] | None = None
        self._activity, self._since, self._started_at = "start", clock(), wall_clock()
        self._claims: list[tuple[float, float]] = []  # disjoint intervals after `_since`, in order
        self._thread = threading.get_ident()

    def switch(self, activity: str) -> str:
        """Counts time from now on for this activity. Returns the previous one."""
        now, before = self.clock(), self._activity
        self.seconds[before] += now - self._since - sum(end - begin for begin, end in self._claims)
        self._activity, self._since, self._claims = activity, now, []
        return before

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        before = self.switch(activity)
        try:
            yield
        finally:
            self.switch(before)

    def claim(self, activity: str, seconds: float) -> None:
        """Counts the last seconds for another activity, except time before the last `switch` or already claimed."""
        now = self.clock()
        begin = max(now - seconds, self._since)
        claimed = sum(max(0.0, end - max(start, begin)) for start, end in self._claims)
        self.seconds[activity] += now - begin - claimed
        before = [(start, end) for start, end in self._claims if end <= begin]
        first = min([start for start, end in self._claims if end > begin] + [begin])
        self._claims = [*before, (first, now)]

    @contextmanager
    def watch_compilation(self) -> Iterator[None]:
        """Counts the compilation time of this thread as "compile", whatever the current activity is.

        The lowering time that JAX reports may include compilations that it also reports separately: `claim` counts
        them once. Compilation in other threads takes no time from this one.
        """

        def listen(event: str, duration_secs: float, **_: str | int) -> None:
            if event in COMPILE_EVENTS and threading.get_ident() == self._thread:
                self.claim("compile", duration_secs)
                if event == LOWERED and self.on_lowered is not None:
                    self.on_lowered()

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)

    def as_row(self) -> Row:
        """The account so far, as fields of a line of metrics."""
        self.switch(self._activity)
        total = sum(self.seconds.values())
        seconds = {name: round(value, 3) for name, value in self.seconds.items()}
        goodput = self.seconds["step"] / total if total else 0.0
        return {
            "goodput": goodput,
            "seconds": seconds,
            "restarts": self.restarts,
            "lost_steps": self.lost_steps,
        }

    def resume(self, path: Path, start: int) -> None:
        """Adds the time of the processes before this one, from their metrics. This one continues after step `start`."""
        rows = _read_last_rows(path, start)
        if not rows:
            return
        account, kept = rows[0], [row for row in rows if row["step"] <= start]
        self.restarts += 1
        self.lost_steps += sum("loss" in row for row in rows if row["step"] > start)
        for name in self.seconds:
            self.seconds[name] += account["seconds"].get(name, 0.0)
        self.restarts += account["restarts"]
        self.lost_steps += account["lost_steps"]
        stall, steps = (sum(row.get(f"{name}_seconds", 0.0) for row in kept) for name in ("stall", "step"))
        self.seconds["stall"] += stall
        self.seconds["step"] += steps - stall
        self.seconds["other"] += max(0.0, kept[-1]["time"] - account["time"] - steps)
        self.seconds["lost"] += max(0.0, rows[-1]["time"] - kept[-1]["time"])
        if not rows[-1].get("is_complete"):  # a complete run was not down: it had ended
            self.seconds["down"] += max(0.0, self._started_at - rows[-1]["time"])

    def __str__(self) -> str:
        row = self.as_row()
        others = sorted(((s, name) for name, s in row["seconds"].items() if name != "step"), reverse=True)
        texts = [f"{seconds:.1f} s {ACTIVITIES[name]}" for seconds, name in others if seconds >= 0.05]
        total = f"{row['seconds']['step']:.1f} of {sum(row['seconds'].values()):.1f} s in steps"
        return f"goodput {row['goodput']:.1%}: {total}" + "".join(f", {text}" for text in texts)


def _read_last_rows(path: Path, start: int) -> list[Row]:
    """The lines of metrics from the last account at or before step `start` to the end, without damaged lines."""
    rows = [row for _, row in read_lines(path) if row and _has_numbers(row)]
    accounts = [number for number, row in enumerate(rows) if _is_account(row, start)]
    return rows[accounts[-1] :] if accounts else []


def _has_numbers(row: Row) -> bool:
    numbers = [row.get("time"), *(row.get(f"{name}_seconds", 0.0) for name in ("stall", "step"))]
    return all(isinstance(each, int | float) for each in numbers)


def _is_account(row: Row, start: int) -> bool:
    """Whether a line is an account at or before step `start`, of which no value is damaged."""
    seconds, counts = row.get("seconds"), [row.get(name) for name in ("restarts", "lost_steps")]
    return (
        row["step"] <= start
        and isinstance(seconds, dict)
        and all(isinstance(each, int | float) for each in seconds.values())
        and all(isinstance(each, int) for each in counts)
    )
