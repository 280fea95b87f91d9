"""The frontier as an SVG picture: damage over predicted speed-up, with the bundled policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

Point = tuple[float, float]
"""A speed-up and a damage."""

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 640, 400, 70, 50, 20, 30
_STYLE = """
text { font: 12px sans-serif; fill: #1b1f24 } .quiet { fill: #57606a } .axis { stroke: #57606a }
.found { stroke: #0072b2; fill: none; stroke-width: 2 } .point { fill: #0072b2 } .bundled { fill: #d55e00 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .quiet { fill: #9aa5b1 } .axis { stroke: #9aa5b1 } }
"""


def draw_frontier(found: Sequence[Point], bundled: Mapping[str, Point], title: str) -> str:
    """The picture. `found` are points of the frontier, and `bundled` those of policies by name."""
    points = [*found, *bundled.values()]
    fastest = max(x for x, _ in points)
    worst = max((y for _, y in points), default=0) or 1.0
    slowest = min(1.0, *(x for x, _ in points))

    def place(point: Point) -> Point:
        x = _LEFT + (point[0] - slowest) / ((fastest - slowest) or 1) * (_WIDTH - _LEFT - _RIGHT)
        y = _HEIGHT - _BOTTOM - point[1] / worst * (_HEIGHT - _BOTTOM - _TOP)
        return round(x, 1), round(y, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        *_axes(slowest, fastest, worst),
        f'<polyline class="found" points="{" ".join(f"{x},{y}" for x, y in map(place, found))}"/>',
    ]
    for point in found:
        x, y = place(point)
        parts.append(f'<circle class="point" cx="{x}" cy="{y}" r="4">{_tip("found", point)}</circle>')
    for name, point in bundled.items():
        x, y = place(point)
        anchor = "end" if x > _WIDTH / 2 else "start"
        parts.append(f'<circle class="bundled" cx="{x}" cy="{y}" r="5">{_tip(name, point)}</circle>')
        parts.append(
            f'<text x="{x + (-8 if anchor == "end" else 8)}" y="{y - 6}" text-anchor="{anchor}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _tip(name: str, point: Point) -> str:
    return f"<title>{escape(name)}: {point[0]:.3f}x, damage {point[1]:.3g}</title>"


def _axes(slowest: float, fastest: float, worst: float) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    lines = [
        f'<path class="axis" fill="none" d="M{_LEFT},{_TOP}V{bottom}H{right}"/>',
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">predicted speed-up</text>',
        f'<text x="15" y="{(_TOP + bottom) / 2}" text-anchor="middle" '
        f'transform="rotate(-90 15 {(_TOP + bottom) / 2})">predicted damage, nats per token</text>',
    ]
    for i in range(6):
        x, y = _LEFT + i / 5 * (right - _LEFT), bottom - i / 5 * (bottom - _TOP)
        lines.append(
            f'<text class="quiet" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">'
            f"{slowest + i / 5 * (fastest - slowest):.2f}x</text>"
        )
        lines.append(
            f'<text class="quiet" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{i / 5 * worst:.2g}</text>'
        )
    return lines
