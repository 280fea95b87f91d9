"""Hoists weight quantization and rounding keys out of the loss: each becomes an extra input, computed once per step.

Each layer of a stack is quantized as a tensor of its own. Layers with different recipes become separate inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import AbstractValue
from jax.extend.core import ClosedJaxpr, JaxprEqn

from policyc.compiler.planning.plan import Decision
from policyc.compiler.rewriting.rounding import NO_SEED, RandomSource
from policyc.compiler.sites.equations import SiteEquation
from policyc.compiler.sites.site import Site
from policyc.jaxcore.hooks import autodiff
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.containers import IterationRange
from policyc.jaxcore.jaxprs.transform import Address, ExtraInput, Replacement
from policyc.numerics.gemm import GemmOptions, Prequantized, prequantize, takes_stack


@dataclass(frozen=True, eq=False)
class Quantizer:
    """Quantizes an operand of a site: a jaxpr from the operand to arrays, and the treedef of their `Prequantized`."""

    jaxpr: ClosedJaxpr
    tree: Any

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
    site: Site, equation: SiteEquation, decision: Decision, operand: Literal["lhs", "rhs"]
) -> Quantizer:
    """A quantizer that does what the site would do with this operand."""
    eqn = equation.eqn
    avals: list[Any] = [a.aval for a in eqn.invars[:2]]
    operand_aval, other = avals if operand == "lhs" else avals[::-1]
    trees: list[Any] = []

    def run(array: Any) -> list[Any]:
        prequantized = prequantize(
            # The codes of an activation have no derivative; the activation itself has one.
            array if operand == site.weight else lax.stop_gradient(array),
            jax.ShapeDtypeStruct(other.shape, other.dtype),
            eqn.params["dimension_numbers"],
            decision.applied_recipe,
            GemmOptions(
                weight=site.weight,
                products=site.products,
                backends=decision.backends,
                site=site.id,
            ),
            operand=operand,
        )
        leaves, tree = jax.tree.flatten(prequantized)
        trees.append(tree)
        return leaves

    jaxpr = jaxprs.trace_at(run, [operand_aval], eqn, equation.axis_env)
    return Quantizer(jaxpr, trees[-1])


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
        arrays: list[Any] = []
        with_keys = [h for h in self.hoisted if h.content is ROUNDING_KEY]
        keys = iter(self.source.layer_keys([(self.sites[h.address][0], h.ranges) for h in with_keys]))
        for hoisted in self.hoisted:
            _, equation = self.sites[hoisted.address]
            if hoisted.content is ROUNDING_KEY:
                # As JAX arrays: for its backward pass, a scan would save the slices of other constants a second time.
                arrays += map(jnp.asarray, next(keys))
                continue
            origin = equation.origin
            assert origin is not None
            identity = (origin.input, *map(id, origin.steps), hoisted.ranges, hoisted.content)
            if identity not in quantized:
                value = autodiff.primal_value(inputs[origin.input])
                with autodiff.trace_of(value):
                    quantized[identity] = _quantize(
                        value, equation.eqn, hoisted.content, origin.steps, hoisted.ranges
                    )
            arrays += quantized[identity]
        return arrays


def _quantize(
    value: Any,
    eqn: JaxprEqn,
    quantizer: Quantizer,
    steps: Sequence[JaxprEqn | Address],
    ranges: Sequence[IterationRange],
) -> list[Any]:
    """Derives the operand of a site's equation from an input of the loss by `steps`, and quantizes it.

    A step that is the address of a scan slices the value. Each layer in the scan's range is quantized by itself.
    """
    if not steps:
        with jaxprs.source_context(eqn):
            return jaxprs.evaluate(quantizer.jaxpr, value)
    step, remaining = steps[0], steps[1:]
    if not isinstance(step, tuple):
        (derived,) = jaxprs.bind_at(step, value)
        return _quantize(derived, eqn, quantizer, remaining, ranges)
    layers, inner = ranges[0], ranges[1:]
    if (layers.start, layers.stop) != (0, value.shape[0]):
        value = lax.slice_in_dim(value, layers.start, layers.stop)

    def quantize_layer(layer: Any) -> list[Any]:
        return _quantize(layer, eqn, quantizer, remaining, inner)

    if quantizer.takes_stack and not inner:
        return jax.vmap(quantize_layer)(value)
    arrays: list[Any] = lax.map(quantize_layer, value)
    return arrays
