"""Records of the analysis: the containers around a jaxpr, and GEMMs whose layers are not known yet."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from jax.extend.core import JaxprEqn

from policyc.compiler.sites.equations import SiteEquation
from policyc.compiler.sites.site import PathTemplate, Site, site_name
from policyc.compiler.sites.stacks import Stack
from policyc.compiler.weights.layer_indices import (
    MAX_LAYERS,
    EnclosingLoop,
    LayerIndices,
    drop_divisions,
    template_stacks,
    weight_stacks,
)
from policyc.compiler.weights.provenance.elements import iterations_of
from policyc.compiler.weights.provenance.graph import Source
from policyc.compiler.weights.provenance.integers import Integers, Iterations, known_integers
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.reading import AxisEnv
from policyc.jaxcore.jaxprs.transform import Address
from policyc.jaxcore.primitives.regions import Unknown
from policyc.language.selectors import DottedPath

_DEPENDS_ON_VALUES = "which branch is taken depends on values"


@dataclass(frozen=True, slots=True)
class Branch:
    """The branch `number` of a `cond`. `index` is the branch that each iteration takes, None if that is not known."""

    index: Integers | None
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenIterations:
    """The iterations of loops in which all branches around an equation are taken.

    Attributes:
      loops: the addresses of the loops that decide which branches are taken.
      iterations: the iterations of these loops that take all branches. An unknown branch counts as always taken.
      count: the number of all their iterations, including those that take other branches.
      unknown: why some branch is not known; empty if all are.
    """

    loops: frozenset[Address] = frozenset()
    iterations: Sequence[Iterations] = ({},)
    count: int = 1
    unknown: str = ""

    def repeats(self, repeats: int) -> int:
        """How often an equation runs, given how often it would run if its branches were always taken."""
        return repeats * len(self.iterations) // self.count


@lru_cache(maxsize=8)  # the sites of a branch are consecutive
def find_taken(branches: tuple[Branch, ...], loops: tuple[EnclosingLoop, ...]) -> TakenIterations:
    """The iterations of the enclosing `loops` that take all of `branches`."""
    known = [(i, branch.number) for branch in branches if (i := known_integers(branch.index)) is not None]
    addresses = frozenset[Address]().union(*(index.loops for index, _ in known))
    sizes = [(s.address, s.size) for s in (loop.stack for loop in loops) if s.address in addresses]
    count = math.prod(size for _, size in sizes)
    if count > MAX_LAYERS:
        return TakenIterations(unknown=f"{count} iterations are too many to follow")
    try:
        taken = [
            iterations
            for iterations in iterations_of(sizes)
            if all(int(index.evaluate(iterations)) == number for index, number in known)
        ]
    except Unknown as reason:
        return TakenIterations(unknown=str(reason))
    reasons = [b.index.unknown if b.index is not None else _DEPENDS_ON_VALUES for b in branches]
    return TakenIterations(
        loops=addresses, iterations=taken, count=count, unknown=next(filter(None, reasons), "")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JaxprContext:
    """The containers around a jaxpr, and what they imply for the sites in it."""

    address: Address = ()
    scope: tuple[str, ...] = ()
    loops: tuple[EnclosingLoop, ...] = ()
    """The scans around it, outermost first."""
    branches: tuple[Branch, ...] = ()
    repeats: int = 1
    uncertain_repeats: str = ""
    """As in `Site`, disregarding branches."""
    opaque: str = ""
    opaque_parameters: tuple[Source, ...] = ()
    """The parameters that an opaque container reads, if it is not known which of its GEMMs reads them."""
    axis_env: AxisEnv = AxisEnv()
    loop_depth: int = 0
    in_remat: bool = False
    takes_extra_inputs: bool = True

    def enter(self, eqn: JaxprEqn, number: int, **changes: Any) -> JaxprContext:
        """The context of the jaxpr with this number inside an equation, whose address must be `self.address`."""
        scope = (*self.scope, *jaxprs.name_scopes(eqn))
        return replace(self, address=(*self.address, number), scope=scope, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGemm:
    """A GEMM that becomes a site once the whole loss is analyzed: its layers are known then.

    Attributes:
      equation: its equation.
      scope: its name scope, without stack sizes.
      fields: the fields of the site that do not depend on its layers.
      loops: the scans around it, outermost first.
      branches: the branches that it is in.
      sources: how its weight is laid out from parameters.
      projections: for a product of activations: the weights of the products that its operands come from.
      factors: the weights of an operand that is a product of weights (`h @ (a @ b)`). A subset of `projections`.
    """

    equation: SiteEquation
    scope: DottedPath
    fields: dict[str, Any]
    loops: tuple[EnclosingLoop, ...]
    branches: tuple[Branch, ...]
    sources: tuple[Source, ...]
    projections: frozenset[Source]
    factors: frozenset[Source]

    def add_layers(self, layers: LayerIndices) -> bool:
        """Adds the fields that depend on its layers. Returns whether it runs: not in a branch that is never taken."""
        loops = tuple(loop for loop in self.loops if layers.is_layered(loop))
        stacks = weight_stacks(self.sources, self.loops)
        parameters = layers.weight_templates(self.sources, self.fields["batch_dims"], stacks)
        modules: tuple[PathTemplate, ...] = ()
        if parameters:
            stacks = drop_divisions(stacks, parameters)
            scope = layers.scope_template(self.scope, loops, stacks)
        else:
            scope = layers.scope_template(self.scope, loops, None)
            modules = layers.module_templates(self.projections, self.factors, self.loops)
            stacks = template_stacks((scope, *modules))
        self.fields.update(
            scope=scope,
            parameters=parameters,
            stacks=stacks,
            modules=modules,
            loops=tuple(loop.stack for loop in loops),
        )
        if self.branches:
            self._take_branches(find_taken(self.branches, self.loops), stacks)
        return all(stack.size for stack in stacks) and self.fields.get("running") != frozenset()

    def _take_branches(self, taken: TakenIterations, stacks: Sequence[Stack]) -> None:
        """Leaves out the layers and repeats in which other branches are known to be taken."""
        if taken.unknown and not self.fields["uncertain_repeats"]:
            reason = f"in a branch, counted as always taken: {taken.unknown}"
            self.fields["uncertain_repeats"] = reason
        if len(taken.iterations) == taken.count:
            return
        shared = [(number, s.address) for number, s in enumerate(stacks) if s.address in taken.loops]
        members = {tuple(iterations[address] for _, address in shared) for iterations in taken.iterations}
        self.fields["running"] = frozenset(
            layer
            for layer in itertools.product(*(range(s.size) for s in stacks))
            if tuple(layer[number] for number, _ in shared) in members
        )
        self.fields["repeats"] = taken.repeats(self.fields["repeats"])

    def make_site(self, scope: DottedPath) -> Site:
        """The site. `scope` is its scope with stack sizes."""
        fields = self.fields
        if fields["scope"].path != scope:
            fields["scope"] = replace(fields["scope"], path=scope)
        place = jaxprs.source_place(self.equation.eqn)
        name = site_name(fields["parameters"] or (fields["scope"],), place)
        return Site(name=name, place=place, **fields)
