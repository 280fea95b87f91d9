"""Continues tokens with a trained Llama. Keys and values of earlier tokens are kept: each step computes one token."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from policyc.models.llama import model as llama
from policyc.models.llama.configs import ModelConfig

Cache = dict[str, jax.Array]  # keys and values: (layers, batch, positions, heads, head_dim)
Transform = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
      tokens: at most so many are drawn.
      temperature: 0 takes the most probable token.
      top_k: draws from so many of the most probable tokens; 0: from all.
      top_p: draws from the most probable tokens whose probabilities add up to this.
    """

    tokens: int = 128
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def make_cache(config: ModelConfig, positions: int) -> Cache:
    """An empty cache for one row of tokens."""
    shape = (config.layers, 1, positions, config.kv_heads, config.head_dim)
    return {name: jnp.zeros(shape, config.compute) for name in ("keys", "values")}


def forward(
    params: llama.Params,
    cache: Cache,
    tokens: jax.Array,
    start: jax.Array,
    last: jax.Array,
    config: ModelConfig,
) -> tuple[jax.Array, Cache]:
    """The logits after token number `last` of some tokens, which begin at position `start`; and the new cache.

    Tokens after number `last` are padding: logits do not depend on them, and later tokens replace them in the cache.
    """
    with jax.named_scope("embed"):
        x = llama.embed(params["embed"], tokens, config.compute, None)
    positions = start + jnp.arange(tokens.shape[1])
    rope = llama.rotary(config, positions)
    is_visible = jnp.arange(cache["keys"].shape[2]) <= positions[:, None]
    layer = partial(_block, rope=rope, start=start, is_visible=is_visible, config=config)
    if config.scan:
        with jax.named_scope("layers"):
            x, cache = lax.scan(lambda x, inputs: layer(x, *inputs), x, (params["layers"], cache))
    else:
        caches = []
        for index, layer_params in enumerate(params["layers"]):
            with jax.named_scope(f"layers_{index}"):
                x, part = layer(x, layer_params, {name: array[index] for name, array in cache.items()})
                caches.append(part)
        cache = jax.tree.map(lambda *parts: jnp.stack(parts), *caches)
    x = llama.rms_norm(lax.dynamic_slice_in_dim(x, last, 1, axis=1), params["norm"], config.norm_eps)
    logits = llama.linear(params, "lm_head", x)
    return logits[0, 0].astype(jnp.float32), cache


def _block(
    x: jax.Array, params: llama.Params, cache: Cache, *, rope: Any, start: jax.Array, is_visible: jax.Array,
    config: ModelConfig,
) -> tuple[jax.Array, Cache]:  # fmt: skip
    """As `model.block`, for one row, with the keys and values of earlier tokens."""
    with jax.named_scope("attention"):
        y = llama.rms_norm(x, params["attention_norm"], config.norm_eps)
        q, k, v = (
            llama.linear(params["attention"], f"{name}_proj", y).reshape(1, x.shape[1], -1, config.head_dim)
            for name in "qkv"
        )
        new = {"keys": llama.rotate(k, rope), "values": v}
        cache = {n: lax.dynamic_update_slice_in_dim(cache[n], new[n], start, axis=1) for n in new}
        with jax.named_scope("scores"):
            y = jax.nn.dot_product_attention(
                llama.rotate(q, rope), cache["keys"], cache["values"], mask=is_visible[None, None],
                implementation="xla",
            )  # fmt: skip
        x = x + llama.linear(params["attention"], "o_proj", y.reshape(1, x.shape[1], -1))
    with jax.named_scope("mlp"):
        y, _ = llama.mlp(params["mlp"], llama.rms_norm(x, params["mlp_norm"], config.norm_eps), config, None)
        return x + y, cache


def sample(logits: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Draws a token."""
    if sampling.temperature == 0:
        return jnp.argmax(logits)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.size:
        logits = jnp.where(logits < lax.top_k(logits, sampling.top_k)[0][-1], -jnp.inf, logits)
    if sampling.top_p < 1:
        ordered = jnp.sort(logits, descending=True)
        probabilities = jax.nn.softmax(ordered)
        before = jnp.cumsum(probabilities) - probabilities  # of all tokens that are more probable
        least = jnp.min(jnp.where(before < sampling.top_p, ordered, jnp.inf))
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits)


class Generator:
    """Draws tokens after prompts. All prompts use the same two compiled functions: for a prompt, and for a token.

    `transform` changes the function that computes the logits, as a policy does. Padding would then change the scales of
    whole tensors. So prompts are not padded to one length, and each length is compiled.
    """

    def __init__(
        self, params: llama.Params, config: ModelConfig, sampling: Sampling, longest: int,
        transform: Transform | None = None,
    ) -> None:  # fmt: skip
        self._params, self._config, self._sampling, self._longest = params, config, sampling, longest
        self._pads = transform is None
        compute: Callable[..., Any] = partial(forward, config=config)
        compute = compute if transform is None else transform(compute)

        def advance(params: Any, cache: Cache, tokens: Any, start: Any, last: Any, key: Any) -> Any:
            logits, cache = compute(params, cache, tokens, start, last)
            return sample(logits, jax.random.fold_in(key, start + last), sampling), cache

        self._advance = jax.jit(advance, donate_argnums=1)

    def generate(self, prompt: Sequence[int], number: int = 0) -> Iterator[int]:
        """Draws tokens, one after the other. `number` is that of the prompt: each has its own random numbers."""
        key = jax.random.fold_in(jax.random.key(self._sampling.seed), number)
        cache = make_cache(self._config, self._longest + self._sampling.tokens)
        padding = [0] * (self._longest - len(prompt)) if self._pads else []
        tokens, start, last = jnp.array([[*prompt, *padding]], jnp.int32), 0, len(prompt) - 1
        for _ in range(self._sampling.tokens):
            token, cache = self._advance(self._params, cache, tokens, start, last, key)
            yield int(token)
            tokens, start, last = token.reshape(1, 1).astype(jnp.int32), start + last + 1, 0
