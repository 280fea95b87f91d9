"""The loss that sites are equations of: what the rewrite needs besides the sites."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.reading import AxisEnv
from policyc.jaxcore.jaxprs.transform import Address


@dataclass(frozen=True, slots=True)
class Origin:
    """How an operand derives from one input of the loss: through equations, and scans (as addresses) that slice it."""

    input: int
    steps: tuple[JaxprEqn | Address, ...] = ()

    def then(self, step: JaxprEqn | Address) -> Origin:
        return Origin(self.input, (*self.steps, step))

    @property
    def scans(self) -> tuple[Address, ...]:
        return tuple(s for s in self.steps if isinstance(s, tuple))


@dataclass(frozen=True, slots=True)
class SiteEquation:
    """The equation of a site, and the mapped axes around it."""

    eqn: JaxprEqn
    axis_env: AxisEnv = AxisEnv()
    derivation: Origin | None = None
    """How the weight derives from an input of the loss; None if unknown."""
    is_hoistable: bool = False
    """Whether the weight can be quantized outside the loss."""

    @property
    def origin(self) -> Origin | None:
        """The derivation of a weight that can be quantized outside the loss."""
        return self.derivation if self.is_hoistable else None


@dataclass(frozen=True)
class Loss:
    """The jaxpr of a loss, and the equations of its sites by address."""

    jaxpr: ClosedJaxpr
    equations: Mapping[Address, SiteEquation]

    @cached_property
    def _definitions(self) -> dict[Var, JaxprEqn]:
        return {var: eqn for eqn in jaxprs.all_equations(self.jaxpr) for var in eqn.outvars}

    def placed(self, var: Var) -> tuple[Hashable, ...]:
        """A variable, and the sharding constraints between it and `var`: equal for the same array in the same place.

        Frameworks constrain an array once for each of its readers.
        """
        eqn = self._definitions.get(var)
        source = eqn.invars[0] if eqn and jaxprs.primitive_name(eqn) == "sharding_constraint" else None
        if eqn is None or not isinstance(source, Var):
            return (var,)
        return *self.placed(source), eqn.params["sharding"], jaxprs.parameters_text(eqn)

    def multiplied(self, address: Address, operand: int) -> Var | None:
        """The variable that a site multiplies, before casts and copies of it in the same jaxpr; None for a literal."""
        atom = self.equations[address].eqn.invars[operand]
        while isinstance(atom, Var):
            eqn = self._definitions.get(atom)
            if eqn is None or jaxprs.primitive_name(eqn) not in _COPIES:
                return atom
            atom = eqn.invars[0]
        return None


_COPIES = frozenset({"convert_element_type", "copy", "name", "pcast", "pvary", "reduce_precision", "reshape", "reshard",
                     "sharding_constraint"})  # fmt: skip
"""Primitives whose result is their operand in another type, shape or place. Frameworks cast an activation per layer."""
