"""Elements under one outer scale, without block scales: FP8 (E4M3 or E5M2), and FP4 (E2M1).

FP4 is an ablation: no GPU multiplies it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from policyc.numerics.quantize.reference.bits import (
    ELEMENTS,
    Element,
    abs_bits,
    encode_scaled,
    from_bits,
    kernel_div,
    materialize,
)
from policyc.numerics.quantize.reference.blocks import (
    Request,
    encode_blocks,
    find_encoding_scale,
    find_maxima,
    materialize_encoding_scale,
    outer_maximum,
    outer_scale_axes,
    tensor_key,
)
from policyc.numerics.quantize.reference.hadamard import Method, rotate_operand
from policyc.numerics.quantize.reference.layout import Axes, Layout, Quantized, move_last_axes

_GROUP = 16
"""The size of the groups whose maxima are found while x is written: that of an NVFP4 block."""


Encode = Callable[[jax.Array, jax.Array], jax.Array]
"""Encodes fp32 values, given the bits of the largest magnitude of the whole array."""
WriteOrders = Callable[[jax.Array, jax.Array, Axes, Encode], tuple[jax.Array, ...]]
"""A kernel that writes the copies of the codes that `Axes` asks for."""


def quantize_fp8(
    x: jax.Array, request: Request, layout: Layout, method: Method, kernel: WriteOrders | None = None
) -> Quantized:
    """Quantizes to FP8. The kernel, if there is one, writes both orders of the codes in one pass."""
    axes, element = request.axes, ELEMENTS[layout.element]
    spanned = outer_scale_axes(request.treatment, axes, layout, x.ndim)
    # An 8-bit GEMM reads one operand transposed. Unless x is in memory first, XLA fuses that transpose into whatever
    # computes x, and computes x three times. The operation that writes x also finds the maxima of groups.
    if x.dtype == jnp.bfloat16 and x.shape[-1] % _GROUP == 0 and -1 in spanned and method != "cpu":
        groups = replace(layout, axis=-1, block=_GROUP)
        along = replace(axes, axis=-1, contract=axes.contract or (axes.axis,))
        x, _, amax = find_maxima(x, replace(request, axes=along), groups)
    else:
        x = materialize(x)
        amax = abs_bits(x).max(axis=spanned, keepdims=True)
    amax = outer_maximum(amax, request)
    orders: tuple[jax.Array, ...]
    if kernel is not None:
        orders = kernel(x, amax, axes, partial(_encode_in_kernel, element=element))
    else:
        enc, lift = materialize_encoding_scale(amax, layout.bound, method)
        # Without the barrier XLA might drop the cast, if a GEMM reads the codes as wider numbers.
        codes = materialize(encode_scaled(x.astype(jnp.float32), lift, enc, amax, element))
        orders = select_orders(codes, axes)
    return Quantized(
        codes=orders[0], scales=None, amax=from_bits(amax), transposed_codes=(*orders, None)[1], layout=layout
    )


def select_orders(codes: jax.Array, axes: Axes) -> tuple[jax.Array, ...]:
    """The copies of the codes that are asked for."""
    if not axes.second_order:
        return (codes,)
    second = move_last_axes(codes, axes.second_order)
    return (second,) if axes.only_second else (codes, second)


def _encode_in_kernel(values: jax.Array, amax: jax.Array, element: Element) -> jax.Array:
    enc, lift = find_encoding_scale(amax, element.top, kernel_div)
    return encode_scaled(values, lift, enc, amax, element)


# ---- FP4


def quantize_fp4(x: jax.Array, request: Request, layout: Layout, method: Method) -> Quantized:
    """Quantizes to FP4, with a scale as in FP8. In the rounding key, each element counts as a block."""
    t, axes = request.treatment, request.axes
    x = materialize(rotate_operand(x, t, axes.axis, request.sign_key, method))
    magnitudes = abs_bits(x)
    amax = magnitudes.max(axis=outer_scale_axes(t, axes, layout, x.ndim), keepdims=True)
    key = None if t.rounding == "rne" else tensor_key(magnitudes, amax, request, layout)
    enc, lift = materialize_encoding_scale(amax, layout.bound, method)
    # Two codes fill a byte. Each pair gets the encoding scale of the tensor.
    codes = encode_blocks(x.astype(jnp.float32) * lift, enc, replace(layout, block=2), method, key)
    return Quantized(codes=codes, scales=None, amax=from_bits(amax), layout=layout)
