"""Numbers of a report as text, and its result in one sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from policyc.base.text import count_noun
from policyc.experiments.report.values import Record

FIGURES = (
    ("validation_loss", "validation loss"),
    ("validation_loss_plain", "in plain bf16"),
    ("trailing_loss", "trailing loss"),
    ("loss_spikes", "loss spikes"),
    ("gradient_spikes", "gradient spikes"),
    ("skipped_steps", "skipped steps"),
    ("step_seconds", "step time"),
    ("tokens_per_second", "tokens/s"),
    ("mfu", "MFU"),
    ("memory_bytes", "peak memory"),
    ("stall_fraction", "stalls"),
    ("goodput", "goodput"),
)
"""The figures of runs and variants, and what they are called."""

ACTIVITIES = {
    "step": "steps",
    "stall": "data",
    "compile": "compiling",
    "checkpoint": "checkpoints",
    "eval": "validation",
    "export": "exports",
    "start": "starting",
    "other": "other",
    "lost": "lost steps",
    "down": "between restarts",
}
"""What the time of a run is spent on, and what it is called."""

TIME_NOTE = (
    "Goodput: the part of a run's time in steps that count, which no restart had to repeat. Lost steps: computed after "
    "the last checkpoint of a process that died."
)

MISSING = "–"
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def known_figures(rows: Sequence[Record]) -> list[tuple[str, str]]:
    """The figures that some row has. Skipped steps are shown if there are any."""
    return [
        (name, label)
        for name, label in FIGURES
        if any((row[name] if name == "skipped_steps" else row[name] is not None) for row in rows)
    ]


def format_figure(name: str, value: float | None) -> str:
    """A figure of a run by its name: `step_seconds`, `memory_bytes`, and so on."""
    if value is None:
        return MISSING
    if name.endswith("_loss") or name == "validation_loss_plain":
        return f"{value:.4f}"
    if name.endswith(("_spikes", "_steps")) or name == "restarts":
        return f"{value:,.0f}"
    if name == "ratio":
        return f"{value:.2f}×"
    if name == "step_seconds":
        return f"{_with_prefix(value)}s" if value >= 0.9995 else f"{_with_prefix(1000 * value)}ms"
    if name == "duration":
        return _format_duration(value)
    if name in ("mfu", "stall_fraction", "goodput"):
        return f"{value:.1%}" if value >= 0.001 or value == 0 else "< 0.1%"
    if name == "memory_bytes":
        return f"{_with_prefix(value)}B"
    return _with_prefix(value).strip()


def _format_duration(seconds: float) -> str:
    """Seconds below a hundred of them, else hours and minutes."""
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def _with_prefix(value: float) -> str:
    """Three digits and a prefix: 41.1 G."""
    for size, prefix in _PREFIXES:
        if abs(value) >= 0.9995 * size:
            number = value / size
            digits = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
            return f"{number:.{digits}f} {prefix}"
    return f"{value:.3g} "


def format_gap(gap: float | None) -> str:
    return MISSING if gap is None else f"{gap:+.4f}".replace("-", "−")


def format_interval(interval: Sequence[float] | None) -> str:
    return MISSING if interval is None else f"{format_gap(interval[0])} to {format_gap(interval[1])}"


def summarize(data: Record) -> str:
    """The result of a report in one sentence."""
    runs = [run for variant in data["variants"] for run in variant["runs"]]
    if len(runs) == 1:
        run = runs[0]
        name, loss = next(
            ((n, run[n]) for n in ("validation_loss", "trailing_loss") if run[n] is not None), ("", None)
        )
        if loss is None:
            return f"{run['name']}: {run['reason'] or 'no finite loss'}"
        return f"{run['name']}: {name.replace('_', ' ')} {loss:.4f} at step {run['last_step']:,}"
    waiting = sum(run["state"] == "unfinished" for run in runs)
    if waiting:
        return f"{len(runs) - waiting} of {len(runs)} runs have ended"
    baselines = data["statistics"]["baselines"]
    rows = [row for row in data["comparisons"] if baselines and row["baseline"] == baselines[0]]
    if not rows:
        return f"{len(runs)} runs"
    counts = Counter(row["verdict"] for row in rows)
    texts = {
        "parity": "at parity", "better": "better", "worse": "worse", "inconclusive": "inconclusive", "failed": "failed",
    }  # fmt: skip
    listed = ", ".join(f"{counts[key]} {text}" for key, text in texts.items() if counts[key])
    return f"{count_noun(len(rows), 'variant')} against {baselines[0]}: {listed}"
