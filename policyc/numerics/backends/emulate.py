"""The emulated backend: the specification of every format, on any machine.

Block scales are applied before the product, which is exact in bfloat16. Outer scales are applied to the fp32 result,
since applying them to the operands would not be exact.

On several devices each device multiplies its shards. XLA would not divide an emulated product as it divides a plain
one: under FSDP it gathers activations, not weights. Each device rounds its part of a sum to the dtype of the result
before the parts are added, as other GEMMs do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from policyc.jaxcore.primitives.define_primitive import LoweringContext
from policyc.jaxcore.primitives.partition import Dims, PartitionRule, ShardIndex, partition
from policyc.language.recipes import Treatment
from policyc.numerics.backends import hopper_gemm
from policyc.numerics.backends.backend import Backend, GemmQuery
from policyc.numerics.dimensions import DimensionNumbers, free_dims
from policyc.numerics.flatten import OperandLayout, flatten_operand
from policyc.numerics.quantize import Request
from policyc.numerics.quantize.dispatch import quantize_request
from policyc.numerics.quantize.kernels import fused_kernels as kernels
from policyc.numerics.quantize.orders import quantize_orders, quantize_sharded
from policyc.numerics.quantize.reference.bits import materialize
from policyc.numerics.quantize.reference.blocks import joins_in_kernels, refinement_of
from policyc.numerics.quantize.reference.hadamard import Method
from policyc.numerics.quantize.reference.layout import Layout, Operand, Quantized
from policyc.numerics.quantize.reference.values import (
    FindFactors,
    Scale,
    block_values,
    decode_values,
    scale_outer,
    write_outer_factors,
)


class Emulation(Backend):
    """The emulation, which runs every GEMM."""

    runs_anywhere: bool = True
    multiplies_values: bool = True

    def is_candidate(self, query: GemmQuery) -> bool:
        del query
        return False  # it runs what no other backend does

    def count_reads(self, treatments: Sequence[Treatment]) -> int:
        """Two GPU reads if kernels write all codes at once.

        Otherwise two for each treatment that rotates the operand or refines scales, one for any other.
        """
        if joins_in_kernels(treatments):
            return 2
        return sum(2 if t.rht or refinement_of(t) else 1 for t in treatments)

    def quantize(
        self, x: jax.Array, requests: Sequence[Request], context: LoweringContext
    ) -> list[Quantized]:
        """Quantizes an operand by kernels, or by the method that is fastest on the platform.

        A weight with tiles has a single order, whose values a kernel writes.
        """
        if context.is_stack:
            return quantize_layers(self, x, requests, context)
        if len(requests) == 1 and not requests[0].decoded:
            return [quantize_alone(x, requests[0], context)]
        if context.single_device and _can_write_tiles(x, requests, context):
            return quantize_orders(x, requests, kernels.Kernels())
        joined = quantize_joined(x, requests, context)
        if joined is not None:
            return joined
        quantized = [quantize_alone(x, r, context) for r in requests]
        dtype = value_dtype(context)
        return [decode_values(q, dtype) if r.decoded else q for q, r in zip(quantized, requests, strict=True)]

    def gemm(
        self, lhs: Operand, rhs: Operand, dimensions: DimensionNumbers, out: Any, context: LoweringContext
    ) -> jax.Array:
        """The product of two operands."""
        is_quantized = isinstance(lhs, Quantized) or isinstance(rhs, Quantized)
        if context.platform == "cuda" and context.can_partition and is_quantized:
            one_device = replace(context, single_device=True, can_partition=False)
            multiply = partial(_multiply, out=out, context=one_device)
            return multiply_sharded(lhs, rhs, dimensions, multiply)
        return _multiply(lhs, rhs, dimensions, out, context)

    def ragged_gemm(
        self,
        lhs: Operand,
        rhs: Operand,
        sizes: jax.Array,
        contracting: bool,
        out: Any,
        context: LoweringContext,
    ) -> jax.Array:
        """Products of groups of rows."""
        return _multiply_groups(lhs, rhs, sizes, contracting, value_dtype(context)).astype(out)


BACKEND = Emulation()


# ---- quantizers


def quantize_layers(
    backend: Backend, x: jax.Array, requests: Sequence[Request], context: LoweringContext
) -> list[Quantized]:
    """Quantizes each layer of a stack."""
    layer = partial(backend.quantize, requests=requests, context=replace(context, is_stack=False))
    quantized: list[Quantized] = jax.vmap(layer)(x)
    return quantized


def quantize_alone(x: jax.Array, request: Request, context: LoweringContext) -> Quantized:
    """Quantizes an operand for one GEMM, to codes, by the method that is fastest on the platform."""
    treatment, axes = request.treatment, request.axes
    request = replace(request, key=request.rounding_key, operand="", decoded=False)
    if context.can_partition and _has_kernels(context) and kernels.fits_alone(x, treatment, axes):
        return quantize_sharded(x, [request])[0]
    method: Method = "cpu" if context.platform == "cpu" else "matmul"
    if context.platform == "cuda":
        # On CUDA, a product rounds its own result to bfloat16, which saves a pass over memory. Kernels save another.
        if treatment.format == "fp8":
            has_kernels = has_fp8_kernel(context)
        else:
            has_kernels = context.single_device and can_build_kernels(treatment.format)
        method = "kernels" if has_kernels else "matmul_bf16"
    quantized = quantize_request(x, request, method)
    if axes.second_order and quantized.layout.packed:
        return quantized.add_other_packing(quantized.pack_along_tile_axis())
    return quantized


def quantize_joined(
    x: jax.Array, requests: Sequence[Request], context: LoweringContext
) -> list[Quantized] | None:
    """Quantizes with kernels that read the operand once for all maxima and once for all codes, if they can."""
    joins = joins_in_kernels([r.treatment for r in requests])
    if not (_has_kernels(context) and joins and all(kernels.fits(x, r.treatment, r.axes) for r in requests)):
        return None
    if context.single_device:
        return quantize_orders(x, requests, kernels.Kernels())
    return quantize_sharded(x, requests) if context.can_partition else None


def _can_write_tiles(x: jax.Array, requests: Sequence[Request], context: LoweringContext) -> bool:
    """Whether a kernel can write the values of a weight with tiles."""
    return _has_kernels(context) and all(
        r.decoded and kernels.fits_tiles(x, r.treatment, r.axes) for r in requests
    )


def _has_kernels(context: LoweringContext) -> bool:
    """Whether a program can use the NVFP4 kernels."""
    return context.platform == "cuda" and can_build_kernels("nvfp4")


def has_fp8_kernel(context: LoweringContext) -> bool:
    """Whether a program can use the FP8 kernel, which takes one operand."""
    is_single = context.single_device and not context.is_mapped
    return context.platform == "cuda" and is_single and can_build_kernels("fp8")


def can_build_kernels(format: str) -> bool:
    """Whether the kernels of a format can be compiled here.

    The FP8 kernel needs a GPU. The NVFP4 kernels can be compiled without one, but if there is one, it must be a Hopper
    or newer.
    """
    device = jax.devices()[0]
    if device.platform != "gpu":
        return format == "nvfp4"
    major = str(getattr(device, "compute_capability", "")).partition(".")[0]
    return format == "fp8" or (major.isdigit() and int(major) >= _MOSAIC_CAPABILITY)


_MOSAIC_CAPABILITY = 9
"""The lowest major compute capability for which Pallas's Mosaic backend compiles kernels."""


# ---- products


def _multiply(
    lhs: Operand, rhs: Operand, dimensions: DimensionNumbers, out: Any, context: LoweringContext
) -> jax.Array:
    """The product of two operands, on one device or divided by XLA."""
    has_kernels = context.single_device and _has_kernels(context)
    if context.platform == "cuda":
        ((lc, rc), (lb, rb)) = dimensions
        is_wgrad = not (_contracts_last(lhs, lc) or _contracts_last(rhs, rc))
        lhs, lc, lb = _contract_last(lhs, lc, lb)
        rhs, rc, rb = _contract_last(rhs, rc, rb)
        dimensions = (lc, rc), (lb, rb)
        if has_kernels:
            lhs, rhs = _decode(lhs), _decode(rhs)
        if is_wgrad and any(isinstance(o, Quantized) and not o.layout.decoded for o in (lhs, rhs)):
            # Otherwise XLA could decode the saved codes of all layers at once, long before dy is available, and keep
            # the values in memory.
            lhs, rhs = materialize((lhs, rhs))
    (lc, rc), (lb, _) = dimensions
    dtype = value_dtype(context)
    a, b = _match_operands(_values(lhs, lc, dtype), _values(rhs, rc, dtype), dimensions)
    scales = _tensor_scales(lhs, rhs)
    if has_kernels and scales and hopper_gemm.fits(a, b, dimensions, out, context):
        return hopper_gemm.multiply(a, b, dimensions, scales, context)
    precision = lax.Precision.HIGHEST if jnp.float32 in (a.dtype, b.dtype) else None
    product = lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
    free = a.ndim - len(lc) - len(lb)
    find_factors = kernels.Kernels().outer_factors if has_kernels else write_outer_factors
    return apply_outer_scales(product, lhs, rhs, dimensions, free, find_factors).astype(out)


def _tensor_scales(*operands: Operand) -> list[Scale]:
    """The outer scales of the operands, if each of them is that of a whole tensor."""
    quantized = [operand for operand in operands if isinstance(operand, Quantized)]
    scales = [(q.amax, q.layout.bound) for q in quantized if q.amax is not None]
    return scales if all(amax.size == 1 for amax, _ in scales) else []


_Dims = tuple[int, ...]


def _contracts_last(operand: Operand, contract: _Dims) -> bool:
    array = operand.codes if isinstance(operand, Quantized) else operand
    return array.ndim - 1 in contract


def _contract_last(operand: Operand, contract: _Dims, batch: _Dims) -> tuple[Operand, _Dims, _Dims]:
    """Moves an operand's contracted dimensions last, as kernels write its codes, and renumbers `contract` and `batch`.

    Otherwise XLA would transpose the codes first. Plain operands and 2D tiles stay as they are.
    """
    if not isinstance(operand, Quantized) or operand.layout.tile_axis is not None:
        return operand, contract, batch
    order = (*free_dims(operand.codes.ndim, contract), *contract)
    contract, batch = (tuple(order.index(i) for i in dims) for dims in (contract, batch))
    return operand.transpose(order), contract, batch


def _decode(operand: Operand) -> Operand:
    """Replaces codes by values if a kernel can decode them. XLA needs some 50 instructions for that."""
    if isinstance(operand, Quantized) and kernels.fits_decoding(operand):
        return kernels.Kernels().values(operand)
    return operand


def value_dtype(context: LoweringContext) -> jax.typing.DTypeLike:
    """The dtype in which values are multiplied: fp32 on CPU, where that is faster, else bfloat16. Both are exact."""
    dtype: jax.typing.DTypeLike = jnp.float32 if context.platform == "cpu" else jnp.bfloat16
    return dtype


def _values(operand: Operand, contract: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """The values to multiply. Padding, which is zero, is kept along contracted dimensions only."""
    if not isinstance(operand, Quantized):
        return operand.astype(jnp.promote_types(operand.dtype, dtype))
    values = block_values(operand, dtype)
    layout = operand.layout
    for axis, size in ((layout.axis, layout.size), (layout.tile_axis, layout.tile_size)):
        if axis is not None and values.ndim + axis not in contract:
            values = lax.slice_in_dim(values, 0, size, axis=values.ndim + axis)
    return values


def _match_operands(a: jax.Array, b: jax.Array, dimensions: DimensionNumbers) -> tuple[jax.Array, jax.Array]:
    """Trims operands to the same contracted lengths, since one may have more padding, and promotes their dtypes."""
    for i, j in zip(*dimensions[0], strict=True):
        size = min(a.shape[i], b.shape[j])
        a, b = lax.slice_in_dim(a, 0, size, axis=i), lax.slice_in_dim(b, 0, size, axis=j)
    if a.dtype != b.dtype:
        wide = jnp.promote_types(a.dtype, b.dtype)
        a, b = a.astype(wide), b.astype(wide)
    return a, b


def apply_outer_scales(
    product: jax.Array,
    lhs: Operand,
    rhs: Operand,
    dimensions: DimensionNumbers,
    free: int,
    find_factors: FindFactors = write_outer_factors,
) -> jax.Array:
    """Applies both outer scales to a product: batch dimensions, then `free` dimensions of lhs, then those of rhs."""
    ((lc, rc), (lb, rb)) = dimensions
    scales = []
    for operand, contract, batch, before in ((lhs, lc, lb, 0), (rhs, rc, rb, free)):
        if isinstance(operand, Quantized) and operand.amax is not None:
            amax = _place_scale(operand.amax, contract, batch, before, product.ndim)
            scales.append((amax, operand.layout.bound))
    return scale_outer(product, scales, find_factors)


def _place_scale(
    scale: jax.Array, contract: tuple[int, ...], batch: tuple[int, ...], before: int, ndim: int
) -> jax.Array:
    """Reshapes a scale, which has its operand's dimensions, to broadcast against a product with `ndim` dimensions.

    `before` is how many dimensions the product has between the batch and the free dimensions of this operand.
    """
    free = free_dims(scale.ndim, contract, batch)
    compact = scale.transpose((*batch, *free, *contract)).reshape([scale.shape[i] for i in (*batch, *free)])
    lead = len(batch)
    shape = compact.shape[:lead] + (1,) * before + compact.shape[lead:]
    return compact.reshape(shape + (1,) * (ndim - len(shape)))


_CONTRACT_ROWS: DimensionNumbers = (((0,), (0,)), ((), ()))
_CONTRACT_COLUMNS: DimensionNumbers = (((1,), (1,)), ((), ()))


def _multiply_groups(
    lhs: Operand, rhs: Operand, sizes: jax.Array, contracting: bool, dtype: jax.typing.DTypeLike
) -> jax.Array:
    contract = (0,) if contracting else (1,)
    dimensions = _CONTRACT_ROWS if contracting else _CONTRACT_COLUMNS
    a, b = _match_operands(_values(lhs, contract, dtype), _values(rhs, contract, dtype), dimensions)
    if contracting:
        ragged = lax.RaggedDotDimensionNumbers(_CONTRACT_ROWS, [0], [])
        product = lax.ragged_dot_general(a, b, sizes, ragged, preferred_element_type=jnp.float32)
        # The scales are those of a plain product of (m, k) and (m, n), the same for each group.
        return jax.vmap(lambda p: apply_outer_scales(p, lhs, rhs, _CONTRACT_ROWS, 1))(product)
    product = lax.ragged_dot(a, b, sizes, preferred_element_type=jnp.float32)
    scales = []
    if isinstance(lhs, Quantized) and lhs.amax is not None:
        scales.append((lhs.amax, lhs.layout.bound))
    if isinstance(rhs, Quantized) and rhs.amax is not None:
        group = jnp.repeat(jnp.arange(sizes.shape[0]), sizes, total_repeat_length=product.shape[0])
        scales.append((rhs.amax[group, 0], rhs.layout.bound))
    return scale_outer(product, scales)


# ---- products of shards: each device multiplies its own

Multiply = Callable[[Operand, Operand, DimensionNumbers], jax.Array]
"""Multiplies two operands on one device."""


def multiply_sharded(
    lhs: Operand, rhs: Operand, dimensions: DimensionNumbers, multiply: Multiply
) -> jax.Array:
    """The product of two operands whose shardings XLA chooses."""
    ((lc, rc), (lb, rb)) = dimensions
    left, right = _name_dims(lhs, lc, lb, "m"), _name_dims(rhs, rc, rb, "n")
    counts = _count_indices((left, right))
    batch = left.result_dims(lb, counts)
    left_free = left.result_dims(free_dims(len(left.names), lc, lb), counts)
    right_free = right.result_dims(free_dims(len(right.names), rc, rb), counts)
    rule = PartitionRule(
        name="emulated GEMM",
        operands=(*left.array_dims(counts), *right.array_dims(counts)),
        results=((*batch, *left_free, *right_free),),
        xla_scatters=True,
    )

    def run(index: ShardIndex, *shards: jax.Array) -> tuple[jax.Array]:
        a, b = left.rebuild(shards[: len(left.arrays)]), right.rebuild(shards[len(left.arrays) :])
        scattered = index.first_scattered()
        if scattered is None or scattered < len(batch) + len(left_free):
            return (multiply(a, b, dimensions),)
        # Computed transposed, so that XLA need not transpose it before it scatters the sum along its columns.
        product = multiply(b, a, ((rc, lc), (rb, lb)))
        columns = range(len(batch), len(batch) + len(right_free))
        return (jnp.moveaxis(product, columns, range(-len(right_free), 0)),)

    return partition(run, rule)(*left.arrays, *right.arrays)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _NamedOperand:
    """An operand as arrays. Its dimensions have names: those that both operands share have the same ones.

    `side` is in the names of all dimensions that are not shared. `sizes` are the sizes without packing and padding.
    """

    side: str
    layout: OperandLayout
    arrays: Sequence[jax.Array]
    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def array_dims(self, counts: Mapping[str, int]) -> list[Dims]:
        """The dimensions of each array."""
        return [
            tuple(
                # A dimension that has one number for all indices is not divided.
                (f"{name}_{self.side}{number}", 1) if size % counts[name] else (name, size // counts[name])
                for name, size in zip(self.names, array.shape, strict=True)
            )
            for number, array in enumerate(self.arrays)
        ]

    @property
    def padded(self) -> frozenset[str]:
        """The names of the dimensions with padding."""
        layout, codes = self.layout.layout, self.arrays[0]
        lengths = list(codes.shape)
        if layout is not None and layout.packed:
            lengths[layout.axis] *= 2
        return frozenset(
            name for name, length, size in zip(self.names, lengths, self.sizes, strict=True) if length != size
        )

    def result_dims(self, dims: Sequence[int], counts: Mapping[str, int]) -> Dims:
        """Some dimensions of the operand, as dimensions of the result."""
        return tuple((self.names[i], self.sizes[i] // counts[self.names[i]]) for i in dims)

    def rebuild(self, shards: Sequence[jax.Array]) -> Operand:
        """The operand on one device, from the shards of its arrays."""
        layout, codes = self.layout.layout, shards[0]
        if layout is None:
            return codes
        sizes = dict(zip(range(-codes.ndim, 0), self.sizes, strict=True))

        def own_size(axis: int) -> int:
            whole, part = self.arrays[0].shape[axis], codes.shape[axis]
            return sizes[axis] * part // whole

        tile_size = 0 if layout.tile_axis is None else own_size(layout.tile_axis)
        own_layout: Layout = replace(layout, size=own_size(layout.axis), tile_size=tile_size)
        return OperandLayout(own_layout).unflatten(shards)


def _name_dims(
    operand: Operand, contract: tuple[int, ...], batch: tuple[int, ...], side: str
) -> _NamedOperand:
    layout, arrays = flatten_operand(operand)
    codes = arrays[0]
    names = [f"{side}{i}" for i in range(codes.ndim)]
    for dims, kind in ((contract, "k"), (batch, "batch")):
        for number, i in enumerate(dims):
            names[i] = f"{kind}{number}"
    sizes = tuple(layout.dim_size(codes, i) for i in range(codes.ndim))
    return _NamedOperand(side=side, layout=layout, arrays=arrays, names=tuple(names), sizes=sizes)


def _count_indices(operands: Sequence[_NamedOperand]) -> dict[str, int]:
    """Into how many parts each dimension can be cut, so that each array has whole blocks and tiles in each part.

    A padded dimension is not cut: only its last part would have padding.
    """
    sizes: dict[str, list[int]] = {}
    for operand in operands:
        for array in (operand.sizes, *(array.shape for array in operand.arrays)):
            for name, size in zip(operand.names, array, strict=True):
                sizes.setdefault(name, []).append(size)
    padded = frozenset().union(*(operand.padded for operand in operands))
    counts = {}
    for name, all_sizes in sizes.items():
        several = [size for size in all_sizes if size > 1] or [1]
        is_cut = name not in padded and all(size % min(several) == 0 for size in several)
        counts[name] = min(several) if is_cut else 1
    return counts
