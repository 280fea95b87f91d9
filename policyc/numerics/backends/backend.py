"""What a backend is: the questions that the rest of the package asks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from policyc.language.recipes import Gemm, Recipe, Role, Treatment

if TYPE_CHECKING:
    import jax

    from policyc.jaxcore.primitives.define_primitive import LoweringContext
    from policyc.numerics.dimensions import DimensionNumbers
    from policyc.numerics.quantize import Operand, Quantized, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmQuery:
    """A GEMM that a backend is asked to run: `batch` products of (m, k) and (n, k).

    `left` and `right` are the treatments of its operands, `types` their dtypes before treatment.
    """

    gemm: Gemm
    left: Treatment
    right: Treatment
    m: int
    n: int
    k: int
    batch: int = 1
    ragged: bool = False
    types: tuple[str, str] = ("bfloat16", "bfloat16")

    @property
    def format(self) -> str:
        return self.left.format


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a GEMM cannot run in a certain way, and what would help."""

    reason: str
    remedy: str


class Backend(Protocol):
    """A backend. Where a question has an answer here, it is that of most backends.

    Every backend reads and writes `Quantized`, so one backend can multiply what another has quantized.

    Attributes:
      calls: the custom call that multiplies natively, by format. The emulation has none.
      runs_anywhere: whether it also runs GEMMs of formats that the machine does not multiply.
      only_ragged: whether it runs GEMMs over ragged groups, and no others. It quantizes no operands then.
      fallback: the backend that runs what this one cannot.
      batched_by: the backend that runs its equations under a `vmap`, if `vmap` cannot batch them.
      needs_devices: whether lowering needs to know the devices, also where there are no GPUs.
      multiplies_values: whether its GEMM multiplies the bfloat16 values of codes. Its quantizers can write these.
      pairs_rows: whether one quantizer writes FP8 with a scale per row for both GEMMs that read an operand.
      has_own_stream: whether its stochastic rounding uses other random bits than the emulation.
      quantizer_slowdown: the time of its own quantizers, as a multiple of the time to copy as many bytes; None if it
        uses those of XLA and policyc.
      scales_results: whether a kernel after the GEMM applies outer scales of blocks and rows.
      moves_groups: whether groups of rows are copied to where its kernels read them, and results back.
      gathers_tile_scales: whether the scales of 2D tiles are gathered once a step, and not for each GEMM.
    """

    calls: Mapping[str, str] = MappingProxyType({})
    runs_anywhere: bool = False
    only_ragged: bool = False
    fallback: str = "emulate"
    batched_by: str = ""
    needs_devices: bool = False
    multiplies_values: bool = False
    pairs_rows: bool = False
    has_own_stream: bool = False
    quantizer_slowdown: float | None = None
    scales_results: bool = False
    moves_groups: bool = False
    gathers_tile_scales: bool = False

    @property
    def emulates(self) -> bool:
        return not self.calls

    # ---- what it can run, and what it prefers

    def obstacle(self, query: GemmQuery) -> Obstacle | None:
        """Why the backend cannot run this GEMM on any machine; None if it can."""
        del query
        return None

    def find_missing_library(self) -> str:
        """Why the backend cannot run here at all, with the command that installs what it needs; empty if it can."""
        return ""

    def is_candidate(self, query: GemmQuery) -> bool:
        """Whether `auto` tries the backend for this GEMM, if it is installed."""
        return query.ragged == self.only_ragged

    def find_doubt(self, query: GemmQuery) -> str:
        """Why a native kernel may be missing; empty if one is known to exist."""
        del query
        return ""

    def quantizer_obstacle(self, query: GemmQuery) -> Obstacle | None:
        """Why no kernel quantizes the operands, if one would with other sizes, options or dtypes."""
        del query
        return None

    def writes_both_orders(self, recipe: Recipe, role: Role, *, splits: bool) -> bool:
        """Whether one quantizer writes the codes of an operand in the orders of both GEMMs that read it.

        `splits` says whether one of them contracts the last dimensions, and the other one all before them.
        """
        del recipe, role, splits
        return False

    def count_reads(self, treatments: Sequence[Treatment]) -> int:
        """Number of times the GPU kernels read an operand to quantize it with these treatments.

        Finding the maximum is free where XLA fuses it into the producer of the operand. Maxima after a rotation and
        maxima for refined scales cost a read. Traffic of a rotation by XLA is not counted.
        """

    # ---- what it computes

    def quantize(
        self, x: jax.Array, requests: Sequence[Request], context: LoweringContext
    ) -> list[Quantized]:
        """Quantizes an operand for each GEMM that reads it, with fewer reads than one by one if possible.

        If `context.is_stack`, there is one request, and each layer of the stack x is quantized with it.
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
