"""`quantize` and `scaled_gemm` as JAX primitives: each shows as one equation in a jaxpr.

Their results have no derivative. Code that differentiates them must be inside a `custom_vjp`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from policyc.jaxcore.define_primitive import (
    BatchedPrimitive,
    DimSource,
    Implementation,
    PrimitiveRules,
    ReducedPrimitive,
    Shape,
    bind,
    define,
)
from policyc.language.formats import FORMATS
from policyc.language.recipes import Treatment
from policyc.language.treatments import describe_options
from policyc.numerics import backends
from policyc.numerics import quantize as q
from policyc.numerics.backends import LoweringContext
from policyc.numerics.flatten import OperandLayout, flatten_operand, unflatten_operands, unflatten_quantized
from policyc.numerics.products import DimensionNumbers, free_dims
from policyc.numerics.quantize.blocks import layout_of, outer_scale_axes
from policyc.numerics.quantize.layout import TILE, Axes, Operand, Quantized
from policyc.numerics.quantize.orders import OrderRequest

_Dim = TypeVar("_Dim")

_PLATFORMS = ("cpu", "cuda")
"""The platforms that some backend handles specially."""


# ---- quantize


@dataclass(frozen=True, slots=True)
class QuantizeSpec:
    """The parameter `spec` of a quantize equation: what it does. Prints as briefly as possible."""

    treatment: Treatment
    axes: Axes

    def __repr__(self) -> str:
        # The mean is split off before: what the equation gets is the residual, or the mean.
        treatment = replace(self.treatment, mean_split=False)
        return f"{','.join(describe_options(treatment))}@{self.axes.axis}"


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
    return unflatten_quantized(
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
            **_lowering_rules(_quantize, backend),
            stack_bodies={
                name: partial(_quantize_stack, context=LoweringContext(platform=name)) for name in _PLATFORMS
            },
            takes_stack=takes_stack,
            batched=_batched(backend, partial(_quantize_primitive, format, _BATCHING_BACKEND)),
        ),
        job="quantize",
    )


def takes_stack(*, backend: str, spec: QuantizeSpec | None = None, **_: Any) -> bool:
    """Whether an equation with these parameters quantizes the layers of a stack at once, under a `vmap` over layers."""
    if spec is None or not backends.load(backend).TRAITS.quantizes_stacks:
        return False
    return spec.treatment.rounding == "rne" and not spec.treatment.rht


def _lowering_rules(body: Implementation, backend: str) -> dict[str, Any]:
    """The rules by which a primitive is lowered: its body on each platform, with what is known of the devices."""

    def bodies(**known: bool) -> dict[str, Implementation]:
        return {name: partial(body, context=LoweringContext(platform=name, **known)) for name in _PLATFORMS}

    return {
        "platform_bodies": bodies(),
        "single_device_bodies": bodies(single_device=True),
        "mapped_bodies": bodies(single_device=True, is_mapped=True),
        "partitioned_bodies": bodies(can_partition=True),
        "needs_devices": backends.load(backend).TRAITS.needs_devices,
    }


_BATCHING_BACKEND = "xla"
"""Runs the products of a backend that `vmap` cannot batch."""


def _batched(backend: str, primitive: Callable[[], Primitive]) -> BatchedPrimitive | None:
    if backends.load(backend).TRAITS.can_batch:
        return None
    return BatchedPrimitive(
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
    return _arrays(out)


def _quantize_stack(
    x: jax.Array, *, spec: QuantizeSpec, operand: str, backend: str, context: LoweringContext
) -> Sequence[jax.Array]:
    del operand
    return _arrays(backends.load(backend).quantize_stack(x, spec.treatment, spec.axes, context))


def _arrays(out: Quantized) -> list[jax.Array]:
    arrays = out.codes, out.scales, out.amax, out.transposed_codes, out.transposed_scales
    return [a for a in arrays if a is not None]


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
        if layout.has_few_tiles:
            out.append((_swap_tile_axes(scales, axes), jnp.uint8))
    elif axes.both_orders:
        out.append(((codes[-1], *codes[:-1]), jnp.uint8))
    return out


def _quantize_dim_sources(
    x: Any, *words: Any, spec: QuantizeSpec, operand: str, backend: str
) -> list[list[DimSource]]:
    """Codes, scales and amax have the dimensions of the operand, and so have codes in both packings."""
    axes = spec.axes
    results = _quantize_shapes(x, *words, spec=spec, operand=operand, backend=backend)
    dims: list[DimSource] = [(0, i - x.ndim) for i in range(x.ndim)]
    sources = [dims for _ in results]
    if axes.both_orders and not spec.treatment.tile2d:
        sources[-1] = [dims[-1], *dims[:-1]]
    elif axes.both_orders and layout_of(x.shape, spec.treatment, axes)[0].has_few_tiles:
        sources[-1] = list(_swap_tile_axes(dims, axes))
    return sources


def _swap_tile_axes(dims: Sequence[_Dim], axes: Axes) -> tuple[_Dim, ...]:
    """What belongs to each dimension of transposed scales, from what belongs to each dimension of the scales."""
    assert axes.tile is not None
    swapped = list(dims)
    swapped[axes.axis], swapped[axes.tile] = dims[axes.tile], dims[axes.axis]
    return tuple(swapped)


# ---- quantizing for two GEMMs


def quantize_pair(
    x: jax.Array,
    specs: tuple[QuantizeSpec, QuantizeSpec],
    *,
    operands: tuple[str, str],
    rounding_key: q.Key,
    backend: str,
) -> tuple[Quantized, Quantized]:
    """Quantizes an operand for two GEMMs that contract different dimensions of it, as one equation.

    Args:
      specs: how each of them reads it, both in the same format.
      operands: the names `gemm.operand`. They are part of the rounding keys.
      rounding_key: the key of stochastic rounding.
      backend: the backend that runs it.
    """
    words = [rounding_key.a, rounding_key.b] if any(s.treatment.rounding == "sr" for s in specs) else []
    primitive = _quantize_pair_primitive(specs[0].treatment.format, backend)
    arrays = bind(primitive, x, *words, specs=specs, operands=operands, backend=backend)
    first, second = (layout_of(x.shape, s.treatment, s.axes)[0] for s in specs)
    half = len(arrays) // 2
    return unflatten_quantized(first, arrays[:half]), unflatten_quantized(second, arrays[half:])


@cache
def _quantize_pair_primitive(format: str, backend: str) -> Primitive:
    return define(
        f"{format}_pair_quantize",
        PrimitiveRules(
            body=_quantize_pair,
            shapes=_quantize_pair_shapes,
            dim_sources=_quantize_pair_dim_sources,
            **_lowering_rules(_quantize_pair, backend),
            batched=_batched(backend, partial(_quantize_pair_primitive, format, _BATCHING_BACKEND)),
            reduced=_quantize_one_of_pair,
        ),
        job="quantize",
    )


def _quantize_pair(
    x: jax.Array,
    *words: jax.Array,
    specs: tuple[QuantizeSpec, QuantizeSpec],
    operands: tuple[str, str],
    backend: str,
    context: LoweringContext = backends.ANY_PLATFORM,
) -> Sequence[jax.Array]:
    requests = [
        OrderRequest(
            treatment=spec.treatment,
            axes=spec.axes,
            key=q.Key(*words).fold(operand) if spec.treatment.rounding == "sr" else q.make_key(),
        )
        for spec, operand in zip(specs, operands, strict=True)
    ]
    quantized = backends.load(backend).quantize_orders(x, requests, context)
    return [a for out in quantized for a in (out.codes, out.scales, out.amax) if a is not None]


def _quantize_one_of_pair(
    used: Sequence[bool],
    *,
    specs: tuple[QuantizeSpec, QuantizeSpec],
    operands: tuple[str, str],
    backend: str,
    mapped: Any,
) -> ReducedPrimitive | None:
    """The quantizer for one GEMM, if nothing uses the results for the other: in a forward pass that is recomputed."""
    del mapped
    half = len(used) // 2
    if any(used[:half]) and any(used[half:]):
        return None
    index = int(any(used[half:]))
    treatment = specs[index].treatment
    return ReducedPrimitive(
        primitive=_quantize_primitive(treatment.format, backend),
        params={"spec": specs[index], "operand": operands[index], "backend": backend},
        operand_count=3 if treatment.rounding == "sr" else 1,  # with both words of the key
        results=range(index * half, (index + 1) * half),
    )


def _quantize_pair_shapes(
    x: Any, *words: Any, specs: tuple[QuantizeSpec, QuantizeSpec], operands: tuple[str, str], backend: str
) -> list[Shape]:
    return [
        shape
        for spec, operand in zip(specs, operands, strict=True)
        for shape in _quantize_shapes(x, *words, spec=spec, operand=operand, backend=backend)
    ]


def _quantize_pair_dim_sources(
    x: Any, *words: Any, specs: tuple[QuantizeSpec, QuantizeSpec], operands: tuple[str, str], backend: str
) -> list[list[DimSource]]:
    return [
        source
        for spec, operand in zip(specs, operands, strict=True)
        for source in _quantize_dim_sources(x, *words, spec=spec, operand=operand, backend=backend)
    ]


# ---- scaled_gemm


def scaled_gemm(
    lhs: Operand, rhs: Operand, dimension_numbers: DimensionNumbers, out: Any, *, backend: str = "emulate"
) -> jax.Array:
    """The product of two operands, each `Quantized` or a plain array, as one equation."""
    (left, a), (right, b) = flatten_operand(lhs), flatten_operand(rhs)
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
            **_lowering_rules(_gemm, backend),
            batched=_batched(backend, partial(_scaled_gemm_primitive, _BATCHING_BACKEND)),
        ),
        job="gemm",
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
    a, b = unflatten_operands(arrays, lhs, rhs)
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
