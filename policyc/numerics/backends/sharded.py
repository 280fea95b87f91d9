"""Quantizes a sharded operand with the NVFP4 kernels, one shard per device.

Maxima are reduced over all shards and random words are indexed globally, so the sharding changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import jax
import jax.numpy as jnp
from jax import lax

from policyc.jaxcore.primitives.partition import Dims, PartitionRule, ShardIndex, partition
from policyc.numerics.quantize.kernels.fused_kernels import Kernels, ShardOffset, Statistics, fits_shape
from policyc.numerics.quantize.kernels.kernel_tiles import BLOCK, TILE_FEATURES, TILE_TOKENS, RowLengths
from policyc.numerics.quantize.orders import OrderRequest, Shard, quantize_orders
from policyc.numerics.quantize.reference.blocks import layout_of
from policyc.numerics.quantize.reference.layout import Quantized
from policyc.numerics.quantize.reference.random import Key


def quantize_sharded(
    x: jax.Array, requests: Sequence[OrderRequest], kernels: Kernels | None = None
) -> list[Quantized]:
    """`quantize_orders` for an operand whose sharding XLA chooses."""
    kernels = kernels or Kernels()

    def run(index: ShardIndex, shard: jax.Array, words: jax.Array) -> list[jax.Array]:
        keys = [Key(words[2 * i], words[2 * i + 1]) for i in range(len(requests))]
        shard_requests = [replace(r, key=key, operand="") for r, key in zip(requests, keys, strict=True)]
        divided = _DividedShard(index=index, whole=x.shape)
        quantized = quantize_orders(shard, shard_requests, kernels, divided)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _DividedShard(Shard):
    """The shard of a device. `whole` is the shape of the whole operand."""

    index: ShardIndex
    whole: tuple[int, ...]

    def reduce(self, statistics: Sequence[Statistics]) -> Sequence[Statistics]:
        if not self.index.axes:
            return statistics
        # One small collective for all maxima and checksums.
        words = jnp.stack([word.astype(jnp.uint32) for pair in statistics for word in pair])
        gathered = lax.all_gather(words, self.index.axes)
        maxima, checksums = gathered[:, 0::2].max(axis=0), gathered[:, 1::2].sum(axis=0, dtype=jnp.uint32)
        return [(maxima[i].astype(jnp.int32), checksums[i]) for i in range(len(statistics))]

    def offset(self, shape: tuple[int, ...]) -> ShardOffset:
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


# ---- arrays


def _dims(ndim: int, units: dict[int, int]) -> Dims:
    """The dimensions of an array for a `PartitionRule`. Tokens and features are divided in whole blocks."""
    sizes = {-1: BLOCK, -2: BLOCK} | units
    return tuple((f"d{i}", sizes.get(i - ndim, 1)) for i in range(ndim))


def _result_dims(ndim: int, request: OrderRequest) -> tuple[Dims, ...]:
    """The dimensions of codes, of scales and of the maximum, or of values and of the maximum."""
    if request.decoded:
        return _dims(ndim, {}), ()
    axis = request.axes.axis
    return _dims(ndim, {axis: BLOCK // 2}), _dims(ndim, {axis: 1}), ()


def _arrays(q: Quantized) -> list[jax.Array]:
    """The arrays of `_result_dims`."""
    assert q.amax is not None
    return [q.codes, *([] if q.scales is None else [q.scales]), q.amax.reshape(())]


def _unflatten(shape: tuple[int, ...], request: OrderRequest, arrays: Iterator[jax.Array]) -> Quantized:
    layout = replace(layout_of(shape, request.treatment, request.axes)[0], decoded=request.decoded)
    codes = next(arrays)
    scales = None if request.decoded else next(arrays)
    return Quantized(codes=codes, scales=scales, amax=next(arrays).reshape((1,) * len(shape)), layout=layout)
