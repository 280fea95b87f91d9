"""A Llama: grouped-query attention, rotary positions, SwiGLU or experts, RMSNorm, an untied head.

Parameters are float32. Norms, rotations, the softmax of the loss and the sums of gradients are float32 too; everything
else is computed in `config.compute`. A weight is cast where it is used, so that its gradient is float32.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from policyc.models.llama.configs import ModelConfig
from policyc.models.llama.experts import RouterSummary, mix_experts
from policyc.models.llama.partition import attention_implementation, constrain, split_interleaved

Params = dict[str, Any]
Batch = dict[str, Any]  # tokens, targets, mask; with --document-mask also segments, positions
LossSums = tuple[jax.Array, jax.Array]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter: its shape, its logical axes, the standard deviation of its initial values (0: they are ones)."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    deviation: float


def param_specs(config: ModelConfig) -> Params:
    """The tree of all parameters. With a scan, layers are stacked; without, they are a list."""
    width, q, kv = config.width, config.heads * config.head_dim, config.kv_heads * config.head_dim
    norm = ParamSpec((width,), (None,), 0)
    sizes = (q, kv, config.hidden, config.vocab)
    to_q, to_kv, to_hidden, to_vocab = (ParamSpec((width, n), ("width", "inner"), 0.02) for n in sizes)
    small = 0.02 / (2 * config.layers) ** 0.5  # for weights that write to the residual stream
    from_q, from_hidden = (ParamSpec((n, width), ("inner", "width"), small) for n in (q, config.hidden))
    mlp: Params = {"gate_proj": to_hidden, "up_proj": to_hidden, "down_proj": from_hidden}
    if config.experts:
        router = ParamSpec((width, config.experts), ("width", None), 0.02)
        mlp = {"router": router, "experts": _stack_specs(mlp, config.experts, "expert")}
    layer = {
        "attention_norm": norm,
        "attention": {"q_proj": to_q, "k_proj": to_kv, "v_proj": to_kv, "o_proj": from_q},
        "mlp_norm": norm,
        "mlp": mlp,
    }
    embed = ParamSpec((config.vocab, width), ("inner", "width"), 0.02)
    layers = _stack_specs(layer, config.layers, None) if config.scan else [layer] * config.layers
    return {"embed": embed, "layers": layers, "norm": norm, "lm_head": to_vocab}


def _stack_specs(specs: Params, count: int, axis: str | None) -> Params:
    """Adds a leading axis to each parameter."""
    stack = lambda p: ParamSpec((count, *p.shape), (axis, *p.axes), p.deviation)  # noqa: E731
    return cast(Params, jax.tree.map(stack, specs))


def init_params(key: jax.Array, config: ModelConfig) -> Params:
    """Initial weights. They depend only on the key, not on the mesh or `config.scan`."""

    def draw(path: Any, spec: ParamSpec) -> jax.Array:
        leaf_key = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        shape, scale = spec.shape, spec.deviation
        return scale * jax.random.normal(leaf_key, shape) if scale else jnp.ones(shape)

    params: Params = jax.tree.map_with_path(draw, param_specs(replace(config, scan=True)))
    if not config.scan:
        # Stops XLA from drawing all layers again for each layer.
        params = lax.optimization_barrier(params)
        params["layers"] = [jax.tree.map(lambda a, i=i: a[i], params["layers"]) for i in range(config.layers)]
    return params


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def gather_weight(weight: jax.Array, mesh: Mesh | None, axes: tuple[str | None, ...]) -> jax.Array:
    """Gathers a sharded weight once, before it is used for several chunks. Its gradient stays sharded."""
    return constrain(weight, mesh, *axes)


gather_weight.defjvp(lambda mesh, axes, weight, tangent: (gather_weight(*weight, mesh, axes), *tangent))


def linear(params: Params, name: str, x: jax.Array) -> jax.Array:
    with jax.named_scope(name):
        weight: jax.Array = params[name]
        return x @ weight.astype(x.dtype)


def apply_limit(params: Params, name: str, x: jax.Array) -> jax.Array:
    """The input of linears with a static scale: clipped to the limit in `params`, which the last token is set to.

    Its largest magnitude is then the limit. The last token must be padding. Training has no limits, nor do layers whose
    limit is infinite.
    """
    if name not in params:
        return x
    limit: jax.Array = params[name].astype(x.dtype)
    return jnp.clip(x, -limit, limit).at[:, -1].set(jnp.where(jnp.isfinite(limit), limit, x[:, -1]))


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype)


def rotary(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of positions. Llama 3.1 lowers the low frequencies by a factor and keeps the high ones."""
    exponents = -jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequency = config.rope_theta**exponents
    if config.rope_scaling:
        turns = 8192 * frequency / (2 * jnp.pi)  # in the original training length, 8192
        keep = jnp.clip((turns - 1) / (4 - 1), 0, 1)
        frequency = frequency * (keep + (1 - keep) / config.rope_scaling)
    angles = positions.astype(jnp.float32)[..., None] * frequency
    return jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    cos, sin = rope
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Rows(NamedTuple):
    """Inputs that all blocks share.

    `cache` rounds keys and values as the cache of a server does. Training has none.
    """

    rope: tuple[jax.Array, jax.Array]
    mask: jax.Array | None
    is_padding: jax.Array | None
    cache: Callable[[jax.Array], jax.Array] | None = None


def same_document(segments: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Whether two tokens of a row belong to the same document: (batch, 1, queries, keys)."""
    rows = constrain(segments, mesh, "batch", None)
    return constrain(rows[:, None, :, None] == rows[:, None, None, :], mesh, "batch", None, None, None)


def attention(params: Params, x: jax.Array, rows: Rows, config: ModelConfig, mesh: Mesh | None) -> jax.Array:
    batch, length, _ = x.shape
    x = apply_limit(params, "qkv_limit", x)
    q, k, v = (linear(params, f"{n}_proj", x).reshape(batch, length, -1, config.head_dim) for n in "qkv")
    q, k = rotate(q, rows.rope), rotate(k, rows.rope)
    if rows.cache is not None:
        k, v = rows.cache(k), rows.cache(v)
    if mesh is not None and config.kv_heads % (mesh.shape["tensor"] * mesh.shape["context"]):
        k, v = (jnp.repeat(t, config.heads // config.kv_heads, axis=2) for t in (k, v))  # not divisible
    q, k, v = (constrain(t, mesh, "batch", None, "heads", None) for t in (q, k, v))
    name = attention_implementation(config)
    with jax.named_scope("scores"):
        y = jax.nn.dot_product_attention(q, k, v, mask=rows.mask, is_causal=True, implementation=name)
    y = constrain(y.reshape(batch, length, -1), mesh, "batch", "sequence", "inner")
    return linear(params, "o_proj", apply_limit(params, "o_limit", y))


def mlp(
    params: Params, x: jax.Array, config: ModelConfig, mesh: Mesh | None, is_padding: jax.Array | None = None
) -> tuple[jax.Array, RouterSummary | None]:
    """The output of the MLP, or that of the experts and the summary of their router."""
    if config.experts:
        return mix_experts(params, x, config, mesh, is_padding)
    x = apply_limit(params, "gate_up_limit", x)
    y = jax.nn.silu(linear(params, "gate_proj", x)) * linear(params, "up_proj", x)
    return linear(params, "down_proj", apply_limit(params, "down_limit", y)), None


def block(
    x: jax.Array, params: Params, rows: Rows, config: ModelConfig, mesh: Mesh | None
) -> tuple[jax.Array, RouterSummary | None]:
    """The residual stream after a block, and the summary of its router if it has experts."""
    with jax.named_scope("attention"):
        y = rms_norm(x, params["attention_norm"], config.norm_eps)
        x = x + attention(params["attention"], y, rows, config, mesh)
    x = constrain(x, mesh, "batch", "sequence", None)
    with jax.named_scope("mlp"):
        y = rms_norm(x, params["mlp_norm"], config.norm_eps)
        y, summary = mlp(params["mlp"], y, config, mesh, rows.is_padding)
        x = x + y
    return constrain(x, mesh, "batch", "sequence", None), summary


_save_quantized = jax.checkpoint_policies.save_only_these_names("quantization")
REMAT_POLICIES: dict[str, Any] = {
    "full": None,
    "quantized": _save_quantized,
    # Saves GEMMs and attention, including fused attention kernels and the GEMMs of other libraries.
    "dots": lambda primitive, *args, **params: (
        "dot" in primitive.name or "gemm" in primitive.name or _save_quantized(primitive, *args, **params)
    ),
}


def embed(table: jax.Array, tokens: jax.Array, compute: str, mesh: Mesh | None) -> jax.Array:
    """The embeddings of tokens.

    Each device looks up its columns of the table for the tokens of all devices that share the table, and sends the
    results on. These are fewer bytes than the table, which would otherwise have to be gathered.
    """
    x = table[constrain(tokens, mesh, "rows", "sequence")]
    x = constrain(x, mesh, "rows", "sequence", "width").astype(compute)
    return constrain(x, mesh, "batch", "sequence", None)


def run_blocks(
    params: Params,
    tokens: jax.Array,
    config: ModelConfig,
    mesh: Mesh | None = None,
    documents: Batch | None = None,
    cache: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, RouterSummary | None]:
    """The input of the head, and the router summaries of all layers.

    `documents` has the segments and positions. For `cache`, see `Rows`.
    """
    with jax.named_scope("embed"):
        x = embed(params["embed"], tokens, config.compute, mesh)
    if documents is None:
        rows = Rows(rotary(config, jnp.arange(tokens.shape[1], dtype=jnp.float32)), None, None, cache)
    else:
        segments = documents["segments"]
        rows = Rows(
            rotary(config, documents["positions"]), same_document(segments, mesh), segments < 0, cache
        )
    layer: Callable[..., tuple[jax.Array, RouterSummary | None]] = partial(
        block, rows=rows, config=config, mesh=mesh
    )
    if config.remat != "none":
        layer = jax.checkpoint(layer, policy=REMAT_POLICIES[config.remat], prevent_cse=not config.scan)
    if config.scan:
        with jax.named_scope("layers"):
            x, summaries = lax.scan(layer, x, params["layers"])
    else:
        each = []
        for index, layer_params in enumerate(params["layers"]):
            with jax.named_scope(f"layers_{index}"):
                x, summary = layer(x, layer_params)
            each.append(summary)
        summaries = jax.tree.map(lambda *arrays: jnp.stack(arrays), *each)
    return rms_norm(x, params["norm"], config.norm_eps), summaries


# Saves the logits in the compute dtype and the reductions over the vocabulary: no float32 array as large as the logits.
@partial(jax.checkpoint, policy=lambda primitive, *_, **__: primitive.name.startswith("reduce_"))
def _cross_entropy(logits: jax.Array, targets: jax.Array, mask: jax.Array, z_loss: float) -> LossSums:
    wide = logits.astype(jnp.float32)
    partition = jax.nn.logsumexp(wide, axis=-1)
    # A comparison instead of a gather: the gradient of a gather would be an array of float32 logits.
    target_logits = jnp.where(jnp.arange(wide.shape[-1]) == targets[..., None], wide, 0).sum(-1)
    return jnp.sum((partition - target_logits) * mask), z_loss * jnp.sum(partition**2 * mask)


def loss(
    params: Params, batch: Batch, config: ModelConfig, mesh: Mesh | None = None, z_loss: float = 0.0
) -> LossSums:
    """Sums over all unmasked tokens: the cross entropy in nats, and the z-loss with the losses of the routers."""
    return loss_and_loads(params, batch, config, mesh, z_loss)[0]


def loss_and_loads(
    params: Params, batch: Batch, config: ModelConfig, mesh: Mesh | None = None, z_loss: float = 0.0
) -> tuple[LossSums, jax.Array | None]:
    """The sums of `loss`, and the share of each expert in each layer (None without experts)."""
    x, routers = run_blocks(params, batch["tokens"], config, mesh, batch if "segments" in batch else None)
    nats, penalty = _head_loss(params, x, batch, config, mesh, z_loss)
    if routers is None:
        return (nats, penalty), None
    # Router losses are means over tokens, so each unmasked token counts the same.
    of_token = config.balance_loss * routers.balance_loss
    penalty = penalty + jnp.mean(of_token) * jnp.sum(batch["mask"].astype(jnp.float32))
    return (nats, penalty), routers.loads


def _head_loss(
    params: Params, x: jax.Array, batch: Batch, config: ModelConfig, mesh: Mesh | None, z_loss: float
) -> LossSums:
    """Cross entropy and z-loss of the logits, computed in `config.loss_chunks` chunks."""
    whole = config.loss_chunks == 1
    head = params["lm_head"] if whole else gather_weight(params["lm_head"], mesh, (None, "inner"))

    def chunk_loss(x: jax.Array, targets: jax.Array, mask: jax.Array) -> LossSums:
        logits = constrain(linear({"lm_head": head}, "lm_head", x), mesh, "batch", "sequence", "inner")
        with jax.named_scope("loss"):
            return cast(LossSums, _cross_entropy(logits, targets, mask.astype(jnp.float32), z_loss))

    if whole:
        return chunk_loss(x, batch["targets"], batch["mask"])

    with jax.named_scope("head"):
        arrays = (x, batch["targets"], batch["mask"])
        chunks = tuple(split_interleaved(array, 1, config.loss_chunks) for array in arrays)
        recomputed = jax.checkpoint(lambda chunk: chunk_loss(*chunk), prevent_cse=False)
        return cast(LossSums, jax.tree.map(jnp.sum, lax.map(recomputed, chunks)))
