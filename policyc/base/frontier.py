"""The frontier of a search, damage over predicted speed-up: its file, and its picture as SVG.

`policyc search --frontier` writes both. The pages of `policyc diff` and `policyc report` show the picture of a file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

Point = tuple[float, float]
"""A speed-up and a damage."""

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 640, 400, 70, 50, 20, 30
_LABEL_HEIGHT = 14
_STYLE = """
svg:root { color-scheme: light dark; color: CanvasText }
.frontier { max-width: 720px }
.frontier text { font: 12px sans-serif; fill: currentColor; stroke: none }
.frontier .quiet { opacity: .7 } .frontier .axis { stroke: currentColor; opacity: .7; fill: none }
.frontier .found { stroke: #0072b2; fill: none; stroke-width: 2 } .frontier .point { fill: #0072b2 }
.frontier .policy { fill: #d55e00 }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """The points that a search found, and those of other policies by name. `source` is what was scored."""

    source: str
    found: tuple[Point, ...]
    policies: Mapping[str, Point]

    @property
    def title(self) -> str:
        return f"Frontier of {self.source}: predicted damage over predicted speed-up"

    def as_data(self) -> dict[str, Any]:
        def row(point: Point) -> dict[str, float]:
            return {"speed_up": point[0], "damage": point[1]}

        policies = {name: row(point) for name, point in self.policies.items()}
        return {"source": self.source, "frontier": [row(p) for p in self.found], "policies": policies}

    @classmethod
    def from_data(cls, data: Any) -> Frontier:
        """Raises ValueError, KeyError, TypeError or AttributeError if it is not what `as_data` returns."""

        def point(row: Any) -> Point:
            speed_up, damage = float(row["speed_up"]), float(row["damage"])
            if not (math.isfinite(speed_up) and math.isfinite(damage)):
                raise ValueError("not finite")
            return speed_up, damage

        return cls(
            source=str(data["source"]),
            found=tuple(point(row) for row in data["frontier"]),
            policies={str(name): point(row) for name, row in data["policies"].items()},
        )


def read_frontier(path: Path) -> Frontier:
    """The frontier in a file. Raises ValueError."""
    try:
        frontier = Frontier.from_data(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"'{path}' cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"'{path}' was not written by policyc search --frontier --out FILE.json") from None
    if not frontier.found:
        raise ValueError(f"'{path}' has no points")
    return frontier


def draw_frontier(frontier: Frontier) -> str:
    """The picture, as one SVG element."""
    points = [*frontier.found, *frontier.policies.values()]
    fastest, slowest = max(x for x, _ in points), min(1.0, *(x for x, _ in points))
    worst = max(y for _, y in points) or 1.0

    def place(point: Point) -> Point:
        x = _LEFT + (point[0] - slowest) / ((fastest - slowest) or 1) * (_WIDTH - _LEFT - _RIGHT)
        y = _HEIGHT - _BOTTOM - point[1] / worst * (_HEIGHT - _BOTTOM - _TOP)
        return round(x, 1), round(y, 1)

    line = " ".join(f"{x},{y}" for x, y in map(place, frontier.found))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" class="frontier">',
        f"<title>{escape(frontier.title)}</title><style>{_STYLE}</style>",
        *_axes(slowest, fastest, worst),
        f'<polyline class="found" points="{line}"/>',
    ]
    for point in frontier.found:
        x, y = place(point)
        parts.append(f'<circle class="point" cx="{x}" cy="{y}" r="4">{_tip("found", point)}</circle>')
    taken: list[Point] = []
    for name, point in sorted(frontier.policies.items(), key=lambda item: item[1][1]):
        x, y = place(point)
        anchor, shift = ("end", -8) if x > _WIDTH / 2 else ("start", 8)
        height = y - 6
        while any(abs(height - other) < _LABEL_HEIGHT and abs(x - at) < _WIDTH / 5 for at, other in taken):
            height -= _LABEL_HEIGHT
        taken.append((x, height))
        parts.append(f'<circle class="policy" cx="{x}" cy="{y}" r="5">{_tip(name, point)}</circle>')
        parts.append(f'<text x="{x + shift}" y="{height}" text-anchor="{anchor}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _tip(name: str, point: Point) -> str:
    return f"<title>{escape(name)}: {point[0]:.3f}x, damage {point[1]:.3g}</title>"


def _axes(slowest: float, fastest: float, worst: float) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    middle = (_TOP + bottom) / 2
    yield f'<path class="axis" d="M{_LEFT},{_TOP}V{bottom}H{right}"/>'
    yield f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">predicted speed-up</text>'
    yield (
        f'<text x="15" y="{middle}" text-anchor="middle" transform="rotate(-90 15 {middle})">'
        "predicted damage, nats per token</text>"
    )
    for i in range(6):
        x, y = _LEFT + i / 5 * (right - _LEFT), bottom - i / 5 * (bottom - _TOP)
        speed_up = slowest + i / 5 * (fastest - slowest)
        yield f'<text class="quiet" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{speed_up:.2f}x</text>'
        yield f'<text class="quiet" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{i / 5 * worst:.2g}</text>'
