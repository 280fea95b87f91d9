"""Losses that change weights before they use them, or pass them through calls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.support.stacks.base import STACK, D, L, each, layer, program, scan, w


@program(STACK)
def moving_average_in_a_carry(p, x):
    def body(carry, q):
        h, mean = carry
        mean = jax.tree.map(lambda m, a: 0.5 * m + a, mean, q)
        return (layer(mean, h), mean), None

    zero = each(lambda a: jnp.zeros(a.shape[1:]), p["layers"])
    return lax.scan(body, (x, zero), p["layers"])[0][0].sum()


@program({"layers": {"up": jax.ShapeDtypeStruct((D, L, D), "float32"), "down": w(L)}}, True, up=(1,))
def layers_in_the_middle(p, x):
    def body(h, i):
        q = {"up": lax.dynamic_index_in_dim(p["layers"]["up"], i, 1, False), "down": p["layers"]["down"][i]}
        return layer(q, h), None

    return lax.scan(body, x, jnp.arange(L))[0].sum()


@program(STACK)
def product_of_two_weights(p, x):
    def body(h, q):
        return h @ (q["up"] @ q["down"]), None

    return lax.scan(body, x, p["layers"])[0].sum()


@program(STACK)
def scaled_by_the_other_layer(p, x):
    scale = jnp.linalg.norm(p["layers"]["up"][::-1], axis=(1, 2), keepdims=True)
    return scan({"up": p["layers"]["up"] * 2, "down": p["layers"]["down"]}, x * scale[0]).sum()


@program(STACK)
def reshaped_across_layers(p, x):
    """Each matrix contains rows of every layer."""
    return scan(each(lambda a: a.swapaxes(0, 1).reshape(L, D, D), p["layers"]), x).sum()


@program(STACK)
def two_layers_in_one_product(p, x):
    pairs = p["layers"]["up"].reshape(2, 2 * D, D)
    return lax.scan(lambda h, a: (jnp.concatenate([h, h], 1) @ a, None), x, pairs)[0].sum()


@program(STACK)
def heads_by_reshape(p, x):
    def body(h, q):
        a = q["up"].reshape(D, 2, D // 2)
        y = jnp.einsum("bi,ihk->bhk", h, a)
        return jnp.einsum("bhk,hkj->bj", y, q["down"].reshape(2, D // 2, D)), None

    return lax.scan(body, x, p["layers"], reverse=True)[0].sum()


@program(STACK)
def gradient_inside_the_loss(p, x):
    """A layer that is the gradient of an energy."""

    def body(h, q):
        return h - jax.grad(lambda h: jnp.sum(jnp.tanh(h @ q["up"]) ** 2))(h), None

    return lax.scan(body, x, p["layers"], reverse=True)[0].sum()


@program(STACK)
def reference_that_a_loop_fills(p, x):
    """The loop that reads the reference also writes to it, so an iteration reads what the one before wrote."""
    refs = each(lambda a: jax.new_ref(jnp.zeros((D, D))), p["layers"])

    def body(i, h):
        h = layer(each(lambda r: r[...], refs), h)
        for name, ref in refs.items():
            ref[...] = p["layers"][name][i]
        return h

    return lax.fori_loop(0, L, body, x).sum()


ROWS = np.array([3, 2, 1, 0, 5, 4])


@program(STACK)
def permuted_rows_in_a_carry(p, x):
    first = each(lambda a: a[1][ROWS], p["layers"])
    return lax.fori_loop(0, 2, lambda i, c: (layer(c[1], c[0]), each(lambda a: a * 2, c[1])), (x, first))[
        0
    ].sum()


@program(STACK)
def inverse(p, x):
    """JAX solves linear systems in a container that the compiler does not enter."""
    return (x @ jnp.linalg.inv(p["layers"]["up"][1])).sum() + scan(p["layers"], x).sum()
