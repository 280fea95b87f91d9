"""Rounding and division on the bits of fp32 numbers, with the same result on every machine.

XLA drops float round trips (f32 -> e4m3 -> f32) if excess precision is allowed, contracts a product and a sum into a
fused multiply-add, and divides fp32 inexactly on GPUs. So nothing here casts to a narrower float, except to codes that
are not cast back. Every product passes through a `select` before it is added, which prevents the contraction. Quotients
are computed in fp64, or corrected by their integer residual.
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
"""The bits of fp32 infinity. The bits of NaN are larger, those of every finite number smaller."""
_MANTISSA = 0x7FFFFF
_ONE = 0x800000
"""The leading one of a mantissa, which fp32 does not store."""


T = TypeVar("T")


def materialize(x: T) -> T:
    """Optimization barrier: stops XLA from recomputing this for every consumer."""
    return cast("T", lax.optimization_barrier(x))


def bits_of(x: jax.Array) -> jax.Array:
    """The bits of an fp32 array, as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def from_bits(b: jax.Array) -> jax.Array:
    """The fp32 array with these bits."""
    return lax.bitcast_convert_type(b, jnp.float32)


def abs_bits(x: jax.Array) -> jax.Array:
    """The bits of |x| in fp32, as int32. They are ordered like |x|, then infinity, then NaN.

    A maximum of these bits neither loses a NaN nor flushes a denormal. A maximum of floats may do both.
    """
    if x.dtype == jnp.bfloat16:
        return abs_bits_bf16(x).astype(jnp.int32) << 16
    return bits_of(x.astype(jnp.float32)) & 0x7FFFFFFF


def abs_bits_bf16(x: jax.Array) -> jax.Array:
    """The bits of |x| of a bfloat16 array, as uint16: the upper half of `abs_bits`."""
    raw: jax.Array = lax.bitcast_convert_type(x, jnp.uint16) & jnp.uint16(0x7FFF)
    return raw


def power_of_two(e: jax.Array) -> jax.Array:
    """2**e for an integer e, clamped to the normal range."""
    return from_bits((jnp.clip(e, -126, 127) + 127) << 23)


def machine_div(a: jax.Array, b: jax.Array) -> jax.Array:
    """The hardware quotient, which may be off by two ulps. A function of its own, so that tests can replace it."""
    return a / b


def exact_div(a: jax.Array, b: jax.Array) -> jax.Array:
    """a / b correctly rounded (nearest even), for positive normal a and b, on every machine.

    Overflow and b = 0 give F32_MAX. A quotient below the normal range gives 0. The division is done in fp64, which GPUs
    divide exactly. fp64 has more than twice the bits of fp32, so rounding twice gives the same as rounding once. One
    operand is halved first: LLVM would narrow a division of two converted fp32 numbers to an inexact fp32 division.
    """
    with jax.enable_x64(True):
        wide, divisor = (lax.convert_element_type(x, np.float64) for x in jnp.broadcast_arrays(a, b))
        quotient = wide * np.float64(0.5) / divisor * np.float64(2)
        capped = jnp.minimum(quotient, np.float64(F32_MAX))
        normal = jnp.where(quotient < np.float64(2.0**-126), np.float64(0), capped)
        return lax.convert_element_type(normal, np.float32)


def kernel_div(a: jax.Array, b: jax.Array) -> jax.Array:
    """`exact_div` for kernels, which have no fp64.

    The hardware quotient of the mantissas is off by at most two ulps, so wrapping 32-bit arithmetic computes its small
    residual a * 2**k - q * b exactly. There are no ties: no quotient is halfway between two fp32 numbers.
    """
    ba, bb = bits_of(a), bits_of(b)
    ma, mb = (ba & _MANTISSA) | _ONE, (bb & _MANTISSA) | _ONE
    low = _as_bit(ma <= mb)
    # Divide the mantissas as floats. The dividend is doubled unless the quotient is already above 1.
    guess = machine_div(from_bits((ba & _MANTISSA) + (0x3F800000 + (low << 23))), from_bits(mb + 0x3F000000))
    q = jnp.clip(bits_of(guess), 0x3F800000, 0x3FFFFFFF) - (0x3F800000 - _ONE)
    twice = (ma << (24 + low)) - q * (2 * mb)
    q = q + sum((_as_bit(twice > k * mb) for k in (-3, -1, 1, 3)), start=jnp.int32(-2))
    e = (ba >> 23) - (bb >> 23) + 127 - low
    # A sum, so that a mantissa rounded up to 2.0 carries into the exponent.
    bits = (e << 23) + (q - _ONE)
    overflows = (bits >= 0x7F800000) | (e > 254) | (bb >> 23 == 0)
    return jnp.where(overflows, F32_MAX, from_bits(jnp.where(e >= 1, bits, 0)))


def _as_bit(condition: jax.Array) -> jax.Array:
    """1 or 0 as int32, without a cast of booleans: for each of those, Mosaic runs ptxas to ask for its version.

    The select is unsigned and then converted. Mosaic treats a select whose first case is a constant as unsigned, like
    its condition, and everything computed from it too. Negative residuals would then compare as large numbers.
    """
    return jnp.where(condition, jnp.uint32(1), jnp.uint32(0)).astype(jnp.int32)


def cpu_div(a: jax.Array, b: jax.Array) -> jax.Array:
    """`exact_div` for CPUs, which divide exactly. Quotients must be in the normal range.

    This is also faster than `exact_div`. On CPU, XLA drops barriers and fuses the computation of a scale into every
    element that uses it, unless it ends in an operation as expensive as a division.
    """
    return jnp.minimum(a / b, jnp.float32(F32_MAX))


def exact_div_by_constant(mantissa: jax.Array, divisor: float) -> jax.Array:
    """m / divisor correctly rounded (nearest even), for m in [1, 2) whose 24 bits are given as an integer.

    The divisor is a small odd number times a power of two. The integer quotient has at least two bits more than fp32,
    and its last bit is set if there is a remainder. So the conversion to fp32 rounds as a division would.
    """
    odd, power = int(divisor), 0
    while odd % 2 == 0:
        odd, power = odd // 2, power + 1
    assert odd < 32
    assert odd << power == divisor
    wide = mantissa << 7
    quotient = lax.div(wide, jnp.full_like(wide, odd))
    has_remainder = (quotient * odd != wide).astype(jnp.int32)
    return (quotient | has_remainder).astype(jnp.float32) * np.float32(2.0 ** -(30 + power))


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """A small float: total `bits`, `mantissa` bits, exponent `bias`, largest value `top`, and the code of NaN, if any.

    The codes of non-negative values are in numerical order, so rounding is integer arithmetic on fp32 bits.
    """

    name: str
    bits: int
    mantissa: int
    bias: int
    top: float
    nan: int | None

    @property
    def shift(self) -> int:
        """How many more mantissa bits fp32 has."""
        return 23 - self.mantissa

    @property
    def sign(self) -> int:
        """The sign bit of a code."""
        return 1 << (self.bits - 1)

    @property
    def least_normal(self) -> float:
        return float(2.0 ** (1 - self.bias))

    @property
    def rebias(self) -> int:
        """The difference between the top bits of an fp32 number and the code of the same value."""
        return (127 - self.bias) << self.mantissa

    @property
    def top_code(self) -> int:
        """The code of the largest value."""
        return int(np.float32(self.top).view(np.int32) >> self.shift) - self.rebias


E2M1 = Element(name="e2m1", bits=4, mantissa=1, bias=1, top=6.0, nan=None)
E4M3 = Element(name="e4m3", bits=8, mantissa=3, bias=7, top=448.0, nan=0x7F)
E5M2 = Element(name="e5m2", bits=8, mantissa=2, bias=15, top=57344.0, nan=0x7F)
UE5M3 = Element(name="ue5m3", bits=8, mantissa=3, bias=15, top=114688.0, nan=0xFF)
"""A block scale without a sign. Only its last code is not finite (PTX ISA 9.4), as in Transformer Engine."""

SCALES: dict[str | None, Element] = {e.name: e for e in (E4M3, UE5M3)}
"""The types of block scales that are not powers of two."""
ELEMENTS: dict[str, Element] = {e.name: e for e in (E2M1, E4M3, E5M2)}
FP8_DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


def clamp(t: jax.Array, element: Element) -> jax.Array:
    # NaN compares false and saturates, as in hardware. Quantizers put the NaN into the scale instead.
    return jnp.where(t < element.top, t, jnp.float32(element.top))


def round_nearest(t: jax.Array, element: Element) -> jax.Array:
    """Codes (int32) of t >= 0, rounded to nearest even, saturating."""
    t = clamp(t, element)
    if element is E2M1:
        return _round_nearest_e2m1(t)
    b = bits_of(t)
    half = (1 << (element.shift - 1)) - 1
    normal = ((b + half + ((b >> element.shift) & 1)) >> element.shift) - element.rebias
    # Adding a constant whose ulp is the subnormal step rounds t to that step, ties to even.
    magic = np.float32(2.0 ** (1 - element.bias + element.shift))
    subnormal = bits_of(t + magic) - magic.view(np.int32)
    return jnp.where(t < element.least_normal, subnormal, normal)


def _round_nearest_e2m1(t: jax.Array) -> jax.Array:
    return nearest_bits_e2m1(t) & 7


_WHOLE = np.float32(1.5 * 2.0**23)
"""Adding this rounds a number to an integer, ties to even, and leaves that integer in the lowest bits of the sum."""
NEAREST_OFFSET = int(_WHOLE.view(np.int32))


def nearest_bits_e2m1(t: jax.Array) -> jax.Array:
    """The codes (int32) of 0 <= t <= 6, rounded to nearest even, plus `NEAREST_OFFSET`.

    The code is 2 * t below 2, t + 2 up to 4, and t / 2 + 4 above, each rounded. It is always the least of the three.
    """
    sums = (
        t * np.float32(2) + _WHOLE,
        t + (_WHOLE + np.float32(2)),
        t * np.float32(0.5) + (_WHOLE + np.float32(4)),
    )
    return bits_of(jnp.minimum(jnp.minimum(sums[0], sums[1]), sums[2]))


def round_stochastic(t: jax.Array, random: jax.Array, random_bits: int, element: Element) -> jax.Array:
    """Codes (int32) of t >= 0, rounded up or down at random, weighted by distance, saturating.

    `random` (int32) is uniform in [0, 2**random_bits).
    """
    steps = random << (element.shift - random_bits)
    return (stochastic_bits(clamp(t, element), steps, element) >> element.shift) - element.rebias


def stochastic_bits(t: jax.Array, steps: jax.Array, element: Element) -> jax.Array:
    """Integers (int32) with the codes of 0 <= t <= `element.top`, plus `element.rebias`, in their highest bits.

    The lowest `element.shift` bits are the distance from t down to its code. `steps` is added to them.
    """
    # Adding the least normal number gives a subnormal the step of the first binade. For a normal number, the result is
    # less than its own bits.
    shifted = bits_of(t + np.float32(element.least_normal)) - _ONE
    return jnp.maximum(bits_of(t), shifted) + steps


def decode(code: jax.Array, element: Element) -> jax.Array:
    """The fp32 values of signed codes."""
    if element is E2M1:
        c = code.astype(jnp.int32)
        value = decode_magnitude(c & (element.sign - 1), element)
        return jnp.where(c & element.sign != 0, -value, value)
    if element is UE5M3:
        return decode_magnitude(code.astype(jnp.int32), element)
    return lax.bitcast_convert_type(code.astype(jnp.uint8), FP8_DTYPES[element.name]).astype(jnp.float32)


HALF_UNIT = np.float32(2.0**14)


def decode_in_half_units(code: jax.Array) -> jax.Array:
    """The fp32 values of signed E2M1 codes, divided by `HALF_UNIT`: the values of their bits within an fp16 number.

    Takes half the operations of `decode`. XLA may move the unit to another factor, so both need the range for it.
    """
    code = code.astype(jnp.uint16)
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def decode_magnitude(magnitude: jax.Array, element: Element) -> jax.Array:
    """The fp32 values of codes (int32) without a sign."""
    normal = from_bits((magnitude + element.rebias) << element.shift)
    step = jnp.float32(2.0 ** (1 - element.bias - element.mantissa))
    value = jnp.where(magnitude < (1 << element.mantissa), magnitude.astype(jnp.float32) * step, normal)
    if element.nan is not None:
        value = jnp.where(magnitude >= element.nan, jnp.float32(jnp.nan), value)
    return value


def sign_bit(x: jax.Array, element: Element) -> jax.Array:
    """The sign of an fp32 array, as the sign bit of a code."""
    return (bits_of(x) >> (32 - element.bits)) & element.sign


def encode_scaled(
    values: jax.Array, lift: jax.Array, enc: jax.Array, amax: jax.Array, element: Element
) -> jax.Array:
    """FP8 codes of fp32 values under one outer scale. `amax` has the bits of the largest magnitude.

    The cast is the hardware's, which rounds to nearest even. XLA does not drop a cast whose bits are read as integers.
    """
    scaled = jnp.clip((values * lift) * enc, -element.top, element.top)
    codes = lax.bitcast_convert_type(scaled.astype(FP8_DTYPES[element.name]), jnp.uint8)
    # The scale is NaN already. The code must be too, for GEMMs that apply the scale afterwards.
    return jnp.where(amax >= INFINITY, jnp.uint8(element.nan or 0), codes)


def multiply_unfused(a: jax.Array, b: jax.Array) -> jax.Array:
    """a * b, to be added to something: the select prevents a fused multiply-add. No product here reaches 1e30."""
    product = a * b
    return jnp.where(product < jnp.float32(1e30), product, jnp.float32(1e30))


def round_bf16(x: jax.Array) -> jax.Array:
    """Rounds an fp32 array to bfloat16 (nearest even), in a form that XLA does not drop."""
    return lax.reduce_precision(x, 8, 7).astype(jnp.bfloat16)
