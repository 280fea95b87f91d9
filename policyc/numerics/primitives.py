"""`quantize` and `scaled_gemm` as JAX primitives: each shows as one equation in a jaxpr.

Their results have no derivative. Code that differentiates them must be inside a `custom_vjp`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from policyc.jaxcore.define_primitive import DimSource, PrimitiveRules, Replacement, Shape, bind, define
from policyc.language.formats import FORMATS
from policyc.language.recipes import Treatment
from policyc.numerics import backends
from policyc.numerics import quantize as q
from policyc.numerics.backends import LoweringContext, emulate
from policyc.numerics.products import DimensionNumbers, free_dims
from policyc.numerics.quantize.blocks import layout_of, outer_scale_axes
from policyc.numerics.quantize.layout import TILE, Axes, Layout, Operand, Quantized

_PLATFORMS = ("cpu", "cuda")
"""The platforms that some backend handles specially."""


# ---- quantize


@dataclass(frozen=True, slots=True)
class QuantizeSpec:
    """The parameter `spec` of a quantize equation: what it does. Prints as briefly as possible."""

    treatment: Treatment
    axes: Axes

    def __repr__(self) -> str:
        t, block = self.treatment, FORMATS[self.treatment.format].block
        words = [f"{TILE if t.tile2d else 1}x{block}" if block else "tensor", t.rounding]
        words += [t.element] if t.format == "fp8" else []
        words += [f"rht{t.rht}"] if t.rht else []
        words += [t.scale] if t.scale != "amax" else []
        words += [t.scale_rounding] if t.format == "mxfp4" else []
        words += [f"headroom{t.headroom}"] if t.headroom != 1 else []
        words += [f"outer={t.outer}"] if t.outer != "tensor" else []
        return f"{','.join(words)}@{self.axes.axis}"


def quantize(
    x: jax.Array,
    treatment: Treatment,
    axes: Axes,
    *,
    operand: str = "",
    keys: tuple[q.Key, q.Key] | None = None,
    backend: str = "emulate",
) -> Quantized:
    """`policyc.numerics.quantize.quantize` as one equation.

    Args:
      operand: the name `gemm.operand`. It is part of the rounding key, and its first half is part of the sign key.
      keys: the keys of stochastic rounding and of fresh signs.
      backend: the backend that runs it.
    """
    layout, _ = layout_of(x.shape, treatment, axes)
    rounding_key, sign_key = keys or (q.make_key(), q.make_key())
    used_keys = {"rne": (), "sr": (rounding_key,), "ms_eden": (rounding_key, sign_key)}[treatment.rounding]
    words = [word for k in used_keys for word in (k.a, k.b)]
    spec = QuantizeSpec(treatment, axes)
    primitive = _quantize_primitive(treatment.format, backend)
    return _unflatten_quantized(
        layout, bind(primitive, x, *words, spec=spec, operand=operand, backend=backend)
    )


@cache
def _quantize_primitive(format: str, backend: str) -> Primitive:
    return define(
        f"{format}_quantize",
        PrimitiveRules(
            body=_quantize,
            shapes=_quantize_shapes,
            dim_sources=_quantize_dim_sources,
            platform_bodies={
                name: partial(_quantize, context=LoweringContext(platform=name)) for name in _PLATFORMS
            },
            single_device_bodies={
                name: partial(_quantize, context=LoweringContext(platform=name, single_device=True))
                for name in _PLATFORMS
            },
            needs_devices=backends.load(backend).NEEDS_DEVICES,
            batched=_batched(backend, partial(_quantize_primitive, format, _BATCHING_BACKEND)),
        ),
    )


_BATCHING_BACKEND = "xla"
"""Runs the products of a backend that `vmap` cannot batch."""


def _batched(backend: str, primitive: Callable[[], Primitive]) -> Replacement | None:
    if not backends.load(backend).UNBATCHABLE:
        return None
    return Replacement(
        primitive=primitive,
        params={"backend": _BATCHING_BACKEND},
        reason=f"backend {backend} cannot run a GEMM under a vmap around the loss: {_BATCHING_BACKEND} runs it",
    )


def _quantize(
    x: jax.Array,
    *words: jax.Array,
    spec: QuantizeSpec,
    operand: str,
    backend: str,
    context: LoweringContext = backends.ANY_PLATFORM,
) -> Sequence[jax.Array]:
    # `words` are those of the rounding key and of the sign key, for the treatments that use them. The name of the
    # sign key is that of the GEMM: both operands of a GEMM must have the same signs.
    rounding_key = q.Key(*words[:2]).fold(operand) if words else None
    sign_key = q.Key(*words[2:]).fold(operand.partition(".")[0] + ".signs") if words[2:] else None
    out = backends.load(backend).quantize(x, spec.treatment, spec.axes, rounding_key, sign_key, context)
    return [a for a in (out.codes, out.scales, out.amax, out.transposed_codes) if a is not None]


def _quantize_shapes(x: Any, *words: Any, spec: QuantizeSpec, operand: str, backend: str) -> list[Shape]:
    del words, operand, backend
    axes = spec.axes
    layout, padded = layout_of(x.shape, spec.treatment, axes)
    codes, scales = list(padded), list(padded)
    if layout.packed:
        codes[axes.axis] //= 2
    out: list[Shape] = [(tuple(codes), jnp.uint8)]
    if layout.block:
        scales[axes.axis] //= layout.block
        if layout.tile_axis is not None:
            scales[layout.tile_axis] //= TILE
        out.append((tuple(scales), jnp.uint8))
    if FORMATS[layout.format].tensor_scale:
        spanned = outer_scale_axes(spec.treatment, axes, layout, len(padded))
        amax = tuple(1 if i - len(padded) in spanned else n for i, n in enumerate(padded))
        out.append((amax, jnp.float32))
    if axes.both_orders and layout.packed:
        assert layout.tile_axis is not None
        other = list(padded)
        other[layout.tile_axis] //= 2
        out.append((tuple(other), jnp.uint8))
    elif axes.both_orders:
        out.append(((codes[-1], *codes[:-1]), jnp.uint8))
    return out


def _quantize_dim_sources(
    x: Any, *words: Any, spec: QuantizeSpec, operand: str, backend: str
) -> list[list[DimSource]]:
    """Codes, scales and amax have the dimensions of the operand."""
    results = _quantize_shapes(x, *words, spec=spec, operand=operand, backend=backend)
    dims: list[DimSource] = [(0, i - x.ndim) for i in range(x.ndim)]
    if not spec.axes.both_orders or spec.treatment.tile2d:
        return [dims for _ in results]
    return [*(dims for _ in results[1:]), [dims[-1], *dims[:-1]]]


def _unflatten_quantized(layout: Layout, arrays: Sequence[jax.Array]) -> Quantized:
    format = FORMATS[layout.format]
    parts = iter(arrays)
    return Quantized(
        codes=next(parts),
        scales=next(parts) if format.block else None,
        amax=next(parts) if format.tensor_scale else None,
        transposed_codes=next(parts, None),
        layout=layout,
    )


# ---- operands of products


@dataclass(frozen=True, slots=True)
class OperandLayout:
    """The parameters `lhs` and `rhs` of a product: the layout of an operand, None if it is a plain array.

    Prints as the name of the format.
    """

    layout: Layout | None

    def __repr__(self) -> str:
        return self.layout.format if self.layout else "plain"

    @property
    def array_count(self) -> int:
        """The number of arrays that the equation takes for this operand."""
        if self.layout is None:
            return 1
        format = FORMATS[self.layout.format]
        return 1 + bool(format.block) + format.tensor_scale

    def unflatten(self, arrays: Sequence[jax.Array]) -> Operand:
        return arrays[0] if self.layout is None else _unflatten_quantized(self.layout, arrays)

    def dim_size(self, codes: Any, axis: int) -> int:
        """The size of a dimension of the operand, without the packing and padding of its codes."""
        layout = self.layout
        if layout is not None and axis - codes.ndim == layout.axis:
            return layout.size
        if layout is not None and axis - codes.ndim == layout.tile_axis:
            return layout.tile_size
        return int(codes.shape[axis])


def _flatten_operand(operand: Operand) -> tuple[OperandLayout, list[jax.Array]]:
    if isinstance(operand, Quantized):
        arrays = (operand.codes, operand.scales, operand.amax)
        return OperandLayout(operand.layout), [a for a in arrays if a is not None]
    return OperandLayout(None), [operand]


def _unflatten_operands(
    arrays: Sequence[jax.Array], lhs: OperandLayout, rhs: OperandLayout
) -> tuple[Operand, Operand]:
    return lhs.unflatten(arrays[: lhs.array_count]), rhs.unflatten(arrays[lhs.array_count :])


# ---- scaled_gemm


def scaled_gemm(
    lhs: Operand, rhs: Operand, dimension_numbers: DimensionNumbers, out: Any, *, backend: str = "emulate"
) -> jax.Array:
    """The product of two operands, each `Quantized` or a plain array, as one equation."""
    (left, a), (right, b) = _flatten_operand(lhs), _flatten_operand(rhs)
    params = {"lhs": left, "rhs": right, "dimension_numbers": dimension_numbers, "out": jnp.dtype(out)}
    return bind(_scaled_gemm_primitive(backend), *a, *b, backend=backend, **params)[0]


@cache
def _scaled_gemm_primitive(backend: str) -> Primitive:
    return define(
        "scaled_gemm",
        PrimitiveRules(
            body=_gemm,
            shapes=_gemm_shapes,
            dim_sources=_gemm_dim_sources,
            platform_bodies={
                name: partial(_gemm, context=LoweringContext(platform=name)) for name in _PLATFORMS
            },
            needs_devices=backends.load(backend).NEEDS_DEVICES,
            batched=_batched(backend, partial(_scaled_gemm_primitive, _BATCHING_BACKEND)),
        ),
    )


def _gemm(
    *arrays: jax.Array,
    lhs: OperandLayout,
    rhs: OperandLayout,
    dimension_numbers: DimensionNumbers,
    out: Any,
    backend: str,
    context: LoweringContext = backends.ANY_PLATFORM,
) -> Sequence[jax.Array]:
    a, b = _unflatten_operands(arrays, lhs, rhs)
    return [backends.load(backend).gemm(a, b, dimension_numbers, out, context)]


def _gemm_shapes(
    *avals: Any,
    lhs: OperandLayout,
    rhs: OperandLayout,
    dimension_numbers: DimensionNumbers,
    out: Any,
    backend: str,
) -> list[Shape]:
    del backend
    a, b = avals[0], avals[lhs.array_count]
    (lc, rc), (lb, rb) = dimension_numbers
    shape = [lhs.dim_size(a, i) for i in (*lb, *free_dims(a.ndim, lc, lb))]
    shape += [rhs.dim_size(b, i) for i in free_dims(b.ndim, rc, rb)]
    return [(tuple(shape), out)]


def _gemm_dim_sources(
    *avals: Any,
    lhs: OperandLayout,
    rhs: OperandLayout,
    dimension_numbers: DimensionNumbers,
    out: Any,
    backend: str,
) -> list[list[DimSource]]:
    """As in `dot_general`. Sums over a sharded contraction are complete: the result is not sharded by it."""
    del rhs, out, backend
    a, b = avals[0].ndim, avals[lhs.array_count].ndim
    (lc, rc), (lb, rb) = dimension_numbers
    left: list[DimSource] = [(0, i - a) for i in (*lb, *free_dims(a, lc, lb))]
    return [left + [(lhs.array_count, i - b) for i in free_dims(b, rc, rb)]]


# ---- scaled_ragged_gemm


def scaled_ragged_gemm(
    lhs: Operand, rhs: Operand, sizes: jax.Array, *, contracting: bool, out: Any
) -> jax.Array:
    """Products of groups of rows, as one equation. `emulate.scaled_ragged_gemm` describes the shapes."""
    (left, a), (right, b) = _flatten_operand(lhs), _flatten_operand(rhs)
    params = {"lhs": left, "rhs": right, "contracting": contracting, "out": jnp.dtype(out)}
    return bind(_SCALED_RAGGED_GEMM, sizes, *a, *b, **params)[0]


def _ragged(
    sizes: jax.Array,
    *arrays: jax.Array,
    lhs: OperandLayout,
    rhs: OperandLayout,
    contracting: bool,
    out: Any,
    value_dtype: Any = jnp.bfloat16,
) -> Sequence[jax.Array]:
    a, b = _unflatten_operands(arrays, lhs, rhs)
    return [emulate.scaled_ragged_gemm(a, b, sizes, contracting, value_dtype).astype(out)]


def _ragged_shapes(
    sizes: Any, *avals: Any, lhs: OperandLayout, rhs: OperandLayout, contracting: bool, out: Any
) -> list[Shape]:
    a, b = avals[0], avals[lhs.array_count]
    if contracting:
        return [((sizes.shape[0], lhs.dim_size(a, 1), rhs.dim_size(b, 1)), out)]
    return [((lhs.dim_size(a, 0), rhs.dim_size(b, 2)), out)]


def _ragged_dim_sources(
    sizes: Any, *avals: Any, lhs: OperandLayout, rhs: OperandLayout, contracting: bool, out: Any
) -> list[list[DimSource]]:
    del sizes, avals, rhs, out
    # The sizes of the groups are operand 0.
    right = 1 + lhs.array_count
    return [[None, (1, -1), (right, -1)] if contracting else [(1, -2), (right, -1)]]


_SCALED_RAGGED_GEMM = define(
    "scaled_ragged_gemm",
    PrimitiveRules(
        body=_ragged,
        shapes=_ragged_shapes,
        dim_sources=_ragged_dim_sources,
        platform_bodies={"cpu": partial(_ragged, value_dtype=jnp.float32)},
    ),
)
