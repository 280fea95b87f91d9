"""Flattens quantized operands into the arrays of a jaxpr equation, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from policyc.language.formats import FORMATS
from policyc.numerics.quantize.reference.layout import Layout, Operand, Quantized


def unflatten_quantized(layout: Layout, arrays: Sequence[jax.Array]) -> Quantized:
    """Rebuilds an operand from its codes, scales, amax, transposed codes and transposed scales, where present."""
    parts = iter(arrays)
    return Quantized(
        codes=next(parts),
        scales=next(parts) if layout.has_scales else None,
        amax=next(parts) if FORMATS[layout.format].tensor_scale else None,
        transposed_codes=next(parts, None),
        transposed_scales=next(parts, None),
        layout=layout,
    )


@dataclass(frozen=True, slots=True)
class OperandLayout:
    """The equation parameters `lhs` and `rhs` of a product: the layout of the operand, or None for a plain array.

    Prints as the name of the format, with `sums=fast` if that is set.
    """

    layout: Layout | None

    def __repr__(self) -> str:
        if self.layout is None:
            return "plain"
        return self.layout.format + (" sums=fast" if self.layout.fast_sums else "")

    @property
    def array_count(self) -> int:
        """The number of arrays that the equation takes for this operand."""
        if self.layout is None:
            return 1
        return 1 + self.layout.has_scales + FORMATS[self.layout.format].tensor_scale

    def unflatten(self, arrays: Sequence[jax.Array]) -> Operand:
        return arrays[0] if self.layout is None else unflatten_quantized(self.layout, arrays)

    def dim_size(self, codes: Any, axis: int) -> int:
        """The size of a dimension of the operand, without the packing and padding of its codes."""
        layout = self.layout
        if layout is not None and axis - codes.ndim == layout.axis:
            return layout.size
        if layout is not None and axis - codes.ndim == layout.tile_axis:
            return layout.tile_size
        return int(codes.shape[axis])


def flatten_operand(operand: Operand) -> tuple[OperandLayout, list[jax.Array]]:
    """The layout of an operand, and its arrays."""
    if isinstance(operand, Quantized):
        arrays = (operand.codes, operand.scales, operand.amax)
        return OperandLayout(operand.layout), [a for a in arrays if a is not None]
    return OperandLayout(None), [operand]


def unflatten_operands(
    arrays: Sequence[jax.Array], lhs: OperandLayout, rhs: OperandLayout
) -> tuple[Operand, Operand]:
    """Both operands of a product, from the arrays of lhs followed by those of rhs."""
    return lhs.unflatten(arrays[: lhs.array_count]), rhs.unflatten(arrays[lhs.array_count :])
