"""Brackets on a list of layers: the index is in the path, whatever one product reads of a member's weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import policyc

T, D, H, E, L = 8, 16, 24, 4, 3


def w(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


X = w(T, D)
EXPERTS = {"e1": w(E, D, H), "e2": w(E, H, D), "router": w(D, E)}
HEADS = {**{name: w(2, D, 8) for name in "qkv"}, "o": w(2, 8, D)}


def batched(h: Any, p: Any) -> Any:
    tokens = jnp.einsum("te,td->etd", jax.nn.softmax(h @ p["router"]), h)
    y = jnp.tanh(jnp.einsum("etd,edh->eth", tokens, p["e1"]))
    return h + jnp.einsum("eth,ehd->td", y, p["e2"])


def contracted(h: Any, p: Any) -> Any:
    return h + jnp.einsum("teh,ehd->td", jnp.tanh(jnp.einsum("td,edh->teh", h, p["e1"])), p["e2"])


def ragged(h: Any, p: Any) -> Any:
    sizes = jnp.full(E, T // E, jnp.int32)
    return h + lax.ragged_dot(jnp.tanh(lax.ragged_dot(h, p["e1"], sizes)), p["e2"], sizes)


def mapped(h: Any, p: Any) -> Any:
    return h + jax.vmap(lambda a, b: jnp.tanh(h @ a) @ b)(p["e1"], p["e2"]).sum(0)


def scanned(h: Any, p: Any) -> Any:
    def expert(y: Any, q: Any) -> Any:
        return y + jnp.tanh(h @ q[0]) @ q[1], None

    return h + lax.scan(expert, jnp.zeros((T, D)), (p["e1"], p["e2"]))[0]


def one_by_data(h: Any, p: Any) -> Any:
    chosen = jnp.argmax((h @ p["router"]).sum(0))
    return h + jnp.tanh(h @ p["e1"][chosen]) @ p["e2"][chosen]


def one_for_each_token(h: Any, p: Any) -> Any:
    chosen = jnp.argmax(h @ p["router"], -1)
    y = jnp.tanh(jnp.einsum("td,tdh->th", h, p["e1"][chosen]))
    return h + jnp.einsum("th,thd->td", y, p["e2"][chosen])


def heads(h: Any, p: Any) -> Any:
    q, k, v = (jnp.einsum("td,ndh->nth", h, p[name]) for name in "qkv")
    mixed = jnp.einsum("nts,nsh->nth", jax.nn.softmax(jnp.einsum("nth,nsh->nts", q, k)), v)
    return h + jnp.einsum("nth,nhd->td", mixed, p["o"])


def repeated_heads(h: Any, p: Any) -> Any:
    rows = jnp.stack([h, h])
    q, k, v = (jnp.einsum("ntd,ndh->nth", rows, p[name]) for name in "qkv")
    mixed = jnp.einsum("nts,nsh->nth", jax.nn.softmax(jnp.einsum("nth,nsh->nts", q, k)), v)
    return h + jnp.einsum("nth,nhd->td", mixed, p["o"])


def members(h: Any, p: Any) -> Any:
    q, k, v = (h @ p["qkv"][i] for i in range(3))
    return h + jax.nn.softmax(q @ k.T) @ v @ p["o"]


PROGRAMS: dict[str, tuple[Callable[[Any, Any], Any], Any]] = {
    "batched experts": (batched, EXPERTS),
    "contracted experts": (contracted, EXPERTS),
    "ragged experts": (ragged, EXPERTS),
    "experts in a vmap": (mapped, EXPERTS),
    "experts in a scan": (scanned, EXPERTS),
    "an expert by data": (one_by_data, EXPERTS),
    "an expert for each token": (one_for_each_token, EXPERTS),
    "heads": (heads, HEADS),
    "batched heads": (repeated_heads, HEADS),
    "members of one array": (members, {"qkv": w(3, D, D), "o": w(D, D)}),
}


def losses(layer: Callable[[Any, Any], Any], params: Any) -> dict[str, tuple[Any, Any]]:
    """A list of layers, and numbered names."""

    def loss(layers: Any, x: Any) -> Any:
        for p in layers:
            x = layer(x, p)
        return x.sum()

    return {
        "layers": (lambda p, x: loss(p["layers"], x), {"layers": [params] * L}),
        "block": (
            lambda p, x: loss([p[f"block_{i}"] for i in range(L)], x),
            {f"block_{i}": params for i in range(L)},
        ),
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_brackets_choose_members_of_a_list(name: str) -> None:
    for stack, (loss, params) in losses(*PROGRAMS[name]).items():
        plan = policyc.plan(f"* -> fp8; {stack}[1] -> keep", loss, params, X)
        decisions = plan.decisions()
        kept = [all(decisions[s.address, la].recipe is None for la in s.layers()) for s in plan.sites]
        third = len(kept) // L  # sites are in the order in which they run
        assert kept == [False] * third + [True] * third + [False] * third


@pytest.mark.parametrize("name", ["batched experts", "ragged experts", "an expert by data"])
def test_brackets_on_what_a_product_reads_at_once_are_refused(name: str) -> None:
    loss, params = losses(*PROGRAMS[name])["layers"]
    for selector in ("e1[0]", "layers[0].e1[0]", "layers[0].*[-1]"):
        with pytest.raises(policyc.PolicyError, match=r"cannot tell which layer of 'layers\[0\].e1'"):
            policyc.plan(f"* -> fp8; {selector} -> keep", loss, params, X)


def test_an_index_in_a_name_is_refused_like_one_in_brackets() -> None:
    def loss(p: Any, x: Any) -> Any:
        return jnp.tanh(x @ p["layers"][jnp.argmax(x)]).sum()

    for index in ("[1]", ".1", "_1"):
        with pytest.raises(policyc.PolicyError, match="cannot tell which layer of 'layers'"):
            policyc.plan(f"* -> fp8; layers{index} -> keep", loss, {"layers": w(3, D, D)}, X)
