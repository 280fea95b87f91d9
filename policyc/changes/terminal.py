"""A diff as text: the sentence, a heat strip for each linear, and the equations that differ, by scope.

Lines fit the width. Names come from programs, so control characters are escaped.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx

from policyc.base.text import count_noun, escape_controls, format_ranges
from policyc.changes.data import sentence
from policyc.changes.figures import product_figures
from policyc.changes.graph import children_of, graph_of
from policyc.changes.model import DiffData, Linear, LinearRange, ProductSide, Stack
from policyc.language.diagnostics import Paint, plain
from policyc.language.recipes import Gemm

WIDTH = 80

GLYPHS = {"nvfp4": "4", "mxfp4": "x", "mxfp8": "m", "fp8": "8", "fp4": "t", "bf16": "b", "f32": "f"}
_COMMENT = "  # "
_NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
_UNCHANGED, _EMULATED, _OPAQUE, _MIXED, _MISSING = ".", "e", "!", "*", " "


def render(diff: DiffData, paint: Paint = plain, width: int = WIDTH) -> str:
    """The whole text. `paint` gets as kinds: formats, `emulated`, `added`, `removed`, `header`, `rule` and `dim`."""
    lines = [*render_summary(diff, paint, width), "", *EquationLines(diff, paint, width).lines()]
    return "".join(f"{line}\n" for line in lines)


def render_summary(diff: DiffData, paint: Paint = plain, width: int = WIDTH) -> Iterator[str]:
    """The sentence, the notes and the heat strips."""
    yield from _render_head(diff, paint, width)
    yield ""
    used: dict[str, None] = {}
    for stack in diff.stacks:
        yield from _strips(diff, stack, paint, width, used)
    legend = [f"{GLYPHS[f]} {f}" for f in GLYPHS if GLYPHS[f] in used]
    names = {_UNCHANGED: "unchanged", _EMULATED: "emulated", _OPAQUE: "opaque", _MIXED: "mixed"}
    legend += [f"{glyph} {name}" for glyph, name in names.items() if glyph in used]
    yield from (paint("dim", line) for line in _wrap_items(legend, "   ", width))


def _render_head(diff: DiffData, paint: Paint, width: int) -> Iterator[str]:
    yield from (paint("header", line) for line in _wrap(sentence(diff), width))
    for note in (*diff.refused, *diff.notes):
        yield from (paint("dim", line) for line in _wrap(f"note: {note}", width))


def render_stat(diff: DiffData, paint: Paint = plain, width: int = WIDTH) -> str:
    """The sentence, the notes, and for each linear how many of its products change, from what to what."""
    rows: list[tuple[str, str]] = []
    for linear in diff.linears:
        gemms_of: dict[tuple[str, int], list[str]] = {}
        for gemm in Gemm:
            counts: dict[str, int] = {}
            for run in linear.runs:
                product = run.product(gemm)
                if product is not None and product.is_changed:
                    text = f"{_format_of(product.before)} -> {_format_of(product.after)}"
                    counts[text] = counts.get(text, 0) + run.count
            for item in counts.items():
                gemms_of.setdefault(item, []).append(gemm)
        for (text, count), gemms in gemms_of.items():
            tail = f"{text:<16} {' '.join(gemms):<17} x{count:<4}"
            rows.append((_shorten_left(linear.full_name, width - len(tail) - 2), tail.rstrip()))
    names = max((len(name) for name, _ in rows), default=0) + 2
    lines = [f"{name:<{names}}{paint('rule', tail)}" for name, tail in rows]
    return "".join(f"{line}\n" for line in (*_render_head(diff, paint, width), *lines))


def _format_of(side: ProductSide | None) -> str:
    return "-" if side is None else side.state.format


# ---- heat strips


def _strips(diff: DiffData, stack: Stack, paint: Paint, width: int, used: dict[str, None]) -> Iterator[str]:
    labels = 30  # characters of a name and a product: as many as leave 48 columns for layers
    columns = max(1, width - labels - 2)
    per_column = -(-max(stack.size, 1) // columns)
    if stack.size:
        title = (
            f"{escape_controls(stack.name)}: {stack.size} layers, {', '.join(c.label for c in stack.classes)}"
        )
        scale = f" (one column: {per_column} layers)" if per_column > 1 else ""
        yield from (paint("header", line) for line in _wrap(title + scale, width))
    for number in stack.linears:
        linear = diff.linears[number]
        for gemm in Gemm:
            if not any(run.product(gemm) for run in linear.runs):
                continue
            glyphs = _row_glyphs(linear, gemm, stack.size, per_column)
            used.update(dict.fromkeys(glyph for glyph, _ in glyphs))
            name = _shorten_left(linear.name, labels - 7)  # the end tells linears apart
            cells = "".join(
                paint(kind, "".join(glyph for glyph, _ in group))
                for kind, group in itertools.groupby(glyphs, key=lambda item: item[1])
            )
            yield f"{name:<{labels - 6}}{gemm:<7} {cells}".rstrip()


def _row_glyphs(linear: Linear, gemm: Gemm, size: int, per_column: int) -> list[tuple[str, str]]:
    """A glyph and the kind of its color for each column."""
    glyphs = []
    for start in range(0, max(size, 1), per_column):
        layers = range(start, min(start + per_column, size)) if size else (None,)
        cells = {_glyph(linear.run_at(layer), gemm) for layer in layers}
        glyphs.append(cells.pop() if len(cells) == 1 else (_MIXED, "dim"))
    return glyphs


def _glyph(run: LinearRange | None, gemm: Gemm) -> tuple[str, str]:
    product = None if run is None else run.product(gemm)
    if run is None or product is None or product.after is None:
        return _MISSING, "dim"
    if run.site.opaque:
        return _OPAQUE, "removed"
    state = product.after.state
    if not product.is_changed:
        return _UNCHANGED, "dim"
    if state.is_emulated:
        return _EMULATED, "emulated"
    return GLYPHS.get(state.format, "?"), state.format


# ---- equations


@dataclass(frozen=True, slots=True)
class _Unchanged:
    """Equations that did not change, and that are not printed."""

    equations: int


class EquationLines:
    """The scopes that hold a change, with their equations; those that did not change are counted."""

    def __init__(self, diff: DiffData, paint: Paint = plain, width: int = WIDTH) -> None:
        self._diff, self._paint, self._width = diff, paint, width
        self._graph: nx.DiGraph[int] = graph_of(diff)

    def lines(self) -> Iterator[str]:
        """The lines. Unchanged equations that follow each other are counted in one line."""
        items = self._scope(0, ()) if self._graph.nodes[0]["changed"] else ()
        for is_unchanged, group in itertools.groupby(items, lambda item: isinstance(item, _Unchanged)):
            if is_unchanged:
                count = sum(item.equations for item in group if isinstance(item, _Unchanged))
                if count:
                    yield self._paint("dim", f"  ... {count_noun(count, 'equation')} unchanged")
            else:
                yield from (item for item in group if isinstance(item, str))

    def _scope(self, node: int, path: tuple[str, ...]) -> Iterator[str | _Unchanged]:
        """The lines of a scope, and in between what did not change.

        A header stands before the first of its own equations that differ.
        """
        attributes = self._graph.nodes[node]
        path = (*path, _scope_label(attributes)) if node else path
        pair, explanation = None, [""]
        has_header = False
        for child in children_of(self._graph, node):
            data = self._graph.nodes[child]
            is_changed = data["changed"] if data["type"] == "scope" else data["side"] != "both"
            if not is_changed:
                yield _Unchanged(data["equations"] if data["type"] == "scope" else 1)
                continue
            if data["type"] == "scope":
                yield from self._scope(child, path)
                has_header = False
                continue
            if not has_header:
                yield from self._header(path)
                has_header = True
            if data["pair"] != pair:
                pair = data["pair"]
                previous, explanation = explanation, list(self._explanation(data))
                yield from explanation if explanation != previous else ()
                yield from self._figures(data)
            yield from self._equation(child, 0)

    def _header(self, path: tuple[str, ...]) -> Iterator[str]:
        text = "/".join(path) or self._graph.nodes[0]["name"]
        yield self._paint("header", f"@@ {_shorten_left(text, self._width - 6)} @@")

    def _explanation(self, data: dict[str, Any]) -> Iterator[str]:
        """Why equations differ: the rule and its place."""
        texts = {
            "shared": "quantized once for "
            + ", ".join(self._linear_name(n) for n in data.get("readers", ())),
            "hoisted": "quantized once per step, outside the loss",
            "split": "one scan for each range of layers to which the same happens",
            "entered": "takes inputs of the equations inside",
            "derived": "derived from equations that differ",
        }
        reason = data.get("reason", "")
        lines = _wrap(texts[reason], self._width, _COMMENT) if reason in texts else []
        if reason in ("replaced", "hoisted", "shared"):
            lines += [_shorten_rule(f"{_COMMENT}{line}", self._width) for line in self._rule_lines(data)]
        yield from (self._paint("rule", line) for line in lines)

    def _figures(self, data: dict[str, Any]) -> Iterator[str]:
        """What is predicted and measured of the product that an equation computes."""
        gemm = data.get("product") if self._diff.is_gradient else Gemm.FPROP
        if data.get("reason") != "replaced" or "linear" not in data or not gemm:
            return
        for text in product_figures(self._diff, data["linear"], data.get("layer"), gemm):
            for line in _wrap_items(text.split("; "), "; ", self._width, _COMMENT):
                yield self._paint("dim", line)

    def _linear_name(self, number: int) -> str:
        return self._diff.linears[number].name

    def _rule_lines(self, data: dict[str, Any]) -> list[str]:
        """What decided about the products of a linear: `llama.policy:7: mlp.* -> nv`, with the products."""
        if "linear" not in data:
            return []
        run = self._diff.linears[data["linear"]].run_at(data.get("layer"))
        gemms_of: dict[tuple[int, int], list[str]] = {}
        for product in run.products if run is not None else ():
            if data.get("product") and str(product.gemm) != data["product"]:
                continue
            for side, value in enumerate((product.before, product.after)):
                if (
                    value is not None
                    and value.rule is not None
                    and not value.state.is_kept
                    and product.is_changed
                ):
                    gemms_of.setdefault((side, value.rule), []).append(product.gemm)
        return [self._rule_line(side, rule, gemms) for (side, rule), gemms in gemms_of.items()]

    def _rule_line(self, side: int, rule: int, gemms: Sequence[str]) -> str:
        policy = (self._diff.before, self._diff.after)[side].policy
        assert policy is not None
        span = policy.rules[rule].span
        word = "was " if side == 0 else ""
        products = "" if len(gemms) == len(Gemm) else f" @ {', '.join(gemms)}"
        place = f"{span.source.path.rpartition('/')[2]}:{span.line}"
        return f"{word}{place}: {policy.rules[rule]}{products}"

    def _equation(self, node: int, depth: int) -> Iterator[str]:
        data = self._graph.nodes[node]
        sign, kind = {"before": ("-", "removed"), "after": ("+", "added"), "both": (" ", "dim")}[data["side"]]
        text = f"{sign} {'  ' * depth}{equation_text(data)}"
        yield self._paint(kind, _shorten(escape_controls(text), self._width))
        inside = [c for scope in children_of(self._graph, node) for c in children_of(self._graph, scope)]
        if inside and not data["op"].startswith("custom_vjp"):  # a helper of JAX: its name says what it does
            count = count_noun(data["inside"], "equation")
            yield self._paint("dim", f"{sign}   {'  ' * depth}... {count} inside")
            return
        for child in inside:
            yield from self._equation(child, depth + 1)


def equation_text(data: dict[str, Any]) -> str:
    """`c:bf16[8,16] = dot_general a b [dimension_numbers=...]`: what is cut at the end matters least."""
    results = ", ".join(data["outputs"])
    operands = " ".join(data["inputs"])
    params = f" [{data['params']}]" if data["params"] else ""
    return f"{results} = {data['op']} {operands}{params}"


def _scope_label(attributes: dict[str, Any]) -> str:
    members, iterations = attributes.get("members"), attributes.get("iterations")
    if members:
        count = sum(last - first + 1 for first, last in members)
        return f"{attributes['name']}[{format_ranges(tuple(members))}]{f' x{count}' if count > 1 else ''}"
    if iterations:
        return f"{attributes['kind']}[{format_ranges((iterations,))}]"
    return attributes["kind"] if attributes.get("containers") else str(attributes["name"])


# ---- text


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"


def _shorten_left(text: str, width: int) -> str:
    text = escape_controls(text)
    return text if len(text) <= width else f"…{text[len(text) - width + 1 :]}"


def _shorten_rule(text: str, width: int) -> str:
    """Cuts the selectors of a rule: its recipe and products stay."""
    selectors, arrow, recipe = escape_controls(text).rpartition(" -> ")
    end = f"{arrow}{recipe}"
    return _shorten(_shorten(selectors, max(width - len(end), width // 2)) + end, width)


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    return _wrap_items(text.split(" "), " ", width, indent)


def _wrap_items(items: Sequence[str], separator: str, width: int, indent: str = "") -> list[str]:
    """Wraps a list between its items, so that a number and its unit stay together."""
    text = separator.join(escape_controls(item).replace(" ", _NO_BREAK_SPACE) for item in items)
    further = f"{indent}  " if indent else ""
    lines = textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False
    )
    return [line.replace(_NO_BREAK_SPACE, " ") for line in lines or [""]]
