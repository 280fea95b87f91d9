"""Rounding and division on the bits of fp32 numbers: the same result on every machine, whatever XLA fuses.

In: fp32 arrays. Out: codes (uint8) of the small formats, or fp32 values. The one trap: XLA drops float round
trips (f32 -> e4m3 -> f32) where excess precision is allowed, contracts a product and a sum into one fused
multiply-add, and divides inexactly on a GPU. So nothing here casts down, every product goes through a
`select` before it meets a sum (which no contraction crosses), and a quotient is corrected by its integer
residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

F32_MAX = 3.4028234663852886e38
INFINITY = 0x7F800000
"""Its bits. Those of NaN are larger, those of every number smaller."""
_MANTISSA = 0x7FFFFF
_ONE = 0x800000


T = TypeVar("T")


def materialize(x: T) -> T:
    """Computed once and kept in memory: what is few must not be computed again for each of the many."""
    return cast("T", lax.optimization_barrier(x))  # type: ignore[no-untyped-call]


def bits_of(x: jax.Array) -> jax.Array:
    """The bits of an fp32 array, as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def from_bits(b: jax.Array) -> jax.Array:
    """The fp32 array with these bits."""
    return lax.bitcast_convert_type(b, jnp.float32)


def abs_bits(x: jax.Array) -> jax.Array:
    """Bits of |x| in fp32, as int32: ordered like |x|, with infinity above all numbers and NaN above that.

    A maximum of these neither loses a NaN nor flushes a denormal, which a maximum of floats may do.
    """
    if x.dtype == jnp.bfloat16:
        return half_bits(x).astype(jnp.int32) << 16
    return bits_of(x.astype(jnp.float32)) & 0x7FFFFFFF


def half_bits(x: jax.Array) -> jax.Array:
    """Bits of |x| of a bfloat16 array, as uint16: the upper half of `abs_bits`."""
    raw: jax.Array = lax.bitcast_convert_type(x, jnp.uint16) & jnp.uint16(0x7FFF)
    return raw


def power_of_two(e: jax.Array) -> jax.Array:
    """2**e for an integer e, clamped to the normal range."""
    return from_bits((jnp.clip(e, -126, 127) + 127) << 23)


def quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """The machine's own, which may be off by two ulps."""
    return a / b


def exact_div(a: jax.Array, b: jax.Array) -> jax.Array:
    """a / b correctly rounded (nearest even), for positive normal a and b.

    Overflow gives F32_MAX, and so does b = 0. A quotient under the normal range gives 0. The machine's own
    quotient of the mantissas is off by an ulp or two at most; the residual a * 2**k - q * b is then so small
    that 32-bit arithmetic which wraps around has all of it.
    """
    ba, bb = bits_of(a), bits_of(b)
    ma, mb = (ba & _MANTISSA) | _ONE, (bb & _MANTISSA) | _ONE
    low = (ma < mb).astype(jnp.int32)
    # Both mantissas as numbers, the first doubled where that brings the quotient into [1, 2).
    guess = quotient(from_bits((ba & _MANTISSA) + (0x3F800000 + (low << 23))), from_bits(mb + 0x3F000000))
    q = jnp.clip(bits_of(guess), 0x3F800000, 0x3FFFFFFF) - (0x3F800000 - _ONE)
    residual = (ma << (23 + low)) - q * mb
    excess = [residual >= mb, residual >= 2 * mb, residual >= 0, residual >= -mb]
    adjust = sum((c.astype(jnp.int32) for c in excess), start=jnp.int32(-2))
    q, residual = q + adjust, residual - adjust * mb
    twice = residual * 2
    q = q + ((twice > mb) | ((twice == mb) & (q & 1 == 1))).astype(jnp.int32)
    e = (ba >> 23) - (bb >> 23) + 127 - low
    # Adding, so that a mantissa rounded up to 2.0 carries into the exponent.
    bits = (e << 23) + (q - _ONE)
    huge = (bits >= 0x7F800000) | (e > 254) | (bb >> 23 == 0)
    return jnp.where(huge, F32_MAX, from_bits(jnp.where(e < 1, 0, bits)))


def cpu_div(a: jax.Array, b: jax.Array) -> jax.Array:
    """`exact_div` on a CPU, whose own quotients are exact, for quotients in the normal range.

    XLA drops barriers there, and computes what is few again for each of the many, unless it ends in something as
    dear as a division: so this is not only shorter.
    """
    return jnp.minimum(a / b, jnp.float32(F32_MAX))


def quotient_by(mantissa: jax.Array, divisor: float) -> jax.Array:
    """m / divisor correctly rounded (nearest even), of m in [1, 2) whose 24 bits are given as an integer.

    The divisor is a small odd number times a power of two. The quotient of integers has two bits more than fp32 or
    more, and the last one stands for all that is lost: so the conversion rounds as a division would.
    """
    odd, power = int(divisor), 0
    while odd % 2 == 0:
        odd, power = odd // 2, power + 1
    assert odd < 32
    assert odd << power == divisor
    wide = mantissa << 7
    found = lax.div(wide, jnp.full_like(wide, odd))
    rest = (found * odd != wide).astype(jnp.int32)
    return (found | rest).astype(jnp.float32) * np.float32(2.0 ** -(30 + power))


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """A small float: `mantissa` bits, exponent `bias`, largest value `top` with its code, code of NaN.

    Its codes count its non-negative values in order, so that rounding is integer arithmetic on fp32 bits.
    """

    name: str
    bits: int
    mantissa: int
    bias: int
    top: float
    nan: int | None

    @property
    def shift(self) -> int:
        return 23 - self.mantissa

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def least_normal(self) -> float:
        return float(2.0 ** (1 - self.bias))

    @property
    def rebias(self) -> int:
        """What separates a code from the top bits of the fp32 number of the same value."""
        return (127 - self.bias) << self.mantissa


E2M1 = Element(name="e2m1", bits=4, mantissa=1, bias=1, top=6.0, nan=None)
E4M3 = Element(name="e4m3", bits=8, mantissa=3, bias=7, top=448.0, nan=0x7F)
E5M2 = Element(name="e5m2", bits=8, mantissa=2, bias=15, top=57344.0, nan=0x7F)

ELEMENTS: dict[str, Element] = {e.name: e for e in (E2M1, E4M3, E5M2)}


def _clamp(t: jax.Array, element: Element) -> jax.Array:
    # NaN compares false and saturates, as in hardware: who must not lose it marks the scale instead.
    return jnp.where(t < element.top, t, jnp.float32(element.top))


def round_nearest(t: jax.Array, element: Element) -> jax.Array:
    """Codes (int32) of t >= 0 to nearest even, saturating."""
    t = _clamp(t, element)
    b = bits_of(t)
    half = (1 << (element.shift - 1)) - 1
    normal = ((b + half + ((b >> element.shift) & 1)) >> element.shift) - element.rebias
    # The sum of a constant whose ulp is the subnormal step rounds t to that step, ties to even.
    magic = np.float32(2.0 ** (1 - element.bias + element.shift))
    subnormal = bits_of(t + magic) - magic.view(np.int32)
    return jnp.where(t < element.least_normal, subnormal, normal)


def round_stochastic(t: jax.Array, random: jax.Array, random_bits: int, element: Element) -> jax.Array:
    """Codes (int32) of t >= 0, up or down with probability by distance, saturating.

    `random` (int32) is uniform in [0, 2**random_bits).
    """
    t = _clamp(t, element)
    small = t < element.least_normal
    # Shifted up by the least normal number, a subnormal has the step of the first binade.
    lift = jnp.where(small, jnp.float32(element.least_normal), jnp.float32(0))
    b = bits_of(t + lift) + (random << (element.shift - random_bits))
    return (b >> element.shift) - element.rebias - jnp.where(small, 1 << element.mantissa, 0)


def decode(code: jax.Array, element: Element) -> jax.Array:
    """fp32 values of codes with their sign."""
    c = code.astype(jnp.int32)
    magnitude = c & (element.sign - 1)
    normal = from_bits((magnitude + element.rebias) << element.shift)
    step = jnp.float32(2.0 ** (1 - element.bias - element.mantissa))
    value = jnp.where(magnitude < (1 << element.mantissa), magnitude.astype(jnp.float32) * step, normal)
    if element.nan is not None:
        value = jnp.where(magnitude >= element.nan, jnp.float32(jnp.nan), value)
    return jnp.where(c & element.sign != 0, -value, value)


def sign_code(x: jax.Array, element: Element) -> jax.Array:
    """The sign bit of an fp32 array, where a code has it."""
    return (bits_of(x) >> (32 - element.bits)) & element.sign


def scaled_code(
    values: jax.Array, lift: jax.Array, enc: jax.Array, amax: jax.Array, element: Element
) -> jax.Array:
    """Codes (int32) of fp32 values under one outer scale, of which `amax` has the bits of the maximum."""
    scaled = (values * lift) * enc
    found = round_nearest(jnp.abs(scaled), element) | sign_code(scaled, element)
    # The scale is NaN already; the code too, for whoever multiplies codes and scales later.
    return jnp.where(amax >= INFINITY, element.nan or 0, found)


def round_bf16(x: jax.Array) -> jax.Array:
    """An fp32 array rounded to bfloat16 (nearest even), in a form that XLA may not skip."""
    return lax.reduce_precision(x, 8, 7).astype(jnp.bfloat16)
