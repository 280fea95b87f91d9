"""Where a block may begin and end in an unrolled program: not inside a branch of the residual stream.

Where that leaves several possibilities, as with matrices of one shape, the indices in names of modules and parameters
decide: the products of `layers[3]` are in one block.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placing:
    """What the names of a product say about its block.

    Attributes:
      path: the names of its parameter, or of its modules if it has none.
      indices: of these, or of its modules: the names up to the innermost index, and up to the outermost; None if there
        is none.
    """

    path: Hashable = ()
    indices: tuple[Hashable, Hashable] | None = None


LEVELS = (0, 1, None)
"""Which of the indices decide, in the order in which they are tried; None: none of them."""


class Bounds:
    """The bounds of blocks in a sequence of items.

    `branches` has, for each branch of the residual stream, the positions of its products. `placings` is about the
    products of each item.
    """

    def __init__(
        self, branches: Sequence[Collection[int]], placings: Sequence[Sequence[Placing]], level: int | None
    ) -> None:
        self._crossing: list[set[tuple[int, int]]] = [set() for _ in range(len(placings) + 1)]
        """For each bound between two items: the first and last position of the branches that it divides."""
        for positions in branches:
            for bound in range(min(positions) + 1, max(positions) + 1):
                self._crossing[bound].add((min(positions), max(positions)))
        self._placings, self._level = placings, level
        self._previous: list[int] = []
        """For each item: the last position before it with the same index; -1 if there is none."""
        last: dict[Hashable, int] = {}
        for position in range(len(placings)):
            (index, *_) = self._indices(position, position + 1)
            self._previous.append(-1 if index is None else last.get(index, -1))
            last[index] = position

    def count(self, start: int, period: int, count: int) -> int:
        """How many of the bodies from a position on, of so many items each, can be blocks."""
        other = start + period
        if self._previous[other] >= start and self._placings[other][0].path != self._placings[start][0].path:
            return (
                0  # found at once: a second body has an index of the first, and is not the same layer again
            )
        limit = len(self._placings)
        seen: dict[Hashable, Hashable] = {}
        first = self._indices(start, start + period)
        if self._level == 0 and not self._group_products(start, start + period):
            return 0
        for number in range(count):
            begin, end = start + number * period, start + (number + 1) * period
            for low, high in self._crossing[begin] | self._crossing[end]:
                limit = min(limit, high + 1 if low <= start else start)  # a branch may contain all of them
            paths = tuple(placing.path for placing in self._members(begin, end))
            indices = self._indices(begin, end)
            # Bodies have other indices, or are the same layer again.
            is_new = all(seen.setdefault(index, paths) == paths for index in set(indices) - {None})
            if end > limit or not is_new or _pattern(indices) != _pattern(first):
                return number
        return count

    def _members(self, begin: int, end: int) -> list[Placing]:
        return [placing for item in self._placings[begin:end] for placing in item]

    def _indices(self, begin: int, end: int) -> list[Hashable]:
        """The index of each product of a body; None if it has none."""
        level = self._level
        return [
            p.indices[level] if p.indices and level is not None else None for p in self._members(begin, end)
        ]

    def _group_products(self, begin: int, end: int) -> bool:
        """Do inner indices stand for several products each? Those of `layers[1].weights[0]` do not."""
        members = [p.indices for p in self._members(begin, end) if p.indices]
        return len({inner for inner, _ in members}) < len(members) or all(a == b for a, b in members)


def _pattern(indices: list[Hashable]) -> list[int | None]:
    """Which of some indices are equal."""
    numbers: dict[Hashable, int] = {}
    return [None if i is None else numbers.setdefault(i, len(numbers)) for i in indices]
