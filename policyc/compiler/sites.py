"""Sites: the forward GEMMs of a loss, each with its names, shapes, roles and products.

In: what the analysis of a jaxpr finds. Out: `Site`s and the paths that selectors see. The one trap: a GEMM in a
scan over stacked parameters is one site and many layers; its paths have an index only once a layer is chosen.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from policyc.jaxcore import jaxprs
from policyc.language.predicates import SiteAttributes
from policyc.language.recipes import Gemm
from policyc.language.selectors import DottedPath, PathSegment

Address = tuple[int, ...]
"""Where an equation is: its number in the jaxpr, then the number of a body in it, then one in that body, ..."""

Layer = tuple[int, ...]
"""An index in each of the stacks around a site, the outermost first."""

Weight = Literal["lhs", "rhs"] | None


@dataclass(frozen=True, slots=True)
class Stack:
    """A scan over stacked parameters: the layers are one body. Or a shard_map over them: one program on `devices`."""

    address: Address
    size: int
    reverse: bool = False
    devices: bool = False


@dataclass(frozen=True, slots=True)
class IndexSlot:
    """An index that belongs at one of some places in a path: that of a stack, or a known one.

    With `shards`, every device has `each` members of the stack: the index counts those of the devices before.
    """

    places: tuple[int, ...]
    size: int
    stack: Address | None = None
    index: int = 0
    shards: Address | None = None
    each: int = 0

    def at(self, indices: Mapping[Address, int]) -> int:
        index = self.index if self.stack is None else indices[self.stack]
        return index if self.shards is None else indices[self.shards] * self.each + index


@dataclass(frozen=True, slots=True)
class PathTemplate:
    """A path whose stack indices are still open. `shards` says that a shard_map divides its first dimension."""

    path: DottedPath
    marks: tuple[IndexSlot, ...] = ()
    shards: Stack | None = None

    def marked(self, mark: IndexSlot) -> PathTemplate:
        return PathTemplate(self.path, (*self.marks, mark))

    def at(self, indices: Mapping[Address, int]) -> Iterator[DottedPath]:
        """The path of a layer, in each way that its indices can be written.

        Two stacks under one name count as one: index 1 of 4 times index 2 of 8 is index 10 of 32.
        """
        for places in itertools.product(*(m.places or (None,) for m in self.marks)):
            if any(b is not None and a is not None and b < a for a, b in itertools.pairwise(places)):
                continue
            names = list(self.path)
            for place, mark in zip(places, self.marks, strict=True):
                if place is None:
                    continue
                before = names[place]
                outer, size = (before.index or 0, before.size or 1) if before.index is not None else (0, 1)
                names[place] = PathSegment(
                    before.text, outer * mark.size + mark.at(indices), size * mark.size
                )
            yield tuple(names)


@dataclass(frozen=True, slots=True)
class Origin:
    """How an operand is made of one input of the loss: by equations, and by scans (their addresses) that slice it."""

    input: int
    steps: tuple[Any, ...] = ()

    def then(self, step: Any) -> Origin:
        return Origin(self.input, (*self.steps, step))

    @property
    def scans(self) -> tuple[Address, ...]:
        return tuple(s for s in self.steps if isinstance(s, tuple))


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One forward GEMM, as `y = x W`: m rows of x, n columns of W, k contracted, `batch` of them."""

    address: Address
    scope: PathTemplate
    parameters: tuple[PathTemplate, ...]
    stacks: tuple[Stack, ...]
    weight: Weight
    kind: Literal["dot", "ragged"]
    batch: int
    m: int
    n: int
    k: int
    repeats: int
    products: frozenset[Gemm]
    opaque: str = ""
    one_hot: bool = False
    around: jaxprs.AxisEnv = jaxprs.AxisEnv()
    origin: Origin | None = field(default=None, compare=False, repr=False)
    """Of its weight, where that can be followed."""
    again: bool = False
    """Is the same weight seen more than once: in a remat, or by the turns of a loop?"""
    reached: bool = True
    """Can something from outside be handed to it?"""
    eqn: Any = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """The parameter's path, else the scope."""
        path = self.parameters[0].path if self.parameters else self.scope.path
        return dotted(path) or f"({self.place or 'unnamed'})"

    @property
    def number(self) -> int:
        """For its random bits, and its name in a compiled program. Layers share it: what they share stays shared."""
        path = self.parameters[0].path if self.parameters else self.scope.path
        return zlib.crc32(".".join(n.text for n in path).encode())

    @property
    def indexed(self) -> bool:
        """Is it one of several layers, scanned or unrolled?"""
        label = self.parameters[0] if self.parameters else self.scope
        return bool(self.stacks) or any(n.index is not None for n in label.path)

    def ordinals(self) -> list[int]:
        """For random bits too: what tells each layer from all others that have its number.

        It comes from the indices in the path, so that a stack has the same ones scanned and unrolled.
        """
        label = self.parameters[0] if self.parameters else self.scope
        found = []
        for layer in self.layers():
            path = next(label.at({s.address: i for s, i in zip(self.stacks, layer, strict=True)}))
            ordinal = 0
            for name in (n for n in path if n.index is not None):
                ordinal = ordinal * (name.size or 1) + (name.index or 0)
            found.append(ordinal)
        return found if len(set(found)) == len(found) else list(range(len(found)))

    @property
    def place(self) -> str:
        return jaxprs.place(self.eqn)

    @property
    def count(self) -> int:
        """How many GEMMs of the model this is: one for each layer."""
        return math.prod(s.size for s in self.stacks)

    @property
    def flops(self) -> int:
        """Of one product of one layer, once."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def total_flops(self) -> int:
        """Of all its products in a step."""
        return self.flops * self.repeats * len(self.products)

    @property
    def attributes(self) -> SiteAttributes:
        """What a `where` can ask."""
        return {
            "m": self.m,
            "n": self.n,
            "k": self.k,
            "batch": self.batch,
            "flops": self.flops,
            "weight": self.weight is not None,
        }

    def layers(self) -> Iterator[Layer]:
        return itertools.product(*(range(s.size) for s in self.stacks))

    def paths(self, layer: Layer) -> tuple[DottedPath, ...]:
        """Every path by which a selector may name a layer of this site."""
        indices = {s.address: i for s, i in zip(self.stacks, layer, strict=True)}
        labels = (self.scope, *self.parameters)
        return tuple(dict.fromkeys(path for label in labels for path in label.at(indices)))


@dataclass(frozen=True, kw_only=True)
class Sites:
    """All GEMMs of a loss, in the order in which they run."""

    sites: tuple[Site, ...]
    parameters: tuple[DottedPath, ...]
    jaxpr: Any = field(compare=False, repr=False)
    looked_up: frozenset[DottedPath] = frozenset()
    """The parameters from which rows are gathered: embeddings."""

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    @cached_property
    def hash(self) -> str:
        """Of the loss itself: equal for equal computations, whatever their variables are called."""
        return jaxprs.fingerprint(self.jaxpr)


def dotted(path: DottedPath) -> str:
    return ".".join(map(str, path))
