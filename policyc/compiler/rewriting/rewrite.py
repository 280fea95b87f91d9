"""jaxpr + Plan -> jaxpr: replaces sites by quantized GEMMs, and touches no other equation.

The result has the inputs of the original, followed by the extra inputs of `hoist`. If several sites of one jaxpr
quantize an activation in the same way, it is quantized once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import jax
import numpy as np
from jax.core import AbstractValue
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var
from jax.extend.core.primitives import dot_general_p

from policyc.base.garbage import paused_collection
from policyc.compiler.planning.plan import Decision, Decisions
from policyc.compiler.rewriting.hoist import (
    ROUNDING_KEY,
    Quantizer,
    RewrittenLoss,
    make_quantizer,
)
from policyc.compiler.rewriting.rounding import NO_SEED, RandomSource
from policyc.compiler.sites.equations import SiteEquation
from policyc.compiler.sites.site import Site
from policyc.compiler.sites.site_list import Sites
from policyc.compiler.sites.stacks import Layer
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.containers import container_of
from policyc.jaxcore.jaxprs.transform import Address, BoundInput, ExtraInput, Position, Replacement, Transform
from policyc.jaxcore.primitives.define_primitive import job_of
from policyc.language.recipes import Recipe
from policyc.numerics.gemm import Backends, GemmOptions, Precomputed, Prequantized, quantized_dot_general
from policyc.numerics.quantize import Key
from policyc.numerics.ragged import quantized_ragged_dot


@paused_collection()
def rewrite(
    sites: Sites,
    decisions: Decisions,
    constant_inputs: Collection[int] = (),
    source: RandomSource = NO_SEED,
) -> RewrittenLoss:
    """Rewrites the loss so that every site runs as decided.

    `constant_inputs` are the inputs that stay the same from call to call. Rounding keys are derived from `source`.
    """
    shared = {address for (address, _), d in decisions.items() if d.shared_scale is not None}
    origins = ((site, sites.equation(site).origin) for site in sites)
    hoisted = {
        s.address
        for s, o in origins
        if o and (s.is_reused or o.input in constant_inputs or s.address in shared)
    }
    rewriter = SiteRewriter(sites, decisions, hoisted, source)
    result = rewriter.transform(sites.jaxpr)
    return RewrittenLoss(
        jaxpr=result.jaxpr,
        hoisted=result.inputs,
        sites={i.address: (rewriter.sites[i.address], rewriter.equations[i.address]) for i in result.inputs},
        replacements=result.replacements,
        source=source,
    )


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _QuantizedDotsAreDots:
    """A policy of `jax.checkpoint` that treats a quantized GEMM as the `dot_general` that it replaces.

    Policies such as `dots_saveable` would otherwise recompute it. JAX holds a weak reference to the policy.
    """

    policy: Callable[..., Any]

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        if job_of(primitive) != "gemm":
            return self.policy(primitive, *avals, **params)
        dims, out = params["dimension_numbers"], params["out"]
        return self.policy(
            dot_general_p, *avals, dimension_numbers=dims, precision=None, preferred_element_type=out
        )


@dataclass(slots=True)
class SharedActivation:
    """An activation that several sites of a jaxpr quantize in the same way. The first site defines `variables`."""

    quantizer: Quantizer
    readers: list[Address] = field(default_factory=list)
    variables: tuple[Var, ...] = ()


@dataclass(frozen=True, slots=True)
class SiteInputs:
    """Extra inputs of a quantized GEMM, in the order in which they follow the operands of its equation.

    `constant_key` is the rounding key of a GEMM that takes no key as input.
    """

    weight: Quantizer | None = None
    has_rounding_key: bool = False
    activation: Quantizer | None = None
    constant_key: Key | None = None


@dataclass(frozen=True, slots=True)
class SiteTemplate:
    """The equations that replace a site, and the content and types of its extra inputs."""

    jaxpr: ClosedJaxpr
    extra: tuple[tuple[Any, tuple[AbstractValue, ...]], ...]


class SiteRewriter(Transform):
    """Replaces the sites of a loss as decided. The weights of the `hoisted` sites are quantized outside the loss."""

    def __init__(
        self,
        sites: Sites,
        decisions: Decisions,
        hoisted: Collection[Address] = (),
        source: RandomSource = NO_SEED,
    ) -> None:
        self._decisions = {key: d for key, d in decisions.items() if d.recipe is not None}
        different = {id(d): d for d in self._decisions.values()}  # many layers share a decision
        numbers = {number: _number(d.applied_recipe, d.backends) for number, d in different.items()}
        self._numbers = {key: numbers[id(d)] for key, d in self._decisions.items()}
        """Equal for decisions with the same effect, whatever rules decided."""
        self._source = source
        self._hoisted = hoisted
        self._all_sites = sites
        self.sites: dict[Address, Site] = {
            s.address: s
            for s in sites
            if not s.opaque and any((s.address, layer) in self._decisions for layer in s.layers())
        }
        self.equations: Mapping[Address, SiteEquation] = sites.loss.equations
        self._sites_under: dict[Address, list[Site]] = {}
        for address, site in self.sites.items():
            for end in range(len(address) + 1):
                self._sites_under.setdefault(address[:end], []).append(site)
        self._templates: dict[Hashable, SiteTemplate] = {}
        self._activation_quantizers: dict[Hashable, Quantizer] = {}

    def decision(self, address: Address, layer: Layer) -> Decision | None:
        """The decision of a layer of a site; None if it is kept."""
        return self._decisions.get((address, layer))

    def _decision_at(self, site: Site, position: Position) -> Decision | None:
        """The decision of a site at a position that fixes the iterations of all its stacks; None if it is kept."""
        return self.decision(site.address, tuple(position.iterations[s.address] for s in site.stacks))

    # ---- methods of Transform

    def key(self, position: Position) -> Hashable | None:
        """Cache key for rewriting the subtree at a position; None if it is unchanged.

        The equations there are not part of it. The keys of single sites add theirs (`_template_key`).
        """
        sites = self._sites_under.get(position.address)
        if sites is None:
            return None
        depth = len(position.address)

        def below(addresses: Iterable[Address]) -> Hashable:
            return tuple(a[depth:] for a in addresses if len(a) > depth)

        equations = [self.equations[site.address] for site in sites]
        numbers = [self._open_decisions(site, position) for site in sites]
        if not any(number is not None for by_layer in numbers for number in by_layer):
            return None
        parts = tuple(
            (
                site.address[depth:],
                site.weight,
                equation.axis_env,
                site.id,
                site.products,
                site.takes_extra_inputs,
                below(s.address for s in site.stacks),
                below(s.address for s in site.loops) if self._takes_rounding_key(site) else None,
                below(equation.origin.scans) if equation.origin and site.address in self._hoisted else None,
                by_layer,
            )
            for site, equation, by_layer in zip(sites, equations, numbers, strict=True)
        )
        return self._source.seed, parts

    def _template_key(self, site: Site, position: Position) -> Hashable:
        """Equal for sites that become the same equations."""
        eqn = self.equations[site.address].eqn
        params = sorted(
            (k, v if isinstance(v, tuple | int | np.dtype | type(None)) else repr(v))
            for k, v in eqn.params.items()
        )
        return self.key(position), tuple(a.aval for a in eqn.invars), tuple(params), eqn.ctx

    def _open_decisions(self, site: Site, position: Position) -> tuple[int | None, ...]:
        """The numbers of the decisions of those layers of a site that a position leaves open; None where it is kept."""
        ranges = [
            (position.iterations[s.address],) if s.address in position.iterations else range(s.size)
            for s in site.stacks
        ]
        layers = itertools.product(*ranges)
        return tuple(self._numbers.get((site.address, layer)) for layer in layers)

    def _takes_rounding_key(self, site: Site) -> bool:
        """Whether a site takes its rounding key as an extra input, because the key depends on the layer or the step."""
        return site.takes_extra_inputs and (site.is_layered or self._source.run_step is not None)

    def is_stack(self, address: Address) -> bool:
        return any(s.address == address for site in self._sites_under[address] for s in site.stacks)

    def slices(self, scan: Address, extra: ExtraInput) -> bool:
        site = self.sites[extra.address]
        if extra.content is ROUNDING_KEY:
            return any(s.address == scan for s in site.loops)
        origin = self.equations[extra.address].origin
        return origin is not None and scan in origin.scans

    def change_container(self, eqn: JaxprEqn) -> JaxprEqn:
        container = container_of(eqn)
        if container is None or not container.is_remat or eqn.params.get("policy") is None:
            return eqn
        return jaxprs.replace_eqn(
            eqn, params={**eqn.params, "policy": _QuantizedDotsAreDots(eqn.params["policy"])}
        )

    def replace_equation(
        self, eqn: JaxprEqn, position: Position, shared: SharedActivation | None
    ) -> Replacement | None:
        site = self.sites.get(position.address)
        if site is None:
            return None
        decision = self._decision_at(site, position)
        if decision is None:
            return None
        template = self._template(site, decision, position, shared)
        inputs = tuple(
            BoundInput.new(ExtraInput(site.address, content, avals)) for content, avals in template.extra
        )
        eqns: list[JaxprEqn] = []
        readers: tuple[int, ...] = ()
        operands = [*eqn.invars, *(v for i in inputs for v in i.variables)]
        if shared is not None:
            quantizer = shared.quantizer
            if not shared.variables:  # this is the first site that reads it
                shared.variables = tuple(jaxprs.new_var(a) for a in quantizer.avals)
                activation = eqn.invars[1 if site.weight == "lhs" else 0]
                eqns = jaxprs.inline(quantizer.jaxpr, [activation], eqn, shared.variables)
                readers = tuple(address[-1] for address in shared.readers)
            operands += shared.variables
        new = jaxprs.inline(template.jaxpr, operands, eqn)
        return Replacement((*eqns, *new), inputs, added=len(eqns), readers=readers)

    # ---- sites

    def _template(
        self, site: Site, decision: Decision, position: Position, shared: SharedActivation | None
    ) -> SiteTemplate:
        siblings = self._siblings(site, position)
        key = (self._template_key(site, position), shared is not None, siblings)
        template = self._templates.get(key)
        if template is None:
            hoisted = site.address in self._hoisted
            weight = (
                make_quantizer(site, self.equations[site.address], decision, site.weight, siblings)
                if hoisted and site.weight
                else None
            )
            is_random = any(t.is_random for t in decision.applied_recipe.treatments)
            inputs = SiteInputs(
                weight=weight if weight is not None and weight.avals else None,
                has_rounding_key=is_random and self._takes_rounding_key(site),
                activation=None if shared is None else shared.quantizer,
                constant_key=self._source.site_key(site),
            )
            template = self._templates[key] = self.make_template(site, decision, inputs)
        return template

    def _siblings(self, site: Site, position: Position) -> tuple[int, ...]:
        """The sites that share the outer scale of this site's weight, see `Quantizer`."""
        own = self._decision_at(site, position)
        if own is None or own.shared_scale is None or site.weight is None:
            return ()
        others = [
            (s, self._decision_at(s, position))
            for s in self._all_sites.siblings[site.address]
            if s is not site
        ]
        return tuple(
            other.address[-1] - site.address[-1]
            for other, decision in others
            if decision is not None and decision.shared_scale == own.shared_scale
        )

    def make_template(self, site: Site, decision: Decision, inputs: SiteInputs) -> SiteTemplate:
        eqn, axis_env = self.equations[site.address].eqn, self.equations[site.address].axis_env
        extra: list[tuple[Any, tuple[AbstractValue, ...]]] = []
        if inputs.weight is not None:
            extra.append((inputs.weight, inputs.weight.avals))
        if inputs.has_rounding_key:
            extra.append((ROUNDING_KEY, (jaxprs.array_aval((), "uint32", eqn, axis_env),) * 2))
        shared_avals = () if inputs.activation is None else inputs.activation.avals
        avals = [*(a.aval for a in eqn.invars), *(a for _, group in extra for a in group), *shared_avals]
        gemm = quantized_gemm(site, eqn, decision, inputs)
        return SiteTemplate(jaxprs.trace_at(gemm, avals, eqn, axis_env), tuple(extra))

    def share(self, position: Position) -> Mapping[Address, SharedActivation]:
        """The activations that several sites of a jaxpr quantize in the same way, by the addresses of these sites."""
        groups: dict[Hashable, SharedActivation] = {}
        for activation, positions in self._positions_by_activation(position).items():
            for here in positions if len(positions) > 1 else ():
                quantizer = self._activation_quantizer(here)
                if quantizer.avals:
                    key = (activation, quantizer.structural_key)
                    group = groups.setdefault(key, SharedActivation(quantizer))
                    group.readers.append(here.address)
        return {a: group for group in groups.values() if len(group.readers) > 1 for a in group.readers}

    def _positions_by_activation(self, position: Position) -> dict[Hashable, list[Position]]:
        """The positions of the quantized sites directly inside a jaxpr, grouped by the activation they read."""
        readers: dict[Hashable, list[Position]] = {}
        depth = len(position.address)
        for site in self._sites_under.get(position.address, ()):
            if len(site.address) != depth + 1:
                continue
            activation = _activation(site, self.equations[site.address].eqn)
            if activation is None:
                continue
            here = position.enter(site.address[-1])
            if self._decision_at(site, here) is not None:
                readers.setdefault(self._all_sites.loss.placed(activation), []).append(here)
        return readers

    def _activation_quantizer(self, position: Position) -> Quantizer:
        site = self.sites[position.address]
        decision = self._decision_at(site, position)
        assert decision is not None, "a site that is kept quantizes nothing"
        key = self._template_key(site, position)
        quantizer = self._activation_quantizers.get(key)
        if quantizer is None:
            operand: Literal["lhs", "rhs"] = "rhs" if site.weight == "lhs" else "lhs"
            quantizer = self._activation_quantizers[key] = make_quantizer(
                site, self.equations[site.address], decision, operand
            )
        return quantizer


_numbers = itertools.count()


@cache
def _number(recipe: Recipe, backends: Backends) -> int:
    """A number for each recipe and backends. Hashing a recipe is slow, and would be done for each layer."""
    del recipe, backends
    return next(_numbers)


def _activation(site: Site, eqn: JaxprEqn) -> Var | None:
    """The variable that a site multiplies with its weight; None without a weight, and for ragged sites and literals."""
    if site.is_ragged or site.weight is None:
        return None
    operand = eqn.invars[1 if site.weight == "lhs" else 0]
    return operand if isinstance(operand, Var) else None


def quantized_gemm(site: Site, eqn: JaxprEqn, decision: Decision, inputs: SiteInputs) -> Callable[..., Any]:
    """The function that replaces a site. Takes the operands of its equation, then the arrays of `inputs`."""
    if site.is_ragged:
        assert inputs.weight is None
        return _quantized_ragged_gemm(site, eqn, decision, inputs)
    params = eqn.params

    def gemm(lhs: Any, rhs: Any, *extra: Any) -> Any:
        arrays = iter(extra)  # in the order of `SiteInputs`
        weight = _rebuild(inputs.weight, arrays)
        key = Key(next(arrays), next(arrays)) if inputs.has_rounding_key else inputs.constant_key
        activation = _rebuild(inputs.activation, arrays)
        return quantized_dot_general(
            lhs,
            rhs,
            params["dimension_numbers"],
            decision.applied_recipe,
            GemmOptions(
                weight=site.weight,
                backends=decision.backends,
                site=site.id,
                precision=params["precision"],
                preferred_element_type=params["preferred_element_type"],
            ),
            Precomputed(
                lhs=weight if site.weight == "lhs" else activation,
                rhs=activation if site.weight == "lhs" else weight,
                rounding_key=key,
            ),
        )

    sharding = jaxprs.explicit_sharding(eqn)
    return gemm if sharding is None else jax.sharding.auto_axes(gemm, out_sharding=sharding)


def _rebuild(quantizer: Quantizer | None, arrays: Iterator[Any]) -> Prequantized:
    """Builds a quantized operand from the next arrays. It is empty if there is no quantizer."""
    if quantizer is None:
        return Prequantized()
    return quantizer.rebuild([next(arrays) for _ in quantizer.avals])


def _quantized_ragged_gemm(
    site: Site, eqn: JaxprEqn, decision: Decision, inputs: SiteInputs
) -> Callable[..., Any]:
    params = eqn.params

    def gemm(lhs: Any, rhs: Any, group_sizes: Any, *key_words: Any) -> Any:
        return quantized_ragged_dot(
            lhs,
            rhs,
            group_sizes,
            decision.applied_recipe,
            GemmOptions(
                backends=decision.backends,
                site=site.id,
                precision=params["precision"],
                preferred_element_type=params["preferred_element_type"],
            ),
            Key(*key_words) if inputs.has_rounding_key else inputs.constant_key,
        )

    return gemm
