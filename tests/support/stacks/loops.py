"""Losses with loops in loops, carried weights and indices, and branches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.support.stacks.base import STACK, D, L, each, layer, program, scan, take


@program(STACK)
def groups_by_two_counters(p, x):
    def outer(i, h):
        return lax.fori_loop(0, 2, lambda j, h: layer(take(p["layers"], 2 * j + i), h), h)

    return lax.fori_loop(0, 2, outer, x).sum()


@program(STACK)
def associative_scan_of_weights(p, x):
    products = lax.associative_scan(jnp.matmul, p["layers"]["up"])
    return (x @ products[-1]).sum()


@program(STACK)
def prefetched_weights_that_start_with_zeros(p, x):
    def body(carry, i):
        h, now = carry
        return (layer(now, h), take(p["layers"], i)), None

    zeros = each(lambda a: jnp.zeros((D, D)), p["layers"])
    return lax.scan(body, (x, zeros), jnp.arange(L))[0][0].sum()


@program(STACK)
def buffer_that_is_filled(p, x):
    """One loop copies the layers into a buffer, and another reads them."""

    def body(i, buffer):
        return jax.tree.map(lambda b, a: b.at[L - 1 - i].set(a[i]), buffer, p["layers"])

    filled = lax.fori_loop(0, L, body, each(lambda a: jnp.zeros(a.shape), p["layers"]))
    return scan(filled, x).sum()


@program(STACK)
def switch_that_clamps(p, x):
    def body(i, h):
        return lax.switch(i, [lambda: h @ p["layers"]["up"][0], lambda: h @ p["layers"]["down"][i]])

    return lax.fori_loop(0, L, body, x).sum()


@program(STACK)
def where_between_two_names(p, x):
    keep = (np.arange(L) % 2 == 0)[:, None, None]
    mixed = jnp.where(keep, p["layers"]["up"], p["layers"]["down"])
    return lax.scan(lambda h, a: (jnp.tanh(h @ a), None), x, mixed)[0].sum()


@program(STACK)
def accumulator_with_a_delay_line(p, x):
    """The accumulator is not a weight: after two iterations, data is added to it."""

    def body(carry, q):
        acc, b, c, h = carry
        h = layer(q, h)
        return (acc + b + q["up"][:2], c, h, h), acc @ q["down"]

    z = jnp.zeros((2, D))
    return lax.scan(body, (z, z, z, x), p["layers"])[1].sum()


@program(STACK)
def carried_index_of_8_bits_in_a_reversed_scan(p, x):
    def body(carry, i):
        h, index = carry
        return (layer(take(p["layers"], index % L), h), index + i), None

    steps = jnp.array([1, 1, 1, 1, 1, 1, 1, 7], "uint8")
    return lax.scan(body, (x, jnp.uint8(250)), steps, reverse=True)[0][0].sum()
