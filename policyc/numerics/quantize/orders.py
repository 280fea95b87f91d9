"""Quantizes a matrix to NVFP4 in one or two orders with kernels: on one device, or one shard per device.

Scales and random words are those of the whole operand: maxima are reduced over all shards, and random words are indexed
globally. So the sharding changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import jax
import jax.numpy as jnp
from jax import lax

from policyc.jaxcore.primitives.partition import Dims, PartitionRule, ShardIndex, partition
from policyc.numerics.quantize.kernels.fused_kernels import (
    Kernels,
    OrderScales,
    ShardOffset,
    Statistics,
    fits_shape,
)
from policyc.numerics.quantize.kernels.kernel_orders import Order
from policyc.numerics.quantize.kernels.kernel_tiles import BLOCK, TILE_FEATURES, TILE_TOKENS, RowLengths
from policyc.numerics.quantize.reference.bits import abs_bits, from_bits
from policyc.numerics.quantize.reference.blocks import Request, outer_maximum
from policyc.numerics.quantize.reference.layout import Axes, Quantized
from policyc.numerics.quantize.reference.random import Key, make_key


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """The shard of a device. `whole` is the shape of the whole operand."""

    index: ShardIndex
    whole: tuple[int, ...]

    def reduce(self, statistics: Sequence[Statistics]) -> Sequence[Statistics]:
        """The statistics of the whole operand, from those of this shard, for each order."""
        if not self.index.axes:
            return statistics
        # One small collective for all maxima and checksums.
        words = jnp.stack([word.astype(jnp.uint32) for pair in statistics for word in pair])
        gathered = lax.all_gather(words, self.index.axes)
        maxima, checksums = gathered[:, 0::2].max(axis=0), gathered[:, 1::2].sum(axis=0, dtype=jnp.uint32)
        return [(maxima[i].astype(jnp.int32), checksums[i]) for i in range(len(statistics))]

    def offset(self, shape: tuple[int, ...]) -> ShardOffset:
        """Where the shard, which has this shape, lies in the whole operand."""
        first = [
            jnp.uint32(size) * jnp.asarray(self.index.along(name), jnp.uint32)
            for size, (name, _) in zip(shape, _dims(len(shape), {}), strict=True)
        ]
        *rows, token, feature = first
        if rows:
            token = token + rows[0] * jnp.uint32(self.whole[-2])
        # The tokens of a single row are consecutive. Equal lengths express that, and save arithmetic.
        length = self.whole[-2] if prod(shape[:-2]) > 1 else shape[-2]
        return ShardOffset(
            start=jnp.stack([token, feature]),
            rows=RowLengths(shard=shape[-2], whole=length),
            features=self.whole[-1],
        )


def quantize_orders(
    x: jax.Array, requests: Sequence[Request], kernels: Kernels, shard: _Shard | None = None
) -> list[Quantized]:
    """Quantizes x in several orders, with one read for all maxima and one for all codes.

    An order with tiles must be the only one. XLA then finds the maximum where it computes x.
    """
    orders = [Order.from_request(r) for r in requests]
    if orders[0].square:
        # The key is not used, so there is no checksum. The kernel finds the maxima of tiles itself.
        statistics: Sequence[Statistics] = [(abs_bits(x).max(), jnp.uint32(0))]
    else:
        statistics = kernels.statistics(
            x, [_measured_order(o, r) for o, r in zip(orders, requests, strict=True)]
        )
    if shard is not None:
        statistics = shard.reduce(statistics)
    scales = [order_scales(s, r) for s, r in zip(statistics, requests, strict=True)]
    offset = ShardOffset.whole(x.shape) if shard is None else shard.offset(x.shape)
    arrays = kernels.codes(x, orders, scales, offset)
    return [_as_quantized(x.shape, r, s, a) for r, s, a in zip(requests, scales, arrays, strict=True)]


def _measured_order(order: Order, request: Request) -> Order:
    """The order whose statistics are needed: without rotation if the outer scale is computed before it."""
    return replace(order, rotates=False) if request.treatment.outer == "bound" else order


def order_scales(statistics: Statistics, request: Request) -> OrderScales:
    """The scalars of one order, from the statistics of the whole operand."""
    maximum, content = statistics
    amax = outer_maximum(maximum, request)
    return OrderScales(amax=amax, maximum=maximum, content=content, key=request.key or make_key())


def _as_quantized(
    shape: tuple[int, ...], request: Request, scales: OrderScales, arrays: Sequence[jax.Array]
) -> Quantized:
    if request.treatment.tile2d:
        codes, block_scales = arrays[0].reshape(shape), []
    else:
        codes, *block_scales = (_split_tokens(array, shape, request.axes) for array in arrays)
    amax = from_bits(scales.amax).reshape((1,) * len(shape))
    layout, _ = request.layout(shape)
    return Quantized(codes=codes, scales=next(iter(block_scales), None), amax=amax, layout=layout)


def _split_tokens(matrix: jax.Array, shape: tuple[int, ...], axes: Axes) -> jax.Array:
    """A matrix with the dimensions of its operand. A matrix quantized along tokens keeps tokens last in memory."""
    if axes.axis == -1:
        return matrix.reshape(*shape[:-1], -1)
    return jnp.moveaxis(matrix.T.reshape(shape[-1], *shape[:-2], -1), 0, -1)


# ---- on several devices


def quantize_sharded(
    x: jax.Array, requests: Sequence[Request], kernels: Kernels | None = None
) -> list[Quantized]:
    """`quantize_orders` for an operand whose sharding XLA chooses."""
    kernels = kernels or Kernels()

    def run(index: ShardIndex, shard: jax.Array, words: jax.Array) -> list[jax.Array]:
        keys = [Key(words[2 * i], words[2 * i + 1]) for i in range(len(requests))]
        shard_requests = [replace(r, key=key, operand="") for r, key in zip(requests, keys, strict=True)]
        quantized = quantize_orders(shard, shard_requests, kernels, _Shard(index=index, whole=x.shape))
        return [array for q in quantized for array in _arrays(q)]

    results = [d for r in requests for d in _result_dims(x.ndim, r)]
    dims = _dims(x.ndim, {})
    rule = PartitionRule(
        name="NVFP4 quantizer",
        operands=(dims, (("key", 1),)),
        results=tuple(results),
        limit=lambda sizes: _find_limit(dims, sizes),
    )
    keys = [r.rounding_key for r in requests]
    words = jnp.stack([jnp.asarray(word) for key in keys for word in (key.a, key.b)])
    arrays = iter(partition(run, rule)(x, words))
    return [_unflatten(x.shape, r, arrays) for r in requests]


def _find_limit(dims: Dims, sizes: Mapping[str, int]) -> str:
    """Why the kernels cannot quantize a shard whose factors have these sizes; empty if they can."""
    shape = tuple(sizes[name] * unit for name, unit in dims)
    if fits_shape(shape):
        return ""
    return (
        f"its kernels need a multiple of {TILE_TOKENS} tokens and at least {TILE_FEATURES} features, "
        f"but a device has {prod(shape[:-1])} and {shape[-1]}"
    )


def _dims(ndim: int, units: dict[int, int]) -> Dims:
    """The dimensions of an array for a `PartitionRule`. Tokens and features are divided in whole blocks."""
    sizes = {-1: BLOCK, -2: BLOCK} | units
    return tuple((f"d{i}", sizes.get(i - ndim, 1)) for i in range(ndim))


def _result_dims(ndim: int, request: Request) -> tuple[Dims, ...]:
    """The dimensions of codes, of scales and of the maximum, or of values and of the maximum."""
    if request.decoded:
        return _dims(ndim, {}), ()
    axis = request.axes.axis
    return _dims(ndim, {axis: BLOCK // 2}), _dims(ndim, {axis: 1}), ()


def _arrays(q: Quantized) -> list[jax.Array]:
    """The arrays of `_result_dims`."""
    assert q.amax is not None
    return [q.codes, *([] if q.scales is None else [q.scales]), q.amax.reshape(())]


def _unflatten(shape: tuple[int, ...], request: Request, arrays: Iterator[jax.Array]) -> Quantized:
    codes = next(arrays)
    scales = None if request.decoded else next(arrays)
    amax, (layout, _) = next(arrays).reshape((1,) * len(shape)), request.layout(shape)
    return Quantized(codes=codes, scales=scales, amax=amax, layout=layout)
