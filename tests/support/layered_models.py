"""Models with layers that are scanned or unrolled, with and without remat, and a step that accumulates gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WIDTH, HIDDEN, LAYERS, PARTS = 16, 32, 4, 2
Loss = Callable[[Any, jax.Array], jax.Array]

REMAT: dict[str, Callable[..., Any]] = {
    "none": lambda f: f,
    "full": jax.checkpoint,
    "named": lambda f: jax.checkpoint(
        f, policy=jax.checkpoint_policies.save_only_these_names("quantization")
    ),
    "dots": lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable),
}


def weight(*shape: int) -> jax.Array:
    values = np.random.default_rng(shape).standard_normal(shape) / np.sqrt(shape[-2])
    return jax.device_put(values.astype(np.float32))  # `jnp.asarray` would compile a program for every shape


def member(stack: Any, index: int) -> Any:
    """One layer of a stack."""
    return jax.tree.map(lambda w: w[index], stack)


STACKED = {
    "layers": {"up": weight(LAYERS, WIDTH, HIDDEN), "down": weight(LAYERS, HIDDEN, WIDTH)},
    "head": weight(WIDTH, WIDTH),
}
UNROLLED = {
    **STACKED,
    "layers": jax.device_put([member(jax.tree.map(np.asarray, STACKED["layers"]), i) for i in range(2)]),
}
GATE = np.asarray(weight(LAYERS, WIDTH, HIDDEN)) + np.float32(0.1)
GATED = {**STACKED, "layers": {**STACKED["layers"], "gate": jax.device_put(GATE)}}
X = weight(PARTS, 16, WIDTH)


def block(h: jax.Array, p: Any) -> jax.Array:
    up, down = (p[name].astype(h.dtype) for name in ("up", "down"))
    return h + jnp.tanh(h @ up) @ down


def model(remat: str) -> Loss:
    """Layers of two GEMMs and a head, in bfloat16. The layers are unrolled if the parameters hold them as a list."""
    layer = REMAT[remat](block)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        h = x.astype(jnp.bfloat16)
        if isinstance(p["layers"], list):
            for each in p["layers"]:
                h = layer(h, each)
        else:
            h, _ = lax.scan(lambda h, each: (layer(h, each), None), h, p["layers"])
        return jnp.mean(jnp.square((h @ p["head"].astype(h.dtype)).astype(jnp.float32)))

    return loss


def gated_model(remat: str, unrolled: bool = False) -> Loss:
    """Layers of three GEMMs, two of which share an activation. If unrolled, there are two layers."""

    def gated_block(h: jax.Array, p: Any) -> jax.Array:
        gate, up, down = (p[name].astype(h.dtype) for name in ("gate", "up", "down"))
        return h + (jnp.tanh(h @ gate) * (h @ up)) @ down

    layer = REMAT[remat](gated_block)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        h = x.astype(jnp.bfloat16)
        if unrolled:
            for index in range(2):
                h = layer(h, member(p["layers"], index))
        else:
            h, _ = lax.scan(lambda h, each: (layer(h, each), None), h, p["layers"])
        return jnp.mean(jnp.square(h.astype(jnp.float32)))

    return loss


def accumulated(loss: Loss) -> Callable[[Any, jax.Array], Any]:
    """A step that sums losses and gradients over the parts of a batch, in the usual way: with a scan."""

    def step(p: Any, parts: jax.Array) -> Any:
        def body(total: Any, part: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(p, part)), None

        zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)
        return lax.scan(body, zero, parts)[0]

    return step


def assert_same_bits(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
