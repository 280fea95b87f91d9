"""What sites are handed from outside: weights that are quantized once and not wherever they are used, and the keys
of random bits, which tell the layers of a scan apart.

In: sites, and what is decided about each. Out: what each of them wants handed to it, and a function from the inputs of
the loss to that. The one trap: of a stack, layers that are treated differently are quantized apart, one layer at a
time: a layer is a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Literal

import jax
import numpy as np
from jax import lax

from policyc.compiler.sites import Address, Site
from policyc.jaxcore import autodiff, jaxprs
from policyc.jaxcore.jaxprs import Aval
from policyc.language.recipes import Recipe
from policyc.numerics.gemm import Backends, GemmOptions, Prequantized, prequantize
from policyc.numerics.quantize import key

SiteRecipe = tuple[Recipe, Backends]
"""What is done to a layer of a site."""


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Consecutive layers of a stack that are treated alike."""

    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Quantizer:
    """What makes a quantized operand of that of a site: a jaxpr, and how its results belong together."""

    closed: Any
    tree: Any

    @property
    def avals(self) -> list[Aval]:
        return [v.aval for v in self.closed.jaxpr.outvars]

    @property
    def does(self) -> tuple[Any, ...]:
        """The same where the same is done."""
        eqns = self.closed.jaxpr.eqns
        return (self.tree, *((e.primitive, *sorted(e.params.items(), key=itemgetter(0))) for e in eqns))

    def ready(self, arrays: Sequence[Any]) -> Prequantized:
        found: Prequantized = jax.tree.unflatten(self.tree, list(arrays))
        return found


def quantizer(site: Site, done: SiteRecipe, operand: Literal["lhs", "rhs"]) -> Quantizer:
    """Has no results where there is nothing to be done beforehand."""
    recipe, backends = done
    eqn = site.eqn
    own, other = (a.aval for a in eqn.invars[:2][:: 1 if operand == "lhs" else -1])
    box: list[Any] = []

    def run(array: Any) -> list[Any]:
        ready = prequantize(
            # Its codes have no derivative; what they are of has one.
            array if operand == site.weight else lax.stop_gradient(array),
            jax.ShapeDtypeStruct(other.shape, other.dtype),  # type: ignore[no-untyped-call]
            eqn.params["dimension_numbers"],
            recipe,
            GemmOptions(weight=site.weight, products=site.products, backends=backends, site=site.number),
            operand=operand,
        )
        leaves, tree = jax.tree.flatten(ready)
        box.append(tree)
        return leaves

    closed = jaxprs.traced(run, [own], eqn, site.around)
    return Quantizer(closed, box[-1])


@dataclass(frozen=True, slots=True)
class HoistedInput:
    """What a site takes beside its operands, seen from some jaxpr around it: a weight, or else the key of its layer.

    `site` is its address from there, `runs` the layers of each scan on the way that slices it, `avals` the types of
    the arrays there.
    """

    site: Address
    quantizer: Quantizer | None
    avals: tuple[Aval, ...]
    runs: tuple[LayerRange, ...] = ()

    def below(self, address: Address) -> HoistedInput:
        return replace(self, site=(*address, *self.site))

    def above(self, address: Address) -> HoistedInput:
        return replace(self, site=self.site[len(address) :])

    def sliced(self, run: LayerRange) -> HoistedInput:
        """As it is outside of a scan that slices it."""
        avals = tuple(jaxprs.stacked_aval(run.stop - run.start, a) for a in self.avals)
        return replace(self, avals=avals, runs=(run, *self.runs))


@dataclass(frozen=True)
class Rewritten:
    """A loss whose inputs are those of the original, and behind them what `beforehand` makes of these."""

    closed: Any
    wants: tuple[HoistedInput, ...] = ()
    sites: dict[Address, Site] = field(default_factory=dict)

    def beforehand(self, inputs: Sequence[Any]) -> list[Any]:
        """The quantized weights, each made where its parameter was: so outside of a loop that it does not change in."""
        made: dict[Any, list[Any]] = {}
        found: list[Any] = []
        for want in self.wants:
            origin = self.sites[want.site].origin
            if want.quantizer is None:
                found += keys(self.sites[want.site], want.runs)
                continue
            assert origin is not None
            key = (origin.input, *map(id, origin.steps), want.runs, want.quantizer)
            if key not in made:
                value = autodiff.without_derivative(inputs[origin.input])
                with autodiff.where_it_was_made(value):
                    made[key] = self._made(value, want.site, want.quantizer, origin.steps, want.runs)
            found += made[key]
        return found

    def _made(
        self,
        value: Any,
        site: Address,
        quantizer: Quantizer,
        steps: Sequence[Any],
        runs: Sequence[LayerRange],
    ) -> list[Any]:
        for at, step in enumerate(steps):
            if not isinstance(step, tuple):
                (value,) = jaxprs.bind_at(step, value)
                continue
            run, rest = runs[0], runs[1:]
            if (run.start, run.stop) != (0, value.shape[0]):
                value = lax.slice_in_dim(value, run.start, run.stop)

            def layer(
                _: None, each: Any, at: int = at, rest: Sequence[LayerRange] = rest
            ) -> tuple[None, list[Any]]:
                return None, self._made(each, site, quantizer, steps[at + 1 :], rest)

            return lax.scan(layer, None, value)[1]
        with jaxprs.at(self.sites[site].eqn):
            return jaxprs.evaluate(quantizer.closed, value)


def keys(site: Site, runs: Sequence[LayerRange]) -> list[np.ndarray]:
    """The two words of the key of every layer in these runs of its stacks."""
    made = [key(0, site.number, ordinal) for ordinal in site.ordinals()]
    sizes = tuple(s.size for s in site.stacks)
    part = tuple(slice(run.start, run.stop) for run in runs)
    return [
        np.array(words, np.uint32).reshape(sizes)[part]
        for words in ([k.a for k in made], [k.b for k in made])
    ]
