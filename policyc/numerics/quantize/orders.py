"""Quantizes a matrix, or one shard of it, to NVFP4 in one or two orders, with kernels.

Scales and random words are those of the whole operand, so sharding does not change the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from policyc.language.recipes import Treatment
from policyc.numerics.quantize.kernels.fused_kernels import (
    Kernels,
    OrderScales,
    ShardOffset,
    Statistics,
    reduce_statistics,
)
from policyc.numerics.quantize.kernels.kernel_orders import Order
from policyc.numerics.quantize.reference.bits import abs_bits, from_bits
from policyc.numerics.quantize.reference.blocks import QuantizeContext, find_maxima, layout_of, outer_maximum
from policyc.numerics.quantize.reference.layout import Axes, Quantized
from policyc.numerics.quantize.reference.random import Key, mix


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderRequest:
    """How one GEMM reads an operand: the treatment, the axes, and the key of stochastic rounding.

    A treatment that rounds to nearest does not use the key. `operand` is a name to fold into the key, or empty; kernels
    fold it in themselves. `decoded` asks for values in place of codes and scales.
    """

    treatment: Treatment
    axes: Axes
    key: Key
    operand: str = ""
    decoded: bool = False

    @property
    def rounding_key(self) -> Key:
        return self.key.fold(self.operand) if self.operand else self.key


class Shard:
    """The shard that a device quantizes. In this class, it is the whole operand."""

    def reduce(self, statistics: Sequence[Statistics]) -> Sequence[Statistics]:
        """The statistics of the whole operand, from those of this shard, for each order."""
        return statistics

    def offset(self, shape: tuple[int, ...]) -> ShardOffset:
        """Where the shard, which has this shape, lies in the whole operand."""
        return ShardOffset.whole(shape)


def quantize_orders(
    x: jax.Array, requests: Sequence[OrderRequest], kernels: Kernels, shard: Shard | None = None
) -> list[Quantized]:
    """Quantizes x in several orders, with one read for all maxima and one for all codes.

    An order with refined scales or with tiles must be the only one, and x must be rotated already. XLA then finds the
    maxima where it computes x.
    """
    shard = shard or Shard()
    orders = [
        replace(Order.from_treatment(r.treatment, r.axes), decoded=r.decoded, operand=r.operand)
        for r in requests
    ]
    if orders[0].square:
        # The key is not used, so there is no checksum. The kernel finds the maxima of tiles itself.
        statistics: Sequence[Statistics] = [(abs_bits(x).max(), jnp.uint32(0))]
    elif orders[0].refinement:
        x, statistics = _find_statistics(x, requests[0])
    else:
        statistics = kernels.statistics(
            x, [_measured_order(o, r) for o, r in zip(orders, requests, strict=True)]
        )
    statistics = shard.reduce(statistics)
    scales = [order_scales(s, r) for s, r in zip(statistics, requests, strict=True)]
    arrays = kernels.codes(x, orders, scales, shard.offset(x.shape))
    return [_as_quantized(x.shape, r, s, a) for r, s, a in zip(requests, scales, arrays, strict=True)]


def _measured_order(order: Order, request: OrderRequest) -> Order:
    """The order whose statistics are needed: without rotation if the outer scale is computed before it."""
    return replace(order, rotates=False) if request.treatment.outer == "bound" else order


def _find_statistics(x: jax.Array, request: OrderRequest) -> tuple[jax.Array, Sequence[Statistics]]:
    """x and its statistics in one order, by XLA."""
    layout, _ = layout_of(x.shape, request.treatment, request.axes)
    context = QuantizeContext(
        treatment=request.treatment, axes=request.axes, layout=layout, key=request.rounding_key
    )
    x, maxima, _ = find_maxima(x, context)
    if request.treatment.rounding == "rne":
        # The key is not used.
        return x, [(maxima.max(), jnp.uint32(0))]
    return x, reduce_statistics([(maxima, mix(maxima.astype(jnp.uint32), jnp.uint32(0)))])


def order_scales(statistics: Statistics, request: OrderRequest) -> OrderScales:
    """The scalars of one order, from the statistics of the whole operand."""
    maximum, content = statistics
    amax = outer_maximum(maximum, request.treatment)
    return OrderScales(amax=amax, maximum=maximum, content=content, key=request.key)


def _as_quantized(
    shape: tuple[int, ...], request: OrderRequest, scales: OrderScales, arrays: Sequence[jax.Array]
) -> Quantized:
    layout = replace(layout_of(shape, request.treatment, request.axes)[0], decoded=request.decoded)
    if request.treatment.tile2d:
        codes, block_scales = arrays[0].reshape(shape), []
    else:
        codes, *block_scales = (_split_tokens(array, shape, request.axes) for array in arrays)
    amax = from_bits(scales.amax).reshape((1,) * len(shape))
    return Quantized(codes=codes, scales=next(iter(block_scales), None), amax=amax, layout=layout)


def _split_tokens(matrix: jax.Array, shape: tuple[int, ...], axes: Axes) -> jax.Array:
    """A matrix with the dimensions of its operand. A matrix quantized along tokens keeps tokens last in memory."""
    if axes.axis == -1:
        return matrix.reshape(*shape[:-1], -1)
    return jnp.moveaxis(matrix.T.reshape(shape[-1], *shape[:-2], -1), 0, -1)
