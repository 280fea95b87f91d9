"""Models whose true kinds are known by construction, to calibrate how certain kinds are.

The first letter of a parameter's name, or of the name scope around a product, says what the product is for (`TRUTHS`).
These names mean nothing to policyc.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from policyc.compiler.sites.site import Site
from tests.support.kind_programs import cross_entropy, rms_norm, rotate, split_heads, weight

TRUTHS = {
    "a": "attention", "s": "scores", "m": "mlp", "e": "experts", "r": "router", "t": "embedding", "h": "head", "n": "",
}  # fmt: skip

B, T, D, H, F, V = 2, 6, 16, 2, 40, 36
TOKENS = np.arange(B * T).reshape(B, T) % V
DATA = np.ones((B, T, D), np.float32)
SQUARE, UP, DOWN = weight(D, D), weight(D, F), weight(F, D)
MLP = {"m1": UP, "m2": DOWN}
QKV = {"a1": SQUARE, "a2": SQUARE, "a3": SQUARE}
ATTENTION = {**QKV, "a4": SQUARE}
BLOCK = {**ATTENTION, **MLP}
ENDS = {"t": weight(V, D), "h": weight(D, V)}

PROGRAMS: dict[str, tuple[Callable[..., Any], Any]] = {}
"""Each loss, with the shapes of its arguments: the parameters, and frozen weights."""


def program(*arguments: Any) -> Callable[[Any], Any]:
    def register(loss: Any) -> Any:
        PROGRAMS[loss.__name__] = loss, arguments
        return loss

    return register


Branch = Callable[[Any], Any]
"""A branch of a residual stream: activations to what is added to them."""


def language_model(
    layer: Any, before: Sequence[Callable[[Any], Branch]] = (), after: Sequence[Callable[[Any], Branch]] = ()
) -> Callable[[Any], Any]:
    """Registers a language model of two layers, with shapes `layer`, by one branch of a layer.

    `before` and `after` make the other branches of a layer from its parameters.
    """

    def register(branch: Any) -> Any:
        def loss(p: Any) -> Any:
            x = p["t"][TOKENS]
            for w in p["l"]:
                for run in (*(make(w) for make in before), partial(branch, w), *(make(w) for make in after)):
                    x = x + run(rms_norm(x))
            return cross_entropy(rms_norm(x) @ p["h"], TOKENS)

        PROGRAMS[branch.__name__] = loss, ({**ENDS, "l": [layer] * 2},)
        return branch

    return register


def truth(site: Site) -> str:
    """The true kind of a site: that of the innermost scope which names one, else that of its parameter."""
    names = [n.text for n in site.scope.path if n.text[0] in TRUTHS and n.text[1:] == "0"]
    names = names or [site.parameters[0].path[-1].text]
    return TRUTHS[names[-1][0]]


def dot(kind: str, equation: str, *operands: Any) -> Any:
    with jax.named_scope(f"{kind}0"):
        return jnp.einsum(equation, *operands)


def softmax_attention(q: Any, k: Any, v: Any) -> Any:
    """Over (batch, tokens, width), with heads."""
    q, k, v = (split_heads(x, H) for x in (q, k, v))
    weights = jax.nn.softmax(dot("s", "bqhd,bkhd->bhqk", q, k) / 3, -1)
    return dot("s", "bhqk,bkhd->bqhd", weights, v).reshape(q.shape[0], q.shape[1], -1)


def attention(p: Any, memory: Any = None) -> Callable[[Any], Any]:
    def run(h: Any) -> Any:
        m = h if memory is None else memory
        return softmax_attention(h @ p["a1"], m @ p["a2"], m @ p["a3"]) @ p["a4"]

    return run


def mlp(p: Any) -> Callable[[Any], Any]:
    return lambda h: jax.nn.gelu(h @ p["m1"]) @ p["m2"]


def frozen(*shape: int) -> Any:
    """An array that a loss closes over."""
    return jnp.asarray(np.full(shape, 0.1, np.float32))


# ---- adapters

LORA = {
    name: {"a": weight(k, 2), "b": weight(2, n)}
    for name, k, n in (("a1", D, D), ("a2", D, D), ("a3", D, D), ("a4", D, D), ("m1", D, F), ("m2", F, D))
}


def lora_block(x: Any, matrix: Callable[..., Any]) -> Any:
    h = rms_norm(x)
    x = x + matrix("a4", softmax_attention(*(matrix(n, h) for n in ("a1", "a2", "a3"))))
    return x + matrix("m2", jax.nn.silu(matrix("m1", rms_norm(x))))


def lora_loss(p: Any, matrix: Callable[..., Any], adapters: str = "am") -> Any:
    x = p["t"][TOKENS]
    for layer in p["l"]:
        x = lora_block(x, lambda name, h, w=layer: matrix(name, h, w[name] if name[0] in adapters else None))
    return cross_entropy(rms_norm(x) @ p["h"], TOKENS)


BASE = {name: frozen(pair["a"].shape[0], pair["b"].shape[1]) for name, pair in LORA.items()}
LORA_MODEL = {**ENDS, "l": [LORA] * 2}


def added(name: str, h: Any, w: Any, base: Any = BASE) -> Any:
    out = dot(name[0], "btk,kn->btn", h, base[name])
    return (
        out
        if w is None
        else out + dot(name[0], "btr,rn->btn", dot(name[0], "btk,kr->btr", h, w["a"]), w["b"])
    )


for _name, _adapted in (
    ("lora_over_closed_over_weights", "am"),
    ("lora_of_the_mlp_over_closed_over_weights", "m"),
    ("lora_of_attention_over_closed_over_weights", "a"),
):
    PROGRAMS[_name] = partial(lora_loss, matrix=added, adapters=_adapted), (LORA_MODEL,)


@program(LORA_MODEL, {name: weight(*w.shape) for name, w in BASE.items()})
def lora_over_an_argument(p: Any, base: Any) -> Any:
    return lora_loss(p, lambda *args: added(*args, base=base))


@program({**ENDS, "l": jax.tree.map(lambda w: weight(3, *w.shape), LORA)})
def lora_over_a_closed_over_scanned_stack(p: Any) -> Any:
    stacked = {name: frozen(3, *w.shape) for name, w in BASE.items()}

    def layer(x: Any, w: Any) -> Any:
        adapters, base = w
        return lora_block(x, lambda name, h: added(name, h, adapters[name], base)), None

    x, _ = lax.scan(layer, p["t"][TOKENS], (p["l"], stacked))
    return cross_entropy(x @ p["h"], TOKENS)


def merged(params: Any) -> Callable[[Any], Any]:
    """Registers a model whose matrices are computed from the weights of an adapter: (p, name, adapter) -> matrix."""

    def register(matrix: Any) -> Any:
        def loss(p: Any) -> Any:
            return lora_loss(p, lambda name, h, w: dot(name[0], "btk,kn->btn", h, matrix(p, name, w)))

        PROGRAMS[matrix.__name__] = loss, (params,)
        return matrix

    return register


def product(a: Any, b: Any) -> Any:
    return dot("n", "kr,rn->kn", a, b)


WITH_BASE = {**LORA_MODEL, "w": {name: weight(*w.shape) for name, w in BASE.items()}}
FIRST = {name: frozen(*pair["a"].shape) for name, pair in LORA.items()}


@merged(WITH_BASE)
def merged_lora(p: Any, name: str, w: Any) -> Any:
    return p["w"][name] + 2 * product(w["a"], w["b"])


@merged(LORA_MODEL)
def merged_lora_over_closed_over_weights(p: Any, name: str, w: Any) -> Any:
    return BASE[name] + product(w["a"], w["b"])


@merged({**ENDS, "l": [{name: {"b": pair["b"]} for name, pair in LORA.items()}] * 2})
def merged_lora_with_closed_over_first_factors(p: Any, name: str, w: Any) -> Any:
    return BASE[name] + product(FIRST[name], w["b"])


@merged(WITH_BASE)
def dora(p: Any, name: str, w: Any) -> Any:
    matrix = p["w"][name] + product(w["a"], w["b"])
    return matrix / jnp.linalg.norm(matrix, axis=0)


@merged(LORA_MODEL)
def factorized_weights(p: Any, name: str, w: Any) -> Any:
    return product(w["a"], w["b"])


@program({"l": [LORA] * 2})
def merged_lora_that_is_all_that_is_learned(p: Any) -> Any:
    """The first block multiplies data by weights; the names of a module say nothing about the products in it."""
    table, head = frozen(V, D), frozen(D, V)

    def matrix(name: str, h: Any, w: Any) -> Any:
        with jax.named_scope("attn"):
            return dot(name[0], "btk,kn->btn", h, BASE[name] + product(w["a"], w["b"]))

    x = table[TOKENS]
    for layer in p["l"]:
        x = lora_block(x, lambda name, h, layer=layer: matrix(name, h, layer[name]))
    return cross_entropy(dot("h", "btk,kn->btn", rms_norm(x), head), TOKENS)


@program({**ENDS, "l": [{name: weight(w.shape[1]) for name, w in BASE.items()}] * 2})
def ia3_over_closed_over_weights(p: Any) -> Any:
    return lora_loss(p, lambda name, h, w: dot(name[0], "btk,kn->btn", h, BASE[name]) * w)


@language_model({**BLOCK, "p1": weight(1, 3, D), "p2": weight(1, 3, D)}, after=[mlp])
def prefix_tuning(p: Any, h: Any) -> Any:
    k, v = (
        jnp.concatenate([jnp.broadcast_to(p[n], (B, 3, D)), h @ w], 1)
        for n, w in (("p1", p["a2"]), ("p2", p["a3"]))
    )
    return softmax_attention(h @ p["a1"], k, v) @ p["a4"]


@language_model({**BLOCK, "m3": weight(D, 4), "m4": weight(4, D)}, before=[attention, mlp])
def bottleneck_adapters(p: Any, h: Any) -> Any:
    return jax.nn.relu(h @ p["m3"]) @ p["m4"]


# ---- weights that a network computes


@language_model(
    {**ATTENTION, "z": weight(1, 5), "n1": weight(5, D * F), "n2": weight(5, F * D)}, before=[attention]
)
def hypernetwork_of_an_embedding(p: Any, h: Any) -> Any:
    up, down = (p["z"] @ p["n1"]).reshape(D, F), jnp.tanh(p["z"] @ p["n2"]).reshape(F, D)
    return dot("m", "btf,fd->btd", jax.nn.relu(dot("m", "btd,df->btf", h, up)), down)


@language_model({**ATTENTION, "n1": weight(D, D * F), "n2": weight(D, F * D)}, before=[attention])
def hypernetwork_of_the_sequence(p: Any, h: Any) -> Any:
    z = h.mean(1)
    up, down = (z @ p["n1"]).reshape(B, D, F), (z @ p["n2"]).reshape(B, F, D)
    return dot("m", "btf,bfd->btd", jax.nn.relu(dot("m", "btd,bdf->btf", h, up)), down)


@language_model({"m1": weight(D, 5), "n1": weight(D, 5 * 7), "m2": weight(7, D)})
def weights_of_each_token(p: Any, h: Any) -> Any:
    return jnp.tanh(dot("m", "btk,btkn->btn", h @ p["m1"], (h @ p["n1"]).reshape(B, T, 5, 7))) @ p["m2"]


@language_model(
    {**BLOCK, "n1": weight(D, 4), "n2": weight(4, D, F), "n3": weight(4, F, D)}, before=[attention]
)
def experts_merged_by_a_soft_router(p: Any, h: Any) -> Any:
    shares = jax.nn.softmax(h.mean(1) @ p["n1"])
    up, down = (dot("n", "be,ekn->bkn", shares, p[n]) for n in ("n2", "n3"))
    return dot("m", "btf,bfd->btd", jax.nn.relu(dot("m", "btd,bdf->btf", h, up)), down)


@language_model({**MLP, "n1": weight(D, 6), "n2": weight(D, 6)}, after=[mlp])
def outer_products_of_each_token(p: Any, h: Any) -> Any:
    u, v = h @ p["n1"], h @ p["n2"]
    return (
        dot("n", "btr,btrs->bts", jnp.tanh(v), u[..., :, None] * v[..., None, :]).sum(-1, keepdims=True) * h
    )


# ---- elementwise states

RWKV = {**ATTENTION, "u": weight(D), "d": weight(D), "m1": UP, "m2": DOWN, "m3": SQUARE}


def shifted(h: Any) -> Any:
    return jnp.pad(h[:, :-1], ((0, 0), (1, 0), (0, 0)))


def channel_mix(p: Any) -> Callable[[Any], Any]:
    def run(h: Any) -> Any:
        mixed = 0.5 * h + 0.5 * shifted(h)
        return jax.nn.sigmoid(mixed @ p["m3"]) * (jnp.square(jax.nn.relu(mixed @ p["m1"])) @ p["m2"])

    return run


@language_model(RWKV, after=[channel_mix])
def rwkv_scanned(p: Any, h: Any) -> Any:
    mixed = 0.5 * h + 0.5 * shifted(h)
    r, k, v = jax.nn.sigmoid(mixed @ p["a1"]), mixed @ p["a2"], mixed @ p["a3"]

    def step(state: Any, inputs: Any) -> Any:
        above, below, top = state
        key, value = inputs
        q = jnp.maximum(top, p["u"] + key)
        e1, e2 = jnp.exp(top - q), jnp.exp(p["u"] + key - q)
        out = (e1 * above + e2 * value) / (e1 * below + e2)
        q = jnp.maximum(top - jnp.exp(p["d"]), key)
        e1, e2 = jnp.exp(top - jnp.exp(p["d"]) - q), jnp.exp(key - q)
        return (e1 * above + e2 * value, e1 * below + e2, q), out

    zero = jnp.zeros((B, D))
    _, out = lax.scan(step, (zero, zero, zero - 1e9), (k.swapaxes(0, 1), v.swapaxes(0, 1)))
    return (r * out.swapaxes(0, 1)) @ p["a4"]


def decay_scan(decay: Any, drive: Any) -> Any:
    def combine(one: Any, two: Any) -> Any:
        return one[0] * two[0], two[0] * one[1] + two[1]

    return lax.associative_scan(combine, (decay, drive), axis=1)[1]


@language_model(RWKV, after=[channel_mix])
def rwkv_by_associative_scan(p: Any, h: Any) -> Any:
    r, k, v = jax.nn.sigmoid(h @ p["a1"]), jnp.exp(h @ p["a2"]), h @ p["a3"]
    decay = jnp.broadcast_to(jnp.exp(-p["d"]), k.shape)
    return (r * decay_scan(decay, k * v) / decay_scan(decay, k)) @ p["a4"]


@language_model(RWKV, after=[channel_mix])
def rwkv_unrolled(p: Any, h: Any) -> Any:
    r, k, v = jax.nn.sigmoid(h @ p["a1"]), jnp.exp(h @ p["a2"]), h @ p["a3"]
    above = below = jnp.zeros((B, D))
    outs = []
    for t in range(T):
        above, below = p["d"] * above + k[:, t] * v[:, t], p["d"] * below + k[:, t]
        outs.append(above / below)
    return (r * jnp.stack(outs, 1)) @ p["a4"]


@language_model(BLOCK, after=[mlp])
def fast_weights_elementwise(p: Any, h: Any) -> Any:
    def step(state: Any, token: Any) -> Any:
        q, k, v = token
        state = 0.9 * state + k[:, :, None] * v[:, None]
        return state, (q[:, :, None] * state).sum(1)

    tokens = tuple((h @ p[n]).swapaxes(0, 1) for n in ("a1", "a2", "a3"))
    return lax.scan(step, jnp.zeros((B, D, D)), tokens)[1].swapaxes(0, 1) @ p["a4"]


@language_model(BLOCK, after=[mlp])
def fast_weights_by_cumulative_sums(p: Any, h: Any) -> Any:
    q, k, v = (h @ p[n] for n in ("a1", "a2", "a3"))
    state = jnp.cumsum(k[..., None] * v[..., None, :], 1)
    return (q[..., None] * state).sum(-2) @ p["a4"]


@language_model(BLOCK, after=[mlp])
def average_of_the_past(p: Any, h: Any) -> Any:
    """A gate times the mean of all tokens: neither a scan nor a product mixes them."""
    weights = jnp.exp(h @ p["a2"])
    context = (weights * (h @ p["a3"])).sum(1, keepdims=True) / weights.sum(1, keepdims=True)
    return (jax.nn.sigmoid(h @ p["a1"]) * context) @ p["a4"]


@language_model(BLOCK, after=[mlp])
def gated_linear_recurrence(p: Any, h: Any) -> Any:
    decay = jax.nn.sigmoid(h @ p["a1"])
    return (decay_scan(decay, (1 - decay) * (h @ p["a2"])) * jax.nn.gelu(h @ p["a3"])) @ p["a4"]


@language_model(BLOCK, after=[mlp])
def long_convolution_by_fft(p: Any, h: Any) -> Any:
    q, k, v = (h @ p[n] for n in ("a1", "a2", "a3"))
    filters = jnp.fft.rfft(jnp.exp(-jnp.arange(2.0 * T)))[:, None]
    mixed = jnp.fft.irfft(jnp.fft.rfft(k * v, 2 * T, axis=1) * filters, axis=1)[:, :T]
    return (q * mixed) @ p["a4"]


@language_model(
    {
        "a1": weight(D, 2 * F),
        "c": weight(4, 1, F),
        "a2": weight(F, 11),
        "a3": weight(3, F),
        "a": weight(F, 4),
        "a4": DOWN,
    }
)
def mamba_with_an_elementwise_readout(p: Any, h: Any) -> Any:
    u, gate = jnp.split(h @ p["a1"], 2, -1)
    shifts = [jnp.pad(u[:, : T - i], ((0, 0), (i, 0), (0, 0))) for i in range(4)]
    u = jax.nn.silu(sum(s * w[0] for s, w in zip(shifts, p["c"], strict=True)))
    low, b, c = jnp.split(u @ p["a2"], [3, 7], -1)
    step = jax.nn.softplus(low @ p["a3"])

    def recur(state: Any, token: Any) -> Any:
        dt, x, b, c = token
        state = jnp.exp(-dt[..., None] * jnp.exp(p["a"])) * state + (dt * x)[..., None] * b[:, None]
        return state, (state * c[:, None]).sum(-1)

    tokens = tuple(x.swapaxes(0, 1) for x in (step, u, b, c))
    y = lax.scan(recur, jnp.zeros((B, F, 4)), tokens)[1].swapaxes(0, 1)
    return (y * jax.nn.silu(gate)) @ p["a4"]


# ---- mixers without a softmax


@language_model(BLOCK, after=[mlp])
def retention(p: Any, h: Any) -> Any:
    q, k, v = (split_heads(h @ p[n], H) for n in ("a1", "a2", "a3"))
    decay = np.tril(0.9 ** np.abs(np.arange(T)[:, None] - np.arange(T))).astype(np.float32)
    out = dot("s", "bhqk,bkhd->bqhd", dot("s", "bqhd,bkhd->bhqk", q, k) * decay, v)
    return rms_norm(out).reshape(h.shape) @ p["a4"]


@language_model(BLOCK, after=[mlp])
def linear_attention(p: Any, h: Any) -> Any:
    q, k, v = (split_heads(h @ p[n], H) for n in ("a1", "a2", "a3"))
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    state = dot("s", "bkhd,bkhe->bhde", k, v)
    below = dot("s", "bqhd,bhd->bqh", q, k.sum(1))
    return (dot("s", "bqhd,bhde->bqhe", q, state) / below[..., None]).reshape(h.shape) @ p["a4"]


@language_model(BLOCK, after=[mlp])
def retention_as_a_recurrence(p: Any, h: Any) -> Any:
    def step(state: Any, token: Any) -> Any:
        q, k, v = token
        state = 0.9 * state + k[:, :, None] * v[:, None]
        return state, dot("s", "bkv,bk->bv", state, q)

    tokens = tuple((h @ p[n]).swapaxes(0, 1) for n in ("a1", "a2", "a3"))
    return rms_norm(lax.scan(step, jnp.zeros((B, D, D)), tokens)[1].swapaxes(0, 1)) @ p["a4"]


@language_model({**BLOCK, "a5": weight(D, 1)}, after=[mlp])
def delta_rule(p: Any, h: Any) -> Any:
    def step(state: Any, token: Any) -> Any:
        q, k, v, rate = token
        error = v - dot("s", "bkv,bk->bv", state, k)
        state = state + rate[:, None] * k[:, :, None] * error[:, None]
        return state, dot("s", "bkv,bk->bv", state, q)

    tokens = [h @ p["a1"], rms_norm(h @ p["a2"]), h @ p["a3"], jax.nn.sigmoid(h @ p["a5"])]
    _, out = lax.scan(step, jnp.zeros((B, D, D)), tuple(x.swapaxes(0, 1) for x in tokens))
    return out.swapaxes(0, 1) @ p["a4"]


@language_model(BLOCK, after=[mlp])
def sigmoid_attention(p: Any, h: Any) -> Any:
    q, k, v = (split_heads(h @ p[n], H) for n in ("a1", "a2", "a3"))
    shares = jax.nn.sigmoid(dot("s", "bqhd,bkhd->bhqk", q, k) - 1)
    return dot("s", "bhqk,bkhd->bqhd", shares, v).reshape(h.shape) @ p["a4"]


@language_model(BLOCK, after=[mlp])
def random_features(p: Any, h: Any) -> Any:
    omega = frozen(D, 8)
    q, k = (jnp.exp(dot("a", "btd,df->btf", h @ p[n], omega)) for n in ("a1", "a2"))
    state = dot("s", "btf,btd->bfd", k, h @ p["a3"])
    return dot("s", "btf,bfd->btd", q, state) / dot("s", "btf,bf->bt", q, k.sum(1))[..., None] @ p["a4"]


@language_model({**ATTENTION, "n5": weight(T, T), **MLP}, after=[mlp])
def attention_free_transformer(p: Any, h: Any) -> Any:
    q, k, v = jax.nn.sigmoid(h @ p["a1"]), jnp.exp(h @ p["a2"]), h @ p["a3"]
    bias = jnp.exp(p["n5"])
    above, below = (dot("n", "qk,bkd->bqd", bias, x) for x in (k * v, k))
    return (q * above / below) @ p["a4"]


# ---- attention


@language_model(
    {"a1": SQUARE, "a2": weight(D, 8), "a3": weight(8, D), "a4": SQUARE, "a5": weight(8, D), **MLP},
    after=[mlp],
)
def latent_attention_with_an_added_rotary_part(p: Any, h: Any) -> Any:
    latent = h @ p["a2"]
    k = split_heads(latent @ p["a5"], H) + rotate(split_heads(jnp.tile(latent, 2), H))
    return (
        softmax_attention(
            rotate(split_heads(h @ p["a1"], H)).reshape(h.shape), k.reshape(h.shape), latent @ p["a3"]
        )
        @ p["a4"]
    )


@language_model(
    {
        "a1": SQUARE,
        "a2": weight(D, 8),
        "a3": weight(8, D),
        "a4": SQUARE,
        "a5": weight(8, D),
        "a6": weight(D, 4),
        "a7": weight(D, H * 4),
        **MLP,
    },
    after=[mlp],
)
def latent_attention_with_added_rotary_scores(p: Any, h: Any) -> Any:
    latent = rms_norm(h @ p["a2"])
    q, k, v = (split_heads(x, H) for x in (h @ p["a1"], latent @ p["a5"], latent @ p["a3"]))
    turned_q, turned_k = rotate(split_heads(h @ p["a7"], H)), rotate((h @ p["a6"])[:, :, None])[:, :, 0]
    scores = dot("s", "bqhd,bkhd->bhqk", q, k) + dot("s", "bqhd,bkd->bhqk", turned_q, turned_k)
    return dot("s", "bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(h.shape) @ p["a4"]


@language_model(
    {
        "a1": weight(D, H, 8),
        "a2": weight(D, 8),
        "a3": weight(H, 8, 12),
        "a4": weight(H, 12, D),
        "a5": weight(H, 8, 8),
        **MLP,
    },
    after=[mlp],
)
def latent_attention_absorbed(p: Any, h: Any) -> Any:
    """Scores between queries and the latents themselves; the values are computed from their result, for each head."""
    latent = rms_norm(h @ p["a2"])
    q = jnp.einsum("bthd,hdc->bthc", jnp.einsum("btd,dhc->bthc", h, p["a1"]), p["a5"])
    shares = jax.nn.softmax(dot("s", "bqhc,bkc->bhqk", q, latent))
    values = jnp.einsum("bqhc,hcd->bqhd", dot("s", "bhqk,bkc->bqhc", shares, latent), p["a3"])
    return jnp.einsum("bqhd,hdo->bqo", values, p["a4"])


@language_model(
    {"a1": SQUARE, "a2": weight(D, 16), "a3": weight(8, D), "a4": SQUARE, "a5": weight(8, D), **MLP},
    after=[mlp],
)
def latent_attention_with_rotary_parts_of_one_projection(p: Any, h: Any) -> Any:
    """The rotary part of the keys is the other half of the latents' projection, turned by a sum and added."""

    def turn(x: Any) -> Any:
        cos = np.cos(np.arange(T, dtype=np.float32))[:, None]
        return x * cos + jnp.concatenate([-x[..., D // 2 :], x[..., : D // 2]], -1) * (1 - cos)

    both = h @ p["a2"]
    k = both[..., :8] @ p["a5"] + turn(both)
    q, k = split_heads(turn(h @ p["a1"]), H), split_heads(k, H)
    scores = dot("s", "bqhd,bkhd->bhqk", q, k) / 4
    v = split_heads(both[..., :8] @ p["a3"], H)
    return dot("s", "bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(h.shape) @ p["a4"]


@language_model(
    {"a1": weight(D, 2 * D), "a2": weight(D, 2 * D), "a3": SQUARE, "a4": SQUARE, "z": weight(1), **MLP},
    after=[mlp],
)
def differential_attention(p: Any, h: Any) -> Any:
    (q1, q2), (k1, k2) = (jnp.split(split_heads(h @ p[n], H), 2, -1) for n in ("a1", "a2"))
    one, two = (jax.nn.softmax(dot("s", "bqhd,bkhd->bhqk", q, k)) for q, k in ((q1, k1), (q2, k2)))
    out = dot("s", "bhqk,bkhd->bqhd", one - p["z"] * two, split_heads(h @ p["a3"], H))
    return rms_norm(out).reshape(h.shape) @ p["a4"]


@language_model({"a1": SQUARE, "a2": weight(D, 8), "a3": weight(D, 8), "a4": SQUARE, **MLP}, after=[mlp])
def multi_query_attention(p: Any, h: Any) -> Any:
    q, k, v = split_heads(h @ p["a1"], H), h @ p["a2"], h @ p["a3"]
    shares = jax.nn.softmax(dot("s", "bqhd,bkd->bhqk", q, k))
    return dot("s", "bhqk,bkd->bqhd", shares, v).reshape(h.shape) @ p["a4"]


@language_model(BLOCK, after=[mlp])
def online_softmax(p: Any, h: Any) -> Any:
    q, k, v = (split_heads(h @ p[n], H) for n in ("a1", "a2", "a3"))

    def step(state: Any, chunk: Any) -> Any:
        top, below, out = state
        logits = dot("s", "bqhd,bkhd->bhqk", q, chunk[0])
        new = jnp.maximum(top, logits.max(-1))
        shares, scale = jnp.exp(logits - new[..., None]), jnp.exp(top - new)
        out = out * scale[..., None] + dot("s", "bhqk,bkhd->bhqd", shares, chunk[1])
        return (new, below * scale + shares.sum(-1), out), None

    chunks = tuple(x.reshape(B, 3, 2, H, -1).swapaxes(0, 1) for x in (k, v))
    init = jnp.full((B, H, T), -1e9), jnp.zeros((B, H, T)), jnp.zeros((B, H, T, D // H))
    (_, below, out), _ = lax.scan(step, init, chunks)
    return (out / below[..., None]).swapaxes(1, 2).reshape(h.shape) @ p["a4"]


@language_model({"a1": weight(D, 3 * D + F), "a4": SQUARE, "m2": DOWN})
def parallel_blocks_with_one_fused_projection(p: Any, h: Any) -> Any:
    q, k, v, up = jnp.split(h @ p["a1"], [D, 2 * D, 3 * D], -1)
    return softmax_attention(q, k, v) @ p["a4"] + jax.nn.gelu(up) @ p["m2"]


@language_model({**BLOCK, "a5": weight(T, 3), "a6": weight(T, 3)}, after=[mlp])
def keys_projected_along_tokens(p: Any, h: Any) -> Any:
    k, v = (jnp.einsum("btd,tk->bkd", h @ p[n], p[e]) for n, e in (("a2", "a5"), ("a3", "a6")))
    return softmax_attention(h @ p["a1"], k, v) @ p["a4"]


@language_model({"a1": SQUARE, "a2": weight(D, T), "a3": SQUARE, "a4": SQUARE, **MLP}, after=[mlp])
def synthesized_attention(p: Any, h: Any) -> Any:
    shares = jax.nn.softmax(jax.nn.relu(h @ p["a1"]) @ p["a2"])
    return dot("s", "bqk,bkd->bqd", shares, h @ p["a3"]) @ p["a4"]


@program({**ENDS, "e": [BLOCK] * 2, "d": [{"x": ATTENTION, **BLOCK}] * 2})
def encoder_and_decoder(p: Any) -> Any:
    memory = p["t"][TOKENS]
    for w in p["e"]:
        memory = memory + attention(w)(rms_norm(memory))
        memory = memory + mlp(w)(rms_norm(memory))
    x = p["t"][TOKENS]
    for w in p["d"]:
        for branch in (attention(w), attention(w["x"], rms_norm(memory)), mlp(w)):
            x = x + branch(rms_norm(x))
    return cross_entropy(x @ p["h"], TOKENS)


@language_model({"x": BLOCK, **BLOCK}, before=[attention], after=[mlp])
def cross_attention_to_data(p: Any, h: Any) -> Any:
    return attention(p["x"], DATA)(h)


@program({"t": weight(D, D), "q": weight(4, D), "x": BLOCK, "l": [BLOCK] * 3, "h": weight(D, 5)})
def latents_that_read_data(p: Any) -> Any:
    data, x = DATA @ p["t"], jnp.broadcast_to(p["q"], (B, 4, D))
    for branch in (attention(p["x"], data), mlp(p["x"]), *(f(w) for w in p["l"] for f in (attention, mlp))):
        x = x + branch(rms_norm(x))
    return cross_entropy(x.mean(1) @ p["h"], np.zeros(B, int))


# ---- other branches


def token_mixing(p: Any) -> Branch:
    return lambda h: (jax.nn.gelu(h.swapaxes(1, 2) @ p["m1"]) @ p["m2"]).swapaxes(1, 2)


@language_model({"m1": weight(T, 9), "m2": weight(9, T), "m3": UP, "m4": DOWN}, before=[token_mixing])
def mixing_by_weights(p: Any, h: Any) -> Any:
    return jax.nn.gelu(h @ p["m3"]) @ p["m4"]


@language_model({"m1": weight(D, 2 * F), "m2": weight(T, T), "m3": DOWN})
def spatial_gating(p: Any, h: Any) -> Any:
    u, v = jnp.split(jax.nn.gelu(h @ p["m1"]), 2, -1)
    return (u * jnp.einsum("ts,bsf->btf", p["m2"], rms_norm(v))) @ p["m3"]


@language_model(
    {**ATTENTION, "m1": UP, "m2": UP, "m3": DOWN, "g": weight(F), "b": weight(F)}, before=[attention]
)
def gated_mlp_with_norm_bias_and_dropout(p: Any, h: Any) -> Any:
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, (B, T, F))
    hidden = jax.nn.silu(h @ p["m1"]) * (h @ p["m2"] + p["b"])
    hidden = (hidden - hidden.mean(-1, keepdims=True)) / (hidden.std(-1, keepdims=True) + 1e-6) * p["g"]
    return jax.checkpoint(lambda x: jnp.where(keep, x / 0.9, 0) @ p["m3"])(hidden)


@language_model({**MLP, "m3": weight(D, 4), "m4": weight(4, D)})
def squeeze_and_excitation(p: Any, h: Any) -> Any:
    out = mlp(p)(h)
    return out * jax.nn.sigmoid(jax.nn.relu(out.mean(1, keepdims=True) @ p["m3"]) @ p["m4"])


@program({"c": [weight(3, D, D)] * 2, "m1": weight(D * T, F), "m2": weight(F, F), "h": weight(F, 5)})
def convolutions_and_a_perceptron(p: Any) -> Any:
    x = DATA
    for w in p["c"]:
        x = jax.nn.relu(lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")))
    x = jax.nn.relu(jax.nn.relu(x.reshape(B, -1) @ p["m1"]) @ p["m2"])
    return cross_entropy(x @ p["h"], np.zeros(B, int))


@program(
    {
        "i": weight(3, D, D),
        "c": [weight(3, D, D)] * 4,
        "l": [ATTENTION] * 2,
        "t1": weight(8, D),
        "t2": SQUARE,
    }
)
def u_net(p: Any) -> Any:
    def conv(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))

    time = (jax.nn.silu(DATA[:, 0, :8] @ p["t1"]) @ p["t2"])[:, None]
    x = conv(DATA, p["i"])
    skips = []
    for w, own in zip(p["c"][:2], p["l"], strict=True):
        x = x + jax.nn.silu(conv(rms_norm(x), w) + time)
        x = x + attention(own)(rms_norm(x))
        skips.append(x)
    for w in p["c"][2:]:
        x = skips.pop() + jax.nn.silu(conv(rms_norm(x), w))
    return jnp.square(x - DATA).mean()


ADJACENCY = jnp.asarray(np.eye(T, dtype=np.float32))


@program({"l": [{"m1": SQUARE, "m2": SQUARE}] * 3, "h": weight(D, 5)})
def graph_convolutions(p: Any) -> Any:
    x = DATA[0]
    for w in p["l"]:
        x = jax.nn.relu(dot("n", "ts,sd->td", ADJACENCY, x @ w["m1"]) + x @ w["m2"])
    return cross_entropy(x @ p["h"], np.zeros(T, int))


@program({"l": [{"a1": SQUARE, "u": weight(D), "v": weight(D)}] * 3, "h": weight(D, 5)})
def graph_attention(p: Any) -> Any:
    x = DATA[0]
    for w in p["l"]:
        h = x @ w["a1"]
        logits = (h * w["u"]).sum(-1)[:, None] + (h * w["v"]).sum(-1)
        x = x + dot("s", "ts,sd->td", jax.nn.softmax(jnp.where(ADJACENCY > 0, logits, -1e9)), h)
    return cross_entropy(x @ p["h"], np.zeros(T, int))


LSTM = {"m1": weight(D, 4 * D), "m2": weight(D, 4 * D)}


@program({**ENDS, "l": [LSTM] * 2})
def lstm(p: Any) -> Any:
    x = p["t"][TOKENS]
    for w in p["l"]:

        def cell(state: Any, inputs: Any, w: Any = w) -> Any:
            c, h = state
            i, f, g, o = jnp.split(inputs @ w["m1"] + h @ w["m2"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (c, h), h

        x = lax.scan(cell, (jnp.zeros((B, D)),) * 2, x.swapaxes(0, 1))[1].swapaxes(0, 1)
    return cross_entropy(x @ p["h"], TOKENS)


@program({"m": weight(D, D), "m1": SQUARE, "m2": SQUARE, "h": weight(D, 5)})
def deep_equilibrium(p: Any) -> Any:
    x = DATA @ p["m"]
    z = lax.fori_loop(0, 5, lambda _, z: jnp.tanh(jnp.tanh(z @ p["m1"]) @ p["m2"] + x), x)
    return cross_entropy(z.mean(1) @ p["h"], np.zeros(B, int))


@program({"t": weight(D, F), "l": [{"m1": weight(F, F), "m2": weight(F, F)}] * 3, "n": weight(F, 3)})
def denoiser(p: Any) -> Any:
    x = DATA @ p["t"]
    for w in p["l"]:
        x = x + jax.nn.silu(rms_norm(x) @ w["m1"]) @ w["m2"]
    return jnp.square(x @ p["n"] - DATA[..., :3]).mean()


@program({"m1": UP, "m2": weight(F, 6), "m3": weight(3, F), "m4": DOWN})
def variational_autoencoder(p: Any) -> Any:
    mean, scale = jnp.split(jax.nn.relu(DATA @ p["m1"]) @ p["m2"], 2, -1)
    z = mean + jnp.exp(scale) * jax.random.normal(jax.random.key(0), mean.shape)
    return jnp.square(jax.nn.relu(z @ p["m3"]) @ p["m4"] - DATA).mean() + jnp.square(mean).mean()


# ---- experts

MOE = ATTENTION | {
    "r": weight(D, 4),
    "e1": weight(4, D, F),
    "e2": weight(4, F, D),
}


@language_model(MOE, before=[attention])
def dense_mixture(p: Any, h: Any) -> Any:
    shares, chosen = lax.top_k(jax.nn.softmax(h @ p["r"]), 2)
    gates = (jax.nn.one_hot(chosen, 4) * shares[..., None]).sum(-2)
    hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", h, p["e1"]))
    return dot("n", "bted,bte->btd", jnp.einsum("btef,efd->bted", hidden, p["e2"]), gates)


@language_model(MOE, before=[attention])
def ragged_mixture(p: Any, h: Any) -> Any:
    tokens = h.reshape(-1, D)
    gate, chosen = lax.top_k(jax.nn.softmax(tokens @ p["r"]), 1)
    order = jnp.argsort(chosen[:, 0])
    sizes = jnp.bincount(chosen[:, 0], length=4)
    hidden = jax.nn.silu(lax.ragged_dot(tokens[order], p["e1"], sizes))
    return (lax.ragged_dot(hidden, p["e2"], sizes)[jnp.argsort(order)] * gate).reshape(h.shape)


@language_model({"r": weight(D, 4), "e1": weight(4, D, F), "e2": weight(4, F, D)})
def soft_mixture(p: Any, h: Any) -> Any:
    """All experts, weighed by a softmax: nothing is chosen."""
    hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", h, p["e1"]))
    return dot(
        "n", "bted,bte->btd", jnp.einsum("btef,efd->bted", hidden, p["e2"]), jax.nn.softmax(h @ p["r"])
    )


@program({"m1": UP, "m2": DOWN, "a1": SQUARE, "a2": weight(D, 1), "h": weight(D, 2)})
def pooling_of_instances(p: Any) -> Any:
    x = jax.nn.relu(jax.nn.relu(DATA @ p["m1"]) @ p["m2"])
    shares = jax.nn.softmax((jnp.tanh(x @ p["a1"]) @ p["a2"])[..., 0])
    return cross_entropy(dot("s", "bt,btd->bd", shares, x) @ p["h"], np.zeros(B, int))


def dual_state_space(p: Any) -> Branch:
    def mix(h: Any) -> Any:
        x = jax.nn.silu(h @ p["a1"])
        decay = np.tril(0.9 ** np.abs(np.arange(T)[:, None] - np.arange(T))).astype(np.float32)
        scores = dot("s", "btn,bsn->bts", x @ p["a2"], x @ p["a3"]) * decay
        return dot("s", "bts,bsf->btf", scores, x @ p["a5"]) @ p["a4"]

    return mix


@language_model(
    {**MLP, "a1": weight(D, F), "a2": weight(F, 4), "a3": weight(F, 4), "a4": DOWN, "a5": weight(F, F)},
    before=[dual_state_space],
)
def sparse_mlp_and_dual_state_space(p: Any, h: Any) -> Any:
    """The largest hidden values alone are multiplied: a choice, but not of experts."""
    hidden = h @ p["m1"]
    return jnp.where(hidden >= lax.top_k(hidden, 8)[0][..., -1:], hidden, 0) @ p["m2"]


# ---- towers, passes and heads


def trunk(p: Any, x: Any) -> Any:
    for w in p["l"]:
        x = x + attention(w)(rms_norm(x))
        x = x + mlp(w)(rms_norm(x))
    return rms_norm(x)


def log_likelihood(p: Any, tokens: Any) -> Any:
    return -cross_entropy(trunk(p, p["t"][tokens]) @ p["h"], tokens)


@program({**ENDS, "l": [BLOCK] * 2})
def preference_pairs(p: Any) -> Any:
    return -jax.nn.log_sigmoid(log_likelihood(p, TOKENS) - log_likelihood(p, TOKENS[::-1]))


@program({"t": weight(V, D), "l": [BLOCK] * 2, "h": weight(D, 2)})
def siamese_pairs(p: Any) -> Any:
    one, two = (trunk(p, p["t"][tokens]).mean(1) for tokens in (TOKENS, TOKENS[::-1]))
    return cross_entropy(jnp.abs(one - two) @ p["h"], np.zeros(B, int))


@program({"t": weight(V, D), "x": {"l": [BLOCK] * 2}, "y": {"l": [BLOCK] * 3}, "i": {"t": weight(D, D)}})
def towers_without_projections(p: Any) -> Any:
    one, two = trunk(p["x"], p["t"][TOKENS]).mean(1), trunk(p["y"], DATA @ p["i"]["t"]).mean(1)
    return cross_entropy(dot("h", "xd,yd->xy", one, two), np.arange(B))


@program({"t": weight(D, D), "l": [BLOCK] * 2, "h": weight(D, 5), "n": weight(D, 1)})
def actor_and_critic(p: Any) -> Any:
    x = trunk(p, DATA @ p["t"]).mean(1)
    return cross_entropy(x @ p["h"], np.zeros(B, int)) + jnp.square(x @ p["n"]).mean()


@program(
    {
        "x": {"m1": UP, "m2": weight(F, F), "h": weight(F, 5)},
        "y": {"m1": UP, "m2": weight(F, F), "m3": weight(F, 1)},
    }
)
def actor_beside_critic(p: Any) -> Any:
    def tower(w: Any) -> Any:
        return jnp.tanh(jnp.tanh(DATA[:, 0] @ w["m1"]) @ w["m2"])

    return (
        cross_entropy(tower(p["x"]) @ p["x"]["h"], np.zeros(B, int))
        + jnp.square(tower(p["y"]) @ p["y"]["m3"]).mean()
    )


@program({"t": weight(V, D), "l": jax.tree.map(lambda w: weight(3, *w.shape), BLOCK), "n1": weight(D, 1)})
def reward_model(p: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        x = x + attention(w)(rms_norm(x))
        return x + mlp(w)(rms_norm(x)), None

    x, _ = lax.scan(layer, p["t"][TOKENS], p["l"])
    return -jax.nn.log_sigmoid((rms_norm(x)[:, -1] @ p["n1"]).sum())


@program({"t": weight(V, D), "l": [BLOCK] * 2})
def tied_head(p: Any) -> Any:
    return cross_entropy(dot("h", "btd,vd->btv", trunk(p, p["t"][TOKENS]), p["t"]), TOKENS)


@program({"x": {"t": weight(V, D), "m1": UP, "m2": DOWN}, "y": {"t": weight(V, D), "m1": UP, "m2": DOWN}})
def two_towers_of_a_recommender(p: Any) -> Any:
    one, two = (mlp(p[n])(p[n]["t"][TOKENS]).mean(1) for n in "xy")
    return cross_entropy(dot("h", "xd,yd->xy", one, two), np.arange(B))


@program({**ENDS, "l": jax.tree.map(lambda w: weight(2, *w.shape), [BLOCK] * 2)})
def ensemble(p: Any) -> Any:
    return cross_entropy(
        jax.vmap(lambda layers: trunk({"l": layers}, p["t"][TOKENS]))(p["l"]).mean(0) @ p["h"], TOKENS
    )


@program({**ENDS, "l": [BLOCK] * 2})
def distilled_from_closed_over_logits(p: Any) -> Any:
    teacher = jax.nn.softmax(frozen(B, T, V))
    return -(teacher * jax.nn.log_softmax(trunk(p, p["t"][TOKENS]) @ p["h"])).sum()
