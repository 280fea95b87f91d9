"""Transformer Engine's own kernels: its NVFP4 quantizers and its cuBLAS GEMM.

In: operands as the recipe has them. Out: what the emulation gives, up to the order of fp32 sums and the random stream.
The one trap: Transformer Engine falls back to its own JAX code where a kernel does not take a layout, and that code is
wrong where a scale is above 240. So operands are laid out here such that a kernel always takes them.

A product that does not fit is not run here: `obstacle` says why, and the plan says who runs it instead. On a platform
other than CUDA the emulation runs, which gives the same numbers.
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

from policyc.jaxcore.define_primitive import without_mesh
from policyc.language.recipes import Treatment
from policyc.numerics.backends import emulate, xla
from policyc.numerics.backends.choice import GemmQuery, Obstacle
from policyc.numerics.backends.emulate import Dims, Operand
from policyc.numerics.quantize.blocks import layout_of
from policyc.numerics.quantize.hadamard import SIGNS
from policyc.numerics.quantize.layout import TILE, Axes, Quantized
from policyc.numerics.quantize.random import Key

INSTALL = (
    'pip install "jax[cuda13]" nvidia-nvtx nvidia-curand nvidia-cudnn-frontend pybind11 && NVTE_FRAMEWORK=jax '
    'NVTE_BUILD_USE_NVIDIA_WHEELS=1 pip install --no-build-isolation "transformer-engine[core-cu13,jax]"'
)
_BLOCK = 16
_CONTRACTED = 32
_ROTATED_TOKENS, _ROTATED_FEATURES = 64, 128
_TYPES = ("bfloat16", "float16", "float32")


# ---- what it takes


def obstacle(ask: GemmQuery) -> Obstacle | None:
    """The first of its limits that a product does not keep."""
    if ask.format != "nvfp4" or ask.right.format != "nvfp4":
        return Obstacle(f"the te backend runs nvfp4 and not {ask.format}", "--backend auto")
    return misfit(ask) or _option(ask.left) or _option(ask.right)


def misfit(ask: GemmQuery) -> Obstacle | None:
    """What of the shape and the types of an nvfp4 product it does not take. Lint tells of these."""
    if ask.ragged or ask.batch != 1:
        kind = "over ragged groups" if ask.ragged else "with batch dimensions"
        return Obstacle(f"Transformer Engine has no NVFP4 GEMM {kind}", "--backend auto")
    return _type(ask.left, ask.types[0]) or _type(ask.right, ask.types[1]) or _size(ask)


def _type(t: Treatment, of_type: str) -> Obstacle | None:
    if of_type not in _TYPES:
        return Obstacle(f"Transformer Engine does not quantize {of_type}", "compute in bfloat16")
    if t.rht and of_type != "bfloat16":
        return Obstacle(
            f"Transformer Engine rotates bfloat16, and this operand is {of_type}",
            "compute in bfloat16, or rht=none",
        )
    return None


def _option(t: Treatment) -> Obstacle | None:
    lacking = {
        f"rht_size={t.rht}": t.rht not in (0, len(SIGNS)),
        "rounding=ms_eden": t.rounding == "ms_eden",
        f"scale={t.scale}": t.scale != "amax",
        f"sr_headroom={t.headroom}": t.headroom != 1,
        "mean_split": t.mean_split,
        "outer=row": t.outer != "tensor",
    }
    option = next((name for name, asked in lacking.items() if asked), None)
    if option is None:
        return None
    return Obstacle(
        f"Transformer Engine's quantizers have no {option}", "leave the option out, or --backend auto"
    )


def _size(ask: GemmQuery) -> Obstacle | None:
    rotated = bool(ask.left.rht)
    units = {
        "contracted": (ask.k, _ROTATED_TOKENS if rotated else _CONTRACTED),
        "rows": (ask.m, _ROTATED_FEATURES if rotated else _BLOCK),
        "columns": (ask.n, _ROTATED_FEATURES if rotated else _BLOCK),
    }
    for name, (size, unit) in units.items():
        if size % unit:
            condition = " where it rotates" if rotated else ""
            reason = f"Transformer Engine wants {name} % {unit} == 0{condition}, and {ask.gemm} has {size}"
            return Obstacle(reason, f"pad {size} to {size + -size % unit}, or --backend auto")
    return None


# ---- how it runs


def missing() -> str:
    try:
        _engine()
    except ImportError as error:
        return str(error)
    return ""


def quantize(
    x: jax.Array,
    treatment: Treatment,
    axes: Axes,
    *,
    key: Key | None,
    signs: Key | None,
    platform: str,
    alone: bool,
) -> Quantized:
    if platform != "cuda":
        return emulate.quantize(x, treatment, axes, key=key, signs=signs, platform=platform, alone=alone)
    te = _engine()
    layout, _ = layout_of(x.shape, treatment, axes)
    contract = tuple(x.ndim + i for i in (axes.contract or (axes.axis,)))
    free = tuple(i for i in range(x.ndim) if i not in contract)
    # NaN where any element is: the kernels lose one in their own maxima.
    amax = jnp.max(jnp.abs(x)).astype(jnp.float32)
    transposed = bool(treatment.rht) or contract == tuple(range(len(contract)))
    order = (*contract, *free) if transposed else (*free, *contract)
    rows, length = prod(x.shape[i] for i in free), prod(x.shape[i] for i in contract)
    flat = x.transpose(order).reshape((length, rows) if transposed else (rows, length))
    quantizer = te.QuantizerFactory.create(
        q_dtype=jnp.float4_e2m1fn,
        scaling_mode=te.ScalingMode.NVFP4_2D_SCALING if treatment.tile2d else te.ScalingMode.NVFP4_1D_SCALING,
        q_layout=_layout(te, transposed, bool(treatment.rht)),
        use_rht=bool(treatment.rht),
        stochastic_rounding_rng_state=_state(key, amax) if treatment.rounding == "sr" else None,
    )
    with without_mesh():
        out = te.quantize(
            te.NoScaleTensor(data=flat, amax=amax.reshape(1)), quantizer=quantizer, flatten_axis=1
        )
    if isinstance(out, te.ScaledTensor2x):
        out = out.colwise_tensor
    if treatment.rht:
        amax = jnp.where(jnp.isfinite(amax), out.amax.reshape(()), jnp.float32(jnp.nan))
    codes = lax.bitcast_convert_type(out.data.reshape(rows, length // 2, 2), jnp.uint8)
    scales = lax.bitcast_convert_type(out.scale_inv, jnp.uint8)
    shapes = [x.shape[i] for i in free], [x.shape[i] for i in contract]
    scales = _in_place(scales, shapes, _BLOCK, (*free, *contract))
    if layout.tile_axis is not None:
        # The kernel repeats a tile's scale for each of its rows.
        scales = lax.slice_in_dim(scales, 0, None, TILE, axis=x.ndim + layout.tile_axis)
    return Quantized(
        codes=_in_place(codes, shapes, 2, (*free, *contract)),
        scales=scales,
        amax=amax.reshape((1,) * x.ndim),
        layout=layout,
    )


def gemm(lhs: Operand, rhs: Operand, dimensions: Dims, out: Any, *, platform: str) -> jax.Array:
    if platform != "cuda":
        return emulate.gemm(lhs, rhs, dimensions, out, platform=platform)
    te = _engine()
    (lc, rc), (lb, rb) = dimensions
    (left, left_free), (right, right_free) = (
        _scaled(te, operand, contract, batch, out)
        for operand, contract, batch in ((lhs, lc, lb), (rhs, rc, rb))
    )
    with without_mesh():
        product: jax.Array = te.gemm(left, right, contracting_dims=((1,), (1,)))
    return product.reshape(*left_free, *right_free)


def _layout(te: Any, transposed: bool, rotated: bool) -> Any:
    """What the kernel writes. It has none that writes only columns, but for the one that rotates."""
    if not transposed:
        return te.QuantizeLayout.ROWWISE
    return te.QuantizeLayout.COLWISE if rotated else te.QuantizeLayout.ROWWISE_COLWISE


def _state(key: Key | None, amax: jax.Array) -> jax.Array:
    """Seed and offset of the kernel's generator, 64 bits each."""
    assert key is not None
    folded = key.fold(amax)
    return jnp.stack([folded.a, folded.b, jnp.uint32(0), jnp.uint32(0)])


def _in_place(
    rows: jax.Array, shapes: tuple[list[int], list[int]], unit: int, order: tuple[int, ...]
) -> jax.Array:
    """Rows of `unit` elements to a byte, with the dimensions of the operand where it has them."""
    free, contract = shapes
    full = rows.reshape(*free, *contract[:-1], contract[-1] // unit)
    return full.transpose(sorted(range(len(order)), key=order.__getitem__))


def _scaled(
    te: Any, operand: Operand, contract: tuple[int, ...], batch: tuple[int, ...], out: Any
) -> tuple[Any, tuple[int, ...]]:
    """An operand as Transformer Engine has it, and the lengths of its free dimensions."""
    assert isinstance(operand, Quantized)
    assert operand.amax is not None
    values, scales, free = xla.rows(operand, contract, batch)
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


def _engine() -> Any:
    """Whatever of Transformer Engine is used, with its kernels switched on."""
    te = _imported()
    if not all(primitive.enabled() for primitive in te.primitives):
        raise ImportError(
            "Transformer Engine's kernels are switched off, and its own JAX code for them is wrong: unset "
            "NVTE_JAX_CUSTOM_CALLS and NVTE_JAX_CUSTOM_CALLS_RE"
        )
    return te


@cache
def _imported() -> Any:
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
    "NoScaleTensor", "QuantizeLayout", "QuantizerFactory", "ScaledTensor2x", "ScaledTensorFactory", "ScalingMode",
)  # fmt: skip
