"""Facts that the analysis derives about a variable, and how they are joined over branches and loop iterations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from jax.extend.core import Var

from policyc.compiler.sites.equations import Origin
from policyc.compiler.sites.trace import FrozenWeight
from policyc.compiler.weights.provenance.graph import (
    CarriedSource,
    EitherSource,
    OtherSource,
    ParameterSource,
    Source,
    UnknownSource,
    is_broadcast,
    unknown_source,
)
from policyc.compiler.weights.provenance.integers import (
    Integers,
    known_integers,
    not_evaluated,
)
from policyc.jaxcore.jaxprs.reading import shape_of
from policyc.jaxcore.jaxprs.transform import Address


class Dependence(IntEnum):
    """The kinds of inputs that a variable depends on."""

    PARAMETERS = 0
    """Parameters, literals and loop counters."""
    CONSTANTS = 1
    """Also arrays that the loss closes over: tables, masks, or the tokens of a batch."""
    WEIGHT_PRODUCTS = 2
    """Products of parameters alone, such as `a @ b` of a factorized weight."""
    DATA = 3
    """Other inputs of the loss, or other products."""


class VarInfo(NamedTuple):
    """Facts about a variable. Every equation needs one, and a named tuple is created faster than a dataclass."""

    source: Source | None = None
    """How it is laid out from parameters; None if it is not."""
    is_modified: bool = False
    """Whether it is a parameter plus or times something else: a merged adapter, a mask, a normalized weight."""
    is_active: bool = False
    """Whether a gradient flows through it."""
    integers: Integers | None = None
    """Its value, if it is an integer that is known in each iteration."""
    is_lookup: bool = False
    """Whether it is computed from a parameter and constants that may as well be data, such as the tokens of a batch.

    It counts as a weight only if it multiplies an activation.
    """
    depends_on: Dependence = Dependence.DATA
    reference: Address | None = None
    """If it is a reference: the address of the equation that created it."""
    is_one_hot: bool = False
    is_iota: bool = False
    origin: Origin | None = None
    """How to compute it from one input of the loss, if that costs no more outside of the loss than inside."""
    projections: frozenset[Source] = frozenset()
    """The weights of the last products before it."""

    @property
    def is_fixed(self) -> bool:
        return self.depends_on is Dependence.PARAMETERS

    @property
    def is_constant(self) -> bool:
        return self.depends_on <= Dependence.CONSTANTS


def join_dependence(infos: Iterable[VarInfo]) -> Dependence:
    found = [i.depends_on for i in infos]  # not a set: hashing enums is slow
    if len(found) == 1:
        return found[0]
    if Dependence.CONSTANTS in found and Dependence.WEIGHT_PRODUCTS in found:
        return Dependence.DATA  # constants may be data
    return max(found, default=Dependence.PARAMETERS)


UNKNOWN = VarInfo()

MANY_PROJECTIONS = frozenset({UnknownSource(shape=(), operands=(), reason="it comes from many weights")})
_CARRIED = "the loop around it carries it, and changes it in every iteration"
_FILLED = "a loop carries it, and fills it one layer at a time"
_PART = "NumPy takes a part of it, and JAX does not see which"
_SAME_ARRAY = "one array is in all these places"
_OF_COND = "its index is the result of a 'cond', which policyc does not evaluate"
MOST_PROJECTIONS = 16  # a residual stream depends on all previous layers; attention on a few projections


def join_projections(infos: Iterable[VarInfo]) -> frozenset[Source]:
    found = [i.projections for i in infos if i.projections]
    if not found:
        return frozenset()
    joined = found[0] if len(found) == 1 else frozenset[Source]().union(*found)
    is_unknown = len(joined) > MOST_PROJECTIONS or not joined.isdisjoint(MANY_PROJECTIONS)
    return MANY_PROJECTIONS if is_unknown else joined


def frozen_info(var: Var, weight: FrozenWeight) -> VarInfo:
    wholes = [ParameterSource(shape=weight.shape, path=path, is_frozen=True) for path in weight.paths]
    source: Source = wholes[0]
    if weight.is_part or len(wholes) > 1:
        source = unknown_source(shape_of(var), wholes, _PART if weight.is_part else _SAME_ARRAY)
    return VarInfo(source=source, depends_on=Dependence.PARAMETERS)


def join_branches(values: Sequence[VarInfo], index: Integers | None) -> VarInfo:
    """The joined info of the branches of a `cond`.

    It is a weight if every branch returns a weight or a constant, and active if any branch is. `index` is the number of
    the branch, if known.
    """
    sources = [v.source for v in values]
    whole = next((s for s in sources if s is not None and not is_broadcast(s)), None)
    if whole is not None and len(whole.shape) > 1:
        pairs = zip(sources, values, strict=True)
        sources = [OtherSource(shape=whole.shape) if s is None and v.is_fixed else s for s, v in pairs]
    known = [s for s in sources if s is not None]
    return VarInfo(
        source=either(known, known_integers(index)) if len(known) == len(values) else None,
        is_lookup=any(v.is_lookup for v in values),
        depends_on=join_dependence(values),
        integers=not_evaluated(_OF_COND) if index is not None and all(v.integers for v in values) else None,
        is_modified=any(v.is_modified for v in values),
        is_active=any(v.is_active for v in values),
        projections=join_projections(values),
    )


def carry_info(value: VarInfo, integers: Integers | None, carried: CarriedSource) -> VarInfo:
    """The info of a carry that a loop changes, given its initial value. `integers` is its value if it is a counter."""
    source = value.source
    if source is not None:
        source = None if is_broadcast(source) else unknown_source(source.shape, [source], _CARRIED)
    return VarInfo(
        depends_on=value.depends_on,
        source=source,
        is_lookup=value.is_lookup and source is not None,
        is_modified=source is not None,
        is_active=value.is_active,
        integers=integers,
        projections=frozenset({carried}),
    )


def widen_carry(carry: VarInfo, result: VarInfo) -> VarInfo:
    """The info of a carry after one more iteration.

    It is a weight if every iteration returns one, and its initial value is one or a constant (a buffer that is filled).
    """
    source, given, depends_on = carry.source, result.source, join_dependence((carry, result))
    is_constant = depends_on <= Dependence.CONSTANTS
    may_fill = given is not None and is_constant and len(given.shape) > 1 and not is_broadcast(given)
    if isinstance(source, UnknownSource):
        holds_data = source.reason == _FILLED and not is_constant
        source = None if given is None or holds_data else _widen(source, given, source.reason)
    elif source is None and given is not None and may_fill:
        source = _widen(None, given, _FILLED)
    is_filled = isinstance(source, UnknownSource) and source.reason == _FILLED
    of_constants = is_filled and depends_on is not Dependence.PARAMETERS
    return carry._replace(
        source=source,
        is_modified=carry.is_modified or isinstance(source, UnknownSource),
        is_lookup=source is not None and (carry.is_lookup or result.is_lookup or of_constants),
        depends_on=depends_on,
        is_active=carry.is_active or result.is_active,
    )


def _widen(carried: UnknownSource | None, given: Source, reason: str) -> UnknownSource:
    """The source of a carry that holds either its previous value or the result of an iteration."""
    wider = unknown_source(given.shape, [given] if carried is None else [carried, given], reason)
    return carried if carried is not None and carried.operands == wider.operands else wider


def either(sources: Sequence[Source], index: Integers | None = None) -> Source:
    same = all(s is sources[0] for s in sources)
    return sources[0] if same else EitherSource(shape=sources[0].shape, operands=tuple(sources), index=index)
