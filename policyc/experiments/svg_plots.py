"""Line plots as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Point = tuple[float, float]
Series = tuple[Sequence[Point], str]
"""Points, and the color they are drawn in."""

_WIDTH, _HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 34  # margins
_MOST_POINTS = 1500  # of a drawn line: more than twice the pixels of its width


def draw_lines(lines: Sequence[Series], *, dots: Sequence[Series] = ()) -> str:
    """Lines over steps as SVG. A long line is drawn faintly, with its running mean over it."""
    points = [point for series, _ in (*lines, *dots) for point in series]
    if not points:
        return "<p class=note>nothing was measured</p>"
    x_range = min(x for x, _ in points), max(x for x, _ in points)
    lowest, highest = min(y for _, y in points), max(y for _, y in points)
    y_ticks = _ticks(lowest, highest)
    y_range = min(lowest, y_ticks[0]), max(highest, y_ticks[-1])
    to_pixel = _pixel_scale(x_range, y_range)
    parts = _grid(x_range, y_ticks, to_pixel)
    for series, color in lines:
        thinned = series[:: max(1, len(series) // _MOST_POINTS)]
        if len(thinned) > 8:  # fewer points have no trend to show
            parts.append(_path([to_pixel(*point) for point in thinned], color, "faint"))
            thinned = _running_mean(thinned)
        parts.append(_path([to_pixel(*point) for point in thinned], color, "line"))
    for series, color in dots:
        for x, y in (to_pixel(*point) for point in series):
            parts.append(f'<circle cx={x:.1f} cy={y:.1f} r=4 fill="{color}" class=dot />')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role=img>{"".join(parts)}</svg>'


def _pixel_scale(x_range: Point, y_range: Point) -> Callable[[float, float], Point]:
    """Maps a value to its place in the SVG. A range without extent maps to one edge."""
    (x0, x1), (y0, y1) = x_range, y_range

    def to_pixel(x: float, y: float) -> Point:
        across = (x - x0) / ((x1 - x0) or 1)
        up = (min(max(y, y0), y1) - y0) / ((y1 - y0) or 1)
        return (
            _LEFT + across * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - up * (_HEIGHT - _BOTTOM - _TOP),
        )

    return to_pixel


def _grid(x_range: Point, y_ticks: Sequence[float], to_pixel: Callable[[float, float], Point]) -> list[str]:
    """Grid lines and tick labels."""
    x0, x1 = x_range
    parts = []
    for tick in y_ticks:
        _, y = to_pixel(x0, tick)
        parts.append(f"<line class=grid x1={_LEFT} x2={_WIDTH - _RIGHT} y1={y:.1f} y2={y:.1f} />")
        parts.append(f"<text x={_LEFT - 8} y={y + 4:.1f} text-anchor=end>{_tick_label(tick)}</text>")
    for tick in _ticks(x0, x1):
        if x0 <= tick <= x1:
            x, _ = to_pixel(tick, y_ticks[0])
            parts.append(f"<text x={x:.1f} y={_HEIGHT - 10} text-anchor=middle>{_tick_label(tick)}</text>")
    return parts


def _path(points: Sequence[Point], color: str, css_class: str) -> str:
    if not points:
        return ""
    d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path class={css_class} d="{d}" stroke="{color}" />'


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from just below `low` to just above `high`, at most seven."""
    span = (high - low) or abs(high) or 1
    unit = 10.0 ** math.floor(math.log10(span / 4))
    step = next(unit * f for f in (1, 2, 2.5, 5, 10) if span / (unit * f) <= 5)
    first = math.floor(low / step)
    return [step * (first + i) for i in range(math.ceil(high / step) - first + 1)]


def _tick_label(value: float) -> str:
    value = 0.0 if abs(value) < 1e-12 else value
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:.4g}"


def _running_mean(points: Sequence[Point]) -> list[Point]:
    """An exponential running mean over about a thirtieth of the points.

    Dividing by the total weight removes the bias of the first points, as Adam does.
    """
    decay = 1 - 1 / max(2, len(points) / 30)
    mean = weight = 0.0
    smoothed = []
    for x, y in points:
        mean = decay * mean + (1 - decay) * y
        weight = decay * weight + (1 - decay)
        smoothed.append((x, mean / weight))
    return smoothed
