"""Products whose sums are exact in fp32 in any order, and their results by exact arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np


def integers(shape: tuple[int, ...], seed: int) -> jax.Array:
    """Integers from -6 to 6. Sums of up to 2**24 / 36 products are exact."""
    return jnp.asarray(np.random.default_rng(seed).integers(-6, 7, shape), jnp.bfloat16)


def exact_product(a: jax.Array, b: jax.Array, maxima: Sequence[jax.Array], bound: int) -> np.ndarray:
    """a @ b.T times the outer scales amax / bound, as bfloat16.

    Each scale and their product are rounded to fp32 without its limits of exponents, as `docs/reference/numerics.md`
    says, then the product with a sum, and then the result to bfloat16.
    """
    scale = Fraction(1)
    for amax in maxima:
        scale = _round_to_24_bits(scale * _round_to_24_bits(Fraction(float(amax[0])) / bound))
    sums = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
    distinct, where = np.unique(sums, return_inverse=True)
    scaled = [float(_round_to_24_bits(Fraction(s) * scale)) for s in distinct]
    return np.asarray(scaled, np.float32).astype(ml_dtypes.bfloat16)[where].reshape(sums.shape)


def _round_to_24_bits(value: Fraction) -> Fraction:
    """The nearest number with 24 significant bits, ties to even."""
    if not value:
        return value
    exponent = abs(value).numerator.bit_length() - value.denominator.bit_length() - 24
    if abs(value) >= Fraction(2) ** (exponent + 24):
        exponent += 1
    return round(value / Fraction(2) ** exponent) * Fraction(2) ** exponent
