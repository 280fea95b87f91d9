"""Propagates `VarInfo` from the operands of an equation to its results, without entering any jaxpr inside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax.extend.core import JaxprEqn

from policyc.compiler.weights.provenance.graph import (
    ConcatenatedSource,
    LayoutSource,
    LostSource,
    OtherSource,
    Source,
    StackedSource,
    is_broadcast,
    is_lost,
    unknown_source,
)
from policyc.compiler.weights.provenance.integers import (
    is_array,
    known_integers,
    not_evaluated,
    propagate_integers,
)
from policyc.compiler.weights.var_info import (
    MOST_PROJECTIONS,
    UNKNOWN,
    Dependence,
    VarInfo,
    either,
    join_dependence,
    join_projections,
)
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.reading import shape_of
from policyc.jaxcore.primitives.derivatives import active_results, is_float
from policyc.jaxcore.primitives.primitive_table import WeightRule, rule_of

_OF_CONSTANTS = "its index is computed from constants by operations that policyc does not evaluate"


def propagate_equation(eqn: JaxprEqn, infos: list[VarInfo]) -> list[VarInfo]:
    """The infos of an equation's results, from those of its operands. The equation has no jaxpr that is entered."""
    outvars = eqn.outvars
    if not outvars:
        return []
    rule = rule_of(eqn)
    weight = rule.weight
    active = active_results(eqn, [i.is_active for i in infos])
    if weight == "identity":
        if eqn.primitive.name == "device_put":  # a weight in host memory cannot be quantized
            infos = [info._replace(origin=None) for info in infos]
        return [info._replace(is_active=a) for info, a in zip(infos, active, strict=True)]
    if weight != "product" and not eqn.effects:
        data = _only_data(infos)
        if data is not None and (data.integers is None or is_array(outvars[0].aval)):
            return [data if a is data.is_active else data._replace(is_active=a) for a in active]
    joined = join_dependence(infos)
    moves = weight in ("layout", "gather")
    if not moves and joined > Dependence.CONSTANTS:
        infos = [i._replace(source=None, is_lookup=False) if i.is_lookup else i for i in infos]
    first, name = infos[0] if infos else UNKNOWN, eqn.primitive.name
    is_active = True in active
    result = VarInfo(
        is_active=is_active,
        depends_on=_dependence(eqn, joined),
        integers=propagate_integers(eqn, [i.integers for i in infos]),
        is_one_hot=(moves and first.is_one_hot) or (name == "eq" and any(i.is_iota for i in infos)),
        is_iota=(moves and first.is_iota) or name == "iota",
        origin=first.origin.then(eqn)
        if first.origin is not None and rule.hoistable and len(infos) == 1
        else None,
        projections=join_projections(infos),
    )
    if weight == "product" or [i.source for i in infos].count(None) == len(infos):
        return [result if a is is_active else result._replace(is_active=a) for a in active]
    is_modified = _is_modified(weight, infos)
    return [
        result._replace(
            source=source,
            is_active=a,
            is_modified=source is not None and is_modified,
            is_lookup=source is not None and _is_lookup(eqn, source, infos),
        )
        for a, source in zip(active, _SOURCES[weight](eqn, infos), strict=True)
    ]


def _only_data(infos: Sequence[VarInfo]) -> VarInfo | None:
    """Fast path: if operands are constants, or data that share one info, the info of the results; else None.

    This covers most equations of a model: their operands are activations, literals and constants.
    """
    data: VarInfo | None = None
    constant: VarInfo | None = None
    for info in infos:
        if info is data or info is constant:
            continue
        if info.source is not None or info.origin is not None or info.is_iota or info.is_one_hot:
            return None
        if info.integers is not None and info.is_fixed and not info.projections:
            if constant is None and info.integers.unknown:
                constant = info
            continue
        if data is not None or info.integers is not None or info.is_lookup or info.is_modified:
            return None
        if len(info.projections) > MOST_PROJECTIONS:
            return None
        data = info
    return constant if data is None else data


def propagate_opaque(eqn: JaxprEqn, infos: list[VarInfo]) -> list[VarInfo]:
    """The infos of the results of an equation whose jaxpr is not entered."""
    is_active = any(i.is_active for i in infos)
    sources = _lost(eqn, infos)
    return [
        VarInfo(
            source=source,
            is_modified=source is not None,
            is_lookup=source is not None and _is_lookup(eqn, source, infos),
            depends_on=_dependence(eqn, join_dependence(infos)),
            is_active=is_active and is_float(v.aval),
            projections=join_projections(infos),
        )
        for source, v in zip(sources, eqn.outvars, strict=True)
    ]


def _dependence(eqn: JaxprEqn, joined: Dependence) -> Dependence:
    """The dependence of the results of an equation, given the joined dependence of its operands."""
    if eqn.effects and jaxprs.has_side_effects(eqn):
        return Dependence.DATA
    if rule_of(eqn).weight != "product":
        return joined
    is_of_weights = joined in (Dependence.PARAMETERS, Dependence.WEIGHT_PRODUCTS)
    return Dependence.WEIGHT_PRODUCTS if is_of_weights else Dependence.DATA


def _is_modified(rule: WeightRule, infos: Sequence[VarInfo]) -> bool:
    """Whether the result of an equation is more than a parameter: it mixes in other values, or applies a function."""
    if any(i.is_modified for i in infos):
        return True
    return any(i.source is None for i in infos) if rule == "joined" else rule not in ("layout", "gather")


def _is_lookup(eqn: JaxprEqn, source: Source, infos: Sequence[VarInfo]) -> bool:
    """Whether a result of an equation is computed from constants that may as well be data. `source` is its source."""
    rule = rule_of(eqn).weight
    if rule == "layout":
        return infos[0].is_lookup
    if rule == "gather":
        return infos[0].is_lookup or not (infos[1].is_fixed or _takes_matrices(eqn, infos[1]))
    if any(i.is_lookup for i in infos):
        return True
    is_function = rule == "function" or isinstance(source, LostSource)
    return is_function and not all(i.is_fixed for i in infos)


# ---- the sources of results, by the weight rules of `jaxcore.primitives`. At least one operand has a source.

_Sources = list[Source | None]


def _layout(eqn: JaxprEqn, infos: Sequence[VarInfo]) -> _Sources:
    operand = infos[0].source
    if operand is None:
        return [None] * len(eqn.outvars)
    integers = tuple(
        not_evaluated(_OF_CONSTANTS) if i.integers is None and i.is_constant else i.integers
        for i in infos[1:]
    )
    return [
        LayoutSource(shape=shape_of(v), eqn=eqn, output=number, operand=operand, integers=integers)
        for number, v in enumerate(eqn.outvars)
    ]


def _gather(eqn: JaxprEqn, infos: Sequence[VarInfo]) -> _Sources:
    """A gather of whole matrices of a stack chooses layers. Rows that are looked up by data are activations."""
    return _layout(eqn, infos) if _takes_matrices(eqn, infos[1]) or infos[1].is_constant else [None]


def _takes_matrices(eqn: JaxprEqn, index: VarInfo) -> bool:
    """Whether a gather takes whole matrices of a stack.

    If the index is data, whole dimensions before the indexed one do not count: they come from a `vmap` over models,
    each of which looks up its own rows.
    """
    whole = 0
    for size, taken in zip(shape_of(eqn.invars[0]), eqn.params["slice_sizes"], strict=True):
        if size == taken:
            whole += size > 1
        elif not index.is_constant:
            whole = 0
    return whole >= 2


def _modified(eqn: JaxprEqn, infos: Sequence[VarInfo]) -> _Sources:
    """W * mask or W + delta; or W1 + W2, named for both. Weights that are not modified yet come first."""
    shape = shape_of(eqn.outvars[0])
    in_order = [i.source for i in sorted(infos, key=lambda i: i.is_modified) if i.source is not None]
    followed = [s for s in in_order if s.shape == shape and not is_broadcast(s) and not is_lost(s)]
    return [either(followed)] if followed and len(shape) > 1 else _function(eqn, infos)


def _function(eqn: JaxprEqn, infos: Sequence[VarInfo]) -> _Sources:
    sources = [i.source for i in infos if i.source is not None]
    if (
        all(i.is_constant for i in infos)
        and len(set(sources)) == 1
        and sources[0].shape == shape_of(eqn.outvars[0])
    ):
        return [sources[0]]
    return _lost(eqn, infos)


def _chosen(eqn: JaxprEqn, infos: Sequence[VarInfo]) -> _Sources:
    """A `select_n` by known integers, or by a scalar, chooses one of its operands. Any other `select_n` is a mask."""
    index, shape = known_integers(infos[0].integers), shape_of(eqn.outvars[0])
    cases = [
        OtherSource(shape=shape) if i.source is None and i.is_fixed and index is not None else i.source
        for i in infos[1:]
    ]
    sources = [s for s in cases if s is not None and (index is not None or not is_broadcast(s))]
    has_weight = any(not isinstance(s, OtherSource) and not is_broadcast(s) for s in sources)
    is_choice = index is not None or not shape_of(eqn.invars[0])
    if len(sources) == len(cases) and has_weight and is_choice and len(shape) > 1:
        return [either(sources, index)]
    return _modified(eqn, infos[1:])


def _joined(eqn: JaxprEqn, infos: Sequence[VarInfo]) -> _Sources:
    shape = shape_of(eqn.outvars[0])
    has_weight = any(i.source is not None and not is_broadcast(i.source) for i in infos)
    if not all(i.source is not None for i in infos) and not (has_weight and len(shape) > 1):
        return [None]
    pairs = zip(infos, eqn.invars, strict=True)
    operands = tuple(i.source or OtherSource(shape=shape_of(a)) for i, a in pairs)
    if "axis" in eqn.params:
        return [StackedSource(shape=shape, operands=operands, dimension=eqn.params["axis"])]
    return [ConcatenatedSource(shape=shape, operands=operands, dimension=eqn.params["dimension"])]


def _written(eqn: JaxprEqn, infos: Sequence[VarInfo]) -> _Sources:
    array, *others = (i.source for i in infos)
    if array is not None and all(source is None for source in others):
        return _modified(eqn, infos[:1])
    return _lost(eqn, infos)


def _lost(eqn: JaxprEqn, infos: Sequence[VarInfo]) -> _Sources:
    """Results whose elements cannot be followed.

    If the primitive's rule has a `reason`, results keep the parameters of the operands, with that reason. Without one,
    they keep them only if all operands are constant.
    """
    sources = [i.source for i in infos if i.source is not None]
    reason = rule_of(eqn).reason
    if reason:
        whole = [s for s in sources if not is_broadcast(s)]
        return [
            unknown_source(shape_of(v), whole, reason) if whole and len(shape_of(v)) > 1 else None
            for v in eqn.outvars
        ]
    if not sources or not all(i.is_constant for i in infos):
        return [None] * len(eqn.outvars)
    reason = f"it is computed by '{jaxprs.primitive_name(eqn)}', which policyc does not follow"
    return [LostSource(shape=shape_of(v), operands=tuple(sources), reason=reason) for v in eqn.outvars]


_SOURCES: dict[WeightRule, Callable[[JaxprEqn, Sequence[VarInfo]], _Sources]] = {
    "layout": _layout,
    "gather": _gather,
    "modified": _modified,
    "function": _function,
    "chosen": _chosen,
    "joined": _joined,
    "written": _written,
    "lost": _lost,
}
