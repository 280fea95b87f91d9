"""What the analysis knows of a variable, and how that passes through an equation without a jaxpr inside."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.extend.core import JaxprEqn, Var

from policyc.compiler.provenance.graph import (
    ConcatenatedSource,
    EitherSource,
    LayoutSource,
    OtherSource,
    ParameterSource,
    Source,
    StackedSource,
    UnknownSource,
    unknown_source,
)
from policyc.compiler.provenance.integers import Integers, constant_integers, propagate_integers
from policyc.compiler.sites import Origin
from policyc.compiler.trace import FrozenWeight
from policyc.jaxcore import jaxprs
from policyc.jaxcore.derivatives import active_results


@dataclass(frozen=True, slots=True, kw_only=True)
class VarInfo:
    """What is known of a variable."""

    source: Source | None = None
    """How it is laid out from parameters."""
    is_modified: bool = False
    """Is it a parameter plus or times something else: a merged adapter, a mask, a normalized weight?"""
    is_active: bool = False
    """Does a gradient flow through it?"""
    integers: Integers | None = None
    """Its value, if it is an integer that is known in each iteration."""
    is_one_hot: bool = False
    is_iota: bool = False
    origin: Origin | None = None
    """How to compute it from one input of the loss, where that costs no more outside than here."""
    projections: frozenset[Source] = frozenset()
    """The weights of the last products that it comes from."""


UNKNOWN = VarInfo()

MANY_PROJECTIONS = frozenset({UnknownSource(shape=(), operands=(), reason="it comes from other iterations")})
_CARRIED = "the loop around it carries it, and changes it in every iteration"
_MOST_PROJECTIONS = 16  # a residual stream comes from all layers before; attention from a few projections


def join_projections(infos: Iterable[VarInfo]) -> frozenset[Source]:
    joined = frozenset[Source]().union(*(i.projections for i in infos))
    is_unknown = len(joined) > _MOST_PROJECTIONS or joined & MANY_PROJECTIONS
    return MANY_PROJECTIONS if is_unknown else joined


def frozen_info(var: Var, weight: FrozenWeight) -> VarInfo:
    if not weight.is_part:
        return VarInfo(source=ParameterSource(shape=shape_of(var), path=weight.path, is_frozen=True))
    whole = ParameterSource(shape=weight.shape, path=weight.path, is_frozen=True)
    reason = "NumPy takes a part of it, which JAX does not see"
    return VarInfo(source=unknown_source(shape_of(var), [whole], reason))


def join_branches(values: Sequence[VarInfo], index: Integers | None) -> VarInfo:
    """A weight only where all branches give one; active where any branch is. `index`: the branch, if it is known."""
    sources = [v.source for v in values if v.source is not None]
    return VarInfo(
        source=_either(sources, index) if len(sources) == len(values) else None,
        is_modified=any(v.is_modified for v in values),
        is_active=any(v.is_active for v in values),
        projections=join_projections(values),
    )


def carry_info(value: VarInfo, integers: Integers | None) -> VarInfo:
    """What is known of a carry that a loop changes, from its first value. `integers`: its value, if it is a counter."""
    source = value.source
    if source is not None:
        source = None if is_broadcast(source) else unknown_source(source.shape, [source], _CARRIED)
    return VarInfo(
        source=source,
        is_modified=source is not None,
        is_active=value.is_active,
        integers=integers,
        projections=MANY_PROJECTIONS,
    )


def widen_carry(carry: VarInfo, result: VarInfo) -> VarInfo:
    """What is known of a carry after one more iteration. It is a weight if every iteration gives one."""
    source = carry.source
    if isinstance(source, UnknownSource):
        wider = (
            None if result.source is None else unknown_source(source.shape, [source, result.source], _CARRIED)
        )
        source = source if wider is not None and wider.operands == source.operands else wider
    return replace(carry, source=source, is_active=carry.is_active or result.is_active)


LAYOUT = frozenset({
    "convert_element_type", "reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "rev", "copy",
    "copy_p", "slice", "dynamic_slice", "split", "unstack", "sharding_constraint", "mesh_cast", "reshard", "all_gather",
    "all_gather_invariant", "all_gather_reduced", "pvary", "pcast", "pbroadcast", "preduced", "name",
    "reduce_precision", "stop_gradient", "layout_constraint", "vary_unreduced_cast", "to_edtype", "pad", "neg",
    "auto_axes", "explicit_axes", "real", "with_memory_space_constraint", "annotate",
})  # fmt: skip
"""Primitives that leave a parameter a parameter: they change its order, type or place."""

_IDENTITIES = frozenset({"optimization_barrier", "device_put"})
"""Primitives whose n-th result is their n-th operand."""

_HOISTABLE = frozenset({
    "convert_element_type", "reshape", "transpose", "squeeze", "expand_dims", "slice", "rev", "copy", "copy_p", "pvary",
    "pcast", "name", "reduce_precision", "neg", "stop_gradient",
})  # fmt: skip
"""Primitives that can run outside the loss: they read only the parameter, and do not make it larger."""

_MODIFYING = frozenset({"add", "sub", "mul", "div", "max", "min", "clamp", "select_n"})
"""Primitives after which a parameter is still a weight: an adapter is added, a mask multiplied, its values clipped."""

_JOINING = frozenset({"concatenate", "stack"})

_UNFOLLOWED = {
    "ppermute": "devices pass it on to each other",
    "all_to_all": "devices exchange parts of it",
    "reduce_scatter": "devices add it up and divide it",
    "psum": "devices add it up",
    "psum_invariant": "devices add it up",
    "dynamic_update_slice": "it is written into an array",
    "scatter": "it is written into an array",
    "scatter-add": "it is added to an array",
}
"""Primitives after which a parameter is still a weight, and it is not known which elements of it: why, in words."""
_MOST_CONSTANTS = 1 << 16  # elements of a constant array of indices


def shape_of(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)


def constant_value(value: Any) -> Integers | None:
    """The value of a constant, if it is integers that are known now."""
    if isinstance(value, Tracer) or (not hasattr(value, "dtype") and not isinstance(value, int | np.ndarray)):
        return None
    dtype = getattr(value, "dtype", np.dtype(int))
    if not isinstance(dtype, np.dtype) or dtype.kind not in "iub" or np.size(value) > _MOST_CONSTANTS:
        return None
    return constant_integers(value)


def propagate_equation(eqn: JaxprEqn, name: str, infos: list[VarInfo]) -> list[VarInfo]:
    """The infos of the results of an equation, from those of its operands."""
    active = active_results(eqn, [i.is_active for i in infos])
    if name in _IDENTITIES:
        if name == "device_put":  # a weight in the memory of the host cannot be quantized there
            infos = [replace(info, origin=None) for info in infos]
        return [replace(info, is_active=is_active) for info, is_active in zip(infos, active, strict=True)]
    first = infos[0] if infos else UNKNOWN
    sources = _propagate_source(eqn, name, infos)
    integers = propagate_integers(eqn, [i.integers for i in infos])
    is_iota = name == "iota" or (name in LAYOUT and first.is_iota)
    is_one_hot = (name == "eq" and any(i.is_iota for i in infos)) or (name in LAYOUT and first.is_one_hot)
    projections = join_projections(infos)
    if not (any(active) or any(sources) or integers or is_iota or is_one_hot or projections):
        return [UNKNOWN] * len(eqn.outvars)
    is_hoistable = name in _HOISTABLE and len(infos) == 1
    return [
        VarInfo(
            source=source,
            is_modified=source is not None and _is_modified(name, infos),
            is_active=is_active,
            integers=integers,
            is_one_hot=is_one_hot,
            is_iota=is_iota,
            origin=first.origin.then(eqn) if is_hoistable and first.origin is not None else None,
            projections=projections,
        )
        for is_active, source in zip(active, sources, strict=True)
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
            LayoutSource(shape=shape_of(v), eqn=eqn, output=number, operand=first, integers=integers)
            for number, v in enumerate(eqn.outvars)
        ]
    shape = shape_of(eqn.outvars[0])
    in_order = sorted(
        infos, key=lambda i: i.is_modified
    )  # the weight that is not modified yet gives its name
    whole = [i.source for i in in_order if i.source is not None and not is_broadcast(i.source)]
    if name in _JOINING and (all(i.source is not None for i in infos) or (whole and len(shape) > 1)):
        pairs = zip(infos, eqn.invars, strict=True)
        operands = tuple(i.source or OtherSource(shape=shape_of(a)) for i, a in pairs)
        if name == "stack":
            return [StackedSource(shape=shape, operands=operands, dimension=eqn.params["axis"])]
        return [ConcatenatedSource(shape=shape, operands=operands, dimension=eqn.params["dimension"])]
    if not whole or len(shape) < 2:
        return nothing
    if name == "select_n" and len(whole) == len(infos) - 1 and not shape_of(eqn.invars[0]):
        return [_either([i.source for i in infos if i.source is not None], infos[0].integers)]
    if name in _MODIFYING:
        changed = [source for source in whole if source.shape == shape]
        return [_either(changed) if changed else None]  # W * mask, W + delta; or W1 + W2, named by both
    if name in _UNFOLLOWED:
        return [unknown_source(shape_of(v), whole, _UNFOLLOWED[name]) for v in eqn.outvars]
    return nothing


def _is_modified(name: str, infos: list[VarInfo]) -> bool:
    """Is the result of an equation a parameter and something else?"""
    if name in _MODIFYING or any(i.is_modified for i in infos):
        return True
    return name in _JOINING and any(i.source is None for i in infos)


def _either(sources: Sequence[Source], index: Integers | None = None) -> Source:
    same = all(s is sources[0] for s in sources)
    return sources[0] if same else EitherSource(shape=sources[0].shape, operands=tuple(sources), index=index)


def is_broadcast(source: Source) -> bool:
    """Is it broadcast from a smaller parameter: a bias, a scale, a position?"""
    if not isinstance(source, LayoutSource):
        return False
    grows = math.prod(source.shape) > math.prod(source.operand.shape)
    if grows and jaxprs.primitive_name(source.eqn) == "broadcast_in_dim":
        return True
    return is_broadcast(source.operand)


def _gathers_matrices(eqn: JaxprEqn) -> bool:
    """Does a gather take whole matrices of a stack? One that looks up rows of an embedding gives activations."""
    pairs = zip(shape_of(eqn.invars[0]), eqn.params["slice_sizes"], strict=True)
    return len([size for size, taken in pairs if size == taken > 1]) >= 2
