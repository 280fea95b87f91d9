"""A diff as text: a summary sentence, a row for each change of a linear, and the equations that differ, by scope.

Lines fit the width. Names come from programs, so control characters are escaped.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import networkx as nx

from policyc.base.text import as_ranges, count_noun, escape_controls, format_ranges
from policyc.changes.data import summary
from policyc.changes.graph import build_graph, children_of
from policyc.changes.model import DiffData, Linear, LinearRange, ProductChange
from policyc.language.diagnostics import Paint, plain
from policyc.language.recipes import Gemm

WIDTH = 80

_COMMENT = "  # "


def render(diff: DiffData, paint: Paint = plain, width: int = WIDTH, *, equations: bool = True) -> str:
    """Renders the summary, the notes, a row for each change of a linear and, if `equations`, those that differ.

    `paint` is called with the kinds `added`, `removed`, `header`, `rule` and `dim`.
    """
    lines = [paint("header", line) for line in _wrap(summary(diff), width)]
    for note in (*diff.refused, *diff.notes):
        lines += [paint("dim", line) for line in _wrap(f"note: {note}", width)]
    lines += _rows(diff, paint, width)
    if equations:
        lines += ["", *EquationLines(diff, paint, width).lines()]
    return "".join(f"{line}\n" for line in lines)


def _rows(diff: DiffData, paint: Paint, width: int) -> list[str]:
    """A row for each change of a linear: formats before and after, products, and layers if it is not all of them."""
    rows: list[tuple[str, str, str, str]] = []
    for linear in diff.linears:
        gemms_of: dict[tuple[str, str], list[str]] = {}
        for gemm in Gemm:
            runs_of: dict[str, list[LinearRange]] = {}
            for run in linear.runs:
                product = run.product(gemm)
                if product is not None and product.is_changed:
                    runs_of.setdefault(_describe_change(product), []).append(run)
            for text, runs in runs_of.items():
                gemms_of.setdefault((text, _count_layers(linear, runs)), []).append(gemm)
        rows += [
            (linear.full_name, text, " ".join(gemms), count) for (text, count), gemms in gemms_of.items()
        ]
    if not rows:
        return []
    unchanged = sum(not any(run.is_changed for run in linear.runs) for linear in diff.linears)
    end = [paint("dim", f"unchanged: {count_noun(unchanged, 'other site')}")] if unchanged else []
    _, text_width, gemms_width, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    tails = [f"{text:<{text_width}}  {gemms:<{gemms_width}}  {count}" for _, text, gemms, count in rows]
    names = [_shorten_left(row[0], width - len(tail) - 2) for row, tail in zip(rows, tails, strict=True)]
    name_width = max(map(len, names)) + 2
    lines = [f"{name:<{name_width}}{paint('rule', tail)}" for name, tail in zip(names, tails, strict=True)]
    return lines + end


def _describe_change(product: ProductChange) -> str:
    old, new = product.before.state, product.after.state
    text = f"{old.format} -> {new.format}" if old.format != new.format else f"{new.format}, options"
    return f"{text}, emulated" if new.is_emulated else text


def _count_layers(linear: Linear, runs: Sequence[LinearRange]) -> str:
    """The number of layers, such as `x28`, and which ones if these are not all layers of the linear."""
    count = sum(run.count for run in runs)
    ranges = format_ranges(as_ranges(layer for run in runs for layer in run.layers))
    has_others = count < sum(run.count for run in linear.runs)
    return f"x{count} layers {_shorten(ranges, 16)}" if has_others and ranges else f"x{count}"


# ---- equations


class EquationLines:
    """Lines about the scopes with changes. Equations that changed are listed, the others are counted."""

    def __init__(self, diff: DiffData, paint: Paint = plain, width: int = WIDTH) -> None:
        self._diff, self._paint, self._width = diff, paint, width
        self._graph: nx.DiGraph[int] = build_graph(diff)

    def lines(self) -> Iterator[str]:
        """Yields the lines. Consecutive unchanged equations become one line with their number."""
        items = self._scope(0, ()) if self._graph.nodes[0]["changed"] else ()
        for kind, group in itertools.groupby(items, type):
            members = list(group)
            if kind is str:
                yield from map(str, members)
            elif count := sum(map(int, members)):
                yield self._paint("dim", f"  ... {count_noun(count, 'equation')} unchanged")

    def _scope(self, node: int, path: tuple[str, ...]) -> Iterator[str | int]:
        """Yields the lines of a scope and, as integers, the numbers of unchanged equations between them.

        A header precedes the scope's own equations that differ.
        """
        attributes = self._graph.nodes[node]
        path = (*path, _scope_label(attributes)) if node else path
        pair, explanation = None, [""]
        has_header = False
        for child in children_of(self._graph, node):
            data = self._graph.nodes[child]
            is_changed = data["changed"] if data["type"] == "scope" else data["side"] != "both"
            if not is_changed:
                yield data["equations"] if data["type"] == "scope" else 1
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
            yield from self._equation(child, 0)

    def _header(self, path: tuple[str, ...]) -> Iterator[str]:
        text = "/".join(path) or self._graph.nodes[0]["name"]
        yield self._paint("header", f"@@ {_shorten_left(text, self._width - 6)} @@")

    def _explanation(self, data: dict[str, Any]) -> Iterator[str]:
        """Explains why equations differ, with the rule and its location."""
        texts = {
            "shared": "quantized once for "
            + ", ".join(self._diff.linears[n].name for n in data.get("readers", ())),
            "hoisted": "quantized once per step, outside the loss",
            "split": "one scan for each range of layers that is treated alike",
            "entered": "passes extra inputs to the equations inside",
        }
        reason = data.get("reason", "")
        lines = _wrap(texts[reason], self._width, _COMMENT) if reason in texts else []
        if reason in ("replaced", "hoisted", "shared"):
            lines += [_shorten_rule(f"{_COMMENT}{line}", self._width) for line in self._rule_lines(data)]
        yield from (self._paint("rule", line) for line in lines)

    def _rule_lines(self, data: dict[str, Any]) -> list[str]:
        """The rules that decided about a linear, with the products: `llama.policy:7: mlp.* -> nv @ fprop`."""
        if "linear" not in data:
            return []
        run = self._diff.linears[data["linear"]].run_at(data.get("layer"))
        gemms_of: dict[tuple[int, int], list[str]] = {}
        for product in run.products:
            for side, value in enumerate((product.before, product.after)):
                if value.rule is not None and not value.state.is_kept and product.is_changed:
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
    """`c:bf16[8,16] = dot_general a b [dimension_numbers=...]`. The least important part is last, as it may be cut."""
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
    """Shortens the selectors of a rule, so that its recipe and products stay."""
    selectors, arrow, recipe = escape_controls(text).rpartition(" -> ")
    end = f"{arrow}{recipe}"
    return _shorten(_shorten(selectors, max(width - len(end), width // 2)) + end, width)


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    further = f"{indent}  " if indent else ""
    return textwrap.wrap(
        escape_controls(text), width, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False
    )
