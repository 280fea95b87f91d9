"""The quantizers, compiled in full, against an independent oracle; and properties that hold for any input."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import policyc.numerics.quantize
from policyc.language.recipes import Treatment
from policyc.numerics.quantize import Axes, make_key, pack, quantize, unpack
from policyc.numerics.quantize.reference.bits import (
    E2M1,
    E4M3,
    E5M2,
    Element,
    cpu_div,
    decode,
    encode_scaled,
    exact_div,
    exact_div_by_constant,
    kernel_div,
    round_nearest,
    round_stochastic,
)
from policyc.numerics.quantize.reference.blocks import bound_after_rotation, layout_of
from policyc.numerics.quantize.reference.hadamard import SIGNS, Method, random_signs, rotate, sylvester
from policyc.numerics.quantize.reference.layout import Quantized
from policyc.numerics.quantize.reference.random import random_words
from tests.support import rounding_oracle as oracle
from tests.support.gemms import assert_equal_arrays, quick_jit, slow

pytestmark = [pytest.mark.any_jax, pytest.mark.full_compile]

nvfp4 = partial(Treatment, format="nvfp4", element="e2m1")
# Compiled, since they would take longer than the test if they ran op by op.
codes_of, dequantize = (
    jax.jit(policyc.numerics.quantize.codes_of),
    jax.jit(policyc.numerics.quantize.dequantize),
)
block_values = jax.jit(policyc.numerics.quantize.block_values)

HERE: Method = "cpu" if jax.default_backend() == "cpu" else "matmul"
TILED = Axes(tile=-2)


@cache
def compiled(treatment: Treatment, axes: Axes = TILED, method: Method = HERE) -> Any:
    run = jax.jit(partial(quantize, treatment=treatment, axes=axes, method=method))
    # The implementation for CPU relies on the CPU's exact division.
    return run if method != "cpu" else lambda x: run(jax.device_put(x, jax.devices("cpu")[0]))


@cache
def quickly_compiled(treatment: Treatment) -> Any:
    """For properties within a tolerance, or of every treatment. The tests with an oracle compare the bits."""
    run = quick_jit(partial(quantize, treatment=treatment, axes=TILED, method=HERE))
    return run if HERE != "cpu" else lambda x: run(jax.device_put(x, jax.devices("cpu")[0]))


SMALL = (16, 128)
"""Tests that can use any shape use this one: a quantizer is compiled once for each shape."""


def samples(name: str, shape: tuple[int, ...] = (1024, 1024)) -> np.ndarray:
    """Random numbers that a test may change."""
    return _samples(name, shape).copy()


@cache
def _samples(name: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(7)
    draw = {
        "normal": rng.standard_normal,
        "laplace": lambda s: rng.laplace(size=s),
        "student": lambda s: rng.standard_t(3, s),
        "wide": lambda s: np.exp(4 * rng.standard_normal(s)) * rng.choice([-1, 1], s),
    }[name]
    return draw(shape).astype(np.float32)


# --- bits -----------------------------------------------------------------------------------------


def test_division_is_exact() -> None:
    """Against NumPy, whose division is correctly rounded."""
    rng = np.random.default_rng(0)
    exponent = rng.integers(-60, 60, (2, 1 << 18))
    a, b = (rng.uniform(1, 2, exponent.shape) * np.exp2(exponent)).astype(np.float32)
    a[:8], b[:8] = [1, 2, 3, 1, 1, 2688, 448, 6], [1, 3, 2, np.nextafter(2, 0, dtype="f4"), 3, 2688, 447, 7]
    ones = np.ones_like(b)
    for divide in (jax.jit(exact_div), jax.jit(kernel_div), jax.jit(cpu_div)):
        np.testing.assert_array_equal(np.asarray(divide(a, b)), a / b)
        np.testing.assert_array_equal(np.asarray(divide(ones, b)), ones / b)


def test_division_corrects_an_inexact_quotient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quotient of a GPU is off by up to two ulps, and so is this one."""
    rng = np.random.default_rng(1)
    a, b = rng.uniform(1, 2, (2, 1 << 16)).astype(np.float32)
    for ulps in (-2, -1, 1, 2):

        def inexact_div(x: Any, y: Any, ulps: int = ulps) -> jax.Array:
            q = jax.lax.bitcast_convert_type(x / y, jnp.int32) + ulps
            return jax.lax.bitcast_convert_type(q, jnp.float32)

        monkeypatch.setattr("policyc.numerics.quantize.reference.bits.machine_div", inexact_div)
        divide = jax.jit(lambda a, b: kernel_div(a, b))  # a new function, which JAX traces again
        np.testing.assert_array_equal(np.asarray(divide(a, b)), a / b)


@pytest.mark.parametrize("bound", [448, 57344, 6 * 448, 6 * 256, slow(6)])
def test_division_of_every_mantissa_by_a_bound(bound: int) -> None:
    """By every bound that an outer scale is divided by, against NumPy."""
    mantissa = np.arange(2**23, 2**24, dtype=np.int32)
    expected = mantissa.astype(np.float32) * np.float32(2.0**-23) / np.float32(bound)
    np.testing.assert_array_equal(
        np.asarray(jax.jit(exact_div_by_constant, static_argnums=1)(mantissa, bound)), expected
    )


def test_division_saturates() -> None:
    big, small = jnp.float32(3e38), jnp.float32(1e-30)
    for divide in (jax.jit(exact_div), jax.jit(kernel_div), jax.jit(cpu_div)):
        assert divide(big, small) == np.float32(3.4028235e38)
        assert divide(jnp.float32(1), jnp.float32(0)) == np.float32(3.4028235e38)


ELEMENT_DTYPES = (
    (E2M1, ml_dtypes.float4_e2m1fn),
    (E4M3, ml_dtypes.float8_e4m3fn),
    (E5M2, ml_dtypes.float8_e5m2),
)


@pytest.mark.parametrize(("element", "dtype"), ELEMENT_DTYPES)
def test_rounding_and_decoding_equal_ml_dtypes(element: Element, dtype: Any) -> None:
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    values = codes.view(dtype).astype(np.float32)
    decoded = np.asarray(jax.jit(partial(decode, element=element))(codes))
    is_finite = np.isfinite(values) & (np.abs(values) <= element.top)
    np.testing.assert_array_equal(decoded[is_finite], values[is_finite])
    # Every value, every midpoint between two values and the numbers next to it, and noise of all magnitudes.
    grid = np.unique(np.abs(values[is_finite]))
    middle = (grid[1:] + grid[:-1]) / 2
    rng = np.random.default_rng(0)
    noise = np.exp(rng.uniform(np.log(grid[1] / 8), np.log(element.top), 1 << 16))
    x = np.concatenate([grid, middle, np.nextafter(middle, 0), np.nextafter(middle, 1e9), noise])
    x = np.minimum(x.astype(np.float32), np.float32(element.top))
    expected = x.astype(dtype).view(np.uint8) & ((1 << element.bits) - 1)
    np.testing.assert_array_equal(np.asarray(jax.jit(partial(round_nearest, element=element))(x)), expected)
    if element.bits == 8:
        one, amax = jnp.float32(1), jnp.int32(0)
        encode = jax.jit(lambda x: encode_scaled(x, one, one, amax, element))
        np.testing.assert_array_equal(np.asarray(encode(-x)), expected | element.sign)


# --- whole tensors, against the oracle ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("axis", [-1, -2])
def test_values_of_all_codes_and_scales(axis: int, dtype: Any) -> None:
    """Every byte of two codes under every scale, by rows (in bfloat16, by words) and by columns."""
    bytes_ = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 32, axis=1)
    codes = np.stack([bytes_ & 15, bytes_ >> 4], -1).reshape(256, 512)
    numbers = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)[codes]
    expected = numbers * np.repeat(scales, 16, axis=1).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    layout, _ = layout_of((256, 512), nvfp4(), Axes(axis=-1))
    q = Quantized(codes=jnp.asarray(bytes_), scales=jnp.asarray(scales), amax=None, layout=layout)
    values = jax.jit(policyc.numerics.quantize.block_values, static_argnums=1)(
        q if axis == -1 else q.swap_last_axes(), dtype
    )
    values = np.asarray(values.astype(jnp.float32))
    np.testing.assert_array_equal(values if axis == -1 else values.T, expected)


@pytest.mark.parametrize(
    ("length", "factor"),
    [(16, 4), *(slow(*sizes) for sizes in ((32, 8), (64, 8), (128, 16)))],
)
def test_an_outer_scale_from_a_bound_equals_the_oracle(length: int, factor: int) -> None:
    """The first group of each row reaches sqrt(length) times the largest magnitude."""
    signs = np.resize(SIGNS, length)
    x = np.clip(np.random.default_rng(length).standard_normal((32, 256)), -2, 2).astype(ml_dtypes.bfloat16)
    x[:, :length] = 2 * signs
    groups = x.astype(np.float64).reshape(32, -1, length) * signs
    rotated = (groups @ oracle.hadamard(length) / np.sqrt(length)).astype(ml_dtypes.bfloat16).reshape(x.shape)
    assert np.abs(rotated.astype(np.float32)).max() == np.float32(2 * np.sqrt(length)).astype(
        ml_dtypes.bfloat16
    )
    q, expected = compiled(nvfp4(outer="bound", rht=length))(x), oracle.nvfp4(rotated, amax=2 * factor)
    np.testing.assert_array_equal(np.asarray(q.codes), oracle.pack(expected["codes"]))
    np.testing.assert_array_equal(np.asarray(q.scales), expected["scales"])
    assert float(q.amax.reshape(())) == 2 * factor


def test_a_bound_after_rotation_at_the_ends_of_the_range() -> None:
    numbers = np.array([0, 1e-45, 1e-40, 2**-127, 2**-126, 1.5, 2**125, 2**126, 3e38, np.inf], np.float32)
    for size, factor in ((16, 4), (32, 8), (64, 8), (128, 16)):
        bits = bound_after_rotation(jnp.asarray(numbers.view(np.int32)), size)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(np.asarray(bits).view(np.float32), numbers * np.float32(factor))
    assert int(bound_after_rotation(jnp.int32(0x7FC00000), 16)) == 0x7FC00000


def test_with_a_bound_random_bits_depend_on_the_operand() -> None:
    """Two operands with the same maximum are rounded by different random bits."""
    x = np.random.default_rng(3).standard_normal(SMALL).astype(ml_dtypes.bfloat16)
    other = x.copy()
    other[0, :16] = x[0, :16] / 2
    run = quickly_compiled(nvfp4(outer="bound", rht=16, rounding="sr"))
    one, two = np.asarray(run(x).codes)[1:], np.asarray(run(other).codes)[1:]
    assert 0.05 < np.mean(one != two) < 0.95


OPTIONS = [
    (nvfp4(rounding="sr", rht=16), Axes(axis=-2)),
    (nvfp4(rounding="ms_eden", rht=32), Axes()),
    (nvfp4(scale="four_over_six", tile2d=True), Axes(tile=-2)),
    (nvfp4(rounding="sr", outer="row"), Axes()),
    (Treatment(format="mxfp4", element="e2m1", rounding="sr"), Axes(axis=-2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("t", "axes"), OPTIONS)
def test_both_implementations_have_the_same_bits(t: Treatment, axes: Axes) -> None:
    """The implementation for CPU and the one for other platforms, including random bits.

    The latter is compiled quickly: test_golden has the bits of its optimized program.
    """
    x = samples("wide", (64, 96)).astype(ml_dtypes.bfloat16)
    one = compiled(t, axes, "cpu")(x)
    other = quick_jit(partial(quantize, treatment=t, axes=axes, method="matmul"))(x)
    assert_equal_arrays(one, other)


@pytest.mark.parametrize("scale", [1.0, 2.0**-90, 448.0, 3.3895314e38])
@pytest.mark.parametrize("method", ["cpu", "matmul"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_fp8_of_every_bfloat16_equals_the_oracle(element: str, method: Method, scale: float) -> None:
    """For all numbers up to the scale. On platforms other than CPU, codes are computed four in a word."""
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    x = np.where(np.abs(every) <= scale, every, 0).reshape(128, 512)
    q = compiled(Treatment(format="fp8", element=element), method=method)(x.astype(ml_dtypes.bfloat16))
    expected = oracle.fp8(x, element)
    assert np.asarray(q.amax).item() == expected["amax"]
    np.testing.assert_array_equal(np.asarray(q.codes), expected["codes"])


# --- the transform --------------------------------------------------------------------------------


@pytest.mark.parametrize(("axis", "method"), [(0, "matmul"), slow(2, "matmul"), (1, "matmul_bf16")])
def test_rotation_equals_the_definition(axis: int, method: Any) -> None:
    x = np.asarray(jnp.asarray(samples("normal", (4, 3, 128))).astype(jnp.bfloat16))
    x = np.moveaxis(x, -1, axis)
    sizes = (16, 32, 64, 128)  # in one program, which takes less time to compile than four
    all_sizes = jax.jit(lambda x: [rotate(x, axis=axis, size=size, method=method) for size in sizes])(x)
    for size, result in zip(sizes, all_sizes, strict=True):
        signs = np.resize([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], size)
        groups = np.moveaxis(x, axis, -1).astype(np.float64).reshape(4, 3, -1, size)
        exact = (groups @ (signs[:, None] * oracle.hadamard(size)) / np.sqrt(size)).reshape(4, 3, 128)
        rotated = np.moveaxis(np.asarray(result), axis, -1)
        if size in (16, 64):
            np.testing.assert_array_equal(rotated, exact.astype(ml_dtypes.bfloat16))
        else:
            # 1/sqrt(size) is rounded to fp32 first: one value in thousands is on the other side of a tie.
            np.testing.assert_allclose(rotated.astype(np.float64), exact, rtol=2.0**-8)


@pytest.mark.parametrize("method", ["matmul", "cpu"])
@pytest.mark.parametrize("size", [16, 128])
def test_a_rotation_overflows_only_if_its_result_does(method: Any, size: int) -> None:
    """The first row has one result, 3e38. The second has one that is 1.2 times the largest bfloat16."""
    signs = np.resize(SIGNS, size)
    top = 3e38 / np.sqrt(size)
    x = np.stack([signs * oracle.hadamard(size)[i] * t for i, t in ((3, top), (size - 1, 1.36 * top))])
    x = x.astype(ml_dtypes.bfloat16)
    rotated = np.asarray(jax.jit(partial(rotate, axis=-1, size=size, method=method))(x), np.float64)
    assert rotated[0, 3] == pytest.approx(float(np.abs(x[0, 0])) * np.sqrt(size), rel=2.0**-8)
    assert np.count_nonzero(rotated[0]) == 1
    assert rotated[1, -1] == np.inf


# --- stochastic rounding --------------------------------------------------------------------------


@cache
def stochastic_quantizer() -> Any:
    return quick_jit(lambda x, step: quantize(x, nvfp4(rounding="sr"), key=make_key(0, "site", step)))


@pytest.mark.parametrize("bits", [8, 16])
def test_mean_over_all_random_bits_is_the_input(bits: int) -> None:
    """To within one quantum of the step."""
    x = jnp.concatenate([jnp.linspace(0, 6, 97), jnp.float32([0.01, 0.26, 4.999])])[:, None]
    random = jnp.arange(1 << bits, dtype=jnp.int32)[None]
    f = jax.jit(lambda x, r: decode(round_stochastic(x, r, bits, E2M1), E2M1))
    mean = np.asarray(f(x, random), np.float64).mean(1)
    x = np.asarray(x, np.float64)[:, 0]
    step = np.where(x < 2, 0.5, np.where(x < 4, 1, 2))
    assert (np.abs(mean - x) <= step * 2.0**-bits + 1e-7).all()


def test_random_words_are_unbiased_and_uncorrelated() -> None:
    w = np.asarray(random_words(make_key(1, "a"), (1 << 16,)))
    v = np.asarray(random_words(make_key(1, "b"), (1 << 16,)))
    for array in (w, v, w ^ v, w[1:] ^ w[:-1], w[256:] ^ w[:-256]):
        ones = np.unpackbits(np.ascontiguousarray(array).view(np.uint8).reshape(-1, 4), axis=1).mean(0)
        # The mean of 65536 bits is known to .002. This allows five deviations.
        assert np.abs(ones - 0.5).max() < 0.01
    assert abs(np.corrcoef(w, v)[0, 1]) < 0.02
    assert np.unique(w).size > 65530


@pytest.mark.parametrize("axis", [-1, slow(-2)])
def test_ms_eden_is_unbiased(axis: int) -> None:
    shape = (32, 128) if axis == -1 else (128, 32)
    x = samples("normal", shape).astype(ml_dtypes.bfloat16)
    t = nvfp4(rounding="ms_eden", rht=128)

    def quantize_and_rotate_back(step: jax.Array) -> jax.Array:
        q = quantize(jnp.asarray(x), t, Axes(axis=axis), key=make_key(0, step), sign_key=make_key(1, step))
        h = random_signs(make_key(1, step), 128)[:, None] * sylvester(128) / np.sqrt(128)
        value = dequantize(q)
        return value @ h.T if axis == -1 else h @ value

    f = quick_jit(jax.vmap(quantize_and_rotate_back))
    draws = np.concatenate([np.asarray(f(jnp.arange(64) + 64 * i), np.float64) for i in range(4)])
    one, many = (np.mean((draws[:n].mean(0) - x.astype(np.float64)) ** 2) for n in (1, 256))
    # Unbiased except for the bfloat16 rounding of the rotated numbers (2**-18 of a variance of 1).
    assert one / many == pytest.approx(256, rel=0.2)
    # Better than stochastic rounding of the elements (1.88e-2), which is its purpose.
    assert one < 1.6e-2


# --- known values ---------------------------------------------------------------------------------

KNOWN: dict[str, tuple[Treatment, tuple[float, float, float]]] = {
    "1x16": (nvfp4(), (9.03e-3, 8.60e-3, 8.07e-3)),
    "1x16 sr": (nvfp4(rounding="sr"), (1.88e-2, 1.84e-2, 1.75e-2)),
    "16x16": (nvfp4(tile2d=True), (1.24e-2, 1.68e-2, 3.33e-2)),
    "four over six": (nvfp4(scale="four_over_six"), (7.56e-3, 7.60e-3, 7.42e-3)),
    "mxfp4": (Treatment(format="mxfp4", element="e2m1"), (1.32e-2, 1.61e-2, 2.02e-2)),
    "mxfp8": (Treatment(format="mxfp8", element="e4m3"), (7.03e-4, 7.00e-4, 6.83e-4)),
    "fp8": (Treatment(format="fp8", element="e4m3"), (7.01e-4, 7.02e-4, 6.95e-4)),
}


@pytest.mark.parametrize("row", KNOWN)
@pytest.mark.parametrize(("column", "name"), [*enumerate(("normal", "laplace", "student"))])
def test_known_values(row: str, column: int, name: str) -> None:
    """The relative mean squared error over 2**20 samples is published to three digits. The samples differ: normal and
    Laplace samples reproduce it to 2 %, those of Student's t(3), whose fourth moment is infinite, to 8 %.
    """
    t, expected = KNOWN[row]
    x = samples(name)
    value = np.asarray(dequantize(quickly_compiled(t)(x)), np.float64)
    error = np.sum((value - x) ** 2) / np.sum(x.astype(np.float64) ** 2)
    assert error == pytest.approx(expected[column], rel=0.08 if name == "student" else 0.02)


# --- any input -------------------------------------------------------------------------------------


def test_stochastic_rounding_does_not_change_representable_values() -> None:
    x = samples("normal", (256, 256))
    x[0, 0] = 5.25
    once = oracle.nvfp4(x)["dequantized"]
    for step in range(4):
        again = stochastic_quantizer()(once, step)
        np.testing.assert_array_equal(np.asarray(dequantize(again)), once)


FORMATS = [
    nvfp4(), nvfp4(tile2d=True), nvfp4(rounding="sr", rht=16), nvfp4(scale="four_over_six"),
    nvfp4(rounding="ms_eden", rht=128), nvfp4(outer="row"), Treatment(format="mxfp4", element="e2m1"),
    Treatment(format="mxfp8", element="e4m3"), Treatment(format="fp8", element="e5m2"),
]  # fmt: skip


@pytest.mark.parametrize("t", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_elements_stay_nonfinite(t: Treatment, bad: float) -> None:
    x = samples("normal", SMALL)
    x[3, 5] = bad
    q = quickly_compiled(t)(x)
    assert not np.isfinite(np.asarray(dequantize(q))[3, 5])


@pytest.mark.parametrize("t", FORMATS)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-38, 1e-36, 1e-33, 1e-31, 1e-20, 1e20, 1e38])
def test_extremes_are_finite_and_accurate(t: Treatment, size: float) -> None:
    with np.errstate(under="ignore"):
        x = (samples("normal", SMALL) / 4 * np.float32(size)).astype(np.float32)
    value = np.asarray(dequantize(quickly_compiled(t)(x)), np.float64)
    assert np.isfinite(value).all()
    if size >= 1e-31 and not t.rht:
        error = np.sum((value - x) ** 2.0) / np.sum(x.astype(np.float64) ** 2)
        assert error < 0.03


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=32))
def test_any_block_equals_the_oracle(values: list[float]) -> None:
    x = np.zeros(SMALL, np.float32)
    x[0, : len(values)] = values
    if 0 < np.abs(x).max() < 1e-30:
        return
    x = np.where(np.abs(x) < 2.0**-126, np.float32(0), x)
    q, expected = compiled(nvfp4())(x), oracle.nvfp4(x)
    np.testing.assert_array_equal(np.asarray(q.scales), expected["scales"])
    codes = np.asarray(codes_of(q))
    is_zero = (codes & 7 == 0) & (expected["codes"] & 7 == 0)
    np.testing.assert_array_equal(codes[~is_zero], expected["codes"][~is_zero])


def with_denormals() -> np.ndarray:
    """Denormals beside a block maximum that is small enough for them to have codes of their own."""
    x = np.zeros((2, 32), np.float32)
    x[0, 0] = 2.0**-104
    x[1, 16:20] = 2.0**-122.5, 2.0**-126.2, -(2.0**-126.2), 2.0**-125.5
    return x


def test_denormals_are_zeros_on_cpu() -> None:
    x = with_denormals()
    flushed = np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x).astype(np.float32)
    codes = np.asarray(codes_of(compiled(nvfp4())(x)))
    np.testing.assert_array_equal(codes, oracle.nvfp4(flushed)["codes"])
    assert (codes[1, 17], codes[1, 18]) == (0, 8)
    assert (oracle.nvfp4(x)["codes"][1, 17:19] == (1, 9)).all(), (
        "without flushing, they would have other codes"
    )


def test_unpacking_inverts_packing() -> None:
    codes = np.random.default_rng(0).integers(0, 16, (6, 32), dtype=np.uint8)
    packed = pack(jnp.asarray(codes[:, ::2]), jnp.asarray(codes[:, 1::2]))
    np.testing.assert_array_equal(np.asarray(packed), oracle.pack(codes))
    run = jax.jit(unpack, static_argnames=("axis", "cpu"))
    for cpu in (False, True):
        np.testing.assert_array_equal(np.asarray(run(packed, axis=-1, cpu=cpu)), codes)
        np.testing.assert_array_equal(np.asarray(run(packed.T, axis=-2, cpu=cpu)), codes.T)
