"""Shared parts of the losses over stacks: parameters, the layer, and the table of programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

L, D = 4, 6
X = jax.ShapeDtypeStruct((2, D), "float32")


def w(*lead: int, tail: tuple[int, ...] = ()) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*lead, D, D, *tail), "float32")


@dataclass(frozen=True)
class Program:
    """A loss of parameters and `X`.

    Attributes:
      axes: the axes of layers, by the last name of a parameter. The default is the first of three or more axes.
      index_last: whether selectors have the index at the last name. They do if parameters differ in their axes.
    """

    params: Any
    loss: Callable[[Any, Any], Any]
    axes: dict[str, Sequence[int]]
    index_last: bool = False


PROGRAMS: dict[str, Program] = {}


def program(params: Any, index_last: bool = False, **axes: Sequence[int]) -> Callable[[Any], Any]:
    def add(loss: Any) -> Any:
        name = loss.__name__.replace("_", " ")
        assert name not in PROGRAMS, name
        PROGRAMS[name] = Program(params, loss, axes, index_last)
        return loss

    return add


STACK = {"layers": {"up": w(L), "down": w(L)}}
LIST = {"layers": [{"up": w(), "down": w()} for _ in range(L)]}


def layer(p: Any, h: Any) -> Any:
    return h + jnp.tanh(h @ p["up"]) @ p["down"]


def each(f: Callable[[Any], Any], tree: Any) -> Any:
    return jax.tree.map(f, tree)


def take(tree: Any, index: Any) -> Any:
    return each(lambda a: a[index], tree)


def scan(stack: Any, h: Any, **options: Any) -> Any:
    return lax.scan(lambda h, p: (layer(p, h), None), h, stack, **options)[0]


def stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *a: jnp.stack(a), *trees)
