"""The backends that run quantized GEMMs: one module each, imported on first use.

To add a backend, write a module that implements `Backend` and add a row to `MODULES`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

    import jax

    from policyc.jaxcore.primitives.define_primitive import LoweringContext
    from policyc.language.recipes import Treatment
    from policyc.numerics.backends.choice import GemmQuery, Obstacle
    from policyc.numerics.products import DimensionNumbers
    from policyc.numerics.quantize import Axes, Key, Operand, Quantized
    from policyc.numerics.quantize.orders import OrderRequest

MODULES: dict[str, str] = {
    "emulate": "policyc.numerics.backends.emulate",
    "xla": "policyc.numerics.backends.xla",
    "te": "policyc.numerics.backends.te",
    "cudnn": "policyc.numerics.backends.cudnn",
}

BackendName = Literal["auto", "emulate", "xla", "te", "cudnn"]

NAMES = ("auto", *MODULES)
"""The values of `--backend`."""

PRICED: BackendName = "te"
"""The default backend of predictions: what a user of Blackwell would run, whatever is installed here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendTraits:
    """Static properties of a backend that the compiler depends on.

    Attributes:
      needs_devices: whether lowering needs to know the devices, also where there are no GPUs.
      can_batch: whether `vmap` can batch its calls.
      quantizes_stacks: whether quantizing the weights of all layers at once, with `quantize_stack`, takes fewer
        kernels.
      multiplies_values: whether its GEMM multiplies the bfloat16 values of codes. Its quantizers can write these.
    """

    needs_devices: bool
    can_batch: bool
    quantizes_stacks: bool
    multiplies_values: bool = False


class Backend(Protocol):
    """Interface of a backend module.

    Every backend reads and writes `Quantized`, so one backend can multiply what another has quantized.
    """

    TRAITS: BackendTraits

    def obstacle(self, query: GemmQuery) -> Obstacle | None:
        """Why the backend cannot run this GEMM on any machine; None if it can."""

    def find_missing_library(self) -> str:
        """Why the backend cannot run here at all, with the command that installs what it needs; empty if it can."""

    def quantize(
        self,
        x: jax.Array,
        treatment: Treatment,
        axes: Axes,
        key: Key | None,
        sign_key: Key | None,
        context: LoweringContext,
    ) -> Quantized:
        """Quantizes an operand. `key` drives stochastic rounding, `sign_key` the random signs of MS-EDEN."""

    def quantize_orders(
        self, x: jax.Array, requests: Sequence[OrderRequest], context: LoweringContext
    ) -> list[Quantized]:
        """Quantizes an operand for several GEMMs that contract different dimensions, with fewer reads if possible."""

    def quantize_stack(
        self, x: jax.Array, treatment: Treatment, axes: Axes, context: LoweringContext
    ) -> Quantized:
        """Quantizes each layer of a stack, without rotation or random numbers. Requires `quantizes_stacks`."""

    def count_reads(self, treatments: Sequence[Treatment]) -> int:
        """Number of times the GPU kernels read an operand to quantize it with these treatments.

        Finding the maximum is free where XLA fuses it into the producer of the operand. Maxima after a rotation and
        maxima for refined scales cost a read. Traffic of a rotation by XLA is not counted.
        """

    def gemm(
        self, lhs: Operand, rhs: Operand, dimensions: DimensionNumbers, out: Any, context: LoweringContext
    ) -> jax.Array:
        """The product of two operands, with dtype `out`. Only for GEMMs that `obstacle` accepts, and not ragged."""

    def ragged_gemm(
        self,
        lhs: Operand,
        rhs: Operand,
        sizes: jax.Array,
        contracting: bool,
        out: Any,
        context: LoweringContext,
    ) -> jax.Array:
        """Products of groups of rows, with dtype `out`. Only for ragged GEMMs that `obstacle` accepts.

        If `contracting`, the groups are contracted: (m, k), (m, n) -> (g, k, n). Otherwise (m, k), (g, k, n) -> (m, n).
        """


@cache
def load(name: str) -> Backend:
    """The module of a backend."""
    return cast("Backend", importlib.import_module(MODULES[name]))
