"""XLA's GEMMs of small formats against the emulation: on a CPU, XLA multiplies values and scales out.

The quantizers are the same, so that all that may differ is the order of fp32 sums of at most 128 products: 1e-6 of the
norm.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policyc
from policyc.compiler.plan import gemm_queries
from policyc.language.recipes import Gemm, Treatment, make_recipe
from policyc.numerics.backends.choice import Machine, choose
from policyc.numerics.backends.emulate import apply_outer_scales
from policyc.numerics.backends.xla import _scale_inside
from policyc.numerics.gemm import GemmOptions, quantized_dot_general
from policyc.numerics.quantize import Axes, quantize
from policyc.numerics.quantize.values import block_values
from tests.numerics.test_gemm import MATMUL, RECIPES, normal, off, three

pytestmark = pytest.mark.usefixtures("quick_compile")

XLA = ("xla", "xla", "xla")
SUMS = 1e-6
SLOW = ("plain", "row", "mean", "four_over_six", "ms_eden")
SMALL = ("full", "mxfp8", "fp8", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW))


def both(name: str, dims: Any, weight: Any = "rhs") -> tuple[Any, Any]:
    f = partial(quantized_dot_general, dimension_numbers=dims, recipe=RECIPES[name])
    emulated, ours = GemmOptions(weight=weight), GemmOptions(weight=weight, backends=XLA)
    return partial(f, options=emulated), partial(f, options=ours)


def bound(name: str) -> float:
    """Hopper's 8-bit matrix units keep some 14 bits of a sum inside a chunk of the contraction."""
    return 2**-12 if name == "fp8" and jax.default_backend() == "gpu" else SUMS


def same(ours: Any, theirs: Any, most: float = SUMS) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert off(a, b) < most


@pytest.mark.parametrize("name", SMALL)
def test_three_products(name: str) -> None:
    """Sizes that are no multiple of a block, or of a tile, in any of the three."""
    x, w, dy = normal(40, 72), normal(72, 24, seed=1), normal(40, 24, seed=2)
    emulated, ours = both(name, MATMUL)
    same(jax.jit(partial(three, ours))(x, w, dy), jax.jit(partial(three, emulated))(x, w, dy), bound(name))


SHAPES = {
    "several free": ((2, 24, 32), (32, 4, 16), (((2,), (0,)), ((), ())), "rhs"),
    "several contracted": ((24, 2, 16), (2, 16, 48), (((1, 2), (0, 1)), ((), ())), "rhs"),
    "batch, weight left": ((16, 3, 32), (32, 16, 3), (((0,), (1,)), ((1,), (2,))), "lhs"),
    "no weight": ((4, 20, 16), (4, 12, 16), (((2,), (2,)), ((0,), (0,))), None),
}


@pytest.mark.parametrize(("left", "right", "dims", "weight"), SHAPES.values(), ids=SHAPES)
def test_fp8_quantizes_each_operand_once(left: Any, right: Any, dims: Any, weight: Any) -> None:
    """For all three products, and both orders of its codes hold the same."""
    x, w = normal(*left), normal(*right, seed=1)
    emulated, ours = both("fp8", dims, weight)
    dy = normal(*jax.eval_shape(ours, x, w).shape, seed=2)
    results = []
    for f in (emulated, ours):
        run = partial(three, f)
        assert str(jax.make_jaxpr(run)(x, w, dy)).count("fp8_quantize[") == 3
        results.append(jax.jit(run)(x, w, dy))
    same(*results, bound("fp8"))


@pytest.mark.parametrize(("left", "right", "dims", "weight"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ["mxfp8", pytest.param("full", marks=pytest.mark.slow)])
def test_any_dot_general(name: str, left: Any, right: Any, dims: Any, weight: Any) -> None:
    x, w = normal(*left), normal(*right, seed=1)
    emulated, ours = both(name, dims, weight)
    dy = normal(*jax.eval_shape(emulated, x, w).shape, seed=2)
    same(jax.jit(partial(three, ours))(x, w, dy), jax.jit(partial(three, emulated))(x, w, dy))


@pytest.mark.parametrize("chosen", ["fp8", pytest.param("full", marks=pytest.mark.slow)])
def test_under_transformations(chosen: str) -> None:
    """vmap over both operands or one, inside a scan, under remat: values and gradients."""

    def losses(f: Any) -> dict[str, Any]:
        def scanned(w: Any, x: Any) -> Any:
            body = jax.checkpoint(lambda h, w: (f(h, w), None))
            return jnp.sum(jax.lax.scan(body, x, w)[0] ** 2)

        return {
            "vmap both": lambda w, x: jnp.sum(jax.vmap(f)(x, w) ** 2),
            "vmap one": lambda w, x: jnp.sum(jax.vmap(f, (0, None))(x, w[0]) ** 2),
            "scan": lambda w, x: scanned(w[:1], x[0]),
        }

    x, w = normal(3, 16, 32), normal(3, 32, 32, seed=1)
    emulated, ours = (losses(f) for f in both(chosen, MATMUL))
    for name in ours:
        found, wanted = (jax.jit(jax.value_and_grad(f[name]))(w, x) for f in (ours, emulated))
        same(found, wanted, bound(chosen))


def test_nothing_is_laundered() -> None:
    """A NaN or an infinity in an operand leaves none of the product's results finite."""
    emulated, ours = both("plain", MATMUL)
    for bad in (jnp.nan, jnp.inf):
        x = normal(16, 32).at[3, 5].set(bad)
        assert not np.isfinite(ours(x, normal(32, 16))).any()
        assert not np.isfinite(emulated(x, normal(32, 16))).any()


# ---- choosing


def plan(policy: str, **execution: Any) -> policyc.Plan:
    def loss(p: Any, x: Any) -> Any:
        return jnp.sum(x @ p["mlp"])

    shapes = {"mlp": jax.ShapeDtypeStruct((64, 32), jnp.float32)}, jax.ShapeDtypeStruct((48, 64), jnp.float32)
    return policyc.plan(policy, loss, *shapes, **execution)


def shown(policy: str, **execution: Any) -> list[str]:
    (decision,) = plan(policy, **execution).decisions().values()
    return [str(runs) for runs in decision.lowerings]


@pytest.mark.parametrize(
    ("format", "backend", "target", "expected"),
    [
        ("nvfp4", "auto", "gb200", "xla, native"),
        ("nvfp4", "auto", "h200", "emulate, emulated"),
        ("nvfp4", "auto", None, "emulate, emulated"),
        ("nvfp4", "xla", None, "xla, emulated"),
        ("nvfp4", "emulate", "gb200", "emulate, emulated"),
        ("mxfp8", "auto", "b300", "xla, native"),
        ("mxfp4", "auto", "gb300", "emulate, emulated"),
        ("fp8", "auto", "h100", "xla, native"),
        ("bf16", "auto", "gb200", "-"),
    ],
)
def test_what_runs_where(format: str, backend: str, target: str | None, expected: str) -> None:
    assert shown(f"* -> {format}", backend=backend, target=target) == [expected] * 3


def test_products_are_chosen_apart() -> None:
    mixed = "* -> split(fprop=nvfp4, dgrad=mxfp4, wgrad=bf16)"
    assert shown(mixed, target="gb200") == ["xla, native", "emulate, emulated", "-"]


def test_what_is_emulated_says_why() -> None:
    ask = gemm_queries(plan("* -> nvfp4").sites.sites[0], make_recipe("mxfp4"))[0]
    assert (ask.gemm, ask.m, ask.n, ask.k) == (Gemm.FPROP, 48, 32, 64)
    obstacle = choose("auto", ask, Machine("gb200", frozenset({"mxfp4"}))).obstacle
    assert obstacle is not None
    assert obstacle.reason == "XLA has no block-scaled GEMM of mxfp4"
    obstacle = choose("auto", ask, Machine("cpu")).obstacle
    assert obstacle is not None
    assert obstacle.reason == "cpu does not multiply mxfp4"


def test_native_is_required() -> None:
    def loss(p: Any, x: Any) -> Any:
        return jnp.sum(x @ p["mlp"])

    f = policyc.apply("mlp @ fprop -> nvfp4", loss, require_native=True)
    with pytest.raises(policyc.PolicyError, match="fprop of 'mlp' would be emulated: cpu does not") as caught:
        jax.grad(f)({"mlp": normal(16, 16)}, normal(16, 16))
    assert caught.value.diagnostics[0].code == "not-native"


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="no backend named 'xlaa': did you mean 'xla'"):
        shown("* -> nvfp4", backend="xlaa")
    with pytest.raises(ValueError, match="no target named 'gb20': did you mean 'gb200'"):
        shown("* -> nvfp4", target="gb20")


@pytest.mark.parametrize(
    ("x_size", "w_size"),
    [(0, 0), (-100, 0), (-126, 20), (100, -110), (90, 30), (60, 80), (110, 120), (-120, -120)],
)
def test_scales_inside_a_product(x_size: int, w_size: int) -> None:
    """The scales of an 8-bit product are the same numbers inside it and after it, out of reach too. In fp32 here: a GPU
    rounds to bfloat16 what it has scaled in fp32.
    """
    fp8 = Treatment(format="fp8", element="e4m3")
    x = quantize(normal(16, 32) * 2.0**x_size, fp8, Axes(axis=-1))
    w = quantize(normal(32, 16, seed=1) * 2.0**w_size, fp8, Axes(axis=-2))
    sums = block_values(x, jnp.float32) @ block_values(w, jnp.float32)
    expected = apply_outer_scales(sums, x, w, MATMUL, 1)
    np.testing.assert_array_equal(_scale_inside(sums, x, w), expected)
    assert np.isinf(expected).any() == (x_size + w_size > 127)
    assert np.all(expected == 0) == (x_size + w_size < -149)
