"""The products in the flow of activations: sites, the data they read, and the nearest products before and after."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cache

from policyc.compiler.flow import CARRY, CONSTANT, INPUT, Flow
from policyc.compiler.residuals import find_residuals
from policyc.compiler.site_kinds import SiteKind
from policyc.compiler.sites import Site
from policyc.jaxcore.transform import Address


@dataclass(slots=True, kw_only=True)
class ProductFlow:
    """A flow with its sites, by node.

    Attributes:
      matrices: for each product with a weight, or with another operand that is no activation: the number of that operand.
      weighted: the nodes of `matrices`.
      activations: the nodes computed from both data and parameters by products and lookups.
      from_data: the nodes computed from inputs and arrays that the loss closes over.
      states: the nodes on the cycles of carries that pass through no weight product, such as the state of a linear
        recurrence. Sums over iterations do not count.
      residuals: the additions to the residual stream.
      branches: for each product in branches of the residual stream, the additions at the ends of these branches.
      sequential: the loops that carry a stream through their products.
      products: all sites and fused attentions.
      ends: `products` and `residuals`. Forward walks end there.
      starts: `ends` and the carries of loops. Backward walks end there.
      fused: the attentions inside one opaque call, each with those of its operands that weight products compute.
      kinds: the kinds found so far.
      uncertain: products whose kind is uncertain, unless they are in `kinds`.
    """

    flow: Flow
    sites: dict[int, Site]
    matrices: dict[int, int]
    weighted: set[int]
    activations: set[int]
    from_data: set[int]
    states: set[int]
    residuals: set[int]
    branches: dict[int, frozenset[int]]
    sequential: set[Address]
    products: set[int]
    ends: set[int]
    starts: set[int]
    fused: dict[int, tuple[int, ...]] = field(default_factory=dict)
    kinds: dict[int, SiteKind] = field(default_factory=dict)
    uncertain: dict[int, SiteKind] = field(default_factory=dict)

    @classmethod
    def of(cls, flow: Flow) -> ProductFlow:
        sites = flow.sites
        from_data, activations = _find_activations(flow)
        matrices = {node: side for node in sites if (side := _matrix(flow, node, activations)) is not None}
        states = _find_states(flow, matrices)
        residuals = find_residuals(flow, matrices, states)
        ends = sites.keys() | residuals.keys()
        for node in [n for n in residuals if _is_operand_of_scores(flow, n, ends, matrices)]:
            del residuals[node]
        branches: dict[int, frozenset[int]] = {}
        for addition, members in residuals.items():
            this = frozenset((addition,))
            for node in members:
                branches[node] = branches[node] | this if node in branches else this
        return cls(
            flow=flow,
            sites=sites,
            matrices=matrices,
            weighted=set(matrices),
            activations=activations,
            from_data=from_data,
            states=states,
            residuals=set(residuals),
            branches=branches,
            sequential=_sequential_loops(flow),
            products=set(sites),
            ends=sites.keys() | residuals.keys(),
            starts=sites.keys() | residuals.keys() | set(flow.nodes_of([CARRY])),
        )

    def add_fused(self, node: int, operands: tuple[int, ...]) -> None:
        self.fused[node] = operands
        for nodes in (self.products, self.ends, self.starts):
            nodes.add(node)

    def data(self, node: int) -> int | None:
        """The node of the operand that a weight product multiplies with its weight; None if it is constant."""
        data = self.flow.operands[node][1 - self.matrices[node]]
        return data if data >= 0 else None

    def weights_before(self, nodes: Collection[int]) -> set[int]:
        """The nearest weight products that some nodes are computed from. They may be among these nodes."""
        if self.starts.issuperset(nodes):  # usually a single node: a weight product or the residual stream
            return self.weighted.intersection(nodes)
        return self.flow.before(nodes, self.starts) & self.weighted

    def after(self, nodes: Iterable[int]) -> set[int]:
        """The nodes after some nodes, up to and including the next products and residual additions."""
        return self.flow.after(nodes, self.ends)

    def mark(self, node: int, kind: str, text: str, other: int | None = None) -> bool:
        """Sets the kind of a product, unless it has one; returns whether it was set.

        `{place}` in the text stands for the file and line of the node `other`.
        """
        if node in self.kinds:
            return False
        self.kinds[node] = (
            _same_kind(kind, text) if other is None else SiteKind(kind, text, self.flow.calls[other])
        )
        return True


    def doubt(self, nodes: Iterable[int], possible: tuple[str, ...], text: str, other: int | None = None) -> None:
        """Notes why the kinds of some products are uncertain. The first reason for a product counts."""
        call = None if other is None else self.flow.calls[other]
        for node in nodes:
            self.uncertain.setdefault(node, SiteKind("", text, call, possible))


_same_kind = cache(SiteKind)

_MIXES = ("gather", "dynamic_slice", "conv_general_dilated")
"""Operations besides products by which a parameter and data make an activation."""


def _find_activations(flow: Flow) -> tuple[set[int], set[int]]:
    """The fields `from_data` and `activations` of a `ProductFlow`."""
    inputs = flow.nodes_of([INPUT])
    from_data = flow.after(inputs).union(inputs)
    mixed = from_data & (flow.learned | flow.after(flow.learned))
    mixed &= flow.sites.keys() | flow.opaque.keys() | set(flow.nodes_of(_MIXES))
    return from_data, mixed | flow.after(mixed)


def _find_states(flow: Flow, weighted: Collection[int]) -> set[int]:
    states = set[int]()
    for loop in flow.loops.values():
        for carry, result in loop.carries:
            cycle = {carry, *flow.between(carry, flow.before([result], first=loop.first))}
            is_sum = all(flow.operations[node] in (CARRY, "add", "add_any") for node in cycle) and not any(
                user not in cycle and user <= loop.last for node in cycle for user in flow.users[node]
            )
            if not is_sum and cycle.isdisjoint(weighted):
                states |= cycle
    return states


def _matrix(flow: Flow, node: int, activations: Collection[int]) -> int | None:
    """The number of the operand that is a weight, or the only one that is neither an activation nor a constant."""
    weight = flow.sites[node].weight
    if weight is not None:
        return 0 if weight == "lhs" else 1
    fixed = [number for number, operand in enumerate(flow.operands[node][:2]) if operand not in activations]
    return fixed[0] if len(fixed) == 1 and flow.operands[node][fixed[0]] != CONSTANT else None


def _is_operand_of_scores(flow: Flow, node: int, ends: Collection[int], matrices: Collection[int]) -> bool:
    """Whether only one product, of two activations, reads an addition: it adds rotary positions, not a branch."""
    reached = flow.after([node], ends) & ends
    return len(reached) == 1 and reached.isdisjoint(matrices) and reached <= flow.sites.keys() and not (
        ends.isdisjoint(flow.after(reached, ends))
    )


def _sequential_loops(flow: Flow) -> set[Address]:
    """The loops that carry a stream through their products: each iteration multiplies the result of the last one."""
    sequential = set()
    for address, loop in flow.loops.items():
        for carry, result in loop.carries:
            before = flow.before([result], first=loop.first)
            if not before.isdisjoint(flow.sites.keys() & flow.between(carry, before)):
                sequential.add(address)
                break
    return sequential
