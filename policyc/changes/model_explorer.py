"""A diff for Google's Model Explorer: two graphs, the mapping of their nodes, and node data.

`model-explorer before.json after.json` shows both; the page takes `mapping.json` for its synchronized navigation, and
`changes.json` as node data.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import networkx as nx

from policyc.base.text import escape_controls, format_ranges
from policyc.changes.graph import children_of, graph_of
from policyc.changes.model import DiffData
from policyc.changes.svg import FORMAT_COLORS, OTHER_COLOR
from policyc.language.formats import FORMATS
from policyc.language.recipes import Gemm

_CHANGE_COLORS = {"before": "#ffd8d3", "after": "#cdeccd"}


def write_model_explorer(diff: DiffData, folder: Path) -> None:
    """Writes `before.json`, `after.json`, `mapping.json` and `changes.json`. Creates the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in model_explorer_data(diff).items():
        (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def model_explorer_data(diff: DiffData) -> dict[str, Any]:
    """The content of the files, by name without the suffix."""
    graph = graph_of(diff)
    return {
        "before": _collection(diff, graph, "before"),
        "after": _collection(diff, graph, "after"),
        "mapping": _mapping(graph),
        "changes": {side: _node_data(diff, graph, side) for side in ("before", "after")},
    }


def _collection(diff: DiffData, graph: nx.DiGraph[int], side: str) -> dict[str, Any]:
    """The equations of one side, in the namespaces of their scopes."""
    label = (diff.before if side == "before" else diff.after).label
    nodes = [
        _node(diff, graph, node, namespace, side)
        for node, namespace in _with_namespaces(graph)
        if graph.nodes[node]["side"] in ("both", side)
    ]
    return {"label": escape_controls(label), "graphs": [{"id": side, "nodes": nodes}]}


def _with_namespaces(graph: nx.DiGraph[int], node: int = 0, namespace: str = "") -> list[tuple[int, str]]:
    equations: list[tuple[int, str]] = []
    for child in children_of(graph, node):
        attributes = graph.nodes[child]
        if attributes["type"] == "equation":
            equations.append((child, namespace))
            equations += _with_namespaces(graph, child, f"{namespace}/{attributes['op']}_{child}".lstrip("/"))
        else:
            equations += _with_namespaces(graph, child, f"{namespace}/{_scope_name(attributes)}".lstrip("/"))
    return equations


def _scope_name(attributes: dict[str, Any]) -> str:
    members, iterations = attributes.get("members"), attributes.get("iterations")
    ranges = tuple(members or ()) or ((iterations,) if iterations else ())
    name = escape_controls(str(attributes["name"])).replace("/", "_")
    return f"{name}[{format_ranges(ranges)}]" if ranges else name


def _node(diff: DiffData, graph: nx.DiGraph[int], node: int, namespace: str, side: str) -> dict[str, Any]:
    attributes = graph.nodes[node]
    sources = (u for u, _, edge in graph.in_edges(node, data=True) if edge["kind"] == "data")
    edges = (u for u in sources if graph.nodes[u]["side"] in ("both", side))
    values = {
        "params": attributes["params"],
        "place": attributes["place"],
        "reason": attributes.get("reason", ""),
        "product": attributes.get("product", ""),
        "linear": diff.linears[attributes["linear"]].full_name if "linear" in attributes else "",
    }
    return {
        "id": str(node),
        "label": attributes["op"],
        "namespace": namespace,
        "attrs": [{"key": key, "value": escape_controls(value)} for key, value in values.items() if value],
        "incomingEdges": [{"sourceNodeId": str(u)} for u in sorted(edges)],
        "outputsMetadata": [
            {"id": str(number), "attrs": [{"key": "tensor_shape", "value": output}]}
            for number, output in enumerate(attributes["outputs"])
        ],
    }


def _mapping(graph: nx.DiGraph[int]) -> dict[str, Any]:
    """Maps nodes before to nodes after: unchanged equations to themselves, and changed ones to their replacements."""
    pairs: dict[int, dict[str, list[str]]] = {}
    for node, attributes in graph.nodes(data=True):
        if attributes["type"] != "equation":
            continue
        sides = ("before", "after") if attributes["side"] == "both" else (attributes["side"],)
        for side in sides:
            pairs.setdefault(attributes["pair"], {}).setdefault(side, []).append(str(node))
    return {
        "type": "sync_navigation",
        "mappingEntries": [
            {"leftNodeIds": pair["before"], "rightNodeIds": pair["after"]}
            for pair in pairs.values()
            if len(pair) == 2
        ],
        "disableMappingFallback": True,
    }


def _node_data(diff: DiffData, graph: nx.DiGraph[int], side: str) -> dict[str, Any]:
    """For each equation that differs, the bits of its product's format; 0 if it belongs to no product."""
    results: dict[str, Any] = {}
    for node, attributes in graph.nodes(data=True):
        if attributes["type"] == "equation" and attributes["side"] == side:
            format = _product_format(diff, attributes, side)
            bits = FORMATS[format].bits if format in FORMATS else 0
            color = FORMAT_COLORS.get(format, OTHER_COLOR) if format else _CHANGE_COLORS[side]
            results[str(node)] = {"value": bits, "bgColor": color}
    return {"name": "bits of changed products", "results": results}


def _product_format(diff: DiffData, attributes: dict[str, Any], side: str) -> str:
    """The format of the product that an equation belongs to; empty if it belongs to none."""
    if "linear" not in attributes:
        return ""
    run = diff.linears[attributes["linear"]].run_at(attributes.get("layer"))
    product = run.product(Gemm(attributes.get("product") or Gemm.FPROP))
    return "" if product is None else (product.before if side == "before" else product.after).state.format
