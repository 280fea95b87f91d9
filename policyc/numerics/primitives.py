"""`quantize` and `scaled_gemm` as JAX primitives: each shows as one equation in a jaxpr.

They have no differentiation rules: code that is differentiated must use them inside a `custom_vjp`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from policyc.jaxcore.primitives.define_primitive import (
    BatchedPrimitive,
    DimSource,
    LoweringContext,
    PrimitiveRules,
    ReducedEquation,
    Shape,
    bind,
    define,
)
from policyc.language.formats import FORMATS
from policyc.numerics import backends
from policyc.numerics import quantize as q
from policyc.numerics.dimensions import DimensionNumbers, free_dims
from policyc.numerics.flatten import OperandLayout, flatten_operand, unflatten_operands, unflatten_quantized
from policyc.numerics.products import Product
from policyc.numerics.quantize.reference.blocks import layout_of, outer_scale_axes
from policyc.numerics.quantize.reference.layout import Axes, Operand, Quantized, rotate_dims

_Dim = TypeVar("_Dim")


# ---- quantize


Specs = tuple[q.Request, ...]
"""The parameter `specs` of a quantize equation: how each GEMM reads the operand, without keys and names."""


def quantize(x: jax.Array, request: q.Request, *, backend: str = "emulate") -> Quantized:
    """`policyc.numerics.quantize.quantize_request` as one equation, run by a backend.

    The first half of the operand's name, `gemm.operand`, is folded into the sign key: both operands of a GEMM must have
    the same signs.
    """
    treatment, keys = request.treatment, (request.key, request.sign_key)
    used = keys if treatment.has_random_signs else keys[:1] if treatment.is_random else ()
    return _bind_quantize(x, (_own_scale_if_alone(request),), [key or q.make_key() for key in used], backend)[
        0
    ]


def quantize_pair(x: jax.Array, requests: tuple[q.Request, q.Request], *, backend: str) -> list[Quantized]:
    """Quantizes an operand for two GEMMs that contract different dimensions of it, as one equation.

    Both requests have the same format, the same key and the same `shared_maximum`.
    """
    requests = _own_scale_if_alone(requests[0]), _own_scale_if_alone(requests[1])
    is_random = any(r.treatment.rounding == "sr" for r in requests)
    return _bind_quantize(x, requests, [requests[0].key or q.make_key()] if is_random else [], backend)


def _own_scale_if_alone(request: q.Request) -> q.Request:
    """The request of an operand that shares its outer scale with no other: it is that of a tensor."""
    if request.treatment.outer != "shared" or request.shared_maximum is not None:
        return request
    return replace(request, treatment=replace(request.treatment, outer="tensor"))


def _shares_scale(specs: Specs) -> bool:
    """Whether a quantize equation takes the largest magnitude of several operands, after its own."""
    return any(spec.treatment.outer == "shared" for spec in specs)


def _bind_quantize(x: jax.Array, requests: Specs, keys: Sequence[q.Key], backend: str) -> list[Quantized]:
    scalars = [cast("jax.Array", requests[0].shared_maximum)] if _shares_scale(requests) else []
    scalars += [word for k in keys for word in (k.a, k.b)]
    primitive = _quantize_primitive(requests[0].treatment.format, backend)
    specs = tuple(q.Request(r.treatment, r.axes, r.decoded) for r in requests)
    operands = tuple(r.operand for r in requests)
    arrays = iter(bind(primitive, x, *scalars, specs=specs, operands=operands, backend=backend))
    return [
        unflatten_quantized(spec.layout(x.shape)[0], list(islice(arrays, len(_shapes(x, spec)))))
        for spec in specs
    ]


@cache
def _quantize_primitive(format: str, backend: str) -> Primitive:
    return define(
        f"{format}_quantize",
        PrimitiveRules(
            body=_quantize,
            shapes=_quantize_shapes,
            dim_sources=_quantize_dim_sources,
            takes_stack=takes_stack,
            needs_devices=backends.load(backend).needs_devices,
            batched=batched_by(backend, partial(_quantize_primitive, format)),
            reduced=_quantize_one_of_pair,
        ),
        job="quantize",
    )


def takes_stack(*, specs: Specs = (), **_: Any) -> bool:
    """Whether an equation with these parameters quantizes the layers of a stack at once, under a `vmap` over layers.

    XLA then reads parameters once. In a loop over layers, it may transpose those of all layers, and slices them.
    """
    if len(specs) != 1 or _shares_scale(specs):
        return False
    return specs[0].treatment.rounding == "rne" and not specs[0].treatment.rht


def batched_by(backend: str, primitive: Callable[[str], Primitive]) -> BatchedPrimitive | None:
    """What `vmap` turns equations of a backend into that it cannot batch: those of another backend."""
    other = backends.load(backend).batched_by
    if not other:
        return None
    name, other_name = backends.title(backend), backends.title(other)
    return BatchedPrimitive(
        primitive=partial(primitive, other),
        params={"backend": other},
        reason=f"{name} cannot run a GEMM under a vmap around the loss: {other_name} runs it instead",
    )


def _quantize(
    x: jax.Array,
    *scalars: jax.Array,
    specs: Specs,
    operands: tuple[str, ...],
    backend: str,
    context: LoweringContext,
) -> Sequence[jax.Array]:
    shared, words = (scalars[0], scalars[1:]) if _shares_scale(specs) else (None, scalars)
    # `words` has the words of the rounding key and of the sign key, for treatments that use them. The name of the GEMM
    # alone is folded into the sign key, since both operands of a GEMM must have the same signs.
    key = q.Key(*words[:2]) if words else None
    sign_key = q.Key(*words[2:]).fold(operands[0].partition(".")[0] + ".signs") if words[2:] else None
    requests = [
        replace(
            s,
            operand="" if s.treatment.rounding == "rne" else operand,
            key=key,
            sign_key=sign_key,
            shared_maximum=shared,
        )
        for s, operand in zip(specs, operands, strict=True)
    ]
    quantized = backends.load(backend).quantize(x, requests, context)
    return [array for out in quantized for array in jax.tree.leaves(out)]


def _quantize_one_of_pair(
    used: Sequence[bool], *, specs: Specs, operands: tuple[str, ...], **_: Any
) -> ReducedEquation | None:
    """The quantizer for one GEMM, if the results for the other are unused, as in a recomputed forward pass."""
    if len(specs) == 1:
        return _quantize_one_order(used, specs[0])
    # Codes, block scales and amax; or codes or values, and amax.
    has_scales = bool(FORMATS[specs[0].treatment.format].block) and not specs[0].decoded
    first = 3 if has_scales else 2
    if any(used[:first]) and any(used[first:]):
        return None
    index = int(any(used[first:]))
    if _shares_scale(specs) != _shares_scale((specs[index],)):
        return None
    return ReducedEquation(
        params={"specs": (specs[index],), "operands": (operands[index],)},
        operand_count=_operand_count(specs[index]),
        results=range(first, len(used)) if index else range(first),
    )


def _quantize_one_order(used: Sequence[bool], spec: q.Request) -> ReducedEquation | None:
    """The quantizer of unpacked codes in one order, if the other order is unused."""
    codes, second = 0, len(used) - 1
    if (
        not spec.axes.second_order
        or spec.axes.only_second
        or spec.treatment.tile2d
        or used[codes] == used[second]
    ):
        return None
    axes = replace(spec.axes, second_order=0) if used[codes] else replace(spec.axes, only_second=True)
    first = codes if used[codes] else second
    return ReducedEquation(
        params={"specs": (replace(spec, axes=axes),)},
        operand_count=_operand_count(spec),
        results=(first, *range(1, second)),
    )


def _operand_count(spec: q.Request) -> int:
    """The operands of a quantizer of one order: x, the shared maximum and both words of the key."""
    return 1 + _shares_scale((spec,)) + 2 * (spec.treatment.rounding == "sr")


def _quantize_shapes(
    x: Any, *words: Any, specs: Specs, operands: tuple[str, ...], backend: str
) -> list[Shape]:
    del words, operands, backend
    return [shape for spec in specs for shape in _shapes(x, spec)]


def _shapes(x: Any, spec: q.Request) -> list[Shape]:
    axes = spec.axes
    layout, padded = spec.layout(x.shape)
    codes, scales = list(padded), list(padded)
    if layout.packed:
        codes[axes.axis] //= 2
    out: list[Shape] = [(tuple(codes), jnp.bfloat16 if layout.decoded else jnp.uint8)]
    if layout.has_scales:
        scales[axes.axis] //= layout.block
        if layout.tile_axis is not None:
            scales[layout.tile_axis] //= layout.block
        out.append((tuple(scales), jnp.uint8))
    if FORMATS[layout.format].tensor_scale:
        spanned = outer_scale_axes(spec.treatment, axes, layout, len(padded))
        amax = tuple(1 if i - len(padded) in spanned else n for i, n in enumerate(padded))
        out.append((amax, jnp.float32))
    if axes.second_order and layout.packed:
        assert layout.tile_axis is not None
        other = list(padded)
        other[layout.tile_axis] //= 2
        out.append((tuple(other), jnp.uint8))
        if layout.has_few_tiles:
            out.append((_swap_tile_axes(scales, axes), jnp.uint8))
    elif axes.second_order:
        second = rotate_dims(codes, axes.second_order), jnp.uint8
        out = [second, *out[1:]] if axes.only_second else [*out, second]
    return out


def _quantize_dim_sources(
    x: Any, *words: Any, specs: Specs, operands: tuple[str, ...], backend: str
) -> list[list[DimSource]]:
    """Codes (in either packing), scales and amax have the dimensions of the operand."""
    del words, operands, backend
    dims: list[DimSource] = [(0, i - x.ndim) for i in range(x.ndim)]
    sources: list[list[DimSource]] = []
    for spec in specs:
        start = len(sources)
        sources += [dims for _ in _shapes(x, spec)]
        second = spec.axes.second_order
        if second and not spec.treatment.tile2d:
            sources[start if spec.axes.only_second else -1] = list(rotate_dims(dims, second))
        elif second and layout_of(x.shape, spec.treatment, spec.axes)[0].has_few_tiles:
            sources[-1] = list(_swap_tile_axes(dims, spec.axes))
    return sources


def _swap_tile_axes(dims: Sequence[_Dim], axes: Axes) -> tuple[_Dim, ...]:
    """Reorders one item per dimension of the scales to match the transposed scales."""
    assert axes.tile is not None
    swapped = list(dims)
    swapped[axes.axis], swapped[axes.tile] = dims[axes.tile], dims[axes.axis]
    return tuple(swapped)


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
            needs_devices=backends.load(backend).needs_devices,
            batched=batched_by(backend, _scaled_gemm_primitive),
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
    context: LoweringContext,
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
    """As in `dot_general`. A sharded contraction is fully reduced, so it does not shard the result."""
    del rhs, out, backend
    a, b = avals[0].ndim, avals[lhs.array_count].ndim
    (lc, rc), (lb, rb) = dimension_numbers
    left: list[DimSource] = [(0, i - a) for i in (*lb, *free_dims(a, lc, lb))]
    return [left + [(lhs.array_count, i - b) for i in free_dims(b, rc, rb)]]


# ---- products of operands that are not quantized


def multiply_plain(product: Product, left: jax.Array, right: jax.Array, out: Any) -> jax.Array:
    """The product of two matrices, in `out` or, if that is neither bfloat16 nor fp32, in fp32."""
    precision = lax.Precision.HIGHEST if product.left.treatment.format == "f32" else None
    wide = out if out in (jnp.bfloat16, jnp.float32) else jnp.float32
    if left.dtype == right.dtype == jnp.bfloat16 and wide == jnp.float32:
        # On CPU, XLA has no kernel for some of these products, for example where it swaps the operands to save a
        # transpose. There the primitive multiplies the same values in fp32.
        return _multiply_bf16(product.dims, jnp.dtype(wide), left, right)
    return lax.dot_general(left, right, product.dims, precision=precision, preferred_element_type=wide)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply_bf16(dims: DimensionNumbers, out: Any, left: jax.Array, right: jax.Array) -> jax.Array:
    """A product of bfloat16 matrices, as a primitive: on CPU it is lowered to a product of fp32 matrices."""
    return scaled_gemm(left, right, dims, out)


def _multiply_bf16_fwd(
    dims: DimensionNumbers, out: Any, left: jax.Array, right: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _multiply_bf16(dims, out, left, right), (left, right)


def _multiply_bf16_bwd(
    dims: DimensionNumbers, out: Any, operands: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Used only for second derivatives of a loss."""

    def multiply(left: jax.Array, right: jax.Array) -> jax.Array:
        wide = left.astype(jnp.float32), right.astype(jnp.float32)
        return lax.dot_general(*wide, dims, precision=lax.Precision.HIGHEST).astype(out)

    return cast("tuple[jax.Array, jax.Array]", jax.vjp(multiply, *operands)[1](dy))


_multiply_bf16.defvjp(_multiply_bf16_fwd, _multiply_bf16_bwd)
