"""The GPU kernels, compiled for the GPU that is here, against the jnp code that they replace: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policyc.language.recipes import Treatment
from policyc.numerics import primitives
from policyc.numerics.backends.hopper_gemm import HopperGemm
from policyc.numerics.quantize import Axes, Request, codes_of, make_key, quantize
from policyc.numerics.quantize.kernels import fused_kernels as kernels
from policyc.numerics.quantize.kernels.kernel_ops import KernelOps
from policyc.numerics.quantize.kernels.kernel_orders import Order
from policyc.numerics.quantize.kernels.kernel_tiles import RowLengths
from policyc.numerics.quantize.kernels.words import divide, reciprocal
from policyc.numerics.quantize.orders import order_scales, quantize_orders
from policyc.numerics.quantize.reference.bits import INFINITY, Element, exact_div, kernel_div
from policyc.numerics.quantize.reference.values import write_outer_factors
from tests.numerics import test_quantize
from tests.numerics.test_kernels import (
    COLUMNS,
    NEAREST,
    PAIRS,
    STOCHASTIC,
    TILES,
    all_codes,
    assert_decoded,
    assert_equal,
    assert_same_factors,
    normal,
    reference_quantizer,
    requests,
)
from tests.numerics.test_quantize import ELEMENT_DTYPES, with_denormals
from tests.support import rounding_oracle as oracle
from tests.support.hopper_products import exact_product, integers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]


def _is_hopper() -> bool:
    return str(getattr(jax.devices()[0], "compute_capability", "")).startswith("9.")


@pytest.mark.parametrize("exact", [exact_div, kernel_div])
def test_quotients_are_exact_where_those_of_the_gpu_are_not(exact: Callable[..., jax.Array]) -> None:
    """Against NumPy, whose division is correctly rounded, over all normal numbers."""
    bits = np.random.default_rng(0).integers(0x00800000, INFINITY, (2, 1 << 24)).astype(np.uint32)
    a, b = bits.view(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        expected = np.minimum(a / b, np.finfo(np.float32).max)
    expected[expected < np.finfo(np.float32).tiny] = 0
    np.testing.assert_array_equal(np.asarray(jax.jit(exact)(a, b)), expected)
    assert np.any(np.asarray(jax.jit(jnp.divide)(a, b)) != expected)


def _write_quotients(ops: KernelOps, a: Any, b: Any, quotients: Any, reciprocals: Any) -> None:
    i = ops.index(0)
    one, other = (ops.load(ref, (i,), "words") for ref in (a, b))
    results = ops.run(lambda a, b: [[divide(a[0], b[0])], [reciprocal(b[0])]], [one, other], [(16, 8)] * 2)
    for ref, array in zip((quotients, reciprocals), results, strict=True):
        ops.store(ref, (i,), array)


def test_quotients_in_kernels_are_exact() -> None:
    """Divisors with all mantissas, over all exponents."""
    shape = (1 << 16, 16, 8)
    a = np.random.default_rng(0).integers(0x00800000, INFINITY, shape).astype(np.uint32)
    b = np.arange(1 << 23, dtype=np.uint32).reshape(shape) + np.uint32(0x00800000) * (a % 254 + 1)
    b[0, 0] = 0
    b[1, 0], b[1, 1] = (
        0x7E800000,
        0x7E800001,
    )  # the largest divisor with a normal reciprocal, and the next one
    out = (shape, jnp.uint32)
    kernel = kernels._Kernel(
        body=_write_quotients, options=(), outs=(out, out), grid=(shape[0], 1), scratch=()
    )
    results = jax.jit(lambda a, b: kernel.run(a, b, interpret=False))(a, b)
    top = np.finfo(np.float32).max
    with np.errstate(all="ignore"):
        for dividend, result in zip((a.view(np.float32), np.float32(1)), results, strict=True):
            expected = np.minimum(dividend / b.view(np.float32), top)
            expected[expected < np.finfo(np.float32).tiny] = 0
            np.testing.assert_array_equal(np.asarray(result).view(np.float32), expected)


@pytest.mark.parametrize(("element", "dtype"), ELEMENT_DTYPES)
def test_the_gpu_rounds_and_decodes_as_ml_dtypes(element: Element, dtype: Any) -> None:
    test_quantize.test_rounding_and_decoding_equal_ml_dtypes(element, dtype)


SHAPES = ((4, 2048, 1024), (64, 256), (3, 64, 1408), (192, 14336))
_NO_SIGNS = 0x77
"""Both magnitudes of a byte of codes."""


@pytest.mark.parametrize("treatment", [NEAREST, STOCHASTIC])
def test_compiled_kernels_on_large_arrays(treatment: Treatment) -> None:
    x, key = normal(8192, 4096), make_key(7)
    compiled = jax.jit(
        lambda x: primitives.quantize(x, Request(treatment, COLUMNS, operand="wgrad.dy", key=key))
    )
    assert "mosaic_gpu" in compiled.lower(x).as_text()
    reference = jax.jit(lambda x: quantize(x, treatment, COLUMNS, key=key.fold("wgrad.dy"), method="matmul"))
    assert_equal(compiled(x), reference(x))


@pytest.mark.parametrize("pair", [*PAIRS, *TILES])
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_kernels_of_all_orders(pair: str, shape: tuple[int, ...]) -> None:
    if pair in TILES:
        shape = (prod(shape[:-1]), shape[-1])
    x = normal(*shape) * jnp.exp2(jnp.arange(shape[-1]) % 24 - 12).astype(jnp.bfloat16)
    run = jax.jit(lambda x: quantize_orders(x, requests(pair), kernels.Kernels()))
    reference = reference_quantizer(pair)
    for scale in (1, 0, 1e33, 1e-28):
        for one, other in zip(run(x * scale), reference(x * scale), strict=True):
            assert_equal(one, other)
    # The sign of a NaN is that of the ops, and a rotation computes many. All scales are NaN.
    not_finite = x.at[..., 3].set(jnp.nan).at[..., 5].set(jnp.inf)
    for one, other in zip(run(not_finite), reference(not_finite), strict=True):
        if one.layout.decoded:
            assert_equal(one, other)
            continue
        assert_equal(replace(one, codes=one.codes & _NO_SIGNS), replace(other, codes=other.codes & _NO_SIGNS))


def test_a_compiled_kernel_decodes_saved_codes() -> None:
    q = all_codes(2048)
    assert_decoded(q, jax.jit(kernels.Kernels().values)(q).codes)


def test_a_compiled_kernel_computes_the_factors_of_outer_scales() -> None:
    assert_same_factors(kernels.Kernels().outer_factors)
    assert_same_factors(write_outer_factors)


@pytest.mark.skipif(not _is_hopper(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("contracts_last", [False, True])
@pytest.mark.parametrize("shape", [(8192, 512, 448), (8192, 1408, 64), (2048, 2048, 32768)])
def test_the_gemm_of_hopper_gpus_is_exact(shape: tuple[int, int, int], contracts_last: bool) -> None:
    """Sums of integers are exact in any order. Many runs: a race would not show each time."""
    rows, columns, depth = shape
    a, b = integers((rows, depth), seed=0), integers((columns, depth), seed=1)
    maxima = jnp.float32([3.0]), jnp.float32([1 / 7])
    kernel = HopperGemm(bounds=(2688.0, 2688.0), contracts_last=contracts_last, instances=132)
    run = jax.jit(lambda *arrays: kernel(*arrays)[0])
    arrays = a, b if contracts_last else b.T, *maxima
    first = run(*arrays)
    np.testing.assert_array_equal(np.asarray(first), exact_product(a, b, maxima, 2688))
    for _ in range(100):
        assert jnp.array_equal(run(*arrays), first)


def test_compiled_kernels_of_several_operands() -> None:
    """As under a `vmap`: the random words and scales are those of each operand."""
    x = normal(3, 2, 2048, 1024) * jnp.asarray([1, 1e-3, 1e20], jnp.bfloat16).reshape(3, 1, 1, 1)
    request = requests("stochastic")
    run = jax.jit(jax.vmap(lambda x: quantize_orders(x, request, kernels.Kernels())))
    assert "mosaic_gpu" in run.lower(x).as_text()
    alone = jax.jit(lambda x: [quantize(x, r.treatment, r.axes, key=r.key) for r in request])
    results = run(x)
    for i in range(3):
        for one, other in zip(results, alone(x[i]), strict=True):
            assert_equal(jax.tree.map(lambda a, i=i: a[i], one), other)


def test_compiled_kernels_of_a_shard() -> None:
    """The random words of a shard are those of its offset in the whole operand."""
    whole = normal(4, 256, 1024)
    shard = whole[2:, 128:, 512:]
    offset = kernels.ShardOffset(
        start=jnp.asarray([2 * 256 + 128, 512], jnp.uint32),
        rows=RowLengths(shard=128, whole=256),
        features=1024,
    )
    # An outer scale from a bound needs the maxima before the rotation.
    request = [replace(r, treatment=replace(r.treatment, outer="tensor")) for r in requests("stochastic")]
    orders = [Order.from_request(r) for r in request]
    statistics = kernels.Kernels().statistics(whole, orders)
    scales = [order_scales(s, r) for s, r in zip(statistics, request, strict=True)]
    codes = jax.jit(lambda x: kernels.Kernels().codes(x, orders, scales, offset))(shard)
    for one, r in zip(codes, request, strict=True):
        whole_quantized = quantize(whole, r.treatment, r.axes, key=r.key)
        for array, of_whole in zip(one, (whole_quantized.codes, whole_quantized.scales), strict=True):
            tokens, features = of_whole.shape[-2] // 2, of_whole.shape[-1] // 2
            expected = np.asarray(of_whole)[2:, tokens:, features:]
            np.testing.assert_array_equal(np.asarray(array), expected.reshape(array.shape))


def test_denormals_keep_their_codes() -> None:
    x = with_denormals()
    quantized = jax.jit(lambda x: quantize(x, Treatment(format="nvfp4", element="e2m1")))(x)
    np.testing.assert_array_equal(np.asarray(codes_of(quantized)), oracle.nvfp4(x)["codes"])


def test_compiled_codes_with_a_scale_for_each_row_and_each_column() -> None:
    x, row = normal(8192, 4096), Treatment(format="fp8", element="e4m3", outer="row")
    pair = tuple(Request(row, Axes(axis=i, contract=(i,))) for i in (-2, -1))
    run = jax.jit(lambda x: primitives.quantize_pair(x, pair, backend="xla"))
    assert "triton" in run.lower(x).as_text()
    for quantized, r in zip(run(x), pair, strict=True):
        assert_equal(quantized, jax.jit(lambda x, r=r: quantize(x, r.treatment, r.axes, method="matmul"))(x))


def test_compiled_codes_in_both_orders() -> None:
    x, fp8, both = normal(8192, 4096), Treatment(format="fp8", element="e5m2"), Axes(second_order=1)
    run = jax.jit(lambda x: primitives.quantize(x, Request(fp8, both), backend="xla"))
    assert "triton" in run.lower(x).as_text()
    assert_equal(run(x), jax.jit(lambda x: quantize(x, fp8, both, method="matmul"))(x))
