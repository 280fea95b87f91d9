"""Losses that stack lists, join stacks, pad them, or run several layers at once."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from tests.support.stacks.base import LIST, STACK, D, L, each, layer, program, scan, take, w


@program(LIST)
def list_switch(p, x):
    branches = [partial(layer, q) for q in p["layers"]]
    return lax.fori_loop(0, L, lambda i, h: lax.switch(L - 1 - i, branches, h), x).sum()


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


@program(STACK)
def scan_over_vmapped_pairs(p, x):
    groups = each(lambda a: a.reshape(2, 2, D, D), p["layers"])
    hs = jnp.stack([x, x])
    return lax.scan(lambda h, g: (jax.vmap(layer)(g, h), None), hs, groups)[0].sum()


@program(STACK)
def vmap_over_indices(p, x):
    return jax.vmap(lambda i: layer(take(p["layers"], i), x))(jnp.array([3, 1])).sum()


@program(STACK)
def vmap_over_the_output_axis(p, x):
    def column(h, c):
        return h @ c

    return lax.scan(lambda h, a: (jax.vmap(column, (None, 1), 1)(h, a), None), x, p["layers"]["up"])[0].sum()


@program({"layers": {"up": w(L), "down": w(L)}, "extra": {"up": w(), "down": w()}})
def one_layer_replaced_by_cond(p, x):
    def body(i, h):
        return layer(lax.cond(i == 1, lambda: p["extra"], lambda: take(p["layers"], i)), h)

    return lax.fori_loop(0, L, body, x).sum()


@program({"a": {"w": w(3)}, "b": {"w": w(3)}})
def sum_of_two_stacks(p, x):
    return lax.scan(lambda h, q: (h @ q, None), x, p["a"]["w"] + p["b"]["w"][::-1])[0].sum()


@program(LIST)
def list_concatenated_along_rows(p, x):
    big = jnp.concatenate([q["up"] for q in p["layers"]], 0)
    return lax.fori_loop(0, L, lambda i, h: h @ lax.dynamic_slice_in_dim(big, (L - 1 - i) * D, D), x).sum()
