"""Kinds and blocks of language models that are written with the modules of each framework. Nothing is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from models.llama import model
from models.llama.configs import ModelConfig
from policyc.compiler.kinds.kind_names import contradicting_kind
from tests.compiler.test_kinds import kind_and_blocks
from tests.support.jaxpr_tools import find_sites
from tests.support.kind_programs import (
    BLOCK,
    HEADS,
    HIDDEN,
    TOKEN_IDS,
    VOCABULARY,
    WIDTH,
    cross_entropy,
    outside,
    scanned,
    unrolled,
)

BLOCKS = 3
Model = tuple[Callable[[Any], Any], Any]
"""A loss, and the shapes of its parameters."""


def linen(*, is_scanned: bool = False) -> Model:
    nn = pytest.importorskip("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any = None) -> Any:
            x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x))
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(HIDDEN)(nn.LayerNorm()(x))))
            return (x, None) if is_scanned else x

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            x = nn.Embed(VOCABULARY, WIDTH)(tokens)
            if is_scanned:
                stack = nn.scan(Block, {"params": 0}, split_rngs={"params": True}, length=BLOCKS)
                x, _ = stack()(x, None)
            else:
                for _ in range(BLOCKS):
                    x = Block()(x)
            return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))

    model = Transformer()
    params = jax.eval_shape(model.init, jax.random.key(0), TOKEN_IDS)
    return lambda p: cross_entropy(model.apply(p, TOKEN_IDS)), params


def nnx_model() -> Model:
    nnx = pytest.importorskip("flax.nnx")

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.one, self.two = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
            self.mixer = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
            self.a = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
            self.b = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = x + self.mixer(self.one(x))
            return x + self.b(jax.nn.relu(self.a(self.two(x))))

    class Transformer(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.table = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
            self.layers = nnx.List([Block(rngs) for _ in range(BLOCKS)])
            self.out = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

        def __call__(self, tokens: Any) -> Any:
            x = self.table(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.out(x)

    graph, params, rest = nnx.split(nnx.eval_shape(lambda: Transformer(nnx.Rngs(0))), nnx.Param, ...)
    return lambda p: cross_entropy(nnx.merge(graph, p, rest)(TOKEN_IDS)), params


def equinox() -> Model:
    eqx = pytest.importorskip("equinox")

    class Block(eqx.Module):  # type: ignore[misc, name-defined]
        mixer: Any
        norm: Any
        a: Any
        b: Any

        def __init__(self, key: Any) -> None:
            self.mixer = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=key)
            self.norm = eqx.nn.LayerNorm(WIDTH)
            self.a, self.b = (eqx.nn.Linear(m, n, key=key) for m, n in ((WIDTH, HIDDEN), (HIDDEN, WIDTH)))

        def __call__(self, x: Any) -> Any:
            h = jax.vmap(self.norm)(x)
            x = x + self.mixer(h, h, h)
            return x + jax.vmap(lambda t: self.b(jax.nn.gelu(self.a(t))))(x)

    def make(key: Any) -> Any:
        return {
            "table": eqx.nn.Embedding(VOCABULARY, WIDTH, key=key),
            "layers": [Block(key) for _ in range(BLOCKS)],
            "out": eqx.nn.Linear(WIDTH, VOCABULARY, key=key),
        }

    params, rest = eqx.partition(
        eqx.filter_eval_shape(make, jax.random.key(0)), lambda x: isinstance(x, jax.ShapeDtypeStruct)
    )

    def loss(p: Any) -> Any:
        model = eqx.combine(p, rest)

        def logits(tokens: Any) -> Any:
            x = jax.vmap(model["table"])(tokens)
            for layer in model["layers"]:
                x = layer(x)
            return jax.vmap(model["out"])(x)

        return cross_entropy(jax.vmap(logits)(TOKEN_IDS))

    return loss, params


def haiku() -> Model:
    hk = pytest.importorskip("haiku")

    def forward(tokens: Any) -> Any:
        x = hk.Embed(VOCABULARY, WIDTH)(tokens)
        for _ in range(BLOCKS):
            h = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
            x = x + hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=hk.initializers.TruncatedNormal())(
                h, h, h
            )
            x = x + hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(HIDDEN)(x)))
        return hk.Linear(VOCABULARY)(x)

    model = hk.without_apply_rng(hk.transform(forward))
    params = jax.eval_shape(model.init, jax.random.key(0), TOKEN_IDS)
    return lambda p: cross_entropy(model.apply(p, TOKEN_IDS)), params


@pytest.mark.parametrize("make", [linen, nnx_model, equinox, haiku])
def test_unrolled_blocks(make: Callable[[], Model]) -> None:
    loss, params = make()
    sites = find_sites(loss, params)
    assert [kind_and_blocks(site) for site in sites] == [*unrolled(BLOCKS, *BLOCK), *outside("head")]
    assert not any("its names say so" in site.kind.reason for site in sites)


def test_scanned_blocks_of_linen() -> None:
    loss, params = linen(is_scanned=True)
    sites = find_sites(loss, params)
    assert [kind_and_blocks(site) for site in sites] == [*scanned(BLOCKS, *BLOCK), *outside("head")]
    assert not any("its names say so" in site.kind.reason for site in sites)


LLAMA_KINDS = {
    "q_proj": "attention", "k_proj": "attention", "v_proj": "attention", "o_proj": "attention", "lm_head": "head",
    "embed": "embedding", "router": "router", "gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp",
}  # fmt: skip


@pytest.mark.parametrize(
    "changes", [{"loss_chunks": 4, "scan": False}, {"remat": "full"}, {"experts": 4}], ids=str
)
def test_the_bundled_llama(changes: dict[str, Any]) -> None:
    config = ModelConfig(layers=3, **changes)
    params = jax.eval_shape(lambda: model.init_params(jax.random.key(0), config))
    batch = {name: jax.ShapeDtypeStruct((2, 16), jnp.int32) for name in ("tokens", "targets", "mask")}
    sites = find_sites(lambda p, b: model.loss(p, b, config)[0], params, batch)
    layers: dict[str, list[int]] = {}
    for site in sites:
        if site.weight is None:
            assert site.kind.name == "scores"
        else:
            name = str(site.parameters[0].path[-1])
            assert site.kind.name == ("experts" if "experts" in site.name else LLAMA_KINDS[name])
            assert not contradicting_kind(site)
            numbers = [site.attributes(layer)["layer"] for layer in site.layers()]
            layers.setdefault(name, []).extend(numbers)
    assert layers.pop("lm_head") == [None]
    assert layers.keys() == {*LLAMA_KINDS} - {"lm_head", "embed"} - (set() if config.experts else {"router"})
    assert all(numbers == [0, 1, 2] for numbers in layers.values())
