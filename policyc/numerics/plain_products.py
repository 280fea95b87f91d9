"""Products of operands that are not quantized."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from policyc.numerics import primitives
from policyc.numerics.products import DimensionNumbers, Product


def multiply_plain(product: Product, left: jax.Array, right: jax.Array, out: Any) -> jax.Array:
    """The product of two matrices, in `out` or, if that is neither bfloat16 nor fp32, in fp32."""
    precision = lax.Precision.HIGHEST if product.left.treatment.format == "f32" else None
    wide = out if out in (jnp.bfloat16, jnp.float32) else jnp.float32
    if left.dtype == right.dtype == jnp.bfloat16 and wide == jnp.float32:
        # XLA has no kernel on CPU for some of these products, for example where it swaps the operands to save a
        # transpose. The primitive multiplies the same values in fp32 there.
        return _multiply_bf16(product.dims, jnp.dtype(wide), left, right)
    return lax.dot_general(left, right, product.dims, precision=precision, preferred_element_type=wide)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply_bf16(dims: DimensionNumbers, out: Any, left: jax.Array, right: jax.Array) -> jax.Array:
    """A product of bfloat16 matrices, as a primitive: on CPU it is lowered to a product of fp32 matrices."""
    return primitives.scaled_gemm(left, right, dims, out)


def _multiply_bf16_fwd(
    dims: DimensionNumbers, out: Any, left: jax.Array, right: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _multiply_bf16(dims, out, left, right), (left, right)


def _multiply_bf16_bwd(
    dims: DimensionNumbers, out: Any, operands: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """For second derivatives of a loss."""

    def multiply(left: jax.Array, right: jax.Array) -> jax.Array:
        wide = left.astype(jnp.float32), right.astype(jnp.float32)
        return lax.dot_general(*wide, dims, precision=lax.Precision.HIGHEST).astype(out)

    return cast("tuple[jax.Array, jax.Array]", jax.vjp(multiply, *operands)[1](dy))


_multiply_bf16.defvjp(_multiply_bf16_fwd, _multiply_bf16_bwd)
