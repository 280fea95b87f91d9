"""`quantize`: quantizes to any format, by a table of quantizers."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from policyc.language.formats import UE5M3
from policyc.language.recipes import Treatment
from policyc.numerics.quantize.kernels import fp8_kernel
from policyc.numerics.quantize.kernels import fused_kernels as kernels
from policyc.numerics.quantize.orders import quantize_orders
from policyc.numerics.quantize.reference.blocks import Request
from policyc.numerics.quantize.reference.fp8 import quantize_fp4, quantize_fp8
from policyc.numerics.quantize.reference.hadamard import Method
from policyc.numerics.quantize.reference.layout import Axes, Layout, Quantized
from policyc.numerics.quantize.reference.mx import quantize_mx
from policyc.numerics.quantize.reference.nvfp4 import quantize_nvfp4
from policyc.numerics.quantize.reference.random import Key

QUANTIZERS: dict[str, Callable[[jax.Array, Request, Layout, Method], Quantized]] = {
    "nvfp4": quantize_nvfp4,
    UE5M3: quantize_nvfp4,
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
    """`quantize_request` for a request without a name."""
    return quantize_request(x, Request(treatment, axes or Axes(), key=key, sign_key=sign_key), method)


def quantize_request(x: jax.Array, request: Request, method: Method = "matmul") -> Quantized:
    """Quantizes x along the axis of the request, padded with zeros to whole blocks. All methods give the same bits.

    The content of x is folded into the rounding key: see `tensor_key`.
    """
    treatment, axes = request.treatment, request.axes
    layout, padded = request.layout(x.shape)
    if padded != x.shape:
        x = jnp.pad(x, [(0, n - m) for m, n in zip(x.shape, padded, strict=True)])
    if method in ("kernels", "interpreted"):
        interpret = method == "interpreted"
        if kernels.fits_alone(x, treatment, axes):
            return quantize_orders(x, [request], kernels.Kernels(interpret=interpret))[0]
        if fp8_kernel.fits(x, treatment, axes):
            kernel = fp8_kernel.Fp8Kernel(interpret=interpret)
            return quantize_fp8(x, request, layout, method, kernel.write_orders)
    return QUANTIZERS[treatment.format](x, request, layout, method)
