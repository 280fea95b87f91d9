"""Checks block numbers against the names of weights: `layers[3]` is one layer, of one network.

The flow cannot tell an exit head from a layer of the same form, a time step from a layer, or a branch from the next
layer. Where the names show that it was misread, the numbers are unknown.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from policyc.compiler.sites.site_masks import union
from policyc.language.selectors import DottedPath

_SPLIT = "the layers of a list of weights are in several networks, or two passes count them differently"
_ODD = "a weight in one block of its stack is not of the list of the others, as that of an exit or a stem"
_FORK = (
    "a network that it reads, or that reads it, has equal blocks, and no names tell which of them continue it"
)
_JOINED = (
    "another network reads the last block of a list of weights, so that the next list may be a branch too"
)
_NESTED = (
    "its blocks hold equal products of an inner list, one after the other, which may be layers themselves"
)
_MIXED = "only some of the blocks of its stack are branches of the residual stream"
_STEPS = "several blocks multiply data of their own by the same weights, so that they may be time steps"
_UNCOUNTED = "the products of a list of equal weights are not counted as layers"


class Place(NamedTuple):
    """A block: the number of its stack, its number in the stack, and the number of blocks in the stack."""

    stack: int
    number: int
    size: int


class Use(NamedTuple):
    """A product with a weight.

    Attributes:
      weight: the path of the weight, with the index of its layer.
      block: the block that it is in, if any.
      form: equal for products of equal sizes.
      branches: the branches of the residual stream that it is in.
      has_own_data: whether it reads data that is not computed by its stack.
      bit: stands for it in the `ancestors` of others.
      ancestors: all products that it is computed from.
    """

    weight: DottedPath
    block: Place | None
    form: Hashable
    branches: frozenset[int]
    has_own_data: bool
    bit: int
    ancestors: int

    @property
    def stack(self) -> int | None:
        return self.block and self.block.stack


_Lists = Mapping[DottedPath, DottedPath]
"""For each weight of a list of layers: the path of the list, which is that of its members without the index."""


def contradicted_stacks(uses: Collection[Use]) -> dict[int | None, str]:
    """The stacks whose numbers contradict the names of their weights, and why. None stands for no stack."""
    lists, inner = _find_lists(uses)
    if inner and all(use.block is None or use.block.size == 1 for use in uses):
        return dict.fromkeys({use.stack for use in uses}, _UNCOUNTED)
    stacks: dict[int, dict[int, list[Use]]] = defaultdict(lambda: defaultdict(list))
    for use in uses:
        if use.block is not None:
            stacks[use.block.stack][use.block.number].append(use)
    blocks = {stack: [numbered[n] for n in sorted(numbered)] for stack, numbered in stacks.items()}
    doubts: dict[int | None, str] = dict(_forked_stacks(blocks, lists))
    for stack, members in blocks.items():
        if reason := _why_doubtful(members, [use for use in uses if use.stack != stack], lists, inner):
            doubts[stack] = reason
    doubts |= dict.fromkeys(_split_stacks(uses, lists), _SPLIT)
    doubts.pop(None, None)
    return doubts


def _why_doubtful(
    blocks: Sequence[Sequence[Use]], others: Collection[Use], lists: _Lists, inner: _Lists
) -> str:
    """Why the numbers of the blocks of a stack are doubtful; empty if they are not. `others` are not in the stack."""
    if len({any(use.branches for use in block) for block in blocks}) > 1:
        return _MIXED
    counts = Counter(use.weight for use in itertools.chain(*blocks))
    outside = {use.weight for use in others}
    of_lists = {_forms(block) for block in blocks if _is_listed(block, lists)}
    for block in blocks:
        if any(counts[u.weight] > 1 and u.has_own_data and u.block and u.block.number for u in block):
            return _STEPS
        alone = (u.weight not in lists and counts[u.weight] == 1 and u.weight not in outside for u in block)
        if any(alone) if _is_listed(block, lists) else of_lists and _forms(block) not in of_lists:
            return _ODD
        if all(use.weight in inner for use in block) and any(
            inner[one.weight] == inner[other.weight]
            and one.form == other.form
            and other.ancestors & one.bit
            and one.branches.isdisjoint(other.branches)
            for one, other in itertools.permutations(block, 2)
        ):
            return _NESTED
    for number, (one, other) in enumerate(itertools.pairwise(blocks), 1):
        before, after = ({lists.get(use.weight, use.weight) for use in block} for block in (one, other))
        if before.isdisjoint(after) and _is_listed(one, lists):
            end, (bits, read) = union(use.bit for use in one), _extent(itertools.chain(*blocks[number:]))
            if any(u.ancestors & end and not u.ancestors & bits | u.bit & read for u in others):
                return _JOINED
    return ""


def _forked_stacks(stacks: Mapping[int, Sequence[Sequence[Use]]], lists: _Lists) -> Iterator[tuple[int, str]]:
    """The stacks of blocks without lists, beside an equal block of another stack that reads them or is read."""
    extents = {stack: _extent(itertools.chain(*blocks)) for stack, blocks in stacks.items()}
    for one, other in itertools.permutations(stacks, 2):
        (bits, read), (other_bits, other_read) = extents[one], extents[other]
        unlisted = {_forms(block) for block in stacks[one] if not _is_listed(block, lists)}
        if (read & other_bits or other_read & bits) and not unlisted.isdisjoint(map(_forms, stacks[other])):
            yield from ((one, _FORK), (other, _FORK))


def _split_stacks(uses: Collection[Use], lists: _Lists) -> Iterator[int | None]:
    """The stacks in which the members of a list are not all, or have other numbers than in another stack."""
    places: dict[DottedPath, set[Place | None]] = defaultdict(set)
    for use in uses:
        places[use.weight].add(use.block)
    views: dict[DottedPath, dict[int | None, set[tuple[DottedPath, Place | None]]]]
    views = defaultdict(lambda: defaultdict(set))
    for path, found in places.items():
        if len({place and place.stack for place in found}) == len(found):  # else it is shared by layers
            for place in found:
                view = views[lists.get(path, path)][place and place.stack]
                view.add((path, place and place._replace(stack=0)))
    for by_stack in views.values():
        if any(view != next(iter(by_stack.values())) for view in by_stack.values()):
            yield from by_stack


def _is_listed(block: Iterable[Use], lists: _Lists) -> bool:
    return any(use.weight in lists for use in block)


def _forms(block: Iterable[Use]) -> frozenset[Hashable]:
    return frozenset(use.form for use in block)


def _extent(uses: Iterable[Use]) -> tuple[int, int]:
    """The bits of some products, and those of all that they are computed from."""
    every = list(uses)
    return union(use.bit for use in every), union(use.ancestors for use in every)


def _find_lists(uses: Collection[Use]) -> tuple[_Lists, _Lists]:
    """The lists of layers, and other lists that have several members of equal form.

    A list of layers is the innermost one whose members are in different blocks, and not a list of experts, or of
    networks. A list of one member is one.
    """
    places: dict[DottedPath, set[Place | None]] = defaultdict(set)
    forms: dict[DottedPath, set[Hashable]] = defaultdict(set)
    members: dict[DottedPath, set[DottedPath]] = defaultdict(set)
    for use in uses:
        places[use.weight].add(use.block)
        forms[use.weight].add(use.form)
        for name in _without_index(use.weight):
            members[name].add(use.weight)
    lists: dict[DottedPath, DottedPath] = {}
    inner: dict[DottedPath, DottedPath] = {}
    for path in places:
        for name in _without_index(path):
            paths = members[name]
            if len(paths) == 1 or len({frozenset(places[other]) for other in paths}) > 1:
                lists.setdefault(path, name)
            elif len({frozenset(forms[other]) for other in paths}) < len(paths):
                inner[path] = name
    return lists, inner


def _without_index(path: DottedPath) -> Iterator[DottedPath]:
    """The path without one of its indices, the innermost first."""
    for position in range(len(path) - 1, -1, -1):
        segment = path[position]
        if segment.index is not None or segment.text.isdigit():
            name = segment.text.rstrip("0123456789")
            yield (*path[:position], segment._replace(text=name, index=-1, size=None), *path[position + 1 :])
