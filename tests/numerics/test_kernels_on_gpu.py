"""The GPU kernels, compiled for the GPU that is here, against the jnp code that they replace: the same bits."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from policyc.language.recipes import Treatment
from policyc.numerics import primitives
from policyc.numerics.quantize import Axes, codes_of, make_key, quantize
from tests.numerics.test_kernels import COLUMNS, NEAREST, STOCHASTIC, WITH_HEADROOM, assert_equal, normal
from tests.numerics.test_quantize import with_denormals
from tests.support import rounding_oracle as oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]


@pytest.mark.parametrize("treatment", [NEAREST, STOCHASTIC, WITH_HEADROOM])
def test_compiled_kernels_on_large_arrays(treatment: Treatment) -> None:
    x, key = normal(8192, 4096), make_key(7)
    compiled = jax.jit(
        lambda x: primitives.quantize(x, treatment, COLUMNS, operand="wgrad.dy", keys=(key, key))
    )
    assert "triton" in compiled.lower(x).as_text()
    reference = jax.jit(lambda x: quantize(x, treatment, COLUMNS, key=key.fold("wgrad.dy"), method="matmul"))
    assert_equal(compiled(x), reference(x))


def test_denormals_keep_their_codes() -> None:
    x = with_denormals()
    quantized = jax.jit(lambda x: quantize(x, Treatment(format="nvfp4", element="e2m1")))(x)
    np.testing.assert_array_equal(np.asarray(codes_of(quantized)), oracle.nvfp4(x)["codes"])


def test_compiled_codes_in_both_orders() -> None:
    x, fp8, both = normal(8192, 4096), Treatment(format="fp8", element="e5m2"), Axes(both_orders=True)
    run = jax.jit(lambda x: primitives.quantize(x, fp8, both, backend="xla"))
    assert "triton" in run.lower(x).as_text()
    assert_equal(run(x), jax.jit(lambda x: quantize(x, fp8, both, method="matmul"))(x))
