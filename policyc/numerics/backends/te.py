"""Transformer Engine's own kernels: its NVFP4 quantizers and its cuBLAS GEMM.

The results are those of the emulation, up to the order of fp32 sums and the random stream. A GEMM that its kernels do
not take is not run here: `obstacle` says why, and the plan says which backend runs it instead. On platforms other than
CUDA the emulation runs, which gives the same numbers.

Warning: if a kernel does not take a layout, Transformer Engine silently runs its own JAX code, which is wrong for
scales above 240. So this module lays operands out such that a kernel always takes them.
"""

from __future__ import annotations

import importlib
from functools import cache
from math import prod
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from policyc.jaxcore.shardings import without_mesh
from policyc.language.recipes import Treatment
from policyc.numerics.backends import LoweringContext, emulate, xla
from policyc.numerics.backends.choice import GemmQuery, Obstacle
from policyc.numerics.products import DimensionNumbers, free_dims
from policyc.numerics.quantize.blocks import layout_of
from policyc.numerics.quantize.hadamard import SIGNS
from policyc.numerics.quantize.layout import TILE, Axes, Operand, Quantized
from policyc.numerics.quantize.random import Key

NEEDS_DEVICES = True
UNSHARDABLE = True

INSTALL = (
    'pip install "jax[cuda13]" nvidia-nvtx nvidia-curand nvidia-cudnn-frontend pybind11 && NVTE_FRAMEWORK=jax '
    'NVTE_BUILD_USE_NVIDIA_WHEELS=1 pip install --no-build-isolation "transformer-engine[core-cu13,jax]"'
)

_BLOCK = 16
# What sizes must be multiples of: the contracted one for cuBLAS, tokens and features for the kernel that rotates.
_CONTRACTED = 32
_ROTATED_TOKENS, _ROTATED_FEATURES = 64, 128
_TYPES = ("bfloat16", "float16", "float32")


# ---- limits


def obstacle(query: GemmQuery) -> Obstacle | None:
    """The first of its limits that a GEMM exceeds."""
    if query.format != "nvfp4" or query.right.format != "nvfp4":
        return Obstacle(f"backend te runs only nvfp4, not {query.format}", "--backend auto")
    return shape_obstacle(query) or _option_obstacle(query.left) or _option_obstacle(query.right)


def shape_obstacle(query: GemmQuery) -> Obstacle | None:
    """Why it cannot run an nvfp4 GEMM of this shape and these types. Lint reports these."""
    if query.ragged or query.batch != 1:
        kind = "over ragged groups" if query.ragged else "with batch dimensions"
        return Obstacle(f"Transformer Engine has no NVFP4 GEMM {kind}", "--backend auto")
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
        "outer=row": t.outer != "tensor",
    }
    option = next((name for name, is_used in unsupported.items() if is_used), None)
    if option is None:
        return None
    return Obstacle(
        f"Transformer Engine's quantizers have no {option}", "leave the option out, or --backend auto"
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
            return Obstacle(reason, f"pad {size} to {size + -size % unit}, or --backend auto")
    return None


# ---- running


def missing() -> str:
    """Why Transformer Engine cannot be used here; empty if it can."""
    try:
        _engine()
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
    """Quantizes an operand with Transformer Engine's kernels."""
    if context.platform != "cuda":
        return emulate.quantize(x, treatment, axes, key, signs, context)
    layout, _ = layout_of(x.shape, treatment, axes)
    contract = tuple(x.ndim + i for i in (axes.contract or (axes.axis,)))
    free = free_dims(x.ndim, contract)
    # NaN if any element is NaN: the kernels lose a NaN in their own maxima.
    amax = jnp.max(jnp.abs(x)).astype(jnp.float32)
    out = _run_quantizer(x, treatment, contract, free, amax, key)
    if treatment.rht:
        amax = jnp.where(jnp.isfinite(amax), out.amax.reshape(()), jnp.float32(jnp.nan))
    rows, length = prod(x.shape[i] for i in free), prod(x.shape[i] for i in contract)
    codes = lax.bitcast_convert_type(out.data.reshape(rows, length // 2, 2), jnp.uint8)
    scales = _restore_dims(
        lax.bitcast_convert_type(out.scale_inv, jnp.uint8), x.shape, free, contract, _BLOCK
    )
    if layout.tile_axis is not None:
        # The kernel repeats the scale of a tile for each of its rows.
        scales = lax.slice_in_dim(scales, 0, None, TILE, axis=x.ndim + layout.tile_axis)
    return Quantized(
        codes=_restore_dims(codes, x.shape, free, contract, 2),
        scales=scales,
        amax=amax.reshape((1,) * x.ndim),
        layout=layout,
    )


def _run_quantizer(
    x: jax.Array,
    treatment: Treatment,
    contract: tuple[int, ...],
    free: tuple[int, ...],
    amax: jax.Array,
    key: Key | None,
) -> Any:
    """Quantizes x as a matrix: rows of contracted elements."""
    te = _engine()
    transposed = bool(treatment.rht) or contract == tuple(range(len(contract)))
    order = (*contract, *free) if transposed else (*free, *contract)
    rows, length = prod(x.shape[i] for i in free), prod(x.shape[i] for i in contract)
    flat = x.transpose(order).reshape((length, rows) if transposed else (rows, length))
    quantizer = te.QuantizerFactory.create(
        q_dtype=jnp.float4_e2m1fn,
        scaling_mode=te.ScalingMode.NVFP4_2D_SCALING if treatment.tile2d else te.ScalingMode.NVFP4_1D_SCALING,
        q_layout=_quantize_layout(te, transposed, bool(treatment.rht)),
        use_rht=bool(treatment.rht),
        stochastic_rounding_rng_state=_rng_state(key, amax) if treatment.rounding == "sr" else None,
    )
    with without_mesh():
        out = te.quantize(
            te.NoScaleTensor(data=flat, amax=amax.reshape(1)), quantizer=quantizer, flatten_axis=1
        )
    return out.colwise_tensor if isinstance(out, te.ScaledTensor2x) else out


def gemm(
    lhs: Operand, rhs: Operand, dimensions: DimensionNumbers, out: Any, context: LoweringContext
) -> jax.Array:
    """The product of two operands by Transformer Engine's cuBLAS GEMM."""
    if context.platform != "cuda":
        return emulate.gemm(lhs, rhs, dimensions, out, context)
    te = _engine()
    (lc, rc), (lb, rb) = dimensions
    (left, left_free), (right, right_free) = (
        _as_scaled_tensor(te, operand, contract, batch, out)
        for operand, contract, batch in ((lhs, lc, lb), (rhs, rc, rb))
    )
    with without_mesh():
        product: jax.Array = te.gemm(left, right, contracting_dims=((1,), (1,)))
    return product.reshape(*left_free, *right_free)


def _quantize_layout(te: Any, transposed: bool, rotates: bool) -> Any:
    """What the kernel writes. Only the kernel that rotates can write columns alone."""
    if not transposed:
        return te.QuantizeLayout.ROWWISE
    return te.QuantizeLayout.COLWISE if rotates else te.QuantizeLayout.ROWWISE_COLWISE


def _rng_state(key: Key | None, amax: jax.Array) -> jax.Array:
    """The seed and offset of the kernel's generator, 64 bits each."""
    assert key is not None
    folded = key.fold(amax)
    return jnp.stack([folded.a, folded.b, jnp.uint32(0), jnp.uint32(0)])


def _restore_dims(
    rows: jax.Array, shape: tuple[int, ...], free: tuple[int, ...], contract: tuple[int, ...], unit: int
) -> jax.Array:
    """Rows with `unit` elements to a byte, in the shape and dimension order of the operand."""
    *outer, last = (shape[i] for i in (*free, *contract))
    order = (*free, *contract)
    return rows.reshape(*outer, last // unit).transpose(sorted(range(len(order)), key=order.__getitem__))


def _as_scaled_tensor(
    te: Any, operand: Operand, contract: tuple[int, ...], batch: tuple[int, ...], out: Any
) -> tuple[Any, tuple[int, ...]]:
    """An operand as Transformer Engine's type, and the sizes of its free dimensions."""
    assert isinstance(operand, Quantized)
    assert operand.amax is not None
    values, scales, free = xla.as_rows(operand, contract, batch)
    scaled = te.ScaledTensorFactory.create_1x(
        data=values[0],
        scale_inv=scales[0],
        amax=operand.amax.reshape(1),
        scaling_mode=te.ScalingMode.NVFP4_1D_SCALING,
        dq_dtype=out,
        data_layout="N",
        flatten_axis=1,
    )
    return scaled, free


# ---- the library


def _engine() -> Any:
    """The parts of Transformer Engine that are used. Raises ImportError if its kernels are switched off."""
    te = _import_engine()
    if not all(primitive.enabled() for primitive in te.primitives):
        raise ImportError(
            "Transformer Engine's kernels are switched off, and its own JAX code for them is wrong: unset "
            "NVTE_JAX_CUSTOM_CALLS and NVTE_JAX_CUSTOM_CALLS_RE"
        )
    return te


@cache
def _import_engine() -> Any:
    calls = "transformer_engine.jax.cpp_extensions"
    try:
        quantization, gemms = (
            importlib.import_module(f"{calls}.{name}") for name in ("quantization", "gemm")
        )
        parts = importlib.import_module("transformer_engine.jax.quantize")
        te = SimpleNamespace(
            quantize=quantization.quantize,
            gemm=gemms.gemm,
            primitives=(quantization.QuantizePrimitive, gemms.GemmPrimitive),
            **{name: getattr(parts, name) for name in _NAMES},
        )
    except (ImportError, OSError, AttributeError) as error:
        raise ImportError(
            f"backend te needs Transformer Engine 2.20 for JAX ({error}). To install it: {INSTALL}"
        ) from error
    if tuple(parts.get_wgrad_sign_vector()) != SIGNS:
        raise ImportError("this Transformer Engine rotates by other signs than the recipe")
    return te


_NAMES = (
    "NoScaleTensor",
    "QuantizeLayout",
    "QuantizerFactory",
    "ScaledTensor2x",
    "ScaledTensorFactory",
    "ScalingMode",
)
