"""Matches rules against all layers of a list of sites at once.

A set of layers is a mask: an integer with a bit for each layer of each site. Layers whose paths have the same names
differ only in their indices, so a selector is matched once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from policyc.compiler.sites.site import Site
from policyc.compiler.sites.stacks import Layer
from policyc.language.policy import Rule
from policyc.language.predicates import Comparison, Predicate, leaves
from policyc.language.recipes import Gemm
from policyc.language.selectors import (
    DottedPath,
    Selector,
    SelectorSegment,
    expand_selector,
    glob_segment_matches,
)

ProductMasks = tuple[int, int, int]
"""For each product, in the order of `Gemm`: a set of layers."""

_MAX_KEPT = 4096  # rules whose matches are cached: an edit of a policy usually changes only one of them


@dataclass(frozen=True, slots=True)
class _SamePaths:
    """Paths that differ only in their indices. `path` is one of them, and `mask` the layers that they name."""

    path: DottedPath
    names: frozenset[str]
    mask: int
    by_index: tuple[dict[int, int], ...]
    """For each segment of the path: the layers, by their index in this segment."""

    def accepted(self, number: int, segment: SelectorSegment) -> int:
        """The layers whose name at position `number` is matched by a segment of a pattern."""
        name, indices = self.path[number], segment.indices
        if not glob_segment_matches(segment, name):
            return 0
        if indices is None:
            return self.mask
        by_index = self.by_index[number]
        taken = (indices.index,) if name.size is None else indices.select(name.size)
        return union(by_index.get(index, 0) for index in taken if index is not None)

    def match(self, pattern: Selector) -> int:
        """The layers with a path that a pattern matches. Like `selectors.matches`, but for all layers at once."""
        segments, end = pattern.segments, len(pattern.segments)
        matched, active = 0, _skip_wildcards(segments, {0: self.mask})
        for number in range(len(self.path)):
            matched |= active.pop(end, 0)
            following = {} if pattern.anchored else {0: self.mask}
            for position, mask in active.items():
                segment = segments[position]
                step = 0 if segment.is_wildcard else 1
                left = mask & self.accepted(number, segment) if step else mask
                if left:
                    following[position + step] = following.get(position + step, 0) | left
            active = _skip_wildcards(segments, following)
        return matched | active.get(end, 0)


def _skip_wildcards(segments: tuple[SelectorSegment, ...], active: dict[int, int]) -> dict[int, int]:
    """Adds the positions reached when wildcards match no path segment."""
    reached = dict(active)
    for position, mask in active.items():
        while position < len(segments) and segments[position].is_wildcard:
            position += 1
            reached[position] = reached.get(position, 0) | mask
    return reached


class SiteMasks:
    """Numbers the layers of a list of sites, and finds those that rules match. Results are cached."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self._sites = sites
        self.layers: list[tuple[int, Layer]] = []
        """For each bit of a mask: the number of the site, and its layer."""
        self.of_site: list[int] = []
        """For each site: the mask of its layers."""
        for number, site in enumerate(sites):
            start = len(self.layers)
            self.layers += ((number, layer) for layer in site.all_layers())
            self.of_site.append((1 << len(self.layers)) - (1 << start))
        self.all: int = (1 << len(self.layers)) - 1
        self._match_kept = lru_cache(maxsize=_MAX_KEPT)(self._match)

    def match(self, rule: Rule) -> ProductMasks:
        """The layers that a rule matches, for each product."""
        return self._match_kept(rule.selectors, rule.where)

    def of_sites(self, are_taken: Iterable[bool]) -> int:
        """The layers of some of the sites. `are_taken` says for each site whether it is one of them."""
        return union(mask for mask, is_taken in zip(self.of_site, are_taken, strict=True) if is_taken)

    def split(self, mask: int) -> Iterator[tuple[int, int]]:
        """Yields each site that has layers in a mask: its number, and the number of these layers."""
        while mask:
            site = self.layers[(mask & -mask).bit_length() - 1][0]
            yield site, (mask & self.of_site[site]).bit_count()
            mask &= ~self.of_site[site]

    def _match(self, selectors: tuple[Selector, ...], where: Predicate | None) -> ProductMasks:
        found = [(self._select(selector), selector.products) for selector in selectors]
        holds = self._holding(where, union(mask for mask, _ in found))
        fprop, dgrad, wgrad = (
            holds & union(mask for mask, products in found if gemm in products) for gemm in Gemm
        )
        return fprop, dgrad, wgrad

    def _select(self, selector: Selector) -> int:
        matched = 0
        for pattern in expand_selector(selector):
            literals = {segment.glob for segment in pattern.segments if segment.is_literal}
            for paths in self._paths:
                if literals <= paths.names:
                    matched |= paths.match(pattern)
        return matched

    def _holding(self, where: Predicate | None, mask: int) -> int:
        """The layers of a mask in which a condition holds."""
        if where is None:
            return mask
        reads_layer = any(isinstance(leaf, Comparison) and leaf.reads_layer for leaf in leaves(where))
        holding = 0
        for number, _ in self.split(mask):
            own = mask & self.of_site[number]
            for bit in find_bits(own if reads_layer else own & -own):
                attributes = self._sites[number].attributes(self.layers[bit][1])
                if where.holds(attributes) is True:
                    holding |= 1 << bit if reads_layer else own
        return holding

    @cached_property
    def _paths(self) -> tuple[_SamePaths, ...]:
        groups: dict[object, list[tuple[int, DottedPath]]] = {}
        for bit, (site, layer) in enumerate(self.layers):
            seen: dict[object, int] = {}
            for path in dict.fromkeys(self._sites[site].paths(layer)):
                shape = tuple((name.text, name.index is not None, name.size) for name in path)
                seen[shape] = seen.get(shape, 0) + 1  # a group has at most one path per layer
                groups.setdefault((shape, seen[shape]), []).append((bit, path))
        return tuple(map(_same_paths, groups.values()))


def _same_paths(members: list[tuple[int, DottedPath]]) -> _SamePaths:
    by_index: tuple[dict[int, int], ...] = tuple({} for _ in members[0][1])
    for bit, path in members:
        for masks, name in zip(by_index, path, strict=True):
            if name.index is not None:
                masks[name.index] = masks.get(name.index, 0) | 1 << bit
    path, mask = members[0][1], union(1 << bit for bit, _ in members)
    return _SamePaths(path, frozenset(name.text for name in path), mask, by_index)


def find_bits(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set in a mask, the lowest first."""
    while mask:
        bit = mask & -mask
        yield bit.bit_length() - 1
        mask ^= bit


def union(masks: Iterable[int]) -> int:
    """The layers that are in any of the masks."""
    union = 0
    for mask in masks:
        union |= mask
    return union
