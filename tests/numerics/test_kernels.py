"""The GPU kernels, interpreted on CPU, against the jnp code that they replace: the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from policyc.jaxcore.primitives.define_primitive import LoweringContext
from policyc.language.recipes import Treatment
from policyc.numerics import backends
from policyc.numerics.quantize import Axes, Quantized, Request, make_key, quantize
from policyc.numerics.quantize.kernels import fp8_kernel
from policyc.numerics.quantize.kernels import fused_kernels as kernels
from policyc.numerics.quantize.kernels.kernel_orders import Order
from policyc.numerics.quantize.orders import quantize_orders
from policyc.numerics.quantize.reference.blocks import layout_of
from policyc.numerics.quantize.reference.hadamard import Method
from policyc.numerics.quantize.reference.values import decode_values, write_outer_factors
from tests.support import gemms
from tests.support.mosaic_signs import record_signs

# Both sides are compiled the same way. That the jnp code is exact when compiled in full is in test_quantize.py.
PLAIN = Treatment(format="nvfp4", element="e2m1")
NEAREST = replace(PLAIN, rht=16)
STOCHASTIC = replace(PLAIN, rht=16, rounding="sr")
ROWS, COLUMNS = Axes(axis=-1), Axes(axis=-2)
PAIRS = {
    "nearest": (PLAIN, NEAREST),
    "stochastic": (
        replace(PLAIN, rounding="sr"),
        replace(STOCHASTIC, outer="bound"),
    ),
    "values": (PLAIN, STOCHASTIC),
    "stochastic values": (replace(PLAIN, rounding="sr"), NEAREST),
    "without rotation": (PLAIN, replace(PLAIN, rounding="sr")),
}
"""How an operand of fprop and wgrad is treated, and how dy is, in rows and in columns."""
TILES = {
    name: Request(replace(PLAIN, tile2d=True), axes, decoded=True)
    for name, axes in (("tiles", Axes(axis=-2, tile=-1)), ("transposed tiles", Axes(axis=-1, tile=-2)))
}
"""How a weight is treated, as fprop reads it, and as dgrad does."""
KERNELS = kernels.Kernels(interpret=True)


normal = partial(gemms.normal, seed=5, dtype=jnp.bfloat16)


def assert_equal(one: Quantized, other: Quantized) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(comparable(a), comparable(b))


def comparable(array: jax.Array) -> np.ndarray:
    """The bits of values, of which all NaN are equal."""
    values = np.asarray(array)
    if values.dtype != jnp.bfloat16:
        return values
    return np.where(np.isnan(values.astype(np.float32)), np.uint16(0x7FC0), values.view(np.uint16))


@cache
def quantizer(treatment: Treatment, axes: Axes, method: Method) -> Any:
    return jax.jit(lambda x: quantize(x, treatment, axes, key=make_key(7), method=method))


def requests(pair: str) -> list[Request]:
    if pair in TILES:
        return [TILES[pair]]
    return [
        Request(
            treatment,
            axes,
            key=make_key(7, i),
            decoded=pair.endswith("values") and (axes == ROWS or pair.startswith("stochastic")),
        )
        for i, (treatment, axes) in enumerate(zip(PAIRS[pair], (ROWS, COLUMNS), strict=True))
    ]


@cache
def orders_quantizer(pair: str) -> Any:
    return jax.jit(lambda x: quantize_orders(x, requests(pair), KERNELS))


@cache
def reference_quantizer(pair: str) -> Any:
    def quantize_order(x: jax.Array, r: Request) -> Quantized:
        quantized = quantize(x, r.treatment, r.axes, key=r.key, method="matmul")
        return decode_values(quantized, jnp.float32) if r.decoded else quantized

    return jax.jit(lambda x: [quantize_order(x, request) for request in requests(pair)])


@pytest.mark.slow
@pytest.mark.parametrize("pair", [*PAIRS, *TILES])
@pytest.mark.parametrize("case", ["normal", "huge", "tiny", "zeros", "nan", "infinity", "spread"])
def test_all_orders_have_the_bits_of_the_jnp_code(pair: str, case: str) -> None:
    """Four tiles, of which two overlap."""
    x = normal(2, 64, 336)
    x = {
        "normal": x,
        "huge": x * 1e37,
        "tiny": x * 1e-28,
        "zeros": x * 0,
        "nan": x.at[1, 3, 5].set(jnp.nan),
        "infinity": x.at[1, 3, 5].set(jnp.inf),
        "spread": x * jnp.exp2(jnp.arange(336) % 24 - 12).astype(jnp.bfloat16),
    }[case]
    if pair in TILES:
        x = x.reshape(128, 336)
    for one, other in zip(orders_quantizer(pair)(x), reference_quantizer(pair)(x), strict=True):
        assert one.layout == other.layout
        assert_equal(one, other)


def all_codes(rows: int) -> Quantized:
    """Every byte of two codes with every block scale, and more of them, in `rows` rows."""
    scales, codes = np.divmod(np.arange(rows * 4096, dtype=np.int64), 256)
    return Quantized(
        codes=jnp.asarray(codes.reshape(rows, 4096), jnp.uint8),
        scales=jnp.asarray(scales.reshape(rows, 512, 8)[..., 0] % 128, jnp.uint8),
        amax=jnp.ones((1, 1)),
        layout=layout_of((rows, 8192), PLAIN, ROWS)[0],
    )


def assert_decoded(q: Quantized, values: jax.Array) -> None:
    """Against the types of ml_dtypes, whose products are exact in bfloat16."""
    codes = np.stack([np.asarray(q.codes) & 15, np.asarray(q.codes) >> 4], axis=-1)
    elements = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    scales = np.asarray(q.scales).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    expected = elements.reshape(*scales.shape, 16) * scales[..., None]
    np.testing.assert_array_equal(
        comparable(values), comparable(expected.astype(jnp.bfloat16).reshape(values.shape))
    )


def test_a_kernel_decodes_saved_codes() -> None:
    q = all_codes(8)
    assert kernels.fits_decoding(q)
    assert not kernels.fits_decoding(all_codes(1))
    decoded = jax.jit(KERNELS.values)(q)
    assert_decoded(q, decoded.codes)
    assert decoded.layout == decode_values(q, jnp.float32).layout


@pytest.mark.slow
def test_saved_codes_are_decoded_under_a_vmap() -> None:
    q = all_codes(2)
    reversed_rows = replace(q, codes=q.codes[::-1], scales=q.scales[::-1])
    mapped = jax.jit(jax.vmap(KERNELS.values))(jax.tree.map(lambda *a: jnp.stack(a), q, reversed_rows))
    assert_decoded(q, mapped.codes[0])
    assert_decoded(reversed_rows, mapped.codes[1])


def outer_maxima() -> tuple[jax.Array, jax.Array]:
    """Pairs of magnitudes from the whole range of fp32, with zeros and infinities."""
    bits = np.random.default_rng(0).integers(0, 0x7F800000, (2, 4096)).astype(np.int32)
    bits[:, :64] = np.arange(64)
    bits[0, 64:96], bits[1, 96:128] = 0, 0x7F800000
    one, other = jnp.asarray(bits).view(jnp.float32)
    return one, other


def assert_same_factors(find_factors: Any) -> None:
    """Their product is that of the exact quotients, each rounded to fp32. Below 2**-252 it makes any product zero."""
    bounds = 2688.0, 448.0
    maxima = outer_maxima()
    factors = np.asarray(
        jax.jit(jax.vmap(lambda a, b: find_factors([(a, bounds[0]), (b, bounds[1])])))(*maxima), np.float64
    ).T
    exact = np.float64(1)
    for amax, bound in zip(maxima, bounds, strict=True):
        wide = np.asarray(amax).view(np.int32)
        numbers = np.where(wide < 0x7F800000, np.asarray(amax).astype(np.float64), np.nan)
        # Rounded to 24 bits in fp64, whose range no quotient leaves.
        mantissa, exponent = np.frexp(numbers / bound)
        exact = exact * np.ldexp(np.rint(np.ldexp(mantissa, 24)), exponent - 24)
    mantissa, exponent = np.frexp(exact)
    expected = np.ldexp(np.rint(np.ldexp(mantissa, 24)), exponent - 24)
    # Larger than fp32 with any sum of codes, smaller than any of them.
    is_in_range = ~(np.abs(expected) < 2.0**-180) & ~(np.abs(expected) > 2.0**180)
    np.testing.assert_array_equal((factors[:, 0] * factors[:, 1])[is_in_range], expected[is_in_range])
    assert np.all(factors[expected > 2.0**180].min(axis=1) >= 1)
    assert np.all(np.prod(factors[expected < 2.0**-180], axis=1) < 2.0**-170)
    assert np.count_nonzero(is_in_range) > 2000


def test_a_kernel_computes_the_factors_of_outer_scales() -> None:
    assert_same_factors(KERNELS.outer_factors)
    assert_same_factors(write_outer_factors)


@pytest.mark.slow
def test_under_vmap_each_index_has_the_bits_of_its_own_operand() -> None:
    """Two `vmap`s around the quantizer, with three rows of tiles in an operand, and a key for each index."""
    x = normal(2, 1, 192, 256) * jnp.asarray([1, 1e-3], jnp.bfloat16).reshape(2, 1, 1, 1)
    seeds = jnp.asarray([7, 9], jnp.uint32)
    chosen = requests("stochastic")

    def by_kernels(x: jax.Array, seed: jax.Array) -> list[Quantized]:
        return quantize_orders(x, [replace(r, key=make_key(seed)) for r in chosen], KERNELS)

    @jax.jit
    def alone(x: jax.Array, seed: jax.Array) -> list[Quantized]:
        return [quantize(x, r.treatment, r.axes, key=make_key(seed)) for r in chosen]

    mapped = jax.jit(jax.vmap(jax.vmap(by_kernels, in_axes=(0, None))))(x, seeds)
    for i in range(2):
        for one, other in zip(mapped, alone(x[i, 0], seeds[i]), strict=True):
            assert_equal(jax.tree.map(lambda a, i=i: a[i, 0], one), other)


@pytest.mark.parametrize("backend", ["emulate", "xla"])
@pytest.mark.parametrize(
    ("is_mapped", "features"), [(True, 512), (False, 528)], ids=["several operands", "tiles that overlap"]
)
def test_both_backends_of_a_gpu_use_kernels(backend: str, is_mapped: bool, features: int) -> None:
    context = LoweringContext(platform="cuda", single_device=True, is_mapped=is_mapped)
    x, request = jax.ShapeDtypeStruct((128, features), jnp.bfloat16), Request(STOCHASTIC, COLUMNS)
    jaxpr = jax.make_jaxpr(lambda x: backends.load(backend).quantize(x, [request], context)[0].codes)(x)
    assert "function=_Kernel(" in str(jaxpr)


class WithoutStatistics(kernels.Kernels):
    """Only the kernel that writes codes: the other one would add half a second of lowering."""

    def statistics(self, x: jax.Array, orders: Sequence[Order]) -> list[kernels.Statistics]:
        return [(jnp.int32(0), jnp.uint32(0)) for _ in orders]


@pytest.mark.parametrize(
    ("orders", "is_mapped"),
    [
        pytest.param([Request(STOCHASTIC, COLUMNS, key=make_key(7))], False, id="rotated"),
        pytest.param(requests("tiles"), True, marks=pytest.mark.slow, id="tiles, mapped"),
        pytest.param(requests("stochastic"), True, marks=pytest.mark.slow, id="both orders, mapped"),
    ],
)
def test_mosaic_takes_the_same_integers_for_signed(orders: list[Request], is_mapped: bool) -> None:
    """As the interpreter does. Otherwise compiled kernels compare, divide or convert negative numbers as large ones.

    No other test lowers kernels for this shape: those that are lowered already would not be compared. Tiles overlap.
    """
    shape = (3, 192, 560) if orders[0].treatment.tile2d else (3, 2, 192, 560)
    x = jax.ShapeDtypeStruct(shape[not is_mapped :], jnp.bfloat16)
    engine = kernels.Kernels() if is_mapped else WithoutStatistics()
    run = partial(quantize_orders, requests=orders, kernels=engine)
    with record_signs() as signs:
        jax.jit(jax.vmap(run) if is_mapped else run).trace(x).lower(lowering_platforms=("cuda",))
    assert signs.wrong == []
    assert signs.checked


@pytest.mark.parametrize(
    ("tiles", "grid"),
    [
        (65535, "grid=(65535, 2), grid_names=('tokens', 'features')"),
        (65536, "grid=(2, 65536), grid_names=('features', 'tokens')"),
    ],
)
def test_cuda_can_start_the_instances_for_many_tokens(tiles: int, grid: str) -> None:
    """It starts 2**31 - 1 instances along the last axis of a grid, and 65535 along others. Mosaic does not check it."""
    kernel = kernels._Kernel(body=lambda ops, *_: None, options=(), outs=(), grid=(tiles, 2), scratch=())
    jaxpr = jax.make_jaxpr(kernel)(jax.ShapeDtypeStruct((64 * tiles, 32, 8), jnp.uint32))
    assert grid in str(jaxpr)


@pytest.mark.any_jax
@pytest.mark.parametrize(("element", "moved"), [("e4m3", 1), ("e5m2", 1), ("e5m2", 2)])
@pytest.mark.parametrize("case", ["normal", "huge", "tiny", "zeros", "nan"])
def test_codes_in_both_orders(case: str, element: str, moved: int) -> None:
    """The kernel and the jnp code write the codes of a quantizer of one order, and a copy with the last axes first."""
    x = normal(128, 2, 128) if moved == 2 else normal(2, 128, 256)
    x = {"normal": x, "huge": x * 1e37, "tiny": x * 1e-38, "zeros": x * 0, "nan": x.at[0, 3, 5].set(jnp.nan)}[
        case
    ]
    treatment, both = Treatment(format="fp8", element=element), Axes(second_order=moved)
    assert fp8_kernel.fits(x, treatment, both)
    reference = quantizer(treatment, Axes(), "matmul")(x)
    assert reference.transposed_codes is None
    transposed = np.asarray(reference.codes).transpose((1, 2, 0) if moved == 2 else (2, 0, 1))
    for method in ("interpreted", "matmul"):
        q = quantizer(treatment, both, method)(x)
        assert_equal(replace(q, transposed_codes=None), reference)
        np.testing.assert_array_equal(np.asarray(q.transposed_codes), transposed)
        q = quantizer(treatment, replace(both, only_second=True), method)(x)
        assert q.transposed_codes is None
        np.testing.assert_array_equal(np.asarray(q.codes), transposed)


@pytest.mark.any_jax
def test_codes_of_a_stack_in_both_orders() -> None:
    """Each layer has the scale of its own maximum."""
    layers = normal(3, 128, 128) * jnp.exp2(jnp.arange(3)).astype(jnp.bfloat16)[:, None, None]
    quantize = quantizer(Treatment(format="fp8", element="e4m3"), Axes(second_order=1), "interpreted")
    stack = jax.vmap(quantize)(layers)
    for i, layer in enumerate(layers):
        assert_equal(jax.tree.map(itemgetter(i), stack), quantize(layer))


@pytest.mark.any_jax
@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("case", ["normal", "huge", "tiny", "zeros", "nan"])
def test_codes_with_a_scale_for_each_row_and_each_column(case: str, last: int) -> None:
    """The kernel writes for each of two GEMMs what a quantizer of one order writes."""
    x = normal(2, 128, 256) * jnp.exp2(jnp.arange(256) % 9).astype(jnp.bfloat16)
    x = {"normal": x, "huge": x * 1e34, "tiny": x * 1e-38, "zeros": x * 0, "nan": x.at[0, 3, 5].set(jnp.nan)}[
        case
    ]
    treatments = [Treatment(format="fp8", element=element, outer="row") for element in ("e4m3", "e5m2")]
    axes = [Axes(axis=-1, contract=(-1,)), Axes(axis=-2, contract=(-3, -2))]
    if last:
        axes.reverse()
    pair = [Request(t, a) for t, a in zip(treatments, axes, strict=True)]
    assert fp8_kernel.fits_rows(x, pair)
    kernel = fp8_kernel.Fp8Kernel(interpret=True)
    both = jax.jit(lambda x: fp8_kernel.quantize_fp8_rows(x, pair, kernel))(x)
    for quantized, treatment, a in zip(both, treatments, axes, strict=True):
        assert_equal(quantized, quantizer(treatment, a, "matmul")(x))


def test_which_operands_the_kernels_take() -> None:
    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    fp8, both, fits = Treatment(format="fp8", element="e4m3"), Axes(second_order=1), fp8_kernel.fits
    assert fits(array(128, 256), fp8, both)
    assert not fits(array(128, 256), fp8, Axes())
    assert not fits(array(128, 256), replace(fp8, outer="row"), both)
    assert not fits(array(128, 256, dtype=jnp.float32), fp8, both)
    assert not fits(array(64, 256), fp8, both)
    assert not fits(array(128, 200), fp8, both)
    assert not fits(array(128, 256), NEAREST, both)
    row, fits_rows = replace(fp8, outer="row"), fp8_kernel.fits_rows
    across, along = Axes(axis=-2, contract=(-2,)), Axes(axis=-1, contract=(-1,))
    pair = [Request(row, across), Request(row, along)]
    assert fits_rows(array(128, 256), pair)
    assert not fits_rows(array(128, 256), [pair[0], Request(fp8, along)])
    assert not fits_rows(array(128, 256), [pair[1], pair[1]])
    assert not fits_rows(array(2, 128, 256), pair)
    assert not fits_rows(array(128, 200), pair)
    fits = kernels.fits
    assert fits(array(64, 256), NEAREST, COLUMNS)
    assert fits(array(4, 16, 256), NEAREST, COLUMNS)
    assert fits(array(64, 256), PLAIN, ROWS)
    assert fits(array(64, 256), NEAREST, COLUMNS)
    assert fits(array(64, 256), replace(NEAREST, outer="bound"), COLUMNS)
    assert kernels.fits_alone(array(64, 256), NEAREST, COLUMNS)
    assert not kernels.fits_alone(array(64, 256), PLAIN, ROWS)
    assert not fits(array(64, 256), NEAREST, ROWS)
    assert not fits(array(64, 256), replace(PLAIN, tile2d=True), Axes(axis=-1, tile=-2))
    assert not fits(array(64, 256), NEAREST, Axes(axis=-2, batch=(-3,)))
    assert not fits(array(64, 256, dtype=jnp.float32), NEAREST, COLUMNS)
    assert not fits(array(48, 256), NEAREST, COLUMNS)
    assert not fits(array(8, 8, 256), NEAREST, COLUMNS)
    assert fits(array(64, 272), NEAREST, COLUMNS)
    assert not fits(array(64, 240), NEAREST, COLUMNS)
    assert not fits(array(64, 264), NEAREST, COLUMNS)
    assert not fits(array(2, 2, 64, 256), NEAREST, COLUMNS)
    assert not fits(array(64, 256), replace(NEAREST, outer="row"), COLUMNS)
    assert not fits(array(64, 256), replace(NEAREST, scale="four_over_six"), COLUMNS)
    fits, tiles, tile_axes = kernels.fits_tiles, replace(PLAIN, tile2d=True), Axes(axis=-2, tile=-1)
    assert fits(array(64, 272), tiles, tile_axes)
    assert fits(array(64, 272), tiles, Axes(axis=-1, tile=-2))
    assert not fits(array(64, 256), PLAIN, ROWS)
    assert not fits(array(2, 64, 256), tiles, tile_axes)
    assert not fits(array(48, 256), tiles, tile_axes)
    assert not fits(array(64, 256, dtype=jnp.float32), tiles, tile_axes)
    assert not fits(array(64, 256), replace(tiles, rounding="sr"), tile_axes)
    assert not fits(array(64, 256), replace(tiles, outer="row"), tile_axes)
    assert not fits(array(64, 256), replace(tiles, scale="four_over_six"), tile_axes)
