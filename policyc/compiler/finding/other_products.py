"""Products other than GEMMs (convolutions, fused attention, kernels), which the compiler leaves unchanged.

They are counted, so that the shares in a plan refer to all of a program's work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from policyc.compiler.finding.dots import GEMMS, OPAQUE_PRODUCTS, gemm_sizes, operand_dtype
from policyc.compiler.sites.site import OtherProduct
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.reading import shape_of
from policyc.jaxcore.primitives.derivatives import is_float

_ATTENTION = ("dot_product_attention_fwd", "dot_product_attention_fp8_fwd")
_CALLS = {"ffi_call": "FFI call", "tpu_custom_call": "TPU kernel", "cudnn_fusion": "cuDNN fusion"}


def kind_and_name(eqn: JaxprEqn) -> tuple[str, str] | None:
    """The kind and name of a product that cannot be a site; None for GEMMs and for equations that are not products."""
    name = jaxprs.primitive_name(eqn)
    if name == "conv_general_dilated":
        return "convolution", name
    if name.startswith(_ATTENTION):
        return "fused attention", name.removesuffix("_wrapper")
    if name in _CALLS:
        return _CALLS[name], str(eqn.params.get("target_name", eqn.params.get("name", name)))
    if name == "pallas_call":
        return ("Pallas kernel", _kernel_name(eqn)) if _contains_product(eqn) else None
    if name in GEMMS:
        dtypes = [jnp.dtype(operand_dtype(a)) for a in eqn.invars[:2]]
        other = next((d for d in dtypes if not jnp.issubdtype(d, jnp.floating)), None)
        is_product = other is not None and gemm_sizes(eqn, None) is not None
        return (f"product of {other}", name) if is_product else None
    return ("call of another library", name) if _may_be_foreign_product(eqn) else None


def _kernel_name(pallas_call: JaxprEqn) -> str:
    info: Any = pallas_call.params.get("name_and_src_info", pallas_call.params.get("debug_info"))
    return str(pallas_call.params.get("name") or getattr(info, "name", "") or "unnamed")


def _contains_product(eqn: JaxprEqn) -> bool:
    names = {
        jaxprs.primitive_name(e) for sub in jaxprs.sub_jaxprs(eqn) for e in jaxprs.all_equations(sub.jaxpr)
    }
    return bool(names & {*GEMMS, *OPAQUE_PRODUCTS})


def _may_be_foreign_product(eqn: JaxprEqn) -> bool:
    """Whether an equation's primitive is not defined by JAX (or policyc) and reads at least two matrices."""
    package = jaxprs.defining_module(eqn).partition(".")[0]
    matrices = [a for a in eqn.invars if is_float(a.aval) and len(shape_of(a)) > 1]
    return package not in ("", "jax", "jaxlib", "policyc") and len(matrices) > 1


def product_flops(eqn: JaxprEqn) -> int | None:
    """FLOPs of one forward execution of an equation that `kind_and_name` recognizes; None if they are not known."""
    name = jaxprs.primitive_name(eqn)
    if name == "conv_general_dilated":
        return convolution_flops(eqn)
    sizes = gemm_sizes(eqn, None) if name in GEMMS else None
    return None if sizes is None else 2 * math.prod(sizes)


def convolution_flops(eqn: JaxprEqn) -> int:
    """FLOPs of a convolution, not counting padding and dilation zeros."""
    params: Any = eqn.params
    numbers = params["dimension_numbers"]
    lhs, rhs, out = (shape_of(a) for a in (*eqn.invars[:2], eqn.outvars[0]))
    taps = 1
    for dim in range(len(params["window_strides"])):
        stride, dilation = params["window_strides"][dim], params["rhs_dilation"][dim]
        spacing, (before, _) = params["lhs_dilation"][dim], params["padding"][dim]
        size = lhs[numbers.lhs_spec[2 + dim]]
        windows = np.arange(out[numbers.out_spec[2 + dim]])[:, None] * stride - before
        positions = windows + np.arange(rhs[numbers.rhs_spec[2 + dim]]) * dilation
        is_element = (positions % spacing == 0) & (positions >= 0) & (positions // spacing < size)
        taps *= int(is_element.sum())
    features_out, features_in = (int(rhs[d]) for d in numbers.rhs_spec[:2])
    return 2 * int(out[numbers.out_spec[0]]) * features_out * features_in * taps


def sum_by_kind(products: Iterable[OtherProduct]) -> tuple[OtherProduct, ...]:
    """One record for each kind and name, with the sums of counts and FLOPs."""
    sums: dict[tuple[str, str], OtherProduct] = {}
    for product in products:
        key = product.kind, product.name
        before = sums.get(key, OtherProduct(kind=product.kind, name=product.name, count=0, flops=0))
        flops = None if before.flops is None or product.flops is None else before.flops + product.flops
        sums[key] = OtherProduct(
            kind=product.kind, name=product.name, count=before.count + product.count, flops=flops
        )
    return tuple(sums.values())
