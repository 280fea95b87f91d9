"""Transformer Engine's own kernels: its NVFP4 quantizers and its cuBLAS GEMM.

The results are those of the emulation, up to the order of fp32 sums and the random stream. A GEMM that its kernels do
not take is not run here: `obstacle` says why, and the plan says which backend runs it instead. On platforms other than
CUDA the emulation runs, which gives the same numbers.

Warning: if a kernel does not take a layout, Transformer Engine silently runs its own JAX code, which is wrong for
scales above 240. So this module lays operands out such that a kernel always takes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from policyc.jaxcore.partition import Dim, Dims, PartitionRule, partition
from policyc.language.recipes import Treatment
from policyc.numerics.backends import LoweringContext, emulate, te_calls, xla
from policyc.numerics.backends.choice import GemmQuery, Obstacle
from policyc.numerics.products import DimensionNumbers, free_dims
from policyc.numerics.quantize.bits import INFINITY, abs_bits, abs_bits_bf16, from_bits, materialize
from policyc.numerics.quantize.blocks import layout_of
from policyc.numerics.quantize.hadamard import SIGNS
from policyc.numerics.quantize.layout import TILE, Axes, Layout, Operand, Quantized
from policyc.numerics.quantize.random import Key, checksum

NEEDS_DEVICES = True
UNBATCHABLE = True

_BLOCK = 16
# What sizes must be multiples of: the contracted one for cuBLAS, tokens and features for the kernel that rotates.
_CONTRACTED = 32
_ROTATED_TOKENS, _ROTATED_FEATURES = 64, 128
_TYPES = ("bfloat16", "float16", "float32")
_OTHER_BACKEND = "other backends run it"


# ---- limits


def obstacle(query: GemmQuery) -> Obstacle | None:
    """The first of its limits that a GEMM exceeds."""
    if query.format != "nvfp4" or query.right.format != "nvfp4":
        return Obstacle(f"backend te runs only nvfp4, not {query.format}", _OTHER_BACKEND)
    return shape_obstacle(query) or _option_obstacle(query.left) or _option_obstacle(query.right)


def shape_obstacle(query: GemmQuery) -> Obstacle | None:
    """Why it cannot run an nvfp4 GEMM of this shape and these types. Lint reports these."""
    if query.ragged or query.batch != 1:
        kind = "over ragged groups" if query.ragged else "with batch dimensions"
        return Obstacle(f"Transformer Engine has no NVFP4 GEMM {kind}", _OTHER_BACKEND)
    left, right = query.types
    return _type_obstacle(query.left, left) or _type_obstacle(query.right, right) or _size_obstacle(query)


def _type_obstacle(treatment: Treatment, dtype: str) -> Obstacle | None:
    if dtype not in _TYPES:
        return Obstacle(f"Transformer Engine does not quantize {dtype}", "compute in bfloat16")
    if treatment.rht and dtype != "bfloat16":
        return Obstacle(
            f"Transformer Engine rotates only bfloat16, but this operand is {dtype}",
            "compute in bfloat16, or rht=none",
        )
    return None


def _option_obstacle(t: Treatment) -> Obstacle | None:
    unsupported = {
        f"rht_size={t.rht}": t.rht not in (0, len(SIGNS)),
        "rounding=ms_eden": t.rounding == "ms_eden",
        f"scale={t.scale}": t.scale != "amax",
        f"sr_headroom={t.headroom}": t.headroom != 1,
        "mean_split": t.mean_split,
        f"outer={t.outer}": t.outer != "tensor",
    }
    option = next((name for name, is_used in unsupported.items() if is_used), None)
    if option is None:
        return None
    return Obstacle(
        f"Transformer Engine's quantizers have no {option}", f"leave the option out; {_OTHER_BACKEND}"
    )


def _size_obstacle(query: GemmQuery) -> Obstacle | None:
    rotates = bool(query.left.rht)
    units = {
        "contracted": (query.k, _ROTATED_TOKENS if rotates else _CONTRACTED),
        "rows": (query.m, _ROTATED_FEATURES if rotates else _BLOCK),
        "columns": (query.n, _ROTATED_FEATURES if rotates else _BLOCK),
    }
    for name, (size, unit) in units.items():
        if size % unit:
            condition = " with rht" if rotates else ""
            reason = (
                f"Transformer Engine requires {name} % {unit} == 0{condition}, but {query.gemm} has {size}"
            )
            return Obstacle(reason, f"pad {size} to {size + -size % unit}; {_OTHER_BACKEND}")
    return None


# ---- running


def missing() -> str:
    """Why Transformer Engine cannot be used here; empty if it can."""
    try:
        te_calls.load()
    except ImportError as error:
        return str(error)
    return ""


def quantize(
    x: jax.Array,
    treatment: Treatment,
    axes: Axes,
    key: Key | None,
    signs: Key | None,
    context: LoweringContext,
) -> Quantized:
    """Quantizes an operand with Transformer Engine's kernels, each device its shard.

    Maxima are those of the whole operand, so that the result does not depend on the sharding. Only the random stream
    does: each shard has its own.
    """
    if context.platform != "cuda":
        return emulate.quantize(x, treatment, axes, key, signs, context)
    layout, _ = layout_of(x.shape, treatment, axes)
    contract = tuple(x.ndim + i for i in (axes.contract or (axes.axis,)))
    matrix = _Matrix(
        layout=layout, ndim=x.ndim, contract=contract, rotates=bool(treatment.rht), both=axes.both_orders
    )
    amax = from_bits(_find_maximum(x, matrix))
    random_key = key if treatment.rounding == "sr" else None
    codes, scales, *transposed = _quantize_matrix(x, matrix, amax, random_key)
    return Quantized(
        codes=codes,
        scales=scales,
        amax=amax.reshape((1,) * x.ndim),
        transposed_codes=transposed[0] if transposed else None,
        layout=layout,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matrix:
    """How the shard of an operand becomes the matrix that a kernel quantizes.

    Its rows are free dimensions and its columns contracted ones, or the other way round: the kernel that rotates reads
    it transposed, and so does every kernel if it lies in memory that way. With `both`, the codes are packed along both.
    """

    layout: Layout
    ndim: int
    contract: tuple[int, ...]
    rotates: bool
    both: bool = False

    @property
    def free(self) -> tuple[int, ...]:
        return free_dims(self.ndim, self.contract)

    @property
    def is_transposed(self) -> bool:
        return self.rotates or self.contract == tuple(range(len(self.contract)))

    @property
    def factors(self) -> tuple[str, ...]:
        """The names of the dimensions in a `PartitionRule`."""
        return tuple(f"d{i}" for i in range(self.ndim))

    def flatten(self, shard: jax.Array) -> jax.Array:
        """The shard as the kernel reads it."""
        outer, inner = (self.contract, self.free) if self.is_transposed else (self.free, self.contract)
        rows = prod(shard.shape[i] for i in outer)
        return shard.transpose(*outer, *inner).reshape(rows, -1)

    def results(self, quantized: te_calls.QuantizedMatrix, shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
        """Codes, scales and, with `both`, the codes of the transpose, in the order of a shard of this shape."""
        order = (*self.free, *self.contract)
        scales = _restore_dims(_as_bytes(quantized.scales), shape, order, _BLOCK)
        if self.layout.tile_axis is not None:
            # The kernel repeats the scale of a tile for each of its rows.
            scales = lax.slice_in_dim(scales, 0, None, TILE, axis=self.ndim + self.layout.tile_axis)
        codes = _restore_dims(_as_bytes(quantized.codes), shape, order, 2)
        if quantized.transposed is None:
            return codes, scales
        transposed = _as_bytes(quantized.transposed)
        return codes, scales, _restore_dims(transposed, shape, (*self.contract, *self.free), 2)

    def result_dims(self) -> tuple[Dims, ...]:
        """The dimensions of the results in a `PartitionRule`."""
        layout = self.layout
        codes, scales = (_dims(layout, self.factors, array) for array in ("codes", "scales"))
        if not self.both:
            return codes, scales
        assert layout.tile_axis is not None
        transposed = replace(layout, axis=layout.tile_axis, tile_axis=layout.axis)
        return codes, scales, _dims(transposed, self.factors, "codes")

    def find_limit(self, sizes: Mapping[str, int]) -> str:
        """Why the kernel does not take a shard in which the factors have these sizes."""
        lengths = [sizes[name] * unit for name, unit in _dims(self.layout, self.factors, "elements")]
        rows, columns = (prod(lengths[i] for i in dims) for dims in (self.free, self.contract))
        features, tokens = (_ROTATED_FEATURES, _ROTATED_TOKENS) if self.rotates else (_BLOCK, _BLOCK)
        return _find_remainder({"rows": (rows, features), "contracted": (columns, tokens)})


def _find_maximum(x: jax.Array, matrix: _Matrix) -> jax.Array:
    """The bits of the largest magnitude of the operand, after its rotation if it is rotated.

    Bits, because a maximum of floats may lose a NaN: in the kernels, and between devices.
    """
    rule = PartitionRule(
        name="Transformer Engine's maximum after RHT",
        operands=(_dims(matrix.layout, matrix.factors, "elements"),),
        results=((),),
        reduction="max",
        limit=matrix.find_limit,
    )
    engine = te_calls.load()

    def run(_: Any, shard: jax.Array) -> tuple[jax.Array]:
        maximum = jnp.max(_row_maxima(shard))
        if not matrix.rotates:
            return (maximum,)
        rotated = abs_bits(engine.rotated_amax(matrix.flatten(shard)).reshape(()))
        return (jnp.where(maximum < INFINITY, rotated, maximum),)

    return partition(run, rule)(x)[0]


def _row_maxima(shard: jax.Array) -> jax.Array:
    """The bits of the largest magnitude of each row. XLA finds them where it computes the rows, in one pass."""
    if shard.dtype == jnp.bfloat16:
        return jnp.max(abs_bits_bf16(shard), axis=-1).astype(jnp.int32) << 16
    return jnp.max(abs_bits(shard), axis=-1)


def _quantize_matrix(x: jax.Array, matrix: _Matrix, amax: jax.Array, key: Key | None) -> Sequence[jax.Array]:
    """Codes, scales and, if requested, the codes of the transpose."""
    elements = _dims(matrix.layout, matrix.factors, "elements")
    rule = PartitionRule(
        name="Transformer Engine's quantizer",
        operands=(elements, (), (("seed", 1),), (("h0", 1), ("h1", 1))),
        results=matrix.result_dims(),
        limit=matrix.find_limit,
    )
    engine = te_calls.load()
    seed = jnp.zeros(2, jnp.uint32) if key is None else jnp.stack([key.a, key.b])

    def run(
        index: jax.Array | None,
        shard: jax.Array,
        amax: jax.Array,
        seed: jax.Array,
        rotation: jax.Array,
    ) -> tuple[jax.Array, ...]:
        quantized = engine.quantize(
            matrix.flatten(shard),
            amax,
            None if key is None else _rng_state(seed, shard, index),
            rotation if matrix.rotates else None,
            columns=matrix.is_transposed,
            two_d=matrix.layout.tile_axis is not None,
            both=matrix.both,
        )
        return matrix.results(quantized, shard.shape)

    return partition(run, rule)(x, amax, seed, jnp.asarray(engine.rotation_matrix()))


def _rng_state(seed: jax.Array, shard: jax.Array, index: jax.Array | None) -> jax.Array:
    """The seed and offset of the kernel's generator, 64 bits each.

    The seed depends on the content of the shard and on its index. So nothing has to be known of the other shards.
    """
    key = Key(seed[0], seed[1]).fold(checksum(_row_maxima(shard)))
    if index is not None:
        key = key.fold(index)
    return jnp.stack([key.a, key.b, jnp.uint32(0), jnp.uint32(0)])


def _restore_dims(rows: jax.Array, shape: tuple[int, ...], order: tuple[int, ...], unit: int) -> jax.Array:
    """Rows with one byte for `unit` elements along the last dimension of `order`, in the dimension order of `shape`."""
    *outer, last = (shape[i] for i in order)
    return rows.reshape(*outer, last // unit).transpose(sorted(range(len(order)), key=order.__getitem__))


def _as_bytes(rows: jax.Array) -> jax.Array:
    """Rows of codes, two to a byte, or of scales."""
    if rows.dtype == jnp.float4_e2m1fn:
        rows = rows.reshape(rows.shape[0], -1, 2)
    return lax.bitcast_convert_type(rows, jnp.uint8)


def gemm(
    lhs: Operand, rhs: Operand, dimensions: DimensionNumbers, out: Any, context: LoweringContext
) -> jax.Array:
    """The product of two operands by Transformer Engine's cuBLAS GEMM, each device its part.

    What is gathered before the product are codes and scales.
    """
    if context.platform != "cuda":
        return emulate.gemm(lhs, rhs, dimensions, out, context)
    assert isinstance(lhs, Quantized)
    assert isinstance(rhs, Quantized)
    engine = te_calls.load()
    left_contract, right_contract = dimensions[0]

    def run(_: Any, *arrays: jax.Array) -> tuple[jax.Array]:
        left_codes, left_scales, right_codes, right_scales, alpha = arrays
        left, left_free = _as_matrix(lhs.layout, left_codes, left_scales, left_contract)
        right, right_free = _as_matrix(rhs.layout, right_codes, right_scales, right_contract)
        # Without the barrier, XLA multiplies twice if the product is also saved for the backward pass: once in place,
        # among those of the other layers.
        product = materialize(engine.gemm(left, right, alpha, out))
        return (product.reshape(*left_free, *right_free),)

    arrays = [array for operand in (lhs, rhs) for array in (operand.codes, operand.scales)]
    multiply = partition(run, _gemm_rule(lhs, rhs, dimensions))
    return multiply(*arrays, _outer_scale(lhs) * _outer_scale(rhs))[0]


def _outer_scale(operand: Quantized) -> jax.Array:
    assert operand.amax is not None
    scale: jax.Array = operand.amax.reshape(()) / jnp.float32(operand.layout.bound)
    return scale


def _as_matrix(
    layout: Layout, codes: jax.Array, scales: jax.Array, contract: tuple[int, ...]
) -> tuple[te_calls.QuantizedMatrix, tuple[int, ...]]:
    """The shard of an operand as rows of contracted elements, and the sizes of its free dimensions."""
    tile_size = 0 if layout.tile_axis is None else codes.shape[layout.tile_axis]
    layout = replace(layout, size=2 * codes.shape[layout.axis], tile_size=tile_size)
    shard = Quantized(codes=codes, scales=scales, amax=None, layout=layout)
    values, row_scales, free = xla.as_rows(shard, contract, ())
    return te_calls.QuantizedMatrix(values[0], row_scales[0]), free


def _gemm_rule(lhs: Quantized, rhs: Quantized, dimensions: DimensionNumbers) -> PartitionRule:
    """Contracted dimensions of both operands have the same factors."""
    operands: list[Dims] = []
    free: list[tuple[Dim, ...]] = []
    contracted: list[Dim] = []
    for operand, contract, prefix in zip((lhs, rhs), dimensions[0], ("m", "n"), strict=True):
        ndim = operand.codes.ndim
        names = tuple(f"k{contract.index(i)}" if i in contract else f"{prefix}{i}" for i in range(ndim))
        elements = _dims(operand.layout, names, "elements")
        operands += [_dims(operand.layout, names, kind) for kind in ("codes", "scales")]
        free.append(tuple(elements[i] for i in free_dims(ndim, contract)))
        contracted = [elements[i] for i in contract]

    def find_limit(sizes: Mapping[str, int]) -> str:
        rows, columns, length = (
            prod(sizes[name] * unit for name, unit in dims) for dims in (*free, contracted)
        )
        return _find_remainder(
            {"contracted": (length, _CONTRACTED), "rows": (rows, _BLOCK), "columns": (columns, _BLOCK)}
        )

    return PartitionRule(
        name="Transformer Engine's GEMM",
        operands=(*operands, ()),
        results=((*free[0], *free[1]),),
        limit=find_limit,
    )


_UNITS = {"elements": (_BLOCK, TILE), "codes": (_BLOCK // 2, TILE), "scales": (1, 1)}
"""The size of a block along the quantized axis and along the other axis of 2D tiles, in each of the arrays."""


def _dims(layout: Layout, names: Sequence[str], array: Literal["elements", "codes", "scales"]) -> Dims:
    """The dimensions of an operand, of its codes or of its scales, for a `PartitionRule`."""
    block, tile = _UNITS[array]
    units = {len(names) + layout.axis: block}
    if layout.tile_axis is not None:
        units[len(names) + layout.tile_axis] = tile
    return tuple((name, units.get(i, 1)) for i, name in enumerate(names))


def _find_remainder(sizes: Mapping[str, tuple[int, int]]) -> str:
    """Names the first size that is not a multiple of its unit; empty if there is none."""
    for name, (size, unit) in sizes.items():
        if size % unit:
            return f"requires {name} % {unit} == 0, but a device has {size}"
    return ""
