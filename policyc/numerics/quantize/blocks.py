"""Block quantization along one axis, for every format: scales from maxima, codes from scales.

In: an array and a `Treatment`. Out: a `Quantized`. The one trap: the order of the fp32 operations is part of
the format. A division where the format multiplies moves one code in a thousand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from policyc.language.formats import FORMATS
from policyc.language.recipes import Treatment
from policyc.numerics.quantize import kernels, random
from policyc.numerics.quantize.bits import (
    E2M1,
    E4M3,
    ELEMENTS,
    INFINITY,
    Element,
    abs_bits,
    bits_of,
    cpu_div,
    decode,
    exact_div,
    from_bits,
    half_bits,
    materialize,
    round_nearest,
    round_stochastic,
    scaled_code,
    sign_code,
)
from policyc.numerics.quantize.hadamard import Method, random_signs, rotate
from policyc.numerics.quantize.layout import TILE, Axes, Layout, Quantized, pack, split_axis, spread

_FULL, _REDUCED = 448.0, 256.0
_FOUR_OVER_SIX = {"four_over_six": ("mse", _REDUCED), "four_over_six_mae448": ("mae", _FULL)}
"""Error and bound. The second is a vendor's, for comparison."""
_LIFT = 64
_TINY = (127 - 104) << 23
_RANDOM_BITS = 16
_GROUP = 16


def quantize(
    x: jax.Array,
    treatment: Treatment,
    axes: Axes | None = None,
    *,
    key: random.Key | None = None,
    signs: random.Key | None = None,
    method: Method = "matmul",
) -> Quantized:
    """Quantizes x along `axes.axis`, padded with zeros to whole blocks.

    `key` feeds stochastic rounding, together with the bits of amax; `signs` the fresh signs of MS-EDEN, which
    both operands of a product must share. `method` changes no bit.
    """
    axes = axes or Axes()
    layout, padded = layout_of(x.shape, treatment, axes)
    if padded != x.shape:
        x = jnp.pad(x, [(0, n - m) for m, n in zip(x.shape, padded, strict=True)])
    key = random.key() if key is None else key
    if method in ("kernels", "interpreted"):
        if kernels.fit(x, treatment, axes):
            kernel = kernels.Kernels(method == "interpreted")
            return _SCHEMES[treatment.format](x, treatment, axes, layout, key, kernel)
        method = "matmul_bf16"
    if treatment.rht:
        fresh = treatment.rounding == "ms_eden"
        by = random_signs(signs or random.key(), treatment.rht) if fresh else None
        x = materialize(rotate(x, axes.axis, treatment.rht, by, method=method))
    return _SCHEMES[treatment.format](x, treatment, axes, layout, key, cpu=method == "cpu")


def layout_of(shape: tuple[int, ...], treatment: Treatment, axes: Axes) -> tuple[Layout, tuple[int, ...]]:
    """The layout of an operand of this shape once quantized, and its shape padded to whole blocks."""
    element, block = ELEMENTS[treatment.element], FORMATS[treatment.format].block
    tile = axes.tile if treatment.tile2d else None
    padded = list(shape)
    padded[axes.axis] += -shape[axes.axis] % max(block, treatment.rht, 2 if element.bits == 4 else 1)
    if tile is not None:
        padded[tile] += -shape[tile] % TILE
    layout = Layout(
        format=treatment.format,
        element=treatment.element,
        axis=axes.axis,
        block=block,
        size=shape[axes.axis],
        tile_axis=tile,
        tile_size=shape[tile] if tile is not None else 0,
        bound=bound_of(treatment),
    )
    return layout, tuple(padded)


def bound_of(treatment: Treatment) -> float:
    """The largest magnitude of an element times its block scale."""
    if treatment.format == "nvfp4":
        if treatment.scale in _FOUR_OVER_SIX:
            return E2M1.top * _FOUR_OVER_SIX[treatment.scale][1]
        return E2M1.top * (_REDUCED if treatment.rounding == "ms_eden" else _FULL)
    return ELEMENTS[treatment.element].top


def _maxima(
    x: jax.Array, axes: Axes, layout: Layout, treatment: Treatment, kernel: kernels.Kernels | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, bits of the maximum of each block, and of what each outer scale spans (with dimensions of size 1).

    x and the maxima stand in memory together, written by whatever makes x. Else XLA carries what comes after into
    what makes x: it keeps x in fp32, without its rounding to bfloat16, and halves of it once more. A weight is made
    by a cast alone: it is written first, and read again in half the bytes.
    """
    if kernel is not None:
        top = kernel.maxima(x)
    elif layout.tile_axis is not None:
        x = materialize(x)
        top = materialize(_block_maxima(x, axes, layout))
    else:
        x, top = materialize((x, _block_maxima(x, axes, layout)))
    if top.dtype == jnp.uint16:
        top = top.astype(jnp.int32) << 16
    return x, top, top.max(axis=spanned(treatment, axes, layout, x.ndim), keepdims=True)


def _block_maxima(x: jax.Array, axes: Axes, layout: Layout) -> jax.Array:
    """Of bfloat16 as 16 bits: half the bytes to write and to read."""
    bits = half_bits(x) if x.dtype == jnp.bfloat16 else abs_bits(x)
    blocks = split_axis(bits, axes.axis, x.shape[axes.axis] // layout.block, layout.block)
    top = blocks.max(axis=blocks.ndim + axes.axis)
    if layout.tile_axis is not None:
        tiles = split_axis(top, layout.tile_axis, top.shape[layout.tile_axis] // TILE, TILE)
        top = tiles.max(axis=tiles.ndim + layout.tile_axis)
    return top


def spanned(treatment: Treatment, axes: Axes, layout: Layout, ndim: int) -> tuple[int, ...]:
    """The axes (from the end) that share an outer scale. Those of 2D tiles do, by tensor, in any case."""
    if treatment.outer == "row" and layout.tile_axis is None:
        return tuple(sorted(axes.contract or (axes.axis,)))
    return tuple(i for i in range(-ndim, 0) if i not in axes.batch)


def _with_headroom(bits: jax.Array, treatment: Treatment) -> jax.Array:
    if treatment.headroom == 1:
        return bits
    # Infinity and NaN stay what they are under the product.
    return bits_of(from_bits(bits) * jnp.float32(float(treatment.headroom)))


def _lift(amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """amax as fp32, and a power of two, both for arithmetic without denormals where amax is tiny.

    NaN and infinity are read as 1 (the scales of such a tensor are NaN anyway).
    """
    lift = jnp.where(amax < _TINY, jnp.float32(2.0**_LIFT), jnp.float32(1))
    sane = jnp.where(amax >= INFINITY, 0x3F800000, amax)
    # The integer is the denormal in units of 2**-149.
    count = amax.astype(jnp.float32) * jnp.float32(2.0 ** (_LIFT - 149))
    return jnp.where(amax < 0x800000, count, from_bits(sane) * lift), lift


def _encoding(
    amax: jax.Array, bound: float, div: Callable[[jax.Array, jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """What a tensor times its lift is multiplied by so that its maximum becomes the bound, and that lift; stored."""
    top, lift = _lift(amax)
    return materialize((jnp.where(amax == 0, jnp.float32(1), div(jnp.float32(bound), top)), lift))


def _nvfp4(
    x: jax.Array,
    t: Treatment,
    axes: Axes,
    layout: Layout,
    key: random.Key,
    kernel: kernels.Kernels | None = None,
    *,
    cpu: bool = False,
) -> Quantized:
    """With `kernel`, x is not rotated yet: that is part of what the kernels do."""
    x, *found = _maxima(x, axes, layout, t, kernel)
    blocks, amax = (_with_headroom(b, t) for b in found)
    div = cpu_div if cpu else exact_div
    enc_top, lift = _encoding(amax, layout.bound, div)
    dec_top = materialize(div(jnp.float32(1), enc_top))
    block_top = from_bits(blocks) * lift
    key = key.fold(from_bits(amax))

    def scaled(fraction: float) -> tuple[jax.Array, jax.Array]:
        ideal = block_top * (enc_top * jnp.float32(fraction))
        code = round_nearest(ideal, E4M3)
        return code, div(jnp.float32(1), decode(code, E4M3) * dec_top)

    # A product with 1 is exact, so that only a tiny tensor sees the lift.
    lifted = x.astype(jnp.float32) * lift
    scale, enc = scaled(1 / 6)
    if t.scale in _FOUR_OVER_SIX:
        unit = lifted * enc_top
        scale, enc = _four_over_six(lifted, unit, (scale, enc), scaled(1 / 4), layout, t.scale)
    # As bytes already here: they are a quarter of the words, and nothing has to turn those into bytes later.
    byte = jnp.where(amax >= INFINITY, E4M3.nan or 0, scale).astype(jnp.uint8)
    byte, enc = materialize((byte, enc))
    codes = kernel.codes(x, enc, lift, key, t) if kernel else _codes(lifted, enc, t, layout, key, cpu)
    if t.rounding == "ms_eden":
        scale = _corrected(lifted, enc, byte.astype(jnp.int32), layout, key.fold("scale"))
        byte = jnp.where(amax >= INFINITY, E4M3.nan or 0, scale).astype(jnp.uint8)
    return Quantized(codes=codes, scales=byte, amax=from_bits(amax), layout=layout)


def _codes(
    lifted: jax.Array, enc: jax.Array, t: Treatment, layout: Layout, key: random.Key, cpu: bool
) -> jax.Array:
    """Codes of x * enc, packed where they have four bits."""
    element = ELEMENTS[layout.element]
    length = lifted.shape[layout.axis]
    if element.bits == 8:
        return _code(_blocked(lifted, layout) * spread(enc, layout), None, element).reshape(lifted.shape)
    pairs = split_axis(lifted, layout.axis, length // layout.block, layout.block // 2, 2)
    at = pairs.ndim + layout.axis
    by = spread(enc, layout)
    # One word for a pair: 16 random bits each.
    half = pairs.shape[:at] + pairs.shape[at + 1 :]
    word = random.words(_key_like(key, layout), half) if t.rounding == "sr" else None
    if cpu:
        # Each element where it lies: a CPU does several neighbours at once, and no loads with gaps.
        place = lax.broadcasted_iota(jnp.uint8, pairs.shape, at)
        bits = None if word is None else jnp.expand_dims(word, at) >> (place.astype(jnp.uint32) * 16)
        nibbles = _code(pairs * jnp.expand_dims(by, at), bits, element) << (place * 4)
        packed: jax.Array = lax.reduce(nibbles, np.uint8(0), lax.bitwise_or, (at,))
    else:
        packed = pack(
            *(
                _code(
                    lax.index_in_dim(pairs, i, at, keepdims=False) * by,
                    None if word is None else word >> (16 * i),
                    element,
                )
                for i in range(2)
            )
        )
    return packed.reshape(lifted.shape[: at - 2] + (length // 2,) + lifted.shape[at - 1 :])


def _code(scaled: jax.Array, bits: jax.Array | None, element: Element) -> jax.Array:
    """Codes with their sign, rounded to nearest, or by the low random bits."""
    if bits is None:
        code = round_nearest(jnp.abs(scaled), element)
    else:
        chance = (bits & ((1 << _RANDOM_BITS) - 1)).astype(jnp.int32)
        code = round_stochastic(jnp.abs(scaled), chance, _RANDOM_BITS, element)
    return (code | sign_code(scaled, element)).astype(jnp.uint8)


def _key_like(key: random.Key, layout: Layout) -> random.Key:
    """A key per outer scale, shaped to meet the pairs: its axis of size 1 becomes two."""
    at = key.a.ndim + layout.axis + 1
    return random.Key(jnp.expand_dims(key.a, at), jnp.expand_dims(key.b, at))


def _total(terms: jax.Array, layout: Layout) -> jax.Array:
    """Sums over blocks in one order everywhere: halves are added until one is left."""
    if layout.tile_axis is not None:
        # The dimension inside the blocks counts as one more where the tile's axis comes before it.
        tile = layout.tile_axis - (1 if layout.tile_axis < layout.axis else 0)
        terms = _halve(split_axis(terms, tile, terms.shape[tile] // TILE, TILE), tile)
    return _halve(terms, layout.axis)


def _halve(terms: jax.Array, axis: int) -> jax.Array:
    while terms.shape[axis] > 1:
        half = terms.shape[axis] // 2
        low = lax.slice_in_dim(terms, 0, half, axis=axis)
        terms = low + lax.slice_in_dim(terms, half, 2 * half, axis=axis)
    return jnp.squeeze(terms, axis)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    # The select keeps the product from being contracted into the sum that follows.
    p = a * b
    return jnp.where(p < jnp.float32(1e30), p, jnp.float32(1e30))


Candidate = tuple[jax.Array, jax.Array]


def _four_over_six(
    lifted: jax.Array, unit: jax.Array, six: Candidate, four: Candidate, layout: Layout, variant: str
) -> Candidate:
    """The scale (and its reciprocal) of smaller error in each block; where they tie, the one for 6.

    `unit` are the elements over the outer scale: what codes and block scales should multiply to.
    """
    six, four = materialize((six, four))
    target = jnp.abs(_blocked(unit, layout))
    target = jnp.where(target < jnp.float32(1e5), target, jnp.float32(1e5))

    def loss(scale: jax.Array, enc: jax.Array) -> jax.Array:
        code = round_nearest(jnp.abs(_blocked(lifted, layout)) * spread(enc, layout), E2M1)
        off = jnp.abs(target - decode(code, E2M1) * decode(spread(scale, layout), E4M3))
        return _total(off if _FOUR_OVER_SIX[variant][0] == "mae" else _product(off, off), layout)

    better = loss(*four) < loss(*six)
    return jnp.where(better, four[0], six[0]), jnp.where(better, four[1], six[1])


def _blocked(x: jax.Array, layout: Layout) -> jax.Array:
    return split_axis(x, layout.axis, x.shape[layout.axis] // layout.block, layout.block)


def _corrected(
    lifted: jax.Array, enc: jax.Array, scale: jax.Array, layout: Layout, key: random.Key
) -> jax.Array:
    """MS-EDEN: each scale times <v,v>/<v,q>, rounded stochastically."""
    t = jnp.minimum(jnp.abs(_blocked(lifted, layout)) * spread(enc, layout), jnp.float32(1e4))
    q = decode(round_nearest(t, E2M1), E2M1)
    gain = exact_div(_total(_product(t, t), layout), _total(_product(t, q), layout))
    value = decode(scale, E4M3) * jnp.where(scale == 0, jnp.float32(1), gain)
    chance = (random.words(key, scale.shape) >> (32 - _RANDOM_BITS)).astype(jnp.int32)
    return round_stochastic(value, chance, _RANDOM_BITS, E4M3)


def _mx(x: jax.Array, t: Treatment, axes: Axes, layout: Layout, key: random.Key, *, cpu: bool) -> Quantized:
    """Power-of-two scales (E8M0) per block, no outer scale."""
    x, blocks, amax = _maxima(x, axes, layout, t)
    byte = e8m0(blocks, ELEMENTS[layout.element], "rceil" if layout.format == "mxfp8" else t.scale_rounding)
    enc = materialize(from_bits((254 - byte) << 23))
    codes = _codes(x.astype(jnp.float32), enc, t, layout, key.fold(from_bits(amax)), cpu)
    byte = jnp.where(blocks >= INFINITY, 255, byte)
    return Quantized(codes=codes, scales=byte.astype(jnp.uint8), amax=None, layout=layout)


def e8m0(blocks: jax.Array, element: Element, rounding: str) -> jax.Array:
    """Exponent bytes (int32) from the bits of block maxima."""
    top = bits_of(jnp.float32(element.top))
    if rounding == "rceil":
        above = (blocks & 0x7FFFFF) > (top & 0x7FFFFF)
        exponent = (blocks >> 23) + above.astype(jnp.int32)
    elif rounding == "even":
        exponent = (blocks + (1 << (element.shift - 1))) >> 23
    else:
        exponent = blocks >> 23
    return jnp.clip(exponent - ((top >> 23) - 127), 0, 254)


def _fp8(
    x: jax.Array,
    t: Treatment,
    axes: Axes,
    layout: Layout,
    key: random.Key,
    kernel: kernels.Kernels | None = None,
    *,
    cpu: bool = False,
) -> Quantized:
    """One outer scale, no blocks. A kernel writes both orders of the codes in one pass."""
    del key
    element = ELEMENTS[layout.element]
    span = spanned(t, axes, layout, x.ndim)
    words = x.dtype == jnp.bfloat16 and x.shape[-1] % _GROUP == 0 and -1 in span and not cpu
    # An 8-bit product wants one operand transposed. Unless x stands in memory first, XLA carries that transpose
    # into everything that makes x, and makes it three times. What makes x finds the maxima of groups on its way.
    if words:
        groups = replace(layout, axis=-1, block=_GROUP)
        along = replace(axes, axis=-1, contract=axes.contract or (axes.axis,))
        x, _, amax = _maxima(x, along, groups, t)
    else:
        x = materialize(x)
        amax = abs_bits(x).max(axis=span, keepdims=True)
    enc, lift = _encoding(amax, layout.bound, cpu_div if cpu else exact_div)

    code = partial(scaled_code, lift=lift, enc=enc, amax=amax, element=element)
    if kernel is None:
        codes = _by_words(x, code) if words else code(x.astype(jnp.float32)).astype(jnp.uint8)
        across = jnp.moveaxis(codes, -1, 0) if axes.both else None
    else:
        codes, across = kernel.both(x, lift, enc, amax, element)
    return Quantized(codes=codes, scales=None, amax=from_bits(amax), across=across, layout=layout)


def _by_words(x: jax.Array, code: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Codes of a bfloat16 array, four in a word: XLA's loops move words at the speed of memory, bytes at 0.6 of it.

    The words stand in memory, so that whoever wants the codes transposed moves bytes.
    """
    pairs = lax.bitcast_convert_type(split_axis(x, -1, x.shape[-1] // 4, 2, 2), jnp.int32)
    word = jnp.int32(0)
    for i in range(2):
        pair = lax.index_in_dim(pairs, i, axis=-1, keepdims=False)
        low, high = from_bits(pair << 16), from_bits(pair & ~0xFFFF)
        word |= (code(low) | (code(high) << 8)) << (16 * i)
    return lax.bitcast_convert_type(materialize(word), jnp.uint8).reshape(x.shape)


_SCHEMES: dict[str, Callable[..., Quantized]] = {
    "nvfp4": _nvfp4,
    "mxfp4": _mx,
    "mxfp8": _mx,
    "fp8": _fp8,
}
