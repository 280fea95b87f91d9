"""Losses that take layers from a stack by slices, indices and tables."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.support.stacks.base import STACK, L, each, layer, program, scan, take


@program(STACK)
def dynamic_slice_that_clamps(p, x):
    def body(h, i):
        return layer(take(each(lambda a: lax.dynamic_slice_in_dim(a, i, 2), p["layers"]), 1), h), None

    return lax.scan(body, x, jnp.arange(L))[0].sum()


@program(STACK)
def index_out_of_range(p, x):
    return lax.fori_loop(0, L + 2, lambda i, h: layer(take(p["layers"], i), h), x).sum()


@program(STACK)
def one_hot_selection(p, x):
    def body(h, i):
        chosen = each(lambda a: jnp.einsum("l,lij->ij", jax.nn.one_hot(i, L), a), p["layers"])
        return layer(chosen, h), None

    return lax.scan(body, x, jnp.arange(L))[0].sum()


@program(STACK)
def repeat_by_counts(p, x):
    counts = np.array([1, 0, 2, 1])
    return scan(each(lambda a: jnp.repeat(a, counts, axis=0, total_repeat_length=4), p["layers"]), x).sum()


@program(STACK)
def set_one_to_zero(p, x):
    return scan(each(lambda a: a.at[1].set(0.0), p["layers"]), x).sum()


@program(STACK)
def order_by_the_data(p, x):
    return scan(take(p["layers"], jnp.argsort(x[0, :L])), x).sum()


@program(STACK)
def index_by_a_float(p, x):
    return lax.fori_loop(
        0, L, lambda i, h: layer(take(p["layers"], jnp.floor(i * 0.7).astype(int)), h), x
    ).sum()


@program(STACK)
def index_from_a_cond(p, x):
    def body(i, h):
        j = lax.cond(i < 2, lambda: i + 2, lambda: i - 2)
        return layer(take(p["layers"], j), h)

    return lax.fori_loop(0, L, body, x).sum()


@program(STACK)
def gather_that_fills(p, x):
    return scan(
        each(lambda a: jnp.take(a, np.array([1, 7, 3]), axis=0, mode="fill", fill_value=0), p["layers"]), x
    ).sum()
