"""Where a block may begin and end in an unrolled program: not inside a branch of the residual stream.

If that leaves several possibilities, for example because all matrices have the same shape, the outermost indices in the
names of modules and parameters decide: the products of `layers[3]` are in one block.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence


class Bounds:
    """The possible bounds of blocks in a sequence of products.

    `branches` has the positions of the first and the last product of each branch of the residual stream. `paths` and
    `indices` are the `parameter` and the `index` of each product, see `blocks.Product`.
    """

    def __init__(
        self,
        branches: Iterable[tuple[int, int]],
        paths: Sequence[Hashable],
        indices: Sequence[int | None],
    ) -> None:
        self._crossing: dict[int, list[tuple[int, int]]] = {}
        """For each position where a bound would divide branches: the first and last positions of these branches."""
        for first, last in branches:
            for bound in range(first + 1, last + 1):
                self._crossing.setdefault(bound, []).append((first, last))
        self._paths, self._indices = paths, indices
        self._previous: list[int | None] = []
        """For each product: the position of the previous one with the same index."""
        positions: dict[int, int] = {}
        for position, index in enumerate(indices):
            self._previous.append(None if index is None else positions.get(index))
            if index is not None:
                positions[index] = position

    def count(self, start: int, period: int, count: int) -> int:
        """How many of the `count` consecutive bodies of `period` products from `start` on can be blocks."""
        other = start + period
        previous = self._previous[other]
        if previous is not None and previous >= start and self._paths[other] != self._paths[start]:
            # A shortcut: the second body has an index of the first body, but is not the same layer again.
            return 0
        count = self._count_between_branches(start, period, count)
        seen: dict[int, Sequence[Hashable]] = {}
        for number in range(count):
            begin, end = start + number * period, start + (number + 1) * period
            # Each body must have different indices at the same places, unless it is the same layer again.
            paths, indices = self._paths[begin:end], self._indices[begin:end]
            firsts = self._indices[start : start + period]
            if any((a is None) != (b is None) for a, b in zip(firsts, indices, strict=True)):
                return number
            if any(i is not None and seen.setdefault(i, paths) != paths for i in indices):
                return number
        return count

    def _count_between_branches(self, start: int, period: int, count: int) -> int:
        """How many of the bodies begin and end outside branches. A branch may contain all of them."""
        limit = len(self._paths)
        for number in range(count + 1 if self._crossing else 0):
            bound = start + number * period
            for low, high in self._crossing.get(bound, ()):
                limit = min(limit, high + 1 if low <= start else start)
            if bound > limit:
                return number - 1
        return count
