"""A Llama: grouped-query attention, rotary positions, SwiGLU, RMSNorm, an untied head.

In: parameters in fp32 and tokens. Out: logits, or the loss. The one trap: norms, rotations, the softmax of the loss
and the sums of gradients are fp32, and everything between them is the compute type; a weight is cast where it is
used, so that its gradient arrives in fp32.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from llama.configs import Model
from llama.mesh import constrain, sharding

Params = dict[str, Any]
Sums = tuple[jax.Array, jax.Array]


class Leaf(NamedTuple):
    """A parameter: its shape, what divides it, the deviation of its first values (0: it starts as ones)."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    deviation: float


def table(c: Model) -> Params:
    """All parameters. Scanned layers are stacked; others are a list."""
    q, kv, back = c.heads * c.head_dim, c.kv_heads * c.head_dim, 0.02 / math.sqrt(2 * c.layers)
    scale = Leaf((c.width,), (None,), 0)

    def into(size: int) -> Leaf:
        return Leaf((c.width, size), ("width", "inner"), 0.02)

    def out_of(size: int) -> Leaf:
        return Leaf((size, c.width), ("inner", "width"), back)

    layer = {
        "attention_norm": scale,
        "attention": {"q_proj": into(q), "k_proj": into(kv), "v_proj": into(kv), "o_proj": out_of(q)},
        "mlp_norm": scale,
        "mlp": {"gate_proj": into(c.hidden), "up_proj": into(c.hidden), "down_proj": out_of(c.hidden)},
    }
    stacked = leaf_map(lambda leaf: Leaf((c.layers, *leaf.shape), (None, *leaf.axes), leaf.deviation), layer)
    embed = Leaf((c.vocab, c.width), ("inner", "width"), 0.02)
    layers = stacked if c.scan else [layer] * c.layers
    return {"embed": embed, "layers": layers, "norm": scale, "lm_head": into(c.vocab)}


def leaf_map(f: Any, tree: Any, *more: Any) -> Any:
    return jax.tree.map(f, tree, *more, is_leaf=lambda x: isinstance(x, Leaf))


def shardings(c: Model, mesh: Mesh) -> Params:
    return leaf_map(lambda leaf: sharding(mesh, leaf.axes), table(c))


def init(key: jax.Array, c: Model) -> Params:
    """First weights: equal for equal seeds, on every mesh, scanned or not."""

    def draw(path: Any, leaf: Leaf) -> jax.Array:
        own = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        return leaf.deviation * jax.random.normal(own, leaf.shape) if leaf.deviation else jnp.ones(leaf.shape)

    stacked = table(dataclasses.replace(c, scan=True))
    drawn = jax.tree_util.tree_map_with_path(draw, stacked, is_leaf=lambda x: isinstance(x, Leaf))
    if not c.scan:
        drawn["layers"] = [jax.tree.map(lambda a, i=i: a[i], drawn["layers"]) for i in range(c.layers)]
    return drawn


# ---- forward


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def gathered(weight: jax.Array, mesh: Mesh | None, names: tuple[str | None, ...]) -> jax.Array:
    """A weight brought together, once, before it is read in parts. Its gradient stays divided."""
    return constrain(weight, mesh, *names)


gathered.defjvp(lambda mesh, names, weight, tangent: (gathered(*weight, mesh, names), *tangent))


def linear(params: Params, name: str, x: jax.Array) -> jax.Array:
    with jax.named_scope(name):
        return x @ params[name].astype(x.dtype)


def norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype)


def rotary(c: Model, length: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of every position. Llama 3.1 slows long waves by a factor, and leaves short ones."""
    frequency = c.rope_theta ** (-jnp.arange(0, c.head_dim, 2, dtype=jnp.float32) / c.head_dim)
    if c.rope_scaling:
        turns = 8192 * frequency / (2 * math.pi)  # within the length it was first trained on
        keep = jnp.clip((turns - 1) / (4 - 1), 0, 1)
        frequency = frequency * (keep + (1 - keep) / c.rope_scaling)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency
    return jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    cos, sin = rope
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attention(p: Params, x: jax.Array, rope: Any, c: Model, mesh: Mesh | None) -> jax.Array:
    batch, length, _ = x.shape
    q, k, v = (linear(p, n, x).reshape(batch, length, -1, c.head_dim) for n in ("q_proj", "k_proj", "v_proj"))
    q, k = rotate(q, rope), rotate(k, rope)
    if mesh is not None and c.kv_heads % (mesh.shape["tensor"] * mesh.shape["context"]):
        k, v = (jnp.repeat(t, c.heads // c.kv_heads, axis=2) for t in (k, v))  # fewer of them than devices
    q, k, v = (constrain(t, mesh, "batch", None, "heads", None) for t in (q, k, v))
    on_gpu = jax.default_backend() == "gpu" and c.compute == "bfloat16"
    how: Any = c.attention if c.attention != "auto" else "cudnn" if on_gpu else "xla"
    with jax.named_scope("scores"):
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=how)
    y = constrain(y.reshape(batch, length, -1), mesh, "batch", "sequence", "inner")
    return linear(p, "o_proj", y)


def mlp(p: Params, x: jax.Array) -> jax.Array:
    return linear(p, "down_proj", jax.nn.silu(linear(p, "gate_proj", x)) * linear(p, "up_proj", x))


def block(p: Params, x: jax.Array, rope: Any, c: Model, mesh: Mesh | None) -> jax.Array:
    with jax.named_scope("attention"):
        x = x + attention(p["attention"], norm(x, p["attention_norm"], c.norm_eps), rope, c, mesh)
    x = constrain(x, mesh, "batch", "sequence", None)
    with jax.named_scope("mlp"):
        x = x + mlp(p["mlp"], norm(x, p["mlp_norm"], c.norm_eps))
    return constrain(x, mesh, "batch", "sequence", None)


def _gemms(primitive: Any, *_: Any, **__: Any) -> bool:
    """Is it a GEMM, or attention as one kernel, whoever wrote it?"""
    return "dot" in primitive.name or "gemm" in primitive.name


_names = jax.checkpoint_policies.save_only_these_names("quantization")
REMAT: dict[str, Any] = {
    "full": None,
    "dots": jax.checkpoint_policies.save_from_both_policies(_gemms, _names),
    "quantized": _names,
}


def hidden(params: Params, tokens: jax.Array, c: Model, mesh: Mesh | None = None) -> jax.Array:
    """What the head reads."""
    with jax.named_scope("embed"):
        x = gathered(params["embed"], mesh, ("inner", None))[tokens].astype(c.compute)
    x = constrain(x, mesh, "batch", "sequence", None)
    rope = rotary(c, tokens.shape[1])

    def layer(x: jax.Array, p: Params) -> jax.Array:
        return block(p, x, rope, c, mesh)

    if c.remat != "none":
        layer = jax.checkpoint(layer, policy=REMAT[c.remat], prevent_cse=not c.scan)
    if c.scan:
        with jax.named_scope("layers"):
            x, _ = lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
    else:
        for at, p in enumerate(params["layers"]):
            with jax.named_scope(f"layers_{at}"):
                x = layer(x, p)
    return norm(x, params["norm"], c.norm_eps)


def logits(params: Params, tokens: jax.Array, c: Model, mesh: Mesh | None = None) -> jax.Array:
    return linear(params, "lm_head", hidden(params, tokens, c, mesh))


@jax.checkpoint  # so that only the logits, in the compute type, are kept
def _penalty(values: jax.Array, targets: jax.Array, mask: jax.Array, z_loss: float) -> Sums:
    wide = values.astype(jnp.float32)
    partition = jax.nn.logsumexp(wide, axis=-1)
    # A comparison and not a gather: the gradient of a gather would be an array of logits in fp32.
    chosen = jnp.where(jnp.arange(wide.shape[-1]) == targets[..., None], wide, 0).sum(-1)
    return jnp.sum((partition - chosen) * mask), z_loss * jnp.sum(partition**2 * mask)


def loss(
    params: Params, batch: dict[str, jax.Array], c: Model, mesh: Mesh | None = None, z_loss: float = 0.0
) -> Sums:
    """Sums over all tokens that count: cross entropy in nats, and z-loss."""
    x = hidden(params, batch["tokens"], c, mesh)
    head = params["lm_head"] if c.loss_chunks == 1 else gathered(params["lm_head"], mesh, (None, "inner"))

    def part(x: jax.Array, targets: jax.Array, mask: jax.Array) -> Sums:
        values = constrain(linear({"lm_head": head}, "lm_head", x), mesh, "batch", "sequence", "inner")
        with jax.named_scope("loss"):
            return _penalty(values, targets, mask.astype(jnp.float32), z_loss)

    if c.loss_chunks == 1:
        return part(x, batch["targets"], batch["mask"])

    def chunks(t: jax.Array) -> jax.Array:
        """Every n-th token of a sequence: each chunk lies on all devices of the context axis."""
        return jnp.moveaxis(t.reshape(t.shape[0], -1, c.loss_chunks, *t.shape[2:]), 2, 0)

    def body(total: Any, each: Any) -> tuple[Any, None]:
        found = jax.checkpoint(part, prevent_cse=False)(*each)
        return jax.tree.map(jnp.add, total, found), None

    with jax.named_scope("head"):
        each = tuple(chunks(t) for t in (x, batch["targets"], batch["mask"]))
        return lax.scan(body, (jnp.zeros(()), jnp.zeros(())), each)[0]
