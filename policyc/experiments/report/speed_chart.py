"""The loss gap of each policy over its predicted speed-up, as an SVG picture. Drawn by matplotlib."""

from __future__ import annotations

import io
import itertools
from typing import TYPE_CHECKING, Any

from policyc.experiments.report.sweeps import ReportError
from policyc.experiments.report.values import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _QUIET, _LINE, _ZONE = "#1b1f24", "#57606a", "#d8dee4", "#009e73"
_DARK = {_INK: "#e6edf3", _QUIET: "#9aa5b1", _LINE: "#2d343d"}
"""The colors of text and lines on a dark page, by those on a light one."""

_POINTS = {
    "worse": "#d55e00", "parity": "#009e73", "better": "#0072b2", "inconclusive": "#57606a", "failed": "#a40e26",
}  # fmt: skip


_WIDTH, _HEIGHT = 7.2, 4.0  # inches


def draw_speed_chart(data: Record) -> str:
    """The chart of a report with predicted speed-ups. Raises ReportError if it has none, or no gaps."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ReportError(
            "this picture needs the package 'matplotlib': pip install 'policyc[plots]'"
        ) from None

    if not data["speed_ups"] or not data["statistics"]["baselines"]:
        raise ReportError("this picture needs a sweep with a baseline, and its policies")
    baseline = data["statistics"]["baselines"][0]
    speed_ups = data["speed_ups"]["values"]
    rows = [
        row
        for row in data["comparisons"]
        if row["baseline"] == baseline and row["gap"] is not None and row["variant"] in speed_ups
    ]
    if not rows:
        raise ReportError(f"no variant has a gap to {baseline} and a predicted speed-up")
    # The same text for the same data: no date, and identifiers from a fixed salt. Text stays text.
    settings: Any = {
        "svg.hashsalt": "policyc",
        "svg.fonttype": "none",
        "text.parse_math": False,  # a name may have a dollar sign
        "font.family": "sans-serif",
        "font.size": 10,
    }
    title = f"predicted speed-up over {baseline}, {data['speed_ups']['step']}"
    with mpl.rc_context(settings):
        figure = _draw_figure(rows, speed_ups, title)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    return _adapt_to_theme(stream.getvalue())


def _draw_figure(rows: list[Record], speed_ups: dict[str, float], title: str) -> Figure:
    """The chart with numbered points, and a key below it with their names."""
    from matplotlib.figure import Figure

    # With 72 dots an inch, a pixel is a point, as in an SVG.
    figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=72, layout="constrained")
    axes = figure.add_subplot()
    names = _draw(axes, rows, speed_ups)
    figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=9, labelcolor=_INK)
    axes.set_xlabel(title, color=_INK)
    _add_key(figure, [f"{number}: {name}" for number, name in enumerate(names)])
    return figure


def _add_key(figure: Figure, lines: list[str]) -> None:
    """Writes lines below the chart, in as many columns as fit, and makes room for them."""
    from matplotlib.lines import Line2D

    character, line = 0.085, 0.158  # inches at 9 points; the width is that of a wide character
    columns = max(1, int(_WIDTH / (character * max(map(len, lines)) + 0.3)))
    rows = -(-len(lines) // columns)
    figure.set_size_inches(_WIDTH, _HEIGHT + line * rows)
    figure.legend(
        [Line2D([], [], linestyle="none") for _ in lines], lines, loc="outside lower left", ncols=columns,
        frameon=False, fontsize=9, labelcolor=_INK, handlelength=0, handletextpad=0, labelspacing=0.25,
    )  # fmt: skip


def _draw(axes: Axes, rows: list[Record], speed_ups: dict[str, float]) -> list[str]:
    """Draws numbered points, intervals and margin. Returns the names of the points, that of the baseline first."""
    baseline = rows[0]["baseline"]
    margin = next((row["margin"] for row in rows if row["margin"] is not None), None)
    if margin is not None:
        axes.axhspan(-margin, margin, color=_ZONE, alpha=0.14, linewidth=0, label="margin of parity")
    names: list[str] = []

    def add_point(x: float, y: float, name: str) -> None:
        axes.annotate(
            str(len(names)), (x, y), (7, 0), textcoords="offset points", color=_INK, fontsize=9, va="center"
        )
        names.append(name)

    axes.plot([1], [0], "o", color=_QUIET)
    add_point(1.0, 0.0, baseline)
    highest = _highest_gap(rows)
    listed: set[str] = set()  # verdicts that the legend has
    for row in sorted(rows, key=lambda row: row["gap"] > highest):
        style: dict[str, Any] = {
            "color": _POINTS[row["verdict"]],
            "label": None if row["verdict"] in listed else row["verdict"],
        }
        listed.add(row["verdict"])
        x, y, name = speed_ups[row["variant"]], row["gap"], row["variant"]
        if y > highest:
            name, y = f"{name}: {y:+.3f}, not to scale", _top(axes)
            axes.plot([x], [y], "^", **style)
        else:
            low, high = row["interval"] or (y, y)
            axes.errorbar([x], [y], [[y - low], [high - y]], fmt="o", capsize=3, **style)
        add_point(x, y, name)
    axes.margins(x=0.16, y=0.12)
    axes.set_ylabel(f"loss gap to {baseline}, nats", color=_INK)
    axes.grid(color=_LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_QUIET, length=0)
    axes.xaxis.set_major_formatter("{x:.2f}×")
    for spine in axes.spines.values():
        spine.set_visible(False)
    return names


_JUMP = 8
"""A gap that is this many times as large as the next one is not drawn to scale: the others would be one spot."""


def _highest_gap(rows: list[Record]) -> float:
    """The largest gap that is drawn to scale. Larger gaps are a minority of outliers."""
    gaps: list[float] = sorted(row["gap"] for row in rows)
    margin = rows[0]["margin"] or 0.0
    for below, above in itertools.pairwise(gaps[len(gaps) // 2 :]):
        if above > _JUMP * max(below, margin, 0.0) > 0:
            return below
    return gaps[-1]


def _top(axes: Axes) -> float:
    """Where a gap is drawn that is not to scale: above all others."""
    low, high = axes.get_ylim()
    return high + 0.08 * (high - low)


def _adapt_to_theme(svg: str) -> str:
    """Adds the colors of a dark page: a picture in a README is shown on both."""
    rules = "".join(
        f'[style*="fill: {light}"]{{fill:{dark}!important}}[style*="stroke: {light}"]{{stroke:{dark}!important}}'
        for light, dark in _DARK.items()
    )
    start = svg.index(">", svg.index("<svg")) + 1
    return f"{svg[:start]}<style>@media (prefers-color-scheme: dark){{{rules}}}</style>{svg[start:]}"
