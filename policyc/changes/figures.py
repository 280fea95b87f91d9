"""Formats the figures of a product: FLOPs, predicted time, bytes, native or emulated, and measurements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from policyc.changes.model import DiffData, LinearRange, ProductChange
from policyc.language.recipes import Gemm

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_TIMES = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_DOT_OUTSIDE_PARENTHESES = re.compile(r"\.(?![^(]*\))")


def product_figures(diff: DiffData, linear: int, layer: int | None, gemm: str) -> Iterator[str]:
    """What is known of a product in the layers that are treated alike: predictions first, then measurements."""
    run = diff.linears[linear].run_at(layer)
    product = run.product(Gemm(gemm))
    if product is None:
        return
    name = short_name(diff, linear)
    for texts in (_predictions(run, product), _measurements(diff.overlays, linear, run, gemm)):
        line = "; ".join(texts)
        if line:
            yield f"{name} {gemm}: {line}"


def short_name(diff: DiffData, linear: int) -> str:
    """As many of the last parts of a name as tell the linear from others of its stack."""
    stack = diff.linears[linear].stack
    names = [name_parts(other.name) for other in diff.linears if other.stack == stack]
    parts = name_parts(diff.linears[linear].name)
    for count in range(1, len(parts)):
        if sum(other[-count:] == parts[-count:] for other in names) == 1:
            return ".".join(parts[-count:])
    return ".".join(parts)


def name_parts(name: str) -> tuple[str, ...]:
    """The parts of a dotted name. `(train.py:8)` is one part, and so is `up (2)`."""
    return tuple(_DOT_OUTSIDE_PARENTHESES.split(name))


def _predictions(run: LinearRange, product: ProductChange) -> Iterator[str]:
    lowering = product.after.state.lowering
    if lowering.backend:
        yield f"native, {lowering.backend}" if lowering.native else "emulated"
    sides = product.before, product.after
    yield _arrow([format_seconds(side.seconds) for side in sides])
    yield with_prefix(run.site.flops, "FLOP")
    yield _arrow([with_prefix(side.moved_bytes, "B") for side in sides])


def _measurements(overlays: Mapping[str, Any], linear: int, run: LinearRange, gemm: str) -> Iterator[str]:
    """The lowest values of the layers, since one line stands for all of them."""
    stats = overlays.get("stats", {})
    operands = [
        e for e in _of_layers(stats.get("operands", ()), linear, run) if str(e["operand"]).startswith(gemm)
    ]
    ratios = [e["sqnr_db"] for e in operands if isinstance(e.get("sqnr_db"), int | float)]
    if ratios:
        yield f"SQNR {min(ratios):.1f} dB or more"
    gradients = _of_layers(stats.get("cosines", ()), linear, run)
    cosines = [e["cosine"] for e in gradients if isinstance(e["cosine"], int | float)]
    if gemm == Gemm.WGRAD and cosines:
        yield f"gradient cosine {min(cosines):.4f} or more"
    for entry in overlays.get("compiled", {}).get("products", ()):
        is_same = entry["linear"] == linear and entry["product"] == gemm
        if is_same and _overlaps(entry["layers"], run):
            yield f"compiled to {entry['call'] or 'no known call'}"
            return


def _of_layers(
    entries: Sequence[Mapping[str, Any]], linear: int, run: LinearRange
) -> Iterator[Mapping[str, Any]]:
    for entry in entries:
        layer = entry.get("layer")
        if entry["linear"] == linear and _overlaps(None if layer is None else (layer, layer), run):
            yield entry


def _overlaps(layers: Sequence[int] | None, run: LinearRange) -> bool:
    if layers is None or run.first is None or run.last is None:
        return True
    return layers[0] <= run.last and run.first <= layers[1]


def _arrow(texts: Sequence[str]) -> str:
    return texts[0] if len({*texts}) == 1 else " -> ".join(texts)


def with_prefix(value: float, unit: str) -> str:
    """`8.80 TFLOP`."""
    return _with_unit(value, _PREFIXES) + unit


def format_seconds(seconds: float) -> str:
    """`3.00 ms`."""
    return _with_unit(seconds, _TIMES)


def format_change(fraction: float) -> str:
    """`-27 %`, `+6.3 %`."""
    percent = 100 * fraction
    digits = 0 if abs(percent) >= 10 or not percent else 1
    return f"{percent:+.{digits}f} %"


def _with_unit(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Three significant digits, in the largest unit that the rounded value reaches."""
    size, unit = next((u for u in units if value >= 0.9995 * u[0]), units[-1])
    return f"{f'{value / size:#.3g}'.rstrip('.')} {unit}"
