"""The GEMM for Hopper GPUs, interpreted on CPU, against exact products; and when it is used."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policyc.jaxcore.primitives.define_primitive import Gpu, LoweringContext
from policyc.language.recipes import Treatment
from policyc.numerics.backends import emulate, hopper_gemm
from policyc.numerics.quantize import Axes, Quantized, quantize
from tests.support.hopper_products import exact_product, integers

H200 = Gpu(capability=9, multiprocessors=132)
ON_H200 = LoweringContext(platform="cuda", gpu=H200, single_device=True)
NVFP4 = Treatment(format="nvfp4", element="e2m1")
CONTRACT_LAST = (((1,), (1,)), ((), ()))
CONTRACT_FIRST = (((1,), (0,)), ((), ()))
ROWS, COLUMNS, DEPTH = 64 * 256, 256, 128
"""A product of 128 tiles, nearly one for each multiprocessor."""


def interpret(kernel: hopper_gemm.HopperGemm, *arrays: jax.Array) -> jax.Array:
    """Runs a kernel without a GPU, and asserts that no thread reads or writes memory that another one is using.

    The interpreter knows this for copies, not for the operands of the matrix unit.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax.experimental.pallas import mosaic_gpu

    with mosaic_gpu.force_gpu_interpret_mode(mosaic_gpu.InterpretGPUParams(detect_races=True)):
        (result,) = jax.block_until_ready(kernel(*arrays))
    assert not gpu_callbacks.get_races().races_found
    return result


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX cannot interpret the kernel")
@pytest.mark.parametrize("contracts_last", [False, True])
@pytest.mark.parametrize(
    "maxima",
    [(Fraction(3), Fraction(1, 7)), (Fraction(2) ** -70, Fraction(5, 2**60)), (Fraction(2**90),)],
    ids=["usual scales", "a denormal product of scales", "one scale"],
)
def test_products_are_exact(contracts_last: bool, maxima: tuple[Fraction, ...]) -> None:
    """Seven tiles for two instances, and more steps than there are stages.

    Sums of small integers are exact in any order, so only the outer scales and the result are rounded.
    """
    a, b = integers((7 * 256, 320), seed=0), integers((128, 320), seed=1)
    kernel = hopper_gemm.HopperGemm(
        bounds=(2688.0,) * len(maxima), contracts_last=contracts_last, instances=2
    )
    scales = [jnp.float32([float(m)]) for m in maxima]
    result = interpret(kernel, a, b if contracts_last else b.T, *scales)
    np.testing.assert_array_equal(np.asarray(result), exact_product(a, b, scales, 2688))


def quantized(shape: tuple[int, ...], axis: int, treatment: Treatment = NVFP4) -> Any:
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    return jax.eval_shape(lambda x: quantize(x, treatment, Axes(axis=axis)), x)


def uses_kernel(
    lhs: Any, rhs: Any, dimensions: Any, out: Any = jnp.bfloat16, context: LoweringContext = ON_H200
) -> bool:
    def multiply(lhs: Quantized, rhs: Quantized) -> jax.Array:
        return emulate.BACKEND.gemm(lhs, rhs, dimensions, out, context)

    return "HopperGemm(" in str(jax.make_jaxpr(multiply)(lhs, rhs))


def test_large_products_with_outer_scales_use_the_kernel() -> None:
    x, w = quantized((ROWS, DEPTH), -1), quantized((COLUMNS, DEPTH), -1)
    assert uses_kernel(x, w, CONTRACT_LAST)
    assert uses_kernel(quantized((2, ROWS // 2, DEPTH), -1), w, (((2,), (1,)), ((), ())))
    assert uses_kernel(x, quantized((DEPTH, COLUMNS), -2), CONTRACT_FIRST)
    wide = replace(NVFP4, tile2d=True)
    tiles = jax.eval_shape(
        lambda w: quantize(w, wide, Axes(axis=-2, tile=-1)),
        jax.ShapeDtypeStruct((DEPTH, COLUMNS), jnp.bfloat16),
    )
    assert uses_kernel(x, tiles, CONTRACT_FIRST)


def test_other_products_are_left_to_xla() -> None:
    x, w = quantized((ROWS, DEPTH), -1), quantized((COLUMNS, DEPTH), -1)
    contexts = {
        "a Blackwell GPU": replace(ON_H200, gpu=replace(H200, capability=10)),
        "a GPU that is not known": replace(ON_H200, gpu=None),
        "fewer multiprocessors": replace(ON_H200, gpu=replace(H200, multiprocessors=114)),
        "a vmap": replace(ON_H200, is_mapped=True),
    }
    for name, context in contexts.items():
        assert not uses_kernel(x, w, CONTRACT_LAST, context=context), name
    assert not uses_kernel(x, w, CONTRACT_LAST, out=jnp.float32)
    assert not uses_kernel(quantized((ROWS - 8 * 256, DEPTH), -1), w, CONTRACT_LAST), "too few tiles"
    assert not uses_kernel(quantized((ROWS + 3 * 256, DEPTH), -1), w, CONTRACT_LAST), "a second turn for two"
    assert not uses_kernel(quantized((ROWS + 16, DEPTH), -1), w, CONTRACT_LAST), "a part of a tile"
    thin = quantized((ROWS, 96), -1), quantized((COLUMNS, 96), -1)
    assert not uses_kernel(*thin, CONTRACT_LAST), "a part of a step"
    by_row = replace(NVFP4, outer="row")
    assert not uses_kernel(quantized((ROWS, DEPTH), -1, by_row), w, CONTRACT_LAST), "a scale for each row"
    mx = Treatment(format="mxfp8", element="e4m3")
    unscaled = quantized((ROWS, DEPTH), -1, mx), quantized((COLUMNS, DEPTH), -1, mx)
    assert not uses_kernel(*unscaled, CONTRACT_LAST), "no outer scale"
