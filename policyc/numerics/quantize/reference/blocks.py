"""Shared by the quantizers of all formats: layouts, block maxima, encoding scales and codes.

Terms: `amax` is the largest magnitude among elements that share an outer scale. It is scaled to `bound`, the largest
element times the largest block scale, so the outer scale is amax / bound. Elements are multiplied by the encoding scale
`enc`, the reciprocal of their scales. Tiny tensors are multiplied by `lift`, a power of two, first.

The order of the fp32 operations is part of a format: a division where the format multiplies changes one code in a
thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, log2
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from policyc.language.formats import FORMATS
from policyc.language.recipes import Treatment
from policyc.language.treatments import describe_options
from policyc.numerics.quantize.reference.bits import (
    E2M1,
    ELEMENTS,
    INFINITY,
    SCALES,
    Element,
    abs_bits,
    abs_bits_bf16,
    cpu_div,
    exact_div,
    from_bits,
    materialize,
    round_nearest,
    round_stochastic,
    sign_bit,
)
from policyc.numerics.quantize.reference.hadamard import Method
from policyc.numerics.quantize.reference.layout import (
    Axes,
    Layout,
    expand_per_block,
    pack,
    repeat_axis,
    split_axis,
    split_blocks,
)
from policyc.numerics.quantize.reference.random import Key, checksum, make_key, random_words

E4M3_REDUCED = 256.0
"""A bound of E4M3 block scales that leaves room for scales larger than the block maxima require."""

RANDOM_BITS = 16
"""Random bits per stochastic rounding. One 32-bit word serves four elements: each has 8 bits of its own, and as less
significant bits the 8 of a neighbour."""

SCALE_KEY = "scale"
"""The word folded into the key with which MS-EDEN rounds scales."""

LIFT_EXPONENT = 64
LIFT = 2.0**LIFT_EXPONENT
"""The lift of tiny tensors. It avoids denormals."""
TINY = (127 - 104) << 23
"""The bits of 2**-104. Tensors with a smaller maximum are lifted."""


@dataclass(frozen=True, slots=True)
class Request:
    """How one GEMM reads an operand. Without its keys and its name, it is a parameter of equations.

    Attributes:
      decoded: whether the GEMM wants values in place of codes and block scales.
      operand: a name, `gemm.operand`, to fold into the rounding key; or empty. Kernels fold it in themselves.
      key: the key of stochastic rounding. A treatment that rounds to nearest does not use it.
      sign_key: the key of the fresh signs of MS-EDEN, the same for both operands of a GEMM.
      shared_maximum: the bits of the largest magnitude of the operands that share an outer scale (`outer=shared`), one
        for each index of the batch dimensions.
    """

    treatment: Treatment
    axes: Axes = Axes()
    decoded: bool = False
    operand: str = ""
    key: Key | None = field(default=None, compare=False)
    sign_key: Key | None = field(default=None, compare=False)
    shared_maximum: jax.Array | None = field(default=None, compare=False)

    @property
    def rounding_key(self) -> Key:
        key = self.key or make_key()
        return key.fold(self.operand) if self.operand else key

    def layout(self, shape: tuple[int, ...]) -> tuple[Layout, tuple[int, ...]]:
        """The layout of an operand of this shape once quantized, and its shape padded to whole blocks."""
        layout, padded = layout_of(shape, self.treatment, self.axes)
        return replace(layout, decoded=self.decoded), padded

    def __repr__(self) -> str:
        # The mean is split off before the equation, which gets either the residual or the mean.
        treatment = replace(self.treatment, mean_split=False)
        values = " as values" if self.decoded else ""
        return f"{','.join(describe_options(treatment))}@{self.axes.axis}{values}"


# ---- layouts


def layout_of(shape: tuple[int, ...], treatment: Treatment, axes: Axes) -> tuple[Layout, tuple[int, ...]]:
    """The layout of an operand of this shape once quantized, and its shape padded to whole blocks."""
    element, block = ELEMENTS[treatment.element], FORMATS[treatment.format].block
    tile = axes.tile if treatment.tile2d else None
    padded = list(shape)
    padded[axes.axis] += -shape[axes.axis] % max(block, treatment.rht, 2 if element.bits == 4 else 1)
    if tile is not None:
        padded[tile] += -shape[tile] % block
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
    scale = SCALES.get(FORMATS[treatment.format].scale)
    if scale is not None:
        top = {"": scale.top, "ms_eden": E4M3_REDUCED, "four_over_six": float(treatment.scale_bound)}
        return E2M1.top * top[refinement_of(treatment)]
    return ELEMENTS[treatment.element].top


def refinement_of(treatment: Treatment) -> Literal["", "four_over_six", "ms_eden"]:
    """The option that makes NVFP4's block scales depend on more than block maxima; empty if there is none."""
    if treatment.rounding == "ms_eden":
        return "ms_eden"
    return "four_over_six" if treatment.scale == "four_over_six" else ""


def has_kernels(treatment: Treatment) -> bool:
    """Whether there are kernels for NVFP4 in this variant: with scales from block maxima, and no rotation but of 16."""
    if treatment.format != "nvfp4" or refinement_of(treatment) or treatment.rht not in (0, 16):
        return False
    if treatment.rht_signs != "fixed":
        return False
    return not (treatment.tile2d or treatment.mean_split or treatment.outer in ("row", "shared"))


def joins_in_kernels(treatments: Sequence[Treatment]) -> bool:
    """Whether kernels can quantize an operand with all these treatments at once, in two reads.

    A single treatment that does not rotate is left to XLA, which finds block maxima where it computes the operand.
    """
    return all(map(has_kernels, treatments)) and (len(treatments) > 1 or any(t.rht for t in treatments))


def outer_scale_axes(treatment: Treatment, axes: Axes, layout: Layout, ndim: int) -> tuple[int, ...]:
    """The axes (from the end) that an outer scale spans. 2D tiles always have one per tensor."""
    if treatment.outer == "row" and layout.tile_axis is None:
        return tuple(sorted(axes.contract or (axes.axis,)))
    return tuple(i for i in range(-ndim, 0) if i not in axes.batch)


# ---- maxima


def find_maxima(x: jax.Array, request: Request, layout: Layout) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, the bits of the maximum of each block, and those of the amax of each outer scale (reduced axes have size 1).

    The operation that computes x writes it to memory together with the maxima. Without the barrier, XLA fuses later
    operations into it: it then keeps x in fp32, without its rounding to bfloat16, and recomputes half of it.
    """
    axes = request.axes
    if layout.tile_axis is not None:
        # A weight, which is just the result of a cast: it is written first, so that later reads take half the bytes.
        x = materialize(x)
        maxima = materialize(_block_maxima(x, axes, layout))
    else:
        x, maxima = materialize((x, _block_maxima(x, axes, layout)))
    if maxima.dtype == jnp.uint16:
        maxima = maxima.astype(jnp.int32) << 16
    spanned = outer_scale_axes(request.treatment, axes, layout, x.ndim)
    return x, maxima, maxima.max(axis=spanned, keepdims=True)


def _block_maxima(x: jax.Array, axes: Axes, layout: Layout) -> jax.Array:
    """The bits of the maximum of each block or tile: 16 bits for bfloat16, which halves the memory traffic."""
    bits = abs_bits_bf16(x) if x.dtype == jnp.bfloat16 else abs_bits(x)
    blocks = split_axis(bits, axes.axis, x.shape[axes.axis] // layout.block, layout.block)
    maxima = blocks.max(axis=blocks.ndim + axes.axis)
    if layout.tile_axis is not None:
        tiles = split_axis(
            maxima, layout.tile_axis, maxima.shape[layout.tile_axis] // layout.block, layout.block
        )
        maxima = tiles.max(axis=tiles.ndim + layout.tile_axis)
    return maxima


def tensor_key(block_max: jax.Array, amax: jax.Array, request: Request, layout: Layout) -> Key:
    """The rounding key of each outer scale: the key of the operand, with its content folded in.

    The content is the bits of the maximum and a checksum of the block maxima. XLA finds both in one pass over the block
    maxima. The maximum alone is not enough: in bfloat16 it takes few values.
    """
    spanned = outer_scale_axes(request.treatment, request.axes, layout, block_max.ndim)
    return request.rounding_key.fold(amax).fold(checksum(block_max, spanned))


# ---- outer scales


def outer_maximum(amax: jax.Array, request: Request) -> jax.Array:
    """Bits of the magnitude that sets the outer scale: amax, adjusted as the option `outer` says."""
    treatment, shared = request.treatment, request.shared_maximum
    if treatment.outer == "shared" and shared is not None:
        return jnp.maximum(amax, shared.reshape(amax.shape))
    if treatment.outer == "none":  # a maximum whose outer scale is 1
        return jnp.full_like(amax, int(np.float32(bound_of(treatment)).view(np.int32)))
    return bound_after_rotation(amax, treatment.rht) if treatment.outer == "bound" else amax


def bound_after_rotation(amax: jax.Array, size: int) -> jax.Array:
    """A bound of the magnitudes after a rotation of this size, as bits, from the bits of the largest one before it.

    An element becomes a signed sum of `size` elements divided by sqrt(size), so sqrt(size) * amax is a bound. Here that
    factor is rounded up to a power of two, which changes only the exponent. An out-of-range bound is infinite.
    """
    bound = amax
    for _ in range(ceil(log2(size) / 2)):
        # Doubles it: adds 1 to the exponent, which starts at bit 23, or shifts a denormal, which has no exponent.
        bound = jnp.where(bound < 0x800000, bound << 1, jnp.minimum(bound, INFINITY - 0x800000) + 0x800000)
    return jnp.where(amax < INFINITY, bound, amax)


def divider(method: Method) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The exact division that suits a method."""
    return cpu_div if method == "cpu" else exact_div


def materialize_encoding_scale(amax: jax.Array, bound: float, method: Method) -> tuple[jax.Array, jax.Array]:
    """`find_encoding_scale`, with a barrier so that XLA does not recompute it for every consumer."""
    return materialize(find_encoding_scale(amax, bound, divider(method)))


def find_encoding_scale(
    amax: jax.Array, bound: float, div: Callable[[jax.Array, jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The encoding scale of a tensor, and its lift. `amax` has the bits of the maximum.

    The tensor times its lift times its encoding scale has the bound of the format as its maximum. The lift is a power
    of two that avoids denormals if amax is tiny, and 1 otherwise.
    """
    top, lift = lift_amax(amax)
    return jnp.where(amax == 0, jnp.float32(1), div(jnp.full_like(top, bound), top)), lift


def lift_amax(amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The lifted amax as fp32, and the lift. NaN and infinity count as 1: the scales of such a tensor are NaN."""
    lift = jnp.where(amax < TINY, jnp.float32(LIFT), jnp.float32(1))
    finite = jnp.where(amax >= INFINITY, 0x3F800000, amax)
    # The bits of a denormal are its value in units of 2**-149.
    denormal = amax.astype(jnp.float32) * jnp.float32(2.0 ** (LIFT_EXPONENT - 149))
    return jnp.where(amax < 0x800000, denormal, from_bits(finite) * lift), lift


# ---- codes


def encode_blocks(
    lifted: jax.Array, enc: jax.Array, layout: Layout, method: Method, key: Key | None = None
) -> jax.Array:
    """The codes of lifted * enc, with one `enc` per block. Packed if they have four bits.

    With a key, they are rounded stochastically.
    """
    element = ELEMENTS[layout.element]
    if element.bits == 8:
        scaled = split_blocks(lifted, layout) * expand_per_block(enc, layout)
        return _encode(scaled, None, element).reshape(lifted.shape)
    length = lifted.shape[layout.axis]
    pairs = split_axis(lifted, layout.axis, length // layout.block, layout.block // 2, 2)
    axis = pairs.ndim + layout.axis
    pair_enc = expand_per_block(enc, layout)
    bits = None
    if key is not None:
        bits = _random_bits(key, lifted.shape, layout.axis).reshape(pairs.shape)
    encode = _encode_pairs_on_cpu if method == "cpu" else _encode_pairs
    packed = encode(pairs, axis, pair_enc, bits, element)
    return packed.reshape(lifted.shape[: axis - 2] + (length // 2,) + lifted.shape[axis - 1 :])


def _encode_pairs(
    pairs: jax.Array, axis: int, enc: jax.Array, bits: jax.Array | None, element: Element
) -> jax.Array:
    """Encodes all elements, then picks the two of each byte: a program half as long, compiled to the same kernel."""
    codes = _encode_in_place(pairs, axis, enc, bits, element)
    return pack(*(lax.index_in_dim(codes, i, axis, keepdims=False) for i in range(2)))


def _encode_pairs_on_cpu(
    pairs: jax.Array, axis: int, enc: jax.Array, bits: jax.Array | None, element: Element
) -> jax.Array:
    """Joins codes by a reduction, which lets a CPU vectorize over neighbours and avoid strided loads."""
    half = lax.broadcasted_iota(jnp.uint8, pairs.shape, axis)
    nibbles = _encode_in_place(pairs, axis, enc, bits, element) << (half * 4)
    packed: jax.Array = lax.reduce(nibbles, np.uint8(0), lax.bitwise_or, (axis,))
    return packed


def _encode_in_place(
    pairs: jax.Array, axis: int, enc: jax.Array, bits: jax.Array | None, element: Element
) -> jax.Array:
    """The codes of all elements."""
    return _encode(pairs * jnp.expand_dims(enc, axis), bits, element)


def _random_bits(key: Key, shape: tuple[int, ...], axis: int) -> jax.Array:
    """`RANDOM_BITS` random bits for each element, in the lowest bits of a word, under higher bits of that word.

    Of four elements along the axis, element k has byte k of their random word as its higher byte, and byte k - 1 as its
    lower one.
    """
    quads = list(shape)
    quads[axis] = -(-shape[axis] // 4)
    words = lax.slice_in_dim(repeat_axis(random_words(key, tuple(quads)), axis, 4), 0, shape[axis], axis=axis)
    index = lax.broadcasted_iota(jnp.uint32, shape, len(shape) + axis)
    shift = ((index + 3) & 3) * 8
    return (words >> shift) | (words << ((32 - shift) & 31))


def _encode(scaled: jax.Array, bits: jax.Array | None, element: Element) -> jax.Array:
    """Signed codes, rounded to nearest, or stochastically by the low random bits."""
    if bits is None:
        code = round_nearest(jnp.abs(scaled), element)
    else:
        random = (bits & ((1 << RANDOM_BITS) - 1)).astype(jnp.int32)
        code = round_stochastic(jnp.abs(scaled), random, RANDOM_BITS, element)
    return (code | sign_bit(scaled, element)).astype(jnp.uint8)
