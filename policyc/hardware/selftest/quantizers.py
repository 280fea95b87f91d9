"""Checks of quantizers: their bits against NVIDIA's vectors and the reference, NaN, and stochastic rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from policyc.hardware.selftest.golden import GoldenTensor, golden_tensors
from policyc.hardware.selftest.subject import (
    Finding,
    Subject,
    make_tensor,
    read_recipe,
    reference_device,
    run_on,
)
from policyc.language.recipes import OPERANDS, Gemm, Role, Treatment
from policyc.language.treatments import describe_options
from policyc.numerics import primitives
from policyc.numerics.quantize import Axes, Key, Quantized, Request, codes_of, dequantize, make_key, quantize
from policyc.numerics.quantize.reference.hadamard import rotate

RECIPES: dict[str, tuple[str, ...]] = {
    "nvfp4": (
        "nvfp4(rht=wgrad, sr=grad, scale2d=weights)",
        "nvfp4(outer=row)",
        "nvfp4(outer=bound, rht=wgrad)",
        "nvfp4(scale=four_over_six, scale2d=weights)",
        "nvfp4(rounding=ms_eden)",
    ),
    "mxfp4": ("mxfp4(sr=grad)",),
    "mxfp8": ("mxfp8",),
    "fp8": ("fp8",),
    "fp4": ("fp4(sr=grad)",),
}
"""Recipes whose treatments are compared. A quick test takes the first of each format."""

_MAGNITUDES = (1.0, 0.0, 2.0**100, 2.0**-90)
_KEY = make_key(7)
_OPERAND = "wgrad.dy"  # part of the rounding key

_STEPS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""The magnitudes of the 4-bit element."""


def _name(treatment: Treatment, axes: Axes) -> str:
    return f"{', '.join(describe_options(treatment))} along axis {axes.axis}"


def _treatments(subject: Subject) -> Iterator[tuple[Treatment, Axes]]:
    """Yields the distinct treatments and axes with which a format's recipes quantize operands of (tokens, features)."""
    seen = set()
    texts = RECIPES[subject.format]
    for text in texts[:1] if subject.quick else texts:
        for (gemm, role), treatment in zip(OPERANDS, read_recipe(text).treatments, strict=True):
            # Weights are (features, outputs): fprop contracts their first dimension.
            axis = -2 if gemm is Gemm.WGRAD or (gemm is Gemm.FPROP and role is Role.WEIGHT) else -1
            axes = Axes(axis=axis, contract=(axis,), tile=-3 - axis)
            if treatment.rounding == "ms_eden":
                treatment = replace(treatment, rht=0)  # sums of 128 numbers depend on their order
            if (treatment, axes) not in seen and subject.takes(treatment, gemm):
                seen.add((treatment, axes))
                yield treatment, axes


def _quantize(subject: Subject, treatment: Treatment, axes: Axes, x: jax.Array, key: Key) -> Quantized:
    request = Request(treatment, axes, operand=_OPERAND, key=key, sign_key=key)
    return primitives.quantize(x, request, backend=subject.backend)


@cache
def _reference(
    treatment: Treatment, axes: Axes, operand: str = _OPERAND
) -> Callable[[jax.Array, Key], Quantized]:
    """The reference quantizer. All checks of all backends share one function, which JAX compiles once per shape."""
    return lambda x, key: quantize(x, treatment, axes, key=key.fold(operand), method="matmul")


def check_golden(subject: Subject, *, is_extreme: bool) -> Iterator[Finding]:
    """Compares codes and scales with NVIDIA's vectors. Extreme vectors have magnitudes near the ends of fp32."""
    groups: dict[Any, list[GoldenTensor]] = {}
    for tensor in golden_tensors():
        if tensor.is_extreme == is_extreme and subject.takes(tensor.treatment):
            groups.setdefault((tensor.treatment, tensor.axes, str(tensor.x.dtype)), []).append(tensor)
    for (treatment, axes, dtype), tensors in groups.items():
        run = jax.jit(partial(_quantize, subject, treatment, axes))
        for tensor in tensors:
            quantized = jax.device_get(run(jnp.asarray(tensor.x), _KEY))
            scales = np.asarray(quantized.scales)
            if quantized.layout.tile_axis is not None:
                scales = np.repeat(scales, 16, quantized.layout.tile_axis)
            codes = np.asarray(codes_of(quantized)).transpose(tensor.order)
            rows, columns = tensor.codes.shape
            faults = (
                np.sum(codes[:rows, :columns] != tensor.codes),
                np.sum(scales.transpose(tensor.order)[:rows, : columns // 16] != tensor.scales),
            )
            yield Finding(f"{tensor.name}, {dtype}", _count_faults(*faults))


def _count_faults(codes: int, scales: int, maxima: int = 0) -> str:
    counts = {"codes": codes, "scales": scales, "maxima": maxima}
    wrong = [f"{count} {name}" for name, count in counts.items() if count]
    return f"{' and '.join(wrong)} differ" if wrong else ""


def check_random(subject: Subject) -> Iterator[Finding]:
    """Compares bits with the reference on the CPU.

    A backend with a random stream of its own must give the same scales, and codes at most one step from the nearest.
    """
    x = make_tensor(256, 512)
    tensors = {f"times {m:g}": (x.astype(np.float32) * m).astype(x.dtype) for m in _MAGNITUDES}
    return _compare_with_reference(subject, tensors, _compare_bits)


_PAIRS = (
    ("fprop.x", (Gemm.FPROP, Role.ACTIVATION), "wgrad.x", (Gemm.WGRAD, Role.ACTIVATION)),
    ("dgrad.dy", (Gemm.DGRAD, Role.GRADIENT), "wgrad.dy", (Gemm.WGRAD, Role.GRADIENT)),
)
"""Operands that two GEMMs read, first along features and then along tokens: the name and the operand of each use."""


def check_pairs(subject: Subject) -> Iterator[Finding]:
    """Compares the bits of operands that are quantized for two GEMMs at once, as in training, with the reference."""
    x = make_tensor(256, 512)
    texts = RECIPES["nvfp4"][0], "nvfp4(rht=wgrad, outer=bound)"
    along_features, along_tokens = (Axes(axis=axis, contract=(axis,), tile=-3 - axis) for axis in (-1, -2))
    for text in texts[:1] if subject.quick else texts:
        treatments = dict(zip(OPERANDS, read_recipe(text).treatments, strict=True))
        for first_name, first, second_name, second in _PAIRS:
            pair = (
                Request(treatments[first], along_features, operand=first_name, key=_KEY),
                Request(treatments[second], along_tokens, operand=second_name, key=_KEY),
            )
            run = partial(primitives.quantize_pair, requests=pair, backend=subject.backend)
            quantized = jax.device_get(jax.jit(run)(jnp.asarray(x)))
            for request, ours in zip(pair, quantized, strict=True):
                treatment, axes, name = request.treatment, request.axes, request.operand
                has_own_stream = treatment.rounding != "rne" and subject.implementation.has_own_stream
                nearest = replace(treatment, rounding="rne") if has_own_stream else treatment
                theirs = run_on(reference_device(), _reference(nearest, axes, name), x, _KEY)
                what = f"{name}: {_name(treatment, axes)}"
                yield Finding(what, _compare_bits(ours, theirs, has_own_stream))


def check_nan(subject: Subject) -> Iterator[Finding]:
    """Checks that a NaN or an infinity makes the same values NaN as in the reference."""
    tensors = {}
    for number in (np.nan, np.inf, -np.inf):
        tensors[f"from {number}"] = x = make_tensor(256, 512)
        x[37, 101] = number
    return _compare_with_reference(subject, tensors, _compare_nans)


def _compare_with_reference(
    subject: Subject,
    tensors: Mapping[str, np.ndarray],
    compare: Callable[[Quantized, Quantized, bool], str],
) -> Iterator[Finding]:
    """Quantizes tensors in every way. `compare` says what differs, given whether the random streams differ."""
    device = reference_device()
    for treatment, axes in _treatments(subject):
        run = jax.jit(partial(_quantize, subject, treatment, axes))
        has_own_stream = treatment.rounding != "rne" and subject.implementation.has_own_stream
        nearest = replace(treatment, rounding="rne") if has_own_stream else treatment
        reference = _reference(nearest, axes)
        fault = ""
        for what, x in tensors.items():
            ours = jax.device_get(run(jnp.asarray(x), _KEY))
            difference = compare(ours, run_on(device, reference, x, _KEY), has_own_stream)
            fault = fault or (difference and f"{difference} ({what})")
        yield Finding(_name(treatment, axes), fault)


def _compare_bits(ours: Quantized, theirs: Quantized, adjacent: bool) -> str:
    """Says what differs. With `adjacent`, codes of four bits may be one step apart."""
    mine, other = (np.asarray(codes_of(q)).astype(int) for q in (ours, theirs))
    if adjacent:
        a, b = (np.where(c & 8, -(c & 7), c & 7) for c in (mine, other))
        different = np.sum(np.abs(a - b) > 1)
    else:
        different = np.sum(mine != other)
    pairs = (ours.scales, theirs.scales), (ours.amax, theirs.amax)
    of_scales, of_maxima = (
        0 if a is None or b is None else np.sum(np.ravel(a) != np.ravel(b)) for a, b in pairs
    )
    return _count_faults(int(different), int(of_scales), int(of_maxima))


def _compare_nans(ours: Quantized, theirs: Quantized, _: bool) -> str:
    found, expected = (np.isnan(run_on(reference_device(), dequantize, q)) for q in (ours, theirs))
    return f"{np.sum(expected & ~found)} values lost their NaN" if (expected != found).any() else ""


def check_rounding(subject: Subject) -> Iterator[Finding]:
    """Checks that stochastic rounding is unbiased between neighbouring codes, and fresh for each key and tensor."""
    for treatment, axes in _treatments(subject):
        if treatment.rounding == "sr":
            yield Finding(_name(treatment, axes), _find_rounding_fault(subject, treatment, axes))


_MAX_BIAS = 1 / 256
"""In steps between codes. A generator with 8 bits has a bias of half as much."""
_DEVIATIONS = 5.0  # standard deviations of a mean of samples: chance exceeds this once in two million


def _find_rounding_fault(subject: Subject, treatment: Treatment, axes: Axes) -> str:
    x = make_tensor(256, 1024)
    exact = x
    if treatment.rht:
        exact = run_on(reference_device(), partial(rotate, axis=0, size=treatment.rht), x)
    run = jax.jit(partial(_quantize, subject, treatment, axes))

    def residuals(x: np.ndarray, exact: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """How far each value was rounded away from zero, in steps; and which step it lies in, -1 beyond the last."""
        quantized = jax.device_get(run(jnp.asarray(x), make_key(seed)))
        ones = replace(quantized, codes=np.full_like(quantized.codes, 0x22))  # twice the code of 1
        values, unit = (run_on(reference_device(), dequantize, q) for q in (quantized, ones))
        scaled = np.divide(np.abs(exact.astype(np.float32)), unit, where=unit != 0, out=np.zeros_like(unit))
        index = np.searchsorted(_STEPS, scaled, side="right") - 1
        inside = (index >= 0) & (index < len(_STEPS) - 1) & (scaled > 0)
        width = np.diff(_STEPS)[np.where(inside, index, 0)]
        rounded = np.divide(np.abs(values), unit, where=unit != 0, out=np.zeros_like(unit))
        return np.where(inside, (rounded - scaled) / width, 0), np.where(inside, index, -1)

    samples = [residuals(x, exact, seed) for seed in range(2 if subject.quick else 8)]
    errors, steps = (np.stack(arrays) for arrays in zip(*samples, strict=True))
    for step in range(len(_STEPS) - 1):
        chosen = errors[steps == step]
        if chosen.size and abs(chosen.mean()) > _MAX_BIAS + _DEVIATIONS * chosen.std() / np.sqrt(chosen.size):
            low, high = _STEPS[step : step + 2]
            return f"biased by {chosen.mean():+.4f} of the step from {low:g} to {high:g}"
    if np.abs(errors).max() > 1 + 1e-3:
        return "a value was rounded past the next code"
    other = x.copy()
    other[0] = other[0] / 2  # keeps the largest magnitude; after a rotation, 16 rows differ
    pairs = {
        "two keys": (errors[0], errors[1]),
        "two tensors with one key": (residuals(other, exact, 0)[0][16:], errors[0][16:]),
        "neighbouring elements": (errors[0][:, 1:], errors[0][:, :-1]),
    }
    for what, (a, b) in pairs.items():
        products = a * b
        if abs(products.mean()) > _DEVIATIONS * products.std() / np.sqrt(products.size):
            return f"the random numbers of {what} are correlated"
    return ""
