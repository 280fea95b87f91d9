"""The emulated backend with different accumulation: NVFP4 products are added as Blackwell GPUs reportedly add them.

The model is from arXiv 2609.02846, which found it bit-identical to Transformer Engine. That is not verified here. Every
64 products along the contraction are added exactly and rounded to fp32, to nearest even. These sums are added in fp32
one after the other, rounded toward zero. It is slow and meant for studies: it lets native results be compared bit by
bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from policyc.jaxcore.define_primitive import LoweringContext
from policyc.numerics.backends import emulate, xla
from policyc.numerics.backends.block_scaled import as_values
from policyc.numerics.backends.choice import GemmQuery, Obstacle
from policyc.numerics.backends.emulate import (
    count_reads,
    find_missing_library,
    quantize,
    quantize_orders,
)
from policyc.numerics.products import DimensionNumbers
from policyc.numerics.quantize.bits import bits_of, from_bits, power_of_two
from policyc.numerics.quantize.layout import Operand, Quantized

__all__ = [
    "TRAITS",
    "count_reads",
    "find_missing_library",
    "gemm",
    "obstacle",
    "quantize",
    "quantize_orders",
]

TRAITS = replace(emulate.TRAITS, multiplies_values=False)

_BLOCK, _GROUP = 16, 64
_FRACTION = 20
"""All terms are multiples of 2**-20: products of two E2M1 elements of 2**-2, products of two E4M3 scales of 2**-18."""


def obstacle(query: GemmQuery) -> Obstacle | None:
    """None for nvfp4. Other formats and ragged groups are emulated with ordinary sums."""
    if query.format == query.right.format == "nvfp4" and not query.ragged:
        return None
    kind = "ragged groups" if query.ragged else query.format
    reason = f"how GPUs add products is modelled for nvfp4 only, not for {kind}"
    return Obstacle(reason, "it is emulated with ordinary fp32 sums")


def gemm(
    lhs: Operand, rhs: Operand, dimensions: DimensionNumbers, out: Any, context: LoweringContext
) -> jax.Array:
    """The product of two operands."""
    assert isinstance(lhs, Quantized)
    assert isinstance(rhs, Quantized)
    del context
    (lc, rc), (lb, rb) = dimensions
    left, left_free = xla.as_rows(lhs, lc, lb)
    right, right_free = xla.as_rows(rhs, rc, rb)
    product = _add_groups(*as_values(left, "nvfp4"), *as_values(right, "nvfp4"))
    batch = tuple(lhs.codes.shape[i] for i in lb)
    product = product.reshape(*batch, *left_free, *right_free)
    return emulate.apply_outer_scales(product, lhs, rhs, dimensions, len(left_free)).astype(out)


def _add_groups(a: jax.Array, a_scales: jax.Array, b: jax.Array, b_scales: jax.Array) -> jax.Array:
    """The product (batch, rows of a, rows of b) of operands (batch, rows, contracted), fp32."""
    # One operand may have more padding, which is zero.
    blocks = min(a_scales.shape[-1], b_scales.shape[-1])

    def split(x: jax.Array, width: int) -> jax.Array:
        """(groups, batch, rows, blocks of a group, width)"""
        x = lax.slice_in_dim(x, 0, blocks * width, axis=-1).astype(jnp.float32)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[-1] % (width * _GROUP // _BLOCK))))
        return jnp.moveaxis(x.reshape(*x.shape[:2], -1, _GROUP // _BLOCK, width), 2, 0)

    def add_group(total: jax.Array, group: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        left, left_scales, right, right_scales = group
        # Exact: the sum of 16 products of elements has 12 bits, the product of two scales 8.
        sums = jnp.einsum("bmgk,bngk->gbmn", left, right, precision=lax.Precision.HIGHEST)
        scales = jnp.einsum("bmgk,bngk->gbmn", left_scales, right_scales, precision=lax.Precision.HIGHEST)
        return _add_toward_zero(total, _round_sum(sums * scales)), None

    groups = split(a, _BLOCK), split(a_scales, 1), split(b, _BLOCK), split(b_scales, 1)
    total, _ = lax.scan(add_group, jnp.zeros((a.shape[0], a.shape[1], b.shape[1]), jnp.float32), groups)
    return total


def _round_sum(terms: jax.Array) -> jax.Array:
    """The exact sum of a few multiples of 2**-20 below 2**27, along the first dimension, rounded once."""
    floors = jnp.floor(terms)
    whole = floors.astype(jnp.int32).sum(0)
    fraction = ((terms - floors) * 2**_FRACTION).astype(jnp.int32).sum(0)
    whole, fraction = whole + (fraction >> _FRACTION), fraction & (2**_FRACTION - 1)
    is_negative = whole < 0
    whole = jnp.where(is_negative, ~whole + (fraction == 0), whole)
    fraction = jnp.where(is_negative, -fraction & (2**_FRACTION - 1), fraction)
    # The leading 30 bits. The last one is sticky: it is set if any lower bit is, so that the conversion to fp32 rounds
    # to nearest even.
    shift = jnp.clip(lax.clz(whole) - 2, 0, _FRACTION)
    rest = fraction & ((1 << (_FRACTION - shift)) - 1)
    leading = (whole << shift) | (fraction >> (_FRACTION - shift)) | (rest != 0)
    rounded = leading.astype(jnp.float32) * power_of_two(-shift)
    rounded = jnp.where(is_negative, -rounded, rounded)
    return jnp.where(jnp.isnan(terms).any(0), jnp.float32(jnp.nan), rounded)


def _add_toward_zero(a: jax.Array, b: jax.Array) -> jax.Array:
    """The fp32 sum of two arrays, rounded toward zero."""
    total = a + b
    b_part = total - a
    error = (a - (total - b_part)) + (b - b_part)  # the exact sum is total + error
    is_too_large = ((error < 0) & (total > 0)) | ((error > 0) & (total < 0))
    return from_bits(bits_of(total) - is_too_large.astype(jnp.int32))
