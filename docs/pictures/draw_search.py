"""Draws the gaps of searched policies from `docs/results/search/search.json`. `make pictures` runs it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
from scipy import stats

FOLDER = Path(__file__).parent
WIDTH, LEFT, RIGHT, ROW, TOP = 720, 210, 690, 22, 34
TICKS = np.arange(-0.02, 0.061, 0.02)

STYLE = """svg:root { color-scheme: light dark; color: CanvasText; background: Canvas }
text { font: 12px sans-serif; fill: currentColor } .quiet { opacity: .75 } .title { font-weight: 600 }
.axis { stroke: currentColor } .grid { stroke: currentColor; opacity: .12 } .zero { stroke: currentColor; opacity: .6 }
.found { fill: #0072b2; stroke: #0072b2; stroke-width: 1.6 }
.other { fill: #d55e00; stroke: #d55e00; stroke-width: 1.6 }
text.found, text.other { stroke: none; font-weight: 600 }"""


def place(gap: float) -> float:
    return LEFT + (gap - TICKS[0]) / (TICKS[-1] - TICKS[0]) * (RIGHT - LEFT)


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{content}</text>'


def line(x: float, y: float, d: str, kind: str) -> str:
    return f'<path class="{kind}" d="M{x:.1f} {y:.1f}{d}"/>'


def draw(found: dict) -> str:
    losses, predicted = found["losses"], found["predicted"]
    rows = []
    for name, each in predicted.items():
        gaps = np.array([losses[name][seed] - loss for seed, loss in losses["bf16"].items()])
        reach = stats.t.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / len(gaps) ** 0.5
        rows.append((f"{each['speed_up']:.2f}", gaps.mean(), reach, name))
    parts, y, bottom = [], TOP, TOP + ROW * (len(rows) + len({row[0] for row in rows})) + 6
    parts += [line(place(t), TOP - 4, f"V{bottom}", "zero" if abs(t) < 1e-9 else "grid") for t in TICKS]
    for speed_up, group in itertools.groupby(sorted(rows), key=lambda row: row[0]):
        parts.append(text(14, y + 14, f"predicted speed-up {speed_up}\N{MULTIPLICATION SIGN}", "title"))
        y += ROW
        for _, gap, reach, name in group:
            kind = "found" if name.startswith(("found", "fitted")) else "other"
            low, high = place(gap - reach), place(gap + reach)
            bar = line(low, y + 10, f"H{high:.1f}M{low:.1f} {y + 6}v8M{high:.1f} {y + 6}v8", kind)
            dot = f'<circle class="{kind}" cx="{place(gap):.1f}" cy="{y + 10}" r="4"/>'
            parts += [text(26, y + 14, name), bar, dot]
            y += ROW
    parts.append(line(LEFT, bottom, f"H{RIGHT}", "axis"))
    for tick in TICKS:
        label = "0 (bf16)" if abs(tick) < 1e-9 else f"{tick:+.2f}".replace("-", "\N{MINUS SIGN}")
        parts += [
            line(place(tick), bottom, "v4", "axis"),
            text(place(tick), bottom + 18, label, "quiet", "middle"),
        ]
    seeds = len(losses["bf16"])
    title = f"gap to bf16 in validation loss, nats per token: mean and 95 % interval of {seeds} seeds"
    parts.append(text((LEFT + RIGHT) / 2, bottom + 38, title, "quiet", "middle"))
    parts += [text(LEFT, 18, "found by the search", "found"), text(LEFT + 140, 18, "other policies", "other")]
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 50}" role="img">\n'
        f"<title>Measured loss gap to bf16 of each policy, by predicted speed-up</title>\n"
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


if __name__ == "__main__":
    found = json.loads((FOLDER.parent / "results" / "search" / "search.json").read_text())
    (FOLDER / "search_gap.svg").write_text(draw(found), encoding="utf-8")
