"""The graph of a diff: scopes and equations, as a networkx graph that every output reads.

Nodes are integers. Edges of the kind `contains` lead from a node to its children, in order; edges of the kind `data`
lead from an equation to the equations that read its results. Scopes with the same content, such as the layers of an
unrolled stack, share one node.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
from jax.extend.core import DropVar, JaxprEqn, Literal, Var

from policyc.base.text import as_ranges
from policyc.changes.matching import Match, MatchedJaxpr
from policyc.changes.model import DiffData
from policyc.changes.scopes import Nesting, ScopeTree, SiteIndex, renamed_results, scope_results
from policyc.jaxcore.jaxprs import reading as jaxprs

_MAX_LITERAL = 24  # characters of a literal in the text of an equation
_CONTAINER_PARAMETERS = ("name", "length", "reverse", "unroll")
_MAX_PARAMETER = 80  # characters of one parameter: a sharding or a mesh has hundreds


def build_graph(diff: DiffData) -> nx.DiGraph[int]:
    """Builds the graph of a diff. Node 0 is the root, the loss."""
    builder = _GraphBuilder(diff)
    root = builder.add_scope(None, name="loss", kind="loss")
    if diff.matched.hoisted:
        builder.add_hoisted(root, diff.matched.hoisted)
    builder.add_jaxpr(root, diff.matched.loss)
    builder.count_changes(root)
    return builder.graph


# ---- nodes


@dataclass(slots=True)
class _Names:
    """The variables of a jaxpr: their short names, the nodes that compute them on each side, and their readers.

    An equation and its replacement compute the same variable, so a variable may have a producer on each side.
    """

    names: dict[Var, str] = field(default_factory=dict)
    producers: dict[Var, dict[str, int]] = field(default_factory=dict)
    readers: list[tuple[Var, int]] = field(default_factory=list)

    def same(self, one: Var, other: Var) -> None:
        """Records that two variables, one before and one after, are the same."""
        self.names[other] = self[one]
        if one in self.producers:
            self.producers[other] = self.producers[one]

    def __getitem__(self, var: Var) -> str:
        if var not in self.names:
            self.names[var] = _letters(len(self.names))
        return self.names[var]


def _letters(number: int) -> str:
    """The name of a variable, as JAX prints it: a, b, ..., z, ba, bb, ..."""
    letters = ""
    while True:
        number, digit = divmod(number, 26)
        letters = chr(ord("a") + digit) + letters
        if not number:
            return letters


class _GraphBuilder:
    """Adds scopes and equations to a graph."""

    def __init__(self, diff: DiffData) -> None:
        self.graph: nx.DiGraph[int] = nx.DiGraph()
        self._diff = diff
        self._sites = SiteIndex(diff)
        self.nest = Nesting(self._sites)
        self._pairs = itertools.count()

    def _add(self, parent: int | None, **attributes: Any) -> int:
        node = len(self.graph)
        self.graph.add_node(node, **attributes)
        if parent is not None:
            self.graph.add_edge(parent, node, kind="contains")
        return node

    def add_scope(self, parent: int | None, *, name: str, kind: str, **attributes: Any) -> int:
        return self._add(parent, type="scope", name=name, kind=kind, **attributes)

    def add_children(self, parent: int, children: Sequence[ScopeTree | Match], names: _Names) -> None:
        for child in children:
            if isinstance(child, ScopeTree):
                node = self.add_scope(
                    parent, name=child.name, kind=child.kind, members=as_ranges(sorted(child.members))
                )
                self.add_children(node, child.children, names)
                for copy in child.copies:
                    _alias(child, copy, names)
            else:
                self._add_match(parent, child, names)

    def add_jaxpr(self, parent: int, matched: MatchedJaxpr) -> None:
        """Adds the equations of a jaxpr in their name scopes."""
        names = _Names()
        self.add_children(parent, self.nest(matched.matches), names)
        self._add_data_edges(names)

    def add_hoisted(self, parent: int, hoisted: Sequence[Match]) -> None:
        """Adds the quantizations that run once per step. Equal ones of different layers share a scope."""
        groups: dict[tuple[str, str], list[Match]] = {}
        for match in hoisted:
            groups.setdefault((self._sites.name(match), self.nest.signature([match])), []).append(match)
        scope = self.add_scope(parent, name="once per step", kind="hoisted")
        for (name, _), matches in groups.items():
            members = {layer for match in matches for layer in self._sites.layers(match)}
            node = self.add_scope(scope, name=name, kind="hoisted", members=as_ranges(sorted(members)))
            names = _Names()
            self._add_match(node, matches[0], names)
            self._add_data_edges(names)

    def _add_match(self, parent: int, match: Match, names: _Names) -> None:
        pair = next(self._pairs)
        common = {"pair": pair, **self._sites.attributes(match)}
        if match.reason is None:
            for eqn, twin in zip(match.before, match.after, strict=True):
                node = self._add_equation(parent, eqn, "both", names, common)
                names.readers += [(a, node) for a in twin.invars if isinstance(a, Var)]
            for old, new in renamed_results(match):
                names.same(old, new)
            return
        common["reason"] = str(match.reason)
        nodes = [
            self._add_equation(parent, eqn, side, names, common, opened=not match.inside)
            for side, eqns in (("before", match.before), ("after", match.after))
            for eqn in eqns
        ]
        for inner in match.inside:
            piece = inner.iterations
            node = self.add_scope(
                parent,
                name=inner.label,
                kind=jaxprs.primitive_name(match.equation),
                pair=pair,
                reason=str(match.reason),
                iterations=None if piece is None else (piece.start, piece.stop - 1),
                containers=tuple(nodes),
            )
            self.add_jaxpr(node, inner)

    def _add_equation(
        self,
        parent: int,
        eqn: JaxprEqn,
        side: str,
        names: _Names,
        common: dict[str, Any],
        *,
        opened: bool = False,
    ) -> int:
        """Adds an equation. If `opened`, also adds the equations of the jaxprs inside it."""
        subs = jaxprs.sub_jaxprs(eqn)
        inside = sum(1 for sub in subs for _ in jaxprs.all_equations(sub.jaxpr))
        node = self._add(
            parent,
            type="equation",
            side=side,
            op=jaxprs.primitive_name(eqn),
            params=short_parameters(eqn),
            inputs=tuple(_atom(a, names) for a in eqn.invars if not _is_rounding_key(eqn, a)),
            outputs=tuple(_output(v, names) for v in eqn.outvars),
            inside=inside,
            **{"place": self._diff.short_path(jaxprs.source_place(eqn))} | common,
        )
        names.readers += [(a, node) for a in eqn.invars if isinstance(a, Var)]
        for var in eqn.outvars:
            if not isinstance(var, DropVar):
                names.producers.setdefault(var, {})[side] = node
        inherited = {key: value for key, value in common.items() if key in ("pair", "place")}
        for sub in subs if opened else ():
            inner = _Names()
            scope = self.add_scope(node, name=sub.param, kind=jaxprs.primitive_name(eqn))
            for inner_eqn in jaxprs.equations(sub.jaxpr):
                self._add_equation(scope, inner_eqn, side, inner, inherited, opened=True)
            self._add_data_edges(inner)
        return node

    def _add_data_edges(self, names: _Names) -> None:
        for var, node in names.readers:
            for side, producer in names.producers.get(var, {}).items():
                sides = {side, self.graph.nodes[node]["side"]}
                if producer != node and sides != {"before", "after"}:
                    self.graph.add_edge(producer, node, kind="data")

    def count_changes(self, node: int) -> tuple[int, int]:
        """Stores in every scope how many equations are in it, and how many of these changed. Returns both numbers."""
        total = changed = 0
        for child in children_of(self.graph, node):
            if self.graph.nodes[child]["type"] == "equation":
                total += 1
                changed += self.graph.nodes[child]["side"] != "both"
            inner_total, inner_changed = self.count_changes(child)
            total, changed = total + inner_total, changed + inner_changed
        if self.graph.nodes[node]["type"] == "scope":
            self.graph.nodes[node].update(equations=total, changed=changed)
        return total, changed


def children_of(graph: nx.DiGraph[int], node: int) -> list[int]:
    """The children of a node, in order."""
    return [v for _, v, edge in graph.out_edges(node, data=True) if edge["kind"] == "contains"]


def _alias(shown: ScopeTree, copy: ScopeTree, names: _Names) -> None:
    """Records the nodes of the scope that is shown as producers of a copy's results."""
    for one, other in zip(scope_results(shown), scope_results(copy), strict=True):
        if one in names.producers:
            names.producers[other] = names.producers[one]


def _atom(atom: Any, names: _Names) -> str:
    if not isinstance(atom, Literal):
        return names[atom]
    text = str(atom.val).replace("\n", " ")
    return text if len(text) <= _MAX_LITERAL else f"{text[: _MAX_LITERAL - 1]}…"


def _is_rounding_key(eqn: JaxprEqn, atom: Any) -> bool:
    """Whether an operand is a literal word of a rounding key, which tells a reader nothing."""
    is_word = isinstance(atom, Literal) and str(atom.aval) == "uint32[]"
    return is_word and jaxprs.primitive_name(eqn) == "custom_vjp_call"


def _output(var: Var, names: _Names) -> str:
    name = "_" if isinstance(var, DropVar) else names[var]
    return f"{name}:{jaxprs.type_text(var.aval)}"


def short_parameters(eqn: JaxprEqn) -> str:
    """The parameters that define what an equation computes, on one line. For a container: its name and iterations."""
    names = _CONTAINER_PARAMETERS if jaxprs.sub_jaxprs(eqn) else eqn.params
    words = []
    for name in names:
        value = eqn.params.get(name)
        is_default = value is None or value is False or (isinstance(value, tuple) and not value)
        if is_default or callable(value) or "sharding" in name:
            continue
        text = " ".join(f"{name}={jaxprs.stable_text(value)}".split())
        words.append(text if len(text) <= _MAX_PARAMETER else f"{text[: _MAX_PARAMETER - 1]}…")
    return " ".join(words)
