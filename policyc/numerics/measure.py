"""What quantization does to an array: its codes and scales, and how much they lose.

In: an array and a `Treatment` (or a recipe, a GEMM and a role). Out: a `Measurement`, with the arrays of an
npz file and the figures to print. The one trap: of a rotated operand, the error is measured in the rotated
basis, against the rotated input: the rotation itself loses nothing but a rounding to bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from policyc.language.formats import FORMATS
from policyc.language.recipes import Gemm, Recipe, Role, Treatment
from policyc.language.treatments import normalize_recipe
from policyc.numerics.gemm import QuantizedOperand
from policyc.numerics.primitives import quantize
from policyc.numerics.quantize import Axes, Quantized, codes_of, dequantize, key
from policyc.numerics.quantize.bits import ELEMENTS
from policyc.numerics.quantize.hadamard import random_signs, rotate
from policyc.numerics.quantize.layout import TILE, unpack

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandStats:
    """Figures of one array. `flushed` and `saturated` are fractions of its elements that are not zero."""

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
    """Arrays have the quantized axis last.

    `codes` has one element to a byte, `packed` two where elements have four bits. `scales` are raw bytes
    (of fp8, which has no block scales, none), one for each block of each row: that of a 2D tile stands in
    each of its rows. `amax` is what the outer scale comes from.
    """

    codes: Array
    packed: Array
    scales: Array
    amax: Array
    dequantized: Array
    stats: OperandStats

    def arrays(self) -> dict[str, Array]:
        """The contents of an npz file."""
        return {n: getattr(self, n) for n in ("codes", "packed", "scales", "amax", "dequantized")}


def measure_operand(
    x: Any, recipe: Recipe, gemm: Gemm, role: Role, *, axis: int = -1, seed: int = 0
) -> Measurement:
    """What a recipe does to an operand of a GEMM. `axis` is the contracted one."""
    treatment = normalize_recipe(recipe).treatment(gemm, role)
    over_tokens = gemm is Gemm.WGRAD
    return measure(x, treatment, axis=axis, operand=f"{gemm}.{role}", seed=seed, over_tokens=over_tokens)


def measure(
    x: Any,
    treatment: Treatment,
    *,
    axis: int = -1,
    operand: str = "",
    seed: int = 0,
    over_tokens: bool = False,
) -> Measurement:
    """Quantizes an array along an axis and compares. `over_tokens` says that the axis is one of tokens."""
    array = jnp.moveaxis(jnp.atleast_1d(jnp.asarray(x)), axis, -1)
    if not FORMATS[treatment.format].is_quantized:
        return _cast(array, treatment)
    mean = jnp.zeros((), jnp.float32)
    whole = array
    if treatment.mean_split:
        tokens = (array.ndim - 1,) if over_tokens else tuple(range(array.ndim - 1))
        average = jnp.mean(array.astype(jnp.float32), axis=tokens, keepdims=True)
        plain = replace(treatment, mean_split=False, rht=0)
        if over_tokens:
            mean = dequantize(quantize(average.T, plain, Axes(), operand=operand + ".mean")).T
        else:
            mean = dequantize(quantize(average, plain, Axes(), operand=operand + ".mean"))
        array = (array.astype(jnp.float32) - average).astype(array.dtype)
    axes = Axes(axis=-1, tile=-2 if array.ndim > 1 else None)
    if treatment.tile2d and array.ndim == 1:
        array, whole = array[None], whole[None]
        axes = Axes(axis=-1, tile=-2)
    q = quantize(array, treatment, axes, operand=operand, key=key(seed))
    target = whole.astype(jnp.float32)
    if treatment.rht:
        target = _rotated(array, treatment, operand, seed)
        mean = jnp.zeros((), jnp.float32)
    values = dequantize(_with_padding(q)) if treatment.rht else dequantize(q) + mean
    return _measured(q, np.asarray(target), np.asarray(values))


def _rotated(array: jax.Array, treatment: Treatment, operand: str, seed: int) -> jax.Array:
    padded = jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % treatment.rht)])
    signs = None
    if treatment.rounding == "ms_eden":
        signs = random_signs(key(seed).fold(operand.partition(".")[0] + ".signs"), treatment.rht)
    return rotate(padded, -1, treatment.rht, signs).astype(jnp.float32)


def _with_padding(q: Quantized) -> Quantized:
    """A rotation spreads numbers into the padding: there it is part of the array."""
    length = q.codes.shape[q.layout.axis] * (2 if q.layout.packed else 1)
    return replace(q, layout=replace(q.layout, size=length))


def _measured(q: Quantized, target: Array, values: Array) -> Measurement:
    element = ELEMENTS[q.layout.element]
    wide = unpack(q.codes) if q.layout.packed else q.codes
    codes = np.asarray(wide if target.shape[-1] == wide.shape[-1] else codes_of(q))
    codes = codes[..., : target.shape[-1]]
    magnitude = codes & (element.sign - 1)
    top = _top_code(element.name)
    exact, near = target.astype(np.float64), values.astype(np.float64)
    # At the largest code, and beyond its value by more than fp32 rounding explains.
    cut = (magnitude == top) & (np.abs(exact) > np.abs(near) * 1.0001)
    present = np.count_nonzero(exact) or 1
    power, noise = float(np.sum(exact**2)), float(np.sum((near - exact) ** 2))
    scales = np.zeros(0, np.uint8) if q.scales is None else np.asarray(q.scales)
    if q.layout.tile_axis is not None:
        scales = np.repeat(scales, TILE, axis=-2)[..., : codes.shape[-2], :]
    block = q.layout.block or codes.shape[-1]
    padded = np.pad(magnitude, [(0, 0)] * (magnitude.ndim - 1) + [(0, -magnitude.shape[-1] % block)])
    blocks = padded.reshape(*padded.shape[:-1], -1, block)
    stats = OperandStats(
        sqnr_db=float(10 * np.log10(power / noise)) if noise and power else float("inf"),
        relative_error=float(np.sqrt(noise / power)) if power else 0.0,
        flushed=float(np.count_nonzero((near == 0) & (exact != 0)) / present),
        saturated=float(np.count_nonzero(cut) / present),
        zero_blocks=int(np.count_nonzero(~blocks.any(-1))),
        gain=float(np.sum(exact * near) / power) if power else 1.0,
    )
    amax = np.zeros(0, np.float32) if q.amax is None else np.asarray(q.amax, np.float32)
    return Measurement(
        codes=codes,
        packed=np.asarray(q.codes),
        scales=scales,
        amax=amax.reshape(-1) if amax.size <= 1 else amax[..., 0],
        dequantized=values.astype(np.float32),
        stats=stats,
    )


# ---- inside a step

FIGURES = ("power", "noise", "present", "flushed", "saturated", "amax")


def figures(operand: QuantizedOperand) -> jax.Array:
    """The sums behind `OperandStats` and the largest magnitude, in the order of FIGURES: what a step can return.

    Powers are of the array divided by its largest magnitude, which leaves their ratio as it is: squares of small
    gradients would be lost in fp32.
    """
    t, q = operand.side.treatment, cast("Quantized", operand.parts[0])
    exact = operand.array.astype(jnp.float32)
    if t.mean_split:
        exact = exact - jnp.mean(exact, axis=operand.side.tokens, keepdims=True)
    if t.rht:
        signs, q, axis = None, _with_padding(q), q.layout.axis
        if t.rounding == "ms_eden":
            signs = random_signs(operand.signs.fold(f"{operand.gemm}.signs"), t.rht)
        room = [(0, 0)] * exact.ndim
        room[axis] = (0, q.layout.size - exact.shape[axis])
        padded = jnp.pad(exact.astype(operand.array.dtype), room)
        exact = rotate(padded, axis, t.rht, signs).astype(jnp.float32)
    near, codes = dequantize(q), codes_of(q)
    amax = jnp.max(jnp.abs(exact))
    unit = jnp.where(amax > 0, amax, 1)
    element = ELEMENTS[q.layout.element]
    cut = (codes & (element.sign - 1) == _top_code(element.name)) & (jnp.abs(exact) > jnp.abs(near) * 1.0001)
    counts = (c.astype(jnp.float32) for c in (exact != 0, (near == 0) & (exact != 0), cut))
    terms = ((exact / unit) ** 2, ((near - exact) / unit) ** 2, *counts)
    # All sums in one pass: each of its own would be compiled with a quantizer of its own. Of rows first: fp32 counts no
    # further than 2**24 one by one.
    zero = (jnp.float32(0),) * len(terms)
    rows = lax.reduce(terms, zero, lambda a, b: [x + y for x, y in zip(a, b, strict=True)], (exact.ndim - 1,))
    return jnp.stack([*(jnp.sum(r) for r in rows), amax])


def told(found: Array) -> dict[str, float | None]:
    """What figures say, as numbers to be written down. They may be of several uses, the last axis being FIGURES.

    An SQNR of None: nothing was there, nothing was lost, or something was no number.
    """
    rows = found.reshape(-1, len(FIGURES)).astype(np.float64)
    power, noise, present, flushed, saturated = rows[:, :5].sum(0)
    return {
        "sqnr_db": float(10 * np.log10(power / noise)) if noise > 0 and 0 < power < np.inf else None,
        "flushed": float(flushed / max(present, 1)),
        "saturated": float(saturated / max(present, 1)),
        "amax": float(rows[:, 5].max()) if np.isfinite(rows[:, 5]).all() else None,
    }


def _top_code(element: str) -> int:
    return {"e2m1": 7, "e4m3": 0x7E, "e5m2": 0x7B}[element]


def _cast(array: jax.Array, treatment: Treatment) -> Measurement:
    """A format without scales: there are no codes, only values."""
    types = {"bf16": jnp.bfloat16, "f32": jnp.float32}
    values = array.astype(types.get(treatment.format, array.dtype)).astype(jnp.float32)
    exact, near = np.asarray(array, np.float64), np.asarray(values, np.float64)
    power, noise = float(np.sum(exact**2)), float(np.sum((near - exact) ** 2))
    empty = np.zeros(0, np.uint8)
    stats = OperandStats(
        sqnr_db=float(10 * np.log10(power / noise)) if noise and power else float("inf"),
        relative_error=float(np.sqrt(noise / power)) if power else 0.0,
        flushed=float(np.mean((near == 0) & (exact != 0))),
        saturated=0.0,
        zero_blocks=0,
        gain=float(np.sum(exact * near) / power) if power else 1.0,
    )
    return Measurement(
        codes=empty,
        packed=empty,
        scales=empty,
        amax=np.asarray([np.abs(exact).max(initial=0)], np.float32),
        dequantized=np.asarray(values),
        stats=stats,
    )
