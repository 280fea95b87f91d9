"""What the analysis knows of a variable, and how that passes through an equation without a jaxpr inside."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.extend.core import JaxprEqn

from policyc.compiler.provenance.graph import (
    ConcatenatedSource,
    LayoutSource,
    Source,
    StackedSource,
    UnknownSource,
)
from policyc.compiler.provenance.integers import Integers, constant_integers, propagate_integers
from policyc.compiler.sites import Origin
from policyc.jaxcore import jaxprs
from policyc.jaxcore.derivatives import active_results


@dataclass(frozen=True, slots=True, kw_only=True)
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
    projections: frozenset[Source] = frozenset()
    """The weights of the last products that it comes from."""


UNKNOWN = VarInfo()

MANY_PROJECTIONS = frozenset({UnknownSource(shape=(), operands=(), reason="it comes from other iterations")})
_MOST_PROJECTIONS = 16  # a residual stream comes from all layers before; attention from a few projections


def join_projections(infos: Iterable[VarInfo]) -> frozenset[Source]:
    joined = frozenset[Source]().union(*(i.projections for i in infos))
    is_unknown = len(joined) > _MOST_PROJECTIONS or joined & MANY_PROJECTIONS
    return MANY_PROJECTIONS if is_unknown else joined


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
    active = active_results(eqn, [i.active for i in infos])
    first = infos[0] if infos else UNKNOWN
    sources = _propagate_source(eqn, name, infos)
    integers = propagate_integers(eqn, [i.integers for i in infos])
    is_iota = name == "iota" or (name in LAYOUT and first.is_iota)
    one_hot = (name == "eq" and any(i.is_iota for i in infos)) or (name in LAYOUT and first.one_hot)
    projections = join_projections(infos)
    if not (any(active) or any(sources) or integers or is_iota or one_hot or projections):
        return [UNKNOWN] * len(eqn.outvars)
    if name == "optimization_barrier":
        return [replace(info, active=is_active) for info, is_active in zip(infos, active, strict=True)]
    hoistable = name in _HOISTABLE and len(infos) == 1
    return [
        VarInfo(
            source=source,
            is_modified=source is not None and (name in _MODIFYING or any(i.is_modified for i in infos)),
            active=is_active,
            integers=integers,
            one_hot=one_hot,
            is_iota=is_iota,
            origin=first.origin.then(eqn) if hoistable and first.origin is not None else None,
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
    if name in ("concatenate", "stack") and all(i.source is not None for i in infos):
        operands = tuple(i.source for i in infos if i.source is not None)
        shape = shape_of(eqn.outvars[0])
        if name == "stack":
            return [StackedSource(shape=shape, operands=operands, dimension=eqn.params["axis"])]
        return [ConcatenatedSource(shape=shape, operands=operands, dimension=eqn.params["dimension"])]
    if name in _MODIFYING and len(infos) == 2:
        return [_modified_source(eqn, infos)]
    return nothing


def _modified_source(eqn: JaxprEqn, infos: list[VarInfo]) -> Source | None:
    """The weight that an equation changes, if its result is still one: W * 2, W * mask, W + delta."""
    shape = shape_of(eqn.outvars[0])
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
    pairs = zip(shape_of(eqn.invars[0]), eqn.params["slice_sizes"], strict=True)
    return len([size for size, taken in pairs if size == taken > 1]) >= 2
