"""An activation that several GEMMs of a block quantize alike is quantized once, to the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import policyc
from policyc.compiler.rewriting.rewrite import SiteRewriter
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs import transform
from tests.support.jaxpr_tools import without_dead_code
from tests.support.layered_models import GATED, X, assert_same_bits, gated_model

FP8, MXFP8, RANDOM = "* -> fp8", "* -> mxfp8", "* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)"
"""The codes of whole tensors serve fprop and wgrad. Blocks run along what each of the two contracts: one equation
quantizes to nvfp4 for both."""

CASES = [(FP8, "full", False), (MXFP8, "named", False), (RANDOM, "named", True), (RANDOM, "dots", False)]


@pytest.fixture
def quantize_separately(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A function that turns sharing off: from then on, every GEMM quantizes its own activation."""
    asked: list[None] = []

    def share_nothing(*_: Any) -> dict[Any, Any]:
        asked.append(None)
        return {}

    def switch() -> None:
        monkeypatch.setattr(SiteRewriter, "share", share_nothing)
        transform._transformed.clear()

    yield switch
    transform._transformed.clear()
    assert asked  # no cache had the result


def step(policy: str, remat: str, unrolled: bool) -> Callable[..., Any]:
    loss = policyc.apply(policy, gated_model(remat, unrolled))
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def activations_quantized(f: Callable[..., Any], *args: Any) -> int:
    """How many equations quantize an activation. Dead code does not count."""
    live = without_dead_code(jax.make_jaxpr(f)(*args))
    quantizers = [e for e in jaxprs.all_equations(live) if jaxprs.primitive_name(e).endswith("_quantize")]
    return sum(e.params["operands"][0].endswith(".lhs") for e in quantizers)


@pytest.mark.parametrize(("policy", "remat", "unrolled"), CASES)
def test_what_two_gemms_read_is_quantized_once(
    policy: str, remat: str, unrolled: bool, quantize_separately: Callable[[], None]
) -> None:
    shared = activations_quantized(step(policy, remat, unrolled), GATED, X[0])
    quantize_separately()
    separate = activations_quantized(step(policy, remat, unrolled), GATED, X[0])
    assert shared < separate
    if remat in ("none", "named"):
        # Of the three GEMMs of a block, two read the same activation.
        blocks = (2 if policy == MXFP8 else 1) * (2 if unrolled else 1)
        # In NVFP4, fprop reads values, which are not saved: what gate and up read is quantized again.
        again = (1, 2) if remat == "named" and policy != MXFP8 else (0, 0)
        assert (shared, separate) == ((2 + again[0]) * blocks, (3 + again[1]) * blocks)


@pytest.mark.slow
def test_sharing_changes_no_bit(quantize_separately: Callable[[], None]) -> None:
    shared = step(MXFP8, "named", unrolled=False)(GATED, X[0])
    quantize_separately()
    assert_same_bits(shared, step(MXFP8, "named", unrolled=False)(GATED, X[0]))


def test_what_is_treated_differently_is_quantized_separately() -> None:
    def quantized(policy: str) -> int:
        loss = policyc.apply(policy, gated_model("none"))
        return activations_quantized(jax.value_and_grad(loss), GATED, X[0])

    assert quantized("* -> mxfp8") == 2 * 2
    assert quantized("* -> mxfp8; gate -> fp8") == 2 + 1 + 2
    assert quantized("* -> mxfp8; gate -> keep") == 2 + 2
    # The codes of fprop are alike, those of wgrad are not.
    assert quantized("* -> mxfp8; gate @ wgrad -> bf16") == 2 + 1 + 2


def test_an_array_that_each_reader_constrains_alike_is_quantized_once() -> None:
    """Frameworks constrain the sharding of q's input, and then that of k's and v's. It is one array."""
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rows, columns = (NamedSharding(mesh, P(axis)) for axis in ("data", "model"))

    def quantized(*shardings: NamedSharding) -> tuple[int, Any]:
        def loss(p: Any, x: jax.Array) -> jax.Array:
            h = jnp.tanh(x.astype(jnp.bfloat16))
            q, k = (
                jax.lax.with_sharding_constraint(h, sharding) @ p["layers"][name][0].astype(h.dtype)
                for name, sharding in zip(("gate", "up"), shardings, strict=True)
            )
            return jnp.mean((q * k).astype(jnp.float32))

        gradient = jax.value_and_grad(policyc.apply(MXFP8, loss))
        return activations_quantized(gradient, GATED, X[0]), jax.jit(gradient)(GATED, X[0])

    (same, of_one), (different, of_two) = quantized(rows, rows), quantized(rows, columns)
    assert (same, different) == (2, 4)
    assert_same_bits(of_one, of_two)
