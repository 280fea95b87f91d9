"""jaxpr -> Sites: finds every GEMM of a loss in one forward pass.

The pass knows, for each variable, the parameters it is laid out from and whether a gradient flows through it. A site is
a GEMM together with the calls that lead to it: a function that is jitted once and called for every layer has a site
for each call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.core import AbstractValue
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from policyc.compiler.paths import add_stack_sizes
from policyc.compiler.sites import IndexSlot, Origin, PathTemplate, Site, Sites, Stack, Weight
from policyc.jaxcore import jaxprs
from policyc.jaxcore.containers import OPAQUE, container_of, leading_dim_parts
from policyc.jaxcore.jaxprs import Atom, AxisEnv
from policyc.jaxcore.transform import Address
from policyc.language.recipes import Gemm
from policyc.language.selectors import DottedPath, read_segments


@dataclass(frozen=True, slots=True)
class VarInfo:
    """What is known of a variable."""

    templates: tuple[PathTemplate, ...] = ()
    """The parameters it is laid out from."""
    active: bool = False
    """Does a gradient flow through it?"""
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
    scope_slots: tuple[IndexSlot, ...] = ()
    stacks: tuple[Stack, ...] = ()
    repeats: int = 1
    opaque: str = ""
    opaque_parameters: tuple[PathTemplate, ...] = ()
    """The parameters that an opaque container reads, where it is not known which of its GEMMs reads them."""
    axis_env: AxisEnv = AxisEnv()
    loops: int = 0
    in_remat: bool = False
    takes_extra_inputs: bool = True

    def enter(self, eqn: JaxprEqn, number: int, **changes: Any) -> JaxprContext:
        """The context of a jaxpr inside an equation. `self.address` must be that of the equation."""
        scope = (*self.scope, *jaxprs.name_scopes(eqn))
        return replace(self, address=(*self.address, number), scope=scope, **changes)


LAYOUT = frozenset({
    "convert_element_type", "reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "rev", "copy",
    "copy_p", "slice", "dynamic_slice", "split", "sharding_constraint", "mesh_cast", "reshard", "all_gather",
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

_SCALING = frozenset({"mul", "div"})
_JOINING = frozenset({"concatenate", "stack"})
_GEMMS = frozenset({"dot_general", "ragged_dot_general", "ragged_dot"})
_QUANTIZED = ("_quantize", "scaled_gemm", "scaled_ragged_gemm")
"""How the names of our own primitives end."""

OTHER_PRODUCTS = {
    "scaled_dot": "jax.lax.scaled_dot, which quantizes by itself",
    "scaled_matmul": "jax.nn.scaled_matmul, which quantizes by itself",
    "scaled_matmul_wrapper": "jax.nn.scaled_matmul, which quantizes by itself",
}
"""Matrix products that the compiler does not rewrite, in words. Their sites are opaque."""


def analyze(jaxpr: ClosedJaxpr, parameters: Sequence[DottedPath | None]) -> Sites:
    """The sites of a loss. `parameters` has the path of every input that is differentiated, None for others."""
    invars = jaxpr.jaxpr.invars
    shapes = {path: _shape(var) for path, var in zip(parameters, invars, strict=True) if path is not None}
    analyzer = _Analyzer(shapes)
    infos = [
        _UNKNOWN
        if path is None
        else VarInfo((PathTemplate(path),), active=_is_float(var.aval), origin=Origin(number))
        for number, (path, var) in enumerate(zip(parameters, invars, strict=True))
    ]
    analyzer.run(jaxpr.jaxpr, infos, JaxprContext())
    sites = list(analyzer.sites.values())
    scopes = add_stack_sizes([s.scope.path for s in sites])
    return Sites(
        sites=tuple(
            replace(s, scope=PathTemplate(path, s.scope.slots)) for s, path in zip(sites, scopes, strict=True)
        ),
        parameters=tuple(p for p in parameters if p is not None),
        jaxpr=jaxpr,
        looked_up=frozenset(analyzer.looked_up),
    )


def _is_float(aval: AbstractValue) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)


def _shape(atom: Atom) -> tuple[int, ...]:
    aval: Any = atom.aval
    return tuple(aval.shape)


class _Analyzer:
    """Propagates `VarInfo`s through a jaxpr, and records its sites by address.

    A loop's body is analyzed until the infos of its carry are stable. Each time replaces the sites of the time before.
    """

    def __init__(self, shapes: dict[DottedPath, tuple[int, ...]]) -> None:
        self.sites: dict[Address, Site] = {}
        self.looked_up: set[DottedPath] = set()
        self.device_stacks: dict[Address, Stack] = {}
        self._shapes = shapes
        self._stack_places: dict[tuple[DottedPath, int, int], tuple[int, ...]] = {}
        self._is_quantized: dict[int, bool] = {}

    def run(self, jaxpr: Jaxpr, infos: Sequence[VarInfo], context: JaxprContext) -> list[VarInfo]:
        """The infos of the results, from those of the inputs."""
        known: dict[Var, VarInfo] = dict(zip(jaxpr.invars, infos, strict=True))

        def info(atom: Any) -> VarInfo:
            return _UNKNOWN if jaxprs.is_literal(atom) else known.get(atom, _UNKNOWN)

        for number, eqn in enumerate(jaxpr.eqns):
            here = replace(context, address=(*context.address, number))
            results = self._equation(eqn, [info(a) for a in eqn.invars], here)
            known.update((v, r) for v, r in zip(eqn.outvars, results, strict=True) if r is not _UNKNOWN)
        return [info(a) for a in jaxpr.outvars]

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
        elif name == "gather":
            self.looked_up.update(template.path for template in infos[0].templates)
        return _propagate(self, eqn, name, infos)

    def stack_places(self, path: DottedPath, dim: int, size: int) -> tuple[int, ...]:
        """The names in a path that can carry the index of a slice along a dimension.

        They begin at the first name under which every parameter has this size in this dimension.
        """
        key = (path, dim, size)
        if key not in self._stack_places:
            self._stack_places[key] = self._find_stack_places(path, dim, size)
        return self._stack_places[key]

    def _find_stack_places(self, path: DottedPath, dim: int, size: int) -> tuple[int, ...]:
        for top in range(len(path)):
            under = {p: s for p, s in self._shapes.items() if p[: top + 1] == path[: top + 1]}
            if all(len(s) > dim and s[dim] == size for s in under.values()):
                last = max(top + 1, _common_prefix(list(under)))
                return tuple(i for i in range(top, last) if path[i].index is None)
        return ()

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
            parameters = context.opaque_parameters if same_inputs else _matrix_templates(eqn, infos)
            inside = context.enter(eqn, number, opaque=reason, opaque_parameters=parameters)
            body_results = self.run(body, inputs, inside)
            if name == "custom_jvp_call" and len(body_results) == len(results):
                results = body_results
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

    # ---- GEMMs

    def _gemm(self, eqn: JaxprEqn, infos: list[VarInfo], context: JaxprContext) -> None:
        lhs, rhs = infos[:2]
        name = jaxprs.primitive_name(eqn)
        dtypes = [_dtype(a) for a in eqn.invars[:2]]
        if not all(jnp.issubdtype(d, jnp.floating) for d in dtypes):
            return
        if not (lhs.templates or rhs.templates):
            rhs = replace(rhs, templates=context.opaque_parameters)
        weight: Weight = "rhs" if rhs.templates else "lhs" if lhs.templates else None
        sizes = _gemm_sizes(eqn, weight)
        if sizes is None:
            return
        batch, m, n, k = sizes
        for_lhs, for_rhs = (Gemm.WGRAD, Gemm.DGRAD) if weight == "lhs" else (Gemm.DGRAD, Gemm.WGRAD)
        products = {Gemm.FPROP, *([for_lhs] if lhs.active else ()), *([for_rhs] if rhs.active else ())}
        opaque = context.opaque or _why_opaque(eqn, dtypes)
        operand = lhs if weight == "lhs" else rhs
        origin = None if weight is None or opaque or not context.takes_extra_inputs else operand.origin
        if name != "dot_general" or jaxprs.explicit_sharding(eqn) is not None:
            origin = None
        scope = read_segments((*context.scope, *jaxprs.name_scopes(eqn)))
        self.sites[context.address] = Site(
            address=context.address,
            scope=_scope_template(scope, context.scope_slots),
            parameters=operand.templates,
            stacks=(*self._stacks_over_devices(operand, context), *context.stacks),
            weight=weight,
            kind="ragged" if name.startswith("ragged") else "dot",
            batch=batch,
            m=m,
            n=n,
            k=k,
            repeats=context.repeats,
            products=frozenset(products),
            opaque=opaque,
            one_hot=(lhs if weight == "rhs" else rhs).one_hot,
            axis_env=context.axis_env,
            origin=origin,
            takes_extra_inputs=context.takes_extra_inputs,
            is_reused=context.in_remat or (origin is not None and context.loops > len(origin.scans)),
            eqn=eqn,
        )

    def _stacks_over_devices(self, weight: VarInfo, context: JaxprContext) -> tuple[Stack, ...]:
        """The shard_maps that divide the layers of a site over devices."""
        slots = [*(s for template in weight.templates for s in template.slots), *context.scope_slots]
        addresses = dict.fromkeys(a for s in slots for a in (s.shards, s.stack) if a is not None)
        return tuple(self.device_stacks[a] for a in addresses if a in self.device_stacks)


class _ContainerDomain:
    """How `VarInfo`s pass through one container. See `containers.Domain`."""

    def __init__(self, analyzer: _Analyzer, eqn: JaxprEqn, context: JaxprContext) -> None:
        self._analyzer, self._eqn = analyzer, eqn
        container = container_of(eqn)
        assert container is not None
        extra = container.takes_extra_inputs and not (container.is_loop and jaxprs.has_indexed_effects(eqn))
        self._context = replace(
            context,
            takes_extra_inputs=context.takes_extra_inputs and extra,
            in_remat=context.in_remat or container.is_remat,
            loops=context.loops + container.is_loop,
            repeats=context.repeats * eqn.params.get("length", 1) if container.is_loop else context.repeats,
        )
        if jaxprs.primitive_name(eqn) == "shard_map":
            self._context = replace(self._context, axis_env=context.axis_env.enter_shard_map(eqn))
        self._bodies = [jaxprs.open_jaxpr(sub.jaxpr) for sub in jaxprs.sub_jaxprs(eqn)]

    def enter(self, number: int, infos: Sequence[VarInfo]) -> list[VarInfo]:
        return self._analyzer.run(self._bodies[number], infos, self._context.enter(self._eqn, number))

    def join(self, values: Sequence[VarInfo]) -> VarInfo:
        """Parameters only where all branches agree; active where any branch is."""
        first = values[0]
        alike = all(v.templates == first.templates for v in values)
        return VarInfo(first.templates if alike else (), active=any(v.active for v in values))

    def enter_loop(self, value: VarInfo, invariant: bool) -> VarInfo:
        return value if invariant else VarInfo(active=value.active)

    def may_change(self, carry: Sequence[VarInfo], others: Sequence[VarInfo]) -> bool:
        return not all(c.active for c in carry) and any(v.active for v in (*carry, *others))

    def widen(self, carry: VarInfo, result: VarInfo) -> VarInfo:
        return replace(carry, active=carry.active or result.active)

    def leave_loop(self, result: VarInfo, carry: VarInfo | None) -> VarInfo:
        return VarInfo(active=result.active or (carry is not None and carry.active))

    def slice_inputs(self, eqn: JaxprEqn, values: Sequence[VarInfo]) -> list[VarInfo]:
        """A scan over parameters is a stack. Its name is what the paths of the parameters have in common."""
        templates = [template for value in values for template in value.templates]
        if not templates:
            return list(values)
        context, length = self._context, eqn.params["length"]
        address = context.address
        stack = Stack(address, length, bool(eqn.params["reverse"]))
        depth = len(context.scope) + len(jaxprs.name_scopes(eqn))
        shards = next((t.shards for t in templates if t.shards), None)
        slot = _stack_slot(tuple(p for p in (depth - 1, depth) if p >= 0), length, address, shards)
        self._context = replace(
            context, stacks=(*context.stacks, stack), scope_slots=(*context.scope_slots, slot)
        )
        common = _common_prefix([t.path for t in templates])

        def add_slot(template: PathTemplate) -> PathTemplate:
            places = tuple(i for i in range(common) if template.path[i].index is None)
            if not common and template.path and template.path[-1].index is None:
                places = (len(template.path) - 1,)
            return template.with_slot(_stack_slot(places, length, address, template.shards))

        return [
            replace(
                value,
                templates=tuple(map(add_slot, value.templates)),
                origin=None if value.origin is None else value.origin.then(address),
            )
            for value in values
        ]

    def split_over_devices(self, eqn: JaxprEqn, values: Sequence[VarInfo]) -> list[VarInfo]:
        """A shard_map that divides the first dimension of a stack gives each device some layers, or one."""
        address = self._context.address
        infos = []
        for value, var, parts in zip(values, self._bodies[0].invars, leading_dim_parts(eqn), strict=True):
            if parts > 1 and value.templates:
                stack = self._analyzer.device_stacks[address] = Stack(address, parts, is_shard_map=True)
                one_layer = _shape(var)[0] == 1
                value = replace(
                    value,
                    templates=tuple(
                        self._with_device_slot(t, stack) if one_layer else replace(t, shards=stack)
                        for t in value.templates
                    ),
                )
            infos.append(value)
        return infos

    def _with_device_slot(self, template: PathTemplate, stack: Stack) -> PathTemplate:
        places = self._analyzer.stack_places(template.path, 0, stack.size)
        return template.with_slot(IndexSlot(places, stack.size, stack.address))


def _stack_slot(places: tuple[int, ...], length: int, address: Address, shards: Stack | None) -> IndexSlot:
    """The slot of a scan's index. With `shards`, each device scans its own layers."""
    if shards is None:
        return IndexSlot(places, length, address)
    return IndexSlot(places, length * shards.size, address, shards=shards.address, layers_per_device=length)


def _dtype(atom: Atom) -> Any:
    aval: Any = atom.aval
    return aval.dtype


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


def _matrix_templates(eqn: JaxprEqn, infos: list[VarInfo]) -> tuple[PathTemplate, ...]:
    """The parameters among the operands of a container that are not vectors."""
    pairs = zip(eqn.invars, infos, strict=True)
    return tuple(dict.fromkeys(t for a, info in pairs if len(_shape(a)) > 1 for t in info.templates))


def _is_plain_ragged(eqn: JaxprEqn) -> bool:
    """Is it no ragged product, or the common one: rows in groups, and a matrix for each group?"""
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    if numbers is None:
        return True
    dims = tuple(tuple(map(tuple, pair)) for pair in numbers.dot_dimension_numbers)
    groups = (tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions))
    offset = eqn.params.get("group_offset")
    return dims == (((1,), (1,)), ((), ())) and groups == ((0,), (0,)) and offset is None


def _scope_template(scope: DottedPath, slots: tuple[IndexSlot, ...]) -> PathTemplate:
    def fits(place: int) -> bool:
        return place < len(scope) and scope[place].index is None

    return PathTemplate(scope, tuple(replace(s, places=tuple(filter(fits, s.places))) for s in slots))


def _gemm_sizes(eqn: JaxprEqn, weight: Weight) -> tuple[int, int, int, int] | None:
    """(batch, m, n, k) as in `y = x W`; None if it contracts nothing."""
    lhs, rhs = (_shape(a) for a in eqn.invars[:2])
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    numbers = ragged.dot_dimension_numbers if ragged else eqn.params.get("dimension_numbers")
    if numbers is None:  # jax.nn.scaled_matmul: (batch, m, k) x (batch, n, k)
        numbers = (((2,), (2,)), ((0,), (0,)))
    (lc, rc), (lb, rb) = numbers
    groups = set(ragged.rhs_group_dimensions) if ragged else set()
    k, batch = math.prod(lhs[i] for i in lc), math.prod(lhs[i] for i in lb)
    left = math.prod(d for i, d in enumerate(lhs) if i not in {*lc, *lb})
    right = math.prod(d for i, d in enumerate(rhs) if i not in {*rc, *rb, *groups})
    if not lc or k <= 1 or not (batch and left and right):
        return None
    return (batch, right, left, k) if weight == "lhs" else (batch, left, right, k)


# ---- infos through plain equations


def _propagate(analyzer: _Analyzer, eqn: JaxprEqn, name: str, infos: list[VarInfo]) -> list[VarInfo]:
    active = name != "stop_gradient" and any(i.active for i in infos)
    first = infos[0] if infos else _UNKNOWN
    templates = _propagate_templates(analyzer, eqn, name, infos)
    is_iota = name == "iota" or (name in LAYOUT and first.is_iota)
    one_hot = (name == "eq" and any(i.is_iota for i in infos)) or (name in LAYOUT and first.one_hot)
    if not (active or templates or is_iota or one_hot):
        return [_UNKNOWN] * len(eqn.outvars)
    if name == "optimization_barrier":
        return infos
    hoistable = name in _HOISTABLE and len(infos) == 1
    origin = first.origin.then(eqn) if hoistable and first.origin is not None else None
    return [
        VarInfo(
            templates, active=active and _is_float(v.aval), one_hot=one_hot, is_iota=is_iota, origin=origin
        )
        for v in eqn.outvars
    ]


def _propagate_templates(
    analyzer: _Analyzer, eqn: JaxprEqn, name: str, infos: list[VarInfo]
) -> tuple[PathTemplate, ...]:
    """The parameters that the result of an equation is laid out from."""
    first = infos[0] if infos else _UNKNOWN
    if name in LAYOUT:
        templates = _slice_templates(analyzer, eqn, name, first.templates)
        if name.startswith("all_gather"):
            return tuple(replace(t, shards=None) for t in templates)
        return templates
    if name in _SCALING and len(infos) == 2:
        # A weight times a scalar is a weight.
        pairs = zip(infos, reversed(eqn.invars), strict=True)
        return next((i.templates for i, other in pairs if i.templates and not _shape(other)), ())
    if name == "gather" and _gathers_matrices(eqn):
        return first.templates
    if name in _JOINING and all(i.templates for i in infos):
        return tuple(dict.fromkeys(t for i in infos for t in i.templates))
    return ()


def _gathers_matrices(eqn: JaxprEqn) -> bool:
    """Does a gather take whole matrices of a stack? One that looks up rows of an embedding gives activations."""
    pairs = zip(_shape(eqn.invars[0]), eqn.params["slice_sizes"], strict=True)
    return len([size for size, taken in pairs if size == taken > 1]) >= 2


def _slice_templates(
    analyzer: _Analyzer, eqn: JaxprEqn, name: str, templates: tuple[PathTemplate, ...]
) -> tuple[PathTemplate, ...]:
    """The templates of a slice: with an index, where it takes one member of a stack."""
    if not templates or name not in ("slice", "dynamic_slice"):
        return templates
    before, after = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    dims = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    if len(dims) != 1 or after[dims[0]] != 1:
        return templates
    (dim,) = dims
    start: Any = eqn.params["start_indices"][dim] if name == "slice" else eqn.invars[1 + dim]
    if name == "dynamic_slice":
        if not jaxprs.is_literal(start):
            return templates
        start = int(start.val)
    size = before[dim]
    return tuple(
        t.with_slot(IndexSlot(analyzer.stack_places(t.path, dim, size), size, None, start)) for t in templates
    )


def _common_prefix(paths: list[DottedPath]) -> int:
    """How many names all paths begin with."""
    common = 0
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        common += 1
    return common
