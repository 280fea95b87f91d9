"""Reads the frontier of a search (damage over predicted speed-up) from its file, and draws it as SVG.

`policyc search --frontier` writes either. The page of `policyc report` shows the drawing of a file.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from policyc.base.files import explain_unreadable, read_json
from policyc.base.web_page import render_template

Frontier = dict[str, Any]
"""Contents of the file: `source` (what was scored), `frontier` (the points found) and `policies` (the points of other
policies, by name). A point has `speed_up` and `damage`."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 610, 20, 350  # position of the axes in the drawing, which is 640 wide
_MIDDLE = 320
_LABEL_HEIGHT, _LABEL_WIDTH = 14, 128


def read_frontier(path: Path) -> Frontier:
    """Reads a frontier file. Raises ValueError if it cannot be read, is not such a file or has no points."""

    def point(values: Any) -> dict[str, float]:
        numbers = {name: float(values[name]) for name in ("speed_up", "damage")}
        if not all(map(math.isfinite, numbers.values())):
            raise ValueError("not finite")
        return numbers

    with explain_unreadable(path, "policyc search --frontier --out FILE.json"):
        data = read_json(path)
        found = [point(values) for values in data["frontier"]]
        policies = {str(name): point(values) for name, values in data["policies"].items()}
        source = str(data["source"])
    if not found:
        raise ValueError(f"'{path}' has no points")
    return {"source": source, "frontier": found, "policies": policies}


def draw_frontier(frontier: Frontier) -> str:
    """Draws the frontier as one SVG element."""
    points = [*frontier["frontier"], *frontier["policies"].values()]
    speed_ups = [point["speed_up"] for point in points]
    slowest, fastest = min(1.0, *speed_ups), max(speed_ups)
    worst = max(point["damage"] for point in points) or 1.0

    def place(point: dict[str, float], name: str = "") -> dict[str, Any]:
        x = _LEFT + (point["speed_up"] - slowest) / ((fastest - slowest) or 1) * (_RIGHT - _LEFT)
        y = _BOTTOM - point["damage"] / worst * (_BOTTOM - _TOP)
        return {**point, "name": name, "x": round(x, 1), "y": round(y, 1), "is_right": x > _MIDDLE}

    policies = [place(point, name) for name, point in frontier["policies"].items()]
    labelled: list[dict[str, Any]] = []
    for dot in sorted(policies, key=lambda dot: dot["damage"]):
        dot["label_y"] = dot["y"] - 6
        near = [other for other in labelled if abs(dot["x"] - other["x"]) < _LABEL_WIDTH]
        while any(abs(dot["label_y"] - other["label_y"]) < _LABEL_HEIGHT for other in near):
            dot["label_y"] -= _LABEL_HEIGHT
        labelled.append(dot)
    steps = [i / 5 for i in range(6)]
    return render_template(
        "policyc.base",
        "frontier.svg",
        source=frontier["source"],
        found=[place(point) for point in frontier["frontier"]],
        policies=labelled,
        ticks=[
            (_LEFT + part * (_RIGHT - _LEFT), _BOTTOM - part * (_BOTTOM - _TOP),
             slowest + part * (fastest - slowest), part * worst)
            for part in steps
        ],
        left=_LEFT, right=_RIGHT, top=_TOP, bottom=_BOTTOM,
    )  # fmt: skip
