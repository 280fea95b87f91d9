"""XLA's own GEMMs of small formats: block-scaled for nvfp4 and mxfp8, 8-bit for fp8.

Blackwell runs the block-scaled GEMM as a cuDNN call. On other GPUs XLA multiplies values by scales first, which gives
the same numbers. XLA reads both operands with the contracted dimension last, and packed along it.

JAX's partitioning rule for `jax.nn.scaled_matmul` sums fp32 products over devices and gathers one scale for each block
of each row. Here each device applies the outer scales and rounds to the dtype of the result before the sum over
devices, as other GEMMs do. It gathers the scales of 2D tiles without repeating them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from policyc.jaxcore.primitives.define_primitive import LoweringContext
from policyc.jaxcore.primitives.lowering import merge_mapped_axes
from policyc.jaxcore.primitives.partition import Dim, Dims, PartitionRule, ShardIndex, partition
from policyc.jaxcore.versions import FAST_FP8_PRECISION, FP8_PRECISION
from policyc.language.recipes import Recipe, Role
from policyc.numerics.backends.backend import GemmQuery, Obstacle
from policyc.numerics.backends.emulate import (
    Emulation,
    apply_outer_scales,
    has_fp8_kernel,
    quantize_alone,
    quantize_joined,
    quantize_layers,
)
from policyc.numerics.dimensions import DimensionNumbers, free_dims
from policyc.numerics.quantize import Request
from policyc.numerics.quantize.kernels import fp8_kernel
from policyc.numerics.quantize.kernels.kernel_tiles import BLOCK, TILE_FEATURES, TILE_TOKENS
from policyc.numerics.quantize.reference.bits import FP8_DTYPES, materialize
from policyc.numerics.quantize.reference.blocks import refinement_of
from policyc.numerics.quantize.reference.layout import (
    Layout,
    Operand,
    Quantized,
    repeat_axis,
)
from policyc.numerics.quantize.reference.values import apply_outer_scale, outer_product, outer_scale

DTYPES = {
    "nvfp4": (jnp.float4_e2m1fn, jnp.float8_e4m3fn),
    "mxfp8": (jnp.float8_e4m3fn, jnp.float8_e8m0fnu),
}
"""The dtypes of elements and of block scales."""


class Rows(NamedTuple):
    """An operand as (batch, rows, contracted).

    `codes` and `scales` are bytes. `scales` has one row per row of codes or per row of tiles. The outer scale is
    `mantissa` * 2**`exponent`, both (batch, rows or 1, 1), or None.
    """

    codes: jax.Array
    scales: jax.Array
    mantissa: jax.Array | None = None
    exponent: jax.Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockScaledSpec:
    """Static parameters of a block-scaled GEMM.

    `native` says whether to call XLA's block-scaled GEMM, which needs CUDA. `divides_itself` says whether a
    partitioning rule divides it over devices. Without one, it cannot be native.
    """

    format: str
    out: Any
    native: bool
    divides_itself: bool = True


def multiply_rows(a: Rows, b: Rows, spec: BlockScaledSpec) -> jax.Array:
    """The product (batch, rows of a, rows of b), with the outer scales applied, in the dtype `spec.out`."""
    product: jax.Array = _multiplier(spec)(a, b)
    return product


@cache
def _multiplier(spec: BlockScaledSpec) -> Callable[[Rows, Rows], jax.Array]:
    return merge_mapped_axes(partial(_multiply_divided, spec=spec))


# ---- the block-scaled GEMM of two operands in rows: on one device


def as_values(rows: Rows, format: str) -> tuple[jax.Array, jax.Array]:
    """Codes and scales in XLA's dtypes, with one scale for each block of each row."""
    element, scale = DTYPES[format]
    values = lax.bitcast_convert_type(rows.codes, element).reshape(*rows.codes.shape[:2], -1)
    return values, lax.bitcast_convert_type(row_scales(rows), scale)


def row_scales(rows: Rows) -> jax.Array:
    """The bytes of the block scales, one for each block of each row."""
    tile = rows.codes.shape[1] // rows.scales.shape[1]
    return repeat_axis(rows.scales, -2, tile) if tile > 1 else rows.scales


def _multiply(a: Rows, b: Rows, spec: BlockScaledSpec) -> jax.Array:
    (left, left_scales), (right, right_scales) = as_values(a, spec.format), as_values(b, spec.format)
    # The product stays fp32 if outer scales are applied to it afterwards.
    is_scaled = a.mantissa is not None or b.mantissa is not None
    dtype = spec.out if not is_scaled and spec.out in (jnp.bfloat16, jnp.float32) else jnp.float32
    multiply = jax.nn.scaled_matmul if spec.native else _multiply_values
    product = multiply(left, right, left_scales, right_scales, dtype)
    return _apply_outer_scales(product, a, b).astype(spec.out)


def _multiply_values(
    a: jax.Array, b: jax.Array, a_scales: jax.Array, b_scales: jax.Array, out: Any
) -> jax.Array:
    """Fallback for `jax.nn.scaled_matmul` off CUDA. Computes what XLA does on GPUs without block-scaled GEMMs."""

    def values(x: jax.Array, scales: jax.Array) -> jax.Array:
        blocks = x.astype(jnp.float32).reshape(*scales.shape, -1)
        return (blocks * scales.astype(jnp.float32)[..., None]).reshape(x.shape)

    dims = (((2,), (2,)), ((0,), (0,)))
    product = lax.dot_general(values(a, a_scales), values(b, b_scales), dims, precision=lax.Precision.HIGHEST)
    return product.astype(out)


def _apply_outer_scales(product: jax.Array, a: Rows, b: Rows) -> jax.Array:
    m, e = jnp.float32(1), jnp.int32(0)
    if a.mantissa is not None and a.exponent is not None:
        m, e = m * a.mantissa, e + a.exponent
    if b.mantissa is not None and b.exponent is not None:
        m, e = m * b.mantissa.swapaxes(1, 2), e + b.exponent.swapaxes(1, 2)
    return apply_outer_scale(product, m, e) if m.ndim else product


# ---- on several devices


def _multiply_divided(a: Rows, b: Rows, spec: BlockScaledSpec) -> jax.Array:
    """The product, partitioned over devices."""
    if not spec.divides_itself:
        return _multiply(a, b, spec)
    arrays, structure = jax.tree.flatten((a, b))

    def run(index: ShardIndex, *shards: jax.Array) -> tuple[jax.Array]:
        left, right = jax.tree.unflatten(structure, shards)
        if index.first_scattered() == 2:
            # Computed transposed, so that XLA need not transpose it before it scatters the sum along its columns.
            return (_multiply(right, left, spec).swapaxes(1, 2),)
        return (_multiply(left, right, spec),)

    return partition(run, gemm_rule(a, b))(*arrays)[0]


def gemm_rule(a: Rows, b: Rows) -> PartitionRule:
    """Partitioning rule: rows are divided in whole tiles, the contracted dimension in whole blocks."""
    (left, left_arrays), (right, right_arrays) = (_row_dims(x, name) for x, name in ((a, "m"), (b, "n")))
    return PartitionRule(
        name="block-scaled GEMM",
        operands=(*left_arrays, *right_arrays),
        results=((("batch", 1), left, right),),
        xla_scatters=True,
    )


def _row_dims(rows: Rows, name: str) -> tuple[Dim, tuple[Dims, ...]]:
    """The dimension of the rows of an operand in the result, and the dimensions of its arrays."""
    (_, count, length), (_, scale_rows, blocks) = rows.codes.shape, rows.scales.shape
    dim = name, count // scale_rows
    codes = ("batch", 1), dim, ("contracted", length // blocks)
    scales = ("batch", 1), (name, 1), ("contracted", 1)
    if rows.mantissa is None:
        return dim, (codes, scales)
    # One outer scale for all rows, or one per row.
    scale_dim = dim if rows.mantissa.shape[1] == count else (f"{name}_scale", 1)
    outer = ("batch", 1), scale_dim, (f"{name}_one", 1)
    return dim, (codes, scales, outer, outer)


# ---- the backend

_PARTLY_MANUAL = (
    "a block-scaled GEMM in a shard_map over only some axes of the mesh is emulated: XLA does not say how the other "
    "axes divide it; write a shard_map over all axes"
)

_PROVEN_CONTRACTION = 32
"""XLA calls cuDNN for NVFP4 if the contracted size is a multiple of 16. Documented kernels need a multiple of 32."""


class Xla(Emulation):
    """XLA. It quantizes as the emulation does."""

    multiplies_values: bool = False
    needs_devices: bool = True
    pairs_rows: bool = True
    scales_results: bool = True
    calls: Mapping[str, str] = MappingProxyType(
        {
            "fp8": "__cublas$lt$matmul$f8",
            "mxfp8": "__cudnn$blockScaledDot",
            "nvfp4": "__cudnn$blockScaledDot",
        }
    )

    def is_candidate(self, query: GemmQuery) -> bool:
        del query
        return True

    def obstacle(self, query: GemmQuery) -> Obstacle | None:
        """Why XLA cannot run this GEMM."""
        if query.ragged:
            return Obstacle(
                "XLA has no block-scaled GEMM over ragged groups",
                "use nvfp4 on cuDNN (pip install nvidia-cudnn-frontend), or keep it in bf16",
            )
        if query.format not in self.calls:
            return Obstacle(f"XLA has no block-scaled GEMM of {query.format}", "use nvfp4 or mxfp8")
        return None

    def find_doubt(self, query: GemmQuery) -> str:
        padded = query.k + -query.k % BLOCK
        if query.format != "nvfp4" or padded % _PROVEN_CONTRACTION == 0:
            return ""
        return (
            f"XLA calls cuDNN for a contracted size of {padded}, but kernels are only documented for multiples of "
            f"{_PROVEN_CONTRACTION}"
        )

    def quantizer_obstacle(self, query: GemmQuery) -> Obstacle | None:
        return _rotation_obstacle(query) if query.format == "nvfp4" else None

    def writes_both_orders(self, recipe: Recipe, role: Role, *, splits: bool) -> bool:
        """8-bit GEMMs read both operands along the contracted dimension. With a scale per row, the two GEMMs that read
        an operand need different codes.
        """
        del role
        return splits and all(t.format == "fp8" and t.outer != "row" for t in recipe.treatments)

    def quantize(
        self, x: jax.Array, requests: Sequence[Request], context: LoweringContext
    ) -> list[Quantized]:
        """Quantizes an operand. Without kernels for two GEMMs, each order is quantized separately."""
        if context.is_stack:
            return quantize_layers(self, x, requests, context)
        if len(requests) > 1:
            joined = quantize_joined(x, requests, context)
            if joined is not None:
                return joined
            if has_fp8_kernel(context) and fp8_kernel.fits_rows(x, requests):
                return fp8_kernel.quantize_fp8_rows(x, requests, fp8_kernel.Fp8Kernel())
        return [_quantize_alone(x, request, context) for request in requests]

    def gemm(
        self, lhs: Operand, rhs: Operand, dimensions: DimensionNumbers, out: Any, context: LoweringContext
    ) -> jax.Array:
        """The product of two quantized operands."""
        if not isinstance(lhs, Quantized) or not isinstance(rhs, Quantized):
            raise TypeError("both operands of a GEMM of small formats must be quantized")
        if lhs.layout.format == "fp8":
            if context.platform == "cpu":
                return super().gemm(lhs, rhs, dimensions, out, context)
            return _multiply_fp8(lhs, rhs, dimensions, out, context)
        (lc, rc), (lb, rb) = dimensions
        (left, left_free), (right, right_free) = as_rows(lhs, lc, lb), as_rows(rhs, rc, rb)
        spec = BlockScaledSpec(
            format=lhs.layout.format,
            out=jnp.dtype(out),
            native=context.platform == "cuda" and not context.is_partly_manual,
            divides_itself=not context.is_partly_manual,
        )
        if context.platform == "cuda" and context.is_partly_manual:
            warnings.warn(_PARTLY_MANUAL, stacklevel=2)
        batch = tuple(lhs.codes.shape[i] for i in lb)
        return multiply_rows(left, right, spec).reshape(*batch, *left_free, *right_free)


BACKEND = Xla()


def _rotation_obstacle(query: GemmQuery) -> Obstacle | None:
    """Why no kernel quantizes the rotated operands of an nvfp4 GEMM. XLA then quantizes them in more passes."""
    treatments = (query.left, query.right)
    if any(map(refinement_of, treatments)) or not any(t.rht for t in treatments):
        return None
    kernel = "the kernels that rotate"
    sizes = {"contracted": query.k, "rows": query.m, "columns": query.n}
    for (name, size), (unit, least) in zip(sizes.items(), _ROTATED_SIZES, strict=True):
        if size % unit or size < least:
            limit = f"{name} % {unit} == 0" if size % unit else f"{name} >= {least}"
            reason = f"{kernel} require {limit}, but {query.gemm} has {size}"
            return Obstacle(reason, f"pad {size} to {max(least, size + -size % unit)}")
    if query.batch != 1:
        return Obstacle(f"{kernel} take no batch dimensions", "XLA quantizes it instead, in more passes")
    for dtype in query.types:
        if dtype != "bfloat16":
            return Obstacle(f"{kernel} take bfloat16, not {dtype}", "compute in bfloat16")
    return None


_TOKENS, _FEATURES = (TILE_TOKENS, TILE_TOKENS), (BLOCK, TILE_FEATURES)
"""The unit and the minimum of an operand's tokens and features. One dimension of a weight counts as tokens."""
_ROTATED_SIZES = (_TOKENS, _FEATURES, _FEATURES)
"""The limits of the contracted dimension, of rows and of columns. Rotated operands contract tokens."""


def _quantize_alone(x: jax.Array, request: Request, context: LoweringContext) -> Quantized:
    """Quantizes like the emulation, but first transposes an operand with 2D tiles that the GEMM reads transposed.

    XLA would transpose it anyway, but later, as fp32 numbers that become codes.
    """
    axes = request.axes
    t = request.treatment
    if not t.tile2d or t.is_random or (axes.axis, axes.tile) != (-2, -1):
        return quantize_alone(x, request, context)
    swap = {-1: -2, -2: -1}
    contract = tuple(swap.get(i, i) for i in axes.contract)
    transposed = replace(request, axes=replace(axes, axis=-1, tile=-2, contract=contract))
    return quantize_alone(materialize(x.swapaxes(-1, -2)), transposed, context).swap_last_axes()


def as_rows(
    operand: Quantized, contract: tuple[int, ...], batch: tuple[int, ...]
) -> tuple[Rows, tuple[int, ...]]:
    """An operand as `Rows`, and the sizes of its free dimensions."""
    layout, ndim = operand.layout, operand.codes.ndim
    free = free_dims(ndim, contract, batch)
    codes, scales, row_axis = _arrange_along(operand, contract[-1] - ndim)
    sizes = {layout.axis: layout.size, layout.tile_axis: layout.tile_size}
    # Rows of a tile can keep sharing scales if they are adjacent and none of them is padding.
    if row_axis is not None and (free[-1] - ndim != row_axis or sizes[row_axis] % layout.block):
        scales, row_axis = repeat_axis(scales, row_axis, layout.block), None
    for i in free:
        if i - ndim in sizes and i - ndim != row_axis:
            codes = lax.slice_in_dim(codes, 0, sizes[i - ndim], axis=i)
            scales = lax.slice_in_dim(scales, 0, sizes[i - ndim], axis=i)
    free_shape = tuple(codes.shape[i] for i in free)
    count = prod(codes.shape[i] for i in batch)
    order = (*batch, *free, *contract)
    lead = (count, prod(free_shape))
    scale_lead = (count, prod(scales.shape[i] for i in free))
    outer: tuple[jax.Array, ...] = ()
    if operand.amax is not None:
        outer = tuple(_scale_rows(p, free, order, lead) for p in outer_scale(operand.amax, layout.bound))
    arrays = codes.transpose(order).reshape(*lead, -1), scales.transpose(order).reshape(*scale_lead, -1)
    return Rows(*arrays, *outer), free_shape


def _scale_rows(
    scale: jax.Array, free: tuple[int, ...], order: tuple[int, ...], lead: tuple[int, int]
) -> jax.Array:
    """An outer scale as (batch, rows or 1, 1)."""
    rows = lead[1] if any(scale.shape[i] > 1 for i in free) else 1
    return scale.transpose(order).reshape(lead[0], rows, 1)


def _arrange_along(operand: Quantized, axis: int) -> tuple[jax.Array, jax.Array, int | None]:
    """Codes packed along an axis, one scale per block along it, and the axis along which a tile shares its scales."""
    layout: Layout = operand.layout
    codes, scales = operand.codes, operand.scales
    assert scales is not None
    if axis == layout.axis:
        return codes, scales, layout.tile_axis
    # Square tiles, contracted along their other axis: the scales can be used as they are.
    assert axis == layout.tile_axis
    if layout.packed:
        codes = operand.pack_along_tile_axis()
    return codes, scales, layout.axis


# ---- FP8


def _multiply_fp8(
    lhs: Quantized, rhs: Quantized, dimensions: DimensionNumbers, out: Any, context: LoweringContext
) -> jax.Array:
    """Multiplies on 8-bit matrix units, with fp32 sums unless `sums=fast`. Hopper keeps 14 bits within a chunk."""
    has_one_scale = all(o.amax is not None and o.amax.size == 1 for o in (lhs, rhs))
    # Otherwise something may come between the GEMM and the scale: the index of a vmap, or a sum over devices.
    can_fuse = has_one_scale and context.knows_division
    if can_fuse and out == jnp.bfloat16 and _allows_excess_precision():
        return _multiply_scaled_fp8(lhs, rhs, dimensions, context)
    product = _multiply_codes(lhs.codes, rhs.codes, (lhs.layout, rhs.layout), dimensions, jnp.float32)
    free = lhs.codes.ndim - len(dimensions[0][0]) - len(dimensions[1][0])
    return apply_outer_scales(product, lhs, rhs, dimensions, free).astype(out)


_Layouts = tuple[Layout, Layout]


def _multiply_codes(
    left: jax.Array, right: jax.Array, layouts: _Layouts, dimensions: DimensionNumbers, out: Any
) -> jax.Array:
    """The product of two arrays of codes, without outer scales."""
    a, b = (
        lax.bitcast_convert_type(codes, FP8_DTYPES[layout.element])
        for codes, layout in zip((left, right), layouts, strict=True)
    )
    precision = FAST_FP8_PRECISION if all(layout.fast_sums for layout in layouts) else FP8_PRECISION
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=out)


_SPLIT_BELOW = 160 * 128 * 128
"""XLA may split the contracted dimension if the result has fewer elements than this: a tile of 128 x 128 for each
multiprocessor of the largest GPU."""


def _scale_product(
    left: jax.Array,
    right: jax.Array,
    layouts: _Layouts,
    dimensions: DimensionNumbers,
    scale: jax.Array,
) -> jax.Array:
    """The product of two arrays of codes times a scalar, in bfloat16.

    If XLA splits the product, it adds the parts before it scales them, in the dtype of the product. So a product that
    may be split is fp32.
    """
    (contract, _), (batch, _) = dimensions
    summed, repeated = (prod(left.shape[i] for i in dims) for dims in (contract, batch))
    size = left.size // summed * right.size // (summed * repeated)
    product = _multiply_codes(
        left, right, layouts, dimensions, jnp.float32 if size < _SPLIT_BELOW else jnp.bfloat16
    )
    return (product * scale.astype(product.dtype)).astype(jnp.bfloat16)


def _multiply_scaled_fp8(
    lhs: Quantized, rhs: Quantized, dimensions: DimensionNumbers, context: LoweringContext
) -> jax.Array:
    """The product with both outer scales, in bfloat16.

    XLA fuses the scale into a large GEMM, which applies it before rounding its fp32 sums to bfloat16. So no fp32 result
    is written to memory. The cast of the scale to bfloat16 only makes the dtypes match: XLA drops it and passes the
    fp32 scale to the GEMM. It does so only if nothing comes between GEMM and scale. So each device scales its part of a
    sum over devices.
    """
    layouts = lhs.layout, rhs.layout
    (left_contract, right_contract), (left_batch, right_batch) = dimensions
    swapped = (right_contract, left_contract), (right_batch, left_batch)
    left_end = lhs.codes.ndim - len(left_contract)
    columns = range(len(right_batch), rhs.codes.ndim - len(right_contract))

    def run(index: ShardIndex, left: jax.Array, right: jax.Array, scale: jax.Array) -> tuple[jax.Array]:
        scattered = index.first_scattered()
        if scattered is None or scattered < left_end:
            return (_scale_product(left, right, layouts, dimensions, scale),)
        # Computed transposed, so that XLA need not transpose it before it scatters the sum along its columns. Without
        # the first barrier, XLA would swap the operands again, and without the second it would transpose before it
        # scales: both put a transpose between GEMM and scale.
        scaled = materialize(_scale_product(right, materialize(left), layouts[::-1], swapped, scale))
        return (jnp.moveaxis(scaled, columns, range(-len(columns), 0)),)

    scales = [(jnp.reshape(o.amax, ()), o.layout.bound) for o in (lhs, rhs) if o.amax is not None]
    arrays = lhs.codes, rhs.codes, outer_product(scales)
    divided = partition(run, _fp8_rule(lhs, rhs, dimensions))
    (product,) = divided(*arrays) if context.can_partition else run(ShardIndex(factors={}), *arrays)
    is_forward = lhs.layout.element == rhs.layout.element
    if context.single_device and is_forward:
        # Otherwise XLA lets the GEMM add to a copy of the residual stream, which takes longer than to add later. In the
        # backward pass it adds to a gradient that nothing else needs, without a copy.
        product = materialize(product)
    return product


def _fp8_rule(lhs: Quantized, rhs: Quantized, dimensions: DimensionNumbers) -> PartitionRule:
    """Partitioning rule of an fp8 GEMM: it may be divided along every dimension."""
    (left_contract, right_contract), (left_batch, right_batch) = dimensions

    def dims(operand: Quantized, contract: tuple[int, ...], batch: tuple[int, ...], free: str) -> Dims:
        names = [f"{free}{i}" for i in range(operand.codes.ndim)]
        for name, axes in (("contracted", contract), ("batch", batch)):
            for i, axis in enumerate(axes):
                names[axis] = f"{name}{i}"
        return tuple((name, 1) for name in names)

    left = dims(lhs, left_contract, left_batch, "m")
    right = dims(rhs, right_contract, right_batch, "n")
    result = [left[i] for i in left_batch]
    for array, contract, batch in ((left, left_contract, left_batch), (right, right_contract, right_batch)):
        result += [array[i] for i in free_dims(len(array), contract, batch)]
    return PartitionRule(
        name="FP8 GEMM", operands=(left, right, ()), results=(tuple(result),), xla_scatters=True
    )


def _allows_excess_precision() -> bool:
    """Whether XLA may drop a cast to fewer bits and back. It may, unless a flag forbids it."""
    return "xla_allow_excess_precision=false" not in os.environ.get("XLA_FLAGS", "").lower()
