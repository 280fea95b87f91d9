"""What a training step keeps in memory: less than bf16 does, since quantized operands are kept and not
their sources.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from policyc.language.recipes import OPERAND_GROUPS, make_recipe
from policyc.numerics.gemm import quantized_dot_general

pytestmark = pytest.mark.usefixtures("quick_compile")  # what is kept is decided before code is written

LAYERS, TOKENS, D, FF, HEADS = 8, 512, 256, 1024, 4
FULL = make_recipe(
    "nvfp4",
    {"rht": OPERAND_GROUPS["wgrad"], "sr": OPERAND_GROUPS["grad"], "scale2d": OPERAND_GROUPS["weights"]},
)


def block(product: Any, h: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """A Llama block: RMSNorm, attention, RMSNorm, SwiGLU."""

    def linear(x: jax.Array, name: str) -> jax.Array:
        return product(x, w[name].astype(jnp.bfloat16), (((2,), (0,)), ((), ())))

    def norm(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(x.dtype)

    x = norm(h)
    q, k, v = (linear(x, n).reshape(*x.shape[:2], HEADS, -1) for n in ("q", "k", "v"))
    h = h + linear(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape), "o")
    x = norm(h)
    return h + linear(jax.nn.silu(linear(x, "gate")) * linear(x, "up"), "down")


def loss(weights: dict[str, jax.Array], h: jax.Array, product: Any) -> jax.Array:
    # What is inside attention and between the linears is recomputed in both; what the linears keep is
    # compared.
    policy = jax.checkpoint_policies.save_only_these_names("quantization", "operand")
    body = jax.checkpoint(lambda h, w: (block(product, h, w), None), policy=policy)
    return jnp.mean(lax.scan(body, h, weights)[0].astype(jnp.float32) ** 2)


def named(x: jax.Array, w: jax.Array, dims: Any) -> jax.Array:
    """bf16, with the operands of its linears kept: what a step without recomputation of GEMMs needs."""
    from jax.ad_checkpoint import checkpoint_name

    return lax.dot_general(checkpoint_name(x, "operand"), checkpoint_name(w, "operand"), dims)


def test_a_linear_keeps_a_quarter() -> None:
    """4.5 bits an element in place of 16, of both operands, and some scalars."""
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((512, 256), (256, 512)))
    dims = (((1,), (0,)), ((), ()))

    def kept(product: Any) -> int:
        saved = jax.eval_shape(lambda x, w: jax.vjp(lambda x, w: product(x, w, dims), x, w)[1], x, w)
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(saved))

    ours, theirs = kept(partial(quantized_dot_general, recipe=FULL)), kept(lax.dot_general)
    assert ours / theirs == pytest.approx(4.5 / 16, rel=0.1)


@pytest.mark.slow
def test_a_step_needs_less_memory_than_bf16() -> None:
    shapes = dict.fromkeys("qkvo", (D, D)) | {"gate": (D, FF), "up": (D, FF), "down": (FF, D)}
    weights = {n: jax.ShapeDtypeStruct((LAYERS, *s), jnp.float32) for n, s in shapes.items()}
    h = jax.ShapeDtypeStruct((4, TOKENS // 4, D), jnp.bfloat16)

    def temporary(product: Any) -> int:
        step = jax.jit(jax.value_and_grad(partial(loss, product=product)))
        return int(step.lower(weights, h).compile().memory_analysis().temp_size_in_bytes)

    ours = temporary(partial(quantized_dot_general, recipe=FULL))
    theirs = temporary(named)
    print(f"temporary bytes: bf16 {theirs}, nvfp4 {ours}, ratio {ours / theirs:.2f}")
    assert ours < 0.8 * theirs
