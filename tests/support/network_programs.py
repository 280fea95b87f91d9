"""Losses of several networks: towers, passes, trunks with branches. Each product is written with its layer.

The layer and the depth of its network are in a name scope around the product, which the analysis does not read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from policyc.compiler.sites.site import Site
from tests.support.gemms import slow

BATCH, TOKENS, D, HIDDEN, OUT = 2, 4, 8, 24, 10
X = jax.ShapeDtypeStruct((2, BATCH, TOKENS, D), "float32")
Numbers = Sequence[int]
Layer = Callable[[Any, Any, Numbers, int], Any]
"""(activation, parameters, its number in each iteration of the loop around it, the depth of its network)."""

_TRUE: dict[str, tuple[tuple[int, ...], int]] = {}


def at(numbers: Numbers, depth: int) -> AbstractContextManager[None]:
    """A scope that says the layers of the products in it. Its name has no digits, which could be an index."""
    value = tuple(numbers), depth
    name = "true" + "".join("abcdefghij"[int(digit)] for digit in str(len(_TRUE)))
    name = next((known for known, other in _TRUE.items() if other == value), name)
    _TRUE[name] = value
    return jax.named_scope(name)


def true_layers(site: Site) -> tuple[tuple[int, ...], int] | None:
    """The layers of a site and the depth of its network, as the program says them; None outside networks."""
    return next((_TRUE[n.text] for n in reversed(site.scope.path) if n.text in _TRUE), None)


# ---- layers


def w(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def norm(x: Any) -> Any:
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def attend(x: Any, memory: Any, p: Any) -> Any:
    q, k, v = x @ p["q"], memory @ p["k"], memory @ p["v"]
    scores = jnp.einsum("bqd,bkd->bqk", q, k)
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v) @ p["o"]


def mlp(x: Any, p: Any) -> Any:
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


SQUARE = w(D, D)
ATTENTION = dict.fromkeys("qkvo", SQUARE)
MLP = {"up": w(D, HIDDEN), "down": w(HIDDEN, D)}


def pre_norm(x: Any, p: Any) -> Any:
    h = norm(x)
    x = x + attend(h, h, p)
    return x + mlp(norm(x), p)


def post_norm(x: Any, p: Any) -> Any:
    x = norm(x + attend(x, x, p))
    return norm(x + mlp(x, p))


def parallel(x: Any, p: Any) -> Any:
    h = norm(x)
    return x + attend(h, h, p) + mlp(h, p)


def adapted(x: Any, p: Any) -> Any:
    h = norm(x)
    x = x + attend(h, h, p)
    h = norm(x)
    return x + jax.nn.gelu(h @ p["up"] + h @ p["a"] @ p["b"]) @ p["down"]


def gated(x: Any, p: Any) -> Any:
    """No residual: products that fork and join in each layer."""
    return (jax.nn.silu(x @ p["up"]) * (x @ p["gate"])) @ p["down"]


def mixture(x: Any, p: Any) -> Any:
    h = norm(x)
    x = x + attend(h, h, p)
    h = norm(x).reshape(-1, D)
    shares, chosen = lax.top_k(jax.nn.softmax(h @ p["router"]), 1)
    order = jnp.argsort(chosen.ravel())
    sizes = jnp.bincount(chosen.ravel(), length=2)
    y = lax.ragged_dot(jax.nn.relu(lax.ragged_dot(h[order], p["one"], sizes)), p["two"], sizes)
    return x + (y[jnp.argsort(order)] * shares).reshape(x.shape)


LAYERS: dict[str, tuple[Callable[[Any, Any], Any], Any]] = {
    "pre-norm": (pre_norm, {**ATTENTION, **MLP}),
    "post-norm": (post_norm, {**ATTENTION, **MLP}),
    "parallel": (parallel, {**ATTENTION, **MLP}),
    "adapted": (adapted, {**ATTENTION, **MLP, "a": w(D, 2), "b": w(2, HIDDEN)}),
    "mixture": (mixture, {**ATTENTION, "router": w(D, 2), "one": w(2, D, HIDDEN), "two": w(2, HIDDEN, D)}),
    "residual mlp": (lambda x, p: x + mlp(norm(x), p), MLP),
    "gated": (gated, {**MLP, "gate": w(D, HIDDEN)}),
    "one product": (lambda x, p: jnp.tanh(x @ p["up"]), {"up": SQUARE}),
}

# ---- arrangements: the depth of each network of parameters, and a loss of (layer, networks, two inputs)


def chain(layer: Layer, x: Any, stack: Any, first: int = 0, depth: int = 0) -> Any:
    depth = depth or first + len(stack)
    for number, p in enumerate(stack, first):
        x = layer(x, p, [number], depth)
    return x


def two_passes(layer: Layer, p: Any, x: Any) -> Any:
    return score(p, chain(layer, x[0], p["a"])) - score(p, chain(layer, x[1], p["a"]))


def passes_in_turn(layer: Layer, p: Any, x: Any) -> Any:
    one, two = x[0], x[1]
    for number, q in enumerate(p["a"]):
        one, two = (layer(h, q, [number], len(p["a"])) for h in (one, two))
    return score(p, one) * score(p, two)


def microbatches(layer: Layer, p: Any, x: Any) -> Any:
    return sum(score(p, chain(layer, part[None], p["a"])) for h in x for part in h)


def two_towers(layer: Layer, p: Any, x: Any) -> Any:
    return score(p, chain(layer, x[0], p["a"])) + score(p, chain(layer, x[1], p["b"]))


def towers_in_turn(layer: Layer, p: Any, x: Any) -> Any:
    one, two = x[0], x[1]
    for number, (q, r) in enumerate(itertools.zip_longest(p["a"], p["b"])):
        one = one if q is None else layer(one, q, [number], len(p["a"]))
        two = two if r is None else layer(two, r, [number], len(p["b"]))
    return score(p, one) * score(p, two)


def contrast(layer: Layer, p: Any, x: Any) -> Any:
    one, two = (chain(layer, h, p[name]).mean(1) for h, name in zip(x, "ab", strict=True))
    return -jnp.diag(jax.nn.log_softmax(one @ two.T)).mean()


def actor_and_critic(layer: Layer, p: Any, x: Any) -> Any:
    """Both read the same data."""
    return score(p, chain(layer, x[0], p["a"])) + jnp.square(chain(layer, x[0], p["b"])).mean()


def teacher(layer: Layer, p: Any, x: Any) -> Any:
    target = lax.stop_gradient(chain(layer, x[0], p["b"]))
    return jnp.square(chain(layer, x[0], p["a"]) - target).mean()


def trunk_and_branches(layer: Layer, p: Any, x: Any) -> Any:
    trunk = chain(layer, x[0], p["c"])
    return score(p, chain(layer, trunk, p["a"])) + jnp.square(chain(layer, trunk, p["b"])).mean()


def towers_that_join(layer: Layer, p: Any, x: Any) -> Any:
    joined = chain(layer, x[0], p["a"]) + chain(layer, x[1], p["b"])
    return score(p, chain(layer, joined, p["c"]))


def siamese_then_joined(layer: Layer, p: Any, x: Any) -> Any:
    one, two = (chain(layer, h, p["a"]) for h in x)
    return score(p, chain(layer, one * two, p["c"]))


def ensemble(layer: Layer, p: Any, x: Any) -> Any:
    members = [chain(layer, x[0], p[name]) for name in "abc"]
    return score(p, sum(members) / 3)


def shared_weights(layer: Layer, p: Any, x: Any) -> Any:
    return score(p, chain(layer, x[0], [p["a"][0]] * 4))


def scan_of_passes(layer: Layer, p: Any, x: Any) -> Any:
    return lax.scan(lambda total, h: (total + score(p, chain(layer, h, p["a"])), None), 0.0, x)[0]


def ensemble_in_a_vmap(layer: Layer, p: Any, x: Any) -> Any:
    members = jax.tree.map(lambda *a: jnp.stack(a), p["a"], p["b"])
    return jax.vmap(lambda q: score(p, chain(layer, x[0], q)))(members).sum()


def stacked(stack: Any) -> Any:
    return jax.tree.map(lambda *a: jnp.stack(a), *stack)


def scan(layer: Layer, x: Any, stack: Any, first: int = 0, depth: int = 0, **options: Any) -> Any:
    numbers = range(first, first + len(stack))
    if options.get("reverse"):
        numbers = numbers[::-1]
    size = depth or first + len(stack)
    return lax.scan(lambda h, q: (layer(h, q, numbers, size), None), x, stacked(stack), **options)[0]


def scanned_passes(layer: Layer, p: Any, x: Any) -> Any:
    return score(p, scan(layer, x[0], p["a"])) - score(p, scan(layer, x[1], p["a"]))


def passes_in_one_scan(layer: Layer, p: Any, x: Any) -> Any:
    def body(carry: Any, q: Any) -> Any:
        return tuple(layer(h, q, range(len(p["a"])), len(p["a"])) for h in carry), None

    one, two = lax.scan(body, (x[0], x[1]), stacked(p["a"]))[0]
    return score(p, one) * score(p, two)


def towers_in_one_scan(layer: Layer, p: Any, x: Any) -> Any:
    depth = len(p["c"])

    def body(carry: Any, q: Any) -> Any:
        return tuple(layer(h, r, range(depth), depth) for h, r in zip(carry, q, strict=True)), None

    one, two = lax.scan(body, (x[0], x[1]), (stacked(p["b"]), stacked(p["c"])))[0]
    return score(p, one) * score(p, two)


def scanned_then_unrolled_passes(layer: Layer, p: Any, x: Any) -> Any:
    depth = len(p["a"]) + len(p["b"])
    ends = [chain(layer, scan(layer, h, p["a"], depth=depth), p["b"], len(p["a"]), depth) for h in x]
    return score(p, ends[0]) + score(p, ends[1])


def backwards_in_a_scan(layer: Layer, p: Any, x: Any) -> Any:
    return score(p, scan(layer, x[0], p["a"], reverse=True)) + score(p, scan(layer, x[1], p["b"]))


def score(p: Any, h: Any) -> Any:
    return jax.nn.log_softmax(norm(h) @ p["out"])[..., 0].mean()


def cross(layer: Layer, x: Any, memory: Any, p: Any, numbers: Numbers, depth: int) -> Any:
    """A layer of a network that also reads another network."""
    with at(numbers, depth):
        x = x + attend(norm(x), memory, p["cross"])
    return layer(x, p, numbers, depth)


def towers_that_read_each_other(layer: Layer, p: Any, x: Any) -> Any:
    """LXMERT: each has layers of its own first, of different number."""
    one, two = chain(layer, x[0], p["a"], depth=6), chain(layer, x[1], p["b"], depth=8)
    for number, (q, r) in enumerate(zip(p["a"], p["c"], strict=False)):
        one, two = cross(layer, one, two, q, [3 + number], 6), cross(layer, two, one, r, [5 + number], 8)
    return score(p, one) * score(p, two)


def towers_in_one_scan_that_read_each_other(layer: Layer, p: Any, x: Any) -> Any:
    def body(carry: Any, q: Any) -> Any:
        (one, two), numbers = carry, range(5)
        return (cross(layer, one, two, q[0], numbers, 5), cross(layer, two, one, q[1], numbers, 5)), None

    one, two = lax.scan(body, (x[0], x[1]), (stacked(p["b"]), stacked(p["c"])))[0]
    return score(p, one) * score(p, two)


def encoder_and_decoder_twice(layer: Layer, p: Any, x: Any) -> Any:
    total = 0.0
    for h in x:
        memory, y = norm(chain(layer, h, p["a"])), h[:, ::-1]
        for number, q in enumerate(p["b"]):
            y = cross(layer, y, memory, q, [number], 5)
        total += score(p, y)
    return total


def long_skips_twice(layer: Layer, p: Any, x: Any) -> Any:
    total = 0.0
    for h in x:
        skips = []
        for number, q in enumerate(p["a"]):
            h = layer(h, q, [number], 8)
            skips.append(h)
        for number, q in enumerate(p["b"], 3):
            h = layer(h + 0.5 * skips.pop() if skips else h, q, [number], 8)
        total += score(p, h)
    return total


def exits_of_several_layers(layer: Layer, p: Any, x: Any) -> Any:
    """A small network reads each layer but the last."""
    h = chain(layer, x[0], p["b"][:1], depth=5)
    total = score(p, h + mlp(norm(h), p["exit"]))
    for number, q in enumerate(p["b"][1:], 1):
        h = layer(h, q, [number], 5)
        if number < 4:
            total += score(p, h + mlp(norm(h), p["exit"]))
    return total + score(p, h)


def loop_over_all_layers(layer: Layer, p: Any, x: Any) -> Any:
    return score(p, chain(layer, x[0], p["a"] * 3))


def exits_equal_to_a_layer(layer: Layer, p: Any, x: Any) -> Any:
    """Deep supervision. By their form, the exits are a stack as well as the layers after them."""
    h, total = x[0], 0.0
    for number, q in enumerate(p["b"]):
        h = layer(h, q, [number], 5)
        total += score(p, layer(h, p["last"], [0], 1) if number < 4 else h)
    return total


def exit_of_two_layers(layer: Layer, p: Any, x: Any) -> Any:
    h = chain(layer, x[0], p["b"][:2], depth=5)
    return score(p, chain(layer, h, p["a"][:2])) + score(p, chain(layer, h, p["b"][2:], 2, 5))


def exits_without_a_list(layer: Layer, p: Any, x: Any) -> Any:
    return exits_equal_to_a_layer(layer, {**p, "b": list(p["named"].values())}, x)


def exit_of_the_last_layer(layer: Layer, p: Any, x: Any) -> Any:
    h = chain(layer, x[0], p["b"])
    return score(p, h + mlp(norm(h), p["exit"]))


def exit_of_a_scan(layer: Layer, p: Any, x: Any) -> Any:
    h = scan(layer, x[0], p["b"])
    return score(p, h + mlp(norm(h), p["exit"]))


def stem_before_the_layers(layer: Layer, p: Any, x: Any) -> Any:
    return score(p, chain(layer, x[0] + mlp(norm(x[0]), p["exit"]), p["b"]))


def trunk_with_one_equal_branch(layer: Layer, p: Any, x: Any) -> Any:
    """By their form, the layers of the trunk and of the first branch are one network."""
    trunk = chain(layer, x[0], p["c"])
    total = score(p, chain(layer, trunk, p["a"]))
    return total + jnp.square(jnp.tanh(trunk @ p["exit"]["up"]) @ p["exit"]["down"]).mean()


def one_list_for_a_trunk_and_two_passes(layer: Layer, p: Any, x: Any) -> Any:
    trunk = chain(layer, x[0], p["b"][:2], depth=5)
    return sum(score(p, chain(layer, h, p["b"][2:], 2, 5)) for h in (trunk, 2 * trunk))


def two_slices_of_the_data_joined(layer: Layer, p: Any, x: Any) -> Any:
    """ControlNet: the sum of one slice and a projection of the other is no residual addition."""
    joined = chain(layer, x[0] + x[1] @ p["exit"]["up"], p["b"])
    return score(p, chain(layer, x[0], p["a"])) * score(p, joined)


def hourglass(layer: Layer, p: Any, x: Any) -> Any:
    """A network that is a branch in the middle of another is a network of its own, and so is the one after it."""
    h = chain(layer, x[0], p["a"])
    inner = chain(layer, jnp.tanh(h[:, ::2] @ p["exit"]["down"]), p["b"]) @ p["exit"]["up"]
    return score(p, chain(layer, h + jnp.repeat(inner, 2, 1), p["c"]))


def pooled_hourglass(layer: Layer, p: Any, x: Any) -> Any:
    h = chain(layer, x[0], p["a"])
    inner = chain(layer, h.reshape(BATCH, -1, 2, D).mean(2), p["b"])
    return score(p, chain(layer, h + jnp.repeat(inner, 2, 1), p["c"]))


def nested_scans_twice(layer: Layer, p: Any, x: Any) -> Any:
    pairs = jax.tree.map(lambda *a: jnp.stack(a).reshape(2, 2, *a[0].shape), *p["b"][:4])

    def outer(h: Any, q: Any) -> Any:
        return lax.scan(lambda h, r: (layer(h, r, range(4), 4), None), h, q)[0], None

    return score(p, lax.scan(outer, x[0], pairs)[0]) + score(p, lax.scan(outer, x[1], pairs)[0])


def refinement_around_a_network_twice(layer: Layer, p: Any, x: Any) -> Any:
    """EDM: the network is a branch itself."""
    parts = (0.5 * h + 0.3 * (chain(layer, h * 0.7, p["a"]) @ p["out"])[..., :D] for h in x)
    return sum(jnp.square(part - 1).mean() for part in parts)


ARRANGEMENTS: dict[str, Callable[[Layer, Any, Any], Any]] = {
    f.__name__.replace("_", " "): f
    for f in (
        two_passes, passes_in_turn, microbatches, two_towers, towers_in_turn, contrast, actor_and_critic, teacher,
        trunk_and_branches, towers_that_join, siamese_then_joined, ensemble, shared_weights, scan_of_passes,
        ensemble_in_a_vmap, scanned_passes, passes_in_one_scan, towers_in_one_scan, scanned_then_unrolled_passes,
        backwards_in_a_scan, towers_that_read_each_other, towers_in_one_scan_that_read_each_other,
        encoder_and_decoder_twice, long_skips_twice, exits_of_several_layers, loop_over_all_layers, nested_scans_twice,
        refinement_around_a_network_twice, hourglass, pooled_hourglass, two_slices_of_the_data_joined,
    )
}  # fmt: skip

MISREAD: dict[str, Callable[[Layer, Any, Any], Any]] = {
    f.__name__.replace("_", " "): f
    for f in (
        exits_equal_to_a_layer, exit_of_two_layers, exits_without_a_list, exit_of_the_last_layer,
        exit_of_a_scan, stem_before_the_layers, trunk_with_one_equal_branch, one_list_for_a_trunk_and_two_passes,
    )
}  # fmt: skip
"""Arrangements whose networks the flow alone cannot tell apart."""

WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda f: f,
    "remat": jax.checkpoint,
    "jit": jax.jit,
}


def make(layer_name: str, arrangement: str, wrapper: str = "plain") -> tuple[Callable[[Any, Any], Any], Any]:
    """A loss of parameters and two inputs, and the shapes of its parameters."""
    apply, params = LAYERS[layer_name]
    wrapped = WRAPPERS[wrapper](apply)

    def layer(h: Any, p: Any, numbers: Numbers, depth: int) -> Any:
        with at(numbers, depth):
            return wrapped(h, p)

    def loss(p: Any, x: Any) -> Any:
        return (ARRANGEMENTS | MISREAD)[arrangement](layer, p, x)

    depths = {"a": 3, "b": 5, "c": 5}
    if arrangement == "ensemble in a vmap":
        depths["b"] = 3
    params = {**params, "cross": ATTENTION}
    return loss, {
        "out": w(D, OUT),
        "exit": {"up": SQUARE, "down": SQUARE},
        "last": params,
        "named": dict.fromkeys(("one", "two", "three", "four", "five"), params),
        **{name: [params] * count for name, count in depths.items()},
    }


WITHOUT_RESIDUALS = ("gated", "one product")
FOR_RESIDUALS = list(ARRANGEMENTS)[list(ARRANGEMENTS).index("towers that read each other") :]


def cases() -> Iterator[Any]:
    """Each arrangement with two layers and two wrappers: (layer, arrangement, wrapper). The second is slow."""
    layers, plain, wrappers = (itertools.cycle(x) for x in (list(LAYERS)[:-2], WITHOUT_RESIDUALS, WRAPPERS))
    for arrangement in ARRANGEMENTS:
        yield next(layers), arrangement, next(wrappers)
        second = layers if arrangement in FOR_RESIDUALS else plain
        yield slow((next(second), arrangement, next(wrappers)))
