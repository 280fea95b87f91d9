"""Finds the kind and the block of each site from the flow of activations through the loss.

Names decide only where the flow does not. docs/reference/language.md defines the kinds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

from jax.extend.core import Var

from policyc.compiler.kinds.block_names import Place, Use, contradicted_stacks
from policyc.compiler.kinds.blocks import Product, find_blocks
from policyc.compiler.kinds.flow import INPUT, Flow, build_flow
from policyc.compiler.kinds.fused_attention import find_fused_attention
from policyc.compiler.kinds.kind_names import kind_by_name
from policyc.compiler.kinds.mixers import Mixer, find_mixers, mark_attention
from policyc.compiler.kinds.networks import find_places
from policyc.compiler.kinds.product_flow import ProductFlow
from policyc.compiler.kinds.routing import Routing
from policyc.compiler.kinds.token_mixing import OF_BRANCHES, find_doubts
from policyc.compiler.sites.site import Site
from policyc.compiler.sites.site_kinds import SiteBlock, SiteKind
from policyc.compiler.sites.site_list import Sites
from policyc.compiler.sites.stacks import LayerTable
from policyc.jaxcore.jaxprs.transform import Address
from policyc.language.kinds import KINDS
from policyc.language.selectors import DottedPath

_NONLINEAR = {
    name: 1 << number
    for number, name in enumerate(
        ("tanh", "max", "logistic", "erf", "erfc", "exp", "integer_pow", "sin", "log1p", "square")
    )
}
"""One bit per nonlinear function. The functions applied to its result help to tell products apart (`Product.key`)."""

_CLOSED_OVER = (
    "it multiplies an array that the loss closes over; if that is a weight, make it an argument of the loss"
)
_COMPUTED = "its weight is the result of a product, which policyc takes for an activation"
_MAKES_WEIGHT = "its result is only used to make a weight"
_ONLY = LayerTable((), (0,))
_NO_BRANCHES: frozenset[int] = frozenset()
_SHARED = "all iterations of the loop around it share its weight"
_STAGES = "the stages of a pipeline run it at the same time, each for different blocks"
_NO_WEIGHT = "the loop around it may run a different block in each iteration, and no weight shows which"


def find_kinds(sites: Sites, parameters: Sequence[DottedPath | None], frozen: Collection[Var]) -> Sites:
    """The sites of a loss with their kinds and blocks. The parameters and `frozen` are those of its analysis."""
    is_parameter = [path is not None for path in parameters]
    flow = build_flow(sites.jaxpr, is_parameter, frozen, sites.sites)
    found = {site.address: site for site in sites_with_kinds(flow, sites.looked_up)}
    return replace(sites, sites=tuple(found.get(site.address, site) for site in sites))


def sites_with_kinds(flow: Flow, looked_up: Collection[DottedPath]) -> Iterator[Site]:
    """The sites of a flow with their kinds and blocks. `looked_up` has the parameters whose rows are gathered."""
    products = ProductFlow.of(flow, looked_up)
    undecided = find_fused_attention(products)
    routing = Routing(products)
    mixers = find_mixers(products, routing.routed)
    _mark_heads(products, routing.routers)
    routing.mark_experts()
    _mark_lookups(products, looked_up)
    for node, kind in routing.routers.items():
        products.kinds.setdefault(node, kind)
    for mixer in mixers:
        mark_attention(products, mixer)
    blocks = _Blocks(products, mixers)
    for call, operands in undecided.items():
        around = products.weights_before(operands) | products.after([call]) & products.weighted
        text = "it is next to the call at {place}, which may be an attention"
        products.uncertain |= dict.fromkeys(around, products.doubtful(OF_BRANCHES, text, call))
    _mark_rest(
        products, blocks.positions, find_doubts(products, set[int]().union(*(mixer.own for mixer in mixers)))
    )
    for node, site in products.sites.items():
        kind = _decide(products, node)
        block = blocks.of_site.get(node) if blocks.positions else _only_block(kind, blocks.of_others)
        yield replace(site, kind=kind, block=block)


def _decide(products: ProductFlow, node: int) -> SiteKind:
    """The kind of a product: as marked, or by names if the flow does not decide."""
    site = products.sites[node]
    kind = products.kinds.get(node, SiteKind())
    if not kind.name and node in products.makers:
        return SiteKind("", _MAKES_WEIGHT)
    needs_weight = bool(kind.name) and "weight" in KINDS[kind.name].implies
    if needs_weight and not _is_weight(products, node):
        matrix = products.flow.operands[node][products.matrices[node]]
        is_closed_over = matrix in products.from_data - products.activations
        text = _CLOSED_OVER if is_closed_over else _COMPUTED
        return SiteKind("", text, possible=(kind.name,))
    if not kind.name:
        kind = products.uncertain.get(node, kind)
        if site.weight is not None and "scores" in kind.possible:
            kind = replace(kind, possible=tuple(word for word in kind.possible if word != "scores"))
    by_name = "" if kind.name else kind_by_name(site)
    if by_name and (not kind.possible or (by_name in kind.possible and site.weight is not None)):
        return SiteKind(by_name, "its names say so")
    return kind


# ---- heads and embeddings


def _mark_heads(products: ProductFlow, routers: Collection[int]) -> None:
    """Marks the products that reach a log-sum-exp as heads, except routers, which reach one through a z-loss."""
    flow = products.flow
    for node in flow.nodes_of(("log",)):
        before = flow.before(flow.inputs[node], products.ends | flow.exponentials)
        if not any(flow.operations[n] in ("reduce_sum", "div") for n in before):
            continue
        for site in flow.before(before & flow.exponentials, products.ends) & products.sites.keys():
            if site not in routers:
                products.mark(site, "head", "its result reaches the log-softmax at {place}", node)


def _mark_lookups(products: ProductFlow, looked_up: Collection[DottedPath]) -> None:
    for node in products.weighted:
        site = products.sites[node]
        if site.has_one_hot:
            products.mark(node, "embedding", "it looks up rows of its weight by a one-hot product")
        elif looked_up and _is_weight(products, node) and any(p.path in looked_up for p in site.parameters):
            products.mark(node, "embedding", "rows of its weight are also looked up by a gather")


def _is_weight(products: ProductFlow, node: int) -> bool:
    """Whether the matrix of a product is what the site has as its weight, and not looked-up rows."""
    return products.sites[node].weight == ("lhs", "rhs")[products.matrices[node]]


def _mark_rest(products: ProductFlow, in_blocks: Collection[int], doubts: Mapping[int, SiteKind]) -> None:
    """Marks the other weight products: those in blocks, those before the first block, and those that only a head uses.

    Without blocks, weight products that follow each other are an MLP. Uncertain products are not marked. `doubts` has
    products that may not be an MLP.
    """
    flow = products.flow
    stream = products.residuals.union(in_blocks)

    def mark_mlp(node: int, text: str) -> None:
        if node in doubts:
            products.uncertain[node] = doubts[node]
        else:
            products.mark(node, "mlp", text)

    def follows_block(node: int) -> bool:
        data = products.data(node)
        return data is not None and not stream.isdisjoint(flow.before([data], stream))

    def leads_to_block(node: int) -> bool:
        return not flow.after([node], stream).isdisjoint(in_blocks)

    rest = sorted(products.weighted - products.makers - products.kinds.keys() - products.uncertain.keys())
    for node in rest:
        if node in in_blocks:
            mark_mlp(node, "it is a weight product of a block, and not part of an attention")
        elif products.data(node) is not None and not follows_block(node) and leads_to_block(node):
            if node in doubts and not products.uncertain.keys().isdisjoint(products.after([node])):
                products.uncertain[node] = replace(
                    doubts[node], possible=(*doubts[node].possible, "embedding")
                )
            else:
                products.mark(node, "embedding", "it multiplies the data before the first block")
    others = [n for n in reversed(rest) if n not in products.kinds and n not in in_blocks]
    of_blocks = {r for node in in_blocks for r in products.branches.get(node, ())} if others else set()
    for node in others:
        after = flow.after([node], products.products | of_blocks)
        reached = after & products.sites.keys()
        are_heads = all(n in products.kinds and products.kinds[n].name == "head" for n in reached)
        if reached and are_heads and not after & of_blocks and follows_block(node):
            text = "its result reaches the loss only through the head at {place}"
            products.mark(node, "head", text, min(reached))
        elif not in_blocks and (reached & products.weighted or _reads_products(products, node)):
            mark_mlp(node, "it feeds or reads another weight product, in a model without a repeated stack")


def _reads_products(products: ProductFlow, node: int) -> bool:
    data = products.data(node)
    return data is not None and bool(products.weights_before([data]))


# ---- blocks


class _Blocks:
    """The blocks of a loss: the position of each product in a block (`positions`), and its `SiteBlock` (`of_site`)."""

    def __init__(self, products: ProductFlow, mixers: Sequence[Mixer]) -> None:
        self._products = products
        self._mixer_of = {node: number for number, mixer in enumerate(mixers) for node in mixer.parts}
        self._memories = {number for number, mixer in enumerate(mixers) if mixer.has_memory}
        self._branch_mixers = {self._mixer_of.get(node) for node in products.branches} - {None}
        self._lengths = {
            stack.address: stack.size
            for site in (products.sites.values() if products.sequential else ())
            for stack in site.loops
            if stack.address in products.sequential
        }
        self._index_numbers: dict[DottedPath, int] = {}
        self._indices: dict[DottedPath, tuple[int, int] | None] = {}
        read = self._read()
        self.positions = find_blocks(products.flow, read, self._lengths, self._continues)
        stacks: dict[tuple[int, int], list[Site]] = {}
        for node, position in self.positions.items():
            stacks.setdefault((position.stack, position.size), []).append(products.sites[node])
        other_loops = products.sequential - self._lengths.keys()
        on_data = {address for address, loop in products.flow.loops.items() if loop.is_over_data}
        unknown = {
            stack: _why_unknown(sites, other_loops)
            or _why_no_index(sites, products.sequential)
            or (_SHARED if size == 1 and _is_around(other_loops - on_data, sites) else "")
            for (stack, size), sites in stacks.items()
        }
        doubts = contradicted_stacks(self._uses(read))
        self.of_others = doubts.pop(None, "")
        unknown = {stack: why or doubts.get(stack, "") for stack, why in unknown.items()}
        self.of_site = dict(self._site_blocks(unknown))

    def _uses(self, read: Sequence[Product]) -> dict[DottedPath, set[Use]]:
        """The uses of each weight, by its path with the index of its layer."""
        weights: dict[DottedPath, set[Use]] = {}
        counts = Counter(self._products.sites[product.node].parameters for product in read)
        for node, place in ((product.node, product.place) for product in read):
            site, position = self._products.sites[node], self.positions.get(node)
            if site.weight is None or any(p.unknown_index or p.is_uncertain for p in site.parameters):
                continue
            for layer in site.layers() if site.parameters else ():
                indices = site.stack_indices(layer)
                block = position and Place(position.stack, position.number(indices), position.size)
                has_own_data = counts[site.parameters] > 1 and self._has_own_data(node)
                branches = self._products.branches.get(node, _NO_BRANCHES)
                use = Use(block, (site.k, site.n), branches, has_own_data, place.bit, place.ancestors)
                weights.setdefault(site.layer_path(indices), set()).add(use)
        return weights

    def _has_own_data(self, node: int) -> bool:
        """Whether a product reads an input of the loss, or the result of a product that is not in its stack."""
        products, positions = self._products, self.positions
        data = products.data(node) if node in positions and node in products.weighted else None
        nearest = products.flow.before([data], products.ends) if data is not None else ()
        return any(
            products.flow.operations[n] == INPUT
            or (
                n in products.products and (n not in positions or positions[n].stack != positions[node].stack)
            )
            for n in nearest
        )

    def _site_blocks(self, unknown: Mapping[int, str]) -> Iterator[tuple[int, SiteBlock]]:
        """Yields each site in a block, with its block. `unknown` says for each stack why its numbers are unknown."""
        blocks: dict[Hashable, SiteBlock] = {}  # sites in the same block share one object
        for node, position in self.positions.items():
            stacks = self._products.sites[node].stacks if position.strides else ()
            key = (id(position), stacks) if stacks else id(position)
            if key not in blocks:
                is_shared = any(all(loop != s.address for s in stacks) for loop, _ in position.strides)
                why = unknown[position.stack] or (_SHARED if is_shared else "")
                own = [s for s in stacks if any(loop == s.address for loop, _ in position.strides)]
                blocks[key] = SiteBlock(LayerTable.of(own, position.number), position.size, why)
            yield node, blocks[key]

    def _read(self) -> list[Product]:
        """The products that can be in blocks, in order: all except heads, embeddings, and those that make weights."""
        products, flow, mixer_of, lengths = self._products, self._products.flow, self._mixer_of, self._lengths
        operations, users, kinds, branches_of = flow.operations, flow.users, products.kinds, products.branches
        places = find_places(products)
        read = []
        for node, site in products.sites.items():
            kind = kinds[node].name if node in kinds else ""
            if kind in ("head", "embedding") or (not kind and node in products.makers):
                continue
            nonlinear = 0
            for user in users[node]:
                if operations[user] in _NONLINEAR and not _is_of_norm(flow, user):
                    nonlinear |= _NONLINEAR[operations[user]]
            mixer, k = mixer_of.get(node), site.k
            branches = branches_of.get(node, _NO_BRANCHES)
            in_branch = bool(branches) or mixer in self._branch_mixers
            loops = tuple([s.address for s in site.loops if s.address in lengths]) if site.loops else ()
            has_memory = mixer in self._memories
            batch, n = (1, site.batch * site.n) if node in products.weighted else (site.batch, site.n)
            key = (kind, site.weight is None, batch, site.m, n, k, nonlinear, has_memory)
            parameter, indices = self._names(site)
            read.append(
                Product(node, key, mixer, loops, branches, in_branch, parameter, indices, k, places[node])
            )
        return read

    def _names(self, site: Site) -> tuple[DottedPath, tuple[int, int] | None]:
        """The fields `parameter` and `indices` of the site's `Product`."""
        scope = site.scope.path
        name = site.parameters[0].path if site.parameters else scope
        for path in (name, scope):
            # The products of one module have the same indices.
            module = path[:-1] if path and path[-1].index is None else path
            if module not in self._indices:
                self._indices[module] = self._number(module)
            if (indices := self._indices[module]) is not None:
                return name, indices
        return name, None

    def _number(self, path: DottedPath) -> tuple[int, int] | None:
        """Two numbers that identify the path up to its innermost and its outermost index; None without an index."""
        numbers = self._index_numbers
        indexed = [position for position, segment in enumerate(path, 1) if segment.index is not None]
        if not indexed:
            return None
        inner = numbers.setdefault(path[: indexed[-1]], len(numbers))
        return inner, numbers.setdefault(path[: indexed[0]], len(numbers))

    def _continues(self, last: int, block: Sequence[int]) -> bool:
        """Whether a block, or the loop over layers around it, starts from the result of the product `last`.

        There must be a path between them without a reduction, a convolution, or another product (products of the block
        before its first branch are allowed). A decoder also reads the encoder, but its residual stream, or the carry of
        its loop, does not start from the encoder, or only from its mean.
        """
        products, flow = self._products, self._products.flow
        ends = set(flow.nodes_of(["conv_general_dilated", "reduce_sum", "reduce_max"]))
        additions = {addition for node in block for addition in products.branches.get(node, ())}
        starts = [min(additions)] if additions else flow.inputs[block[0]]
        for stack in products.sites[block[0]].loops:
            if stack.address in self._lengths:
                carries = flow.loops[stack.address].carries
                starts = [n for carry, _ in carries for n in flow.inputs[carry][:-1]]
                break
        left = [loop.first for loop in flow.loops.values() if loop.first <= last <= loop.last < max(block)]
        on_stream = {node for node in block if additions and node not in products.branches}
        return last in flow.before(starts, (products.products | ends) - on_stream, min([last, *left]))


def _is_of_norm(flow: Flow, node: int) -> bool:
    """Whether a node is a square that is only summed, as in a norm."""
    is_square = flow.operations[node] in ("square", "integer_pow")
    return is_square and all(flow.operations[user] == "reduce_sum" for user in flow.users[node])


def _why_unknown(sites: Sequence[Site], loops: Collection[Address]) -> str:
    """The reason why the block numbers of a stack are unknown; empty if they are known. `loops` are not over layers.

    Products on the stages of a pipeline read the matrices of several blocks at once: all weights are batched, and
    either one of `loops` reads them repeatedly or, without a loop, several products read the same ones.
    """
    if any(_is_on_stages(site) for site in sites if site.stacks):
        return _STAGES
    weighted = [site for site in sites if site.weight is not None]
    in_loop = _is_around(loops, sites)
    if not weighted:
        return _NO_WEIGHT if in_loop else ""
    if all(site.batch > 1 for site in weighted) and (
        in_loop or len({site.parameters for site in weighted}) < len(weighted)
    ):
        return _STAGES
    return ""


def _is_around(loops: Collection[Address], sites: Sequence[Site]) -> bool:
    """Whether one of these loops contains all of some sites."""
    return any(all(site.address[: len(loop)] == loop for site in sites) for loop in loops)


def _why_no_index(sites: Sequence[Site], loops: Collection[Address]) -> str:
    """Why it is unknown which layers one of these loops reads; empty if all are known."""
    for site in sites:
        around = {loop for loop in loops if site.address[: len(loop)] == loop}
        for template in site.parameters if around else ():
            tables = (*(slot.index for slot in template.slots), template.in_layer)
            indexed = {stack.address for table in tables if table is not None for stack in table.stacks}
            if template.unknown_index and around - indexed:
                return template.unknown_index
    return ""


def _only_block(kind: SiteKind, unknown: str) -> SiteBlock | None:
    """The block of a site in a model without a repeated stack: all but the embedding and the head are one block."""
    return None if kind.name in ("", "head", "embedding") else SiteBlock(_ONLY, 1, unknown)


def _is_on_stages(site: Site) -> bool:
    """Whether the devices of a shard_map hold different layers. If layers are named by index, they hold experts."""
    if not any(stack.is_shard_map for stack in site.stacks):
        return False
    for template in (site.scope, *site.modules, *site.parameters):
        if not template.slots or any(name.index is not None for name in template.path):
            continue
        if any(stack.is_shard_map for slot in template.slots for stack in slot.index.stacks):
            return True
    return False
