"""jaxpr -> Sites: finds every GEMM of a loss in one forward pass.

The pass knows, for each variable, how it is laid out from parameters and whether a gradient flows through it. A site
is a GEMM together with the calls that lead to it: a function that is jitted once and called for every layer has a site
for each call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue, Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from policyc.compiler import provenance
from policyc.compiler.layers import LayerIndices, LoopLayers
from policyc.compiler.paths import DATA_NAMES, add_stack_sizes
from policyc.compiler.provenance import (
    ConcatenatedSource,
    EitherSource,
    Integers,
    IterationSource,
    LayoutSource,
    ParameterSource,
    ShardSource,
    Source,
    StackedSource,
)
from policyc.compiler.sites import Origin, Site, Sites, Stack, Weight
from policyc.jaxcore import jaxprs
from policyc.jaxcore.containers import OPAQUE, CarryChange, container_of, shard_map_parts
from policyc.jaxcore.jaxprs import AnyJaxpr, AxisEnv
from policyc.jaxcore.transform import Address
from policyc.language.recipes import Gemm
from policyc.language.selectors import DottedPath, read_segments


@dataclass(frozen=True, slots=True)
class VarInfo:
    """What is known of a variable."""

    source: Source | None = None
    """How it is laid out from parameters."""
    is_modified: bool = False
    """Is it a parameter plus or times something else: a merged adapter, a mask, a normalized weight?"""
    active: bool = False
    """Does a gradient flow through it?"""
    integers: Integers | None = None
    """Its value, if it is an integer that is known in each iteration."""
    one_hot: bool = False
    is_iota: bool = False
    origin: Origin | None = None
    """How to compute it from one input of the loss, where that costs no more outside than here."""


_UNKNOWN = VarInfo()


@dataclass(frozen=True, slots=True, kw_only=True)
class JaxprContext:
    """The containers around a jaxpr, and what follows from them for the sites in it."""

    address: Address = ()
    scope: tuple[str, ...] = ()
    loops: tuple[LoopLayers, ...] = ()
    """The scans around it, the outermost first."""
    repeats: int = 1
    opaque: str = ""
    opaque_parameters: tuple[Source, ...] = ()
    """The parameters that an opaque container reads, where it is not known which of its GEMMs reads them."""
    axis_env: AxisEnv = AxisEnv()
    loop_depth: int = 0
    in_remat: bool = False
    takes_extra_inputs: bool = True

    def enter(self, eqn: JaxprEqn, number: int, **changes: Any) -> JaxprContext:
        """The context of a jaxpr inside an equation. `self.address` must be that of the equation."""
        scope = (*self.scope, *jaxprs.name_scopes(eqn))
        return replace(self, address=(*self.address, number), scope=scope, **changes)


LAYOUT = frozenset({
    "convert_element_type", "reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "rev", "copy",
    "copy_p", "slice", "dynamic_slice", "split", "unstack", "sharding_constraint", "mesh_cast", "reshard", "all_gather",
    "all_gather_invariant", "all_gather_reduced", "pvary", "pcast", "pbroadcast", "preduced", "optimization_barrier",
    "name", "reduce_precision", "device_put", "stop_gradient", "layout_constraint", "vary_unreduced_cast", "to_edtype",
    "pad", "neg", "auto_axes", "explicit_axes", "real", "with_memory_space_constraint", "annotate",
})  # fmt: skip
"""Primitives that leave a parameter a parameter: they change its order, type or place."""

_HOISTABLE = frozenset({
    "convert_element_type", "reshape", "transpose", "squeeze", "expand_dims", "slice", "rev", "copy", "copy_p", "pvary",
    "pcast", "name", "reduce_precision", "neg", "stop_gradient",
})  # fmt: skip
"""Primitives that can run outside the loss: they read only the parameter, and do not make it larger."""

_MODIFYING = frozenset({"add", "sub", "mul", "div"})
"""Primitives after which a parameter is still a weight: an adapter is added, a mask or a norm is multiplied."""
_GEMMS = frozenset({"dot_general", "ragged_dot_general", "ragged_dot"})
_QUANTIZED = ("_quantize", "scaled_gemm", "scaled_ragged_gemm")
"""How the names of our own primitives end."""
_MOST_CONSTANTS = 1 << 16  # elements of a constant array of indices

OTHER_PRODUCTS = {
    "scaled_dot": "jax.lax.scaled_dot, which quantizes by itself",
    "scaled_matmul": "jax.nn.scaled_matmul, which quantizes by itself",
    "scaled_matmul_wrapper": "jax.nn.scaled_matmul, which quantizes by itself",
}
"""Matrix products that the compiler does not rewrite, in words. Their sites are opaque."""


def analyze(
    jaxpr: ClosedJaxpr,
    parameters: Sequence[DottedPath | None],
    frozen: Mapping[Var, DottedPath] | None = None,
) -> Sites:
    """The sites of a loss.

    Args:
      jaxpr: the loss.
      parameters: the path of every input that is differentiated, None for others.
      frozen: the paths of weights that are not differentiated.
    """
    invars = jaxpr.jaxpr.invars
    shapes = {path: _shape(v) for v, path in zip(invars, parameters, strict=True) if path is not None}
    analyzer = _Analyzer(shapes | {path: _shape(v) for v, path in (frozen or {}).items()})
    infos = [
        _UNKNOWN
        if path is None
        else VarInfo(
            ParameterSource(shape=_shape(var), path=path), active=_is_float(var.aval), origin=Origin(number)
        )
        for number, (path, var) in enumerate(zip(parameters, invars, strict=True))
    ]
    weights = {
        var: VarInfo(ParameterSource(shape=_shape(var), path=path, is_frozen=True))
        for var, path in (frozen or {}).items()
    }
    analyzer.run(jaxpr, infos, JaxprContext(), weights)
    sites = [found.site(analyzer.layers) for found in analyzer.sites.values()]
    scopes = add_stack_sizes([s.scope.path for s in sites])
    return Sites(
        sites=tuple(
            replace(s, scope=replace(s.scope, path=path)) for s, path in zip(sites, scopes, strict=True)
        ),
        parameters=tuple(p for p in parameters if p is not None),
        jaxpr=jaxpr,
        looked_up=frozenset(analyzer.looked_up),
    )


def _is_float(aval: AbstractValue) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FoundGemm:
    """A GEMM that was found. Its layers are known once the whole loss is analyzed."""

    fields: dict[str, Any]
    scope: DottedPath
    context: JaxprContext
    sources: tuple[Source, ...] = ()
    batch_dims: tuple[int, ...] = ()

    def site(self, layers: LayerIndices) -> Site:
        loops = tuple(loop for loop in self.context.loops if layers.is_layered(loop))
        parameters = layers.weight_templates(self.sources, self.batch_dims, self.context.loops)
        weight_stacks = layers.stacks(self.sources, self.context.loops)
        scope = layers.scope_template(self.scope, loops, weight_stacks if parameters else None)
        stacks = weight_stacks if parameters else layers.scope_stacks(scope)
        return Site(
            **self.fields,
            address=self.context.address,
            scope=scope,
            parameters=parameters,
            stacks=stacks,
            loops=tuple(loop.stack for loop in loops),
            repeats=self.context.repeats,
            axis_env=self.context.axis_env,
            takes_extra_inputs=self.context.takes_extra_inputs,
        )


class _Analyzer:
    """Propagates `VarInfo`s through a jaxpr, and records its GEMMs by address.

    A loop's body is analyzed until the infos of its carry are stable. Each time replaces the GEMMs of the time before.
    """

    def __init__(self, shapes: dict[DottedPath, tuple[int, ...]]) -> None:
        self.sites: dict[Address, _FoundGemm] = {}
        self.looked_up: set[DottedPath] = set()
        self.layers = LayerIndices(shapes)
        self._is_quantized: dict[int, bool] = {}

    def run(
        self,
        jaxpr: AnyJaxpr,
        infos: Sequence[VarInfo],
        context: JaxprContext,
        constants: Mapping[Var, VarInfo] | None = None,
    ) -> list[VarInfo]:
        """The infos of the results, from those of the inputs."""
        opened = jaxprs.open_jaxpr(jaxpr)
        known: dict[Var, VarInfo] = dict(zip(opened.invars, infos, strict=True))
        for var, value in zip(opened.constvars, jaxprs.constants(jaxpr), strict=False):
            known[var] = VarInfo(integers=_constant(value))
        known.update(constants or {})

        def info(atom: Any) -> VarInfo:
            if isinstance(atom, Literal):
                return VarInfo(integers=_constant(atom.val))
            return known.get(atom, _UNKNOWN)

        for number, eqn in enumerate(opened.eqns):
            here = replace(context, address=(*context.address, number))
            results = self._equation(eqn, [info(a) for a in eqn.invars], here)
            known.update((v, r) for v, r in zip(eqn.outvars, results, strict=True) if r is not _UNKNOWN)
        return [info(a) for a in opened.outvars]

    def _equation(self, eqn: JaxprEqn, infos: list[VarInfo], context: JaxprContext) -> Sequence[VarInfo]:
        name = jaxprs.primitive_name(eqn)
        container = container_of(eqn)
        if container is not None:
            domain = _ContainerDomain(self, eqn, context)
            return container.propagate(eqn, infos, domain.enter, domain)
        if name in _GEMMS or name in OTHER_PRODUCTS:
            self._gemm(eqn, infos, context)
        elif jaxprs.sub_jaxprs(eqn):
            return self._opaque_container(eqn, infos, context)
        elif name == "gather" and infos[0].source is not None:
            self.looked_up.update(p.path for p in provenance.parameters_of(infos[0].source))
        return _propagate(eqn, name, infos)

    def _opaque_container(self, eqn: JaxprEqn, infos: list[VarInfo], context: JaxprContext) -> list[VarInfo]:
        """A container that the compiler does not enter: its sites are opaque."""
        name = jaxprs.primitive_name(eqn)
        active = any(i.active for i in infos)
        results = [VarInfo(active=active and _is_float(v.aval)) for v in eqn.outvars]
        if self._is_quantized_gemm(eqn):
            return results
        reason = context.opaque or OPAQUE.get(name, f"'{name}', which the compiler does not know")
        for number, sub in enumerate(jaxprs.sub_jaxprs(eqn)):
            body = jaxprs.open_jaxpr(sub.jaxpr)
            same_inputs = len(body.invars) == len(infos)
            inputs = infos if same_inputs else [VarInfo(active=active)] * len(body.invars)
            parameters = context.opaque_parameters if same_inputs else _matrix_sources(eqn, infos)
            inside = context.enter(eqn, number, opaque=reason, opaque_parameters=parameters)
            body_results = self.run(sub.jaxpr, inputs, inside)
            if len(body_results) != len(results):
                continue
            if name == "custom_jvp_call":
                results = body_results
            elif name.startswith("custom_vjp"):  # a weight that passes through unchanged is still a weight
                results = [
                    replace(result, source=b.source, is_modified=b.is_modified)
                    for result, b in zip(results, body_results, strict=True)
                ]
        return results

    def _is_quantized_gemm(self, eqn: JaxprEqn) -> bool:
        """Is this a GEMM that was quantized before?"""
        if not jaxprs.primitive_name(eqn).startswith("custom_vjp_call"):
            return False
        (sub,) = jaxprs.sub_jaxprs(eqn)
        key = id(sub.jaxpr)
        if key not in self._is_quantized:
            names = (jaxprs.primitive_name(e) for e in jaxprs.equations(sub.jaxpr))
            self._is_quantized[key] = any(n.endswith(_QUANTIZED) for n in names)
        return self._is_quantized[key]

    def _gemm(self, eqn: JaxprEqn, infos: list[VarInfo], context: JaxprContext) -> None:
        lhs, rhs = infos[:2]
        name = jaxprs.primitive_name(eqn)
        dtypes = [_dtype(a) for a in eqn.invars[:2]]
        if not all(jnp.issubdtype(d, jnp.floating) for d in dtypes):
            return
        weight = _pick_weight(lhs, rhs)
        if weight is None and context.opaque_parameters:
            weight = "rhs"
        operand = lhs if weight == "lhs" else rhs
        sizes = _gemm_sizes(eqn, weight)
        if sizes is None:
            return
        batch, m, n, k = sizes
        for_lhs, for_rhs = (Gemm.WGRAD, Gemm.DGRAD) if weight == "lhs" else (Gemm.DGRAD, Gemm.WGRAD)
        products = {Gemm.FPROP, *([for_lhs] if lhs.active else ()), *([for_rhs] if rhs.active else ())}
        opaque = context.opaque or _why_opaque(eqn, dtypes)
        origin = None if weight is None or opaque or not context.takes_extra_inputs else operand.origin
        if name != "dot_general" or jaxprs.explicit_sharding(eqn) is not None:
            origin = None
        fields = {
            "weight": weight,
            "kind": "ragged" if name.startswith("ragged") else "dot",
            "batch": batch,
            "m": m,
            "n": n,
            "k": k,
            "products": frozenset(products),
            "opaque": opaque,
            "one_hot": (lhs if weight == "rhs" else rhs).one_hot,
            "origin": origin,
            "is_reused": context.in_remat or (origin is not None and context.loop_depth > len(origin.scans)),
            "eqn": eqn,
        }
        sources: tuple[Source, ...] = () if weight is None else context.opaque_parameters
        if weight is not None and operand.source is not None:
            sources = (operand.source,)
        self.sites[context.address] = _FoundGemm(
            fields=fields,
            scope=read_segments((*context.scope, *jaxprs.name_scopes(eqn))),
            context=context,
            sources=sources,
            batch_dims=_batch_dims(eqn, weight),
        )
        self.layers.note_sources(sources, context.loops)


class _ContainerDomain:
    """How `VarInfo`s pass through one container. See `containers.Domain`."""

    def __init__(self, analyzer: _Analyzer, eqn: JaxprEqn, context: JaxprContext) -> None:
        self._analyzer, self._eqn = analyzer, eqn
        container = container_of(eqn)
        assert container is not None
        extra = container.takes_extra_inputs and not (container.is_loop and jaxprs.has_indexed_effects(eqn))
        length = eqn.params.get("length") if container.is_loop else None
        loops = context.loops
        if length is not None:
            depth = len(context.scope) + len(jaxprs.name_scopes(eqn))
            loops = (*loops, LoopLayers(Stack(context.address, length), depth))
        self._context = replace(
            context,
            takes_extra_inputs=context.takes_extra_inputs and extra,
            in_remat=context.in_remat or container.is_remat,
            loop_depth=context.loop_depth + container.is_loop,
            repeats=context.repeats * (length or 1),
            loops=loops,
        )
        if jaxprs.primitive_name(eqn) == "shard_map":
            self._context = replace(self._context, axis_env=context.axis_env.enter_shard_map(eqn))
        self._bodies = [sub.jaxpr for sub in jaxprs.sub_jaxprs(eqn)]

    def enter(self, number: int, infos: Sequence[VarInfo]) -> list[VarInfo]:
        return self._analyzer.run(self._bodies[number], infos, self._context.enter(self._eqn, number))

    def join(self, values: Sequence[VarInfo]) -> VarInfo:
        """A weight only where all branches give one; active where any branch is."""
        sources = [v.source for v in values if v.source is not None]
        source: Source | None = None
        if len(sources) == len(values):
            same = all(s is sources[0] for s in sources)
            source = sources[0] if same else EitherSource(shape=sources[0].shape, operands=tuple(sources))
        modified = any(v.is_modified for v in values)
        return VarInfo(source, is_modified=modified, active=any(v.active for v in values))

    def enter_loop(self, value: VarInfo, change: CarryChange) -> VarInfo:
        if change.invariant:
            return value
        integers = None
        if change.increment is not None and value.integers is not None and "length" in self._eqn.params:
            length, reverse = self._eqn.params["length"], bool(self._eqn.params["reverse"])
            integers = provenance.loop_counter(
                value.integers, change.increment, self._context.address, length, reverse
            )
        return VarInfo(active=value.active, integers=integers)

    def may_change(self, carry: Sequence[VarInfo], others: Sequence[VarInfo]) -> bool:
        return not all(c.active for c in carry) and any(v.active for v in (*carry, *others))

    def widen(self, carry: VarInfo, result: VarInfo) -> VarInfo:
        return replace(carry, active=carry.active or result.active)

    def leave_loop(self, result: VarInfo, carry: VarInfo | None) -> VarInfo:
        return VarInfo(active=result.active or (carry is not None and carry.active))

    def slice_inputs(self, eqn: JaxprEqn, values: Sequence[VarInfo]) -> list[VarInfo]:
        del eqn
        address = self._context.address
        infos = []
        for value in values:
            source, origin, integers = None, None, None
            if value.source is not None:
                source = IterationSource(shape=value.source.shape[1:], operand=value.source, loop=address)
                origin = None if value.origin is None else value.origin.then(address)
            if value.integers is not None:
                integers = provenance.loop_slice(value.integers, address)
            infos.append(replace(value, source=source, origin=origin, integers=integers))
        sources = tuple(i.source for i in infos if i.source is not None)
        self._analyzer.layers.note_stacked_inputs(sources, self._context.loops)
        return infos

    def split_over_devices(self, eqn: JaxprEqn, values: Sequence[VarInfo]) -> list[VarInfo]:
        """Each device has a shard of every operand."""
        infos = []
        invars = jaxprs.open_jaxpr(self._bodies[0]).invars
        for value, var, parts in zip(values, invars, shard_map_parts(eqn), strict=True):
            source = value.source
            if source is not None and math.prod(parts) > 1:
                source = ShardSource(
                    shape=_shape(var), operand=source, shard_map=self._context.address, parts=parts
                )
            infos.append(replace(value, source=source, integers=None))
        return infos


def _constant(value: Any) -> Integers | None:
    """The value of a constant, if it is integers that are known now."""
    if isinstance(value, Tracer) or (not hasattr(value, "dtype") and not isinstance(value, int | np.ndarray)):
        return None
    dtype = getattr(value, "dtype", np.dtype(int))
    if not isinstance(dtype, np.dtype) or dtype.kind not in "iub" or np.size(value) > _MOST_CONSTANTS:
        return None
    return provenance.constant_integers(value)


def _dtype(atom: Any) -> Any:
    return atom.aval.dtype


def _pick_weight(lhs: VarInfo, rhs: VarInfo) -> Weight:
    """Which operand is the weight. Where both come from differentiated arguments, data is not the weight."""
    if lhs.source is None or rhs.source is None:
        return "rhs" if rhs.source is not None else "lhs" if lhs.source is not None else None

    def unlikely(info: VarInfo) -> tuple[bool, ...]:
        assert info.source is not None
        parameters = list(provenance.parameters_of(info.source))
        named_as_data = all(p.path and p.path[0].text.casefold() in DATA_NAMES for p in parameters)
        return info.is_modified, all(p.is_frozen for p in parameters), named_as_data

    return "lhs" if unlikely(lhs) < unlikely(rhs) else "rhs"


def _why_opaque(eqn: JaxprEqn, dtypes: Sequence[Any]) -> str:
    """Why the compiler cannot change a GEMM, by its own form; empty if it can."""
    name = jaxprs.primitive_name(eqn)
    if name in OTHER_PRODUCTS:
        return OTHER_PRODUCTS[name]
    if any(d == jnp.float64 for d in dtypes):
        return "a computation in float64, for which there is no recipe"
    if not _is_plain_ragged(eqn):
        return "a ragged product of a form that has no quantized counterpart"
    return ""


def _matrix_sources(eqn: JaxprEqn, infos: list[VarInfo]) -> tuple[Source, ...]:
    """The parameters among the operands of a container that are not vectors."""
    pairs = zip(eqn.invars, infos, strict=True)
    return tuple(i.source for a, i in pairs if len(_shape(a)) > 1 and i.source is not None)


def _is_plain_ragged(eqn: JaxprEqn) -> bool:
    """Is it no ragged product, or the common one: rows in groups, and a matrix for each group?"""
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    if numbers is None:
        return True
    dims = tuple(tuple(map(tuple, pair)) for pair in numbers.dot_dimension_numbers)
    groups = (tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions))
    offset = eqn.params.get("group_offset")
    return dims == (((1,), (1,)), ((), ())) and groups == ((0,), (0,)) and offset is None


def _dimension_numbers(eqn: JaxprEqn) -> Any:
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    numbers = ragged.dot_dimension_numbers if ragged else eqn.params.get("dimension_numbers")
    # jax.nn.scaled_matmul has no dimension numbers: it multiplies (batch, m, k) by (batch, n, k).
    return (((2,), (2,)), ((0,), (0,))) if numbers is None else numbers


def _batch_dims(eqn: JaxprEqn, weight: Weight) -> tuple[int, ...]:
    """The dimensions of the weight along which one product reads several matrices."""
    _, (lhs, rhs) = _dimension_numbers(eqn)
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    groups = tuple(ragged.rhs_group_dimensions) if ragged and weight != "lhs" else ()
    return (*map(int, lhs if weight == "lhs" else rhs), *groups)


def _gemm_sizes(eqn: JaxprEqn, weight: Weight) -> tuple[int, int, int, int] | None:
    """(batch, m, n, k) as in `y = x W`; None if it contracts nothing."""
    lhs, rhs = (_shape(a) for a in eqn.invars[:2])
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    (lc, rc), (lb, rb) = _dimension_numbers(eqn)
    groups = set(ragged.rhs_group_dimensions) if ragged else set()
    k, batch = math.prod(lhs[i] for i in lc), math.prod(lhs[i] for i in lb)
    left = math.prod(d for i, d in enumerate(lhs) if i not in {*lc, *lb})
    right = math.prod(d for i, d in enumerate(rhs) if i not in {*rc, *rb, *groups})
    if not lc or k <= 1 or not (batch and left and right):
        return None
    return (batch, right, left, k) if weight == "lhs" else (batch, left, right, k)


# ---- infos through plain equations


def _propagate(eqn: JaxprEqn, name: str, infos: list[VarInfo]) -> list[VarInfo]:
    active = name != "stop_gradient" and any(i.active for i in infos)
    first = infos[0] if infos else _UNKNOWN
    sources = _propagate_source(eqn, name, infos)
    integers = provenance.propagate_integers(eqn, [i.integers for i in infos])
    is_iota = name == "iota" or (name in LAYOUT and first.is_iota)
    one_hot = (name == "eq" and any(i.is_iota for i in infos)) or (name in LAYOUT and first.one_hot)
    if not (active or any(sources) or integers or is_iota or one_hot):
        return [_UNKNOWN] * len(eqn.outvars)
    if name == "optimization_barrier":
        return infos
    hoistable = name in _HOISTABLE and len(infos) == 1
    return [
        VarInfo(
            source,
            is_modified=source is not None and (name in _MODIFYING or any(i.is_modified for i in infos)),
            active=active and _is_float(v.aval),
            integers=integers,
            one_hot=one_hot,
            is_iota=is_iota,
            origin=first.origin.then(eqn) if hoistable and first.origin is not None else None,
        )
        for v, source in zip(eqn.outvars, sources, strict=True)
    ]


def _propagate_source(eqn: JaxprEqn, name: str, infos: list[VarInfo]) -> list[Source | None]:
    """How the results of an equation are laid out from parameters."""
    nothing: list[Source | None] = [None] * len(eqn.outvars)
    if not any(i.source is not None for i in infos):
        return nothing
    first = infos[0].source
    if name in LAYOUT or (name == "gather" and _gathers_matrices(eqn)):
        if first is None:
            return nothing
        integers = tuple(i.integers for i in infos[1:])
        return [
            LayoutSource(shape=_shape(v), eqn=eqn, output=number, operand=first, integers=integers)
            for number, v in enumerate(eqn.outvars)
        ]
    if name in ("concatenate", "stack") and all(i.source is not None for i in infos):
        operands = tuple(i.source for i in infos if i.source is not None)
        shape = _shape(eqn.outvars[0])
        if name == "stack":
            return [StackedSource(shape=shape, operands=operands, dimension=eqn.params["axis"])]
        return [ConcatenatedSource(shape=shape, operands=operands, dimension=eqn.params["dimension"])]
    if name in _MODIFYING and len(infos) == 2:
        return [_modified_source(eqn, infos)]
    return nothing


def _modified_source(eqn: JaxprEqn, infos: list[VarInfo]) -> Source | None:
    """The weight that an equation changes, if its result is still one: W * 2, W * mask, W + delta."""
    shape = _shape(eqn.outvars[0])
    whole = [
        i for i in infos if i.source is not None and i.source.shape == shape and not _is_broadcast(i.source)
    ]
    if not whole or len(shape) < 2:
        return None
    return min(whole, key=lambda i: i.is_modified).source


def _is_broadcast(source: Source) -> bool:
    """Is it broadcast from a smaller parameter: a bias, a scale, a position?"""
    if not isinstance(source, LayoutSource):
        return False
    grows = math.prod(source.shape) > math.prod(source.operand.shape)
    if grows and jaxprs.primitive_name(source.eqn) == "broadcast_in_dim":
        return True
    return _is_broadcast(source.operand)


def _gathers_matrices(eqn: JaxprEqn) -> bool:
    """Does a gather take whole matrices of a stack? One that looks up rows of an embedding gives activations."""
    pairs = zip(_shape(eqn.invars[0]), eqn.params["slice_sizes"], strict=True)
    return len([size for size, taken in pairs if size == taken > 1]) >= 2
