"""`quantized_ragged_dot`: the grouped product of mixtures of experts, whose three GEMMs run as a recipe says.

In wgrad, blocks and rotations run along rows and must not cross from one group into the next. So each group is moved
to start at a block boundary, with rows of zeros in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from policyc.jaxcore.primitives.define_primitive import (
    DimSource,
    LoweringContext,
    PrimitiveRules,
    Shape,
    bind,
    define,
)
from policyc.jaxcore.shardings import match_varying_axes, shape_dtype_struct
from policyc.language.formats import FORMATS
from policyc.language.recipes import OPERANDS, Gemm, Recipe, Role
from policyc.language.treatments import normalize_recipe
from policyc.numerics import backends
from policyc.numerics.flatten import OperandLayout, flatten_operand, unflatten_operands
from policyc.numerics.gemm import make_sign_key
from policyc.numerics.groups import align_groups, pad_sizes
from policyc.numerics.operands import Keys, has_same_codes, quantize_operand
from policyc.numerics.primitives import batched_by
from policyc.numerics.products import DEFAULT_OPTIONS, GemmOptions, GemmSpec, OperandSpec
from policyc.numerics.quantize import Axes, Key, Operand, Quantized, make_key

_ROWS = Axes(axis=-1, tile=-2)
_COLUMNS = Axes(axis=-2, tile=-1)
_WEIGHT = Axes(axis=-2, batch=(-3,), tile=-1)
_TRANSPOSED_WEIGHT = Axes(axis=-1, batch=(-3,), tile=-2)


def quantized_ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    recipe: Recipe,
    options: GemmOptions = DEFAULT_OPTIONS,
    rounding_key: Key | None = None,
) -> jax.Array:
    """`lax.ragged_dot`: (m, k), (g, k, n), (g,) -> (m, n), with the weights on the right.

    Each expert's weight counts as one tensor, and so do all rows together. `mean_split` is ignored: the mean would be
    taken over the rows of all experts. So are 2D scales of rows, whose tiles would span two experts. The options
    `weight` and `products` are ignored too. `options.backends` apply to the products only: the emulated backend
    quantizes every operand, by kernels where it uses them.
    """
    lhs, rhs = match_varying_axes(lhs, rhs)
    treatments = zip(OPERANDS, normalize_recipe(recipe).treatments, strict=True)
    spec = GemmSpec(
        dims=(((1,), (1,)), ((), ())),
        recipe=Recipe(
            tuple(
                replace(t, mean_split=False, tile2d=t.tile2d and role is Role.WEIGHT)
                for (_, role), t in treatments
            )
        ),
        lhs=shape_dtype_struct(lhs),
        rhs=shape_dtype_struct(rhs),
        options=options,
        out_dtype=jnp.dtype(options.preferred_element_type or jnp.result_type(lhs, rhs)),
    )
    return _ragged(spec, lhs, rhs, group_sizes, rounding_key or make_key(0, options.site))


def _quantize(x: jax.Array, spec: GemmSpec, gemm: Gemm, role: Role, axes: Axes, keys: Keys) -> Operand:
    treatment = spec.recipe.treatment(gemm, role)
    operand = OperandSpec(gemm=gemm, role=role, label=role, treatment=treatment, axes=axes)
    with _product_scope(spec, gemm):
        (quantized,) = quantize_operand(x, operand, keys, save=True)
    return quantized


def _product_scope(spec: GemmSpec, gemm: Gemm) -> contextlib.AbstractContextManager[None]:
    """Names a product in profiles and compiled programs, like `Product.scope`."""
    return jax.named_scope(f"{gemm}.{spec.options.site}")


def _multiply(
    spec: GemmSpec, gemm: Gemm, lhs: Operand, rhs: Operand, sizes: jax.Array, out: Any
) -> jax.Array:
    contracting = gemm is Gemm.WGRAD
    if isinstance(lhs, Quantized) or isinstance(rhs, Quantized):
        with _product_scope(spec, gemm):
            backend = spec.options.backend(gemm)
            return scaled_ragged_gemm(lhs, rhs, sizes, contracting=contracting, out=out, backend=backend)
    is_kept = spec.recipe.gemm_treatments(gemm)[0].format == "keep"
    multiply = partial(
        _contract_groups if contracting else lax.ragged_dot,
        precision=spec.options.precision if is_kept else None,
        preferred_element_type=jnp.float32,
    )
    with _product_scope(spec, gemm):
        return multiply(lhs, rhs, sizes).astype(out)


def _contract_groups(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, **options: Any) -> jax.Array:
    """(m, k), (m, n), (g,) -> (g, k, n)."""
    dims = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return lax.ragged_dot_general(lhs, rhs, sizes, dims, **options)


def _mask_unused_rows(x: jax.Array, sizes: jax.Array) -> jax.Array:
    """Zeroes the rows after the last group: they belong to no group and must not set a scale."""
    rows = lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
    return jnp.where(rows < jnp.sum(sizes), x, jnp.zeros((), x.dtype))


def _alignment(spec: GemmSpec) -> int:
    """The number of rows in a block or a rotation of wgrad, whichever is larger. Groups are aligned to it."""
    t = spec.recipe.treatment(Gemm.WGRAD, Role.GRADIENT)
    return max(FORMATS[t.format].block, t.rht, 1)


# ---- differentiation


class _Residuals(NamedTuple):
    """Residuals: the weight as dgrad reads it, and the aligned rows as wgrad reads them."""

    weight: Operand
    rows: Operand
    sizes: jax.Array
    keys: Keys


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged(spec: GemmSpec, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, key: Key) -> jax.Array:
    return _forward(spec, lhs, rhs, sizes, _keys(spec, lhs, rhs, sizes, key))[0]


def _keys(spec: GemmSpec, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, key: Key) -> Keys:
    return key, make_sign_key(spec, _mask_unused_rows(lhs, sizes), rhs, key)


def _forward(
    spec: GemmSpec, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, keys: Keys
) -> tuple[jax.Array, Operand]:
    """The result, and the weight as fprop read it."""
    if spec.recipe.treatment(Gemm.FPROP, Role.ACTIVATION).format == "keep":
        precision = spec.options.precision
        with _product_scope(spec, Gemm.FPROP):
            y = lax.ragged_dot(lhs, rhs, sizes, precision=precision, preferred_element_type=spec.out_dtype)
        return y, rhs
    a = _quantize(_mask_unused_rows(lhs, sizes), spec, Gemm.FPROP, Role.ACTIVATION, _ROWS, keys)
    b = _quantize(rhs, spec, Gemm.FPROP, Role.WEIGHT, _WEIGHT, keys)
    return _multiply(spec, Gemm.FPROP, a, b, sizes, spec.out_dtype), b


def _ragged_fwd(
    spec: GemmSpec, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, key: Key
) -> tuple[jax.Array, _Residuals]:
    keys = _keys(spec, lhs, rhs, sizes, key)
    y, weight = _forward(spec, lhs, rhs, sizes, keys)
    forward, backward = (spec.recipe.treatment(gemm, Role.WEIGHT) for gemm in (Gemm.FPROP, Gemm.DGRAD))
    if not has_same_codes(forward, backward):
        weight = _quantize(rhs, spec, Gemm.DGRAD, Role.WEIGHT, _TRANSPOSED_WEIGHT, keys)
    aligned = align_groups(lhs, sizes, _alignment(spec))
    if spec.recipe.treatment(Gemm.WGRAD, Role.ACTIVATION).dequantized:
        # The codes that fprop read, moved to the aligned rows: a scale is that of a part of a row, or of all rows.
        rows = _quantize(aligned, spec, Gemm.FPROP, Role.ACTIVATION, _ROWS, keys)
    else:
        rows = _quantize(aligned, spec, Gemm.WGRAD, Role.ACTIVATION, _COLUMNS, keys)
    return y, _Residuals(weight, rows, sizes, keys)


def _ragged_bwd(
    spec: GemmSpec, residuals: _Residuals, dy: jax.Array
) -> tuple[jax.Array, jax.Array, Any, None]:
    weight, rows, sizes, keys = residuals
    g = _quantize(_mask_unused_rows(dy, sizes), spec, Gemm.DGRAD, Role.GRADIENT, _ROWS, keys)
    dx = _multiply(spec, Gemm.DGRAD, g, _transpose_weight(weight), sizes, spec.lhs.dtype)
    unit = _alignment(spec)
    g = _quantize(align_groups(dy, sizes, unit), spec, Gemm.WGRAD, Role.GRADIENT, _COLUMNS, keys)
    dw = _multiply(spec, Gemm.WGRAD, rows, g, pad_sizes(sizes, unit), spec.rhs.dtype)
    return dx, dw, np.zeros(sizes.shape, jax.dtypes.float0), None


def _transpose_weight(weight: Operand) -> Operand:
    """(g, k, n) as (g, n, k): dgrad contracts n."""
    return weight.swap_last_axes() if isinstance(weight, Quantized) else weight.swapaxes(1, 2)


_ragged.defvjp(_ragged_fwd, _ragged_bwd)


# ---- scaled_ragged_gemm, a JAX primitive: one equation in a jaxpr. Its result has no derivative.


def scaled_ragged_gemm(
    lhs: Operand, rhs: Operand, sizes: jax.Array, *, contracting: bool, out: Any, backend: str = "emulate"
) -> jax.Array:
    """Products of groups of rows, as one equation. `Backend.ragged_gemm` describes the shapes."""
    (left, a), (right, b) = flatten_operand(lhs), flatten_operand(rhs)
    params = {"lhs": left, "rhs": right, "contracting": contracting, "out": jnp.dtype(out)}
    return bind(_ragged_primitive(backend), sizes, *a, *b, backend=backend, **params)[0]


@cache
def _ragged_primitive(backend: str) -> Primitive:
    return define(
        "scaled_ragged_gemm",
        PrimitiveRules(
            body=_run_ragged,
            shapes=_ragged_shapes,
            dim_sources=_ragged_dim_sources,
            needs_devices=backends.load(backend).needs_devices,
            batched=batched_by(backend, _ragged_primitive),
        ),
        job="ragged gemm",
    )


def _run_ragged(
    sizes: jax.Array,
    *arrays: jax.Array,
    lhs: OperandLayout,
    rhs: OperandLayout,
    contracting: bool,
    out: Any,
    backend: str,
    context: LoweringContext,
) -> Sequence[jax.Array]:
    a, b = unflatten_operands(arrays, lhs, rhs)
    return [backends.load(backend).ragged_gemm(a, b, sizes, contracting, out, context)]


def _ragged_shapes(
    sizes: Any, *avals: Any, lhs: OperandLayout, rhs: OperandLayout, contracting: bool, out: Any, backend: str
) -> list[Shape]:
    del backend
    a, b = avals[0], avals[lhs.array_count]
    if contracting:
        return [((sizes.shape[0], lhs.dim_size(a, 1), rhs.dim_size(b, 1)), out)]
    return [((lhs.dim_size(a, 0), rhs.dim_size(b, 2)), out)]


def _ragged_dim_sources(
    sizes: Any, *avals: Any, lhs: OperandLayout, rhs: OperandLayout, contracting: bool, out: Any, backend: str
) -> list[list[DimSource]]:
    del sizes, avals, rhs, out, backend
    # The sizes of the groups are operand 0.
    right = 1 + lhs.array_count
    return [[None, (1, -1), (right, -1)] if contracting else [(1, -2), (right, -1)]]
