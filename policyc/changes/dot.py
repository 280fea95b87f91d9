"""The graph of a diff in Graphviz's language: scopes are clusters, changed equations are colored."""

from __future__ import annotations

from collections.abc import Iterator

import networkx as nx

from policyc.base.text import escape_controls, format_ranges
from policyc.changes.graph import children_of, graph_of
from policyc.changes.model import DiffData
from policyc.changes.terminal import equation_text

_COLORS = {"before": "#ffd8d3", "after": "#cdeccd", "both": "#f2f3f5"}
_MAX_LABEL = 60


def as_dot(diff: DiffData) -> str:
    """The whole graph. `dot -Tsvg` draws it."""
    graph = graph_of(diff)
    lines = [
        "digraph diff {",
        '  graph [fontname="Helvetica", rankdir=TB, compound=true];',
        '  node [shape=box, style=filled, fontname="Helvetica", fontsize=9];',
        *_scope_lines(graph, 0, 1),
    ]
    lines += [f"  n{u} -> n{v};" for u, v, edge in graph.edges(data=True) if edge["kind"] == "data"]
    return "\n".join([*lines, "}"]) + "\n"


def _scope_lines(graph: nx.DiGraph[int], node: int, depth: int) -> Iterator[str]:
    indent = "  " * depth
    attributes = graph.nodes[node]
    if attributes["type"] == "equation":
        label = equation_text(attributes)[:_MAX_LABEL]
        yield f"{indent}n{node} [label={_quote(label)}, fillcolor={_quote(_COLORS[attributes['side']])}];"
        for child in children_of(graph, node):
            yield from _scope_lines(graph, child, depth)
        return
    members = attributes.get("members")
    label = f"{attributes['name']}[{format_ranges(tuple(members))}]" if members else str(attributes["name"])
    yield f"{indent}subgraph cluster_{node} {{"
    yield f"{indent}  label={_quote(label)};"
    for child in children_of(graph, node):
        yield from _scope_lines(graph, child, depth + 1)
    yield f"{indent}}}"


def _quote(text: str) -> str:
    escaped = escape_controls(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
