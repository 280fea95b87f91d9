"""A training run, or several beside each other, as one page that stands alone.

In: folders with `metrics.jsonl`, and `stats.jsonl` and `plan.json` where there was a policy. Out: HTML, its plots drawn
as SVG. The one trap: a run may have been killed while it wrote: a line that is no JSON is left out, and counted.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from policyc.language.files import atomic_write

StatsRow = dict[str, Any]
Points = list[tuple[float, float]]
Names = list[tuple[str, tuple[str, ...]]]
Cells = dict[tuple[Any, Any], StatsRow]

_COLOURS = ("#2563eb", "#d9480f", "#0f766e", "#9333ea", "#b45309", "#be185d")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 260, 64, 34


class UnreadableRun(ValueError):
    """There is nothing to report on; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What a run has left behind."""

    name: str
    steps: list[StatsRow]
    evaluations: list[StatsRow]
    stats: list[StatsRow]
    plan: StatsRow | None
    lost: int

    def series(self, name: str, rows: list[StatsRow] | None = None) -> Points:
        rows = self.steps if rows is None else rows
        return [
            (r["step"], r[name])
            for r in rows
            if isinstance(r.get(name), int | float) and math.isfinite(r[name])
        ]


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Writes the report of some runs, and says where."""
    runs = [_read(folder) for folder in folders]
    path = out or folders[0] / "report.html"
    try:
        with atomic_write(path) as stream:
            stream.write(page(runs).encode())
    except OSError as error:
        raise UnreadableRun(f"'{path}' cannot be written: {error.strerror}") from None
    return path


def _read(folder: Path) -> RunRecord:
    if not folder.is_dir():
        raise UnreadableRun(f"'{folder}' is no folder of a run")
    rows, lost = _lines(folder / "metrics.jsonl")
    stats, more = _lines(folder / "stats.jsonl")
    if not rows:
        raise UnreadableRun(
            f"'{folder}' holds no metrics.jsonl with a step in it: is it the folder of a run?"
        )
    plan = folder / "plan.json"
    return RunRecord(
        name=folder.resolve().name,
        steps=[r for r in rows if "loss" in r],
        evaluations=[r for r in rows if "validation_loss" in r],
        stats=stats,
        plan=json.loads(plan.read_text()) if plan.exists() else None,
        lost=lost + more,
    )


def _lines(path: Path) -> tuple[list[StatsRow], int]:
    """The rows of a file, and how many lines of it are none."""
    if not path.exists():
        return [], 0
    lines, rows = path.read_text(errors="replace").splitlines(), []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows, len(lines) - len(rows)


# ---- the page


def page(runs: Sequence[RunRecord]) -> str:
    """The whole page."""
    title = " · ".join(r.name for r in runs)
    colours = {id(r): _COLOURS[i % len(_COLOURS)] for i, r in enumerate(runs)}
    keys = [(r.name, colours[id(r)]) for r in runs]
    parts = [f"<h1>{escape(title)}</h1>", _cards(runs[0]) if len(runs) == 1 else _comparison(runs, colours)]
    loss = [(r.series("loss"), colours[id(r)]) for r in runs]
    dots = [(r.series("validation_loss", r.evaluations), colours[id(r)]) for r in runs]
    legend = [*keys, ("● validation", "")] if any(d for d, _ in dots) else keys
    parts.append(_figure("Loss", "nats per token; a faint line is each step, the strong one their running mean",
                         _lines_plot(loss, dots=dots, smooth=True), legend))  # fmt: skip
    for name, what, unit in (
        ("tokens_per_second_per_device", "Speed", "tokens per second and device"),
        ("grad_norm", "Gradient norm", "before clipping"),
    ):
        lines = [(r.series(name), colours[id(r)]) for r in runs]
        if any(points for points, *_ in lines):
            parts.append(_figure(what, unit, _lines_plot(lines, smooth=True, typical=True), keys))
    for run in runs:
        of = f" of {run.name}" if len(runs) > 1 else ""
        parts += _numerics(run, of)
        if run.plan is not None:
            parts.append(_plan(run.plan, of))
    lost = sum(r.lost for r in runs)
    if lost:
        parts.append(f"<p class=note>{lost} lines could not be read and were left out.</p>")
    return _PAGE.replace("{title}", escape(title)).replace("{body}", "\n".join(parts))


def _cards(run: RunRecord) -> str:
    cards = "".join(f"<div><b>{v}</b><span>{escape(k)}</span></div>" for k, v in _figures(run))
    return f"<div class=cards>{cards}</div>"


def _figures(run: RunRecord) -> list[tuple[str, str]]:
    """The numbers that say most about a run."""
    last, rate = run.steps[-1] if run.steps else {}, _typical(run, "tokens_per_second_per_device")
    found = [("steps", f"{last.get('step', 0)}"), ("last loss", _short(last.get("loss")))]
    for name, text in (
        ("validation_loss", "validation loss"),
        ("validation_loss_plain", "the same, in plain bf16"),
    ):
        seen = run.series(name, run.evaluations)
        if seen:
            found.append((text, _short(seen[-1][1])))
    if rate is not None:
        found.append(("tokens/s/device", f"{rate:,.0f}"))
    mfu, stall = _typical(run, "mfu"), _stall(run)
    found += [("MFU", f"{mfu:.1%}")] if mfu is not None else []
    found += [("input stall", f"{stall:.2%}")] if stall is not None else []
    skipped = last.get("skipped", 0)
    return [*found, *([("skipped steps", f"{skipped}")] if skipped else [])]


def _comparison(runs: Sequence[RunRecord], colours: dict[int, str]) -> str:
    names = list(dict.fromkeys(k for r in runs for k, _ in _figures(r)))
    head = "".join(f"<th>{escape(n)}</th>" for n in names)
    body = ""
    for run in runs:
        cells = "".join(f"<td class=number>{dict(_figures(run)).get(n, '–')}</td>" for n in names)
        body += f"<tr><td>{_key(run.name, colours[id(run)])}</td>{cells}</tr>"
    return f"<table><tr><th>run</th>{head}</tr>{body}</table>"


def _typical(run: RunRecord, name: str) -> float | None:
    values = [v for _, v in run.series(name)]
    return statistics.median(values) if values else None


def _stall(run: RunRecord) -> float | None:
    """The part of the time that was spent waiting for data; the first step, which compiles, does not count."""
    pairs = [(r["stall_seconds"], r["step_seconds"]) for r in run.steps[1:] if "stall_seconds" in r]
    whole_time = sum(seconds for _, seconds in pairs)
    return sum(waited for waited, _ in pairs) / whole_time if whole_time else None


def _short(value: Any) -> str:
    return "–" if not isinstance(value, int | float) else f"{value:.4g}"


# ---- plots


def _figure(title: str, unit: str, picture: str, keys: Iterable[tuple[str, str]]) -> str:
    legend = " ".join(_key(name, colour) for name, colour in keys)
    return _section(title, unit, f"{picture}<p class=keys>{legend}</p>")


def _section(title: str, note: str, content: str) -> str:
    return f"<section><h2>{escape(title)} <small>{escape(note)}</small></h2>{content}</section>"


def _key(name: str, colour: str) -> str:
    mark = f'<i style="background:{colour}"></i>' if colour else ""
    return f"<span class=key>{mark}{escape(name)}</span>"


def _lines_plot(
    lines: Sequence[tuple[Points, str]],
    *,
    dots: Sequence[tuple[Points, str]] = (),
    smooth: bool = False,
    typical: bool = False,
) -> str:
    """Lines over steps. `typical` leaves out the first steps, which compile and whose numbers are like no other."""
    if typical:
        lines = [(points[2:] if len(points) > 4 else points, colour) for points, colour in lines]
    shown = [p for points, *_ in (*lines, *dots) for p in points]
    if not shown:
        return "<p class=note>nothing was measured</p>"
    x0, x1 = min(p[0] for p in shown), max(p[0] for p in shown)
    y0, y1 = min(p[1] for p in shown), max(p[1] for p in shown)
    ticks = _ticks(y0, y1)
    y0, y1 = min(y0, ticks[0]), max(y1, ticks[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        right = _LEFT + (x - x0) / ((x1 - x0) or 1) * (_WIDTH - _LEFT - 16)
        up = _HEIGHT - _BOTTOM - (min(max(y, y0), y1) - y0) / ((y1 - y0) or 1) * (_HEIGHT - _BOTTOM - 12)
        return right, up

    out = []
    for tick in ticks:
        _, y = at(x0, tick)
        out.append(f"<line class=grid x1={_LEFT} x2={_WIDTH - 16} y1={y:.1f} y2={y:.1f} />")
        out.append(f"<text x={_LEFT - 8} y={y + 4:.1f} text-anchor=end>{_tick_text(tick)}</text>")
    for tick in _ticks(x0, x1):
        if x0 <= tick <= x1:
            x, _ = at(tick, y0)
            out.append(f"<text x={x:.1f} y={_HEIGHT - 10} text-anchor=middle>{_tick_text(tick)}</text>")
    for points, colour in lines:
        thin = _thinned(points)
        if smooth and len(thin) > 8:
            out.append(_path([at(*p) for p in thin], colour, "faint"))
            thin = _smoothed(thin)
        out.append(_path([at(*p) for p in thin], colour, "line"))
    for points, colour in dots:
        for x, y in (at(*p) for p in points):
            out.append(f'<circle cx={x:.1f} cy={y:.1f} r=4 fill="{colour}" class=dot />')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role=img>{"".join(out)}</svg>'


def _path(points: Sequence[tuple[float, float]], colour: str, kind: str) -> str:
    if not points:
        return ""
    d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path class={kind} d="{d}" stroke="{colour}" />'


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from below the lowest to above the highest."""
    span = (high - low) or abs(high) or 1
    unit = 10.0 ** math.floor(math.log10(span / 4))
    step = next(unit * f for f in (1, 2, 2.5, 5, 10) if span / (unit * f) <= 5)
    first = math.floor(low / step)
    return [step * (first + i) for i in range(math.ceil(high / step) - first + 1)]


def _tick_text(value: float) -> str:
    value = 0.0 if abs(value) < 1e-12 else value
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:.4g}"


def _thinned(points: Points, most: int = 1500) -> Points:
    every = max(1, len(points) // most)
    return points[::every]


def _smoothed(points: Points) -> Points:
    """A running mean over about a thirtieth of the points, without their beginning's weight on the rest."""
    keep, value, weight, out = 1 - 1 / max(2, len(points) / 30), 0.0, 0.0, []
    for x, y in points:
        value, weight = keep * value + (1 - keep) * y, keep * weight + (1 - keep)
        out.append((x, value / weight))
    return out


# ---- numerics


def _numerics(run: RunRecord, of: str) -> list[str]:
    """What was measured last, site by site and layer by layer, and how it went over the steps."""
    if not run.stats:
        return []
    last = max(r["step"] for r in run.stats)
    now = [r for r in run.stats if r["step"] == last]
    parts = []
    operands = [r for r in now if "operand" in r]
    if operands:
        cells: Cells = {((r["site"], r["operand"]), r["layer"]): r for r in operands}
        names: Names = [
            (f"{escape(s)} <em>{o}</em>", (s, o)) for s, o in dict.fromkeys(key for key, _ in cells)
        ]
        parts.append(_heat(f"SQNR{of}", f"dB at step {last}; 20 dB: a tenth of the size is noise", names, cells,
                           "sqnr_db", (10.0, 20.0, 32.0), "{:.1f}"))  # fmt: skip
        parts.append(_heat(f"Flushed to zero{of}", f"percent of what was not zero, at step {last}", names, cells,
                           "flushed", (0.3, 0.1, 0.0), "{:.1f}", 100))  # fmt: skip
        parts.append(_heat(f"Saturated{of}", f"percent that was cut to the largest value, at step {last}", names, cells,
                           "saturated", (0.1, 0.04, 0.0), "{:.1f}", 100))  # fmt: skip
    gradients = [r for r in now if "cosine" in r]
    if gradients:
        names = [(escape(p), (p,)) for p in dict.fromkeys(r["parameter"] for r in gradients)]
        cells = {((r["parameter"],), r["layer"]): r for r in gradients}
        parts.append(_heat(f"Gradients{of}", f"cosine with the gradient in plain bf16, at step {last}", names, cells,
                           "cosine", (0.8, 0.95, 1.0), "{:.3f}"))  # fmt: skip
    return parts


def _heat(
    title: str,
    unit: str,
    names: Names,
    cells: Cells,
    field: str,
    scale: tuple[float, float, float],
    form: str,
    times: float = 1,
) -> str:
    """A table whose cells are coloured: rows are sites, columns layers."""
    layers = sorted({la for _, la in cells if isinstance(la, int)})
    columns: list[Any] = [*layers, *({None} if any(la is None for _, la in cells) else ())]
    head = "".join(f"<th>{'–' if c is None else c}</th>" for c in columns)
    body = ""
    for text, key in names:
        marks = ""
        for column in columns:
            value = cells.get((key, column), {}).get(field)
            colour = "" if value is None else f' style="{_shade(value, scale)}"'
            marks += f"<td class=cell{colour}>{'' if value is None else form.format(value * times)}</td>"
        body += f"<tr><td class=site>{text}</td>{marks}</tr>"
    table = f"<div class=scroll><table class=heat><tr><th>layer</th>{head}</tr>{body}</table></div>"
    return _section(title, unit, table)


def _shade(value: float, scale: tuple[float, float, float]) -> str:
    """From red (bad) through pale to blue (good), the text black or white on it."""
    bad, middle, good = scale
    part = (
        (value - middle) / (good - middle)
        if (value > middle) == (good > middle)
        else (value - middle) / (middle - bad)
    )
    part = max(-1.0, min(1.0, part))
    pale, end = (247, 247, 247), (33, 102, 172) if part > 0 else (178, 24, 43)
    red, green, blue = (round(a + (b - a) * abs(part)) for a, b in zip(pale, end, strict=True))
    return f"background:rgb({red},{green},{blue});color:{'#fff' if abs(part) > 0.55 else '#111'}"


# ---- the plan


def _plan(plan: StatsRow, of: str) -> str:
    """Which rule decides about which site, and in which formats its products run."""
    rules, body = plan["rules"], ""
    for site in plan["sites"]:
        for phase, runs in site["decisions"].items():
            for run in runs:
                body += _plan_row(site, phase if len(plan["phases"]) > 1 else "", run, rules)
    head = "".join(f"<th>{h}</th>" for h in ("site", "layers", "fprop", "dgrad", "wgrad", "rule"))
    note = f"policy {plan['policy']['path']}, sha256 {plan['policy']['sha256'][:12]}"
    return _section(f"Plan{of}", note, f"<div class=scroll><table><tr>{head}</tr>{body}</table></div>")


def _plan_row(site: StatsRow, phase: str, run: StatsRow, rules: list[str]) -> str:
    name = (site["parameters"] or [site["scope"]])[0] or site["place"] or ""
    layers = "–"
    if "layers" in run:
        first, last = (".".join(map(str, end)) for end in run["layers"])
        layers = first if first == last else f"{first} to {last}"
    cells = ""
    for gemm in ("fprop", "dgrad", "wgrad"):
        formats = list(dict.fromkeys(run["products"].get(gemm, {}).get("formats", ())))
        quantized = any(f not in ("keep", "bf16", "f32") for f in formats)
        cells += f"<td{' class=quantized' if quantized else ''}>{escape(' × '.join(formats)) or '–'}</td>"
    won = dict.fromkeys(p["rule"] for p in run["products"].values())
    text = "; ".join(rules[r] if r is not None else "no rule" for r in won)
    where = f" <small>{escape(phase)}</small>" if phase else ""
    ends = (
        f"<td class=site>{escape(name)}{where}</td><td>{layers}</td>",
        f"<td><code>{escape(text)}</code></td>",
    )
    return f"<tr>{ends[0]}{cells}{ends[1]}</tr>"


_PAGE = """<!doctype html>
<html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width"><title>{title}</title>
<style>
:root{--ink:#1c2024;--soft:#667085;--line:#e4e7ec;--paper:#fff;--card:#f8fafc;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8eb;--soft:#98a2b3;--line:#2c3138;--paper:#14171a;--card:#1c2024}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1020px;margin:2.5rem auto;
padding:0 1.25rem}
h1{font-size:1.6rem;margin:0 0 1rem}h2{font-size:1.1rem;margin:2.2rem 0 .6rem}
small{color:var(--soft);font-weight:400;font-size:.85rem;margin-left:.4rem}
.cards{display:flex;flex-wrap:wrap;gap:.75rem}.cards div{background:var(--card);border:1px solid var(--line);
border-radius:10px;padding:.7rem 1rem;min-width:7rem}
.cards b{display:block;font-size:1.35rem;font-variant-numeric:tabular-nums}
.cards span{color:var(--soft);font-size:.85rem}
svg{width:100%;height:auto;background:var(--card);border:1px solid var(--line);border-radius:10px}
svg text{fill:var(--soft);font:12px system-ui,sans-serif}.grid{stroke:var(--line)}
path{fill:none}.line{stroke-width:2.2;stroke-linejoin:round}.faint{stroke-width:1;opacity:.28}
.dot{stroke:var(--paper);stroke-width:1.5}
.keys{margin:.4rem 0 0}.key{margin-right:1.1rem;color:var(--soft);font-size:.9rem;white-space:nowrap}
.key i{display:inline-block;width:.8rem;height:.8rem;border-radius:3px;margin-right:.4rem;vertical-align:-1px}
table{border-collapse:collapse;font-size:.9rem}
th,td{padding:.3rem .6rem;text-align:left;border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:500}.number{font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto}.heat{border-spacing:2px;border-collapse:separate}.heat th{text-align:center;border:0}
.heat th:first-child{text-align:left}.heat td{border:0}
.cell{text-align:center;font-size:.8rem;border-radius:4px;min-width:2.6rem;font-variant-numeric:tabular-nums;
padding:.2rem .3rem}
.site{font-family:ui-monospace,monospace;font-size:.82rem;white-space:nowrap}
.site em{color:var(--soft);font-style:normal}
.quantized{font-weight:600}code{font-size:.8rem}.note{color:var(--soft)}
</style>
{body}
</html>
"""
