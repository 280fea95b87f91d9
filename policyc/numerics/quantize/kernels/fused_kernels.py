"""GPU kernels (Pallas, Mosaic) that quantize a matrix to NVFP4 in two reads.

The first kernel finds maxima, the second one writes codes and scales: of blocks of features (rows), of blocks of tokens
(columns), or of both. Rotated values are never written to memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, update_wrapper
from itertools import islice
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from policyc.jaxcore.primitives.lowering import call_lowered_once, merge_mapped_axes
from policyc.language.recipes import Treatment
from policyc.numerics.quantize.kernels import kernel_bodies, kernel_ops
from policyc.numerics.quantize.kernels.kernel_orders import WORDS, Order
from policyc.numerics.quantize.kernels.kernel_tiles import (
    BLOCK,
    GROUPS,
    TILE_BLOCKS,
    TILE_FEATURES,
    TILE_TOKENS,
    Operands,
    RowLengths,
)
from policyc.numerics.quantize.reference import random
from policyc.numerics.quantize.reference.blocks import has_kernels, refinement_of
from policyc.numerics.quantize.reference.layout import Axes, Quantized
from policyc.numerics.quantize.reference.values import Scale

_Shape = tuple[tuple[int, ...], Any]

Statistics = tuple[jax.Array, jax.Array]
"""The bits of the largest magnitude, and the checksum of the bits of the block maxima."""


def fits(x: jax.Array, treatment: Treatment, axes: Axes) -> bool:
    """Whether the kernels can quantize this operand, including its rotation, with scales from block maxima."""
    rotates_rows = treatment.rht and axes.axis == -1
    return has_kernels(treatment) and not rotates_rows and _fits_operand(x, axes)


def fits_tiles(x: jax.Array, treatment: Treatment, axes: Axes) -> bool:
    """Whether the kernels can write the values of this operand, a weight with tiles of 16 x 16."""
    if treatment.format != "nvfp4" or not treatment.tile2d or refinement_of(treatment) or treatment.rht:
        return False
    is_plain = treatment.rounding == "rne" and treatment.outer != "row" and not treatment.mean_split
    is_matrix = x.dtype == jnp.bfloat16 and x.ndim == 2 and axes.tile is not None and not axes.batch
    return is_plain and is_matrix and fits_shape(x.shape)


def _fits_operand(x: jax.Array, axes: Axes) -> bool:
    if axes.batch or x.dtype != jnp.bfloat16 or x.ndim not in (2, 3) or not fits_shape(x.shape):
        return False
    return axes.axis == -1 or (axes.axis == -2 and x.shape[-2] % BLOCK == 0)


def fits_decoding(q: Quantized) -> bool:
    """Whether the kernels can decode these codes. They read whole tiles of rows of 16 blocks."""
    layout = q.layout
    is_packed = layout.format == "nvfp4" and layout.packed and layout.axis == -1 and layout.tile_axis is None
    return is_packed and q.scales is not None and q.scales.size % (TILE_BLOCKS * TILE_TOKENS) == 0


def fits_alone(x: jax.Array, treatment: Treatment, axes: Axes) -> bool:
    """Whether the kernels can quantize this operand in one order, with less memory traffic than XLA.

    Without a rotation, XLA finds block maxima where it computes x, and needs only one read of x for the codes.
    """
    return bool(treatment.rht) and fits(x, treatment, axes)


def fits_shape(shape: tuple[int, ...]) -> bool:
    """Whether an array of this shape has whole tiles of tokens, and at least one of features."""
    has_features = shape[-1] % BLOCK == 0 and shape[-1] >= TILE_FEATURES
    return has_features and prod(shape[:-1]) % TILE_TOKENS == 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class OrderScales:
    """Scalars from which the kernels compute the scales of one order. In XLA, that would take extra kernels.

    Attributes:
      amax: the bits of the largest magnitude, as `blocks.outer_maximum` returns them.
      maximum, content: the statistics of the operand.
      key: the key of its stochastic rounding, before the name of the order's operand is folded in.
    """

    amax: jax.Array
    maximum: jax.Array
    content: jax.Array
    key: random.Key

    def words(self) -> list[jax.Array]:
        """All fields, uint32. Each is an array of its own: XLA would run a kernel to join them."""
        numbers = map(jnp.asarray, (self.amax, self.maximum, self.content, self.key.a, self.key.b))
        return [lax.bitcast_convert_type(n, jnp.uint32).reshape(1) for n in numbers]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOffset:
    """The position of a shard in the global operand, by which random words are indexed.

    Attributes:
      start: the index of its first token and of its first feature, uint32.
      rows: how its tokens are numbered in the whole operand.
      features: the number of features of the whole operand.
    """

    start: jax.Array
    rows: RowLengths
    features: int

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> ShardOffset:
        rows = RowLengths(shard=shape[-2], whole=shape[-2])
        return cls(start=jnp.zeros(2, jnp.uint32), rows=rows, features=shape[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The kernels. `interpret` runs them without a GPU, slowly."""

    interpret: bool = False

    def statistics(self, x: jax.Array, orders: Sequence[Order]) -> list[Statistics]:
        """The largest magnitude and the checksum of the block maxima, in each order."""
        # Maxima and checksums do not depend on how codes are rounded.
        plain = tuple(replace(order, stochastic=False, decoded=False, operand="") for order in orders)
        run = merge_mapped_axes(partial(_find_statistics, orders=plain, interpret=self.interpret))
        maxima, checksums = run(_as_words(x)[None])
        return reduce_statistics([(maxima[0, i], checksums[0, i]) for i in range(len(orders))])

    def codes(
        self, x: jax.Array, orders: Sequence[Order], scales: Sequence[OrderScales], offset: ShardOffset
    ) -> list[list[jax.Array]]:
        """Packed codes and block scales, or values, for each order.

        In an order along tokens, they have the shapes (tokens / 2, features) and (tokens / 16, features), with tokens
        last in memory, as GEMMs read them.
        """
        options = {"orders": tuple(orders), "rows": offset.rows, "features": offset.features}
        run = merge_mapped_axes(partial(_write_codes, **options, interpret=self.interpret))
        scalars = [word for s in scales for word in s.words()]
        results = iter(run(_as_words(x)[None], offset.start[None], *scalars))
        return [[_arrange(array[0], order) for array in islice(results, order.results)] for order in orders]

    def values(self, q: Quantized) -> Quantized:
        """Replaces codes and block scales by bfloat16 values. Requires `fits_decoding`."""
        assert q.scales is not None
        run = merge_mapped_axes(partial(_decode, interpret=self.interpret))
        words = lax.bitcast_convert_type(q.codes.reshape(-1, TILE_BLOCKS, WORDS // 4, 4), jnp.uint32)
        codes, scales = words, q.scales.reshape(-1, TILE_BLOCKS)
        values = lax.bitcast_convert_type(run(codes[None], scales[None])[0], jnp.bfloat16)
        shape = (*q.codes.shape[:-1], 2 * q.codes.shape[-1])
        layout = replace(q.layout, decoded=True)
        return replace(q, codes=values.reshape(shape), scales=None, layout=layout)

    def outer_factors(self, scales: Sequence[Scale]) -> Sequence[jax.Array]:
        """Like `values.write_outer_factors`, for scales of whole tensors. XLA needs some 50 instructions for it."""
        bounds = tuple(bound for _, bound in scales)
        run = merge_mapped_axes(partial(_find_outer_factors, bounds=bounds, interpret=self.interpret))
        factors = run(*(amax.reshape(1) for amax, _ in scales))
        return tuple(factor.reshape(()) for factor in factors)


def reduce_statistics(parts: Sequence[Statistics]) -> list[Statistics]:
    """The largest maximum and the sum of the checksums of each order. One reduction, so one XLA kernel."""
    maxima, checksums = zip(*parts, strict=True)
    count = len(parts)

    def combine(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
        operations = [lax.max] * count + [lax.add] * count
        return [operation(x, y) for operation, x, y in zip(operations, a, b, strict=True)]

    starts = [jnp.int32(0)] * count + [jnp.uint32(0)] * count
    reduced = lax.reduce((*maxima, *checksums), tuple(starts), combine, tuple(range(maxima[0].ndim)))
    return list(zip(reduced[:count], reduced[count:], strict=True))


# ---- calls of kernels, jitted so that equal kernels are traced once. All arrays have a leading dimension of operands,
# which kernels see as one matrix.


@partial(jax.jit, static_argnames=("orders", "interpret"))
def _find_statistics(words: jax.Array, *, orders: tuple[Order, ...], interpret: bool) -> Sequence[jax.Array]:
    count, tokens, blocks, _ = words.shape
    groups = next(n for n in (16, 8, 4) if tokens % (n * BLOCK) == 0)
    grid = (count * tokens // (groups * BLOCK), -(-blocks // TILE_BLOCKS))
    shape = (len(orders), *grid, BLOCK)
    kernel = _Kernel(
        body=kernel_bodies.find_statistics,
        options=_items({"orders": orders, "groups": groups}),
        outs=((shape, jnp.int32), (shape, jnp.uint32)),
        grid=grid,
        scratch=(),
    )
    parts = kernel.run(_join_operands(words), interpret=interpret)
    return [jnp.moveaxis(part.reshape(len(orders), count, -1), 1, 0) for part in parts]


@partial(jax.jit, static_argnames=("orders", "rows", "features", "interpret"))
def _write_codes(
    words: jax.Array,
    start: jax.Array,
    *scalars: jax.Array,
    orders: tuple[Order, ...],
    rows: RowLengths,
    features: int,
    interpret: bool,
) -> Sequence[jax.Array]:
    count, tokens, blocks, _ = words.shape
    operands = Operands(count=count, tokens=tokens, rows=rows, features=features)
    all_tokens = count * tokens
    outs: list[_Shape] = []
    scratch: list[_Shape] = []
    for order in orders:
        columns = (blocks, WORDS, 2)
        if order.decoded and order.along_tokens:
            outs += [((*columns, all_tokens // 2), jnp.uint32)]
        elif order.decoded:
            outs += [((all_tokens, blocks, WORDS), jnp.uint32)]
        elif order.along_tokens:
            outs += [
                ((*columns, all_tokens // 8), jnp.uint32),
                ((*columns, all_tokens // TILE_TOKENS), jnp.uint32),
            ]
            scratch += [((2, TILE_BLOCKS, WORDS, 2 * GROUPS), jnp.uint32)]
        else:
            outs += [((all_tokens, blocks, WORDS // 4), jnp.uint32), ((all_tokens, blocks), jnp.uint8)]
    kernel = _Kernel(
        body=kernel_bodies.write_codes,
        options=_items({"orders": orders, "operands": operands}),
        outs=tuple(outs),
        grid=(all_tokens // TILE_TOKENS, -(-blocks // TILE_BLOCKS)),
        scratch=tuple(scratch),
    )
    results = kernel.run(_join_operands(words), start, *scalars, interpret=interpret)
    along_tokens = [order.along_tokens for order in orders for _ in range(order.results)]
    return [_split_operands(r, count, along) for r, along in zip(results, along_tokens, strict=True)]


@partial(jax.jit, static_argnames="interpret")
def _decode(codes: jax.Array, scales: jax.Array, *, interpret: bool) -> jax.Array:
    count, rows, *_ = codes.shape
    kernel = _Kernel(
        body=kernel_bodies.decode_rows,
        options=(),
        outs=(((count * rows, TILE_BLOCKS, WORDS), jnp.uint32),),
        grid=(count * rows // TILE_TOKENS, 1),
        scratch=(),
    )
    (values,) = kernel.run(_join_operands(codes), _join_operands(scales), interpret=interpret)
    return values.reshape(count, rows, TILE_BLOCKS, WORDS)


@partial(jax.jit, static_argnames=("bounds", "interpret"))
def _find_outer_factors(
    *maxima: jax.Array, bounds: tuple[float, ...], interpret: bool
) -> Sequence[jax.Array]:
    (count,) = maxima[0].shape
    kernel = _Kernel(
        body=kernel_bodies.write_outer_factors,
        options=_items({"bounds": bounds}),
        outs=(((count,), jnp.float32),) * 2,
        grid=(count, 1),
        scratch=(),
    )
    return kernel.run(*maxima, interpret=interpret)


def _join_operands(words: jax.Array) -> jax.Array:
    return words.reshape(-1, *words.shape[2:])


def _split_operands(array: jax.Array, count: int, along_tokens: bool) -> jax.Array:
    """Codes or scales with a leading dimension of operands. Tokens are the last dimension of `array`, or the first."""
    if not along_tokens:
        return array.reshape(count, -1, *array.shape[1:])
    return jnp.moveaxis(array.reshape(*array.shape[:-1], count, -1), -2, 0)


_MOST_INSTANCES = 65535
"""The most instances that CUDA can launch along any grid axis but one. With Mosaic, that one is the last axis."""
_Options = tuple[tuple[str, Any], ...]


def _items(options: dict[str, Any]) -> _Options:
    return tuple(options.items())


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class _Kernel:
    """A kernel: its body and options, its results, its grid, and its scratch memory."""

    body: Callable[..., None]
    options: _Options
    outs: tuple[_Shape, ...]
    grid: tuple[int, int]
    scratch: tuple[_Shape, ...]

    def run(self, *arguments: jax.Array, interpret: bool) -> Sequence[jax.Array]:
        if not interpret:
            return call_lowered_once(self, self.outs, "cuda", *arguments)
        from jax.experimental.pallas import tpu

        run = pl.pallas_call(
            partial(self.body, kernel_ops.InterpreterOps(), **dict(self.options)),
            self._results(),
            grid=self.grid,
            scratch_shapes=[tpu.VMEM(*s) for s in self.scratch],
            interpret=True,
        )
        arrays: Sequence[jax.Array] = run(*arguments)
        return arrays

    def __call__(self, *arguments: jax.Array) -> Sequence[jax.Array]:
        """Calls the kernel on a GPU."""
        from jax.experimental.pallas import mosaic_gpu

        body = partial(self.body, kernel_ops.MosaicOps(mosaic_gpu), **dict(self.options))
        update_wrapper(body, self.body)  # its name in profiles
        lane = mosaic_gpu.LoweringSemantics.Lane
        # Instances find their offset by axis name, so the order of the axes does not affect the result.
        axes = list(zip(kernel_ops.GRID, self.grid, strict=True))
        if self.grid[0] > _MOST_INSTANCES:
            axes.reverse()
        run = mosaic_gpu.kernel(
            body,
            out_type=self._results(),
            grid=tuple(size for _, size in axes),
            grid_names=tuple(name for name, _ in axes),
            scratch_types=[mosaic_gpu.SMEM(*s) for s in self.scratch],
            # No thread reads what another one wrote, so no barriers are needed.
            compiler_params=mosaic_gpu.CompilerParams(lowering_semantics=lane, unsafe_no_auto_barriers=True),
        )
        arrays: Sequence[jax.Array] = run(*arguments)
        return arrays

    def _results(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(*out) for out in self.outs]


def _as_words(x: jax.Array) -> jax.Array:
    """A bfloat16 array as words of two neighbouring features: (tokens, blocks, words of a block)."""
    pairs = x.reshape(prod(x.shape[:-1]), x.shape[-1] // BLOCK, WORDS, 2)
    return lax.bitcast_convert_type(pairs, jnp.uint32)


def _arrange(array: jax.Array, order: Order) -> jax.Array:
    """Codes or scales as bytes, or values as bfloat16, in the shapes of `Kernels.codes`."""
    if array.dtype == jnp.uint32:
        array = lax.bitcast_convert_type(array, jnp.bfloat16 if order.decoded else jnp.uint8)
    if order.along_tokens:
        return array.reshape(array.shape[0] * BLOCK, -1).T
    return array.reshape(array.shape[0], -1)
