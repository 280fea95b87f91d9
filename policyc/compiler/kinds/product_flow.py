"""The products in the flow of activations: sites, the data they read, and the nearest products before and after."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Literal

from policyc.compiler.kinds.flow import CARRY, CONSTANT, INPUT, Flow
from policyc.compiler.kinds.residuals import find_residuals
from policyc.compiler.sites.site import Site
from policyc.compiler.sites.site_kinds import SiteKind
from policyc.jaxcore.jaxprs.transform import Address
from policyc.language.selectors import DottedPath


@dataclass(kw_only=True)
class ProductFlow:
    """A flow with its sites, by node.

    Attributes:
      matrices: for each product with a weight, or one operand that is no activation: the number of that operand.
      weighted: the nodes of `matrices`.
      activations: the nodes computed from both data and parameters by products and lookups.
      learned: the nodes computed from parameters.
      from_data: the nodes computed from inputs, arrays that the loss closes over, and other constants.
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
    learned: set[int]
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

    @cached_property
    def makers(self) -> set[int]:
        """The products whose results are used only to make a weight of another product."""
        matrices = (self.flow.operands[node][side] for node, side in self.matrices.items())
        makers = self.flow.before((m for m in matrices if m >= 0), self.ends) & self.weighted
        pending = list(makers)
        for node in pending:
            data = self.data(node)
            for other in self.weights_before([data]) - makers if data is not None else ():
                if self.after([other]) & self.ends <= makers:
                    makers.add(other)
                    pending.append(other)
        return makers

    @classmethod
    def of(cls, flow: Flow, looked_up: Collection[DottedPath]) -> ProductFlow:
        """`looked_up` has the parameters whose rows are gathered."""
        sites = flow.sites
        learned = flow.learned | flow.after(flow.learned)
        from_data = _find_data(flow)
        mixed = learned & from_data & {*sites, *flow.opaque, *flow.nodes_of(_MIXES)}
        activations = mixed | flow.after(mixed)
        rows = {n for n, s in sites.items() if looked_up and any(p.path in looked_up for p in s.parameters)}
        sides = (
            (node, _matrix(flow, node, learned, activations, may_look_up=node in rows)) for node in sites
        )
        matrices = {node: side for node, side in sides if side is not None}
        states = _find_states(flow, matrices)
        residuals = find_residuals(flow, matrices, states)
        ends = sites.keys() | residuals.keys()
        ends |= {
            n for n, operands in flow.opaque.items() if len({o for o in operands if o >= 0}) >= _OPERANDS
        }
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
            learned=learned,
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
        self.kinds[node] = _same_kind(kind, text) if other is None else self.kind_at(kind, text, other)
        return True

    def kind_at(self, kind: str, text: str, other: int, possible: tuple[str, ...] = ()) -> SiteKind:
        """A kind for a reason. `{place}` in the text stands for the file and line of the node `other`."""
        return SiteKind(kind, text.format(place=self.flow.place(other)), possible)

    def doubtful(self, possible: tuple[str, ...], text: str, other: int) -> SiteKind:
        """An uncertain kind. `{place}` in the text is that of the node `other`."""
        return self.kind_at("", text, other, possible)


_same_kind = cache(SiteKind)

_MIXES = ("gather", "dynamic_slice", "conv_general_dilated")
"""Operations besides products by which a parameter and data make an activation."""


def _find_data(flow: Flow) -> set[int]:
    inputs = {*flow.nodes_of([INPUT]), *(n for n, operands in flow.operands.items() if CONSTANT in operands)}
    inputs.update(
        node for node in flow.nodes_of([CARRY]) if len(flow.inputs[node]) < 2 and node not in flow.learned
    )
    return flow.after(inputs) | inputs


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


def _matrix(
    flow: Flow, node: int, learned: Collection[int], activations: Collection[int], *, may_look_up: bool
) -> int | None:
    """The number of the operand that is a weight, or the only one that is neither an activation nor a constant.

    Of two such operands, it is the one that depends on a parameter: the other is data. A matrix that a one-hot product
    takes from a weight (a layer of a stack) is no activation. Looked-up rows are one.
    """
    site, operands = flow.sites[node], flow.operands[node][:2]
    fixed = [number for number, operand in enumerate(operands) if operand not in activations]
    if site.weight is not None and (len(fixed) != 1 or operands[fixed[0]] == CONSTANT):
        side = 0 if site.weight == "lhs" else 1
        return None if may_look_up and operands[side] in activations else side
    if not fixed:
        fixed = [number for number, operand in enumerate(operands) if _takes_matrix(flow.sites.get(operand))]
    if len(fixed) > 1:
        fixed = [number for number in fixed if operands[number] in learned]
    return fixed[0] if len(fixed) == 1 and operands[fixed[0]] != CONSTANT else None


def _takes_matrix(site: Site | None) -> bool:
    return (
        site is not None
        and site.has_one_hot
        and site.weight is not None
        and matrix_rank(site, site.weight) > 2
    )


def matrix_rank(site: Site, operand: Literal["lhs", "rhs"]) -> int:
    """The number of dimensions of an operand: more than two if it holds a matrix for each expert or head."""
    return len(site.shapes[0 if operand == "lhs" else 1])


_OPERANDS = 3  # of a fused attention: queries, keys and values


def _is_operand_of_scores(flow: Flow, node: int, ends: Set[int], matrices: Collection[int]) -> bool:
    """Whether only one product, of two activations, or a fused attention reads an addition: it adds no branch."""
    reached = flow.after([node], ends) & ends
    return (
        len(reached) == 1
        and reached.isdisjoint(matrices)
        and reached <= flow.sites.keys() | flow.opaque.keys()
        and not (ends.isdisjoint(flow.after(reached, ends)))
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
