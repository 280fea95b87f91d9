"""Which products of a loss are in one network, and which are in networks side by side.

A network is a chain: a residual stream from addition to addition, or products that read each other. Two towers, two
passes through one tower, and the branches after a shared trunk are networks of their own. What a cross-attention reads
does not join networks: a decoder is not a part of its encoder.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from policyc.compiler.kinds.product_flow import ProductFlow
from policyc.compiler.sites.site_masks import union

_MAX_NEAR = 16  # additions, and products, that a node is said to read; older ones are shortcuts
_BARRIERS = ("conv_general_dilated", "reduce_sum", "reduce_max")
"""A stream does not pass through these: a decoder that adds the mean of the encoder does not continue it."""


class Near(NamedTuple):
    """The nearest residual additions and products that a node is computed from."""

    additions: frozenset[int] = frozenset()
    products: frozenset[int] = frozenset()


_NOTHING = Near()


class Place(NamedTuple):
    """Where a product is among the others.

    Attributes:
      network: equal for products of one network.
      use: the node before which it is needed: its own, or that of its first reader if it is computed earlier, before
        products of other branches.
      reads: the products whose results it reads, not through a residual addition.
      readers: the products and residual additions that read its result.
      bit: stands for it in the `ancestors` of others.
      ancestors: all products that it is computed from, in an iteration of the loops around it.
    """

    network: int
    use: int
    reads: frozenset[int]
    readers: frozenset[int]
    bit: int
    ancestors: int


def find_places(products: ProductFlow) -> dict[int, Place]:
    """The place of each product."""
    near = _find_near(products)
    bits = {node: 1 << number for number, node in enumerate(products.sites)}
    ancestors: dict[int, int] = {}
    readers: dict[int, list[int]] = defaultdict(list)
    for node in sorted(products.ends):
        read = near[node].additions | near[node].products
        ancestors[node] = union(bits.get(n, 0) | ancestors[n] for n in read)
        for product in near[node].products:
            readers[product].append(node)
    networks, uses = _find_networks(products, near, readers), _find_uses(products, readers)
    return {
        node: Place(
            network=networks[node],
            use=uses[node],
            reads=near[node].products & products.sites.keys(),
            readers=frozenset(readers[node]),
            bit=bit,
            ancestors=ancestors[node],
        )
        for node, bit in bits.items()
    }


def _find_uses(products: ProductFlow, readers: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Where each product is needed.

    A product that feeds one branch only, such as the keys of a constant memory, may be computed long before it: for all
    layers before the first one.
    """
    loops, nowhere = products.flow.loops.values(), frozenset[int]()
    fed = products.branches | {addition: frozenset((addition,)) for addition in products.residuals}
    uses: dict[int, int] = {}
    nodes = sorted(products.ends)
    for number, node in reversed([*enumerate(nodes, 1)]):
        uses[node] = node
        later = [reader for reader in readers[node] if reader > node] if node not in fed else ()
        if not later:
            continue
        branches = [fed.get(reader, nowhere) for reader in later]
        fed[node] = nowhere.union(*branches)
        use = min(uses[reader] for reader in later)
        between = nodes[number : bisect_left(nodes, use)]
        if (
            node in products.sites
            and frozenset.intersection(*branches)
            and any(n in fed and fed[n].isdisjoint(fed[node]) for n in between)
            and all((lo.first <= node <= lo.last) == (lo.first <= use <= lo.last) for lo in loops)
        ):
            uses[node] = use
    return uses


def _find_networks(
    products: ProductFlow, near: list[Near], readers: Mapping[int, Sequence[int]]
) -> dict[int, int]:
    """A number for each product, equal for products in the same network."""
    streams = _find_streams(products, near)
    network_of = {addition: streams.find(addition) for addition in products.residuals}
    network_of |= {node: network_of[min(branches)] for node, branches in products.branches.items()}
    rest = [node for node in sorted(products.products) if node not in network_of]
    if network_of:
        # Products outside branches belong to the stream that they feed, or else to the stream that they read.
        for node in reversed(rest):
            _join_only(network_of, node, readers[node])
        for node in rest:
            _join_only(network_of, node, near[node].additions | near[node].products)
    plain = _Groups()
    for node in rest:
        if node not in network_of:
            plain.join([node, *(near[node].products - network_of.keys())])
    return {node: network_of[node] if node in network_of else plain.find(node) for node in products.sites}


def _join_only(network_of: dict[int, int], node: int, others: Iterable[int]) -> None:
    """Puts a product into the network of some others, if it is in none and they are all in one."""
    networks = {network_of[n] for n in others if n in network_of}
    if node not in network_of and len(networks) == 1:
        network_of[node] = networks.pop()


class _Groups:
    """Disjoint sets of nodes."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def find(self, node: int) -> int:
        while (parent := self._parents.get(node, node)) != node:
            node = parent
        return node

    def join(self, nodes: Iterable[int]) -> None:
        roots = {self.find(node) for node in nodes}
        self._parents |= dict.fromkeys(roots, min(roots))


def _find_near(products: ProductFlow) -> list[Near]:
    """For each node, what it reads. After a loop, a carry stands for its last value."""
    flow = products.flow
    near: list[Near] = []
    barriers = set(flow.nodes_of(_BARRIERS))
    carries = defaultdict(list)
    for loop in flow.loops.values():
        carries[loop.last].extend(loop.carries)
    for node, inputs in enumerate(flow.inputs):
        read = _read(products, near, [i for i in inputs if i < node])
        near.append(Near(products=read.products) if node in barriers else read)
        for carry, result in carries.get(node, ()):
            near[carry] = _read(products, near, [*(i for i in flow.inputs[carry] if i < carry), result])
    flow.visits += len(near)
    return near


def _read(products: ProductFlow, near: list[Near], inputs: Collection[int]) -> Near:
    found = []
    for node in inputs:
        if node in products.residuals:
            found.append(Near(frozenset((node,))))
        elif node in products.products:
            found.append(Near(products=frozenset((node,))))
        elif near[node] not in found:
            found.append(near[node])
    if len(found) < 2:
        return found[0] if found else _NOTHING
    return Near(*(_latest(sets) for sets in zip(*found, strict=True)))


def _latest(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    every = frozenset[int]().union(*sets)
    return every if len(every) <= _MAX_NEAR else frozenset(sorted(every)[-_MAX_NEAR:])


def _find_streams(products: ProductFlow, near: list[Near]) -> _Groups:
    """The chains of residual additions, each of which adds to the one before.

    A chain ends where the stream forks, or where several join. A shortcut from an earlier addition is no fork and no
    join, nor are the branches of one addition: `(x + f(x)) + (x + g(x))`.
    """
    streams = _Groups()
    before: dict[int, frozenset[int]] = {}
    bits: dict[int, int] = {}
    ancestors: dict[int, int] = {}
    """For each addition: those before it on the stream, as bits."""
    for number, addition in enumerate(sorted(products.residuals)):
        reads = near[addition].additions
        if not reads:  # perhaps a product is on the stream: two streams merged, or another width
            on_stream = (near[addition].products & products.sites.keys()) - products.branches.keys()
            reads = frozenset[int]().union(*(near[node].additions for node in on_stream))
        older = union(ancestors[other] for other in reads)
        bits[addition], ancestors[addition] = 1 << number, older | union(bits[other] for other in reads)
        reads = frozenset(other for other in reads if not bits[other] & older)
        operands = [set(products.flow.inputs[other]) for other in reads]
        if len(reads) > 1 and set.intersection(*operands):
            streams.join([addition, *reads])
            reads = frozenset[int]().union(*(before[other] for other in reads))
        before[addition] = reads
    after: dict[int, set[int]] = defaultdict(set)
    for addition, reads in before.items():
        for other in reads:
            after[other].add(streams.find(addition))
    chains: dict[int, list[int]] = {}
    for addition, reads in before.items():
        chain = chains[next(iter(reads))] if len(reads) == 1 else []
        if chain and streams.find(addition) == _next(products, chain, after[next(iter(reads))]):
            streams.join([addition, *reads])
        else:
            chain = []
        chain.append(addition)
        chains[addition] = chain
    _join_inner(products, near, streams)
    return streams


def _next(products: ProductFlow, chain: Sequence[int], additions: Collection[int]) -> int | None:
    """Which of the additions that read the end of a chain continues it; None if the stream forks into equal networks.

    After a fork, the addition continues that has the products which follow in the chain, as far as it is a repetition.
    """
    if len(additions) == 1:
        return next(iter(additions))
    members: dict[int, list[tuple[int, int]]] = {addition: [] for addition in (*chain, *additions)}
    for node, branches in sorted(products.branches.items()):
        for addition in branches & members.keys():
            members[addition].append((products.sites[node].k, products.sites[node].n))
    before = [
        number for number, addition in enumerate(chain[:-1], 1) if members[addition] == members[chain[-1]]
    ]
    expected = members[chain[before[-1] if before else 0]]
    equal = [addition for addition in additions if members[addition] == expected]
    return equal[0] if len(equal) == 1 else None


def _join_inner(products: ProductFlow, near: list[Near], streams: _Groups) -> None:
    """Joins additions inside a branch with the stream around it: they read its products, and its products read them."""
    stream_of = {addition: streams.find(addition) for addition in products.residuals}
    members: dict[int, set[int]] = defaultdict(set)
    reads: dict[int, set[int]] = defaultdict(set)
    for node, branches in products.branches.items():
        stream = stream_of[min(branches)]
        members[stream].add(node)
        reads[stream] |= near[node].products
    for outer, nodes in members.items():
        for addition in frozenset[int]().union(*(near[node].additions for node in nodes)):
            if not nodes.isdisjoint(reads[stream_of[addition]]):
                streams.join([stream_of[addition], outer])
