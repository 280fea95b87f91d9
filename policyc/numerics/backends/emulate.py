"""The emulated backend: the specification, on any machine.

In: two operands, `Quantized` or plain arrays. Out: their product in fp32. The one trap: block scales go in
before the product, where they are exact in bfloat16; outer scales come after it, in fp32. The other way
round is not exact.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from policyc.language.recipes import Treatment
from policyc.numerics import quantize as q
from policyc.numerics.backends.choice import GemmQuery, Obstacle
from policyc.numerics.quantize.hadamard import Method
from policyc.numerics.quantize.layout import Axes, Quantized
from policyc.numerics.quantize.values import apply_outer, block_values, outer

Operand = Quantized | jax.Array
Dims = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


def obstacle(ask: GemmQuery) -> Obstacle | None:
    """There is none: this backend runs everything."""
    del ask
    return None


def missing() -> str:
    """Nothing: it needs only JAX."""
    return ""


def quantize(
    x: jax.Array,
    treatment: Treatment,
    axes: Axes,
    *,
    key: q.Key | None,
    signs: q.Key | None,
    platform: str,
    alone: bool,
) -> Quantized:
    method: Method = "cpu" if platform == "cpu" else "matmul"
    if platform == "cuda":
        # The product rounds its own result to bfloat16 there, which saves a pass over memory; kernels save another.
        # They can be built only where there is a GPU to build them for.
        method = "kernels" if alone and jax.default_backend() == "gpu" else "matmul_bf16"
    return q.quantize(x, treatment, axes, key=key, signs=signs, method=method)


def gemm(lhs: Operand, rhs: Operand, dimensions: Dims, out: Any, *, platform: str) -> jax.Array:
    # The values are the same in both types; the CPU multiplies them faster in fp32.
    given = jnp.float32 if platform == "cpu" else jnp.bfloat16
    return scaled_gemm(lhs, rhs, dimensions, given).astype(out)


def values(operand: Operand, contract: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """What goes into the product. Padding is zeros: it stays along contracted axes, and is cut elsewhere."""
    if not isinstance(operand, Quantized):
        return operand
    v = block_values(operand, dtype)
    layout = operand.layout
    for axis, size in ((layout.axis, layout.size), (layout.tile_axis, layout.tile_size)):
        if axis is not None and v.ndim + axis not in contract:
            v = lax.slice_in_dim(v, 0, size, axis=v.ndim + axis)
    return v


def scaled_gemm(lhs: Operand, rhs: Operand, dimensions: Dims, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The product in fp32. `dtype` is what the values are given as: bfloat16, or where that is slow float32,
    which has the same values.
    """
    (contract, _), (batch, _) = dimensions
    left, right = dimensions[0]
    a, b = _alike(values(lhs, left, dtype), values(rhs, right, dtype), dimensions)
    precision = lax.Precision.HIGHEST if jnp.float32 in (a.dtype, b.dtype) else None
    product = lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
    free = a.ndim - len(contract) - len(batch)
    return with_outer(product, lhs, rhs, dimensions, free)


def _alike(a: jax.Array, b: jax.Array, dimensions: Dims) -> tuple[jax.Array, jax.Array]:
    """Cut to the same contracted lengths: one operand may have more padding than the other."""
    for i, j in zip(*dimensions[0], strict=True):
        size = min(a.shape[i], b.shape[j])
        a, b = lax.slice_in_dim(a, 0, size, axis=i), lax.slice_in_dim(b, 0, size, axis=j)
    if a.dtype != b.dtype:
        wide = jnp.promote_types(a.dtype, b.dtype)
        a, b = a.astype(wide), b.astype(wide)
    return a, b


def with_outer(product: jax.Array, lhs: Operand, rhs: Operand, dimensions: Dims, free: int) -> jax.Array:
    """Both outer scales, on a product whose dimensions are batch, `free` of lhs, and those of rhs."""
    ((lc, rc), (lb, rb)) = dimensions
    m, e = jnp.float32(1), jnp.int32(0)
    for operand, contract, batch, left in ((lhs, lc, lb, True), (rhs, rc, rb, False)):
        scale = outer(operand) if isinstance(operand, Quantized) else None
        if scale is None:
            continue
        placed = [_place(s, contract, batch, left, free, product.ndim) for s in scale]
        m, e = m * placed[0], e + placed[1]
    return apply_outer(product, m, e) if m.ndim else product


def _place(
    scale: jax.Array, contract: tuple[int, ...], batch: tuple[int, ...], left: bool, free: int, ndim: int
) -> jax.Array:
    """A scale shaped like its operand, with its dimensions where the product has them."""
    own = [i for i in range(scale.ndim) if i not in contract and i not in batch]
    kept = scale.transpose((*batch, *own, *contract)).reshape([scale.shape[i] for i in (*batch, *own)])
    lead = len(batch)
    shape = kept.shape[:lead] + (() if left else (1,) * free) + kept.shape[lead:]
    return kept.reshape(shape + (1,) * (ndim - len(shape)))


def scaled_ragged_gemm(
    lhs: Operand, rhs: Operand, sizes: jax.Array, contracting: bool, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Products of groups of rows. Contracting: (m, k), (m, n) -> (g, k, n). Else: (m, k), (g, k, n) -> (m,
    n).
    """
    if contracting:
        a, b = _alike(values(lhs, (0,), dtype), values(rhs, (0,), dtype), (((0,), (0,)), ((), ())))
        dims = lax.RaggedDotDimensionNumbers(  # type: ignore[no-untyped-call]
            (((0,), (0,)), ((), ())), [0], []
        )
        product = lax.ragged_dot_general(a, b, sizes, dims, preferred_element_type=jnp.float32)
        # The scales are those of a plain product of (m, k) and (m, n), the same for each group.
        return jax.vmap(lambda p: with_outer(p, lhs, rhs, (((0,), (0,)), ((), ())), 1))(product)
    a, b = _alike(values(lhs, (1,), dtype), values(rhs, (1,), dtype), (((1,), (1,)), ((), ())))
    product = lax.ragged_dot(a, b, sizes, preferred_element_type=jnp.float32)
    m, e = jnp.float32(1), jnp.int32(0)
    scale = outer(lhs) if isinstance(lhs, Quantized) else None
    if scale is not None:
        m, e = scale
    scale = outer(rhs) if isinstance(rhs, Quantized) else None
    if scale is not None:
        group = jnp.repeat(jnp.arange(sizes.shape[0]), sizes, total_repeat_length=product.shape[0])
        m, e = m * scale[0][group, 0], e + scale[1][group, 0]
    return apply_outer(product, m, e) if m.ndim else product
