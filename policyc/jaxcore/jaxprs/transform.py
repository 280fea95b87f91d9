"""The one transformation of jaxprs: replaces equations at any depth, and passes additional inputs down to them.

A subclass of `Transform` decides what replaces an equation. How containers are entered is defined in `containers`.
Equations that do not change, and contain no equation that changes, stay the same objects.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from jax.core import AbstractValue
from jax.extend.core import JaxprEqn, Var

from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.containers import SCAN, Container, IterationRange, NewBody, container_of
from policyc.jaxcore.jaxprs.reading import AnyJaxpr, AxisEnv

Address = tuple[int, ...]
"""The path to an equation or jaxpr: the number of an equation, of a jaxpr inside it, of an equation in that, ..."""


class Position(NamedTuple):
    """The position of an equation or of a jaxpr: its address, and what is fixed around it.

    For each enclosing scan that may be split, `iterations` has one iteration that represents its range. A named tuple
    rather than a dataclass, because it is faster to make, and each equation has one.
    """

    address: Address = ()
    iterations: Mapping[Address, int] = MappingProxyType({})
    axis_env: AxisEnv = AxisEnv()

    def enter(self, number: int) -> Position:
        return Position((*self.address, number), self.iterations, self.axis_env)

    def fix(self, iteration: int) -> Position:
        """The same position with the scan at its address in this iteration."""
        return self._replace(iterations={**self.iterations, self.address: iteration})


OUTERMOST = Position()


@dataclass(frozen=True, slots=True)
class ExtraInput:
    """Arrays that a replacement needs from outside the jaxpr. `address` is its equation, seen from that jaxpr.

    `ranges` has the iterations of each scan in between that slices the arrays, outermost first.
    """

    address: Address
    content: Any
    avals: tuple[AbstractValue, ...]
    ranges: tuple[IterationRange, ...] = ()

    def relative_to(self, outer: Address) -> ExtraInput:
        """The same input, seen from the jaxpr at `outer` instead of from the outermost one."""
        return replace(self, address=self.address[len(outer) :])

    def under(self, outer: Address) -> ExtraInput:
        """The inverse of `relative_to`."""
        return replace(self, address=(*outer, *self.address))

    def stack(self, iterations: IterationRange) -> ExtraInput:
        """The same input outside a scan that slices it."""
        avals = tuple(jaxprs.stacked_aval(iterations.size, a) for a in self.avals)
        return replace(self, avals=avals, ranges=(iterations, *self.ranges))


@dataclass(frozen=True, slots=True)
class BoundInput:
    """An additional input, and the variables that stand for its arrays where it is used."""

    input: ExtraInput
    variables: tuple[Var, ...]

    @classmethod
    def new(cls, extra: ExtraInput) -> BoundInput:
        return cls(extra, tuple(jaxprs.new_var(a) for a in extra.avals))


@dataclass(frozen=True, slots=True)
class TransformedBody:
    """A transformed jaxpr inside a container: its number there, and its iterations if the container is a scan."""

    number: int
    transformed: TransformedJaxpr
    iterations: IterationRange | None = None


class Replacement(NamedTuple):
    """What replaces one equation. A named tuple for the same reason as `Position`.

    Attributes:
      eqns: the new equations. An equation that does not change is replaced by itself.
      inputs: the additional inputs that they use.
      bodies: for a container that is entered, one for each of its jaxprs; for a scan, one for each piece, in the order
        in which the pieces run.
      added: how many of the first `eqns` compute a value that several equations of the jaxpr share.
      readers: the numbers of these sharing equations in the jaxpr.
    """

    eqns: tuple[JaxprEqn, ...]
    inputs: tuple[BoundInput, ...] = ()
    bodies: tuple[TransformedBody, ...] = ()
    added: int = 0
    readers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TransformedJaxpr:
    """A jaxpr, the inputs appended to those of the original, and the replacement of each original equation.

    There are no replacements if nothing changed.
    """

    jaxpr: Any
    inputs: tuple[ExtraInput, ...] = ()
    replacements: tuple[Replacement, ...] = ()


_transformed: WeakKeyDictionary[Any, dict[Hashable, TransformedJaxpr]] = WeakKeyDictionary()
"""Transformed jaxprs by original and key. A jaxpr that is called from several places stays one jaxpr if the results are
equal. Otherwise XLA would compile it once per call, and a step outside `jit` would compile its loops every time."""


class Transform(ABC):
    """Replaces equations of a jaxpr and of the jaxprs inside it."""

    # ---- what a subclass decides

    @abstractmethod
    def key(self, position: Position) -> Hashable | None:
        """Everything that determines how the equations below a position change; None if none of them does."""

    @abstractmethod
    def replace_equation(self, eqn: JaxprEqn, position: Position, shared: Any) -> Replacement | None:
        """The replacement of an equation; None if it is not to be replaced. `shared`: its entry in `share`, if any."""

    def share(self, position: Position) -> Mapping[Address, Any]:
        """Data that equations of the jaxpr at a position share, by the address of each of these equations."""
        del position
        return {}

    @abstractmethod
    def is_stack(self, address: Address) -> bool:
        """Whether the iterations of the scan at this address may differ."""

    @abstractmethod
    def slices(self, scan: Address, extra: ExtraInput) -> bool:
        """Whether a scan slices this input; otherwise it is the same in every iteration."""

    def change_container(self, eqn: JaxprEqn) -> JaxprEqn:
        """Adapts the parameters of a container whose jaxprs were transformed."""
        return eqn

    # ---- the transformation

    def transform(self, jaxpr: AnyJaxpr, position: Position = OUTERMOST) -> TransformedJaxpr:
        key = self.key(position)
        if key is None:
            return TransformedJaxpr(jaxpr)
        by_key = _transformed.setdefault(jaxpr, {})
        result = by_key.get(key)
        if result is None:
            result = by_key[key] = self._transform_equations(jaxpr, position)
        inputs = tuple(i.under(position.address) for i in result.inputs)
        return replace(result, inputs=inputs)

    def _transform_equations(self, jaxpr: AnyJaxpr, position: Position) -> TransformedJaxpr:
        shared = self.share(position)
        replacements: list[Replacement] = []
        for number, eqn in enumerate(jaxprs.equations(jaxpr)):
            here = position.enter(number)
            replacements.append(self.transform_equation(eqn, here, shared.get(here.address)))
        eqns = [eqn for replacement in replacements for eqn in replacement.eqns]
        inputs = [i for replacement in replacements for i in replacement.inputs]
        variables = [v for i in inputs for v in i.variables]
        return TransformedJaxpr(
            jaxprs.replace_equations(jaxpr, eqns, variables),
            tuple(i.input.relative_to(position.address) for i in inputs),
            tuple(replacements),
        )

    def transform_equation(self, eqn: JaxprEqn, position: Position, shared: Any = None) -> Replacement:
        """The replacement of an equation; the equation itself if nothing changes."""
        replacement = self.replace_equation(eqn, position, shared)
        if replacement is not None:
            return replacement
        if self.key(position) is None:
            return Replacement((eqn,))
        container = container_of(eqn)
        assert container is not None, f"{eqn.primitive} holds equations to replace and is not entered"
        if container is SCAN:
            return self._transform_scan(eqn, position)
        return self._transform_container(eqn, container, position)

    def _transform_container(self, eqn: JaxprEqn, container: Container, position: Position) -> Replacement:
        if self.is_stack(position.address):  # a shard_map over layers: one program for all devices
            position = position.fix(0)
        if jaxprs.primitive_name(eqn) == "shard_map":
            position = position._replace(axis_env=position.axis_env.enter_shard_map(eqn))
        inputs: list[BoundInput] = []
        new_bodies: list[NewBody] = []
        bodies: list[TransformedBody] = []
        for number, sub in enumerate(jaxprs.sub_jaxprs(eqn)):
            transformed = self.transform(sub.jaxpr, position.enter(number))
            bodies.append(TransformedBody(number, transformed))
            bound = [BoundInput.new(i) for i in transformed.inputs]
            operands = tuple(v for i in bound for v in i.variables)
            new_bodies.append(NewBody(sub, transformed.jaxpr, operands))
            inputs += bound
        rebuilt = self.change_container(container.rebuild(eqn, new_bodies))
        return Replacement((rebuilt,), tuple(inputs), tuple(bodies))

    def _transform_scan(self, eqn: JaxprEqn, position: Position) -> Replacement:
        """Replaces a scan with one scan for each range of iterations that change in the same way."""
        (sub,) = jaxprs.sub_jaxprs(eqn)
        pieces: list[tuple[IterationRange, NewBody]] = []
        bodies: list[TransformedBody] = []
        inputs: list[BoundInput] = []
        is_stack = self.is_stack(position.address)
        for piece in self.iteration_ranges(eqn, position):
            inside = (position.fix(piece.start) if is_stack else position).enter(0)
            transformed = self.transform(sub.jaxpr, inside)
            sliced = [self.slices(position.address, i) for i in transformed.inputs]
            bound = [
                BoundInput.new(i.stack(piece) if is_sliced else i)
                for i, is_sliced in zip(transformed.inputs, sliced, strict=True)
            ]
            flags = tuple(s for s, i in zip(sliced, bound, strict=True) for _ in i.variables)
            operands = tuple(v for i in bound for v in i.variables)
            pieces.append((piece, NewBody(sub, transformed.jaxpr, operands, flags)))
            bodies.append(TransformedBody(0, transformed, piece))
            inputs += bound
        if len(pieces) == 1:
            ((_, body),) = pieces
            return Replacement((SCAN.rebuild(eqn, [body]),), tuple(inputs), tuple(bodies))
        atoms = [*eqn.invars, *(v for _, body in pieces for v in body.operands)]
        split = jaxprs.trace_at(SCAN.split(eqn, pieces), [a.aval for a in atoms], eqn, position.axis_env)
        order = bodies[::-1] if eqn.params["reverse"] else bodies
        return Replacement(tuple(jaxprs.inline(split, atoms, eqn)), tuple(inputs), tuple(order))

    def iteration_ranges(self, scan: JaxprEqn, position: Position) -> list[IterationRange]:
        """The iterations of a scan, grouped into ranges that change in the same way."""
        length = scan.params["length"]
        if not self.is_stack(position.address):
            return [IterationRange(0, length)]

        def key(iteration: int) -> Hashable | None:
            return self.key(position.fix(iteration).enter(0))

        groups = (list(group) for _, group in itertools.groupby(range(length), key=key))
        return [IterationRange(group[0], group[-1] + 1) for group in groups]
