"""Layer indices of sites: which member of a stack a GEMM reads in each iteration of the loops around it.

The index of a layer is its index in the stored parameter, even if the loop runs backwards, covers only a part of the
stack, or scans a reshaped or gathered stack.

Example: the parameters are `layers.up` f32[4, 8, 8] and `layers.down` f32[4, 8, 8], and the loss reverses them:

    reversed_layers = jax.tree.map(lambda array: array[::-1], params["layers"])
    lax.scan(lambda h, layer: (h @ layer["up"] @ layer["down"], None), x, reversed_layers)

The scan is a `Stack` of size 4. Its iterations 0 to 3 read the members 3, 2, 1, 0 of axis 0 of `layers.up`. So the path
of the weight is the `PathTemplate` `layers.up` with one `IndexSlot`: axis 0, size 4, the table (3, 2, 1, 0), and the
position 0, because the name `layers` carries the index. In the first iteration the site is `layers[3].up`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from policyc.compiler.sites.site import IndexSlot, PathTemplate
from policyc.compiler.sites.stacks import LayerTable, Stack
from policyc.compiler.weights.index_positions import IndexPositions, common_prefix
from policyc.compiler.weights.provenance.elements import AxisIndex, axis_indices, iterations_of
from policyc.compiler.weights.provenance.graph import (
    CarriedSource,
    ParameterSource,
    Source,
    loops_of,
    parameters_of,
    shard_maps_of,
)
from policyc.compiler.weights.var_info import MANY_PROJECTIONS
from policyc.jaxcore.jaxprs.transform import Address
from policyc.jaxcore.primitives.regions import Unknown
from policyc.language.selectors import DottedPath, PathSegment

MAX_LAYERS = 1 << 16  # combinations of iterations that are followed one by one
_SEVERAL_LAYERS = "each iteration of the loop around it reads several layers"
_NO_MODULE = "the weights of its layer have no name in common"
_NO_LAYER = "its operands do not come from the weights of one layer"


@dataclass(frozen=True, slots=True)
class EnclosingLoop:
    """A scan around a site. `scope_depth` is the number of name scopes around the scan."""

    stack: Stack
    scope_depth: int


@dataclass(slots=True)
class _LoopIndices:
    """The known layer indices of the parameters that a loop's body reads. `unknown` says why others are unknown.

    Each key of `slots` has a size and a table for each axis of a parameter whose index depends on the loop. Parameters
    with the same indices share a key.
    """

    slots: dict[tuple[tuple[int, LayerTable[int | None]], ...], None] = field(default_factory=dict)
    templates: dict[PathTemplate, None] = field(default_factory=dict)
    """The paths of these parameters."""
    unknown: str = ""


class LayerIndices:
    """Finds the indices of layers. `shapes` has the shape of every parameter.

    During the analysis, the `note_*` methods record what scans slice and what GEMMs read. Query paths only afterwards.
    """

    def __init__(self, shapes: dict[DottedPath, tuple[int, ...]]) -> None:
        self._positions = IndexPositions(shapes)
        self._loops: dict[Address, _LoopIndices] = {}
        self._templates: dict[Hashable, tuple[PathTemplate, ...]] = {}
        """Cache of `weight_templates`: several sites may read the same weight, or values computed from it."""
        self._modules: dict[Address, PathTemplate | None] = {}
        self._carried: dict[CarriedSource, frozenset[Source]] = {}

    # ---- recording, during the analysis

    def note_scanned(self, sources: Sequence[Source], loops: Sequence[EnclosingLoop]) -> None:
        """Records that the innermost loop slices these parameters."""
        if sources:
            paths = [parameter.path for source in sources for parameter in parameters_of(source)]
            self._positions.note_scanned(loops[-1].stack.address, paths)
            self._note_indices(sources, loops)

    def note_weight(self, sources: Sequence[Source], loops: Sequence[EnclosingLoop]) -> None:
        """Records that a GEMM inside these loops reads a weight with these sources."""
        if any(loops_of(source) for source in sources):
            self._note_indices(sources, loops)

    def note_carried(self, carry: CarriedSource, projections: frozenset[Source]) -> None:
        """Records the projections of a carry's initial value, or of its value after an iteration."""
        self._carried[carry] = self._carried.get(carry, frozenset()) | projections

    def _note_indices(self, sources: Sequence[Source], loops: Sequence[EnclosingLoop]) -> None:
        """Records each parameter index that depends on loops with the innermost of these loops."""
        for source in sources:
            stacks = _stacks_of(source, loops)
            if not stacks:
                continue
            for stack in stacks:
                self._loops.setdefault(stack.address, _LoopIndices())
            innermost = stacks[-1]
            indices = self._loops[innermost.address]
            for template in self._templates_of(source, (), stacks):
                indices.templates[template] = None
                indices.unknown = indices.unknown or template.unknown_index
                # An index that depends only on outer loops belongs to those.
                slots = tuple((s.size, s.index) for s in template.slots if innermost in s.index.stacks)
                if slots:
                    indices.slots[slots] = None

    # ---- queries, after the analysis

    def is_layered(self, loop: EnclosingLoop) -> bool:
        """Whether each iteration of a loop reads different members of some parameter."""
        return loop.stack.address in self._loops

    def weight_templates(
        self, sources: Sequence[Source], batch_dims: tuple[int, ...], stacks: tuple[Stack, ...]
    ) -> tuple[PathTemplate, ...]:
        """The paths of the parameters that a GEMM reads. The whole loss must have been analyzed.

        `stacks` are the `weight_stacks` of the sources.
        """
        templates: list[PathTemplate] = []
        for source in sources:
            key = source, batch_dims, stacks
            of_source = self._templates.get(key)
            if of_source is None:
                of_source = self._templates[key] = tuple(self._templates_of(source, batch_dims, stacks))
            templates += of_source
        return tuple(dict.fromkeys(templates)) if len(templates) > 1 else tuple(templates)

    def scope_template(
        self, scope: DottedPath, loops: Sequence[EnclosingLoop], stacks: tuple[Stack, ...] | None
    ) -> PathTemplate:
        """The scope of a site, with the indices of the layered loops around it.

        `stacks` are the stacks that its weight depends on. Indices that depend on other stacks are then left out,
        because all iterations of those share the weight.
        """
        slots: list[IndexSlot] = []
        unknown = ""
        for loop in loops:
            indices = self._loops[loop.stack.address]
            if len(indices.slots) > 1:
                unknown = unknown or _SEVERAL_LAYERS
            unknown = unknown or indices.unknown
            if len(indices.slots) != 1:
                continue
            # The scope around the scan, or the first one inside it: `layers`, or `layer` in `layers.layer`.
            names = (loop.scope_depth - 1, loop.scope_depth)
            positions = tuple(p for p in names if 0 <= p < len(scope) and scope[p].index is None)
            for size, table in next(iter(indices.slots)):
                if stacks is None or set(table.stacks) <= set(stacks):
                    slots.append(IndexSlot(positions, size, table))
        return PathTemplate(scope, tuple(slots), unknown_index=unknown)

    def module_templates(
        self,
        projections: Collection[Source],
        factors: Collection[Source],
        loops: Sequence[EnclosingLoop],
    ) -> tuple[PathTemplate, ...]:
        """The modules that a product of activations is in. One with an empty path says why it is unknown.

        The first is that of the weights which produced its operands, or one operand (`factors`). Then come the modules
        of the loops around it that do not index another one, the innermost first.
        """
        projected = [self._projected_module(sources, loops) for sources in (projections, factors) if sources]
        modules = [module for module in projected if module.path][:1]
        layered = [loop.stack for loop in reversed(loops) if self.is_layered(loop)]
        for stack in layered:
            module = self._loop_module(stack)
            if module is not None and stack not in template_stacks(modules):
                modules.append(module)
        no_module = [PathTemplate((), unknown_index=_NO_MODULE) for _ in layered[:1]]
        return tuple(modules or no_module or projected[:1])

    def _projected_module(
        self, projections: Collection[Source], loops: Sequence[EnclosingLoop]
    ) -> PathTemplate:
        sources = self._resolve_carries(projections)
        around = {loop.stack.address for loop in loops}
        if any(loops_of(s) - shard_maps_of(s).keys() - around for s in sources):
            return PathTemplate((), unknown_index=_NO_LAYER)  # a loop that has ended sliced it
        sources = sorted(sources, key=_first_path)
        stacks = weight_stacks(sources, loops)
        return _common_module(self.weight_templates(sources, (), stacks))

    def _resolve_carries(self, projections: Collection[Source]) -> Collection[Source]:
        """The projections with those of carries in their place; empty if they may be from other iterations."""
        carries = dict.fromkeys(s for s in projections if isinstance(s, CarriedSource))
        if not carries:
            return projections
        carried: dict[Source, None] = {}
        todo = list(carries)
        while todo:
            for source in self._carried[todo.pop()]:
                if not isinstance(source, CarriedSource):
                    carried[source] = None
                elif source not in carries:
                    carries[source] = None
                    todo.append(source)
        loops = {carry.loop for carry in carries}
        resolved = {s for s in projections if not isinstance(s, CarriedSource)}.union(carried)
        is_unknown = resolved >= MANY_PROJECTIONS or any(loops_of(source) & loops for source in carried)
        return () if is_unknown else resolved

    def _loop_module(self, stack: Stack) -> PathTemplate | None:
        """The module whose layers the iterations of a loop read; None if it has no name."""
        if stack.address not in self._modules:
            indices = self._loops[stack.address]
            unknown = _SEVERAL_LAYERS if len(indices.slots) > 1 else indices.unknown
            indexed = [t for t in _join_lists(tuple(indices.templates)) if stack in template_stacks([t])]
            module = PathTemplate((), unknown_index=unknown) if unknown else _common_module(indexed)
            self._modules[stack.address] = module if unknown or module.path else None
        return self._modules[stack.address]

    # ---- paths of parameters

    def _templates_of(
        self, source: Source, batch_dims: Sequence[int], stacks: tuple[Stack, ...]
    ) -> Iterator[PathTemplate]:
        """Yields the paths of the parameters in a source, with their indices in every layer of `stacks`."""
        if isinstance(source, ParameterSource) and not batch_dims and not stacks:
            yield self._template_of(source, [()], stacks)
            return
        parameters = list(dict.fromkeys(parameters_of(source)))
        try:
            layers = _read_layers(source, batch_dims, stacks)
        except Unknown as reason:
            several = len(parameters) > 1
            yield from (
                PathTemplate(p.path, unknown_index=str(reason), is_uncertain=several) for p in parameters
            )
            return
        for parameter in parameters:
            if any(parameter in layer for layer in layers):
                axes_by_layer = [layer.get(parameter) for layer in layers]
                template = self._template_of(parameter, axes_by_layer, stacks)
                # A padding layer reads no parameter. It counts as part of a stack of one parameter, without an index.
                is_one_stack = len(parameters) == 1
                has_path = tuple(parameter in layer or (is_one_stack and not layer) for layer in layers)
                yield template if all(has_path) else replace(template, in_layer=LayerTable(stacks, has_path))

    def _template_of(
        self,
        parameter: ParameterSource,
        axes_by_layer: Sequence[tuple[AxisIndex, ...] | None],
        stacks: tuple[Stack, ...],
    ) -> PathTemplate:
        """The path of a parameter, given its indexed axes in each layer; None for a layer that does not read it."""
        slots: list[IndexSlot] = []
        unknown = ""
        for axis in sorted({a.axis for axes in axes_by_layer for a in axes or ()}):
            size = parameter.shape[axis]
            indices = _indices_along(axis, axes_by_layer)
            if indices is not None:
                table = LayerTable(stacks, indices).simplify()
                positions = self._positions.find(
                    parameter.path, axis, size, [s.address for s in table.stacks]
                )
                slots.append(IndexSlot(positions, size, table, axis))
            elif slots:
                continue  # axes after the layer axis are those of experts or heads, which have no index
            elif (firsts := _first_indices(axis, axes_by_layer)) is None:
                unknown = f"one product reads several of the {size} members of axis {axis} at once"
            elif all(name.index is None for name in parameter.path) and any(
                not s.is_shard_map for s in LayerTable(stacks, firsts).simplify().stacks
            ):
                # Parts on devices (shard_map) are still one matrix, but parts in iterations may be layers.
                unknown = f"each iteration of a loop reads a different part of axis {axis}, of size {size}"
        if not slots and not unknown and self._positions.looks_stacked(parameter):
            unknown = f"one product reads all {parameter.shape[0]} members of axis 0 at once"
        return PathTemplate(parameter.path, tuple(slots), unknown_index=unknown)


def _read_layers(
    source: Source, batch_dims: Sequence[int], stacks: tuple[Stack, ...]
) -> list[dict[ParameterSource, tuple[AxisIndex, ...]]]:
    """For each layer (combination of iterations), the parameters in a source, and their axes with an index.

    Raises `Unknown` if they cannot be determined.
    """
    count = math.prod(stack.size for stack in stacks)
    if count > MAX_LAYERS:
        raise Unknown(f"it has {count} layers, too many to follow")
    sizes = [(stack.address, stack.size) for stack in stacks]
    return [axis_indices(source, batch_dims, iterations) for iterations in iterations_of(sizes)]


def _indices_along(
    axis: int, axes_by_layer: Sequence[tuple[AxisIndex, ...] | None]
) -> tuple[int | None, ...] | None:
    """The index along an axis in each layer (None if not read); None if some layer reads several members at once."""
    indices = [None if axes is None else {a.axis: a.index for a in axes}.get(axis) for axes in axes_by_layer]
    reads_several = any(
        i is None and axes is not None for i, axes in zip(indices, axes_by_layer, strict=True)
    )
    return None if reads_several else tuple(indices)


def _first_indices(
    axis: int, axes_by_layer: Sequence[tuple[AxisIndex, ...] | None]
) -> tuple[int | None, ...] | None:
    """The start of the part of an axis that each layer reads; None if no layer reads only a part."""
    firsts = tuple(next((a.first for a in axes or () if a.axis == axis), None) for axes in axes_by_layer)
    return None if all(first is None for first in firsts) else firsts


# ---- stacks


def weight_stacks(sources: Sequence[Source], loops: Sequence[EnclosingLoop]) -> tuple[Stack, ...]:
    """The stacks that a weight depends on: shard_maps first, then loops, the outermost first."""
    return _sort_stacks(stack for source in sources for stack in _stacks_of(source, loops))


def drop_divisions(stacks: tuple[Stack, ...], templates: Sequence[PathTemplate]) -> tuple[Stack, ...]:
    """The stacks of a weight without the shard_maps that divide a single matrix, as in tensor parallelism.

    The devices of the other shard_maps hold different layers: some index of a path depends on them.
    """
    if not stacks or any(t.in_layer is not None or (t.unknown_index and not t.has_index) for t in templates):
        return stacks  # it is not known what the devices hold
    indexed = template_stacks(templates)
    return tuple(stack for stack in stacks if not stack.is_shard_map or stack in indexed)


def template_stacks(templates: Sequence[PathTemplate]) -> tuple[Stack, ...]:
    """The stacks that the indices of some paths depend on, in the order of `weight_stacks`."""
    return _sort_stacks(stack for t in templates for slot in t.slots for stack in slot.index.stacks)


def _stacks_of(source: Source, loops: Sequence[EnclosingLoop]) -> tuple[Stack, ...]:
    addresses = loops_of(source)
    if not addresses:
        return ()
    shards = shard_maps_of(source)
    devices = [Stack(address, parts, is_shard_map=True) for address, parts in shards.items() if parts > 1]
    return (*devices, *(loop.stack for loop in loops if loop.stack.address in addresses))


def _sort_stacks(stacks: Iterable[Stack]) -> tuple[Stack, ...]:
    """Removes duplicates and sorts: shard_maps first, then loops, the outermost first."""
    once = tuple(dict.fromkeys(stacks))
    return once if len(once) < 2 else tuple(sorted(once, key=lambda s: (not s.is_shard_map, s.address)))


# ---- modules


def _common_module(templates: Sequence[PathTemplate]) -> PathTemplate:
    """The module around the weights with these paths. If it has no name, its path is empty.

    Its path is the common prefix of the weights' paths, but never the whole path of one weight: a rule for a projection
    must not match a product of its results.
    """
    templates = list(_join_lists(templates))
    if not templates or any(t.in_layer is not None for t in templates):
        return PathTemplate((), unknown_index=_NO_LAYER)
    first, *others = templates
    paths = list(dict.fromkeys(t.path for t in templates))
    shared = [s for s in first.slots if all(any(_same_index(s, o) for o in t.slots) for t in others)]
    indexed = [i for i, name in enumerate(paths[0]) if name.index is not None]
    last_index = max((*indexed, *(s.positions[0] for s in shared if s.positions)), default=-1)
    path = paths[0][: _module_length(paths, last_index)]
    # Members that one layer has of a weight (the three of `qkv`) are inside the module; members of the module are not.
    differing = (s for t in templates for s in t.slots if not any(_same_index(s, o) for o in shared))
    is_one_layer = all(s.positions and s.positions[0] >= len(path) for s in differing)
    slots = tuple(
        replace(slot, positions=tuple(p for p in slot.positions if p < len(path)), axis=None)
        for slot in shared
    )
    unknown = next((t.unknown_index for t in templates if t.unknown_index), "")
    if not is_one_layer or (unknown and not indexed):
        return PathTemplate((), unknown_index=_NO_LAYER)
    if path and last_index < len(path) and all(slot.positions for slot in slots):
        return PathTemplate(path, slots, unknown_index=unknown)
    return PathTemplate((), unknown_index=_NO_MODULE if slots or indexed else "")


def _same_index(one: IndexSlot, other: IndexSlot) -> bool:
    return (one.size, one.index) == (other.size, other.index)


def _join_lists(templates: Sequence[PathTemplate]) -> Iterator[PathTemplate]:
    """Merges the paths of the members of a list that the program stacks into one path. Each layer reads one member."""
    groups: dict[tuple[str, ...], list[PathTemplate]] = {}
    for template in templates:
        groups.setdefault(tuple(name.text for name in template.path), []).append(template)
    for group in groups.values():
        tables = [t.in_layer for t in group if t.in_layer is not None and not t.slots and not t.unknown_index]
        is_list = len(tables) == len(group) and len({table.stacks for table in tables}) == 1
        if not is_list or any(sum(layer) != 1 for layer in zip(*(t.values for t in tables), strict=True)):
            yield from group
            continue
        members = [
            next(t.path for t, is_read in zip(group, layer, strict=True) if is_read)
            for layer in zip(*(t.values for t in tables), strict=True)
        ]
        names, slots = list(group[0].path), []
        for position, name in enumerate(group[0].path):
            indices = tuple(path[position].index for path in members)
            if len(set(indices)) > 1:
                names[position] = PathSegment(name.text)
                slots.append(IndexSlot((position,), name.size or 1, LayerTable(tables[0].stacks, indices)))
        yield PathTemplate(tuple(names), tuple(slots))


def _module_length(paths: Sequence[DottedPath], last_index: int) -> int:
    """The number of names at the start of these weights' paths that name the module around all of them.

    The path of a single weight ends with a projection and its array (`attention.qkv.kernel`); both are left out. The
    name at `last_index`, the last one with an index, is kept unless it is the array.
    """
    if len(paths) > 1:
        return common_prefix(paths)
    (path,) = paths
    return max(len(path) - 2, min(last_index + 1, len(path) - 1), 0)


def _first_path(source: Source) -> str:
    return min((".".join(map(str, p.path)) for p in parameters_of(source)), default="")
