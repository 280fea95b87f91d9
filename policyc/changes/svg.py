"""The heat map of a diff as SVG: rows are linears and products, columns are layers, and colors are formats.

The color of a cell is its format after the change. If the product changes, its top has the color of the format before;
if not, the cell is a thin line. Emulated and opaque products are hatched. The picture needs no script and no embedded
font.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from policyc.base.web_page import render_template
from policyc.changes.data import summary
from policyc.changes.model import DiffData, Linear, LinearRange, ProductChange, ProductSide, Stack
from policyc.language.formats import FORMATS
from policyc.language.recipes import Gemm

FORMAT_COLORS = {f.name: f.color for f in FORMATS.values() if f.color}
OTHER_COLOR = "#cc79a7"

_ROW, _GAP = 11, 5  # height of a row, and the space between linears
_LABEL, _GRID = 236, 660  # width of the names, and of the layers
_SINGLE = 28  # width of the cell of a linear outside of stacks
_LEAST_WITH_GAP = 8  # narrower cells have no gap between them, which would be as visible as they are
_MARGIN = 12
_QUIET = "fill:#57606a;font-size:9.5px"
_RIGHT, _MIDDLE = ";text-anchor:end", ";text-anchor:middle"


@dataclass(frozen=True, slots=True)
class _Text:
    x: float
    y: float
    content: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class _Cells:
    """Cells that are drawn together: paths with their colors."""

    paths: tuple[tuple[str, str], ...]
    title: str = ""


@dataclass(slots=True)
class _Drawing:
    y: float
    texts: list[_Text] = field(default_factory=list)
    cells: list[_Cells] = field(default_factory=list)


def draw_heat_map(diff: DiffData) -> str:
    """The heat map as one SVG element."""
    change, _, prediction = summary(diff).partition("; ")
    drawing = _Drawing(_MARGIN + 55.0)
    drawing.texts = [
        _Text(_MARGIN, _MARGIN + 11, change, "font-weight:600;font-size:13px"),
        _Text(_MARGIN, _MARGIN + 26, prediction, "fill:#57606a"),
        _Text(
            _MARGIN, _MARGIN + 40, f"{diff.program}: {diff.before.label} → {diff.after.label}", "fill:#57606a"
        ),
    ]
    for stack in diff.stacks:
        _draw_stack(diff, stack, drawing)
    _draw_legend(diff, drawing)
    return render_template(
        "policyc.changes",
        "heat_map.svg",
        width=2 * _MARGIN + _LABEL + _GRID,
        height=round(drawing.y),
        texts=drawing.texts,
        cells=drawing.cells,
    )


def _draw_stack(diff: DiffData, stack: Stack, drawing: _Drawing) -> None:
    width = _GRID / stack.size if stack.size else _SINGLE
    left = _MARGIN + _LABEL
    if stack.size:
        title = f"{stack.name}, {stack.size} layers"
        drawing.texts.append(_Text(_MARGIN, drawing.y + 8, title, "font-weight:600"))
        starts = {first for ranges in stack.classes for first, _ in ranges} | {stack.size - 1}
        shown: list[int] = []
        for layer in sorted(starts):
            if not shown or (layer - shown[-1]) * width > 20:  # pixels of three digits
                shown.append(layer)
        middles = ((left + (layer + 0.5) * width, layer) for layer in shown)
        drawing.texts += [_Text(x, drawing.y + 8, str(n), _QUIET + _MIDDLE) for x, n in middles]
        drawing.y += _ROW + 4
    for number in stack.linears:
        linear = diff.linears[number]
        gemms = [gemm for gemm in Gemm if any(run.product(gemm) for run in linear.runs)]
        labels = [(linear.name, ""), (_describe_linear(linear), _QUIET)][: len(gemms)]
        for line, (label, style) in enumerate(labels):
            short = label if len(label) <= 34 else f"…{label[-33:]}"
            drawing.texts.append(_Text(_MARGIN, drawing.y + 9 + line * _ROW, short, style))
        for gemm in gemms:
            drawing.texts.append(_Text(left - 6, drawing.y + 9, gemm, _QUIET + _RIGHT))
            for run in linear.runs:
                if (product := run.product(gemm)) is not None:
                    title = describe_cell(diff, linear, run, product)
                    drawing.cells.append(_draw_run(run, product, title, left, drawing.y, width))
            drawing.y += _ROW
        drawing.y += _GAP
    drawing.y += _GAP


def _describe_linear(linear: Linear) -> str:
    """The kind of a linear, unless its name contains it, and its shape."""
    site = linear.runs[0].site
    kind = f"{site.kind.name}, " if site.kind.name and site.kind.name not in linear.name else ""
    batch = f"{site.batch} × " if site.batch > 1 else ""
    return f"{kind}{batch}{site.m} × {site.n} × {site.k}"


def _draw_run(
    run: LinearRange, product: ProductChange, title: str, left: float, y: float, width: float
) -> _Cells:
    """The cells of a run of layers: one path for each color."""
    has_gaps = width >= _LEAST_WITH_GAP
    starts = [left + ((run.first or 0) + n) * width for n in range(run.count if has_gaps else 1)]
    inner = width - 1 if has_gaps else width * run.count

    def boxes(top: float, height: float) -> str:
        return "".join(f"M{x:.1f} {y + top:.1f}h{inner:.2f}v{height}h-{inner:.2f}z" for x in starts)

    if not product.is_changed:
        return _Cells(((_color(product.after), boxes(_ROW / 2 - 2, 2.5)),), title)
    paths = [(_color(product.after), boxes(0, _ROW - 1.5))]
    if run.site.opaque or product.after.state.is_emulated:
        paths.append(("url(#hatch)", boxes(0, _ROW - 1.5)))
    return _Cells((*paths, (_color(product.before), boxes(0, 3))), title)


def _color(side: ProductSide) -> str:
    return FORMAT_COLORS.get(side.state.format, OTHER_COLOR)


def describe_cell(diff: DiffData, linear: Linear, run: LinearRange, product: ProductChange) -> str:
    """The tooltip of a cell: formats and rules. It has no source lines of the program, which would soon be outdated."""
    layers = "" if run.first is None else f" layers {run.first}-{run.last}"
    lines = [f"{linear.full_name}{layers} {product.gemm}"]
    sides = (("before", product.before, diff.before.policy), ("after", product.after, diff.after.policy))
    for label, side, policy in sides:
        operands = " x ".join(" ".join((format, *options)) for _, format, options in side.state.operands)
        lines.append(f"{label}: {operands}")
        if policy is not None and side.rule is not None:
            span = policy.rules[side.rule].span
            lines.append(f"  {diff.short_path(span.source.path)}:{span.line}: {policy.rules[side.rule]}")
    if run.site.opaque:
        lines.append(f"opaque: {run.site.opaque}")
    return "\n".join(lines)


def _draw_legend(diff: DiffData, drawing: _Drawing) -> None:
    """Draws the formats and marks that occur."""
    products = [p for linear in diff.linears for run in linear.runs for p in run.products]
    sides = itertools.chain.from_iterable((p.before, p.after) for p in products)
    formats = dict.fromkeys(side.state.format for side in sides)
    box, top, line = "h14v10h-14z", "h14v3h-14z", "m0 4h14v2.5h-14z"
    entries = {format: [(FORMAT_COLORS.get(format, OTHER_COLOR), box)] for format in formats}
    entries["top: before"] = [(FORMAT_COLORS["nvfp4"], box), (FORMAT_COLORS["bf16"], top)]
    entries["line: unchanged"] = [(FORMAT_COLORS["bf16"], line)]
    if diff.totals.emulated or diff.totals.opaque:
        entries["emulated or opaque"] = [("url(#hatch)", box)]
    x = float(_MARGIN)
    for text, shapes in entries.items():
        start = f"M{x:.1f} {drawing.y:.1f}"
        drawing.cells.append(_Cells(tuple((color, start + shape) for color, shape in shapes)))
        drawing.texts.append(_Text(x + 18, drawing.y + 9, text, "fill:#57606a"))
        x += 34 + 6.2 * len(text)
    drawing.y += _ROW + _MARGIN
