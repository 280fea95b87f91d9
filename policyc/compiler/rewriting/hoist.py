"""Hoists weight quantization and rounding keys out of the loss: each becomes an extra input, computed once per step.

Each layer of a stack is quantized as a tensor of its own. Layers with different recipes become separate inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import itemgetter
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import AbstractValue
from jax.extend.core import ClosedJaxpr, JaxprEqn

from policyc.compiler.planning.plan import Decision
from policyc.compiler.rewriting.rounding import NO_SEED, RandomSource
from policyc.compiler.sites.equations import Origin, SiteEquation
from policyc.compiler.sites.site import Site
from policyc.jaxcore.hooks import autodiff
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.containers import IterationRange
from policyc.jaxcore.jaxprs.transform import Address, ExtraInput, Replacement
from policyc.numerics.gemm import GemmOptions, Prequantized, prequantize, takes_stack, weight_maxima


@dataclass(frozen=True, eq=False)
class Quantizer:
    """Quantizes an operand of a site: a jaxpr from the operand to arrays, and the treedef of their `Prequantized`.

    Attributes:
      siblings: the sites whose weights share the outer scale of this weight, as distances between the numbers of their
        equations and of this site's. The jaxpr takes the largest magnitude of all of them too.
      maxima: a jaxpr from the weight to its own largest magnitude, if it has siblings.
    """

    jaxpr: ClosedJaxpr
    tree: Any
    siblings: tuple[int, ...] = ()
    maxima: ClosedJaxpr | None = None

    @property
    def avals(self) -> tuple[AbstractValue, ...]:
        """The types of the arrays. Empty if nothing can be quantized in advance."""
        return tuple(v.aval for v in self.jaxpr.jaxpr.outvars)

    @property
    def structural_key(self) -> tuple[Any, ...]:
        """Equal for equivalent quantizers."""
        eqns = self.jaxpr.jaxpr.eqns
        return (self.tree, *((e.primitive, *sorted(e.params.items(), key=itemgetter(0))) for e in eqns))

    @property
    def takes_stack(self) -> bool:
        """Whether its backends quantize all layers of a stack at once."""
        return all(takes_stack(**e.params) for e in self.jaxpr.jaxpr.eqns if "backend" in e.params)

    def rebuild(self, arrays: Sequence[Any]) -> Prequantized:
        prequantized: Prequantized = jax.tree.unflatten(self.tree, list(arrays))
        return prequantized


def make_quantizer(
    site: Site,
    equation: SiteEquation,
    decision: Decision,
    operand: Literal["lhs", "rhs"],
    siblings: tuple[int, ...] = (),
) -> Quantizer:
    """A quantizer that does what the site would do with this operand. See `Quantizer` for `siblings`."""
    eqn = equation.eqn
    avals: list[Any] = [a.aval for a in eqn.invars[:2]]
    operand_aval, other = avals if operand == "lhs" else avals[::-1]
    trees: list[Any] = []
    product = (
        jax.ShapeDtypeStruct(other.shape, other.dtype),
        eqn.params["dimension_numbers"],
        decision.applied_recipe,
        GemmOptions(
            weight=site.weight,
            products=site.products,
            backends=decision.backends,
            site=site.id,
        ),
    )

    def run(array: Any, shared_maximum: Any = None) -> list[Any]:
        # The codes of an activation have no derivative; the activation itself has one.
        array = array if operand == site.weight else lax.stop_gradient(array)
        prequantized = prequantize(array, *product, operand=operand, shared_maximum=shared_maximum)
        leaves, tree = jax.tree.flatten(prequantized)
        trees.append(tree)
        return leaves

    def trace(function: Callable[..., Any], *operands: AbstractValue) -> ClosedJaxpr:
        return jaxprs.trace_at(function, operands, eqn, equation.axis_env)

    if not siblings:
        return Quantizer(trace(run, operand_aval), trees[-1])
    maxima = trace(lambda array: [weight_maxima(array, *product)], operand_aval)
    return Quantizer(trace(run, operand_aval, *maxima.out_avals), trees[-1], siblings, maxima)


class RoundingKey:
    """Marks an extra input that holds the key for a layer's stochastic rounding: two uint32."""


ROUNDING_KEY = RoundingKey()


@dataclass(frozen=True, slots=True, kw_only=True)
class RewrittenLoss:
    """A loss with the inputs of the original, followed by those that `extra_inputs` computes.

    Attributes:
      hoisted: the additional inputs.
      sites: the sites that take them, by address, with their equations.
      replacements: the replacement of each equation of the original; empty if nothing changed.
      source: the source of rounding keys.
    """

    jaxpr: ClosedJaxpr
    hoisted: tuple[ExtraInput, ...] = ()
    sites: dict[Address, tuple[Site, SiteEquation]] = field(default_factory=dict)
    replacements: tuple[Replacement, ...] = ()
    source: RandomSource = NO_SEED

    def extra_inputs(self, inputs: Sequence[Any]) -> list[Any]:
        """The extra inputs for these inputs of the loss.

        A weight is quantized in the trace of its parameter, and so outside any loop in which the parameter is constant.
        """
        quantized: dict[Any, list[Any]] = {}
        maxima: dict[Any, Any] = {}
        weights = {(h.address, h.ranges): h for h in self.hoisted if h.content is not ROUNDING_KEY}
        arrays: list[Any] = []
        with_keys = [h for h in self.hoisted if h.content is ROUNDING_KEY]
        keys = iter(self.source.layer_keys([(self.sites[h.address][0], h.ranges) for h in with_keys]))
        for hoisted in self.hoisted:
            if hoisted.content is ROUNDING_KEY:
                # As JAX arrays: for its backward pass, a scan would save the slices of other constants a second time.
                arrays += map(jnp.asarray, next(keys))
                continue
            quantizer = hoisted.content
            *_, number = hoisted.address
            group = [(*hoisted.address[:-1], number + distance) for distance in (0, *quantizer.siblings)]
            members = [weights[address, hoisted.ranges] for address in group]
            identity = tuple(self._identity(member) for member in members)
            if identity not in quantized:
                values = [autodiff.primal_value(inputs[self._origin(m).input]) for m in members]
                with autodiff.trace_of(*values):
                    # In a jitted loss that is differentiated from outside, no derivative traces them.
                    values = list(map(lax.stop_gradient, values))
                    shared: list[Any] = []
                    if quantizer.siblings:
                        of_group = frozenset(identity)
                        if of_group not in maxima:
                            each = map(self._maxima, members, values)
                            maxima[of_group] = reduce(jnp.maximum, each)
                        shared = [maxima[of_group]]
                    run = _Derivation(quantizer.jaxpr, takes_stack=quantizer.takes_stack)
                    quantized[identity] = self._derive(run, hoisted, values[0], *shared)
            arrays += quantized[identity]
        return arrays

    def _origin(self, hoisted: ExtraInput) -> Origin:
        origin = self.sites[hoisted.address][1].origin
        assert origin is not None
        return origin

    def _identity(self, hoisted: ExtraInput) -> tuple[Any, ...]:
        """Equal for inputs that are the same arrays."""
        origin = self._origin(hoisted)
        return (origin.input, *map(id, origin.steps), hoisted.ranges, hoisted.content)

    def _maxima(self, hoisted: ExtraInput, value: Any) -> Any:
        (maxima,) = self._derive(_Derivation(hoisted.content.maxima, takes_stack=True), hoisted, value)
        return maxima

    def _derive(self, run: _Derivation, hoisted: ExtraInput, *values: Any) -> list[Any]:
        with jaxprs.source_context(self.sites[hoisted.address][1].eqn):
            return run(values, self._origin(hoisted).steps, hoisted.ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Derivation:
    """Derives the operand of a site's equation from an input of the loss, and applies a jaxpr to it.

    `takes_stack` says whether to apply the jaxpr to all layers of a stack at once.
    """

    jaxpr: ClosedJaxpr = field(kw_only=False)
    takes_stack: bool

    def __call__(
        self, values: Sequence[Any], steps: Sequence[JaxprEqn | Address], ranges: Sequence[IterationRange]
    ) -> list[Any]:
        """The operand is derived from the first value by `steps`. The others are operands of the jaxpr already.

        A step that is the address of a scan slices the values. The jaxpr is applied to each layer in the scan's range.
        """
        if not steps:
            return jaxprs.evaluate(self.jaxpr, *values)
        (value, *others), step, remaining = values, steps[0], steps[1:]
        if not isinstance(step, tuple):
            return self([*jaxprs.bind_at(step, value), *others], remaining, ranges)
        layers, inner = ranges[0], ranges[1:]
        if (layers.start, layers.stop) != (0, value.shape[0]):
            value = lax.slice_in_dim(value, layers.start, layers.stop)

        def run_layer(layer: Sequence[Any]) -> list[Any]:
            return self(layer, remaining, inner)

        if self.takes_stack and not inner:
            return jax.vmap(run_layer)([value, *others])
        arrays: list[Any] = lax.map(run_layer, [value, *others])
        return arrays
