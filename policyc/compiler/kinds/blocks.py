"""The blocks of a model: which sites are in its repeated stack, and the number of their block.

Each network (see `networks`) counts its own blocks. In a loop over layers, a block is an iteration or a part of one. In
an unrolled program, blocks are consecutive equal bodies, each of which reads the one before. A part of a branch of the
residual stream is not a block, even if it is repeated. A body that is not repeated is a block if it is a branch. Stacks
that continue each other on a stream of the same width count as one.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

from policyc.compiler.kinds.block_bounds import LEVELS, Bounds
from policyc.compiler.kinds.flow import Flow
from policyc.compiler.kinds.networks import Place
from policyc.compiler.sites.site_masks import union
from policyc.jaxcore.jaxprs.transform import Address

_MAX_CANDIDATES = 256  # periods to try from each position


class BlockPosition(NamedTuple):
    """Where a site is in its stack of blocks.

    Attributes:
      base: its block in iteration 0 of the loops around it.
      stack: the number of the stack.
      size: how many blocks the stack has.
      strides: for each loop around it, the number of blocks from one iteration to the next; negative if it runs in
        reverse.
    """

    base: int
    stack: int
    size: int
    strides: tuple[tuple[Address, int], ...] = ()

    def number(self, indices: Mapping[Address, int]) -> int:
        """The number of the block, given the iteration of each loop; that of the loop's first block without one."""
        return self.base + sum(stride * indices.get(loop, 0) for loop, stride in self.strides)


class Product(NamedTuple):
    """The properties of a site that the search for blocks uses.

    Attributes:
      key: equal for products that may be the same product of two blocks.
      mixer: identifies the attention that it is part of; None if it is not part of one.
      loops: the loops over layers around it, outermost first.
      branches: the branches of the residual stream that it is in.
      in_branch: whether it is in a branch, or part of an attention in one.
      parameter: the names of its parameter, or of its modules if it has none.
      indices: two numbers that identify the names up to the innermost and up to the outermost index, in `parameter` or
        else in its modules; None if neither has an index.
      width: the size of its contracting dimensions.
      place: where it is among the others.
    """

    node: int
    key: Hashable
    mixer: int | None
    loops: tuple[Address, ...]
    branches: AbstractSet[int]
    in_branch: bool
    parameter: Hashable
    indices: tuple[int, int] | None
    width: int
    place: Place


@dataclass(slots=True)
class _Item:
    """A product, or a loop over layers with the products in it."""

    products: list[Product]
    key: Hashable
    loop: Address | None = None
    body: _Layers | None = None

    @property
    def is_loop(self) -> bool:
        return self.loop is not None


@dataclass(slots=True)
class _Layers:
    """Consecutive blocks, as lists of items. A loop has an entry of its own, which stands for all of its blocks."""

    blocks: list[list[_Item]] = field(default_factory=list)

    @property
    def has_attention(self) -> bool:
        return any(p.mixer is not None for items in self.blocks for item in items for p in item.products)

    def count(self, lengths: dict[Address, int]) -> int:
        return sum(_item_count(items, lengths) for items in self.blocks)


def _item_count(items: Sequence[_Item], lengths: dict[Address, int]) -> int:
    (first, *_) = items
    if first.loop is None or first.body is None:
        return 1
    return lengths[first.loop] * first.body.count(lengths)


def find_blocks(
    flow: Flow,
    products: Sequence[Product],
    lengths: dict[Address, int],
    continues: Callable[[int, Sequence[int]], bool],
) -> dict[int, BlockPosition]:
    """The position of every product that is in a block, by its node.

    `lengths` has the number of iterations of each loop over layers. `continues(node, products)` says whether the block
    of these products is the first to read the result of the blocks before it, whose last product is `node`.
    """
    finder = _Finder(flow, products, lengths, continues)
    positions: dict[int, BlockPosition] = {}
    networks: dict[int, list[Product]] = {}
    for product in sorted(products, key=lambda p: (p.place.use, p.node)):
        networks.setdefault(product.place.network, []).append(product)
    stacks = [s for members in networks.values() for s in finder.stacks(finder.items(members, 0))]
    if any(stack.has_attention for stack in stacks):
        # One branch without attention is part of a head (pooling).
        stacks = [stack for stack in stacks if stack.has_attention or stack.count(lengths) > 1]
    for number, stack in enumerate(stacks):
        first = BlockPosition(base=0, stack=number, size=stack.count(lengths))
        finder.locate(stack, first, positions)
    return positions


class _Finder:
    def __init__(
        self,
        flow: Flow,
        products: Sequence[Product],
        lengths: dict[Address, int],
        continues: Callable[[int, Sequence[int]], bool],
    ) -> None:
        self._flow, self._lengths, self._continues = flow, lengths, continues
        self._by_node = {p.node: p for p in products}
        self._branch_sizes = Counter([branch for p in products for branch in p.branches])
        """The number of products in each branch of the residual stream."""

    def items(self, products: Sequence[Product], depth: int) -> list[_Item]:
        """The products of a body in order. A loop over layers is one item."""
        if not self._lengths:
            return [_Item([p], p.key) for p in products]
        items: list[_Item] = []
        for loop, group in itertools.groupby(
            products, lambda p: p.loops[depth] if len(p.loops) > depth else None
        ):
            members = list(group)
            if loop is None:
                items += [_Item([p], p.key) for p in members]
            else:
                body = self._loop_body(self.items(members, depth + 1))
                items.append(_Item(members, ("loop", tuple(p.key for p in members)), loop, body))
        return items

    # ---- repetition

    def _segments(self, items: list[_Item], *, in_loop: bool, level: int = 0) -> list[_Layers]:
        """The stacks in a sequence of items. Items that are in no block become a stack without blocks.

        Items that do not repeat at one of `LEVELS` are tried at the next one.
        """
        if not items:
            return []
        if level == len(LEVELS):
            return self._leftover(items, in_loop)
        numbers: dict[Hashable, int] = {}
        keys = [numbers.setdefault(item.key, len(numbers)) for item in items]
        following: dict[int, list[int]] = {}
        for position, key in enumerate(keys):
            following.setdefault(key, []).append(position)
        bounds = _bounds(items, LEVELS[level])
        found: list[_Layers] = []
        rest: list[_Item] = []
        position = 0
        while position < len(items):
            if items[position].is_loop:
                found += self._segments(rest, in_loop=in_loop, level=level + 1)
                found.append(_Layers([[items[position]]]))
                rest, position = [], position + 1
                continue
            period, count = self._best_period(items, keys, following, bounds, position)
            if count < 2:
                rest.append(items[position])
                position += 1
                continue
            found += self._segments(rest, in_loop=in_loop, level=level + 1)
            rest = []
            end = position + period * count
            bodies = [items[start : start + period] for start in range(position, end, period)]
            found.append(_Layers([block for body in bodies for block in _divide(body)]))
            position = end
        return [*found, *self._segments(rest, in_loop=in_loop, level=level + 1)]

    def _best_period(
        self,
        items: list[_Item],
        keys: list[int],
        following: dict[int, list[int]],
        bounds: Bounds,
        position: int,
    ) -> tuple[int, int]:
        """The period that covers most items from `position` on by repetition, and its number of repetitions."""
        best_period = best_count = 0
        size = next((p for p in range(position, len(items)) if items[p].is_loop), len(items)) - position
        positions = following[keys[position]]
        after = positions[bisect_right(positions, position) :][:_MAX_CANDIDATES]
        for other in after:
            period, covered = other - position, best_period * best_count
            if 2 * period > size:
                break
            if size // period * period <= covered:  # covers no more even if it repeats to the end
                continue
            count = min(_common(keys, position, other) // period + 1, size // period)
            if count < 2 or count * period <= covered:
                continue
            count = bounds.count(position, period, count)
            if count < 2 or count * period <= covered:
                continue
            count = self._chain_length(
                [items[i : i + period] for i in range(position, position + period * count, period)]
            )
            if count >= 2 and count * period > covered:
                best_period, best_count = period, count
        return best_period, best_count

    def _chain_length(self, bodies: list[list[_Item]]) -> int:
        """How many equal bodies are a chain, each computed from the one before; 1 if they are parts of a block."""
        if not self._is_whole(bodies[0]) and not self._is_indexed(*bodies[:2]):
            return 1
        if not _is_connected([p for item in bodies[0] for p in item.products]):
            return 1
        return next(
            (
                n
                for n, (one, other) in enumerate(itertools.pairwise(bodies), 1)
                if not self._follows(one, other)
            ),
            len(bodies),
        )

    def _follows(self, body: list[_Item], next_body: list[_Item]) -> bool:
        """Whether a body is a whole that is computed from the body before it."""
        ones, others = ([p for item in items for p in item.products] for items in (body, next_body))
        if {p.mixer for p in ones} & {p.mixer for p in others} - {None}:
            return False
        one = union(p.place.bit for p in ones)
        is_after = any(p.place.ancestors & one for p in others)
        return is_after and _is_connected(others) and not self._are_side_by_side(ones, others)

    def _are_side_by_side(self, ones: Sequence[Product], others: Sequence[Product]) -> bool:
        """Whether networks without residual streams fork or join in a body or after it.

        Then equal products, neither of them computed from the other, read the same product or are read by one, and only
        one of them is in the body or the next.
        """
        if any(p.branches for p in (*ones, *others)):
            return False
        body_of = {p.node: number for number, body in enumerate((ones, others)) for p in body}
        groups = [group for p in (*ones, *others) for group in (p.place.readers, p.place.reads)]
        return any(
            body_of.get(one) != body_of.get(other) and _are_parallel(self._by_node[one], self._by_node[other])
            for group in groups
            for one in group & body_of.keys()
            for other in group & self._by_node.keys()
        )

    def _is_whole(self, body: list[_Item]) -> bool:
        """Whether a body has all products of some branch.

        If the model has no branches, a part of an iteration is a block only if it has an attention.
        """
        products = [p for item in body for p in item.products]
        if self._branch_sizes:
            sizes = Counter(branch for p in products for branch in p.branches)
            return any(self._branch_sizes[branch] == size for branch, size in sizes.items())
        return not products[0].loops or any(p.mixer is not None for p in products)

    def _is_indexed(self, body: list[_Item], next_body: list[_Item]) -> bool:
        """Whether two bodies have different indices, in a network that is itself the only branch: `x + network(x)`."""
        one, other = (
            {p.indices and p.indices[1] for item in items for p in item.products}
            for items in (body, next_body)
        )
        is_scanned = bool(body[0].products[0].loops)
        return len(self._branch_sizes) == 1 and not is_scanned and None not in one and one.isdisjoint(other)

    def _leftover(self, items: list[_Item], in_loop: bool) -> list[_Layers]:
        """The blocks among items that do not repeat: consecutive branches of the residual stream.

        In a loop over layers, items between branches are part of the block.
        """
        if in_loop and any(item.products[0].in_branch for item in items):
            return [_Layers(_divide(items))]
        found = []
        for in_branch, group in itertools.groupby(items, lambda item: item.products[0].in_branch):
            members = list(group)
            found.append(_Layers(_divide(members)) if in_branch else _Layers())
        return found

    # ---- stacks

    def _loop_body(self, items: list[_Item]) -> _Layers:
        """The blocks of an iteration. Items outside them join the block before, or else the block after.

        They do not join loops: if there is no other block to join, they form a block.
        """
        block_of = {
            id(block[0]): block for layers in self._segments(items, in_loop=True) for block in layers.blocks
        }
        inside = {id(item) for block in block_of.values() for item in block}
        blocks: list[list[_Item]] = []
        pending: list[_Item] = []
        for item in items:
            if id(item) in block_of:
                if pending and item.is_loop:
                    blocks.append(pending)
                    pending = []
                blocks.append([*pending, *block_of[id(item)]])
                pending = []
            elif id(item) not in inside:
                target = blocks[-1] if blocks and not blocks[-1][0].is_loop else pending
                target.append(item)
        return _Layers([*blocks, pending] if pending else blocks)

    def stacks(self, items: list[_Item]) -> list[_Layers]:
        """The stacks of the whole loss. Stacks that continue each other are merged."""
        stacks: list[_Layers] = []
        may_continue = False
        for layers in self._segments(items, in_loop=False):
            if not layers.blocks:
                may_continue = False
                continue
            if may_continue and self._continue_each_other(stacks[-1], layers):
                stacks[-1] = _Layers([*stacks[-1].blocks, *layers.blocks])
            else:
                stacks.append(layers)
            may_continue = True
        return stacks

    def _continue_each_other(self, one: _Layers, other: _Layers) -> bool:
        ones, others = ([p for item in layers.blocks[0] for p in item.products] for layers in (one, other))
        last = one.blocks[-1][-1].products[-1]
        lasts = [p for item in one.blocks[-1] for p in item.products]
        if _stream_width(ones) != _stream_width(others) or self._are_side_by_side(lasts, others):
            return False
        return self._continues(last.node, [product.node for product in others])

    # ---- numbers

    def locate(self, layers: _Layers, first: BlockPosition, positions: dict[int, BlockPosition]) -> None:
        """Records the positions of all products of some blocks, given the position of the first block."""
        base = first.base
        for block in layers.blocks:
            here = BlockPosition(base, *first[1:])
            for item in block:
                if item.loop is None or item.body is None:
                    for product in item.products:
                        positions[product.node] = here
                else:
                    start, stride = base, item.body.count(self._lengths)
                    if self._flow.loops[item.loop].is_reverse:
                        start, stride = base + (self._lengths[item.loop] - 1) * stride, -stride
                    inside = here._replace(base=start, strides=(*here.strides, (item.loop, stride)))
                    self.locate(item.body, inside, positions)
            base += _item_count(block, self._lengths)


def _is_connected(body: Sequence[Product]) -> bool:
    """Whether all products of a body are computed from each other, or read together."""
    rest, pending = list(body[1:]), [body[0].place]
    while rest and pending:
        one = pending.pop()
        near = [p for p in rest if _are_related(one, p.place)]
        rest = [p for p in rest if p not in near]
        pending += [p.place for p in near]
    return not rest


def _are_related(one: Place, other: Place) -> bool:
    is_before = one.ancestors & other.bit or other.ancestors & one.bit
    return bool(is_before) or one.readers == other.readers or not one.readers.isdisjoint(other.readers)


def _are_parallel(one: Product, other: Product) -> bool:
    """Whether two products are equal, and neither is computed from the other."""
    reach_each_other = one.place.ancestors & other.place.bit or other.place.ancestors & one.place.bit
    return one.key == other.key and not reach_each_other


def _stream_width(products: Sequence[Product]) -> int:
    """The width of the residual stream that the first branch of a block reads."""
    return next((p.width for p in products if p.branches), products[0].width)


def _divide(body: list[_Item]) -> list[list[_Item]]:
    """Divides a body into its layers, each with an attention followed by products outside attention.

    A body with one attention, or several without other products between them, is one layer.
    """
    if len({item.products[0].mixer for item in body} - {None}) < 2:
        return [body]
    blocks: list[list[_Item]] = [[]]
    seen: set[int] = set()
    has_other = False
    for item in body:
        mixer = item.products[0].mixer
        if mixer is not None and mixer not in seen:
            if seen and has_other:
                blocks.append([])
                has_other = False
            seen.add(mixer)
        elif mixer is None and seen:
            has_other = True
        blocks[-1].append(item)
    return blocks


def _bounds(items: Sequence[_Item], level: int | None) -> Bounds:
    firsts: dict[int, int] = {}
    lasts: dict[int, int] = {}
    paths, indices = [], []
    for position, item in enumerate(items):
        for product in item.products:
            for branch in product.branches:
                firsts.setdefault(branch, position)
                lasts[branch] = position
        paths.append(item.products[0].parameter)
        indices.append(item.products[0].indices)
    return Bounds([(first, lasts[branch]) for branch, first in firsts.items()], paths, indices, level)


def _common(keys: list[int], one: int, other: int) -> int:
    """How many consecutive keys from two positions on are equal. `other` is the later position."""
    low, high = 0, len(keys) - other
    while low < high:
        middle = (low + high + 1) // 2
        equal = keys[one + low : one + middle] == keys[other + low : other + middle]
        low, high = (middle, high) if equal else (low, middle - 1)
    return low
