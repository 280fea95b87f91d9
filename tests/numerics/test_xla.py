"""XLA's GEMMs of FP8: their scales, the precision of their sums, and several devices."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import policyc
from policyc.hardware import hlo
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.primitives.define_primitive import LoweringContext
from policyc.jaxcore.versions import FAST_FP8_PRECISION, FP8_PRECISION
from policyc.language.recipes import Gemm, Treatment, make_recipe, make_split_recipe
from policyc.numerics.backends import xla
from policyc.numerics.backends.emulate import apply_outer_scales
from policyc.numerics.gemm import GemmOptions, quantized_dot_general
from policyc.numerics.quantize import Axes, Quantized, quantize
from policyc.numerics.quantize.reference.blocks import layout_of
from policyc.numerics.quantize.reference.values import block_values
from tests.numerics.test_backends import SHAPES
from tests.support.gemms import MATMUL, RECIPES, normal, quick_jit, relative_error, three_products
from tests.support.jaxpr_tools import primitive_counts

XLA = ("xla", "xla", "xla")
SUM_ORDER = 1e-6


def assert_close(results: Any, expected: Any, most: float = SUM_ORDER) -> None:
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, b) < most


@pytest.mark.parametrize("backend", ["emulate", "xla"])
@pytest.mark.parametrize("shape", ["several free", "attention", "batch, weight left"])
def test_one_quantizer_serves_all_gemms_of_an_fp8_array(shape: str, backend: str) -> None:
    left, right, dims, weight = SHAPES[shape]
    options = GemmOptions(weight=weight, backends=(backend,) * 3)
    f = partial(quantized_dot_general, dimension_numbers=dims, recipe=RECIPES["fp8"], options=options)
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in (left, right))
    jaxpr = jax.make_jaxpr(partial(three_products, f))(x, w, jax.eval_shape(f, x, w))
    assert str(jaxpr).count("fp8_quantize[") == 3


def test_one_quantizer_writes_fp8_rows_for_both_gemms() -> None:
    """x, the weight and dy each have different codes in the two GEMMs that read them."""
    f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=RECIPES["fp8 row"])
    x, w, dy = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((128, 256), (256, 128), (128, 128)))
    for backend, specs in (("xla", [2] * 3), ("emulate", [1] * 6)):
        options = GemmOptions(backends=(backend,) * 3)
        jaxpr = jax.make_jaxpr(partial(three_products, partial(f, options=options)))(x, w, dy)
        equations = [e for e in jaxprs.all_equations(jaxpr) if jaxprs.primitive_name(e) == "fp8_quantize"]
        assert [len(e.params["specs"]) for e in equations] == specs


@pytest.mark.any_jax
@pytest.mark.parametrize(
    ("x_size", "w_size"),
    [(0, 0), (-100, 0), (-126, 20), (100, -110), (90, 30), (60, 80), (110, 120), (-120, -120)],
)
def test_outer_scales_equal_the_oracle(x_size: int, w_size: int) -> None:
    """Two outer scales, one for each tensor or each row, whose product may be out of range: rounded to fp32 each, and
    multiplied once. The results here are fp32: a GPU scales in fp32 and rounds to bfloat16 afterwards.
    """
    x, w, sums = quantize_and_multiply(normal(16, 32) * 2.0**x_size, normal(32, 16, seed=1) * 2.0**w_size)
    one, other = (round_to_24_bits(np.float64(o.amax).item() / o.layout.bound) for o in (x, w))
    with np.errstate(over="ignore", under="ignore"):
        expected = (np.float64(sums) * round_to_24_bits(one * other)).astype(np.float32)
    scaled = jax.jit(apply_outer_scales, static_argnums=(3, 4))(sums, x, w, MATMUL, 1)
    np.testing.assert_array_equal(scaled, expected)
    x_rows = replace(x, amax=jnp.broadcast_to(x.amax, (16, 1)))
    scaled_rows = jax.jit(apply_outer_scales, static_argnums=(3, 4))(sums, x_rows, w, MATMUL, 1)
    np.testing.assert_array_equal(scaled_rows, expected)
    assert np.isinf(expected).any() == (x_size + w_size > 127)
    assert np.all(expected == 0) == (x_size + w_size < -149)


def round_to_24_bits(number: float) -> float:
    mantissa, exponent = math.frexp(number)
    return math.ldexp(float(np.float32(mantissa)), exponent)


@jax.jit
def quantize_and_multiply(x: jax.Array, w: jax.Array) -> tuple[Quantized, Quantized, jax.Array]:
    fp8 = Treatment(format="fp8", element="e4m3")
    a, b = quantize(x, fp8, Axes(axis=-1)), quantize(w, fp8, Axes(axis=-2))
    return a, b, block_values(a, jnp.float32) @ block_values(b, jnp.float32)


@pytest.mark.parametrize(
    ("context", "rows", "expected"),
    [
        (LoweringContext(platform="cuda", single_device=True), 2048, jnp.bfloat16),
        (LoweringContext(platform="cuda", single_device=True), 512, jnp.float32),
        (LoweringContext(platform="cuda"), 2048, jnp.float32),
    ],
    ids=["on one device", "small: XLA may split it", "under a vmap"],
)
def test_an_fp8_gemm_writes_fp32_if_it_cannot_apply_its_scales(
    context: LoweringContext, rows: int, expected: Any
) -> None:
    x, w, _ = quantize_and_multiply(normal(rows, 32), normal(32, 2048, seed=1))
    multiply = partial(xla.BACKEND.gemm, dimensions=MATMUL, out=jnp.dtype(jnp.bfloat16), context=context)
    (dot,) = (e for e in jax.make_jaxpr(multiply)(x, w).eqns if e.primitive.name == "dot_general")
    assert dot.outvars[0].aval.dtype == expected


def test_only_a_product_that_may_adds_in_fewer_bits() -> None:
    """x and w are quantized once, though dgrad and wgrad add in another way than fprop."""
    fast, plain = make_recipe("fp8", {"sums": "fast"}), make_recipe("fp8")
    recipe = make_split_recipe({Gemm.FPROP: fast, Gemm.DGRAD: plain, Gemm.WGRAD: plain})
    product = partial(
        quantized_dot_general, dimension_numbers=MATMUL, recipe=recipe, options=GemmOptions(backends=XLA)
    )
    arrays = [normal(256, 256, seed=i).astype(jnp.bfloat16) for i in range(3)]
    jaxpr = jax.make_jaxpr(partial(three_products, product))(*arrays)
    assert primitive_counts(jaxpr)["fp8_quantize"] == 3
    gemms = [e for e in jaxprs.all_equations(jaxpr) if jaxprs.primitive_name(e) == "scaled_gemm"]
    assert [(e.params["lhs"].layout.fast_sums, e.params["rhs"].layout.fast_sums) for e in gemms] == [
        (True, True), (False, False), (False, False)
    ]  # fmt: skip


@pytest.mark.parametrize(("is_fast", "precision"), [(True, FAST_FP8_PRECISION), (False, FP8_PRECISION)])
def test_fast_sums_are_a_precision_of_the_product(is_fast: bool, precision: Any) -> None:
    x, w, _ = quantize_and_multiply(normal(2048, 32), normal(32, 2048, seed=1))
    x, w = (replace(o, layout=replace(o.layout, fast_sums=is_fast)) for o in (x, w))
    context = LoweringContext(platform="cuda", single_device=True)
    multiply = partial(xla.BACKEND.gemm, dimensions=MATMUL, out=jnp.dtype(jnp.bfloat16), context=context)
    (dot,) = (e for e in jax.make_jaxpr(multiply)(x, w).eqns if e.primitive.name == "dot_general")
    given = dot.params["precision"]
    assert given in (precision, (precision, precision))


CUDA = LoweringContext(platform="cuda", can_partition=True)
"""What the backend is told on several GPUs. XLA for CPU runs the same program."""


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices: XLA_FLAGS in conftest")
def test_devices_scale_their_parts_of_an_fp8_sum_before_they_add_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sums over devices are computed from the scales: one for each device, one that all devices have, and one
    that is scattered along columns, with a batch dimension. The scales are beyond the reach of a GEMM.
    """
    monkeypatch.setattr(xla, "FP8_PRECISION", None)  # XLA for CPU does not take it
    mesh = Mesh(np.array(jax.devices()[:8]), ("fsdp",))
    tokens, whole, columns = (NamedSharding(mesh, P(*spec)) for spec in [("fsdp",), (), (None, None, "fsdp")])
    left, right = (np.asarray(normal(*s), jnp.float8_e4m3fn) for s in [(16, 3, 32), (16, 3, 24)])
    scales = np.float32(1.37 * 2**-40), np.float32(0.73 * 2**-35)

    def make_operand(values: np.ndarray, scale: np.float32) -> Quantized:
        layout, _ = layout_of(values.shape, Treatment(format="fp8", element="e4m3"), Axes(axis=-1))
        codes, amax = jax.device_put(values.view(np.uint8), tokens), np.full((1, 1, 1), scale * 448)
        return Quantized(codes=codes, scales=None, amax=jax.device_put(amax, whole), layout=layout)

    def multiply(x: Quantized, dy: Quantized) -> list[jax.Array]:
        wgrad, batched = (((0, 1), (0, 1)), ((), ())), (((0,), (0,)), ((1,), (1,)))
        gemms = wgrad, wgrad, batched
        return [xla.BACKEND.gemm(x, dy, dimensions, jnp.dtype(jnp.bfloat16), CUDA) for dimensions in gemms]

    operands = make_operand(left, scales[0]), make_operand(right, scales[1])
    compiled = jax.jit(multiply, out_shardings=[tokens, whole, columns]).lower(*operands).compile()
    module = hlo.parse_module(compiled.as_text() or "")
    entry = module.computations[module.entry]
    sums = [i for i in entry.values() if i.opcode in ("all-reduce", "reduce-scatter")]
    parts = [entry[name] for instruction in sums for name in instruction.operands]
    assert len(parts) == 3
    for part in parts:
        parameters = [entry[name].shape for name in parameters_of(entry, part)]
        assert any(shape.startswith("f32") for shape in parameters), parameters
    for result, equation in zip(
        compiled(*operands), ("tbm,tbn->mn", "tbm,tbn->mn", "tbm,tbn->bmn"), strict=True
    ):
        exact, most = (
            float(scales[0]) * float(scales[1]) * np.einsum(equation, f(left), f(right))
            for f in (np.float64, lambda x: np.abs(np.float64(x)))
        )
        # A part is rounded to bfloat16 before and after it is scaled, and so is its scale. The sum of eight parts is
        # rounded at most seven times more.
        assert np.all(np.abs(np.asarray(result, np.float64) - exact) <= 10 * 2.0**-9 * most)


def parameters_of(computation: hlo.Computation, instruction: hlo.Instruction) -> set[str]:
    """The names of the parameters that an instruction is computed from."""
    if instruction.opcode == "parameter":
        return {instruction.name}
    return set().union(*(parameters_of(computation, computation[name]) for name in instruction.operands))


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs 4 devices: XLA_FLAGS in conftest")
def test_inside_a_shard_map_over_some_axes() -> None:
    """XLA divides the product over the other axes by itself: it tells no partitioning rule what they are."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    x, w = normal(64, 32), normal(32, 64, seed=1)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        specs: Any = {"in_specs": (P("data"), P()), "out_specs": P("data"), "axis_names": {"data"}}
        return jnp.sum(jnp.tanh(jax.shard_map(jnp.matmul, mesh=mesh, **specs)(x, w)))

    def gradient(backend: str) -> np.ndarray:
        applied = policyc.apply("* -> mxfp8", loss, backend=backend)
        shards = jax.device_put(w, NamedSharding(mesh, P(None, "model")))
        return np.asarray(quick_jit(jax.grad(applied))(shards, x))

    assert_close(gradient("xla"), gradient("emulate"))
