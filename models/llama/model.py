"""A Llama: grouped-query attention, rotary positions, SwiGLU, RMSNorm, an untied head; and where its arrays lie.

In: parameters in fp32 and tokens. Out: the loss. The one trap: norms, rotations, the softmax of the loss
and the sums of gradients are fp32, and everything between them is the compute type; a weight is cast where it is
used, so that its gradient arrives in fp32.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from llama.configs import BadRun, Model, Run

Params = dict[str, Any]
Sums = tuple[jax.Array, jax.Array]

AXES = ("data", "fsdp", "tensor", "context")
BATCH = ("tokens", "targets", "mask")
# Attention needs whole sequences: while it lasts, the context axis divides heads instead.
DIVIDES: dict[str | None, Any] = {"batch": ("data", "fsdp"), "sequence": "context", "width": "fsdp",
                                  "inner": "tensor", "heads": ("tensor", "context"), None: None}  # fmt: skip


def make_mesh(c: Model, run: Run) -> Mesh:
    """The mesh of a run; all that does not divide evenly is an error."""
    fsdp, tensor, context = run.fsdp_axis, run.tensor_axis, run.context_axis
    count, rest = jax.device_count(), fsdp * tensor * context
    data = run.data_axis if run.data_axis > 0 else count // rest
    if data * rest != count:
        mesh = f"{data} data x {fsdp} fsdp x {tensor} tensor x {context} context"
        raise BadRun(f"a mesh of {mesh} is not {count} devices: change the axes, or leave --data-axis out")
    multiples = (
        ("heads", c.heads, c.kv_heads, "key and value heads"),
        ("head_dim", c.head_dim, 2, "rotary embedding"),
        ("batch", run.batch, run.accumulate * data * fsdp, "accumulate x data x fsdp"),
        ("sequence", run.sequence, c.loss_chunks * context, "loss_chunks x context"),
        ("heads", c.heads, tensor * context, "tensor x context"),
        ("width", c.width, fsdp, "fsdp"),
        ("hidden", c.hidden, tensor, "tensor"),
        ("kv_heads x head_dim", c.kv_heads * c.head_dim, tensor, "tensor"),
        ("vocab", c.vocab, tensor, "tensor"),
    )
    uneven = [f"{n} {size} is not a multiple of {by} ({why})" for n, size, by, why in multiples if size % by]
    if uneven:
        raise BadRun(f"{'; '.join(uneven)}: change the sizes, or the axes of the mesh")
    return jax.make_mesh((data, fsdp, tensor, context), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def sharding(mesh: Mesh, names: Sequence[str | None]) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(DIVIDES[name] for name in names)))


def constrain(x: jax.Array, mesh: Mesh | None, *names: str | None) -> jax.Array:
    """`x`, divided so. On one device there is nothing to say."""
    if mesh is None or mesh.size == 1:
        return x
    return lax.with_sharding_constraint(x, sharding(mesh, names))


def in_parts(x: jax.Array, axis: int, count: int) -> jax.Array:
    """A part has every n-th entry along an axis, so that it lies on all devices that divide the axis."""
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, count, *x.shape[axis + 1 :]), axis + 1, 0)


def described_batch(run: Run, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    place = sharding(mesh, ("batch", "sequence"))
    return dict.fromkeys(BATCH, jax.ShapeDtypeStruct((run.batch, run.sequence), "int32", sharding=place))


@dataclass(frozen=True)
class Leaf:
    """A parameter: its shape, what divides it, the deviation of its first values (0: it starts as ones)."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    deviation: float


def table(c: Model) -> Params:
    """All parameters. Scanned layers are stacked; others are a list."""
    d, q, kv, h = c.width, c.heads * c.head_dim, c.kv_heads * c.head_dim, c.hidden
    scale = Leaf((d,), (None,), 0)
    q_in, kv_in, h_in, v_in = (Leaf((d, size), ("width", "inner"), 0.02) for size in (q, kv, h, c.vocab))
    last = 0.02 / (2 * c.layers) ** 0.5
    q_out, h_out = (Leaf((size, d), ("inner", "width"), last) for size in (q, h))
    layer = {
        "attention_norm": scale,
        "attention": {"q_proj": q_in, "k_proj": kv_in, "v_proj": kv_in, "o_proj": q_out},
        "mlp_norm": scale,
        "mlp": {"gate_proj": h_in, "up_proj": h_in, "down_proj": h_out},
    }
    stacked = jax.tree.map(lambda a: Leaf((c.layers, *a.shape), (None, *a.axes), a.deviation), layer)
    embed, layers = Leaf((c.vocab, d), ("inner", "width"), 0.02), stacked if c.scan else [layer] * c.layers
    return {"embed": embed, "layers": layers, "norm": scale, "lm_head": v_in}


def init(key: jax.Array, c: Model) -> Params:
    """First weights: equal for equal seeds, on every mesh, scanned or not."""

    def draw(path: Any, leaf: Leaf) -> jax.Array:
        own = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        return leaf.deviation * jax.random.normal(own, leaf.shape) if leaf.deviation else jnp.ones(leaf.shape)

    drawn = jax.tree.map_with_path(draw, table(replace(c, scan=True)))
    if not c.scan:
        drawn = lax.optimization_barrier(drawn)  # else XLA draws all layers again for each of them
        drawn["layers"] = [jax.tree.map(lambda a, i=i: a[i], drawn["layers"]) for i in range(c.layers)]
    return drawn


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
        turns = 8192 * frequency / (2 * jnp.pi)  # within the length it was first trained on
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


def block(x: jax.Array, p: Params, rope: Any, c: Model, mesh: Mesh | None) -> jax.Array:
    with jax.named_scope("attention"):
        x = x + attention(p["attention"], norm(x, p["attention_norm"], c.norm_eps), rope, c, mesh)
    x = constrain(x, mesh, "batch", "sequence", None)
    with jax.named_scope("mlp"):
        y = norm(x, p["mlp_norm"], c.norm_eps)
        y = jax.nn.silu(linear(p["mlp"], "gate_proj", y)) * linear(p["mlp"], "up_proj", y)
        x = x + linear(p["mlp"], "down_proj", y)
    return constrain(x, mesh, "batch", "sequence", None)


_names = jax.checkpoint_policies.save_only_these_names("quantization")
REMAT: dict[str, Any] = {
    "full": None,
    "quantized": _names,
    "dots": lambda primitive, *about, **more: (  # GEMMs, and attention as one kernel, whoever wrote them
        "dot" in primitive.name or "gemm" in primitive.name or _names(primitive, *about, **more)
    ),
}


def hidden(params: Params, tokens: jax.Array, c: Model, mesh: Mesh | None = None) -> jax.Array:
    """What the head reads."""
    with jax.named_scope("embed"):
        x = gathered(params["embed"], mesh, ("inner", None))[tokens].astype(c.compute)
    x = constrain(x, mesh, "batch", "sequence", None)
    layer = partial(block, rope=rotary(c, tokens.shape[1]), c=c, mesh=mesh)
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


# Kept are the logits, in the compute type, and what is found over the vocabulary: nothing in fp32 of their size.
@partial(jax.checkpoint, policy=lambda primitive, *_, **__: primitive.name.startswith("reduce_"))
def _penalty(values: jax.Array, targets: jax.Array, mask: jax.Array, z_loss: float) -> Sums:
    wide = values.astype(jnp.float32)
    partition = jax.nn.logsumexp(wide, axis=-1)
    # A comparison and not a gather: the gradient of a gather would be an array of logits in fp32.
    chosen = jnp.where(jnp.arange(wide.shape[-1]) == targets[..., None], wide, 0).sum(-1)
    return jnp.sum((partition - chosen) * mask), z_loss * jnp.sum(partition**2 * mask)


def loss(params: Params, batch: Params, c: Model, mesh: Mesh | None = None, z_loss: float = 0.0) -> Sums:
    """Sums over all tokens that count: cross entropy in nats, and z-loss."""
    x = hidden(params, batch["tokens"], c, mesh)
    head = params["lm_head"] if c.loss_chunks == 1 else gathered(params["lm_head"], mesh, (None, "inner"))

    def part(x: jax.Array, targets: jax.Array, mask: jax.Array) -> Sums:
        values = constrain(linear({"lm_head": head}, "lm_head", x), mesh, "batch", "sequence", "inner")
        with jax.named_scope("loss"):
            return _penalty(values, targets, mask.astype(jnp.float32), z_loss)

    if c.loss_chunks == 1:
        return part(x, batch["targets"], batch["mask"])

    with jax.named_scope("head"):
        each = tuple(in_parts(t, 1, c.loss_chunks) for t in (x, batch["targets"], batch["mask"]))
        again = jax.checkpoint(lambda each: part(*each), prevent_cse=False)
        return jax.tree.map(jnp.sum, lax.map(again, each))
