"""The heat map of a diff as SVG: rows are linears and products, columns layers, colors formats.

A changed cell is split: before on the left, after on the right. Hatched cells are emulated or opaque. It needs no
script and no font of its own, so it prints and opens anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from policyc.base.notebook import escape_text
from policyc.changes.data import sentence
from policyc.changes.model import DiffData, Linear, LinearRange, ProductChange, ProductSide, Stack
from policyc.language.recipes import Gemm

# Colors that people who cannot tell red from green can tell apart (Okabe and Ito), and two grays.
FORMAT_COLORS = {
    "nvfp4": "#d55e00", "mxfp4": "#e69f00", "mxfp8": "#0072b2", "fp8": "#56b4e9", "fp4": "#f0e442",
    "bf16": "#c9ced6", "f32": "#8b93a1",
}  # fmt: skip
OTHER_COLOR = "#cc79a7"

_ROW, _GAP = 11, 4  # height of a row, and the space between linears
_LABEL = 260  # width of the names
_GRID = 640  # width of the layers
_MAX_CELL = 28  # width of a layer in a short stack
_MARGIN = 12
_HATCH = (
    '<pattern id="hatch" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path d="M0 0V4" stroke="#1b1f24" stroke-width="1.2"/></pattern>'
)


def draw_heat_map(diff: DiffData) -> str:
    """The heat map as one SVG element."""
    parts: list[str] = []
    y = float(_MARGIN + 34)
    for stack in diff.stacks:
        y = _draw_stack(diff, stack, y, parts)
    width = _MARGIN * 2 + _LABEL + _GRID
    y = _draw_legend(diff, y, parts)
    title = _text(_MARGIN, _MARGIN + 12, sentence(diff), "font-weight:600;font-size:13px")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y:.0f}" width="{width}" height="{y:.0f}" '
        f'role="img" style="font:11px system-ui,sans-serif;background:#fff;color:#1b1f24">'
        f"<defs>{_HATCH}</defs>{title}{''.join(parts)}</svg>\n"
    )


def _draw_stack(diff: DiffData, stack: Stack, y: float, parts: list[str]) -> float:
    if stack.size:
        classes = ", ".join(c.label for c in stack.classes)
        parts.append(_text(_MARGIN, y + 8, f"{stack.name}: {classes}", "font-weight:600"))
        parts.append(_axis(stack, y + 8))
        y += 16
    for number in stack.linears:
        linear = diff.linears[number]
        gemms = [g for g in Gemm if any(run.product(g) for run in linear.runs)]
        parts.append(_text(_MARGIN, y + 9, linear.name, ""))
        for gemm in gemms:
            parts.append(_text(_MARGIN + _LABEL - 44, y + 8, gemm, "fill:#57606a;font-size:9px"))
            parts += _draw_row(diff, linear, gemm, stack, y)
            y += _ROW
        y += _GAP
    return y + _GAP


def _cell_width(stack: Stack) -> float:
    return min(_GRID / max(stack.size, 1), _MAX_CELL)


def _axis(stack: Stack, y: float) -> str:
    """The numbers of the first and the last layer, and of those at which another class begins."""
    width = _cell_width(stack)
    numbers = sorted({0, stack.size - 1, *(first for c in stack.classes for first, _ in c.ranges)})
    shown: list[str] = []
    last = -100.0
    for number in numbers:
        x = _MARGIN + _LABEL + number * width
        if x - last > 22:  # pixels of three digits
            shown.append(_text(x, y, str(number), "fill:#57606a;font-size:9px"))
            last = x
    return "".join(shown)


def _draw_row(diff: DiffData, linear: Linear, gemm: Gemm, stack: Stack, y: float) -> Iterator[str]:
    for run in linear.runs:
        product = run.product(gemm)
        if product is None:
            continue
        width = _cell_width(stack)
        first = run.first or 0
        count = run.count if stack.size else 1
        tooltip = f"<title>{escape_text(describe_cell(diff, linear, run, product))}</title>"
        lefts = [_MARGIN + _LABEL + (first + n) * width for n in range(count)]
        yield f"<g>{tooltip}{''.join(_draw_cells(lefts, y, width, run, product))}</g>"


def _draw_cells(
    lefts: Sequence[float], y: float, width: float, run: LinearRange, product: ProductChange
) -> Iterator[str]:
    """The cells of a run: one path for each color."""
    inner = width - min(1.0, width / 6)
    before, after = (_color(side) for side in (product.before, product.after))
    if product.is_changed:
        yield _cells_path(lefts, y, inner / 3, before)
        yield _cells_path([x + inner / 3 for x in lefts], y, inner * 2 / 3, after)
    else:
        yield _cells_path(lefts, y, inner, after)
    if run.site.opaque:
        yield _cells_path(lefts, y, inner, "url(#hatch)")
    elif product.after is not None and product.after.state.is_emulated:
        before_width = inner / 3 if product.is_changed else 0.0
        yield _cells_path([x + before_width for x in lefts], y, inner - before_width, "url(#hatch)")


def _cells_path(lefts: Sequence[float], y: float, width: float, fill: str) -> str:
    height = _ROW - 1.5
    cells = "".join(f"M{x:.1f} {y:.1f}h{width:.2f}v{height}h-{width:.2f}z" for x in lefts)
    return f'<path d="{cells}" fill="{fill}"/>'


def _color(side: ProductSide | None) -> str:
    return "#ffffff" if side is None else FORMAT_COLORS.get(side.state.format, OTHER_COLOR)


def describe_cell(diff: DiffData, linear: Linear, run: LinearRange, product: ProductChange) -> str:
    """What the reader of a cell wants to know: shape, formats, rule, place."""
    site = run.site
    layers = "" if run.first is None else f" layers {run.first}-{run.last}"
    lines = [
        f"{linear.full_name}{layers} {product.gemm}",
        f"{site.batch} x {site.m} x {site.n} x {site.k}",
    ]
    for label, side, policy in (
        ("before", product.before, diff.before.policy),
        ("after", product.after, diff.after.policy),
    ):
        if side is None:
            continue
        operands = " x ".join(" ".join((format, *options)) for _, format, options in side.state.operands)
        lines.append(f"{label}: {operands}")
        if policy is not None and side.rule is not None:
            span = policy.rules[side.rule].span
            lines.append(f"  {span.source.path}:{span.line}: {policy.rules[side.rule]}")
    if site.opaque:
        lines.append(f"opaque: {site.opaque}")
    return "\n".join([*lines, diff.short_path(site.place)])


def _draw_legend(diff: DiffData, y: float, parts: list[str]) -> float:
    formats = dict.fromkeys(
        side.state.format
        for linear in diff.linears
        for run in linear.runs
        for product in run.products
        for side in (product.before, product.after)
        if side is not None
    )
    x = float(_MARGIN)
    for format in formats:
        parts.append(_rect(x, y, 12, _ROW - 1.5, FORMAT_COLORS.get(format, OTHER_COLOR)))
        parts.append(_text(x + 16, y + 9, format, ""))
        x += 70
    parts.append(_text(x, y + 9, "split: before | after", "fill:#57606a"))
    parts.append(_rect(x + 120, y, 12, _ROW - 1.5, "url(#hatch)"))
    parts.append(_text(x + 136, y + 9, "emulated or opaque", "fill:#57606a"))
    return y + _ROW + _MARGIN


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" fill="{fill}"/>'


def _text(x: float, y: float, text: str, style: str) -> str:
    attribute = f' style="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{attribute}>{escape_text(text)}</text>'
