"""The backward pass keeps quantized operands, which need less memory than those in bf16."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from policyc.numerics.gemm import GemmOptions, quantized_dot_general
from tests.support.gemms import FULL, MATMUL, RECIPES

LAYERS, TOKENS, D, FF = 8, 512, 256, 1024


def block(product: Any, h: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """The MLP of a Llama block: RMSNorm, SwiGLU."""

    def linear(x: jax.Array, name: str) -> jax.Array:
        return product(x, w[name].astype(jnp.bfloat16), (((2,), (0,)), ((), ())))

    def norm(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(x.dtype)

    x = norm(h)
    return h + linear(jax.nn.silu(linear(x, "gate")) * linear(x, "up"), "down")


def loss(weights: dict[str, jax.Array], h: jax.Array, product: Any) -> jax.Array:
    # Both recompute what is between the linears. The comparison is of what the linears keep.
    policy = jax.checkpoint_policies.save_only_these_names("quantization", "operand")
    body = jax.checkpoint(lambda h, w: (block(product, h, w), None), policy=policy)
    return jnp.mean(lax.scan(body, h, weights)[0].astype(jnp.float32) ** 2)


def bf16_product(x: jax.Array, w: jax.Array, dims: Any) -> jax.Array:
    """A bf16 product that keeps its operands, as a step without recomputation of GEMMs does."""
    from jax.ad_checkpoint import checkpoint_name

    return lax.dot_general(checkpoint_name(x, "operand"), checkpoint_name(w, "operand"), dims)


def test_a_linear_keeps_a_quarter_of_the_bytes_of_its_activation() -> None:
    """4.5 bits instead of 16 for each element, and some scalars. The values of the weight take 16 bits, as in bf16."""
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((512, 256), (256, 1024)))

    def residual_bytes(product: Any) -> int:
        residuals = jax.eval_shape(lambda x, w: jax.vjp(lambda x, w: product(x, w, MATMUL), x, w)[1], x, w)
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(residuals))

    ours, theirs = (
        residual_bytes(partial(quantized_dot_general, recipe=FULL)),
        residual_bytes(lax.dot_general),
    )
    weight = 2 * w.size
    assert (ours - weight) / (theirs - weight) == pytest.approx(4.5 / 16, rel=0.1)


def test_a_stack_of_layers_keeps_two_fifths_of_the_bytes() -> None:
    """What the forward scan stacks for the backward one: operands, and the residual stream, which stays in bf16."""
    shapes = {"gate": (D, FF), "up": (D, FF), "down": (FF, D)}
    weights = {n: jax.ShapeDtypeStruct((LAYERS, *s), jnp.float32) for n, s in shapes.items()}
    h = jax.ShapeDtypeStruct((4, TOKENS // 4, D), jnp.bfloat16)

    def kept_bytes(product: Any) -> int:
        step = jax.make_jaxpr(jax.grad(partial(loss, product=product)))(weights, h)
        forward, _ = (eqn for eqn in step.eqns if eqn.primitive.name == "scan")
        stacked = [v.aval for v in forward.outvars if v.aval.shape[:1] == (LAYERS,)]
        return sum(a.size * a.dtype.itemsize for a in stacked)

    ours, theirs = kept_bytes(partial(quantized_dot_general, recipe=FULL)), kept_bytes(bf16_product)
    assert ours < 0.4 * theirs


@pytest.mark.parametrize(("tokens", "saved"), [(128, (256, 3, 32, "uint32")), (130, (256, 3, 130, "uint8"))])
def test_fp8_codes_are_saved_as_wgrad_reads_them(tokens: int, saved: tuple[Any, ...]) -> None:
    """With the features first, as the quantizer wrote them, and as words if these are whole. The weight has no copy."""
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((3, tokens, 256), (256, 1024)))
    product = partial(
        quantized_dot_general,
        dimension_numbers=(((2,), (0,)), ((), ())),
        recipe=RECIPES["fp8"],
        options=GemmOptions(weight="rhs", backends=("xla", "xla", "xla")),
    )
    residuals = jax.eval_shape(lambda x, w: jax.vjp(product, x, w)[1], x, w)
    kept = {(*a.shape, a.dtype.name) for a in jax.tree.leaves(residuals) if a.size > 2}
    assert kept == {saved, (256, 1024, "uint8")}
