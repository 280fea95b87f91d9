"""The products in the flow of activations: sites, the data they read, and the nearest products before and after."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cache

from policyc.compiler.flow import CARRY, Flow
from policyc.compiler.residuals import find_residuals
from policyc.compiler.site_kinds import SiteKind
from policyc.compiler.sites import Site
from policyc.jaxcore.transform import Address


@dataclass(slots=True, kw_only=True)
class ProductFlow:
    """A flow with its sites, by node.

    Attributes:
      weighted: the sites with a weight.
      residuals: the additions to the residual stream.
      branches: for each product in branches of the residual stream, the additions at the ends of these branches.
      sequential: the loops that carry a stream through their products.
      products: all sites and fused attentions.
      ends: `products` and `residuals`. Forward walks end there.
      starts: `ends` and the carries of loops. Backward walks end there.
      fused: the attentions inside one opaque call, each with those of its operands that weight products compute.
      kinds: the kinds found so far.
    """

    flow: Flow
    sites: dict[int, Site]
    weighted: set[int]
    residuals: set[int]
    branches: dict[int, frozenset[int]]
    sequential: set[Address]
    products: set[int]
    ends: set[int]
    starts: set[int]
    fused: dict[int, tuple[int, ...]] = field(default_factory=dict)
    kinds: dict[int, SiteKind] = field(default_factory=dict)

    @classmethod
    def of(cls, flow: Flow) -> ProductFlow:
        sites = flow.sites
        residuals = find_residuals(flow)
        branches: dict[int, frozenset[int]] = {}
        for addition, members in residuals.items():
            this = frozenset((addition,))
            for node in members:
                branches[node] = branches[node] | this if node in branches else this
        return cls(
            flow=flow,
            sites=sites,
            weighted={node for node, site in sites.items() if site.weight is not None},
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
        operands = self.flow.operands[node]
        data = operands[0 if self.sites[node].weight == "rhs" else 1]
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


_same_kind = cache(SiteKind)


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
