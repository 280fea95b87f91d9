"""The loss gap of each policy over its predicted speed-up, as an SVG picture. Drawn by matplotlib."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from policyc.experiments.report.sweeps import UnreadableRun
from policyc.experiments.report.values import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _QUIET, _LINE, _ZONE = "#1b1f24", "#57606a", "#d8dee4", "#009e73"
_DARK = {_INK: "#e6edf3", _QUIET: "#9aa5b1", _LINE: "#2d343d"}
"""The colors of text and lines on a dark page, by those on a light one."""

_POINTS = {
    "worse": "#d55e00", "parity": "#009e73", "better": "#0072b2", "inconclusive": "#57606a", "failed": "#a40e26",
}  # fmt: skip


_Label = tuple[float, float, str]
"""Where a point is, and its name."""


def draw_speed_chart(data: Record) -> str:
    """The chart of a report with predicted speed-ups. Raises UnreadableRun if it has none, or no gaps."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UnreadableRun("--svg needs the package 'matplotlib': pip install 'policyc[plots]'") from None
    import matplotlib as mpl

    if not data["speed_ups"] or not data["statistics"]["baselines"]:
        raise UnreadableRun("--svg needs a sweep with a baseline, and its policies")
    baseline = data["statistics"]["baselines"][0]
    speed_ups = data["speed_ups"]["values"]
    rows = [
        row
        for row in data["comparisons"]
        if row["baseline"] == baseline and row["gap"] is not None and row["variant"] in speed_ups
    ]
    if not rows:
        raise UnreadableRun(f"no variant has a gap to {baseline} and a predicted speed-up")
    # The same text for the same data: no date, and identifiers from a fixed salt. Text stays text.
    settings: Any = {
        "svg.hashsalt": "policyc",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 10,
    }
    with mpl.rc_context(settings):
        figure = Figure(figsize=(7.2, 4.0), layout="constrained")
        axes = figure.add_subplot()
        labels = _draw(axes, rows, speed_ups, baseline)
        axes.set_xlabel(f"predicted speed-up over {baseline}, {data['speed_ups']['step']}", color=_INK)
        figure.draw_without_rendering()  # lays the figure out, so that texts have extents
        _place_labels(axes, labels)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    return _adapt_to_theme(stream.getvalue())


def _draw(axes: Axes, rows: list[Record], speed_ups: dict[str, float], baseline: str) -> list[_Label]:
    """Draws points, intervals and margin. Returns the labels of the points."""
    margin = next((row["margin"] for row in rows if row["margin"] is not None), None)
    if margin is not None:
        axes.axhspan(-margin, margin, color=_ZONE, alpha=0.14, linewidth=0, label="margin of parity")
    labels = [(1.0, 0.0, baseline)]
    axes.plot([1], [0], "o", color=_QUIET)
    named: set[str] = set()  # verdicts that the legend has
    for row in rows:
        x, color = speed_ups[row["variant"]], _POINTS[row["verdict"]]
        label = None if row["verdict"] in named else row["verdict"]
        named.add(row["verdict"])
        low, high = row["interval"] or (row["gap"], row["gap"])
        axes.errorbar(
            [x],
            [row["gap"]],
            [[row["gap"] - low], [high - row["gap"]]],
            fmt="o",
            color=color,
            capsize=3,
            label=label,
        )
        labels.append((x, row["gap"], row["variant"]))
    axes.margins(x=0.16, y=0.12)
    axes.legend(loc="upper left", frameon=False, fontsize=9, labelcolor=_INK)
    axes.set_ylabel(f"loss gap to {baseline}, nats", color=_INK)
    axes.grid(color=_LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_QUIET, length=0)
    axes.xaxis.set_major_formatter("{x:.2f}×")
    for spine in axes.spines.values():
        spine.set_visible(False)
    return labels


_PLACES = ((8, -3), (-8, -3), (8, 9), (8, -15), (-8, 9), (-8, -15))  # points beside, above and below


def _place_labels(axes: Axes, labels: list[_Label]) -> None:
    """Writes each name beside its point, at the first place where it covers no point and no other name."""
    from matplotlib.transforms import Bbox

    radius = 6  # pixels of a point
    centers = axes.transData.transform([(x, y) for x, y, _ in labels])
    taken: list[Any] = [Bbox.from_bounds(x - radius, y - radius, 2 * radius, 2 * radius) for x, y in centers]
    for x, y, name in sorted(labels):
        for offset in _PLACES:
            text = axes.annotate(
                name, (x, y), offset, textcoords="offset points", color=_INK, fontsize=9,
                ha="left" if offset[0] > 0 else "right",
            )  # fmt: skip
            box = text.get_window_extent()
            if not any(box.overlaps(other) for other in taken):
                break
            if offset != _PLACES[-1]:
                text.remove()
        taken.append(box)


def _adapt_to_theme(svg: str) -> str:
    """Adds the colors of a dark page: a picture in a README is shown on both."""
    rules = "".join(
        f'[style*="fill: {light}"]{{fill:{dark}!important}}[style*="stroke: {light}"]{{stroke:{dark}!important}}'
        for light, dark in _DARK.items()
    )
    start = svg.index(">", svg.index("<svg")) + 1
    return f"{svg[:start]}<style>@media (prefers-color-scheme: dark){{{rules}}}</style>{svg[start:]}"
