"""A diff as JSON. docs/reference/diff.md describes the schema; `SCHEMA` changes with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import networkx as nx

from policyc.base.text import count_noun, format_change, format_ranges
from policyc.changes.graph import build_graph, children_of
from policyc.changes.model import (
    DiffData,
    DiffSide,
    LinearRange,
    ProductSide,
    ProductState,
    Stack,
    short_name,
)
from policyc.hardware.gemm_cost import speed_up_bounds
from policyc.language.diagnostics import SourceText
from policyc.language.policy import Policy
from policyc.numerics.backends import join_titles, title

SCHEMA = 5


def as_json(diff: DiffData) -> str:
    return json.dumps(as_data(diff), separators=(",", ":"), allow_nan=False) + "\n"


def as_data(diff: DiffData) -> dict[str, Any]:
    """The diff as dictionaries, lists, strings and numbers that JSON can hold."""
    writer = _Writer(diff)
    linears = [writer.linear(number) for number in range(len(diff.linears))]
    return {
        "schema": SCHEMA,
        "program": diff.program,
        "phase": diff.phase,
        "target": diff.target,
        "devices": diff.devices,
        "backends": list(diff.backends),
        "other_backend": diff.other_backend
        and {"backend": diff.other_backend[0], "speed_up": diff.other_backend[1]},
        "batch": diff.batch and {"sequences": diff.batch[0], "length": diff.batch[1]},
        "before": writer.side(diff.before),
        "after": writer.side(diff.after),
        "sentence": summary(diff),
        "totals": {
            "products": diff.totals.products,
            "changed": diff.totals.changed,
            "emulated": diff.totals.emulated,
            "opaque": diff.totals.opaque,
            "gemms": diff.totals.gemms,
            "time_change": diff.time_change,
            "time_change_bounds": [
                1 / bound - 1 for bound in speed_up_bounds(diff.before.seconds / diff.after.seconds)
            ],
        },
        "sources": writer.sources,
        "states": writer.states,
        "linears": linears,
        "stacks": [_stack(stack) for stack in diff.stacks],
        "graph": graph_data(build_graph(diff)),
        "overlays": dict(diff.overlays),
        "notes": [*diff.refused, *diff.notes],
    }


def summary(diff: DiffData) -> str:
    """The sentence, and what another backend predicts."""
    return " ".join(filter(None, (sentence(diff), other_sentence(diff))))


def sentence(diff: DiffData) -> str:
    """The diff in one sentence: "84 of the 867 products of 289 sites change; predicted step time -18 to -27 % on
    8 GB200 (Transformer Engine)."."""
    totals = diff.totals
    counted = f"{count_noun(totals.products, 'product')} of {count_noun(totals.gemms, 'site')}"
    parts = [f"{totals.changed or 'none'} of the {counted} change{'' if totals.changed != 1 else 's'}"]
    change = _describe_change(diff.before.seconds / diff.after.seconds)
    parts.append(f"predicted step time {change} on {describe_machine(diff)}")
    if totals.emulated:
        parts.append(f"{totals.emulated} emulated")
    if totals.opaque:
        parts.append(f"{totals.opaque} opaque")
    return "; ".join(parts) + "."


def other_sentence(diff: DiffData) -> str:
    """What another backend predicts: "With XLA -12 to -18 %."; empty if it is the same."""
    if diff.other_backend is None:
        return ""
    name, speed_up = diff.other_backend
    return f"With {title(name)} {_describe_change(speed_up)}."


def _describe_change(speed_up: float) -> str:
    """The bounds of the change of a step's time: "-17 to -25 %"."""
    return format_change(*(1 / bound - 1 for bound in speed_up_bounds(speed_up)))


def describe_machine(diff: DiffData) -> str:
    """The hardware and the batch that a prediction is for: "8 GB200 (Transformer Engine, 16 x 8,192 tokens)"."""
    words = []
    if diff.backends:
        words.append(join_titles(diff.backends))
    if diff.batch:
        words.append(f"{diff.batch[0]:,} x {diff.batch[1]:,} tokens")
    machine = f"{diff.devices} {diff.target.upper()}"
    return f"{machine} ({', '.join(words)})" if words else machine


class _Writer:
    """Writes the parts of a diff. Policy texts and product states are written once and referenced by number."""

    def __init__(self, diff: DiffData) -> None:
        self.sources: list[dict[str, Any]] = []
        self.states: list[dict[str, Any]] = []
        self._source_numbers: dict[int, int] = {}
        self._state_numbers: dict[ProductState, int] = {}
        self._diff = diff

    # ---- policies

    def side(self, side: DiffSide) -> dict[str, Any]:
        policy = side.policy
        return {
            "label": side.label,
            "seconds": side.seconds,
            "policy": None
            if policy is None
            else {
                "sha256": policy.sha256,
                "source": self._source(policy.source),
                "rules": list(self._rules(policy)),
            },
        }

    def _rules(self, policy: Policy) -> Iterator[dict[str, Any]]:
        for rule in policy.rules:
            span = rule.span
            yield {
                "text": str(rule),
                "source": self._source(span.source),
                "line": span.line,
                "last_line": span.last_line,
                "start": span.start,
                "end": span.end,
            }

    def _source(self, source: SourceText) -> int:
        if id(source) not in self._source_numbers:
            self._source_numbers[id(source)] = len(self.sources)
            self.sources.append({"path": self._diff.short_path(source.path), "text": source.text})
        return self._source_numbers[id(source)]

    # ---- linears

    def linear(self, number: int) -> dict[str, Any]:
        linear = self._diff.linears[number]
        names = {"name": linear.name, "short_name": short_name(self._diff, number), "stack": linear.stack}
        return {**names, "runs": [self._run(run) for run in linear.runs]}

    def _run(self, run: LinearRange) -> dict[str, Any]:
        site = run.site
        return {
            "layers": None if run.first is None else [run.first, run.last],
            "batch": site.batch,
            "m": site.m,
            "n": site.n,
            "k": site.k,
            "kind": site.kind.name or None,
            "weight": site.weight,
            "place": self._diff.short_path(site.place),
            "repeats": site.repeats // site.count,
            "flops": site.flops,
            "opaque": site.opaque or None,
            "quantization_seconds": list(run.quantization),
            "products": {
                str(product.gemm): {
                    "changed": product.is_changed,
                    "before": self._product_side(product.before),
                    "after": self._product_side(product.after),
                }
                for product in run.products
            },
        }

    def _product_side(self, side: ProductSide) -> dict[str, Any]:
        return {
            "state": self._state(side.state),
            "rule": side.rule,
            "overridden": list(side.overridden),
            "seconds": side.seconds,
            "bytes": side.moved_bytes,
        }

    def _state(self, state: ProductState) -> int:
        if state not in self._state_numbers:
            self._state_numbers[state] = len(self.states)
            self.states.append(_state_data(state))
        return self._state_numbers[state]


def _state_data(state: ProductState) -> dict[str, Any]:
    lowering = state.lowering
    return {
        "format": state.format,
        "kept": state.is_kept,
        "seed": state.seed,
        "backend": lowering.backend or None,
        "native": lowering.native if lowering.backend else None,
        "reason": None if lowering.obstacle is None else lowering.obstacle.reason,
        "remedy": None if lowering.obstacle is None else lowering.obstacle.remedy,
        "operands": [
            {"role": role, "format": format, "options": list(options)}
            for role, format, options in state.operands
        ],
    }


def _stack(stack: Stack) -> dict[str, Any]:
    return {
        "name": stack.name,
        "size": stack.size,
        "linears": list(stack.linears),
        "classes": list(map(_layer_class, stack.classes)),
    }


def _layer_class(ranges: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    count = sum(last - first + 1 for first, last in ranges)
    return {"label": f"{format_ranges(ranges)} x{count}", "layers": list(map(list, ranges)), "count": count}


# ---- graph


def graph_data(graph: nx.DiGraph[int]) -> dict[str, Any]:
    """The graph as lists: the nodes by number, each with its children, and the data edges."""
    return {
        "nodes": [_node_data(graph, node) for node in graph],
        "edges": [[u, v] for u, v, edge in graph.edges(data=True) if edge["kind"] == "data"],
    }


def _node_data(graph: nx.DiGraph[int], node: int) -> dict[str, Any]:
    attributes = graph.nodes[node]
    data = {key: _as_list(value) for key, value in attributes.items() if value not in (None, "", ())}
    children = children_of(graph, node)
    return data | {"children": children} if children else data


def _as_list(value: Any) -> Any:
    return [_as_list(item) for item in value] if isinstance(value, tuple) else value
