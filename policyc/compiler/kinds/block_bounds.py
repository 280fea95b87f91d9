"""Where a block may begin and end in an unrolled program: not inside a branch of the residual stream.

If that leaves several possibilities, for example because all matrices have the same shape, the indices in the names of
modules and parameters decide: the products of `layers[3]` are in one block.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

LEVELS = (0, 1, None)
"""Which index in a name decides, in the order tried: 0 the innermost, 1 the outermost, None no index."""


class Bounds:
    """The possible bounds of blocks in a sequence of products.

    `branches` has the positions of the first and the last product of each branch of the residual stream. `paths` and
    `indices` are the `parameter` and the `indices` of each product, see `blocks.Product`.
    """

    def __init__(
        self,
        branches: Iterable[tuple[int, int]],
        paths: Sequence[Hashable],
        indices: Sequence[tuple[int, int] | None],
        level: int | None,
    ) -> None:
        self._crossing: dict[int, list[tuple[int, int]]] = {}
        """For each position where a bound would divide branches: the first and last positions of these branches."""
        for first, last in branches:
            for bound in range(first + 1, last + 1):
                self._crossing.setdefault(bound, []).append((first, last))
        self._paths, self._all_indices, self._level = paths, indices, level
        self._indices = [None if level is None or both is None else both[level] for both in indices]
        self._has_indices = any(index is not None for index in self._indices)
        self._distances: list[int] = []
        """For each product: the distance to the previous one with the same index; 0 if none, -1 if it has no index."""
        last_position: dict[int | None, int] = {}
        for position, index in enumerate(self._indices):
            self._distances.append(-1 if index is None else position - last_position.get(index, position))
            last_position[index] = position

    def count(self, start: int, period: int, count: int) -> int:
        """How many of the `count` consecutive bodies of `period` products from `start` on can be blocks."""
        other = start + period
        if 0 < self._distances[other] <= period and self._paths[other] != self._paths[start]:
            # A shortcut: the second body has an index of the first body, but is not the same layer again.
            return 0
        if self._level == 0 and not self._group_products(start, start + period):
            return 0
        count = self._count_between_branches(start, period, count)
        seen: dict[int, Sequence[Hashable]] = {}
        for number in range(count if self._has_indices else 0):
            begin, end = start + number * period, start + (number + 1) * period
            # Each body must have different indices, unless it is the same layer again.
            indices = {index for index in self._indices[begin:end] if index is not None}
            if indices:
                paths = self._paths[begin:end]
                if any(seen.setdefault(index, paths) != paths for index in indices):
                    return number
            if not self._have_one_pattern(start, begin, period):
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

    def _have_one_pattern(self, one: int, other: int, size: int) -> bool:
        """Whether equal indices group the products of two bodies in the same way."""
        distances, others = self._distances[one : one + size], self._distances[other : other + size]
        return distances == others or all(
            a == b or (a >= 0 and b >= 0 and (a > offset or a == 0) and (b > offset or b == 0))
            for offset, (a, b) in enumerate(zip(distances, others, strict=True))
        )

    def _group_products(self, begin: int, end: int) -> bool:
        """Whether innermost indices group several products. Those of `layers[1].weights[0]` do not."""
        members = [indices for indices in self._all_indices[begin:end] if indices]
        return len({inner for inner, _ in members}) < len(members) or all(a == b for a, b in members)
