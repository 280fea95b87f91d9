"""Continues texts with the model of a run. Keys and values are cached, so that each step computes one token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from policyc.models.llama import configs, data, partition, train_step
from policyc.models.llama import model as llama
from policyc.models.llama.checkpoints import DamagedCheckpointError, read_checkpoint, saved_steps
from policyc.models.llama.configs import ConfigError, ModelConfig, RunConfig

Config = TypeVar("Config", ModelConfig, RunConfig)
Cache = dict[str, jax.Array]  # keys and values: (layers, batch, positions, heads, head_dim)


# ---- the model of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A trained model, loaded from its run.

    Attributes:
      params: in the compute dtype, except norms and routers, which are float32.
      tokenizer: the tokenizer; None: tokens are bytes.
      end: the token that ends a document.
      positions: the length of the sequences that it was trained on.
      name: for display: the folder of its run, its step and its policy.
    """

    config: ModelConfig
    params: llama.Params
    tokenizer: Any = None
    end: int = data.END
    positions: int
    name: str

    def encode(self, text: bytes) -> list[int]:
        """The tokens of a text. An empty text gives the end token, after which a document begins."""
        if self.tokenizer is None:
            return list(text) or [self.end]
        ids = self.tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False).ids
        return list(ids) or [self.end]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens. If tokens are bytes, `END` and larger tokens have no text."""
        if self.tokenizer is None:
            return bytes(token for token in tokens if token < data.END).decode("utf-8", "replace")
        return str(self.tokenizer.decode(list(tokens)))


def load_trained(folder: Path) -> TrainedModel:
    """Loads the model of a run from its last checkpoint."""
    try:
        about = configs.parse_json(configs.read_file(folder / "run.json"))
        config = _from_settings(ModelConfig, about["settings"])
        run = _from_settings(RunConfig, about["settings"])
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} has no run.json: name the folder of a run of the bundled trainer"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{folder / 'run.json'} cannot be read: {error}") from None
    tokenizer, end = _find_tokenizer(folder, run)
    step, params = _read_params(folder / "checkpoints", config, run)
    identity = {"policy": about.get("policy_sha256"), configs.POLICY_NAME: about.get("policy_name")}
    return TrainedModel(
        config=config,
        params=_cast(params, config),
        tokenizer=tokenizer,
        end=end,
        positions=run.sequence,
        name=f"{folder}, step {step}, trained under {configs.describe_policy(identity)}",
    )


def _from_settings(kind: type[Config], settings: dict[str, Any]) -> Config:
    """A configuration from run.json, without settings unknown to this version. Raises TypeError for a wrong type."""
    known = {name: hint for name, hint in get_type_hints(kind).items() if name in settings}
    for name, hint in known.items():
        if not isinstance(settings[name], int | float if hint is float else hint):
            raise TypeError(f"{name} is {settings[name]!r}, not {getattr(hint, '__name__', hint)}")
    return kind(**{name: settings[name] for name in known})


def _find_tokenizer(folder: Path, run: RunConfig) -> tuple[Any, int]:
    """The tokenizer of a run (None: tokens are bytes), and the token that ends a document."""
    if run.tokenizer is not None:
        if not Path(run.tokenizer).is_file():
            raise ConfigError(
                f"{folder} was trained with the tokenizer {run.tokenizer}, which cannot be found"
            )
        return data.read_tokenizer(run.tokenizer)
    if any(part.spec.kind in ("tokens", "synthetic") for part in data.parse_blend(run.data)):
        raise ConfigError(
            f"{folder} was trained on tokens ({run.data}) without --tokenizer, so its tokens have no text"
        )
    return None, data.END


def _read_params(checkpoints: Path, config: ModelConfig, run: RunConfig) -> tuple[int, llama.Params]:
    """The step of the last checkpoint, and its parameters."""
    steps = saved_steps(checkpoints)
    if not steps:
        raise ConfigError(f"{checkpoints.parent} has no checkpoint: train it with --checkpoint-every N")
    path = checkpoints / str(steps[0])
    sizes, kinds = (1,) * len(partition.AXES), (AxisType.Auto,) * len(partition.AXES)
    mesh = jax.make_mesh(sizes, partition.AXES, devices=jax.devices()[:1], axis_types=kinds)

    def check(about: dict[str, Any]) -> None:
        if seeds := about["identity"].get("seeds"):
            raise ConfigError(f"{path} holds several seeds, {seeds}: use a run of one seed")

    try:
        _, state = read_checkpoint(path, train_step.abstract_state(config, run, mesh), check)
    except DamagedCheckpointError as error:
        raise ConfigError(f"checkpoint {path} is damaged, or the run has just replaced it: {error}") from None
    return steps[0], cast(llama.Params, state["params"])


def _cast(params: llama.Params, config: ModelConfig) -> llama.Params:
    """Casts weights to the compute dtype, as each use would."""

    def cast_leaf(path: Any, array: jax.Array) -> jax.Array:
        is_wide = any(word in str(path[-1]) for word in ("norm", "router"))  # used in float32
        return array if is_wide else array.astype(config.compute)

    return cast(llama.Params, jax.tree.map_with_path(cast_leaf, params))


# ---- generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample: at most `tokens` tokens, with logits divided by the temperature; at 0, the most probable token."""

    tokens: int = 128
    temperature: float = 0.8
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
    """Runs the model on tokens that begin at position `start`. Returns the logits after token `last`, and the cache.

    Tokens after index `last` are padding. The logits do not depend on them, and later tokens replace them in the cache.
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
    """`model.block` for one row, with cached keys and values of earlier tokens."""
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
    """Samples a token."""
    if sampling.temperature == 0:
        return jnp.argmax(logits)
    return jax.random.categorical(key, logits / sampling.temperature)


class Generator:
    """Samples tokens after prompts. All prompts share two compiled functions: for a prompt, and for a single token."""

    def __init__(self, params: llama.Params, config: ModelConfig, sampling: Sampling, longest: int) -> None:
        self._params, self._config, self._sampling, self._longest = params, config, sampling, longest

        def advance(params: Any, cache: Cache, tokens: Any, start: Any, last: Any, key: Any) -> Any:
            logits, cache = forward(params, cache, tokens, start, last, config)
            return sample(logits, jax.random.fold_in(key, start + last), sampling), cache

        self._advance = jax.jit(advance, donate_argnums=1)

    def generate(self, prompt: Sequence[int], number: int = 0) -> Iterator[int]:
        """Yields tokens one by one. `number` is the index of the prompt: each prompt has its own random numbers."""
        key = jax.random.fold_in(jax.random.key(self._sampling.seed), number)
        cache = make_cache(self._config, self._longest + self._sampling.tokens)
        padding = [0] * (self._longest - len(prompt))
        tokens, start, last = jnp.array([[*prompt, *padding]], jnp.int32), 0, len(prompt) - 1
        for _ in range(self._sampling.tokens):
            token, cache = self._advance(self._params, cache, tokens, start, last, key)
            yield int(token)
            tokens, start, last = token.reshape(1, 1).astype(jnp.int32), start + last + 1, 0
