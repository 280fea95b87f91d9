"""Losses composed of a way to store layers, ways to rearrange them, a way to loop over them and a way to apply one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.support.stacks.base import D, L, Program, each, layer, stacked, take, w

Tree = Any
_NAMES = ("up", "down")


def combine(seed: int) -> tuple[str, Program]:
    """A random program, and the names of its parts."""
    rng = random.Random(seed)
    store = rng.choice(list(STORES))
    moves = rng.choices(list(MOVES), k=rng.choice([0, 1, 1, 2, 2, 3]))
    loop, wrapper = rng.choice(list(LOOPS)), rng.choice(list(WRAPPERS))
    return _program(store, [(move, rng.randrange(100)) for move in moves], loop, wrapper)


def cover() -> Iterator[tuple[str, Program, str]]:
    """Programs that cover all parts, each with at most one part that is not followed, and the reason for that part."""
    stores, moves, loops, wrappers = (
        [name for name in parts if name not in NOT_FOLLOWED] for parts in (STORES, MOVES, LOOPS, WRAPPERS)
    )
    others = zip(itertools.cycle(stores), itertools.cycle(loops), itertools.cycle(wrappers), strict=False)
    for number, move in enumerate(moves):
        store, loop, wrapper = next(others)
        yield *_program(store, [(move, number)], loop, wrapper), ""
    for part, reason in NOT_FOLLOWED.items():
        store, loop, wrapper = next(others)
        yield (
            *_program(
                store,
                [(part, 1)] if part in MOVES else [],
                part if part in LOOPS else loop,
                part if part in WRAPPERS else wrapper,
            ),
            reason,
        )


def _program(store: str, moves: list[tuple[str, int]], loop: str, wrapper: str) -> tuple[str, Program]:
    params, axes, load = STORES[store]

    def loss(p: Tree, x: Any) -> Any:
        stack = load(p)
        for move, number in moves:
            stack = MOVES[move](stack, number)
        return LOOPS[loop](WRAPPERS[wrapper](layer), stack, x).sum()

    name = " / ".join([store, *(f"{move} {number}" for move, number in moves), loop, wrapper])
    return name, Program(params, loss, axes)


# ---- stores: parameters, their layer axes if these are not the first, and how to load them as one stack

Store = tuple[Tree, dict[str, Sequence[int]], Callable[[Tree], Tree]]
_LAYER = {"up": w(), "down": w()}


def _interleave(p: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.stack([a, b], 1).reshape(2 * a.shape[0], D, D), p["even"], p["odd"])


def _halves(p: Tree) -> Tree:
    return {n: jnp.concatenate([p["left"][n], p["right"][n]], 2) for n in _NAMES}


def _tied(p: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b[None], a[:1]]), p["layers"], p["shared"])


STORES: dict[str, Store] = {
    "stack": ({"layers": {"up": w(L), "down": w(L)}}, {}, lambda p: p["layers"]),
    "list": ({"layers": [_LAYER] * L}, {}, lambda p: stacked(p["layers"])),
    "tuple": ({"blocks": (_LAYER, _LAYER, _LAYER)}, {}, lambda p: stacked(p["blocks"])),
    "numbered names": (
        {f"block_{i}": _LAYER for i in range(3)},
        {},
        lambda p: stacked([p[f"block_{i}"] for i in (2, 0, 1)]),
    ),
    "two stacks in turn": (
        {"even": {"up": w(2), "down": w(2)}, "odd": {"up": w(2), "down": w(2)}},
        {},
        _interleave,
    ),
    "two stacks in a row": (
        {"first": {"up": w(2), "down": w(2)}, "last": {"up": w(3), "down": w(3)}},
        {},
        lambda p: jax.tree.map(lambda a, b: jnp.concatenate([b, a]), p["first"], p["last"]),
    ),
    "layers last": (
        {"layers": {n: jax.ShapeDtypeStruct((D, D, L), "float32") for n in _NAMES}},
        dict.fromkeys(_NAMES, (2,)),
        lambda p: each(lambda a: jnp.moveaxis(a, 2, 0), p["layers"]),
    ),
    "layers second": (
        {"layers": {n: jax.ShapeDtypeStruct((D, L, D), "float32") for n in _NAMES}},
        dict.fromkeys(_NAMES, (1,)),
        lambda p: each(lambda a: a.swapaxes(0, 1), p["layers"]),
    ),
    "halves": (
        {
            side: {n: jax.ShapeDtypeStruct((L, D, D // 2), "float32") for n in _NAMES}
            for side in ("left", "right")
        },
        {},
        _halves,
    ),
    "tied": ({"layers": {"up": w(3), "down": w(3)}, "shared": _LAYER}, {}, _tied),
    "bfloat16": (
        {"layers": {n: jax.ShapeDtypeStruct((L, D, D), "bfloat16") for n in _NAMES}},
        {},
        lambda p: each(lambda a: a.astype("float32"), p["layers"]),
    ),
    "one array": (
        {"layers": {"both": w(2 * L)}},
        {},
        lambda p: {"up": p["layers"]["both"][::2], "down": p["layers"]["both"][1::2]},
    ),
}


# ---- moves: (stack, number) -> another stack

Move = Callable[[Tree, int], Tree]


def _size(stack: Tree) -> int:
    return int(jax.tree.leaves(stack)[0].shape[0])


def _order(stack: Tree, number: int) -> np.ndarray:
    return np.random.default_rng(number).permutation(_size(stack))


def _every(f: Callable[[Any], Any]) -> Move:
    return lambda stack, _: each(f, stack)


def _with(f: Callable[[Any, int], Any]) -> Move:
    return lambda stack, number: each(lambda a: f(a, number), stack)


def _masked(stack: Tree, number: int) -> Tree:
    keep = (np.arange(_size(stack)) % 2 == number % 2)[:, None, None]
    return each(lambda a: jnp.where(keep, a, a[::-1]), stack)


def _mapped(stack: Tree, _: int) -> Tree:
    return lax.map(lambda q: each(jnp.tanh, q), stack)


def _by_counter(stack: Tree, number: int) -> Tree:
    size = _size(stack)
    return lax.map(lambda i: take(stack, (i * 3 + number) % size), jnp.arange(size))


def _swapped_names(stack: Tree, _: int) -> Tree:
    return {"up": stack["down"], "down": stack["up"]}


def _sorted_table(stack: Tree, number: int) -> Tree:
    return take(stack, jnp.argsort(jnp.asarray(_order(stack, number))))


MOVES: dict[str, Move] = {
    "reversed": _every(lambda a: a[::-1]),
    "permuted": lambda stack, n: take(stack, _order(stack, n)),
    "taken": lambda stack, n: each(lambda a: jnp.take(a, jnp.asarray(_order(stack, n)), 0), stack),
    "strided": _with(lambda a, n: a[n % 2 :: 2]),
    "all but one": _with(lambda a, n: jnp.delete(a, n % a.shape[0], 0)),
    "rolled": _with(lambda a, n: jnp.concatenate([a[n % a.shape[0] :], a[: n % a.shape[0]]])),
    "twice": _every(lambda a: jnp.concatenate([a, a])),
    "repeated": _every(lambda a: jnp.repeat(a, 2, 0)),
    "tiled": _every(lambda a: jnp.tile(a, (2, 1, 1))),
    "padded": _with(lambda a, n: jnp.pad(a, ((n % 2, 1), (0, 0), (0, 0)))),
    "unpadded": _every(lambda a: jnp.pad(a, ((1, 2), (0, 0), (0, 0)))[1:-2]),
    "scaled": _every(lambda a: a * 0.5),
    "in bfloat16": _every(lambda a: a.astype("bfloat16").astype("float32")),
    "transposed twice": _every(lambda a: jnp.tanh(a.transpose(0, 2, 1)).transpose(0, 2, 1)),
    "transposed": _every(lambda a: a.transpose(0, 2, 1)),
    "split": _every(lambda a: jnp.concatenate(jnp.split(a, [1])[::-1])),
    "before zeros": _every(lambda a: jnp.concatenate([a, jnp.zeros((2, D, D))])),
    "stacked with zeros": _every(lambda a: jnp.stack([*a, jnp.zeros((D, D))])),
    "split and joined": _every(lambda a: jnp.concatenate(jnp.split(a, 2, 2)[::-1], 2)),
    "unstacked": _every(lambda a: jnp.stack([*a][::-1])),
    "masked": _masked,
    "mapped": _mapped,
    "by a counter": _by_counter,
    "swapped names": _swapped_names,
    "sorted table": _sorted_table,
    "through a barrier": lambda stack, _: lax.optimization_barrier(stack),
    "jitted": lambda stack, _: jax.jit(lambda s: each(lambda a: a[::-1] + 1, s))(stack),
    "rows permuted": _with(lambda a, n: a[:, np.random.default_rng(n).permutation(D)]),
    "normalized": _every(lambda a: a / jnp.linalg.norm(a, axis=1, keepdims=True)),
    "along an axis": _every(
        lambda a: jnp.take_along_axis(a, np.broadcast_to(np.arange(a.shape[0])[::-1, None, None], a.shape), 0)
    ),
    "in a reference": _every(lambda a: jax.freeze(jax.new_ref(a))),
    "sums": _every(lambda a: jnp.cumsum(a, 0)),
    "one replaced": _with(lambda a, n: a.at[n % a.shape[0]].set(a[0])),
    "one updated": _with(lambda a, n: lax.dynamic_update_index_in_dim(a, a[0] * 2, n % a.shape[0], 0)),
    "triangular": _every(jnp.tril),
    "with noise": _every(lambda a: a + jnp.cos(jnp.arange(a.size)).reshape(a.shape)),
    "rounded": _every(lambda a: a + lax.stop_gradient(jnp.round(a) - a)),
}


# ---- loops: apply a layer, (parameters, activation) -> activation, for each member of a stack

Layer = Callable[[Tree, Any], Any]
Loop = Callable[[Layer, Tree, Any], Any]


def _scan(apply: Layer, stack: Tree, x: Any, **options: Any) -> Any:
    return lax.scan(lambda h, q: (apply(q, h), None), x, stack, **options)[0]


def _unrolled(apply: Layer, stack: Tree, x: Any) -> Any:
    for i in range(_size(stack)):
        x = apply(take(stack, i), x)
    return x


def _by_index(apply: Layer, stack: Tree, x: Any) -> Any:
    def body(i: Any, h: Any) -> Any:
        return apply(each(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), stack), h)

    return lax.fori_loop(0, _size(stack), body, x)


def _by_table(apply: Layer, stack: Tree, x: Any) -> Any:
    table = jnp.asarray(_order(stack, 7))
    return lax.fori_loop(0, _size(stack), lambda i, h: apply(take(stack, table[i]), h), x)


def _by_carried_counter(apply: Layer, stack: Tree, x: Any) -> Any:
    size = _size(stack)

    def body(carry: Any, _: Any) -> Any:
        h, i = carry
        return (apply(take(stack, i), h), (i + size - 1) % size), None

    return lax.scan(body, (x, size // 2), length=size + 1)[0][0]


def _in_pairs(apply: Layer, stack: Tree, x: Any) -> Any:
    size = _size(stack) // 2 * 2
    pairs = each(lambda a: a[:size].reshape(size // 2, 2, D, D), stack)
    return lax.scan(lambda h, g: (_scan(apply, g, h, reverse=True), None), x, pairs)[0]


def _in_halves(apply: Layer, stack: Tree, x: Any) -> Any:
    half = _size(stack) // 2
    h = _scan(apply, take(stack, slice(half, None)), x)
    return _scan(apply, take(stack, slice(None, half)), h, reverse=True)


def _skipping(apply: Layer, stack: Tree, x: Any) -> Any:
    def body(i: Any, h: Any) -> Any:
        return lax.cond(i % 2 == 1, lambda: apply(take(stack, i), h), lambda: jnp.sin(h))

    return lax.fori_loop(0, _size(stack), body, x)


def _branching(apply: Layer, stack: Tree, x: Any) -> Any:
    last = _size(stack) - 1

    def body(i: Any, h: Any) -> Any:
        kinds = [lambda: apply(take(stack, i), h), lambda: h @ stack["up"][last - i]]
        return lax.switch(i % 2, kinds)

    return lax.fori_loop(0, last + 1, body, x)


def _while(apply: Layer, stack: Tree, x: Any) -> Any:
    size = _size(stack)
    return lax.while_loop(
        lambda c: c[0] < size, lambda c: (c[0] + 1, apply(take(stack, c[0]), c[1])), (0, x)
    )[1]


def _while_on_one(apply: Layer, stack: Tree, x: Any) -> Any:
    one = take(stack, -1)
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, apply(one, c[1])), (0, x))[1]


def _ensemble(apply: Layer, stack: Tree, x: Any) -> Any:
    return jax.vmap(lambda row: _scan(apply, stack, row[None]))(x)


def _members(apply: Layer, stack: Tree, x: Any) -> Any:
    return jax.vmap(apply, (0, None))(stack, x)


def _results_of_all(apply: Layer, stack: Tree, x: Any) -> Any:
    """A scan whose stacked outputs a second scan reads."""
    h, hs = lax.scan(lambda h, q: (apply(q, h), h), x, stack)
    return lax.scan(lambda c, pair: (c + apply(pair[0], pair[1]), None), h, (stack, hs), reverse=True)[0]


def _twice_through(apply: Layer, stack: Tree, x: Any) -> Any:
    return lax.fori_loop(0, 2, lambda _, h: _scan(apply, stack, h), x)


def _prefetching(apply: Layer, stack: Tree, x: Any) -> Any:
    def body(carry: Any, q: Any) -> Any:
        h, now = carry
        return (apply(now, h), q), None

    return lax.scan(body, (x, take(stack, 0)), stack)[0][0]


def _first_and_rest(apply: Layer, stack: Tree, x: Any) -> Any:
    return _scan(apply, take(stack, slice(1, None)), apply(take(stack, 0), x), unroll=2)


LOOPS: dict[str, Loop] = {
    "scan": _scan,
    "reverse scan": partial(_scan, reverse=True),
    "unrolled": _unrolled,
    "by index": _by_index,
    "by table": _by_table,
    "by carried counter": _by_carried_counter,
    "in pairs": _in_pairs,
    "in halves": _in_halves,
    "skipping": _skipping,
    "branching": _branching,
    "while": _while,
    "while on one": _while_on_one,
    "ensemble": _ensemble,
    "members": _members,
    "results of all": _results_of_all,
    "twice through": _twice_through,
    "prefetching": _prefetching,
    "first and rest": _first_and_rest,
}


# ---- wrappers of a layer


def _with_own_backward(apply: Layer) -> Layer:
    @jax.custom_vjp
    def wrapped(q: Tree, h: Any) -> Any:
        return apply(q, h)

    wrapped.defvjp(lambda q, h: jax.vjp(apply, q, h), lambda vjp, ct: vjp(ct))
    return wrapped


def _with_weights_that_round(apply: Layer) -> Layer:
    @jax.custom_vjp
    def rounded(a: Any) -> Any:
        return jnp.round(a * 8) / 8

    rounded.defvjp(lambda a: (rounded(a), None), lambda _, ct: (ct,))
    return lambda q, h: apply(each(rounded, q), h)


WRAPPERS: dict[str, Callable[[Layer], Layer]] = {
    "plain": lambda apply: apply,
    "remat": jax.checkpoint,
    "jit": jax.jit,
    "remat of jit": lambda apply: jax.checkpoint(jax.jit(apply)),
    "own backward": _with_own_backward,
    "rounded weights": _with_weights_that_round,
    "sorted weights": lambda apply: lambda q, h: apply(each(lambda a: jnp.sort(jnp.cumsum(a, 0), 1), q), h),
    "twice": lambda apply: lambda q, h: apply(q, apply(q, h)),
    "on rows": lambda apply: lambda q, h: jax.vmap(lambda row: apply(q, row[None])[0])(h),
    "with branches": lambda apply: (
        lambda q, h: lax.cond(h[0, 0] > -1e9, apply, lambda q, h: h @ q["up"], q, h)
    ),
}


NOT_FOLLOWED = {
    "sorted table": "its index is computed by 'sort', which policyc does not evaluate",
    "along an axis": "it is read by 'gather' in a form that policyc does not follow",
    "in a reference": "it is read from a reference, and policyc does not follow writes to references",
    "sums": "it is computed by 'cumsum', which policyc does not follow",
    "one replaced": "it is written into an array",
    "members": "one product reads all 4 members of axis 0 at once",
    "one updated": "or several of them: it is written into an array",
    "while": "its index is computed from constants by operations that policyc does not evaluate",
    "prefetching": "the loop around it carries it, and changes it in every iteration",
    "own backward": "it is inside a function with its own backward rule (jax.custom_vjp)",
}
"""Parts with which policyc rejects rules for some layers, and why."""
