"""Error statistics of the operands of a product, computed inside a training step for telemetry."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from policyc.jaxcore.shardings import shape_dtype_struct
from policyc.language.recipes import Recipe, Role
from policyc.language.treatments import normalize_recipe
from policyc.numerics.dimensions import as_dimension_numbers, canonicalize
from policyc.numerics.gemm import make_sign_key
from policyc.numerics.measure import Array, is_saturated, keep_padding, rotate_reference, sqnr_db
from policyc.numerics.operands import Parts, quantize_operand
from policyc.numerics.products import (
    EMULATED,
    GemmOptions,
    GemmSpec,
    OperandSpec,
    gemm_products,
    operand_roles,
)
from policyc.numerics.quantize import Key, Quantized, codes_of, dequantize, make_key


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedOperand:
    """An operand of one of the three GEMMs: the array, and the parts that enter the GEMM.

    `sign_key` is the key of the fresh signs of a rotation.
    """

    role: Role
    spec: OperandSpec
    array: jax.Array
    parts: Parts
    sign_key: Key


def quantize_operands(
    lhs: jax.Array,
    rhs: jax.Array,
    dy: jax.Array,
    dimension_numbers: Any,
    recipe: Recipe,
    options: GemmOptions,
) -> list[QuantizedOperand]:
    """The six operands of the three GEMMs, quantized as `quantized_dot_general` does. Always emulated."""
    recipe, key = normalize_recipe(recipe, has_weight=options.weight is not None), make_key(0, options.site)
    canonical = canonicalize(lhs.shape, rhs.shape, as_dimension_numbers(dimension_numbers), recipe)
    a, b = canonical.convert_lhs(lhs), canonical.convert_rhs(rhs)
    spec = GemmSpec(
        dims=canonical.dims,
        recipe=recipe,
        lhs=shape_dtype_struct(a),
        rhs=shape_dtype_struct(b),
        options=replace(options, backends=EMULATED),
    )
    products = gemm_products(spec)
    result = jax.eval_shape(lambda a, b: lax.dot_general(a, b, canonical.dims), a, b)
    lhs_role, rhs_role = operand_roles(options.weight)
    left, right, gradient = (lhs_role, a), (rhs_role, b), (Role.GRADIENT, dy.reshape(result.shape))
    operands = []
    sign_key = make_sign_key(spec, a, b, key)
    for product, pair in (
        (products.fprop, (left, right)),
        (products.d_lhs, (gradient, right)),
        (products.d_rhs, (left, gradient)),
    ):
        for operand, (role, array) in zip((product.left, product.right), pair, strict=True):
            with jax.named_scope(product.scope):
                parts = quantize_operand(array, operand, (key, sign_key))
            operands.append(
                QuantizedOperand(role=role, spec=operand, array=array, parts=parts, sign_key=sign_key)
            )
    return operands


ERROR_SUMS = ("power", "noise", "present", "flushed", "saturated", "amax", "size")
"""Names of the numbers that `sum_errors` returns, in order."""


def sum_errors(operand: QuantizedOperand) -> jax.Array:
    """The sums that an operand's statistics are computed from, in the order of `ERROR_SUMS`.

    The array is first divided by its largest magnitude. That leaves the ratio of the powers unchanged, and keeps the
    squares of small gradients within the range of fp32.
    """
    t, q = operand.spec.treatment, cast("Quantized", operand.parts[0])
    exact = operand.array.astype(jnp.float32)
    if t.mean_split:
        exact = exact - jnp.mean(exact, axis=operand.spec.tokens, keepdims=True)
    if t.rht:
        q = keep_padding(q)
        sign_key = operand.sign_key.fold(f"{operand.spec.gemm}.signs")
        exact = rotate_reference(exact.astype(operand.array.dtype), q, t, sign_key)
    rounded, codes = dequantize(q), codes_of(q)
    amax = jnp.max(jnp.abs(exact))
    unit = jnp.where(amax > 0, amax, 1)
    saturated = is_saturated(codes, q.layout.element, exact, rounded)
    counts = (c.astype(jnp.float32) for c in (exact != 0, (rounded == 0) & (exact != 0), saturated))
    terms = ((exact / unit) ** 2, ((rounded - exact) / unit) ** 2, *counts)
    # A single reduction: for separate ones, XLA would compile a quantizer each. Rows are summed first, since fp32
    # cannot count beyond 2**24 one by one.
    zero = (jnp.float32(0),) * len(terms)
    rows = lax.reduce(terms, zero, lambda a, b: [x + y for x, y in zip(a, b, strict=True)], (exact.ndim - 1,))
    return jnp.stack([*(jnp.sum(r) for r in rows), amax, jnp.float32(exact.size)])


def summarize_errors(sums: Array) -> dict[str, float | None]:
    """The statistics of an operand, from the `sum_errors` of one or more uses. The last axis is ERROR_SUMS.

    The SQNR is None if the array is zero, the error is zero, or a value is not finite. The amax is None if a value is
    not finite.
    """
    rows = sums.reshape(-1, len(ERROR_SUMS)).astype(np.float64)
    power, noise, present, flushed, saturated = rows[:, :5].sum(0)
    zeros = 1 - present / max(rows[:, 6].sum(), 1)
    return {
        "sqnr_db": sqnr_db(power, noise) if noise > 0 and 0 < power < np.inf else None,
        "flushed": float(flushed / max(present, 1)),
        "saturated": float(saturated / max(present, 1)),
        "zeros": round(max(float(zeros), 0.0), 6),  # counts in fp32 are that exact
        "amax": float(rows[:, 5].max()) if np.isfinite(rows[:, 5]).all() else None,
    }
