"""Sites: the forward GEMMs of a loss, each with its names, shapes, roles and products.

A GEMM in a scan over stacked parameters is one site with many layers. Its paths have an index once a layer is chosen.
Does not load JAX: editors read the sites of a model from a file. The equations of a program's sites are beside them.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from policyc.compiler.sites.site_kinds import SiteBlock, SiteKind
from policyc.compiler.sites.stacks import Layer, LayerTable, Stack
from policyc.language.predicates import SiteAttributes
from policyc.language.recipes import Gemm
from policyc.language.selectors import DottedPath, PathSegment

if TYPE_CHECKING:
    from policyc.jaxcore.jaxprs.transform import Address
    from policyc.numerics.products import Weight


@dataclass(frozen=True, slots=True)
class IndexSlot:
    """An index in a path, which may depend on the layer. `positions` are the names of the path that may carry it."""

    positions: tuple[int, ...]
    size: int
    index: LayerTable[int | None]
    """The index in each layer; None in a padding layer."""
    axis: int | None = None
    """The axis of the parameter; None if the index is that of a scope."""


@dataclass(frozen=True, slots=True)
class PathTemplate:
    """A path whose indices depend on the layer."""

    path: DottedPath
    slots: tuple[IndexSlot, ...] = ()
    in_layer: LayerTable[bool] | None = None
    """Which layers have this path; None: all of them."""
    unknown_index: str = ""
    """Why an index in this path is not known; empty if all are."""
    is_uncertain: bool = False
    """Whether this is one of several parameters, and it is unknown which of them are read."""

    @property
    def has_index(self) -> bool:
        """Whether a name of the path as it is stored has an index, as those of a list have."""
        return any(name.index is not None for name in self.path)

    def paths(self, indices: Mapping[Address, int]) -> Iterator[DottedPath]:
        """The paths of a layer: one for each way to place its indices."""
        if self.in_layer is not None and not self.in_layer[indices]:
            return
        if not self.slots:
            yield self.path
        else:
            for positions in self.placements():
                yield self.path_with(positions, indices)

    def placements(self) -> Iterator[tuple[int | None, ...]]:
        """Yields the ways to place the indices of `slots`: for each, the position of a name, in ascending order."""
        for positions in itertools.product(*(slot.positions or (None,) for slot in self.slots)):
            if all(a is None or b is None or a <= b for a, b in itertools.pairwise(positions)):
                yield positions

    def path_with(self, positions: Sequence[int | None], indices: Mapping[Address, int]) -> DottedPath:
        """The path of a layer with its indices at these positions.

        Two indices at one name count as one: index 1 of 4 and index 2 of 8 make index 10 of 32.
        """
        names = list(self.path)
        for position, slot in zip(positions, self.slots, strict=True):
            index = slot.index[indices]
            if position is None or index is None:
                continue
            name = names[position]
            outer, size = (name.index, name.size or 1) if name.index is not None else (0, 1)
            names[position] = PathSegment(name.text, outer * slot.size + index, size * slot.size)
        return tuple(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One forward GEMM, seen as `y = x W`: x has m rows, W has n columns, k is contracted, `batch` times."""

    address: Address
    name: str
    """The path of its parameter, else of its scope, else the place."""
    place: str = field(default="", compare=False)
    """The file and line of the program that created it."""
    scope: PathTemplate
    parameters: tuple[PathTemplate, ...] = ()
    """The paths of its weight. Several, if the program stacks a list of layers."""
    stacks: tuple[Stack, ...] = ()
    """The stacks whose layers a policy can tell apart: those that index its weight or, without one, its other paths."""
    modules: tuple[PathTemplate, ...] = ()
    """The modules that a product of activations is in: of the weights that produced its operands, and of the weights
    that the loops around it slice. One with an empty path says why it is unknown."""
    loops: tuple[Stack, ...] = ()
    """All scans over layers around it. A scan whose iterations share the weight is here, but not in `stacks`."""
    weight: Weight
    is_ragged: bool = False
    """Whether it multiplies groups of rows, each with a matrix of its own (`ragged_dot`)."""
    kind: SiteKind = SiteKind()
    block: SiteBlock | None = None
    """The block of the model that it is in; None if it is in none."""
    batch_dims: tuple[int, ...] = ()
    """The dimensions of its weight along which it reads several matrices."""
    batch: int
    m: int
    n: int
    k: int
    shapes: tuple[tuple[int, ...], ...] = ()
    """The shapes of its operands."""
    types: tuple[str, ...] = ()
    """The dtypes of its operands and of its result. Empty if the site was read from a file."""
    activation: int = 0
    """Equal for sites that multiply the same variable with their weights."""
    running: frozenset[Layer] | None = None
    """The layers in which it runs, if it is in a branch that only some iterations take. None: all layers."""
    repeats: int
    """How often it runs in a step, in all its layers together. 0 if unknown, because it is in a kernel."""
    uncertain_repeats: str = ""
    """Why it may run more or less often than `repeats`, in words that follow 'a GEMM'; empty if `repeats` is exact."""
    products: frozenset[Gemm]
    opaque: str = ""
    """Why the compiler cannot change it; empty if it can."""
    has_one_hot: bool = False
    """Whether its other operand is one-hot, so that it looks up rows of its weight."""
    is_reused: bool = False
    """Whether the same weight is read more than once: in a remat, or in several iterations of a loop."""
    takes_extra_inputs: bool = True
    """Whether the rewrite can pass additional inputs to it."""

    @property
    def template(self) -> PathTemplate:
        """The path of its parameter, else its scope."""
        return self.parameters[0] if self.parameters else self.scope

    @property
    def id(self) -> int:
        """Identifies the site in random keys and in compiled programs. Layers of a stack have the same id."""
        return zlib.crc32(".".join(n.text for n in self.template.path).encode())

    @property
    def is_layered(self) -> bool:
        """Whether it is one of several layers, scanned or unrolled."""
        return bool(self.loops) or any(n.index is not None for n in self.template.path)

    @property
    def unknown_layer(self) -> str:
        """Why the layer of a product of activations is unknown; empty if it is known."""
        scope = self.scope
        if (scope.has_index or any(s.positions for s in scope.slots)) and not scope.unknown_index:
            return ""
        return next((m.unknown_index for m in self.modules if not m.path), "")

    def layer_path(self, indices: Mapping[Address, int]) -> DottedPath:
        """The path of a layer: of its parameter, else its scope.

        If several names may carry the index, it is put at the innermost of them, but not at the last name of the path.
        """
        for template in self.parameters or (self.scope,):
            paths = list(template.paths(indices))
            if paths:
                return next((p for p in reversed(paths) if p[-1:] == template.path[-1:]), paths[-1])
        return self.template.path

    def loop_ordinals(self) -> list[int]:
        """One number for each combination of iterations of `loops`, for random keys.

        It is computed from the indices in the path, so that a scanned and an unrolled stack have the same numbers.
        """
        ordinals = []
        for combination in itertools.product(*(range(s.size) for s in self.loops)):
            indices = {s.address: index for s, index in zip(self.loops, combination, strict=True)}
            ordinal = 0
            for name in (n for n in self.layer_path(indices) if n.index is not None):
                ordinal = ordinal * (name.size or 1) + (name.index or 0)
            ordinals.append(ordinal)
        return ordinals if len(set(ordinals)) == len(ordinals) else list(range(len(ordinals)))

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return self.shapes[0 if self.weight == "lhs" else 1]

    @property
    def count(self) -> int:
        """The number of GEMMs that this site stands for: one per layer in which it runs."""
        return math.prod(s.size for s in self.stacks) if self.running is None else len(self.running)

    @property
    def flops(self) -> int:
        """FLOPs of one product in one layer, for one execution."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def layer_flops(self) -> float:
        """FLOPs of one product in a step, in one layer."""
        return self.flops * self.repeats / self.count

    @property
    def total_flops(self) -> int:
        """FLOPs of all its products in a step."""
        return self.flops * self.repeats * len(self.products)

    def attributes(self, layer: Layer) -> SiteAttributes:
        """The variables of `where`. `layer` is missing if it is not known."""
        attributes: dict[str, int | bool | None] = {
            "m": self.m,
            "n": self.n,
            "k": self.k,
            "batch": self.batch,
            "flops": self.flops,
            "weight": self.weight is not None,
            "block": self.block is not None,
            **self.kind.flags,
        }
        if self.block is None:
            return {**attributes, "layer": None, "layers": None}
        if self.block.unknown:
            return attributes
        number = self.block.number[self.stack_indices(layer)]
        return {**attributes, "layer": number, "layers": self.block.count}

    def layers(self) -> Iterator[Layer]:
        """The layers in which it runs."""
        return (la for la in self.all_layers() if self.running is None or la in self.running)

    def all_layers(self) -> Iterator[Layer]:
        """The layers of its stacks, including those in which it does not run."""
        return itertools.product(*(range(s.size) for s in self.stacks))

    def stack_indices(self, layer: Layer) -> dict[Address, int]:
        """The index in each stack, by the stack's address."""
        return {s.address: index for s, index in zip(self.stacks, layer, strict=True)}

    def paths(self, layer: Layer) -> tuple[DottedPath, ...]:
        """Every path by which a selector may name a layer of this site."""
        indices = self.stack_indices(layer)
        templates = (self.scope, *self.parameters, *(m for m in self.modules if m.path))
        return tuple(dict.fromkeys(path for template in templates for path in template.paths(indices)))


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherProduct:
    """Products of one kind and name that are not GEMMs. `flops` are those of a step; None if unknown."""

    kind: str
    """In words, in the singular: `convolution`, `Pallas kernel`."""
    name: str
    """The primitive, or the kernel or function that it calls."""
    count: int
    flops: int | None


def site_name(templates: Sequence[PathTemplate], place: str) -> str:
    """The path of the first template; without a path, the place."""
    path = templates[0].path
    if len(templates) > 1:
        # A list of layers that the program stacks: leave out the index of the layer.
        others = [template.path for template in templates]
        path = tuple(
            n if all(other[i : i + 1] == (n,) for other in others) else PathSegment(n.text)
            for i, n in enumerate(path)
        )
    return dotted(path) or f"({place or 'unnamed'})"


def dotted(path: DottedPath) -> str:
    return ".".join(map(str, path))
