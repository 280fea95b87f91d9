"""A GPU kernel (Pallas, Triton) that writes FP8 codes in both orders in one pass.

XLA cannot partition it, so it runs only in programs on one device. Pallas's Mosaic backend has no faster way to
transpose bytes yet, so this kernel stays on Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from policyc.language.recipes import Treatment
from policyc.numerics.quantize.reference.bits import (
    ELEMENTS,
    Element,
    abs_bits,
    encode_scaled,
    exact_div,
    from_bits,
    materialize,
)
from policyc.numerics.quantize.reference.blocks import Request, find_encoding_scale, lift_amax
from policyc.numerics.quantize.reference.fp8 import Encode
from policyc.numerics.quantize.reference.layout import Axes, Quantized, rotate_dims

_SQUARE, _WARPS = 128, 8
"""The side of the square that one kernel instance reads, and the number of warps of an instance."""


class Scaled(NamedTuple):
    """How to encode under a scale for each row, or for each column.

    Attributes:
      encode: encodes fp32 values, given the parts of the two arrays that belong to them.
      amax: the bits of the largest magnitude of each row or column.
      enc: the encoding scale of each row or column.
    """

    encode: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    amax: jax.Array
    enc: jax.Array


def fits(x: jax.Array, treatment: Treatment, axes: Axes) -> bool:
    """Whether the kernel can quantize this operand."""
    is_plain = treatment.format == "fp8" and treatment.outer == "tensor" and not axes.batch
    return is_plain and bool(axes.second_order) and _has_squares(x, axes.second_order)


def fits_rows(x: jax.Array, requests: Sequence[Request]) -> bool:
    """Whether the kernel can quantize this operand for two GEMMs with a scale for each row that they contract.

    One GEMM contracts the last axis, and the other all axes before it.
    """
    is_per_row = all(r.treatment.format == "fp8" and r.treatment.outer == "row" for r in requests)
    if not is_per_row or any(r.axes.batch for r in requests):
        return False
    contracted = {tuple(sorted(r.axes.contract)) for r in requests}
    return contracted == {(-1,), tuple(range(-x.ndim, -1))} and _has_squares(x, 1)


def _has_squares(x: jax.Array, columns: int) -> bool:
    if x.dtype != jnp.bfloat16 or x.ndim <= columns:
        return False
    return prod(x.shape[:-columns]) % _SQUARE == 0 and prod(x.shape[-columns:]) % _SQUARE == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Kernel:
    """The kernel. `interpret` runs it without a GPU, slowly."""

    interpret: bool = False

    def write_orders(
        self, x: jax.Array, amax: jax.Array, axes: Axes, encode: Encode
    ) -> tuple[jax.Array, ...]:
        """The codes, and the codes with the last axes first, or only those. `amax` has the bits of one number."""
        scalar = pl.BlockSpec((1, 1), lambda *_: (0, 0))
        body = partial(_second if axes.only_second else _both, encode=encode)
        return self._run(body, x, [(amax.reshape(1, 1), scalar)], axes)

    def rows_and_columns(self, x: jax.Array, rows: Scaled, columns: Scaled) -> tuple[jax.Array, jax.Array]:
        """The codes under a scale for each row of the last axis; those under one for each column, last axis first."""
        row = pl.BlockSpec((_SQUARE, 1), lambda i, _: (i, 0))
        column = pl.BlockSpec((1, _SQUARE), lambda _, j: (0, j))
        scales = [(a.reshape(-1, 1), row) for a in (rows.amax, rows.enc)]
        scales += [(a.reshape(1, -1), column) for a in (columns.amax, columns.enc)]
        body = partial(_rows_and_columns, encode_row=rows.encode, encode_column=columns.encode)
        codes, transposed = self._run(body, x, scales, Axes(second_order=1))
        return codes, transposed

    def _run(
        self,
        body: Callable[..., None],
        x: jax.Array,
        scales: Sequence[tuple[jax.Array, pl.BlockSpec]],
        axes: Axes,
    ) -> tuple[jax.Array, ...]:
        columns = prod(x.shape[-axes.second_order :])
        flat = x.reshape(-1, columns)
        rows = flat.shape[0]
        square = pl.BlockSpec((_SQUARE, _SQUARE), lambda i, j: (i, j))
        transposed_square = pl.BlockSpec((_SQUARE, _SQUARE), lambda i, j: (j, i))
        orders = [
            (x.shape, (rows, columns), square),
            (rotate_dims(x.shape, axes.second_order), (columns, rows), transposed_square),
        ][axes.only_second :]
        arrays = pl.pallas_call(
            body,
            [jax.ShapeDtypeStruct(shape, jnp.uint8) for _, shape, _ in orders],
            grid=(rows // _SQUARE, columns // _SQUARE),
            in_specs=[square, *(spec for _, spec in scales)],
            out_specs=[spec for _, _, spec in orders],
            **_compiler_options(self.interpret),
        )(flat, *(array for array, _ in scales))
        return tuple(array.reshape(shape) for array, (shape, _, _) in zip(arrays, orders, strict=True))


def _compiler_options(interpret: bool) -> dict[str, Any]:
    if interpret:
        return {"interpret": True}
    from jax.experimental.pallas import triton  # cannot be imported without a GPU build of JAX

    return {"compiler_params": triton.CompilerParams(num_warps=_WARPS)}


def _both(x: Any, amax: Any, codes: Any, transposed: Any, *, encode: Encode) -> None:
    encoded = encode(x[...].astype(jnp.float32), amax[...])
    codes[...] = encoded
    transposed[...] = encoded.T


def _second(x: Any, amax: Any, transposed: Any, *, encode: Encode) -> None:
    transposed[...] = encode(x[...].astype(jnp.float32), amax[...]).T


def _rows_and_columns(
    x: Any,
    row_amax: Any,
    row_enc: Any,
    column_amax: Any,
    column_enc: Any,
    codes: Any,
    transposed: Any,
    *,
    encode_row: Callable[..., jax.Array],
    encode_column: Callable[..., jax.Array],
) -> None:
    values = x[...].astype(jnp.float32)
    codes[...] = encode_row(values, row_amax[...], row_enc[...])
    transposed[...] = encode_column(values, column_amax[...], column_enc[...]).T


# ---- a scale per row


def quantize_fp8_rows(x: jax.Array, requests: Sequence[Request], kernel: Fp8Kernel) -> list[Quantized]:
    """Quantizes for two GEMMs, with a scale for each row that they contract. Requires `fits_rows`."""
    x = materialize(x)
    bits = abs_bits(x)
    maxima = [bits.max(axis=r.axes.contract, keepdims=True) for r in requests]

    def scaled(index: int) -> Scaled:
        element, amax = ELEMENTS[requests[index].treatment.element], maxima[index]
        # Not in the kernel: many threads would repeat the exact division.
        enc, _ = find_encoding_scale(amax, element.top, exact_div)
        return Scaled(partial(_encode_rows_in_kernel, element=element), amax, enc)

    last, other = (0, 1) if requests[0].axes.contract == (-1,) else (1, 0)
    by_row, by_column = kernel.rows_and_columns(x, scaled(last), scaled(other))
    codes = {last: by_row, other: jnp.moveaxis(by_column, 0, -1)}
    return [
        Quantized(codes=codes[i], scales=None, amax=from_bits(maxima[i]), layout=r.layout(x.shape)[0])
        for i, r in enumerate(requests)
    ]


def _encode_rows_in_kernel(values: jax.Array, amax: jax.Array, enc: jax.Array, element: Element) -> jax.Array:
    _, lift = lift_amax(amax)
    return encode_scaled(values, lift, enc, amax, element)
