"""The loss that sites are equations of: what the rewrite needs besides the sites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jax.extend.core import ClosedJaxpr, JaxprEqn

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
    origin: Origin | None = None
    """How the weight derives from an input of the loss; None if unknown."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The jaxpr of a loss, and the equations of its sites by address."""

    jaxpr: ClosedJaxpr
    equations: Mapping[Address, SiteEquation]
