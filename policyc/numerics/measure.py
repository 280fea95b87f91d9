"""Measures what quantization does to one array: its codes and scales, and the resulting error.

The error of a rotated operand is measured in the rotated basis, against the rotated input. The only error of the
rotation itself is a rounding to bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from policyc.language.formats import FORMATS
from policyc.language.recipes import Gemm, Recipe, Role, Treatment
from policyc.language.treatments import normalize_recipe
from policyc.numerics.operands import cast_operand, quantize_operand, split_mean
from policyc.numerics.products import OperandSpec
from policyc.numerics.quantize import Axes, Key, Quantized, codes_of, dequantize, make_key
from policyc.numerics.quantize.reference.bits import ELEMENTS
from policyc.numerics.quantize.reference.hadamard import rotate, signs_of

Array = npt.NDArray[Any]

# Jitted: run op by op, they would take longer than the measurement itself.
_codes_of, _dequantize = jax.jit(codes_of), jax.jit(dequantize)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStats:
    """Error statistics of one array. `flushed` and `saturated` are fractions of its nonzero elements.

    `gain` is <x,q>/<x,x>: 1 if quantization does not shrink the array on average.
    """

    sqnr_db: float
    relative_error: float
    flushed: float
    saturated: float
    zero_blocks: int
    gain: float

    def __str__(self) -> str:
        return "\n".join(
            (
                f"SQNR             {self.sqnr_db:.2f} dB",
                f"relative error   {self.relative_error:.4g}",
                f"flushed to zero  {100 * self.flushed:.3f} %",
                f"saturated        {100 * self.saturated:.3f} %",
                f"zero blocks      {self.zero_blocks}",
                f"gain <x,q>/<x,x> {self.gain:.6f}",
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The quantized array, with the quantized axis last, and its error.

    Attributes:
      codes: one element per byte.
      packed: the same codes, two per byte if elements have four bits.
      scales: raw bytes, one for each block of each row; the scale of a 2D tile is repeated for each of its rows. Empty
        for fp8 and fp4, which have no block scales.
      amax: the magnitudes that outer scales are computed from.
      dequantized: the dequantized values, fp32.
    """

    codes: Array
    packed: Array
    scales: Array
    amax: Array
    dequantized: Array
    stats: ErrorStats

    def arrays(self) -> dict[str, Array]:
        """All arrays by name, as saved to an npz file."""
        return {n: getattr(self, n) for n in ("codes", "packed", "scales", "amax", "dequantized")}


def measure_operand(
    x: Any, recipe: Recipe, gemm: Gemm, role: Role, *, axis: int = -1, seed: int = 0
) -> Measurement:
    """Quantizes an array as a recipe quantizes a GEMM operand, and measures the error. `axis` is the contracted one.

    The values include a split mean, unless the operand is rotated: then codes and error describe the residual only.
    """
    treatment = normalize_recipe(recipe).treatment(gemm, role)
    array = jnp.moveaxis(jnp.atleast_1d(jnp.asarray(x)), axis, -1)
    if not FORMATS[treatment.format].is_quantized:
        return _measure_cast(array, treatment)
    contracts_tokens = gemm is Gemm.WGRAD
    if array.ndim == 1 and (treatment.tile2d or contracts_tokens):
        array = array[None]
    last = array.ndim - 1
    spec = OperandSpec(
        gemm=gemm,
        role=role,
        label=role,
        treatment=treatment,
        axes=Axes(axis=-1, tile=-2 if last else None),
        tokens=(last,) if contracts_tokens else tuple(range(last)),
    )
    key = make_key(seed)
    q, *means = (cast("Quantized", part) for part in quantize_operand(array, spec, (key, key)))
    if treatment.rht:
        residual = split_mean(array, spec.tokens)[0] if means else array
        q, sign_key = keep_padding(q), key.fold(f"{gemm}.signs")
        return _measure_quantized(q, rotate_reference(residual, q, treatment, sign_key), _dequantize(q))
    values = sum(map(_dequantize, means), start=_dequantize(q))
    return _measure_quantized(q, array.astype(jnp.float32), values)


def rotate_reference(x: jax.Array, q: Quantized, treatment: Treatment, sign_key: Key) -> jax.Array:
    """The rotated input, to compare the values of a rotated operand with. `q` must include its padding."""
    axis = q.layout.axis
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, q.layout.size - x.shape[axis])
    signs = signs_of(treatment, sign_key)
    return rotate(jnp.pad(x, padding), axis, treatment.rht, signs).astype(jnp.float32)


def keep_padding(q: Quantized) -> Quantized:
    """Makes the padding part of the array, since a rotation spreads values into it."""
    length = q.codes.shape[q.layout.axis] * (2 if q.layout.packed else 1)
    return replace(q, layout=replace(q.layout, size=length))


def sqnr_db(power: float, noise: float) -> float:
    """Signal-to-quantization-noise ratio in dB; infinite if either power is zero."""
    return float(10 * np.log10(power / noise)) if noise and power else float("inf")


def is_saturated(codes: Any, element: str, exact: Any, rounded: Any) -> Any:
    """Whether each element has the largest code and exceeds its value by more than fp32 rounding can explain."""
    e = ELEMENTS[element]
    return (codes & (e.sign - 1) == e.top_code) & (abs(exact) > abs(rounded) * 1.0001)


def _error_stats(
    exact: Array, rounded: Array, *, count: int, saturated: int = 0, zero_blocks: int = 0
) -> ErrorStats:
    """Computes error statistics. `count` is the denominator of the fractions."""
    power, noise = float(np.sum(exact**2)), float(np.sum((rounded - exact) ** 2))
    return ErrorStats(
        sqnr_db=sqnr_db(power, noise),
        relative_error=float(np.sqrt(noise / power)) if power else 0.0,
        flushed=float(np.count_nonzero((rounded == 0) & (exact != 0)) / count),
        saturated=float(saturated / count),
        zero_blocks=zero_blocks,
        gain=float(np.sum(exact * rounded) / power) if power else 1.0,
    )


def _measure_quantized(q: Quantized, reference: jax.Array, values: jax.Array) -> Measurement:
    codes = np.asarray(_codes_of(q))
    exact, rounded = np.asarray(reference).astype(np.float64), np.asarray(values).astype(np.float64)
    scales = np.zeros(0, np.uint8) if q.scales is None else np.asarray(q.scales)
    if q.layout.tile_axis is not None:
        scales = np.repeat(scales, q.layout.block, axis=-2)[..., : codes.shape[-2], :]
    amax = np.zeros(0, np.float32) if q.amax is None else np.asarray(q.amax, np.float32)
    return Measurement(
        codes=codes,
        packed=np.asarray(q.codes),
        scales=scales,
        amax=amax.reshape(-1) if amax.size <= 1 else amax[..., 0],
        dequantized=np.asarray(values).astype(np.float32),
        stats=_error_stats(
            exact,
            rounded,
            count=int(np.count_nonzero(exact)) or 1,
            saturated=int(np.count_nonzero(is_saturated(codes, q.layout.element, exact, rounded))),
            zero_blocks=_count_zero_blocks(q, codes),
        ),
    )


def _count_zero_blocks(q: Quantized, codes: Array) -> int:
    magnitude = codes & (ELEMENTS[q.layout.element].sign - 1)
    block = q.layout.block or codes.shape[-1]
    padded = np.pad(magnitude, [(0, 0)] * (magnitude.ndim - 1) + [(0, -magnitude.shape[-1] % block)])
    blocks = padded.reshape(*padded.shape[:-1], -1, block)
    return int(np.count_nonzero(~blocks.any(-1)))


def _measure_cast(array: jax.Array, treatment: Treatment) -> Measurement:
    """Measures a format that only casts. It has values, but no codes or scales."""
    values = cast_operand(array, treatment).astype(jnp.float32)
    exact, rounded = np.asarray(array, np.float64), np.asarray(values, np.float64)
    empty = np.zeros(0, np.uint8)
    return Measurement(
        codes=empty,
        packed=empty,
        scales=empty,
        amax=np.asarray([np.abs(exact).max(initial=0)], np.float32),
        dequantized=np.asarray(values),
        stats=_error_stats(exact, rounded, count=exact.size),
    )
