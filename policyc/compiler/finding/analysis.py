"""jaxpr -> Sites: finds every GEMM of a loss in one forward pass.

The pass tracks how each variable is laid out from parameters, and whether it has a derivative. A site is a GEMM
together with the calls that lead to it: a GEMM in a function that is jitted once and called for every layer is one site
per call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from policyc.base.garbage import paused_collection
from policyc.compiler.finding.activity import products_with_cotangent
from policyc.compiler.finding.analysis_records import FoundGemm, JaxprContext, find_taken
from policyc.compiler.finding.container_domain import ContainerDomain
from policyc.compiler.finding.dots import (
    GEMMS,
    OPAQUE_PRODUCTS,
    batch_dims,
    gemm_sizes,
    is_floating,
    matrix_sources,
    operand_dtype,
    pick_weight,
    why_opaque,
)
from policyc.compiler.finding.other_products import kind_and_name, product_flops, sum_by_kind
from policyc.compiler.sites.equations import Loss, Origin, SiteEquation
from policyc.compiler.sites.paths import add_stack_sizes
from policyc.compiler.sites.site import OtherProduct
from policyc.compiler.sites.site_list import Sites
from policyc.compiler.sites.trace import FrozenWeight
from policyc.compiler.weights.layer_indices import LayerIndices
from policyc.compiler.weights.propagation import propagate_equation, propagate_opaque
from policyc.compiler.weights.provenance.graph import ParameterSource, Source, parameters_of
from policyc.compiler.weights.provenance.integers import constant_value
from policyc.compiler.weights.references import REFERENCE_PRIMITIVES, References
from policyc.compiler.weights.var_info import (
    MANY_PROJECTIONS,
    UNKNOWN,
    Dependence,
    VarInfo,
    frozen_info,
    join_projections,
)
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.containers import OPAQUE, container_of
from policyc.jaxcore.jaxprs.reading import AnyJaxpr, shape_of
from policyc.jaxcore.jaxprs.transform import Address
from policyc.jaxcore.primitives.define_primitive import job_of
from policyc.jaxcore.primitives.derivatives import is_float
from policyc.jaxcore.primitives.primitive_table import PRIMITIVES
from policyc.language.recipes import Gemm
from policyc.language.selectors import DottedPath, read_segments
from policyc.numerics.products import Weight

_PLAIN = frozenset(n for n, rule in PRIMITIVES.items() if rule.weight not in ("product", "gather"))
"""Primitives that are neither products nor lookups."""


@paused_collection()
def analyze(
    jaxpr: ClosedJaxpr,
    parameters: Sequence[DottedPath | None],
    frozen: Mapping[Var, FrozenWeight] | None = None,
    differentiated: Sequence[bool] | None = None,
) -> Sites:
    """The sites of a loss, without their kinds.

    Args:
      jaxpr: the loss.
      parameters: the path of every input that is differentiated, None for others.
      frozen: the weights that are not differentiated.
      differentiated: which results are differentiated. By default all are.
    """
    results = [True] * len(jaxpr.jaxpr.outvars) if differentiated is None else differentiated
    invars = jaxpr.jaxpr.invars
    shapes = {path: shape_of(v) for v, path in zip(invars, parameters, strict=True) if path is not None}
    shapes |= {path: w.shape for w in (frozen or {}).values() for path in w.paths}
    infos = [
        UNKNOWN
        if path is None
        else VarInfo(
            source=ParameterSource(shape=shape_of(var), path=path),
            is_active=is_float(var.aval),
            depends_on=Dependence.PARAMETERS,
            origin=Origin(number),
        )
        for number, (path, var) in enumerate(zip(parameters, invars, strict=True))
    ]
    weights = {var: frozen_info(var, weight) for var, weight in (frozen or {}).items()}
    with_cotangent, references = products_with_cotangent(jaxpr, results), References()
    while True:
        analyzer = _Analyzer(shapes, with_cotangent, references)
        analyzer.run(jaxpr, infos, JaxprContext(), weights)
        if not references.has_grown:
            break
        references.has_grown = False
    gemms = [gemm for gemm in analyzer.gemms.values() if gemm.add_layers(analyzer.layers)]
    scopes = add_stack_sizes([gemm.scope for gemm in gemms])
    return Sites(
        sites=tuple(gemm.make_site(scope) for gemm, scope in zip(gemms, scopes, strict=True)),
        parameters=tuple(p for p in parameters if p is not None),
        looked_up=frozenset(analyzer.looked_up),
        traced=Loss(jaxpr, {gemm.fields["address"]: gemm.equation for gemm in gemms}),
        others=sum_by_kind(other for other in analyzer.others.values() if other.count),
    )


class _Analyzer:
    """Propagates `VarInfo`s through a jaxpr, and records its GEMMs by address.

    A loop's body is analyzed until the infos of its carry are stable. Each pass replaces the GEMMs of the previous one.
    """

    def __init__(
        self,
        shapes: dict[DottedPath, tuple[int, ...]],
        with_cotangent: Collection[Address],
        references: References,
    ) -> None:
        self._with_cotangent = with_cotangent
        self._references = references
        self.gemms: dict[Address, FoundGemm] = {}
        self.others: dict[Address, OtherProduct] = {}
        self.looked_up: set[DottedPath] = set()
        self.layers = LayerIndices(shapes)
        self._is_quantized: dict[int, bool] = {}
        self._activations: dict[tuple[Address, int], int] = {}

    def run(
        self,
        jaxpr: AnyJaxpr,
        infos: Sequence[VarInfo],
        context: JaxprContext,
        constants: Mapping[Var, VarInfo] | None = None,
    ) -> list[VarInfo]:
        """Returns the infos of the results, given those of the inputs."""
        opened = jaxprs.open_jaxpr(jaxpr)
        known: dict[Var, VarInfo] = dict(zip(opened.invars, infos, strict=True))
        for var, value in zip(opened.constvars, jaxprs.constants(jaxpr), strict=False):
            depends_on = Dependence.DATA if isinstance(value, Tracer) else Dependence.CONSTANTS
            known[var] = VarInfo(integers=constant_value(value, var.aval), depends_on=depends_on)
        known.update(constants or {})

        def info(atom: Any) -> VarInfo:
            if isinstance(atom, Literal):
                value = constant_value(atom.val, atom.aval)
                return VarInfo(integers=value, depends_on=Dependence.PARAMETERS)
            return known.get(atom, UNKNOWN)

        for number, eqn in enumerate(opened.eqns):
            operands = [info(a) if type(a) is Literal else known.get(a, UNKNOWN) for a in eqn.invars]
            name = eqn.primitive.name
            if name in _PLAIN:
                results: Sequence[VarInfo] = propagate_equation(eqn, operands)
            elif name in GEMMS:
                results = self._propagate_gemm(eqn, operands, context, (*context.address, number))
            else:
                here = replace(context, address=(*context.address, number))
                results = self._equation(eqn, operands, here)
            if len(eqn.outvars) == 1:
                (known[eqn.outvars[0]],) = results
            else:
                known.update(zip(eqn.outvars, results, strict=True))
        return [info(a) for a in opened.outvars]

    def _equation(self, eqn: JaxprEqn, infos: list[VarInfo], context: JaxprContext) -> Sequence[VarInfo]:
        name = jaxprs.primitive_name(eqn)
        container = container_of(eqn)
        if container is not None:
            domain = ContainerDomain(eqn, infos, context, self.run, self.layers)
            return container.propagate(eqn, infos, domain.enter, domain)
        self._other_product(eqn, infos, context)
        if name in OPAQUE_PRODUCTS:
            return self._propagate_gemm(eqn, infos, context, context.address)
        elif name in REFERENCE_PRIMITIVES:
            return self._references.propagate(eqn, infos, context.address)
        elif jaxprs.sub_jaxprs(eqn) and name not in PRIMITIVES:
            return self._opaque_container(eqn, infos, context)
        results = propagate_equation(eqn, infos)
        if name == "gather" and infos[0].source is not None:
            (rows,) = results
            if rows.source is None or rows.is_lookup:  # otherwise it takes a layer of a stack
                self.looked_up.update(p.path for p in parameters_of(infos[0].source))
        return results

    def _propagate_gemm(
        self, eqn: JaxprEqn, infos: list[VarInfo], context: JaxprContext, address: Address
    ) -> list[VarInfo]:
        weights = self._gemm(eqn, infos, context, address)
        results = propagate_equation(eqn, infos)
        return [r._replace(projections=frozenset(weights)) for r in results] if weights else results

    def _opaque_container(self, eqn: JaxprEqn, infos: list[VarInfo], context: JaxprContext) -> list[VarInfo]:
        """A container that the compiler does not enter: its sites are opaque."""
        name = jaxprs.primitive_name(eqn)
        is_active = any(i.is_active for i in infos)
        results = propagate_opaque(eqn, infos)
        if self._is_quantized_gemm(eqn):
            return [result._replace(source=None) for result in results]
        reason = context.opaque or OPAQUE.get(name, f"'{name}', which the compiler does not know")
        for number, sub in enumerate(jaxprs.sub_jaxprs(eqn)):
            body = jaxprs.open_jaxpr(sub.jaxpr)
            same_inputs = len(body.invars) == len(infos)
            unknown = [VarInfo(is_active=is_active and is_float(v.aval)) for v in body.invars]
            inputs = infos if same_inputs else unknown
            parameters = context.opaque_parameters if same_inputs else matrix_sources(eqn, infos)
            # How often a kernel runs its products is not known.
            repeats = 0 if name == "pallas_call" else context.repeats
            inside = context.enter(eqn, number, opaque=reason, opaque_parameters=parameters, repeats=repeats)
            body_results = self.run(sub.jaxpr, inputs, inside)
            if len(body_results) != len(results):
                continue
            if name == "custom_jvp_call":
                pairs = zip(results, body_results, strict=True)
                results = [of_body._replace(is_active=result.is_active) for result, of_body in pairs]
            elif name.startswith("custom_vjp"):  # a weight that passes through unchanged is still a weight
                results = [
                    result
                    if b.source is None
                    else result._replace(source=b.source, is_modified=b.is_modified, is_lookup=b.is_lookup)
                    for result, b in zip(results, body_results, strict=True)
                ]
        return results

    def _other_product(self, eqn: JaxprEqn, infos: list[VarInfo], context: JaxprContext) -> None:
        """Records an equation if it is a product that is not a GEMM."""
        described = kind_and_name(eqn)
        if described is None or not context.repeats:
            return
        repeats = find_taken(context.branches, context.loops).repeats(context.repeats)
        flops = product_flops(eqn)
        gradients = sum(i.is_active for i in infos[:2]) if context.address in self._with_cotangent else 0
        self.others[context.address] = OtherProduct(
            kind=described[0],
            name=described[1],
            count=repeats,
            flops=None if flops is None else flops * repeats * (1 + gradients),
        )

    def _is_quantized_gemm(self, eqn: JaxprEqn) -> bool:
        """Whether this is a GEMM that policyc has already quantized."""
        if not jaxprs.primitive_name(eqn).startswith("custom_vjp_call"):
            return False
        (sub,) = jaxprs.sub_jaxprs(eqn)
        key = id(sub.jaxpr)
        if key not in self._is_quantized:
            eqns = jaxprs.equations(sub.jaxpr)
            self._is_quantized[key] = any(job_of(e.primitive) is not None for e in eqns)
        return self._is_quantized[key]

    def _gemm(
        self, eqn: JaxprEqn, infos: list[VarInfo], context: JaxprContext, address: Address
    ) -> tuple[Source, ...]:
        """Records a GEMM. Returns the sources of its weight."""
        lhs, rhs = infos[:2]
        dtypes = [operand_dtype(a) for a in eqn.invars[:2]]
        if not all(map(is_floating, dtypes)):
            self._other_product(eqn, infos, replace(context, address=address))
            return ()
        weight = pick_weight(lhs, rhs)
        if weight is None and context.opaque_parameters:
            weight = "rhs"
        sizes = gemm_sizes(eqn, weight)
        if sizes is None:
            return ()
        batch, m, n, k = sizes
        weight_info = None if weight is None else lhs if weight == "lhs" else rhs
        opaque = context.opaque or why_opaque(eqn, dtypes)
        derivation = None if weight_info is None or opaque else weight_info.origin
        equation = SiteEquation(eqn, context.axis_env, derivation, _is_hoistable(eqn, context))
        origin = equation.origin
        fields = {
            "address": address,
            "weight": weight,
            "is_ragged": jaxprs.primitive_name(eqn).startswith("ragged"),
            "batch": batch,
            "m": m,
            "n": n,
            "k": k,
            "shapes": tuple(shape_of(a) for a in eqn.invars[:2]),
            "types": tuple(map(_dtype_name, (*dtypes, operand_dtype(eqn.outvars[0])))),
            "activation": self._number_activation(eqn, weight, address),
            "batch_dims": batch_dims(eqn, weight),
            "repeats": context.repeats,
            "uncertain_repeats": context.uncertain_repeats,
            "products": self._products(infos, weight, address),
            "opaque": opaque,
            "has_one_hot": (lhs if weight == "rhs" else rhs).is_one_hot,
            "is_reused": context.in_remat or (origin is not None and context.loop_depth > len(origin.scans)),
            "takes_extra_inputs": context.takes_extra_inputs,
        }
        sources: tuple[Source, ...] = ()
        if weight_info is not None:
            sources = context.opaque_parameters if weight_info.source is None else (weight_info.source,)
        self.gemms[address] = FoundGemm(
            equation=equation,
            scope=_read_scope((*context.scope, *jaxprs.name_scopes(eqn))),
            fields=fields,
            loops=context.loops,
            branches=context.branches,
            sources=sources,
            projections=join_projections(infos) if weight is None else frozenset(),
            factors=_factors(infos[:2]) if weight is None else frozenset(),
        )
        self.layers.note_weight(sources, context.loops)
        return sources

    def _number_activation(self, eqn: JaxprEqn, weight: Weight, address: Address) -> int:
        """Equal for GEMMs of one jaxpr that multiply the same variable with their weights."""
        variable = eqn.invars[0 if weight != "lhs" else 1]
        return self._activations.setdefault((address[:-1], id(variable)), len(self._activations))

    def _products(self, infos: list[VarInfo], weight: Weight, address: Address) -> frozenset[Gemm]:
        """fprop, plus a backward product for each operand with a derivative if the result gets a cotangent."""
        lhs, rhs = (info.is_active and address in self._with_cotangent for info in infos[:2])
        return _products_with(lhs, rhs) if weight != "lhs" else _products_with(rhs, lhs)


@cache  # hashing enums is slow
def _products_with(dgrad: bool, wgrad: bool) -> frozenset[Gemm]:
    backward = {Gemm.DGRAD: dgrad, Gemm.WGRAD: wgrad}
    return frozenset({Gemm.FPROP, *(gemm for gemm, exists in backward.items() if exists)})


@lru_cache(maxsize=8)  # the sites of a scope are consecutive
def _read_scope(scopes: tuple[str, ...]) -> DottedPath:
    return read_segments(scopes)


_dtype_name = cache(str)  # NumPy's own is slow


def _factors(infos: Sequence[VarInfo]) -> frozenset[Source]:
    """The weights of an operand that is a product of weights; empty unless exactly one operand is."""
    products = [i for i in infos if i.depends_on is Dependence.WEIGHT_PRODUCTS]
    return products[0].projections - MANY_PROJECTIONS if len(products) == 1 else frozenset()


def _is_hoistable(eqn: JaxprEqn, context: JaxprContext) -> bool:
    """Whether the weight of a GEMM can be quantized outside the loss."""
    is_plain_dot = jaxprs.primitive_name(eqn) == "dot_general" and jaxprs.explicit_sharding(eqn) is None
    return is_plain_dot and context.takes_extra_inputs
