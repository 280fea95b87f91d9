"""Quantizes a matrix to NVFP4 in one or two orders, by kernels: whole, or the shard of each device.

The scales of a shard are those of the whole operand, and so are its random words. So the sharding changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from policyc.language.recipes import Treatment
from policyc.numerics.quantize.bits import abs_bits, exact_div, from_bits
from policyc.numerics.quantize.blocks import (
    QuantizeContext,
    find_maxima,
    layout_of,
    materialize_encoding_scale,
    outer_maximum,
)
from policyc.numerics.quantize.kernel_bodies import Encoder, Order, rotate
from policyc.numerics.quantize.kernel_ops import InterpreterOps
from policyc.numerics.quantize.kernel_tiles import BLOCK
from policyc.numerics.quantize.kernels import (
    CodesAndScales,
    OrderScales,
    Scales,
    ShardOffset,
    Statistics,
    reduce_statistics,
)
from policyc.numerics.quantize.layout import Axes, Quantized
from policyc.numerics.quantize.random import Key, checksum, mix
from policyc.numerics.quantize.refined_kernels import BlockQuantizer, RefinedScales, make_encoder


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderRequest:
    """An operand as one GEMM reads it: its treatment, the axes, and the key of stochastic rounding.

    A treatment that rounds to nearest does not use the key.
    """

    treatment: Treatment
    axes: Axes
    key: Key


class Shard:
    """The shard that a device quantizes; here the whole operand."""

    def reduce(self, statistics: Sequence[Statistics]) -> Sequence[Statistics]:
        """The statistics of the whole operand in each order, from those of each shard."""
        return statistics

    def offset(self, shape: tuple[int, ...]) -> ShardOffset:
        """Where the shard, which has this shape, lies in the whole operand."""
        return ShardOffset.whole(shape)


class Engine(Protocol):
    """Code that quantizes matrices of tokens and features in several orders: `Kernels`, or `JnpEngine`."""

    def statistics(self, x: jax.Array, orders: Sequence[Order]) -> list[Statistics]: ...

    def codes(
        self, x: jax.Array, orders: Sequence[Order], scales: Sequence[Scales], offset: ShardOffset
    ) -> list[CodesAndScales]: ...


def quantize_orders(
    x: jax.Array, requests: Sequence[OrderRequest], engine: Engine, shard: Shard | None = None
) -> list[Quantized]:
    """Quantizes x in several orders, with one read for all maxima and one for all codes.

    An order with refined scales comes alone, and x is rotated already. XLA finds its maxima, where it computes x.
    """
    shard = shard or Shard()
    orders = [Order.from_treatment(r.treatment, r.axes) for r in requests]
    if orders[0].refinement:
        x, statistics = _find_statistics(x, requests[0])
    else:
        statistics = engine.statistics(
            x, [_measured_order(o, r) for o, r in zip(orders, requests, strict=True)]
        )
    statistics = shard.reduce(statistics)
    scales = [order_scales(s, r, o) for s, r, o in zip(statistics, requests, orders, strict=True)]
    arrays = engine.codes(x, orders, scales, shard.offset(x.shape))
    return [_as_quantized(x.shape, r, s, a) for r, s, a in zip(requests, scales, arrays, strict=True)]


def _measured_order(order: Order, request: OrderRequest) -> Order:
    """The order whose statistics are needed: before the rotation, if the outer scale comes from that."""
    return replace(order, rotates=False) if request.treatment.outer == "bound" else order


def _find_statistics(x: jax.Array, request: OrderRequest) -> tuple[jax.Array, Sequence[Statistics]]:
    """x and its statistics in one order, by XLA."""
    x, maxima, _ = find_maxima(x, _context(x.shape, request))
    if request.treatment.rounding == "rne":
        # The key is not used.
        return x, [(maxima.max(), jnp.uint32(0))]
    return x, [reduce_statistics(maxima, mix(maxima.astype(jnp.uint32), jnp.uint32(0)))]


def _context(shape: tuple[int, ...], request: OrderRequest) -> QuantizeContext:
    layout, _ = layout_of(shape, request.treatment, request.axes)
    return QuantizeContext(treatment=request.treatment, axes=request.axes, layout=layout, key=request.key)


def order_scales(statistics: Statistics, request: OrderRequest, order: Order) -> Scales:
    """The scalars of one order, from the statistics of the whole operand."""
    maximum, content = statistics
    context = _context((BLOCK, BLOCK), request)
    amax = outer_maximum(order.add_headroom(maximum), request.treatment, context.layout.bound)
    if order.refinement:
        return RefinedScales(amax=amax, maximum=maximum, content=content, key=request.key)
    enc, lift = materialize_encoding_scale(amax, context)
    dec = exact_div(jnp.float32(1), enc)
    # As in `blocks.tensor_key`.
    key = request.key.fold(maximum).fold(content) if order.stochastic else request.key
    return OrderScales(lift=lift, enc=enc, dec=dec, amax=amax, key=key)


def _as_quantized(
    shape: tuple[int, ...], request: OrderRequest, scales: Scales, arrays: CodesAndScales
) -> Quantized:
    layout, _ = layout_of(shape, request.treatment, request.axes)
    codes, block_scales = (_split_tokens(array, shape, request.axes) for array in arrays)
    amax = from_bits(scales.amax).reshape((1,) * len(shape))
    return Quantized(codes=codes, scales=block_scales, amax=amax, layout=layout)


def _split_tokens(matrix: jax.Array, shape: tuple[int, ...], axes: Axes) -> jax.Array:
    """A matrix with the dimensions of its operand. Along tokens it has the tokens last in memory, and keeps them so."""
    if axes.axis == -1:
        return matrix.reshape(*shape[:-1], -1)
    return jnp.moveaxis(matrix.T.reshape(shape[-1], *shape[:-2], -1), 0, -1)


# ---- shards that the kernels do not fit


class JnpEngine:
    """The kernels in plain jnp, for shards that they do not fit. Blocks are whole."""

    def statistics(self, x: jax.Array, orders: Sequence[Order]) -> list[Statistics]:
        maxima = [self._pairs(x, order)[1] for order in orders]
        return [(bits.max(), checksum(bits)) for bits in maxima]

    def codes(
        self, x: jax.Array, orders: Sequence[Order], scales: Sequence[Scales], offset: ShardOffset
    ) -> list[CodesAndScales]:
        if orders[0].refinement:
            return [self._refined_codes(x, orders[0], scales[0], offset)]
        results = []
        for order, numbers in zip(orders, scales, strict=True):
            pairs, maxima = self._pairs(x, order)
            encoder = Encoder.from_words(numbers.words(), 0)
            scale, enc = encoder.block_scales(order.add_headroom(maxima))
            axis = 1 if order.along_tokens else 2
            index = _pair_index(pairs[0].shape, order, offset) if order.stochastic else None
            packed = encoder.encode_pair(pairs, jnp.expand_dims(enc, axis), index)
            rows = packed.shape[0] * (packed.shape[1] if order.along_tokens else 1)
            results.append((packed.astype(jnp.uint8).reshape(rows, -1), scale.astype(jnp.uint8)))
        return results

    def _refined_codes(
        self, x: jax.Array, order: Order, scales: Scales, offset: ShardOffset
    ) -> CodesAndScales:
        halves, _ = self._pairs(x, order)
        axis = 1 if order.along_tokens else 2
        quantizer = BlockQuantizer(
            encoder=make_encoder(scales.words(), 0, order),
            refinement=order.refinement,
            loop=_unroll,
            load_pair=lambda pair: [lax.index_in_dim(half, pair, axis, keepdims=False) for half in halves],
        )
        blocks = halves[0].shape[0], halves[0].shape[3 - axis]
        words, scale = quantizer.quantize(_block_index(blocks, order, offset))
        codes = lax.bitcast_convert_type(jnp.stack(words, axis), jnp.uint8)
        # The bytes of a word are pairs of the block.
        codes = jnp.moveaxis(codes, -1, axis + 1)
        rows = codes.shape[0] * (BLOCK // 2 if order.along_tokens else 1)
        return codes.reshape(rows, -1), scale.astype(jnp.uint8)

    def _pairs(self, x: jax.Array, order: Order) -> tuple[list[jax.Array], jax.Array]:
        """The first and the second elements of all pairs of a block, fp32, and the bits of the block maxima."""
        flat = x.reshape(prod(x.shape[:-1]), x.shape[-1]).astype(jnp.float32)
        tokens, features = flat.shape
        if order.along_tokens:
            groups, axis = flat.reshape(tokens // BLOCK, BLOCK, features), 1
        else:
            groups, axis = flat.reshape(tokens, features // BLOCK, BLOCK), 2
        if order.rotates:
            elements = [lax.index_in_dim(groups, i, axis, keepdims=False) for i in range(BLOCK)]
            groups = jnp.stack(rotate(InterpreterOps(), elements), axis)
        maxima = abs_bits(groups).max(axis=axis)
        halves = [lax.slice_in_dim(groups, i, BLOCK, 2, axis) for i in range(2)]
        return halves, maxima


def _unroll(count: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    for i in range(count):
        carry = body(i, carry)
    return carry


def _block_index(shape: tuple[int, int], order: Order, offset: ShardOffset) -> jax.Array:
    """The index of each block in the whole operand."""
    first, second = (lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(2))
    token, feature = offset.start[0], offset.start[1]
    if order.along_tokens:
        # Groups of tokens, features.
        group = (token + offset.rows.first_token(first)) // BLOCK
        of_tokens: jax.Array = group * jnp.uint32(offset.features) + feature + second
        return of_tokens
    # Tokens, blocks of features.
    token = token + offset.rows.first_token(first // BLOCK) + first % BLOCK
    of_features: jax.Array = token * jnp.uint32(offset.features // BLOCK) + feature // BLOCK + second
    return of_features


def _pair_index(shape: tuple[int, ...], order: Order, offset: ShardOffset) -> jax.Array:
    """The index of each pair in the whole operand."""
    first, second, third = (lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(3))
    token, feature = offset.start[0], offset.start[1]
    if order.along_tokens:
        # Groups of tokens, pairs of a group, features.
        pair = ((token + offset.rows.first_token(first)) >> 1) + second
        of_tokens: jax.Array = pair * jnp.uint32(offset.features) + feature + third
        return of_tokens
    # Tokens, blocks of features, pairs of a block.
    group = first // BLOCK
    token = token + offset.rows.first_token(group) + first % BLOCK
    pair = (feature >> 1) + second * (BLOCK // 2) + third
    of_features: jax.Array = token * jnp.uint32(offset.features // 2) + pair
    return of_features
