"""Losses that stack lists, join stacks, pad them, or run several layers at once."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from tests.support.stacks.base import LIST, STACK, D, L, each, layer, program, scan, take, w


@program(LIST)
def list_with_layers_last(p, x):
    stack = jax.tree.map(lambda *a: jnp.stack(a, -1), *p["layers"])
    return lax.fori_loop(0, L, lambda i, h: layer(each(lambda a: a[..., i], stack), h), x).sum()


@program(LIST)
def list_switch(p, x):
    branches = [partial(layer, q) for q in p["layers"]]
    return lax.fori_loop(0, L, lambda i, h: lax.switch(L - 1 - i, branches, h), x).sum()


@program(LIST)
def list_switch_of_weights(p, x):
    def body(i, h):
        return layer(lax.switch(i, [lambda q=q: q for q in p["layers"]]), h)

    return lax.fori_loop(0, L, body, x).sum()


@program(LIST)
def list_select_n(p, x):
    def body(i, h):
        chosen = jax.tree.map(lambda a, b: lax.select_n(i % 2 == 1, a, b), p["layers"][0], p["layers"][3])
        return layer(chosen, h)

    return lax.fori_loop(0, 3, body, x).sum()


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


@program({"members": {"up": w(3, L), "down": w(3, L)}}, up=(0, 1), down=(0, 1))
def ensemble_of_scans(p, x):
    return jax.vmap(scan, (0, None))(p["members"], x).sum()


@program(STACK)
def vmap_over_indices(p, x):
    return jax.vmap(lambda i: layer(take(p["layers"], i), x))(jnp.array([3, 1])).sum()


@program(STACK)
def pipeline_by_rolls(p, x):
    """Stages that run at once, each on the microbatch of its turn."""
    stages = each(lambda a: a.reshape(2, 2, D, D), p["layers"])

    def step(state, _):
        state = jax.vmap(scan)(stages, state)
        return jnp.roll(state, 1, axis=0), None

    return lax.scan(step, jnp.stack([x, x]), length=3)[0].sum()


@program(STACK)
def einsum_over_layers(p, x):
    return (
        jnp.einsum("bi,lij->lbj", x, p["layers"]["up"]).sum()
        + jnp.einsum("bi,lij->bj", x, p["layers"]["down"]).sum()
    )


@program(STACK)
def vmap_over_the_output_axis(p, x):
    def column(h, c):
        return h @ c

    return lax.scan(lambda h, a: (jax.vmap(column, (None, 1), 1)(h, a), None), x, p["layers"]["up"])[0].sum()


@program({"layers": {"up": w(L), "down": w(L)}, "extra": {"up": w(), "down": w()}})
def one_layer_replaced(p, x):
    def body(i, h):
        q = jax.tree.map(lambda a, b: jnp.where(i == 1, b, a[i]), p["layers"], p["extra"])
        return layer(q, h)

    return lax.fori_loop(0, L, body, x).sum()


@program({"layers": {"up": w(L), "down": w(L)}, "extra": {"up": w(), "down": w()}})
def one_layer_replaced_by_cond(p, x):
    def body(i, h):
        return layer(lax.cond(i == 1, lambda: p["extra"], lambda: take(p["layers"], i)), h)

    return lax.fori_loop(0, L, body, x).sum()


@program({"layers": {"up": w(L), "down": w(L)}, "extra": {"up": w(), "down": w()}})
def one_layer_replaced_by_set(p, x):
    q = jax.tree.map(lambda a, b: a.at[1].set(b), p["layers"], p["extra"])
    return scan(q, x).sum()


@program({"a": {"w": w(3)}, "b": {"w": w(3)}})
def sum_of_two_stacks(p, x):
    return lax.scan(lambda h, q: (h @ q, None), x, p["a"]["w"] + p["b"]["w"][::-1])[0].sum()


@program({"a": {"w": w(3)}, "b": {"w": w(3)}})
def two_stacks_with_select_by_parity(p, x):
    def body(i, h):
        return h @ jnp.where(i % 2 == 0, p["a"]["w"][i // 2], p["b"]["w"][2 - i // 2])

    return lax.fori_loop(0, 6, body, x).sum()


@program(LIST)
def list_concatenated_along_rows(p, x):
    big = jnp.concatenate([q["up"] for q in p["layers"]], 0)
    return lax.fori_loop(0, L, lambda i, h: h @ lax.dynamic_slice_in_dim(big, (L - 1 - i) * D, D), x).sum()


@program(LIST)
def list_concatenated_along_columns(p, x):
    big = jnp.concatenate([q["up"] for q in p["layers"]], 1)
    return sum(jnp.split(x @ big, L, axis=1)).sum()
