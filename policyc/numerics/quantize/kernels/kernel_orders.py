"""The orders in which the NVFP4 kernels quantize an operand, and the scalars of an order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from policyc.numerics.quantize.kernels.kernel_tiles import BLOCK
from policyc.numerics.quantize.kernels.words import Word
from policyc.numerics.quantize.reference.blocks import Request, bound_of

WORDS = BLOCK // 2
"""The 32-bit words of a block of features."""
SCALARS = 5
"""The number of scalar words per order, see `kernels.OrderScales`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What kernels depend on in a request: a matrix is quantized along its features, along its tokens, or in tiles of
    16 x 16 (`square`).

    Only an order along tokens can rotate. If `decoded`, the kernel writes values in place of codes and scales, for
    tiles always. For `bound` and `operand`, see `blocks.bound_of` and `blocks.Request`.
    """

    along_tokens: bool
    square: bool = False
    rotates: bool = False
    stochastic: bool = False
    bound: float
    decoded: bool = False
    operand: str = ""

    @classmethod
    def from_request(cls, request: Request) -> Order:
        treatment = request.treatment
        return cls(
            along_tokens=request.axes.axis == -2 and not treatment.tile2d,
            square=treatment.tile2d,
            rotates=bool(treatment.rht),
            stochastic=treatment.rounding == "sr",
            bound=bound_of(treatment),
            decoded=request.decoded,
            operand=request.operand,
        )

    @property
    def results(self) -> int:
        """How many arrays the kernel writes."""
        return 1 if self.decoded else 2

    @property
    def is_staged(self) -> bool:
        """Whether the kernel collects codes in shared memory."""
        return self.along_tokens and not self.decoded


class Scalars(NamedTuple):
    """The words that all threads need to quantize blocks of an operand in one order.

    Attributes:
      lift: the lift in fp32.
      unit: the lift times 2**-126.
      enc, sixth, dec: the encoding scale of the tensor, a sixth of it, and the decoding scale.
      nan: the bits of NaN if the operand has a NaN or an infinity, else zero.
      key, scaled_key: the key of stochastic rounding, see `random.mix_scaled`.
    """

    lift: Word
    unit: Word
    enc: Word
    sixth: Word
    dec: Word
    nan: Word
    key: Word
    scaled_key: Word
