"""Small models of many architectures in plain JAX, each with the kind and the block of every site, written by hand.

Parameters are shapes only: these programs are traced and never run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from policyc.compiler.sites.site_list import Sites
from tests.support.jaxpr_tools import find_sites

BATCH, TOKENS, WIDTH, HEADS, HIDDEN, VOCABULARY = 2, 8, 16, 2, 48, 40
EXPERTS = 4

Expected = tuple[str, tuple[int, ...]]
"""The kind of a site, and the number of its block in each layer: (-1,) if unknown; empty if it is in no block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindProgram:
    """A loss, the shapes of its parameters, and the expected kind and blocks of its sites in order."""

    name: str
    loss: Callable[..., Any]
    params: Any
    expected: tuple[Expected, ...]


PROGRAMS: list[KindProgram] = []


def program(
    params: Any, *expected: Expected | Sequence[Expected]
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Registers a loss under its name, with the shapes of its parameters and its expected sites."""
    flat: list[Expected] = []
    for item in expected:
        flat += [item] if isinstance(item[0], str) else item  # type: ignore[list-item]

    def register(loss: Callable[[Any], Any]) -> Callable[[Any], Any]:
        PROGRAMS.append(KindProgram(name=loss.__name__, loss=loss, params=params, expected=tuple(flat)))
        return loss

    return register


def unrolled(count: int, *kinds: str, first: int = 0) -> list[Expected]:
    """The sites of consecutive blocks, each with the same kinds."""
    return [(kind, (number,)) for number in range(first, first + count) for kind in kinds]


def scanned(count: int, *kinds: str) -> list[Expected]:
    """The sites of a scan over blocks: the blocks share them."""
    return [(kind, tuple(range(count))) for kind in kinds]


def outside(*kinds: str) -> list[Expected]:
    return [(kind, ()) for kind in kinds]


def weight(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def stack(count: int, layer: Any) -> Any:
    """The parameters of a scanned stack."""
    return jax.tree.map(lambda w: weight(count, *w.shape), layer)


TOKEN_IDS = np.arange(BATCH * TOKENS).reshape(BATCH, TOKENS) % VOCABULARY
PIXELS = np.ones((BATCH, TOKENS, 12), np.float32)
TURNS = np.ones((BATCH, 3, 3), np.float32)
SEQUENCE = np.ones((BATCH, TOKENS, WIDTH), np.float32)

ATTENTION = ("attention",) * 3 + ("scores",) * 2 + ("attention",)
BLOCK = (*ATTENTION, "mlp", "mlp")


# ---- parts


def layer_norm(x: Any, scale: Any) -> Any:
    centered = x - x.mean(-1, keepdims=True)
    return centered * lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-6) * scale


def rms_norm(x: Any) -> Any:
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def split_heads(x: Any, heads: int = HEADS) -> Any:
    return x.reshape(*x.shape[:-1], heads, -1)


def rotate(x: Any) -> Any:
    positions = jnp.arange(x.shape[1], dtype=jnp.float32)
    angles = positions[:, None] / 10000 ** (jnp.arange(x.shape[-1] // 2) / x.shape[-1])
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    one, two = jnp.split(x, 2, -1)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1)


def attend(q: Any, k: Any, v: Any, *, causal: bool = True) -> Any:
    """Softmax attention over (batch, tokens, heads, size)."""
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    if causal:
        mask = jnp.tril(jnp.ones(logits.shape[-2:], bool))
        logits = jnp.where(mask, logits, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits, -1), v)


def attention_params(width: int = WIDTH) -> dict[str, Any]:
    return {
        "w1": weight(width, width),
        "w2": weight(width, width),
        "w3": weight(width, width),
        "w4": weight(width, width),
    }


def mlp_params(width: int = WIDTH, hidden: int = HIDDEN) -> dict[str, Any]:
    return {"w5": weight(width, hidden), "w6": weight(hidden, width)}


BLOCK_PARAMS = {**attention_params(), **mlp_params(), "s1": weight(WIDTH), "s2": weight(WIDTH)}


def self_attention(x: Any, p: Any, *, memory: Any = None, causal: bool = True, turn: bool = False) -> Any:
    source = x if memory is None else memory
    q, k, v = split_heads(x @ p["w1"]), split_heads(source @ p["w2"]), split_heads(source @ p["w3"])
    if turn:
        q, k = rotate(q), rotate(k)
    out = attend(q, k, v, causal=causal)
    return out.reshape(*out.shape[:2], -1) @ p["w4"]


def mlp(x: Any, p: Any) -> Any:
    return jax.nn.gelu(x @ p["w5"]) @ p["w6"]


def block(x: Any, p: Any) -> Any:
    """A block of GPT: normalization before each branch."""
    x = x + self_attention(layer_norm(x, p["s1"]), p)
    return x + mlp(layer_norm(x, p["s2"]), p)


def cross_entropy(logits: Any, labels: Any = TOKEN_IDS) -> Any:
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    return -jnp.take_along_axis(log_probabilities, jnp.asarray(labels)[..., None], -1).mean()


TABLE = weight(VOCABULARY, WIDTH)
LM_PARAMS = {"table": TABLE, "out": weight(WIDTH, VOCABULARY), "s": weight(WIDTH)}


# ---- language models


@program({**LM_PARAMS, "l": [BLOCK_PARAMS] * 3}, unrolled(3, *BLOCK), outside("head"))
def gpt_unrolled(p: Any) -> Any:
    x = p["table"][TOKEN_IDS]
    for layer in p["l"]:
        x = block(x, layer)
    return cross_entropy(layer_norm(x, p["s"]) @ p["out"])


@program({**LM_PARAMS, "l": stack(4, BLOCK_PARAMS)}, scanned(4, *BLOCK), outside("head"))
def gpt_scanned_tied(p: Any) -> Any:
    x, _ = lax.scan(lambda x, layer: (block(x, layer), None), p["table"][TOKEN_IDS], p["l"])
    return cross_entropy(layer_norm(x, p["s"]) @ p["table"].T)


SQUARE = weight(WIDTH, WIDTH)


@program(
    {"in": SQUARE, "out": SQUARE, "l": [{"w1": SQUARE, "w2": SQUARE}] * 4},
    outside("embedding"),
    unrolled(4, "mlp", "mlp"),
    outside("head"),
)
def residual_blocks_of_one_shape(p: Any) -> Any:
    """Only the residual additions show which products belong together."""
    x = SEQUENCE @ p["in"]
    for layer in p["l"]:
        x = x + jnp.tanh(x @ layer["w1"]) @ layer["w2"]
    return cross_entropy(x @ p["out"], TOKEN_IDS % WIDTH)


LLAMA_PARAMS = {
    **attention_params(),
    "w5": weight(WIDTH, HIDDEN),
    "w6": weight(WIDTH, HIDDEN),
    "w7": weight(HIDDEN, WIDTH),
}
LLAMA = (*ATTENTION, "mlp", "mlp", "mlp")


def llama_block(x: Any, p: Any) -> Any:
    x = x + self_attention(rms_norm(x), p, turn=True)
    h = rms_norm(x)
    return x + (jax.nn.silu(h @ p["w5"]) * (h @ p["w6"])) @ p["w7"]


@program(
    {**LM_PARAMS, "l": stack(6, LLAMA_PARAMS)},
    [(kind, tuple(range(6))) for kind in LLAMA],
    outside("head"),
)
def llama_scanned_in_groups(p: Any) -> Any:
    groups = jax.tree.map(lambda w: w.reshape(3, 2, *w.shape[1:]), p["l"])

    def group(x: Any, layers: Any) -> Any:
        return lax.scan(lambda x, layer: (llama_block(x, layer), None), x, layers)[0], None

    x, _ = lax.scan(group, p["table"][TOKEN_IDS], groups)
    return cross_entropy(rms_norm(x) @ p["out"])


@program(
    {**LM_PARAMS, "a": stack(3, LLAMA_PARAMS), "b": stack(3, LLAMA_PARAMS)},
    [(kind, (0, 2, 4)) for kind in LLAMA],
    [(kind, (1, 3, 5)) for kind in LLAMA],
    outside("head"),
)
def llama_scanned_in_pairs(p: Any) -> Any:
    """Two blocks in the body of one scan, as in models that alternate local and global attention."""

    def pair(x: Any, layers: Any) -> Any:
        return llama_block(llama_block(x, layers[0]), layers[1]), None

    x, _ = lax.scan(pair, p["table"][TOKEN_IDS], (p["a"], p["b"]))
    return cross_entropy(rms_norm(x) @ p["out"])


@program(
    {**LM_PARAMS, "l": stack(4, LLAMA_PARAMS)}, [(kind, (3, 2, 1, 0)) for kind in LLAMA], outside("head")
)
def llama_scanned_backwards(p: Any) -> Any:
    x, _ = lax.scan(
        lambda x, layer: (llama_block(x, layer), None), p["table"][TOKEN_IDS], p["l"], reverse=True
    )
    return cross_entropy(rms_norm(x) @ p["out"])


ADAPTED = {
    **BLOCK_PARAMS,
    "a": weight(WIDTH, 2),
    "b": weight(2, WIDTH),
    "c": weight(WIDTH, 2),
    "d": weight(2, HIDDEN),
}


@program(
    {**LM_PARAMS, "l": [ADAPTED] * 2},
    unrolled(2, *("attention",) * 5, "scores", "scores", "attention", "mlp", "mlp", "mlp", "mlp"),
    outside("head"),
)
def adapters_of_low_rank(p: Any) -> Any:
    x = p["table"][TOKEN_IDS]
    for layer in p["l"]:
        h = rms_norm(x)
        q = h @ layer["w1"] + h @ layer["a"] @ layer["b"]
        k, v = h @ layer["w2"], h @ layer["w3"]
        x = x + attend(*map(split_heads, (q, k, v))).reshape(x.shape) @ layer["w4"]
        h = rms_norm(x)
        x = x + jax.nn.gelu(h @ layer["w5"] + h @ layer["c"] @ layer["d"]) @ layer["w6"]
    return cross_entropy(x @ p["out"])


LATENT = {
    "w1": weight(WIDTH, 6), "w2": weight(6, WIDTH), "w3": weight(WIDTH, 4 + 4), "w4": weight(4, 2 * WIDTH),
    "w5": weight(WIDTH, WIDTH), "w6": weight(WIDTH, HIDDEN), "w7": weight(WIDTH, HIDDEN), "w8": weight(HIDDEN, WIDTH),
}  # fmt: skip


@program(
    {**LM_PARAMS, "l": stack(3, LATENT)},
    scanned(3, *("attention",) * 4, "scores", "scores", "attention", "mlp", "mlp", "mlp"),
    outside("head"),
)
def latent_attention(p: Any) -> Any:
    """DeepSeek: queries, keys and values through matrices of low rank."""

    def layer(x: Any, w: Any) -> Any:
        h = rms_norm(x)
        q = split_heads(rms_norm(h @ w["w1"]) @ w["w2"])
        latent, shared = jnp.split(h @ w["w3"], 2, -1)
        k, v = jnp.split(split_heads(rms_norm(latent) @ w["w4"]), 2, -1)
        turned = jnp.broadcast_to(rotate(shared[:, :, None]), (BATCH, TOKENS, HEADS, 4))
        q = jnp.concatenate([q, rotate(q[..., :4])], -1)
        x = x + attend(q, jnp.concatenate([k, turned], -1), v).reshape(x.shape) @ w["w5"]
        h = rms_norm(x)
        return x + (jax.nn.silu(h @ w["w6"]) * (h @ w["w7"])) @ w["w8"], None

    x, _ = lax.scan(layer, p["table"][TOKEN_IDS], p["l"])
    return cross_entropy(rms_norm(x) @ p["out"])


@jax.custom_vjp
def fused_cross_entropy(hidden: Any, table: Any) -> Any:
    return cross_entropy(hidden @ table.T)


def _fused_forward(hidden: Any, table: Any) -> Any:
    return fused_cross_entropy(hidden, table), (hidden, table)


fused_cross_entropy.defvjp(_fused_forward, lambda residuals, g: jax.tree.map(lambda r: r * g, residuals))


@program({**LM_PARAMS, "l": [BLOCK_PARAMS] * 2}, outside("embedding"), unrolled(2, *BLOCK), outside("head"))
def one_hot_embedding_and_custom_cross_entropy(p: Any) -> Any:
    x = jax.nn.one_hot(TOKEN_IDS, VOCABULARY) @ p["table"]
    for layer in p["l"]:
        x = block(x, layer)
    return fused_cross_entropy(layer_norm(x, p["s"]), p["table"])


# ---- mixtures of experts

MOE = {
    **attention_params(), "r": weight(WIDTH, EXPERTS), "e1": weight(EXPERTS, WIDTH, HIDDEN),
    "e2": weight(EXPERTS, HIDDEN, WIDTH),
}  # fmt: skip


def ragged_experts(x: Any, p: Any) -> Any:
    """Mixtral: the two best experts of each token, with tokens sorted by expert. With `e3`, experts have gates."""
    tokens = x.reshape(-1, WIDTH)
    probabilities, chosen = lax.top_k(jax.nn.softmax(tokens @ p["r"]), 2)
    order = jnp.argsort(chosen.ravel())
    sizes = jnp.bincount(chosen.ravel(), length=EXPERTS)
    routed = jnp.repeat(tokens, 2, axis=0)[order]
    hidden = jax.nn.silu(lax.ragged_dot(routed, p["e1"], sizes))
    if "e3" in p:
        hidden *= lax.ragged_dot(routed, p["e3"], sizes)
    out = lax.ragged_dot(hidden, p["e2"], sizes)
    out = out[jnp.argsort(order)].reshape(-1, 2, WIDTH) * probabilities[..., None]
    return out.sum(1).reshape(x.shape)


def dispatched_experts(x: Any, p: Any) -> Any:
    """Switch Transformer: tokens dispatched by one-hot products to a capacity of each expert."""
    tokens = x.reshape(-1, WIDTH)
    probabilities = jax.nn.softmax(tokens @ p["r"])
    mask = jax.nn.one_hot(jnp.argmax(probabilities, -1), EXPERTS)
    position = (jnp.cumsum(mask, 0) - 1) * mask
    dispatch = mask[..., None] * jax.nn.one_hot(position.sum(-1).astype(int), 4)[:, None]
    combine = dispatch * (probabilities * mask).sum(-1)[:, None, None]
    inputs = jnp.einsum("tec,td->ecd", dispatch, tokens)
    outputs = jnp.einsum("ecf,efd->ecd", jax.nn.relu(jnp.einsum("ecd,edf->ecf", inputs, p["e1"])), p["e2"])
    return jnp.einsum("tec,ecd->td", combine, outputs).reshape(x.shape)


@program(
    {**LM_PARAMS, "l": stack(3, MOE)},
    scanned(3, *ATTENTION, "router", "experts", "experts"),
    outside("head"),
)
def mixture_ragged_scanned(p: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        x = x + self_attention(rms_norm(x), w)
        return x + ragged_experts(rms_norm(x), w), None

    x, _ = lax.scan(layer, p["table"][TOKEN_IDS], p["l"])
    return cross_entropy(rms_norm(x) @ p["out"])


@program(
    {**LM_PARAMS, "l": [BLOCK_PARAMS, MOE] * 2},
    unrolled(1, *BLOCK),
    unrolled(1, *ATTENTION, "router", "", "experts", "experts", "", first=1),
    unrolled(1, *BLOCK, first=2),
    unrolled(1, *ATTENTION, "router", "", "experts", "experts", "", first=3),
    outside("head"),
)
def mixture_dispatched_in_every_other_block(p: Any) -> Any:
    x = p["table"][TOKEN_IDS]
    for number, layer in enumerate(p["l"]):
        x = x + self_attention(rms_norm(x), layer)
        x = x + (dispatched_experts if number % 2 else mlp)(rms_norm(x), layer)
    return cross_entropy(rms_norm(x) @ p["out"])


SQUARE_LLAMA = {**attention_params(), "w5": SQUARE, "w6": SQUARE, "w7": SQUARE}
SQUARE_MOE = {
    **SQUARE_LLAMA, "r": weight(WIDTH, EXPERTS),
    **dict.fromkeys(("e1", "e2", "e3"), weight(EXPERTS, WIDTH, WIDTH)),
}  # fmt: skip
DEEPSEEK = (*ATTENTION, "router", "experts", "experts", "experts", "mlp", "mlp", "mlp")


def deepseek_block(x: Any, p: Any) -> Any:
    """Experts and a shared expert, all of them with gates."""
    x = x + self_attention(rms_norm(x), p)
    h = rms_norm(x)
    return x + (ragged_experts(h, p) + (jax.nn.silu(h @ p["w5"]) * (h @ p["w6"])) @ p["w7"])


@program(
    {**LM_PARAMS, "d": SQUARE_LLAMA, "l": SQUARE_MOE},
    unrolled(1, *LLAMA),
    unrolled(1, *DEEPSEEK, first=1),
    outside("head"),
)
def two_different_blocks_of_square_matrices(p: Any) -> Any:
    x = deepseek_block(llama_block(p["table"][TOKEN_IDS], p["d"]), p["l"])
    return cross_entropy(rms_norm(x) @ p["out"])


@program(
    {**LM_PARAMS, "d": stack(2, LLAMA_PARAMS), "l": stack(4, SQUARE_MOE), "f": LLAMA_PARAMS},
    scanned(2, *LLAMA),
    [(kind, (2, 3, 4, 5)) for kind in DEEPSEEK],
    unrolled(1, *LLAMA, first=6),
    outside("head"),
)
def dense_scan_then_mixture_scan_then_one_block(p: Any) -> Any:
    """DeepSeek: the second scan continues the residual stream of the first, so their blocks are numbered together."""
    x, _ = lax.scan(lambda x, layer: (llama_block(x, layer), None), p["table"][TOKEN_IDS], p["d"])
    x, _ = lax.scan(lambda x, layer: (deepseek_block(x, layer), None), x, p["l"])
    return cross_entropy(rms_norm(llama_block(x, p["f"])) @ p["out"])


@program(
    {**LM_PARAMS, "l": stack(2, MOE)},
    scanned(2, *ATTENTION, "router"),
    [("experts", (0,) * EXPERTS + (1,) * EXPERTS)] * 2,
    outside("head"),
)
def mixture_scanned_over_experts(p: Any) -> Any:
    def experts(x: Any, w: Any) -> Any:
        tokens = x.reshape(-1, WIDTH)
        values, chosen = lax.top_k(tokens @ w["r"], 2)
        gates = (jax.nn.one_hot(chosen, EXPERTS) * jax.nn.softmax(values)[..., None]).sum(1)

        def expert(total: Any, inputs: Any) -> Any:
            up, down, gate = inputs
            return total + (jax.nn.gelu((tokens * gate[:, None]) @ up) @ down), None

        return lax.scan(expert, jnp.zeros_like(tokens), (w["e1"], w["e2"], gates.T))[0].reshape(x.shape)

    def layer(x: Any, w: Any) -> Any:
        x = x + self_attention(rms_norm(x), w)
        return x + experts(rms_norm(x), w), None

    x, _ = lax.scan(layer, p["table"][TOKEN_IDS], p["l"])
    return cross_entropy(rms_norm(x) @ p["out"])


# ---- encoders and decoders


@program(
    {"table": TABLE, "e": [BLOCK_PARAMS] * 2, "d": [{"x": attention_params(), **BLOCK_PARAMS}] * 3},
    unrolled(2, *BLOCK),
    unrolled(3, *ATTENTION, *ATTENTION, "mlp", "mlp"),
    outside("head"),
)
def encoder_decoder_unrolled(p: Any) -> Any:
    """T5: the encoder and the decoder count their blocks separately."""
    memory = p["table"][TOKEN_IDS]
    for layer in p["e"]:
        memory = memory + self_attention(rms_norm(memory), layer, causal=False)
        memory = memory + mlp(rms_norm(memory), layer)
    memory = rms_norm(memory)
    x = p["table"][TOKEN_IDS]
    for layer in p["d"]:
        x = x + self_attention(rms_norm(x), layer)
        x = x + self_attention(rms_norm(x), layer["x"], memory=memory, causal=False)
        x = x + mlp(rms_norm(x), layer)
    return cross_entropy(rms_norm(x) * WIDTH**-0.5 @ p["table"].T)


@program(
    {"table": TABLE, "e": stack(3, BLOCK_PARAMS), "d": stack(2, {"x": attention_params(), **BLOCK_PARAMS})},
    scanned(3, *BLOCK),
    scanned(2, *ATTENTION, *BLOCK),
    outside("head"),
)
def decoder_that_reads_the_encoder_first(p: Any) -> Any:
    """The first product of the decoder depends on the encoder. The residual stream of the decoder does not."""
    memory, _ = lax.scan(lambda x, layer: (block(x, layer), None), p["table"][TOKEN_IDS], p["e"])

    def layer(x: Any, w: Any) -> Any:
        k, v = split_heads(memory @ w["x"]["w2"]), split_heads(memory @ w["x"]["w3"])
        q = split_heads(rms_norm(x) @ w["x"]["w1"])
        return block(x + attend(q, k, v).reshape(x.shape) @ w["x"]["w4"], w), None

    x, _ = lax.scan(layer, p["table"][TOKEN_IDS], p["d"])
    return cross_entropy(rms_norm(x) @ p["table"].T)


def cross_attention(x: Any, memory: Any, p: Any) -> Any:
    """Keys and values come first, then the queries."""
    k, v = split_heads(memory @ p["w1"]), split_heads(memory @ p["w2"])
    out = attend(split_heads(x @ p["w3"]), k, v, causal=False)
    return out.reshape(*out.shape[:2], -1) @ p["w4"]


@program(
    {**LM_PARAMS, "e": [BLOCK_PARAMS] * 3, "d": [[attention_params(), BLOCK_PARAMS]] * 2},
    unrolled(3, *BLOCK),
    unrolled(2, *ATTENTION, *BLOCK),
    outside("head"),
)
def decoder_with_keys_of_the_encoder_before_its_own_attention(p: Any) -> Any:
    """A norm follows each addition. The blocks of encoder and decoder begin with equal products."""
    memory, x = rms_norm(p["table"][TOKEN_IDS]), rms_norm(p["table"][TOKEN_IDS + 1])
    for layer in p["e"]:
        memory = rms_norm(block(memory, layer))
    for cross, layer in p["d"]:
        x = rms_norm(x + cross_attention(x, memory, cross))
        x = rms_norm(block(x, layer))
    return cross_entropy(x @ p["out"])


BERT = {**BLOCK_PARAMS, "b": weight(WIDTH)}


@program(
    {
        "table": TABLE,
        "pos": weight(TOKENS, WIDTH),
        "s": weight(WIDTH),
        "l": [BERT] * 2,
        "t": weight(WIDTH, WIDTH),
    },
    unrolled(2, *BLOCK),
    outside("head", "head"),
)
def bert(p: Any) -> Any:
    """Normalization after each branch, dropout, and a dense layer before the tied head."""
    x = layer_norm(p["table"][TOKEN_IDS] + p["pos"], p["s"])
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, (BATCH, TOKENS, WIDTH))
    for layer in p["l"]:
        attended = self_attention(x, layer, causal=False) + layer["b"]
        x = layer_norm(x + jnp.where(keep, attended / 0.9, 0), layer["s1"])
        x = layer_norm(x + jnp.where(keep, mlp(x, layer) / 0.9, 0), layer["s2"])
    return cross_entropy(layer_norm(jax.nn.gelu(x @ p["t"]), p["s"]) @ p["table"].T)


# ---- vision


@program(
    {
        "patch": weight(12, WIDTH),
        "cls": weight(1, 1, WIDTH),
        "pos": weight(TOKENS + 1, WIDTH),
        "l": [BLOCK_PARAMS] * 3,
        "c": weight(WIDTH, 10),
    },
    outside("embedding"),
    unrolled(3, *BLOCK),
    outside("head"),
)
def vision_transformer(p: Any) -> Any:
    x = PIXELS @ p["patch"]
    x = jnp.concatenate([jnp.broadcast_to(p["cls"], (BATCH, 1, WIDTH)), x], 1) + p["pos"]
    for layer in p["l"]:
        x = block(x, layer)
    return cross_entropy(x[:, 0] @ p["c"], np.zeros(BATCH, int))


@program(
    {"patch": weight(12, WIDTH), "l": [BLOCK_PARAMS] * 2, "c": weight(WIDTH, 10)},
    outside("", "", "embedding"),
    unrolled(2, *BLOCK),
    outside("head"),
)
def vision_transformer_on_rotated_images(p: Any) -> Any:
    """The products of the augmentation prepare the data. They are not part of the model."""
    matrix = jnp.einsum("bij,bjk->bik", jnp.exp(TURNS), TURNS)
    positions = jnp.einsum("bij,bjn->bin", matrix, jnp.exp(PIXELS[..., :3].swapaxes(1, 2)))
    rows = jnp.clip(positions.sum(1), 0, TOKENS - 1).astype(int)
    x = jnp.take_along_axis(PIXELS, rows[..., None], 1) @ p["patch"]
    for layer in p["l"]:
        x = block(x, layer)
    return cross_entropy(x.mean(1) @ p["c"], np.arange(BATCH))


MIXER = {
    "t1": weight(TOKENS, 24),
    "t2": weight(24, TOKENS),
    **mlp_params(),
    "s1": weight(WIDTH),
    "s2": weight(WIDTH),
}


@program(
    {"patch": weight(12, WIDTH), "l": [MIXER] * 4, "c": weight(WIDTH, 10)},
    outside("embedding"),
    unrolled(4, "mlp", "mlp", "mlp", "mlp"),
    outside("head"),
)
def mlp_mixer(p: Any) -> Any:
    x = PIXELS @ p["patch"]
    for layer in p["l"]:
        h = jnp.swapaxes(layer_norm(x, layer["s1"]), 1, 2)
        x = x + jnp.swapaxes(jax.nn.gelu(h @ layer["t1"]) @ layer["t2"], 1, 2)
        x = x + mlp(layer_norm(x, layer["s2"]), layer)
    return cross_entropy(x.mean(1) @ p["c"], np.zeros(BATCH, int))


@program(
    {
        "patch": weight(12, WIDTH), "t1": weight(8, WIDTH), "t2": weight(WIDTH, WIDTH),
        "l": stack(3, {**BLOCK_PARAMS, "m": weight(WIDTH, 6 * WIDTH)}), "m": weight(WIDTH, 2 * WIDTH),
        "out": weight(WIDTH, 12),
    },
    outside("embedding", "embedding", "embedding"),
    scanned(3, "mlp", *BLOCK),
    outside("", ""),
)  # fmt: skip
def diffusion_transformer(p: Any) -> Any:
    """DiT: each block is modulated by the time step. The loss has no log-softmax, so no site is a head."""
    x = PIXELS @ p["patch"]
    time = np.ones((BATCH, 8), np.float32)
    condition = jax.nn.silu(jax.nn.silu(time @ p["t1"]) @ p["t2"])

    def layer(x: Any, w: Any) -> Any:
        a, b, c, d, e, f = jnp.split((condition @ w["m"])[:, None], 6, -1)
        x = x + c * self_attention(rms_norm(x) * (1 + a) + b, w, causal=False)
        return x + f * mlp(rms_norm(x) * (1 + d) + e, w), None

    x, _ = lax.scan(layer, x, p["l"])
    shift, scale = jnp.split((condition @ p["m"])[:, None], 2, -1)
    return jnp.square((rms_norm(x) * (1 + scale) + shift) @ p["out"] - PIXELS).mean()


# ---- other mixers


def _compose(one: Any, two: Any) -> Any:
    return one[0] * two[0], two[0] * one[1] + two[1]


MAMBA = {
    "w1": weight(WIDTH, 2 * HIDDEN), "k": weight(4, 1, HIDDEN), "w2": weight(HIDDEN, 11), "w3": weight(3, HIDDEN),
    "a": weight(HIDDEN, 4), "d": weight(HIDDEN), "w4": weight(HIDDEN, WIDTH),
}  # fmt: skip


@program(
    {**LM_PARAMS, "l": [MAMBA] * 3},
    unrolled(3, "attention", "attention", "attention", "scores", "attention"),
    outside("head"),
)
def state_space_model(p: Any) -> Any:
    """Mamba: a recurrence over tokens, read out by a product of activations."""
    x = p["table"][TOKEN_IDS]
    for w in p["l"]:
        u, gate = jnp.split(rms_norm(x) @ w["w1"], 2, -1)
        u = jax.nn.silu(
            lax.conv_general_dilated(
                u, w["k"], (1,), [(3, 0)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=HIDDEN
            )
        )
        low, b, c = jnp.split(u @ w["w2"], [3, 7], -1)
        step = jax.nn.softplus(low @ w["w3"])
        decay = jnp.exp(-step[..., None] * jnp.exp(w["a"]))
        drive = (step * u)[..., None] * b[:, :, None]
        _, states = lax.associative_scan(_compose, (decay, drive), axis=1)
        y = jnp.einsum("btdn,btn->btd", states, c) + u * w["d"]
        x = x + (y * jax.nn.silu(gate)) @ w["w4"]
    return cross_entropy(rms_norm(x) @ p["out"])


GATED = {**BLOCK_PARAMS, "g": weight(WIDTH, WIDTH)}


@program(
    {**LM_PARAMS, "l": [GATED] * 2},
    unrolled(2, *("attention",) * 3, "scores", "scores", "attention", "attention", "mlp", "mlp"),
    outside("head"),
)
def gated_attention(p: Any) -> Any:
    x = p["table"][TOKEN_IDS]
    for w in p["l"]:
        h = rms_norm(x)
        q, k, v = (split_heads(h @ w[name]) for name in ("w1", "w2", "w3"))
        out = attend(rms_norm(q), rms_norm(k), v).reshape(x.shape)
        x = x + (out * jax.nn.sigmoid(h @ w["g"])) @ w["w4"]
        x = x + mlp(rms_norm(x), w)
    return cross_entropy(rms_norm(x) @ p["out"])


@program(
    {
        "table": TABLE,
        "l": [{"w1": weight(WIDTH, WIDTH), "w2": weight(WIDTH, WIDTH)}] * 3,
        "out": weight(WIDTH, VOCABULARY),
    },
    unrolled(3, "mlp", "mlp"),
    outside("head"),
)
def recurrent_network(p: Any) -> Any:
    x = p["table"][TOKEN_IDS]
    for w in p["l"]:

        def cell(h: Any, inputs: Any, w: Any = w) -> Any:
            h = jnp.tanh(inputs @ w["w1"] + h @ w["w2"])
            return h, h

        _, states = lax.scan(cell, jnp.zeros((BATCH, WIDTH)), jnp.swapaxes(x, 0, 1))
        x = jnp.swapaxes(states, 0, 1)
    return cross_entropy(x @ p["out"])


@program({"a": weight(WIDTH, HIDDEN), "b": weight(HIDDEN, 4)}, unrolled(1, "mlp", "mlp"))
def perceptron_with_one_hidden_layer(p: Any) -> Any:
    """Nothing repeats, so the whole network is one block of consecutive products."""
    return jnp.square(jax.nn.relu(SEQUENCE @ p["a"]) @ p["b"]).mean()


@program({"a": weight(WIDTH, HIDDEN), "b": weight(HIDDEN, 4)}, unrolled(1, "mlp"), outside("head"))
def classifier_with_one_hidden_layer(p: Any) -> Any:
    return cross_entropy(jax.nn.relu(SEQUENCE[:, 0] @ p["a"]) @ p["b"], np.zeros(BATCH, int))


@program(
    {"l": stack(3, {"a": SQUARE, "b": SQUARE}), "out": SQUARE}, scanned(3, "mlp", "mlp"), outside("head")
)
def perceptron_scanned_over_pairs(p: Any) -> Any:
    """Without residual additions, each iteration is a block."""
    x, _ = lax.scan(lambda x, w: (jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]), None), SEQUENCE, p["l"])
    return cross_entropy(x @ p["out"], TOKEN_IDS % WIDTH)


@program(
    {
        "patch": weight(12, WIDTH),
        "l": [BLOCK_PARAMS] * 3,
        "probe": weight(1, 1, WIDTH),
        "h": BLOCK_PARAMS,
        "out": weight(WIDTH, 10),
    },
    outside("embedding"),
    unrolled(3, *BLOCK),
    outside(*ATTENTION, "head", "head", "head"),
)
def pooling_by_attention(p: Any) -> Any:
    """ViT with a pooling head: its attention is in no block, and its MLP is part of the head."""
    x = PIXELS @ p["patch"]
    for layer in p["l"]:
        x = block(x, layer)
    probe = jnp.broadcast_to(p["probe"], (BATCH, 1, WIDTH))
    x = self_attention(probe, p["h"], memory=rms_norm(x), causal=False)
    x = x + mlp(layer_norm(x, p["h"]["s1"]), p["h"])
    return cross_entropy(x[:, 0] @ p["out"], np.zeros(BATCH, int))


# ---- pipelines and other forms of stacks


@program(
    {**LM_PARAMS, "l": stack(2, stack(2, BLOCK_PARAMS))},
    [(kind, (-1,)) for kind in (*BLOCK, *BLOCK)],
    outside("head"),
)
def pipeline_of_two_stages(p: Any) -> Any:
    """Each product runs in both stages at once, so its block is unknown."""

    def stage(x: Any, layers: Any) -> Any:
        for number in range(2):
            x = block(x, jax.tree.map(functools.partial(lambda w, n: w[n], n=number), layers))
        return x

    microbatches = p["table"][TOKEN_IDS][:, None]

    def tick(buffer: Any, microbatch: Any) -> Any:
        out = jax.vmap(stage)(jnp.concatenate([microbatch[None], buffer[:-1]]), p["l"])
        return out, out[-1]

    _, outputs = lax.scan(tick, jnp.zeros((2, 1, TOKENS, WIDTH)), microbatches)
    return cross_entropy(rms_norm(outputs[:, 0]) @ p["out"])


@program(
    {
        "table": TABLE,
        "l": [BLOCK_PARAMS] * 2,
        "v": [BLOCK_PARAMS] * 2,
        "patch": weight(12, WIDTH),
        "a": weight(WIDTH, WIDTH),
        "b": weight(WIDTH, WIDTH),
    },
    outside("embedding"),
    unrolled(2, *BLOCK),
    outside("head"),
    unrolled(2, *BLOCK),
    outside("head", "head"),
)
def contrastive_pair(p: Any) -> Any:
    """CLIP: the product of the outputs of both towers goes into the log-softmax."""
    image, text = PIXELS @ p["patch"], p["table"][TOKEN_IDS]
    for layer in p["v"]:
        image = block(image, layer)
    image = image.mean(1) @ p["a"]
    for layer in p["l"]:
        text = block(text, layer)
    text = text.mean(1) @ p["b"]
    norms = [jnp.linalg.norm(t, axis=-1, keepdims=True) for t in (image, text)]
    return cross_entropy((image / norms[0]) @ (text / norms[1]).T, np.arange(BATCH))


@program({**LM_PARAMS, "l": stack(2, stack(3, BLOCK_PARAMS))}, scanned(3, *BLOCK), outside("head"))
def ensemble_of_scanned_models(p: Any) -> Any:
    def model(layers: Any) -> Any:
        return lax.scan(lambda x, layer: (block(x, layer), None), p["table"][TOKEN_IDS], layers)[0]

    return cross_entropy(rms_norm(jax.vmap(model)(p["l"]).mean(0)) @ p["out"])


def _run_on_stages(p: Any, x: Any, run_stage: Callable[[Any, Any], Any]) -> Any:
    """A pipeline on two devices, each with half of the layers."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",))
    spec = jax.sharding.PartitionSpec

    def run(layers: Any, microbatches: Any) -> Any:
        stage = lax.axis_index("stage")

        def tick(passed_on: Any, microbatch: Any) -> Any:
            out = run_stage(jnp.where(stage == 0, microbatch, passed_on), layers)
            return lax.ppermute(out, "stage", [(0, 1), (1, 0)]), out

        _, outputs = lax.scan(tick, jnp.zeros((1, TOKENS, WIDTH)), microbatches)
        return lax.psum(jnp.where(stage == 1, outputs[1:, 0], 0), "stage")

    microbatches = jnp.concatenate([x, x[:1]])[:, None]
    sharded = jax.shard_map(
        run, mesh=mesh, in_specs=(spec("stage"), spec()), out_specs=spec(), check_vma=False
    )
    return cross_entropy(rms_norm(sharded(p["l"], microbatches)) @ p["out"])


@program(
    {**LM_PARAMS, "l": stack(4, BLOCK_PARAMS)},
    [(kind, (-1,)) for kind in (*BLOCK, *BLOCK)],
    outside("head"),
)
def pipeline_in_shard_map_of_unrolled_stages(p: Any) -> Any:
    def run_stage(x: Any, layers: Any) -> Any:
        for number in range(2):
            x = block(x, jax.tree.map(functools.partial(lambda w, n: w[n], n=number), layers))
        return x

    return _run_on_stages(p, p["table"][TOKEN_IDS], run_stage)


# ---- blocks of several sorts


@program(
    {
        "patch": weight(12, WIDTH), "latents": weight(4, WIDTH), "c": weight(WIDTH, 10),
        "groups": [{"cross": BLOCK_PARAMS, "own": [BLOCK_PARAMS] * 2}] * 2,
    },
    outside("embedding"), unrolled(6, *BLOCK), outside("head"),
)  # fmt: skip
def perceiver(p: Any) -> Any:
    """Latents attend to the data and then to each other, twice."""
    data = PIXELS @ p["patch"]
    x = jnp.broadcast_to(p["latents"], (BATCH, 4, WIDTH))
    for group in p["groups"]:
        x = x + self_attention(rms_norm(x), group["cross"], memory=data, causal=False)
        x = x + mlp(rms_norm(x), group["cross"])
        for layer in group["own"]:
            x = block(x, layer)
    return cross_entropy(x.mean(1) @ p["c"], np.zeros(BATCH, int))


@program(
    {"table": weight(VOCABULARY, 8), "expand": weight(8, WIDTH), "shared": BLOCK_PARAMS},
    outside("embedding"), unrolled(4, *BLOCK), outside("head", "head"),
)  # fmt: skip
def shared_blocks_with_a_factorized_tied_head_in_chunks(p: Any) -> Any:
    x = p["table"][TOKEN_IDS] @ p["expand"]
    for _ in range(4):
        x = block(x, p["shared"])
    hidden = (rms_norm(x) @ p["expand"].T).reshape(4, -1, 8)

    def chunk_loss(total: Any, chunk: Any) -> Any:
        return total + cross_entropy(chunk[0] @ p["table"].T, chunk[1]), None

    return lax.scan(chunk_loss, 0.0, (hidden, TOKEN_IDS.reshape(4, -1)))[0]


@program(
    {
        **LM_PARAMS,
        "l": [
            {
                **BLOCK_PARAMS, "x": weight(WIDTH, WIDTH), "a": weight(WIDTH, WIDTH), "g": weight(WIDTH, WIDTH),
                "o": weight(WIDTH, WIDTH), "router": weight(WIDTH, EXPERTS),
                "up": weight(EXPERTS, WIDTH, HIDDEN), "down": weight(EXPERTS, HIDDEN, WIDTH),
            }
        ] * 3,
    },
    unrolled(3, *[""] * 4, "router", "experts", "experts", "", *BLOCK), outside("head"),
)  # fmt: skip
def gated_recurrence_with_dense_experts_and_attention(p: Any) -> Any:
    """An elementwise recurrence mixes tokens without products of activations: its projections have no kind."""

    def combine(one: Any, two: Any) -> Any:
        return one[0] * two[0], two[0] * one[1] + two[1]

    x = p["table"][TOKEN_IDS]
    for layer in p["l"]:
        h = rms_norm(x)
        decay = jax.nn.sigmoid(h @ layer["a"])
        _, states = lax.associative_scan(combine, (decay, (1 - decay) * (h @ layer["x"])), axis=1)
        x = x + (states * jax.nn.silu(h @ layer["g"])) @ layer["o"]
        h = rms_norm(x)
        shares, chosen = lax.top_k(jax.nn.softmax(h @ layer["router"]), 2)
        shares = (jax.nn.one_hot(chosen, EXPERTS) * shares[..., None]).sum(-2)
        hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", h, layer["up"]))
        x = x + jnp.einsum("bted,bte->btd", jnp.einsum("btef,efd->bted", hidden, layer["down"]), shares)
        x = block(x, layer)
    return cross_entropy(rms_norm(x) @ p["out"])


@program(
    {
        **LM_PARAMS, "down": [BLOCK_PARAMS] * 2, "middle": BLOCK_PARAMS,
        "up": [{**BLOCK_PARAMS, "join": weight(2 * WIDTH, WIDTH)}] * 2,
    },
    unrolled(3, *BLOCK), unrolled(2, "mlp", *BLOCK, first=3), outside("head"),
)  # fmt: skip
def long_skips_from_the_first_blocks_to_the_last(p: Any) -> Any:
    """The last blocks begin with a product on the residual stream itself, and continue the count of the first."""
    x = p["table"][TOKEN_IDS]
    skips = []
    for layer in p["down"]:
        x = block(x, layer)
        skips.append(x)
    x = block(x, p["middle"])
    for layer in p["up"]:
        x = block(jnp.concatenate([x, skips.pop()], -1) @ layer["join"], layer)
    return cross_entropy(rms_norm(x) @ p["out"])


BY_NAME = {program.name: program for program in PROGRAMS}


@functools.cache
def sites_of(name: str) -> Sites:
    """The sites of a program. It is traced only once."""
    return find_sites(BY_NAME[name].loss, BY_NAME[name].params)
