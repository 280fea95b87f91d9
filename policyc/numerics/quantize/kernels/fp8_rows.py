"""FP8 with a scale per row: the codes of an operand for both of its GEMMs, by one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from policyc.language.recipes import Treatment
from policyc.numerics.quantize.kernels.fp8_kernel import Fp8Kernel, Scaled
from policyc.numerics.quantize.reference.bits import (
    ELEMENTS,
    Element,
    abs_bits,
    encode_scaled,
    exact_div,
    from_bits,
    materialize,
)
from policyc.numerics.quantize.reference.blocks import find_encoding_scale, layout_of, lift_amax
from policyc.numerics.quantize.reference.layout import Axes, Quantized


def quantize_fp8_rows(
    x: jax.Array, treatments: Sequence[Treatment], axes: Sequence[Axes], kernel: Fp8Kernel
) -> list[Quantized]:
    """Quantizes for two GEMMs, with a scale for each row that they contract. Requires `fp8_kernel.fits_rows`."""
    x = materialize(x)
    bits = abs_bits(x)
    maxima = [bits.max(axis=a.contract, keepdims=True) for a in axes]

    def scaled(index: int) -> Scaled:
        element, amax = ELEMENTS[treatments[index].element], maxima[index]
        # Not in the kernel: many threads would repeat the exact division.
        enc, _ = find_encoding_scale(amax, element.top, exact_div)
        return Scaled(partial(_encode_rows_in_kernel, element=element), amax, enc)

    last, other = (0, 1) if axes[0].contract == (-1,) else (1, 0)
    by_row, by_column = kernel.rows_and_columns(x, scaled(last), scaled(other))
    codes = {last: by_row, other: jnp.moveaxis(by_column, 0, -1)}
    return [
        Quantized(
            codes=codes[i], scales=None, amax=from_bits(maxima[i]), layout=layout_of(x.shape, treatment, a)[0]
        )
        for i, (treatment, a) in enumerate(zip(treatments, axes, strict=True))
    ]


def _encode_rows_in_kernel(values: jax.Array, amax: jax.Array, enc: jax.Array, element: Element) -> jax.Array:
    _, lift = lift_amax(amax)
    return encode_scaled(values, lift, enc, amax, element)
