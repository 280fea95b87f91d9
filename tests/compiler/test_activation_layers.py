"""Products of two activations have the layer that they are computed in, whatever their operands come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import policyc
from policyc.compiler.tables.plan_tables import summary

T, D, L, E = 8, 16, 4, 4
X = jax.ShapeDtypeStruct((T, D), "float32")

Body = Callable[[Any, Any], Any]


def w(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape or (D, D), "float32")


def stack(names: str) -> Any:
    return {"layers": {name: w(L, D, D) for name in names}}


def scanned(body: Body, **options: Any) -> Body:
    return lambda p, x: lax.scan(lambda h, q: (body(h, q), None), x, p["layers"], **options)[0].sum()


def unrolled(body: Body) -> Body:
    def loss(p: Any, x: Any) -> Any:
        for q in p["layers"]:
            x = body(x, q)
        return x.sum()

    return loss


# ---- layers: (activations, weights) -> activations


def project(h: Any, p: Any, names: str = "qkv") -> tuple[Any, ...]:
    return tuple(h @ p[name] for name in names)


def softmax_of_blocks(h: Any, p: Any) -> Any:
    q, k, v = project(h, p)

    def block(carry: Any, kv: Any) -> Any:
        top, total, out = carry
        scores = q @ kv[0].T
        new = jnp.maximum(top, scores.max(-1))
        weights, scale = jnp.exp(scores - new[:, None]), jnp.exp(top - new)
        return (new, total * scale + weights.sum(-1), out * scale[:, None] + weights @ kv[1]), None

    init = (jnp.full(T, -1e30), jnp.zeros(T), jnp.zeros((T, D)))
    (_, total, out), _ = lax.scan(block, init, (k.reshape(2, -1, D), v.reshape(2, -1, D)))
    return h + out / total[:, None] @ p["o"]


def softmax_by_counter(h: Any, p: Any) -> Any:
    q, k, v = project(h, p)

    def block(i: Any, carry: Any) -> Any:
        top, out = carry
        scores = q @ lax.dynamic_slice_in_dim(k, 4 * i, 4).T
        new = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp(scores - new[:, None]) @ lax.dynamic_slice_in_dim(v, 4 * i, 4)
        return new, out * jnp.exp(top - new)[:, None] + weights

    return h + lax.fori_loop(0, 2, block, (jnp.full(T, -1e30), jnp.zeros((T, D))))[1] @ p["o"]


def linear_attention(h: Any, p: Any) -> Any:
    def chunk(state: Any, qkv: Any) -> Any:
        q, k, v = qkv
        return state + k.T @ v, q @ state + jnp.tril(q @ k.T) @ v

    chunks = tuple(a.reshape(2, -1, D) for a in project(h, p))
    return h + lax.scan(chunk, jnp.zeros((D, D)), chunks)[1].reshape(T, D) @ p["o"]


def delta_rule(h: Any, p: Any) -> Any:
    def token(state: Any, qkvg: Any) -> Any:
        q, k, v, gate = qkvg
        state = state * jax.nn.sigmoid(gate)[:, None]
        return state + jnp.outer(k, v - k @ state), q[None] @ state

    return h + lax.scan(token, jnp.zeros((D, D)), project(h, p, "qkvo"))[1].reshape(T, D) @ p["o"]


def mixture_of_one_hots(h: Any, p: Any) -> Any:
    chosen = lax.stop_gradient(jax.nn.one_hot(jnp.argmax(h @ p["router"], -1), E))
    slot = ((jnp.cumsum(chosen, 0) - 1) * chosen).sum(-1).astype(int)
    dispatch = chosen[:, :, None] * jax.nn.one_hot(slot, 3)[:, None, :]
    of_experts = jnp.einsum("tec,td->ecd", dispatch, h)
    y = jax.nn.relu(jnp.einsum("ecd,edf->ecf", of_experts, p["up"]))
    return h + jnp.einsum("tec,ecd->td", dispatch, jnp.einsum("ecf,efd->ecd", y, p["down"]))


def expert_choice(h: Any, p: Any) -> Any:
    gate, chosen = lax.top_k(jax.nn.softmax(h @ p["router"]).T, 3)
    dispatch = lax.stop_gradient(jax.nn.one_hot(chosen, T))
    y = jnp.einsum("ecd,edf->ecf", jnp.einsum("ect,td->ecd", dispatch, h), p["up"])
    return h + jnp.einsum("ect,ec,ecd->td", dispatch, gate, y)


def gram(h: Any, p: Any) -> Any:
    return h + jax.nn.softmax(h @ h.T) @ h @ p["o"] + h @ p["q"]


def ragged_product_of_data(h: Any, p: Any) -> Any:
    made = jnp.einsum("etd,tf->edf", (h @ p["q"]).reshape(2, T // 2, D), h[: T // 2])
    return h + lax.ragged_dot(h, made, jnp.array([3, 5], jnp.int32)) @ p["o"]


def heads_one_by_one(h: Any, p: Any) -> Any:
    heads = tuple(a.reshape(T, 2, D // 2).swapaxes(0, 1) for a in project(h, p))
    out = lax.map(lambda c: jax.nn.softmax(c[0] @ c[1].T) @ c[2], heads)
    return h + out.swapaxes(0, 1).reshape(T, D) @ p["o"]


def refined_in_a_while(h: Any, p: Any) -> Any:
    q, k, v = project(h, p)
    init = (0, lax.stop_gradient(q))
    refined = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ k.T @ v)), init)
    return h + refined[1] @ p["o"]


# ---- whole losses


def keys_of_the_encoder(p: Any, x: Any) -> Any:
    k, v = x @ p["encoder"]["k"], x @ p["encoder"]["v"]
    return scanned(lambda h, q: h + jax.nn.softmax(h @ q["q"] @ k.T) @ v @ q["o"])(p, x)


def keys_of_the_first_layer(p: Any, x: Any) -> Any:
    k, v = x @ p["layers"]["k"][0], x @ p["layers"]["v"][0]
    return scanned(lambda h, q: h + jax.nn.softmax(h @ q["q"] @ k.T) @ v @ q["o"])(p, x)


def keys_of_the_layer_before(p: Any, x: Any) -> Any:
    def body(carry: Any, q: Any) -> Any:
        h, before = carry
        return (h + jax.nn.softmax(h @ q["q"] @ before.T) @ (h @ q["v"]) @ q["o"], h @ q["k"]), None

    return lax.scan(body, (x, jnp.zeros((T, D))), p["layers"])[0][0].sum()


def state_that_layers_share(p: Any, x: Any) -> Any:
    def body(carry: Any, q: Any) -> Any:
        (h, state), (a, k, v) = carry, project(carry[0], q)
        state = state + k.T @ v
        return (h + a @ state @ q["o"], state), None

    return lax.scan(body, (x, jnp.zeros((D, D))), p["layers"])[0][0].sum()


def projections_that_layers_share(p: Any, x: Any) -> Any:
    def body(h: Any, q: Any) -> Any:
        a, k, v = project(h, p["shared"])
        return h + jax.nn.softmax(a @ k.T) @ v @ q["o"]

    return scanned(body)(p, x)


def memory_of_segments(p: Any, x: Any) -> Any:
    def segment(memory: Any, h: Any) -> Any:
        def body(h: Any, layer: Any) -> Any:
            q, past = layer
            seen = jnp.concatenate([past, h])
            return h + jax.nn.softmax(h @ q["q"] @ (seen @ q["k"]).T) @ (seen @ q["v"]) @ q["o"], h

        h, memory = lax.scan(body, h, (p["layers"], memory))
        return memory, h

    return lax.scan(segment, jnp.zeros((L, T, D)), jnp.stack([x, x]))[1].sum()


def microbatches(p: Any, x: Any) -> Any:
    step = scanned(jax.checkpoint(softmax_of_blocks))
    return lax.scan(lambda total, h: (total + step(p, h), None), 0.0, jnp.stack([x, x]))[0]


def layers_by_counter(p: Any, x: Any) -> Any:
    return lax.fori_loop(0, L, lambda i, h: gram(h, jax.tree.map(lambda a: a[i], p["layers"])), x).sum()


def stacked_list(p: Any, x: Any) -> Any:
    return scanned(gram)({"layers": jax.tree.map(lambda *a: jnp.stack(a), *p["layers"])}, x)


def backwards(p: Any, x: Any) -> Any:
    return scanned(gram)({"layers": jax.tree.map(lambda a: a[::-1], p["layers"])}, x)


def in_some_layers(p: Any, x: Any) -> Any:
    def body(h: Any, layer: Any) -> Any:
        i, q = layer
        return lax.cond(i % 2 == 1, lambda: gram(h, q), lambda: h @ q["o"]), None

    return lax.scan(body, x, (jnp.arange(L), p["layers"]))[0].sum()


ATTENTION = stack("qkvo")
ROUTED = {"layers": {"router": w(L, D, E), "up": w(L, E, D, D), "down": w(L, E, D, D)}}
LIST = {"layers": [{name: w() for name in "qkvo"} for _ in range(L)]}

PROGRAMS: dict[str, tuple[Body, Any]] = {
    "online softmax": (scanned(softmax_of_blocks), ATTENTION),
    "online softmax, unrolled": (unrolled(softmax_of_blocks), LIST),
    "online softmax by a counter": (scanned(jax.checkpoint(softmax_by_counter)), ATTENTION),
    "online softmax of a batch": (
        lambda p, x: scanned(jax.vmap(softmax_of_blocks, (0, None)))(p, jnp.stack([x, x])),
        ATTENTION,
    ),
    "linear attention": (scanned(linear_attention), ATTENTION),
    "linear attention, unrolled": (unrolled(jax.jit(linear_attention)), LIST),
    "delta rule": (scanned(delta_rule), ATTENTION),
    "mixture of one-hots": (scanned(mixture_of_one_hots), ROUTED),
    "mixture in a scope of another name": (
        scanned(jax.named_scope("mix")(jax.checkpoint(mixture_of_one_hots))),
        ROUTED,
    ),
    "expert choice": (scanned(expert_choice), ROUTED),
    "products of the residual stream": (scanned(gram), ATTENTION),
    "a reversed loop": (scanned(gram, reverse=True), ATTENTION),
    "weights without a GEMM": (
        scanned(lambda h, q: h + jax.nn.softmax(h @ h.T) @ h * q["gain"] + q["bias"]),
        {"layers": {"gain": w(L, D), "bias": w(L, D)}},
    ),
    "ragged product of data": (scanned(ragged_product_of_data), ATTENTION),
    "heads one by one": (scanned(heads_one_by_one), ATTENTION),
    "a while in a layer": (scanned(refined_in_a_while), ATTENTION),
    "keys of the encoder": (keys_of_the_encoder, {"encoder": {"k": w(), "v": w()}, **stack("qo")}),
    "keys of the first layer": (keys_of_the_first_layer, ATTENTION),
    "keys of the layer before": (keys_of_the_layer_before, ATTENTION),
    "a state that layers share": (state_that_layers_share, ATTENTION),
    "projections that layers share": (
        projections_that_layers_share,
        {"shared": {name: w() for name in "qkv"}, **stack("om")},
    ),
    "memory of segments": (memory_of_segments, ATTENTION),
    "microbatches": (microbatches, ATTENTION),
    "layers by a counter": (layers_by_counter, ATTENTION),
    "a stacked list": (stacked_list, LIST),
    "a list that runs backwards": (backwards, ATTENTION),
    "in every second layer": (in_some_layers, ATTENTION),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_product_of_activations_has_the_layer_that_it_is_in(name: str) -> None:
    """A rule for the last layer keeps each product there, and there alone."""
    loss, params = PROGRAMS[name]
    plan = policyc.plan("* -> fp8; layers[-1:] -> keep", loss, params, X)
    decisions = plan.decisions()
    products = [site for site in plan.sites if site.weight is None]
    for number, site in enumerate(products):
        kept = [la for la in site.layers() if decisions[site.address, la].recipe is None]
        if site.stacks:  # a scan: its last iteration, or the first one of a reversed stack
            last = 0 if loss is backwards else L - 1
            assert kept == [la for la in site.layers() if la[-1] == last]
        else:
            assert len(kept) == (number >= len(products) * (L - 1) // L)
    assert "has no layer" not in summary(plan)


def prefetched(p: Any, x: Any) -> Any:
    def body(carry: Any, i: Any) -> Any:
        h, now = carry
        return (gram(h, now), jax.tree.map(lambda a: a[(i + 1) % L], p["layers"])), None

    first = jax.tree.map(lambda a: a[0], p["layers"])
    return lax.scan(body, (x, first), jnp.arange(L))[0][0].sum()


def two_layers_in_an_iteration(p: Any, x: Any) -> Any:
    halves = tuple(jax.tree.map(lambda a, i=i: a[i::2], p["layers"]) for i in (0, 1))
    return lax.scan(lambda h, pair: (gram(gram(h, pair[0]), pair[1]), None), x, halves)[0].sum()


def layers_without_a_name(p: Any, x: Any) -> Any:
    return scanned(gram)({"layers": p}, x)


def first_times_last(p: Any, x: Any) -> Any:
    results = lax.scan(lambda h, q: (h + h @ q["o"] @ q["q"], h @ q["v"]), x, p["layers"])[1]
    return (results[0] @ results[-1].T).sum()


UNKNOWN = {
    "two layers in an iteration": (two_layers_in_an_iteration, ATTENTION, "reads several layers"),
    "layers without a name": (
        layers_without_a_name,
        ATTENTION["layers"],
        "the weights of its layer have no name in common",
    ),
    "the first layer times the last": (first_times_last, ATTENTION, "the weights of one layer"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_layer_of_a_product_of_activations_is_reported(name: str) -> None:
    loss, params, reason = UNKNOWN[name]
    with pytest.warns(UserWarning, match=f"has no layer, so no index matches it: .*{reason}"):
        plan = policyc.plan("* -> fp8; {layers,o}[-1:] -> keep", loss, params, X)
    assert reason in summary(plan)
    with pytest.warns(UserWarning, match="has no layer"):
        jax.eval_shape(policyc.apply(plan.policy, loss), params, X)


def test_products_around_prefetched_weights_are_refused_with_them() -> None:
    with pytest.raises(policyc.PolicyError, match="the loop around it carries it"):
        policyc.plan("* -> fp8; layers[-1:] -> keep", prefetched, ATTENTION, X)
