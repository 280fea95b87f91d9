"""Which names in the path of a parameter can carry an index: `layers` or `mlp` in `layers.mlp.up`.

A stack of layers is one array per parameter, with an axis of layers. Names do not say where that axis belongs: both
`layers[2].mlp.up` and `layers.mlp[2].up` could be meant. The shapes of all parameters tell which names are possible.
"""

from __future__ import annotations

from collections.abc import Sequence

from policyc.compiler.weights.provenance.graph import ParameterSource
from policyc.jaxcore.jaxprs.transform import Address
from policyc.language.selectors import DottedPath


class IndexPositions:
    """Finds the positions of indices among the names of a path. `shapes` has the shape of every parameter.

    Example: the parameters are `head` f32[8, 9], `layers.mlp.up` f32[4, 8, 8] and `layers.mlp.down` f32[4, 8, 8]. All
    parameters under `layers` have size 4 in axis 0, and their paths agree up to `layers.mlp`. So the index along axis 0
    of `layers.mlp.up` can be at positions 0 and 1.
    """

    def __init__(self, shapes: dict[DottedPath, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._stacked_names: dict[tuple[DottedPath, int, int], tuple[int, ...]] = {}
        self._common_names: dict[Address, int] = {}

    def note_scanned(self, loop: Address, paths: Sequence[DottedPath]) -> None:
        """Records that the scan at this address slices the parameters with these paths."""
        self._common_names[loop] = common_prefix(paths)

    def find(self, path: DottedPath, axis: int, size: int, loops: Sequence[Address]) -> tuple[int, ...]:
        """The positions in a path that can carry the index along an axis of this size, in these loops.

        These are the names under which all parameters have this size in this axis, and the leading names that all
        parameters sliced by a scan have in common. If there are none, it is the last name. A name that already has an
        index is left out.
        """
        common = max((self._common_names.get(loop, 0) for loop in loops), default=0)
        positions = {*self._find_stacked_names(path, axis, size), *_without_index(path, range(common))}
        return tuple(sorted(positions or _without_index(path, range(len(path) - 1, len(path)))))

    def looks_stacked(self, parameter: ParameterSource) -> bool:
        """Whether it looks like a stack of matrices: siblings under a name without an index share its first axis."""
        path, shape = parameter.path, parameter.shape
        if len(shape) < 3:
            return False
        positions = self._find_stacked_names(path, 0, shape[0])
        return bool(positions) and len(self._shapes_under(path[: positions[0] + 1])) > 1

    def _find_stacked_names(self, path: DottedPath, axis: int, size: int) -> tuple[int, ...]:
        """The names under which every parameter has this size in this axis.

        They range from the first such name to the last one that all parameters under it have in common.
        """
        key = (path, axis, size)
        if key not in self._stacked_names:
            self._stacked_names[key] = ()
            for first in range(len(path)):
                shapes = self._shapes_under(path[: first + 1])
                if all(len(shape) > axis and shape[axis] == size for shape in shapes.values()):
                    end = max(first + 1, common_prefix(list(shapes)))
                    self._stacked_names[key] = _without_index(path, range(first, end))
                    break
        return self._stacked_names[key]

    def _shapes_under(self, prefix: DottedPath) -> dict[DottedPath, tuple[int, ...]]:
        return {path: shape for path, shape in self._shapes.items() if path[: len(prefix)] == prefix}


def _without_index(path: DottedPath, positions: range) -> tuple[int, ...]:
    """The positions whose names in the path have no index yet."""
    return tuple(
        position for position in positions if 0 <= position < len(path) and path[position].index is None
    )


def common_prefix(paths: Sequence[DottedPath]) -> int:
    """The number of leading names that all paths have in common."""
    common = 0
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        common += 1
    return common
