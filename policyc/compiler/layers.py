"""Layer indices of sites: which member of a stack a GEMM reads in each iteration of the loops around it.

The index of a layer is its index in the parameter as the program stores it, whatever the loop does: run backwards, over
a part, over a reshaped or a gathered stack.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from policyc.compiler.provenance.elements import AxisIndex, axis_indices, iterations_of
from policyc.compiler.provenance.graph import ParameterSource, Source, loops_of, parameters_of, shard_maps_of
from policyc.compiler.provenance.regions import Unknown
from policyc.compiler.sites import IndexSlot, LayerTable, PathTemplate, Stack
from policyc.jaxcore.transform import Address
from policyc.language.selectors import DottedPath

_MOST_LAYERS = 1 << 16  # combinations of iterations that are followed one by one
_NO_LAYER = "its operands do not come from the weights of one layer"


@dataclass(frozen=True, slots=True)
class LoopLayers:
    """A scan around a site. `depth`: how many name scopes are around it."""

    stack: Stack
    depth: int


@dataclass(slots=True)
class _LoopIndex:
    """The indices that the parameters in a loop's body have, as far as they are known.

    `slots` has those of each parameter that depend on the loop: a size and a table for each of its axes. Parameters
    with the same indices are one entry.
    """

    slots: dict[tuple[tuple[int, LayerTable[int]], ...], None] = field(default_factory=dict)
    unknown: str = ""


class LayerIndices:
    """Finds the indices of layers. `shapes` has the shape of every parameter."""

    def __init__(self, shapes: dict[DottedPath, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._loops: dict[Address, _LoopIndex] = {}
        self._places: dict[tuple[DottedPath, int, int], tuple[int, ...]] = {}
        self._common: dict[Address, int] = {}

    # ---- what the analysis tells

    def note_stacked_inputs(self, sources: Sequence[Source], loops: Sequence[LoopLayers]) -> None:
        """A scan slices these parameters."""
        if sources:
            paths = [p.path for s in sources for p in parameters_of(s)]
            self._common[loops[-1].stack.address] = _common_prefix(paths)
            self._note(sources, loops)

    def note_sources(self, sources: Sequence[Source], loops: Sequence[LoopLayers]) -> None:
        """A GEMM reads these weights."""
        if any(loops_of(s) for s in sources):
            self._note(sources, loops)

    def _note(self, sources: Sequence[Source], loops: Sequence[LoopLayers]) -> None:
        for source in sources:
            stacks = self._stacks(source, loops)
            if not stacks:
                continue
            innermost = self._loops.setdefault(stacks[-1].address, _LoopIndex())
            for stack in stacks[:-1]:
                self._loops.setdefault(stack.address, _LoopIndex())
            for template in self._templates(source, (), stacks, loops):
                innermost.unknown = innermost.unknown or template.unknown_index
                # What depends on outer loops only is an index of theirs.
                slots = tuple((s.size, s.index) for s in template.slots if stacks[-1] in s.index.stacks)
                if slots:
                    innermost.slots[slots] = None

    # ---- what a site asks

    def is_layered(self, loop: LoopLayers) -> bool:
        """Does each iteration of a loop read other members of some parameter?"""
        return loop.stack.address in self._loops

    def stacks(self, sources: Sequence[Source], loops: Sequence[LoopLayers]) -> tuple[Stack, ...]:
        """The stacks on which the elements of a weight depend, shard_maps first, then loops from the outermost on."""
        return _sort_stacks(stack for s in sources for stack in self._stacks(s, loops))

    def _stacks(self, source: Source, loops: Sequence[LoopLayers]) -> tuple[Stack, ...]:
        addresses = loops_of(source)
        shards = shard_maps_of(source)
        devices = [Stack(a, parts, is_shard_map=True) for a, parts in shards.items() if parts > 1]
        return (*devices, *(loop.stack for loop in loops if loop.stack.address in addresses))

    def weight_templates(
        self, sources: Sequence[Source], batch_dims: Sequence[int], loops: Sequence[LoopLayers]
    ) -> tuple[PathTemplate, ...]:
        """The paths of the parameters that a GEMM reads."""
        stacks = self.stacks(sources, loops)
        templates = (t for s in sources for t in self._templates(s, batch_dims, stacks, loops))
        return tuple(dict.fromkeys(templates))

    def scope_template(
        self, scope: DottedPath, loops: Sequence[LoopLayers], weight_stacks: tuple[Stack, ...] | None
    ) -> PathTemplate:
        """The scope of a site, with the indices of the layered loops around it.

        With `weight_stacks`, those on which its weight depends, indices that depend on other stacks are left out: all
        their iterations share the weight.
        """
        slots: list[IndexSlot] = []
        unknown = ""
        for loop in loops:
            index = self._loops[loop.stack.address]
            places = tuple(
                p for p in (loop.depth - 1, loop.depth) if 0 <= p < len(scope) and scope[p].index is None
            )
            if len(index.slots) > 1:
                unknown = unknown or "each iteration of the loop around it reads several layers"
            unknown = unknown or index.unknown
            for size, table in next(iter(index.slots)) if len(index.slots) == 1 else ():
                if weight_stacks is None or set(table.stacks) <= set(weight_stacks):
                    slots.append(IndexSlot(places, size, table))
        return PathTemplate(scope, tuple(slots), unknown_index=unknown)

    def module_template(
        self, projections: Collection[Source], loops: Sequence[LoopLayers]
    ) -> PathTemplate | None:
        """The module whose weights made the operands of a product of activations; None if no weight did.

        Its path is what the paths of these weights have in common. It is not that of one of the weights itself: a
        rule for a projection is not about the product of its results.
        """
        if not projections:
            return None
        templates = self.weight_templates(sorted(projections, key=_first_path), (), loops)
        if not templates or any(t.unknown_index or t.in_layer is not None for t in templates):
            return PathTemplate((), unknown_index=_NO_LAYER)
        paths = list(dict.fromkeys(t.path for t in templates))
        last_index = max((i for i, name in enumerate(paths[0]) if name.index is not None), default=-1)
        path = paths[0][: _module_length(paths, last_index)]
        slots = tuple(
            replace(slot, places=tuple(p for p in slot.places if p < len(path)), axis=None)
            for slot in templates[0].slots
        )
        have_same_indices = len({tuple((s.size, s.index) for s in t.slots) for t in templates}) == 1
        has_all_indices = last_index < len(path) and all(slot.places for slot in slots)
        if not (path and have_same_indices and has_all_indices):
            return PathTemplate((), unknown_index=_NO_LAYER)
        return PathTemplate(path, slots)

    def template_stacks(self, templates: Sequence[PathTemplate]) -> tuple[Stack, ...]:
        """The stacks on which the indices of some paths depend, in the order of `stacks`."""
        return _sort_stacks(stack for t in templates for slot in t.slots for stack in slot.index.stacks)

    # ---- templates

    def _templates(
        self,
        source: Source,
        batch_dims: Sequence[int],
        stacks: tuple[Stack, ...],
        loops: Sequence[LoopLayers],
    ) -> Iterator[PathTemplate]:
        """The parameters that a variable holds, with their indices for every combination of iterations of `stacks`."""
        parameters = list(dict.fromkeys(parameters_of(source)))
        try:
            reads = self._read(source, batch_dims, stacks)
        except Unknown as reason:
            yield from (PathTemplate(p.path, unknown_index=str(reason)) for p in parameters)
            return
        for parameter in parameters:
            in_layer = tuple(parameter in read for read in reads)
            if any(in_layer):
                axes = [read.get(parameter, ()) for read in reads]
                template = self._template(parameter, axes, stacks, loops)
                if not all(in_layer):
                    template = PathTemplate(
                        template.path, template.slots, LayerTable(stacks, in_layer), template.unknown_index
                    )
                yield template

    def _read(
        self, source: Source, batch_dims: Sequence[int], stacks: tuple[Stack, ...]
    ) -> list[dict[ParameterSource, tuple[AxisIndex, ...]]]:
        """In each combination of iterations, the parameters that a variable holds and the axes with an index.

        Raises `Unknown`.
        """
        count = math.prod(stack.size for stack in stacks)
        if count > _MOST_LAYERS:
            raise Unknown(f"it has {count} layers, which are too many to follow")
        sizes = [(s.address, s.size) for s in stacks]
        return [axis_indices(source, batch_dims, iterations) for iterations in iterations_of(sizes)]

    def _template(
        self,
        parameter: ParameterSource,
        axes_by_layer: Sequence[tuple[AxisIndex, ...]],
        stacks: tuple[Stack, ...],
        loops: Sequence[LoopLayers],
    ) -> PathTemplate:
        slots: list[IndexSlot] = []
        unknown = ""
        for axis in sorted({a.axis for axes in axes_by_layer for a in axes}):
            size = parameter.shape[axis]
            places = self._index_places(parameter.path, axis, size, loops)
            indices = [next((a.index for a in axes if a.axis == axis), None) for axes in axes_by_layer]
            present = [bool(axes) for axes in axes_by_layer]
            if any(i is None and p for i, p in zip(indices, present, strict=True)):
                if not slots:  # behind the axis of layers it is one of experts or heads, which have no index
                    unknown = f"one product reads several of the {size} members of axis {axis} at once"
                continue
            values = tuple(0 if i is None else i for i in indices)
            slots.append(IndexSlot(places, size, LayerTable(stacks, values).simplify(), axis))
        if not slots and not unknown and self._looks_stacked(parameter):
            unknown = f"one product reads all {parameter.shape[0]} members of axis 0 at once"
        return PathTemplate(parameter.path, tuple(slots), unknown_index=unknown)

    def _looks_stacked(self, parameter: ParameterSource) -> bool:
        """Is it several matrices whose first axis all parameters beside it have too, and no name has an index yet?"""
        path, shape = parameter.path, parameter.shape
        if len(shape) < 3 or any(n.index is not None for n in path):
            return False
        places = self._find_places(path, 0, shape[0])
        beside = [p for p in self._shapes if places and p[: places[0] + 1] == path[: places[0] + 1]]
        return len(beside) > 1

    # ---- names that carry an index

    def _index_places(
        self, path: DottedPath, axis: int, size: int, loops: Sequence[LoopLayers]
    ) -> tuple[int, ...]:
        """The names in a path that can carry the index along an axis.

        They begin at the first name under which every parameter has this size in this axis. The names that all
        parameters of a scan have in common can carry it too.
        """
        key = (path, axis, size)
        if key not in self._places:
            self._places[key] = self._find_places(path, axis, size)
        common = max((self._common.get(loop.stack.address, 0) for loop in loops), default=0)
        places = {*self._places[key], *(i for i in range(min(common, len(path))) if path[i].index is None)}
        if not places and path and path[-1].index is None:
            places = {len(path) - 1}
        return tuple(sorted(places))

    def _find_places(self, path: DottedPath, axis: int, size: int) -> tuple[int, ...]:
        for top in range(len(path)):
            under = {p: s for p, s in self._shapes.items() if p[: top + 1] == path[: top + 1]}
            if all(len(s) > axis and s[axis] == size for s in under.values()):
                last = max(top + 1, _common_prefix(list(under)))
                return tuple(i for i in range(top, last) if path[i].index is None)
        return ()


def _sort_stacks(stacks: Iterable[Stack]) -> tuple[Stack, ...]:
    """Each stack once: shard_maps first, then loops from the outermost on."""
    return tuple(sorted(dict.fromkeys(stacks), key=lambda s: (not s.is_shard_map, s.address)))


def _module_length(paths: Sequence[DottedPath], last_index: int) -> int:
    """How many names at the start of the paths of some weights name the module around all of them.

    A single weight ends with the names of a projection and of its array (`attention.qkv.kernel`), which are left out.
    The name at `last_index`, the last with an index, is not, unless it is the array.
    """
    if len(paths) > 1:
        return _common_prefix(paths)
    (path,) = paths
    return max(len(path) - 2, min(last_index + 1, len(path) - 1), 0)


def _first_path(source: Source) -> str:
    return min((".".join(map(str, p.path)) for p in parameters_of(source)), default="")


def _common_prefix(paths: Sequence[DottedPath]) -> int:
    """How many names all paths begin with."""
    common = 0
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        common += 1
    return common
