"""Formats the numbers and tables of a report as text, and sums up its result in one sentence."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from policyc.base.text import count_noun, format_ratio
from policyc.experiments.report.values import JsonObject
from policyc.models.llama.configs import ACTIVITIES

FIGURES = (
    ("validation_loss", "validation loss"),
    ("validation_loss_evaluated_in_bf16", "its weights, evaluated in bf16"),
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
"""The figures of runs and variants, with their labels."""

TIME_NOTE = (
    "Goodput: the fraction of a run's time spent in steps that no restart had to repeat. Steps lost: those computed "
    "after the last checkpoint of a process that died."
)

MISSING = "–"
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def known_figures(rows: Sequence[JsonObject]) -> list[tuple[str, str]]:
    """The figures that at least one row has, with their labels. Skipped steps only count if there are any."""
    return [
        (name, label)
        for name, label in FIGURES
        if any((row[name] if name == "skipped_steps" else row[name] is not None) for row in rows)
    ]


def format_figure(name: str, value: float | None) -> str:
    """A figure of a run by its name: `step_seconds`, `memory_bytes`, and so on."""
    if value is None:
        return MISSING
    if name.endswith("_loss") or name == "validation_loss_evaluated_in_bf16":
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


def format_bounds(ratio: float | None, *, divisor: float = 1) -> str:
    """The two bounds of a predicted speed-up, over `divisor`."""
    if ratio is None:
        return MISSING
    from policyc.hardware.gemm_cost import speed_up_bounds  # loads JAX, as every prediction does

    return format_ratio(*(bound / divisor for bound in speed_up_bounds(ratio)), sign="×")


def speed_up_columns(data: JsonObject) -> dict[str, JsonObject]:
    """The predicted speed-ups of the variants by the title of their column: one for each backend."""
    predicted = data["speed_ups"]
    if predicted is None:
        return {}
    columns = {"predicted speed-up": predicted["values"]}
    if other := predicted["other"]:
        columns[f"with {other['backend']}"] = other["values"]
    return columns


def _format_duration(seconds: float) -> str:
    """Formats as seconds up to 100 s, then as minutes and seconds, then as hours and minutes."""
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def _with_prefix(value: float) -> str:
    """Formats with three digits and an SI prefix: `41.1 G`."""
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


def summarize(data: JsonObject) -> str:
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


# ---- tables


def time_table(data: JsonObject) -> tuple[list[str], list[list[str]]]:
    """Where the time of each run went: column titles, and one row per run that reported it."""
    runs = [run for variant in data["variants"] for run in variant["runs"] if run["seconds"]]
    names = [name for name in ACTIVITIES if any(run["seconds"].get(name) for run in runs)]
    rows = [
        [
            run["name"],
            format_figure("goodput", run["goodput"]),
            format_figure("duration", sum(run["seconds"].values())),
            *(format_figure("duration", run["seconds"].get(name)) for name in names),
            format_figure("restarts", run["restarts"]),
            format_figure("lost_steps", run["lost_steps"]),
        ]
        for run in runs
    ]
    return ["run", "goodput", "time", *(ACTIVITIES[name] for name in names), "restarts", "steps lost"], rows


def equal_loss_table(data: JsonObject) -> tuple[list[str], list[list[str]]]:
    """Time to an equal loss of each variant: column titles, and rows. Empty columns are left out.

    A predicted speed-up has two bounds. In parentheses: interval of the gap, and for times also these bounds.
    """
    rows = data["equal_loss"]
    kinds = [
        kind for kind in ("measured", "predicted") if any(row[f"{kind}_speed_up"] is not None for row in rows)
    ]
    has_bf16 = any(row["in_bf16"] for row in rows)
    cells = []
    for row in rows:
        bf16 = row["in_bf16"]
        speeds = []
        for kind in kinds:
            speed_up = row[f"{kind}_speed_up"]
            shown = format_bounds(speed_up) if kind == "predicted" else format_figure("ratio", speed_up)
            speeds += [shown, _format_times(_times(row, row, kind))]
            speeds += [_format_times(_times(row, bf16, kind))] if has_bf16 else []
        extra = [format_extra(row), *([format_extra(bf16)] if has_bf16 else [])]
        words = [describe_time(row)] if kinds else []
        cells.append([row["variant"], row["baseline"], f"{row['loss']:.4f}", *extra, *speeds, *words])

    def pair(title: str) -> list[str]:
        return [title, f"{title} in bf16"][: 1 + has_bf16]

    titles = ["variant", "baseline", "loss", *pair(f"extra {data['axis']}")]
    titles += [title for kind in kinds for title in (f"{kind} speed-up", *pair("to that loss"))]
    return [*titles, *(["in words"] if kinds else [])], cells


def equal_loss_notes(data: JsonObject) -> list[str]:
    """How the times to a loss are computed, in sentences."""
    sentences = [
        f"The loss is the higher one of the two. Extra {data['axis']}: what the variant needs beyond the baseline to "
        "reach the loss of the baseline, from their gap and an exchange rate. In parentheses: by the interval of the "
        "gap. In bf16: the weights of both, evaluated in bf16."
    ]
    if any(row[f"{kind}_speed_up"] for row in data["equal_loss"] for kind in ("measured", "predicted")):
        sentences.append(f"'To that loss' is the speed-up over the ratio of the {data['axis']}.")
    else:
        sentences.append("No speed was measured or predicted, so no time is known: --config predicts one.")
    curves = {row["curve"]: row for row in data["equal_loss"]}
    sentences.append(f"The exchange rate is that of {' and of '.join(curves)}.")
    if any(row["is_bound"] for row in curves.values()):
        sentences.append(
            "It is a bound: a run whose learning rate decays passes a loss before the end of its decay. A shorter run "
            f"would need fewer {data['axis']}, so the extra {data['axis']} are at least these, and the speed-up to "
            "that loss is at most this. Runs of several lengths (--curve) give an estimate."
        )
    if any(row["measured_speed_up"] for row in data["equal_loss"]):
        sentences.append("The measured speed of an emulated format says nothing about native GEMMs.")
    return sentences


def _times(row: JsonObject, cost: JsonObject | None, kind: str) -> tuple[list[float], list[float]] | None:
    """The speed-up to the loss, with its bounds, and its least and largest value by the interval; None if unknown."""
    speed_up = row[f"{kind}_speed_up"]
    if speed_up is None or cost is None or cost["token_ratio"] is None:
        return None
    ratio, interval = cost["token_ratio"], cost["token_interval"]
    bounds = [speed_up]
    if kind == "predicted":
        from policyc.hardware.gemm_cost import speed_up_bounds  # loads JAX, as every prediction does

        bounds = list(speed_up_bounds(speed_up))
    low, high = interval or (None, None)
    least = min(bounds) / high if high else 0.0
    most = max(bounds) / low if low else math.inf
    return [each / ratio for each in bounds], [least, most]


def _format_times(times: tuple[list[float], list[float]] | None) -> str:
    if times is None:
        return MISSING
    (least, most), text = times[1], format_ratio(*times[0], sign="×")
    return f"{text} ({least:.2f} to {most:.2f})" if math.isfinite(most) else text


def format_extra(cost: JsonObject | None) -> str:
    """The extra tokens with their interval: `+6.7% (+4.4 to +8.1)`."""
    if cost is None:
        return MISSING
    ratio, interval = cost["token_ratio"], cost["token_interval"]
    if ratio is None:
        return "more than the curve has"
    ends = ["more" if end is None else f"{100 * (end - 1):+.1f}" for end in interval or ()]
    interval = f" ({' to '.join(ends)})" if ends else ""
    return f"{ratio - 1:+.1%}{interval}".replace("-", "−")


def describe_time(row: JsonObject) -> str:
    """Whether a variant reaches the loss sooner, in words: by its predicted speed, otherwise by its measured one."""
    kind = "measured" if row["predicted_speed_up"] is None else "predicted"
    if row[f"{kind}_speed_up"] is None:
        return "no speed is known"
    is_faster = row[f"{kind}_speed_up"] > 1
    times = _times(row, row, kind)
    least, most = times[1] if times else (0.0, 0.0)
    if most < 1:
        return "faster per step, slower to the loss" if is_faster else "slower"
    if least > 1:
        return "sooner at best" if row["is_bound"] else "sooner"
    return "faster per step, to the loss not resolved" if is_faster else "not resolved"


def group_failures(runs: Sequence[JsonObject]) -> list[JsonObject]:
    """Groups the failed runs by reason. Each group lists every distinct log tail once."""
    groups: dict[str, list[JsonObject]] = {}
    for run in runs:
        if run["state"] == "failed":
            groups.setdefault(run["reason"], []).append(run)
    return [
        {"reason": reason, "runs": failed, "logs": _different_logs(failed)}
        for reason, failed in groups.items()
    ]


def _different_logs(runs: Sequence[JsonObject]) -> list[JsonObject]:
    """The distinct log tails of some runs, each with the name of the first run that has it."""
    logs: dict[tuple[str, ...], str] = {}
    for run in runs:
        logs.setdefault(tuple(run["log_tail"]), run["name"])
    return [{"lines": lines, "name": name} for lines, name in logs.items() if lines]
