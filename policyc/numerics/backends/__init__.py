"""How a quantized GEMM runs: one module a backend, loaded when it is first used.

In: a backend's name. Out: the module. To add a backend, write its module as `Backend` says and add its row to
`MODULES`. The one trap: operands are `Quantized` whatever made them, so that one backend can multiply what another
one quantized.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    import jax

    from policyc.language.recipes import Treatment
    from policyc.numerics.backends.choice import GemmQuery, Obstacle
    from policyc.numerics.backends.emulate import Dims, Operand
    from policyc.numerics.quantize import Axes, Key, Quantized

MODULES: dict[str, str] = {
    "emulate": "policyc.numerics.backends.emulate",
    "xla": "policyc.numerics.backends.xla",
    "te": "policyc.numerics.backends.te",
}

NAMES = ("auto", *MODULES)
"""What `--backend` takes."""


class Backend(Protocol):
    """What a backend's module has. `platform` is JAX's word; `alone` says that the program has one device."""

    def obstacle(self, ask: GemmQuery) -> Obstacle | None:
        """What keeps the backend from running this product, on any machine; None where it can."""

    def missing(self) -> str:
        """What stands in the way of running at all here, and the command that helps; empty where nothing does."""

    def quantize(
        self, x: jax.Array, treatment: Treatment, axes: Axes, *,
        key: Key | None, signs: Key | None, platform: str, alone: bool,
    ) -> Quantized:  # fmt: skip
        """An operand, quantized."""

    def gemm(self, lhs: Operand, rhs: Operand, dimensions: Dims, out: Any, *, platform: str) -> jax.Array:
        """The product of two operands, of type `out`."""


@cache
def load(name: str) -> Backend:
    return cast("Backend", importlib.import_module(MODULES[name]))
