"""`quantize`: quantizes to any format, by a table of quantizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from policyc.language.recipes import Treatment
from policyc.numerics.quantize.kernels import fp8_kernel
from policyc.numerics.quantize.kernels import fused_kernels as kernels
from policyc.numerics.quantize.orders import OrderRequest, quantize_orders
from policyc.numerics.quantize.reference.bits import materialize
from policyc.numerics.quantize.reference.blocks import QuantizeContext, layout_of
from policyc.numerics.quantize.reference.fp8 import quantize_fp4, quantize_fp8
from policyc.numerics.quantize.reference.hadamard import Method, random_signs, rotate
from policyc.numerics.quantize.reference.layout import Axes, Quantized
from policyc.numerics.quantize.reference.mx import quantize_mx
from policyc.numerics.quantize.reference.nvfp4 import quantize_nvfp4
from policyc.numerics.quantize.reference.random import Key, make_key

QUANTIZERS: dict[str, Callable[[jax.Array, QuantizeContext], Quantized]] = {
    "nvfp4": quantize_nvfp4,
    "mxfp4": quantize_mx,
    "mxfp8": quantize_mx,
    "fp8": quantize_fp8,
    "fp4": quantize_fp4,
}


def quantize(
    x: jax.Array,
    treatment: Treatment,
    axes: Axes | None = None,
    *,
    key: Key | None = None,
    sign_key: Key | None = None,
    method: Method = "matmul",
) -> Quantized:
    """Quantizes x along `axes.axis`, padded with zeros to whole blocks.

    Args:
      key: the key of stochastic rounding. The content of x is folded into it: see `tensor_key`.
      sign_key: the key of the fresh signs of MS-EDEN, the same for both operands of a GEMM.
      method: how to compute the result. All methods give the same bits.
    """
    axes = axes or Axes()
    layout, padded = layout_of(x.shape, treatment, axes)
    if padded != x.shape:
        x = jnp.pad(x, [(0, n - m) for m, n in zip(x.shape, padded, strict=True)])
    key = make_key() if key is None else key
    run = QUANTIZERS[treatment.format]
    if method in ("kernels", "interpreted"):
        interpret = method == "interpreted"
        by_kernels = partial(quantize_orders, kernels=kernels.Kernels(interpret=interpret))
        request = OrderRequest(treatment=treatment, axes=axes, key=key)
        if kernels.fits_alone(x, treatment, axes):
            return by_kernels(x, [request])[0]
        if kernels.fits_refined(x, treatment, axes):
            return by_kernels(rotate_operand(x, treatment, axes, sign_key, method), [request])[0]
        if fp8_kernel.fits(x, treatment, axes):
            kernel = fp8_kernel.Fp8Kernel(interpret=interpret)
            context = QuantizeContext(
                treatment=treatment, axes=axes, layout=layout, key=key, fp8_kernel=kernel
            )
            return run(x, context)
    unrotated = x if treatment.outer == "bound" else None
    x = rotate_operand(x, treatment, axes, sign_key, method)
    if treatment.rht:
        x = materialize(x)
    context = QuantizeContext(
        treatment=treatment, axes=axes, layout=layout, key=key, unrotated=unrotated, cpu=method == "cpu"
    )
    return run(x, context)


def rotate_operand(
    x: jax.Array, treatment: Treatment, axes: Axes, sign_key: Key | None, method: Method
) -> jax.Array:
    """Rotates the operand if its treatment asks for it. Uses XLA even if kernels quantize afterwards."""
    if not treatment.rht:
        return x
    if method in ("kernels", "interpreted"):
        method = "matmul_bf16" if method == "kernels" else "matmul"
    has_fresh_signs = treatment.rounding == "ms_eden"
    signs = random_signs(sign_key or make_key(), treatment.rht) if has_fresh_signs else None
    return rotate(x, axes.axis, treatment.rht, signs, method=method)
