"""Losses that stack lists, join stacks, pad them, or run several layers at once."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from tests.support.stacks.base import LIST, STACK, L, each, layer, program, scan, w


@program(LIST)
def list_switch_of_weights(p, x):
    def body(i, h):
        return layer(lax.switch(i, [lambda q=q: q for q in p["layers"]]), h)

    return lax.fori_loop(0, L, body, x).sum()


@program({"layers": {"qkv": w(L, 3)}})
def fused_projections(p, x):
    def body(h, q):
        return h + jnp.tanh(h @ q[0]) @ q[1] + h @ q[2], None

    return lax.scan(body, x, p["layers"]["qkv"])[0].sum()


@program(STACK)
def padded_between(p, x):
    spread = each(lambda a: lax.pad(a, 0.0, ((0, 0, 1), (0, 0, 0), (0, 0, 0))), p["layers"])
    return scan(spread, x).sum()
