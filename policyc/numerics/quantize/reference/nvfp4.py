"""NVFP4 and its options: E2M1 elements, a scale per block of 16 in E4M3 or UE5M3, and an fp32 outer scale."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from policyc.language.formats import FORMATS
from policyc.numerics.quantize.reference.bits import (
    E2M1,
    E4M3,
    INFINITY,
    SCALES,
    Element,
    decode,
    exact_div,
    from_bits,
    materialize,
    multiply_unfused,
    round_nearest,
    round_stochastic,
)
from policyc.numerics.quantize.reference.blocks import (
    RANDOM_BITS,
    SCALE_KEY,
    Request,
    divider,
    encode_blocks,
    find_maxima,
    materialize_encoding_scale,
    outer_maximum,
    tensor_key,
)
from policyc.numerics.quantize.reference.hadamard import Method, rotate_operand
from policyc.numerics.quantize.reference.layout import (
    Layout,
    Quantized,
    expand_per_block,
    split_axis,
    split_blocks,
)
from policyc.numerics.quantize.reference.random import Key, random_words

ScaleCandidate = tuple[jax.Array, jax.Array]
"""The codes of block scales, and the encoding scales."""


def quantize_nvfp4(x: jax.Array, request: Request, layout: Layout, method: Method) -> Quantized:
    """Quantizes to NVFP4. `orders.quantize_orders` does the same with kernels."""
    t, div, unrotated = request.treatment, divider(method), x
    x = rotate_operand(x, t, request.axes.axis, request.sign_key, method)
    x, block_max, amax = find_maxima(x, request, layout)
    content = block_max
    if t.outer == "bound":
        _, content, amax = find_maxima(unrotated, request, layout)
    key = None if t.rounding == "rne" else tensor_key(content, amax, request, layout)
    element = SCALES[FORMATS[t.format].scale]
    largest = block_max if t.outer == "none" else amax
    amax = outer_maximum(amax, request)
    tensor_enc, lift = materialize_encoding_scale(amax, layout.bound, method)
    tensor_dec = materialize(div(jnp.float32(1), tensor_enc))
    lifted_max = from_bits(block_max) * lift

    def block_scales(fraction: float) -> ScaleCandidate:
        ideal = lifted_max * (tensor_enc * jnp.float32(fraction))
        code = round_nearest(ideal, element)
        return code, div(jnp.float32(1), decode(code, element) * tensor_dec)

    # The lift is 1, which changes nothing, except for tiny tensors.
    lifted = x.astype(jnp.float32) * lift
    scale, enc = block_scales(1 / 6)
    if t.scale == "four_over_six":
        target = lifted * tensor_enc
        squares = t.scale_error == "mse"
        scale, enc = _choose_four_or_six(lifted, target, (scale, enc), block_scales(1 / 4), layout, squares)
    # Convert to bytes before the barrier: they take a quarter of the memory, and no later pass has to convert.
    byte, enc = materialize((_scale_bytes(scale, largest, element), enc))
    codes = encode_blocks(lifted, enc, layout, method, key if t.rounding == "sr" else None)
    if t.rounding == "ms_eden" and key is not None:
        scale = _correct_scales(lifted, enc, byte.astype(jnp.int32), layout, key.fold(SCALE_KEY))
        byte = _scale_bytes(scale, largest, element)
    return Quantized(codes=codes, scales=byte, amax=from_bits(amax), layout=layout)


def _scale_bytes(scale: jax.Array, largest: jax.Array, element: Element) -> jax.Array:
    """The bytes of block scales: NaN if the largest magnitude of the tensor, or of the block, is not finite."""
    return jnp.where(largest >= INFINITY, element.nan or 0, scale).astype(jnp.uint8)


# ---- four over six


def _choose_four_or_six(
    lifted: jax.Array,
    target: jax.Array,
    six: ScaleCandidate,
    four: ScaleCandidate,
    layout: Layout,
    squares: bool,
) -> ScaleCandidate:
    """The candidate with the smaller sum of errors, or of their `squares`, in each block; on a tie, the one for 6.

    `target` is the elements divided by the outer scale, which codes times block scales approximate.
    """
    six, four = materialize((six, four))
    magnitude = jnp.abs(split_blocks(target, layout))
    # Keeps the product in `target` out of a fused multiply-add, see `multiply_unfused`. Finite magnitudes are at most
    # 6 * 448.
    magnitude = jnp.where(magnitude < jnp.float32(1e5), magnitude, jnp.float32(1e5))

    def loss(scale: jax.Array, enc: jax.Array) -> jax.Array:
        code = round_nearest(jnp.abs(split_blocks(lifted, layout)) * expand_per_block(enc, layout), E2M1)
        value = decode(code, E2M1) * decode(expand_per_block(scale, layout), E4M3)
        error = jnp.abs(magnitude - value)
        return _sum_blocks(multiply_unfused(error, error) if squares else error, layout)

    is_better = loss(*four) < loss(*six)
    return jnp.where(is_better, four[0], six[0]), jnp.where(is_better, four[1], six[1])


# ---- MS-EDEN


def _correct_scales(
    lifted: jax.Array, enc: jax.Array, scale: jax.Array, layout: Layout, key: Key
) -> jax.Array:
    """Multiplies each scale by <v,v>/<v,q> and rounds it stochastically.

    v is the magnitudes divided by their scales, and q is v rounded to nearest. v is at most slightly above 6, except in
    a block whose scale is zero, where it may be infinite. The limit of 1e4 keeps its squares finite.
    """
    v = jnp.minimum(jnp.abs(split_blocks(lifted, layout)) * expand_per_block(enc, layout), jnp.float32(1e4))
    q = decode(round_nearest(v, E2M1), E2M1)
    vv, vq = (_sum_blocks(multiply_unfused(v, other), layout) for other in (v, q))
    gain = exact_div(vv, vq)
    value = decode(scale, E4M3) * jnp.where(scale == 0, jnp.float32(1), gain)
    random = (random_words(key, scale.shape) >> (32 - RANDOM_BITS)).astype(jnp.int32)
    return round_stochastic(value, random, RANDOM_BITS, E4M3)


# ---- sums that are the same on every machine


def _sum_blocks(terms: jax.Array, layout: Layout) -> jax.Array:
    """Sums over each block or tile, in the same order on every machine."""
    if layout.tile_axis is not None:
        # Splitting the quantized axis shifts a tile axis before it by one, counted from the end.
        tile = layout.tile_axis - (1 if layout.tile_axis < layout.axis else 0)
        terms = _sum_pairwise(split_axis(terms, tile, terms.shape[tile] // layout.block, layout.block), tile)
    return _sum_pairwise(terms, layout.axis)


def _sum_pairwise(terms: jax.Array, axis: int) -> jax.Array:
    """Adds the two halves of an axis until one element is left."""
    while terms.shape[axis] > 1:
        half = terms.shape[axis] // 2
        low = lax.slice_in_dim(terms, 0, half, axis=axis)
        terms = low + lax.slice_in_dim(terms, half, 2 * half, axis=axis)
    return jnp.squeeze(terms, axis)
