"""Transformer Engine's own kernels: its NVFP4 quantizers and its cuBLAS GEMM.

The results are those of the emulated backend, up to the order of fp32 sums and the random stream. GEMMs that its
kernels do not support are not run here: `obstacle` says why, and the plan says which backend runs them instead. On
platforms other than CUDA, the emulated backend runs and gives the same numbers.

Warning: if no kernel supports a layout, Transformer Engine silently runs its own JAX code, which is wrong for scales
above 240. So this module always lays out operands in a way that a kernel supports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from policyc.jaxcore.primitives.define_primitive import LoweringContext
from policyc.jaxcore.primitives.partition import Dim, Dims, PartitionRule, ShardIndex, partition
from policyc.language.recipes import Gemm, Recipe, Role, Treatment
from policyc.numerics.backends import te_calls, te_quantize
from policyc.numerics.backends.backend import GemmQuery, Obstacle
from policyc.numerics.backends.emulate import Emulation, quantize_alone, quantize_layers
from policyc.numerics.backends.te_quantize import (
    ROTATED_FEATURES,
    ROTATED_TOKENS,
    array_dims,
    find_remainder,
    scale_dims,
    select_own_scales,
    undivided_factors,
)
from policyc.numerics.backends.xla import as_rows, as_values
from policyc.numerics.dimensions import DimensionNumbers, free_dims
from policyc.numerics.quantize import Request
from policyc.numerics.quantize.kernels.kernel_tiles import BLOCK
from policyc.numerics.quantize.reference.bits import materialize
from policyc.numerics.quantize.reference.hadamard import SIGNS
from policyc.numerics.quantize.reference.layout import Layout, Operand, Quantized

# cuBLAS needs a contracted size that is a multiple of this.
_CONTRACTED = 32
_TYPES = ("bfloat16", "float16", "float32")
_FALLBACK_REMEDY = "other backends run it"


class TransformerEngineBackend(Emulation):
    """Transformer Engine. Where there is no CUDA, it is the emulation."""

    runs_anywhere: bool = False
    multiplies_values: bool = False
    fallback: str = "xla"
    batched_by: str = "xla"
    needs_devices: bool = True
    has_own_stream: bool = True
    gathers_tile_scales: bool = True
    calls: Mapping[str, str] = MappingProxyType({"nvfp4": "te_gemm_v2_ffi"})
    # From Transformer Engine's own profile on a B300 (benchmarks.calibration).
    quantizer_slowdown: float | None = 1.1

    def is_candidate(self, query: GemmQuery) -> bool:
        """Its kernels read less than XLA's."""
        return not query.ragged and query.format == query.right.format == "nvfp4"

    def obstacle(self, query: GemmQuery) -> Obstacle | None:
        """The first limit of this backend that a GEMM exceeds, if any."""
        if query.format != "nvfp4" or query.right.format != "nvfp4":
            return Obstacle(f"Transformer Engine runs only nvfp4, not {query.format}", _FALLBACK_REMEDY)
        if query.left.tile2d:
            return Obstacle(
                "Transformer Engine has 2D scales for weights only", f"scale2d=weights; {_FALLBACK_REMEDY}"
            )
        return shape_obstacle(query) or _option_obstacle(query.left) or _option_obstacle(query.right)

    def find_missing_library(self) -> str:
        """Why Transformer Engine cannot be used here; empty if it can."""
        try:
            te_calls.load()
        except ImportError as error:
            return str(error)
        return ""

    def writes_both_orders(self, recipe: Recipe, role: Role, *, splits: bool) -> bool:
        """One pass packs the codes of a 2D weight along both axes. Fprop and dgrad each read one of the packings."""
        del splits
        if role is not Role.WEIGHT:
            return False
        weights = [recipe.treatment(gemm, role) for gemm in (Gemm.FPROP, Gemm.DGRAD)]
        return all(t.tile2d and t.bits == 4 for t in weights) and weights[0] == weights[1]

    def count_reads(self, treatments: Sequence[Treatment]) -> int:
        return te_quantize.count_reads(treatments)

    def quantize(
        self, x: jax.Array, requests: Sequence[Request], context: LoweringContext
    ) -> list[Quantized]:
        """Quantizes an operand with Transformer Engine's kernels. Each device quantizes its own shard."""
        if context.platform == "cuda":
            if context.is_stack:
                return [te_quantize.quantize_stack(x, requests[0])]
            return te_quantize.quantize_orders(x, requests)
        if context.is_stack:
            return quantize_layers(self, x, requests, context)
        return [quantize_alone(x, r, context) for r in requests]

    def gemm(
        self, lhs: Operand, rhs: Operand, dimensions: DimensionNumbers, out: Any, context: LoweringContext
    ) -> jax.Array:
        """The product of two operands by Transformer Engine's cuBLAS GEMM. Each device computes its own part.

        If operands must be gathered before the product, it is their codes and scales that are gathered.
        """
        if context.platform != "cuda":
            return super().gemm(lhs, rhs, dimensions, out, context)
        assert isinstance(lhs, Quantized)
        assert isinstance(rhs, Quantized)
        return _multiply(lhs, rhs, dimensions, out)


BACKEND = TransformerEngineBackend()


# ---- limits


def shape_obstacle(query: GemmQuery) -> Obstacle | None:
    """Why this backend cannot run an nvfp4 GEMM of this shape and these dtypes. Lint reports these obstacles."""
    if query.ragged or query.batch != 1:
        kind = "over ragged groups" if query.ragged else "with batch dimensions"
        return Obstacle(f"Transformer Engine has no NVFP4 GEMM {kind}", _FALLBACK_REMEDY)
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
        f"rht_signs={t.rht_signs}": t.rht_signs != "fixed",
        "rounding=ms_eden": t.rounding == "ms_eden",
        f"scale={t.scale}": t.scale != "amax",
        "mean_split": t.mean_split,
        f"outer={t.outer}": t.outer not in ("tensor", "bound"),
    }
    option = next((name for name, is_used in unsupported.items() if is_used), None)
    if option is None:
        return None
    return Obstacle(
        f"Transformer Engine's quantizers do not support {option}",
        f"leave the option out; {_FALLBACK_REMEDY}",
    )


def _size_obstacle(query: GemmQuery) -> Obstacle | None:
    rotates = bool(query.left.rht)
    units = {
        "contracted": (query.k, ROTATED_TOKENS if rotates else _CONTRACTED),
        "rows": (query.m, ROTATED_FEATURES if rotates else BLOCK),
        "columns": (query.n, ROTATED_FEATURES if rotates else BLOCK),
    }
    for name, (size, unit) in units.items():
        if size % unit:
            condition = " with rht" if rotates else ""
            reason = (
                f"Transformer Engine requires {name} % {unit} == 0{condition}, but {query.gemm} has {size}"
            )
            return Obstacle(reason, f"pad {size} to {size + -size % unit}; {_FALLBACK_REMEDY}")
    return None


# ---- the product


def _multiply(lhs: Quantized, rhs: Quantized, dimensions: DimensionNumbers, out: Any) -> jax.Array:
    engine = te_calls.load()

    def run(index: ShardIndex, *arrays: jax.Array) -> tuple[jax.Array]:
        *shards, alpha = arrays
        (left, left_free), (right, right_free) = (
            _as_matrix(
                operand.layout,
                shards[2 * i : 2 * i + 2],
                contract,
                _factor_names(contract, i, operand),
                index,
            )
            for i, (operand, contract) in enumerate(zip((lhs, rhs), dimensions[0], strict=True))
        )
        # A sum over devices that is scattered along columns is computed transposed, so that XLA need not transpose it.
        scattered = index.first_scattered()
        is_transposed = scattered is not None and scattered >= len(left_free)
        operands = (right, left) if is_transposed else (left, right)
        # Without the barrier, XLA multiplies twice if the product is also saved for the backward pass: the second
        # product is written in place, into the stack of all layers.
        product = materialize(engine.gemm(*operands, alpha, out))
        if not is_transposed:
            return (product.reshape(*left_free, *right_free),)
        free = product.reshape(*right_free, *left_free)
        return (jnp.moveaxis(free, range(len(right_free)), range(len(left_free), free.ndim)),)

    arrays = [array for operand in (lhs, rhs) for array in (operand.codes, operand.scales)]
    multiply = partition(run, _gemm_rule(lhs, rhs, dimensions))
    return multiply(*arrays, _outer_scale(lhs) * _outer_scale(rhs))[0]


def _outer_scale(operand: Quantized) -> jax.Array:
    assert operand.amax is not None
    scale: jax.Array = operand.amax.reshape(()) / jnp.float32(operand.layout.bound)
    return scale


def _as_matrix(
    layout: Layout,
    arrays: Sequence[jax.Array],
    contract: tuple[int, ...],
    names: Sequence[str],
    index: ShardIndex,
) -> tuple[te_calls.QuantizedMatrix, tuple[int, ...]]:
    """The shard of an operand as rows of contracted elements, and the sizes of its free dimensions."""
    codes, scales = arrays
    scales = select_own_scales(layout, codes, scales, names, index)
    tile_size = 0 if layout.tile_axis is None else codes.shape[layout.tile_axis]
    layout = replace(layout, size=2 * codes.shape[layout.axis], tile_size=tile_size)
    shard = Quantized(codes=codes, scales=scales, amax=None, layout=layout)
    rows, free = as_rows(shard, contract, ())
    values, row_scales = as_values(rows, layout.format)
    return te_calls.QuantizedMatrix(values[0], row_scales[0]), free


def _gemm_rule(lhs: Quantized, rhs: Quantized, dimensions: DimensionNumbers) -> PartitionRule:
    """Partitioning rule. The contracted dimensions of both operands have the same factors."""
    operands: list[Dims] = []
    free: list[tuple[Dim, ...]] = []
    contracted: list[Dim] = []
    for i, (operand, contract) in enumerate(zip((lhs, rhs), dimensions[0], strict=True)):
        names = _factor_names(contract, i, operand)
        elements = array_dims(operand.layout, names, "elements")
        operands += [array_dims(operand.layout, names, "codes"), scale_dims(operand.layout, names)]
        free.append(tuple(elements[i] for i in free_dims(len(names), contract)))
        contracted = [elements[i] for i in contract]

    def find_limit(sizes: Mapping[str, int]) -> str:
        rows, columns, length = (
            prod(sizes[name] * unit for name, unit in dims) for dims in (*free, contracted)
        )
        return find_remainder(
            {"contracted": (length, _CONTRACTED), "rows": (rows, BLOCK), "columns": (columns, BLOCK)}
        )

    return PartitionRule(
        name="Transformer Engine's GEMM",
        operands=(*operands, ()),
        results=((*free[0], *free[1]),),
        whole=undivided_factors(operands),
        xla_scatters=True,
        limit=find_limit,
    )


def _factor_names(contract: tuple[int, ...], side: int, operand: Quantized) -> tuple[str, ...]:
    """The factor names of the dimensions of the left (`side` is 0) or the right operand (1)."""
    return tuple(
        f"k{contract.index(i)}" if i in contract else f"{'mn'[side]}{i}" for i in range(operand.codes.ndim)
    )
