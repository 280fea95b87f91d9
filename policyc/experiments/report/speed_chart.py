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
        figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=9, labelcolor=_INK)
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
    axes.set_ylabel(f"loss gap to {baseline}, nats", color=_INK)
    axes.grid(color=_LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_QUIET, length=0)
    axes.xaxis.set_major_formatter("{x:.2f}×")
    for spine in axes.spines.values():
        spine.set_visible(False)
    return labels


_DIRECTIONS = ((1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1))
_NEAR = 9  # points from a point to a name beside it
_OFFSETS = [
    (distance * right, distance * up) for distance in range(_NEAR, 120, _NEAR) for right, up in _DIRECTIONS
]  # nearest first


def _place_labels(axes: Axes, labels: list[_Label]) -> None:
    """Writes each name at the nearest place where it covers no point and no other name, inside the axes.

    A name that is not beside its point is joined to it by a line.
    """
    from matplotlib.transforms import Bbox

    radius = 6  # pixels of a point
    centers = axes.transData.transform([(x, y) for x, y, _ in labels])
    taken: list[Any] = [Bbox.from_bounds(x - radius, y - radius, 2 * radius, 2 * radius) for x, y in centers]
    frame = axes.get_window_extent()
    for x, y, name in sorted(labels):
        text = axes.annotate(
            name, (x, y), _OFFSETS[0], textcoords="offset points", color=_INK, fontsize=9, va="center"
        )  # fmt: skip
        for right, up in _OFFSETS:
            text.set_position((right, up))
            text.set_horizontalalignment("left" if right > 0 else "right" if right < 0 else "center")
            box = text.get_window_extent()
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if inside and not any(box.overlaps(other) for other in taken):
                break
        if max(abs(right), abs(up)) > _NEAR:
            line = {"arrowstyle": "-", "color": _QUIET, "linewidth": 0.6, "shrinkA": 4, "shrinkB": 4}
            axes.annotate("", (x, y), (right, up), textcoords="offset points", arrowprops=line)
        taken.append(box)


def _adapt_to_theme(svg: str) -> str:
    """Adds the colors of a dark page: a picture in a README is shown on both."""
    rules = "".join(
        f'[style*="fill: {light}"]{{fill:{dark}!important}}[style*="stroke: {light}"]{{stroke:{dark}!important}}'
        for light, dark in _DARK.items()
    )
    start = svg.index(">", svg.index("<svg")) + 1
    return f"{svg[:start]}<style>@media (prefers-color-scheme: dark){{{rules}}}</style>{svg[start:]}"
