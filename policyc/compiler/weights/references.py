"""Contents of references (`jax.new_ref`): everything that the loss writes to them, in any place and order.

A loop may read in one iteration what it wrote in another, so the analysis is repeated until no write adds anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jax.extend.core import JaxprEqn

from policyc.compiler.weights.propagation import propagate_equation
from policyc.compiler.weights.provenance.graph import (
    ParameterSource,
    UnknownSource,
    is_broadcast,
    parameters_of,
)
from policyc.compiler.weights.var_info import MANY_PROJECTIONS, Dependence, VarInfo
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.reading import shape_of
from policyc.jaxcore.jaxprs.transform import Address

_READ = "it is read from a reference, and policyc does not follow writes to references"
_WRITES = frozenset({"swap", "addupdate"})
_CREATES = frozenset({"new_ref", "empty_ref"})
REFERENCE_PRIMITIVES = frozenset({"get", "freeze", *_WRITES, *_CREATES})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    """All values written to a reference, joined. A value that is neither a weight nor fixed makes it a lookup."""

    parameters: frozenset[ParameterSource] = frozenset()
    depends_on: Dependence = Dependence.PARAMETERS
    is_lookup: bool = False
    is_active: bool = False

    def add(self, value: VarInfo) -> _Contents:
        is_weight = value.source is not None and not is_broadcast(value.source)
        parameters = frozenset(parameters_of(value.source)) if value.source is not None and is_weight else ()
        return replace(
            self,
            parameters=self.parameters.union(parameters),
            depends_on=max(self.depends_on, value.depends_on),
            is_lookup=self.is_lookup or value.is_lookup or not (is_weight or value.is_fixed),
            is_active=self.is_active or value.is_active,
        )

    def read(self, shape: tuple[int, ...]) -> VarInfo:
        in_order = sorted(self.parameters, key=lambda p: ".".join(map(str, p.path)))
        source = UnknownSource(shape=shape, operands=tuple(in_order), reason=_READ) if in_order else None
        return VarInfo(
            source=source,
            is_modified=source is not None,
            is_lookup=self.is_lookup and source is not None,
            is_active=self.is_active,
            depends_on=self.depends_on,
            projections=MANY_PROJECTIONS,
        )


class References:
    """The contents of the references of a loss, by the address of the equation that creates each."""

    def __init__(self) -> None:
        self._contents: dict[Address, _Contents] = {}
        self.has_grown: bool = False
        """Whether a write added anything new."""

    def propagate(self, eqn: JaxprEqn, infos: Sequence[VarInfo], address: Address) -> list[VarInfo]:
        """The infos of the results of an equation that creates, reads or writes a reference."""
        name = jaxprs.primitive_name(eqn)
        if name in _CREATES:
            self._write(address, infos)
            return [VarInfo(reference=address)]
        created = infos[0].reference
        if created is None:  # a reference that the loss does not create, such as one of a kernel
            return propagate_equation(eqn, list(infos))
        if name in _WRITES:
            self._write(created, infos[1:2])
        return [self._contents[created].read(shape_of(v)) for v in eqn.outvars]

    def _write(self, address: Address, values: Sequence[VarInfo]) -> None:
        before = self._contents.setdefault(address, _Contents())
        for value in values:
            self._contents[address] = self._contents[address].add(value)
        self.has_grown |= self._contents[address] != before
