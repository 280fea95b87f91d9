"""Checks block numbers against the names of weights: `layers[3]` is one layer, of one network.

The flow cannot tell an exit head from a layer of the same form, a time step from a layer, or a branch from the next
layer. Where the names show that it was misread, the numbers are unknown.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping
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
      block: the block that it is in, if any.
      form: equal for products of equal sizes.
      branches: the branches of the residual stream that it is in.
      has_own_data: whether it reads data that is not computed by its stack.
      bit: stands for it in the `ancestors` of others.
      ancestors: all products that it is computed from.
    """

    block: Place | None
    form: Hashable
    branches: frozenset[int]
    has_own_data: bool
    bit: int
    ancestors: int


def contradicted_stacks(weights: Mapping[DottedPath, Collection[Use]]) -> dict[int | None, str]:
    """The stacks whose numbers contradict the names of their weights, and why. None stands for no stack.

    `weights` has the uses of each weight.
    """
    places = {path: frozenset(use.block for use in uses) for path, uses in weights.items()}
    lists, inner = _find_lists(places, {path: {use.form for use in uses} for path, uses in weights.items()})
    if inner and all(place is None or place.size == 1 for found in places.values() for place in found):
        return dict.fromkeys({p and p.stack for found in places.values() for p in found}, _UNCOUNTED)
    doubts: dict[int | None, str] = dict(_odd_stacks(weights, lists))
    doubts |= _joined_stacks(weights, lists)
    doubts |= _nested_stacks(weights, inner)
    members: dict[DottedPath, list[DottedPath]] = defaultdict(list)
    for path, found in places.items():
        if len({p and p.stack for p in found}) == len(found):
            members[lists.get(path, path)].append(path)
    for paths in members.values():
        views: dict[int | None, set[tuple[DottedPath, Place | None]]] = defaultdict(set)
        for path in paths:
            for place in places[path]:
                views[place and place.stack].add((path, place and place._replace(stack=0)))
        if any(view != next(iter(views.values())) for view in views.values()):
            doubts |= dict.fromkeys(views, _SPLIT)
    doubts.pop(None, None)
    return doubts


def _odd_stacks(
    weights: Mapping[DottedPath, Collection[Use]], lists: Collection[DottedPath]
) -> Iterator[tuple[int, str]]:
    """The stacks that have a block of no list beside others, or equal blocks of no list in another stack."""
    blocks: dict[Place, list[tuple[DottedPath, Use]]] = defaultdict(list)
    for path, uses in weights.items():
        for use in uses:
            if use.block is not None:
                blocks[use.block].append((path, use))
    forms: dict[int, set[frozenset[Hashable]]] = defaultdict(set)
    """For each stack: the forms of its blocks that are of a list."""
    others: dict[int, set[frozenset[Hashable]]] = defaultdict(set)
    branches: dict[int, set[bool]] = defaultdict(set)
    bits: dict[int, int] = defaultdict(int)
    ancestors: dict[int, int] = defaultdict(int)
    for (stack, number, _), members in blocks.items():
        unlisted = {path for path, _ in members if path not in lists}
        is_listed = len(unlisted) < len({path for path, _ in members})
        (forms if is_listed else others)[stack].add(frozenset(use.form for _, use in members))
        branches[stack].add(any(use.branches for _, use in members))
        bits[stack] |= union(use.bit for _, use in members)
        ancestors[stack] |= union(use.ancestors for _, use in members)
        for path, use in members:
            stacks = [other.block.stack for other in weights[path] if other.block is not None]
            if stacks.count(stack) > 1 and use.has_own_data and number:
                yield stack, _STEPS
        if is_listed and any(len(weights[path]) == 1 for path in unlisted):
            yield stack, _ODD
    for stack, kinds in branches.items():
        if len(kinds) > 1:
            yield stack, _MIXED
    for stack, odd in others.items():
        if forms[stack] and not odd <= forms[stack]:
            yield stack, _ODD
        for other in bits.keys() - {stack}:
            is_related = ancestors[stack] & bits[other] or ancestors[other] & bits[stack]
            if is_related and not odd.isdisjoint(forms[other] | others.get(other, set())):
                yield from ((stack, _FORK), (other, _FORK))


def _nested_stacks(
    weights: Mapping[DottedPath, Collection[Use]], inner: Collection[Collection[DottedPath]]
) -> Iterator[tuple[int, str]]:
    """The stacks with a block of nothing but several equal members of inner lists, one after the other."""
    blocks: dict[Place, list[tuple[DottedPath, Use]]] = defaultdict(list)
    for path, uses in weights.items():
        for use in uses:
            if use.block is not None:
                blocks[use.block].append((path, use))
    list_of = {path: number for number, paths in enumerate(inner) for path in paths}
    for block, members in blocks.items():
        pairs = itertools.permutations(members, 2) if all(path in list_of for path, _ in members) else ()
        if any(
            list_of[path] == list_of[other]
            and two.ancestors & one.bit
            and one.form == two.form
            and one.branches.isdisjoint(two.branches)
            for (path, one), (other, two) in pairs
        ):
            yield block.stack, _NESTED


def _joined_stacks(
    weights: Mapping[DottedPath, Collection[Use]], lists: Mapping[DottedPath, DottedPath]
) -> Iterator[tuple[int, str]]:
    """The stacks of several lists that may be a trunk and one of its branches: a product outside reads the trunk."""
    every = [(path, use) for path, uses in weights.items() for use in uses]
    blocks: dict[int, dict[int, list[tuple[DottedPath, Use]]]] = defaultdict(lambda: defaultdict(list))
    for path, use in every:
        if use.block is not None:
            blocks[use.block.stack][use.block.number].append((path, use))
    for stack, numbered in blocks.items():
        members = [numbered[number] for number in sorted(numbered)]
        others = [use for _, use in every if use.block is None or use.block.stack != stack]
        for number, (one, other) in enumerate(itertools.pairwise(members), 1):
            before, after = ({lists.get(path, path) for path, _ in block} for block in (one, other))
            later = [use for block in members[number:] for _, use in block]
            trunk, branch = union(use.bit for _, use in one), union(use.bit for use in later)
            read = union(use.ancestors for use in later)
            forks = (u.ancestors & trunk and not u.ancestors & branch | u.bit & read for u in others)
            if not before.isdisjoint(lists.values()) and before.isdisjoint(after) and any(forks):
                yield stack, _JOINED


def _find_lists(
    places: Mapping[DottedPath, frozenset[Place | None]], forms: Mapping[DottedPath, set[Hashable]]
) -> tuple[dict[DottedPath, DottedPath], list[list[DottedPath]]]:
    """For each weight of a list of layers, the path of the list: that of its members without the index.

    It is the innermost list whose members are in different blocks, and not a list of experts, or of networks. A list of
    one member is one. Also returns the members of the other lists that have several of equal form.
    """
    members: dict[DottedPath, list[DottedPath]] = defaultdict(list)
    levels = {path: list(_without_index(path)) for path in places}
    for path, names in levels.items():
        for name in names:
            members[name].append(path)
    is_list = {
        name: len(paths) == 1 or len({places[path] for path in paths}) > 1 for name, paths in members.items()
    }
    lists = {path: name for path, names in levels.items() for name in names[::-1] if is_list[name]}
    inner = [
        paths
        for name, paths in members.items()
        if not is_list[name] and len({frozenset(forms[path]) for path in paths}) < len(paths)
    ]
    return lists, inner


def _without_index(path: DottedPath) -> Iterator[DottedPath]:
    """The path without one of its indices, the innermost first."""
    for position in range(len(path) - 1, -1, -1):
        if path[position].index is not None or path[position].text.isdigit():
            segment = path[position]._replace(
                text=path[position].text.rstrip("0123456789"), index=-1, size=None
            )
            yield (*path[:position], segment, *path[position + 1 :])
