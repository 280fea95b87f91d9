"""Layers that no name scope tells apart: repeats of a sequence, and the scopes that a diff makes of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import policyc
from policyc.changes.scopes import LayerSpan, find_repeats
from tests.support.diff_models import W, X

pytestmark = pytest.mark.any_jax


def repeats_of(text: str) -> list[tuple[int, int, tuple[int, ...]]]:
    """The repeats of a sequence of letters. A capital letter reads the parameters of a layer."""
    capitals = (position for position, letter in enumerate(text) if letter.isupper())
    spans = [LayerSpan(first=p, last=p, stack="h", layer=number) for number, p in enumerate(capitals)]
    return [(r.start, r.length, r.layers) for r in find_repeats(text, spans)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("e+nAb+nAb+nAb+z", [(1, 4, (0, 1, 2))]),  # +n stands in front of each of them
        ("b+Ab+Ab+", [(0, 3, (0, 1))]),  # what is in front of the first may be a part of it
        ("AbAb", [(0, 2, (0, 1))]),
        ("eAbz", []),
        ("nAb+nAc+nAd+", []),
        ("nAb+nAb+mCd+mCd+", [(0, 4, (0, 1)), (8, 4, (2, 3))]),
        ("nAb+nAb+nAc+", [(0, 4, (0, 1))]),  # the end of the last layer differs
        ("nAx+nAx+x+nAx+", [(0, 4, (0, 1))]),  # another distance
        ("", []),
    ],
)
def test_repeats(text: str, expected: list[tuple[int, int, tuple[int, ...]]]) -> None:
    assert repeats_of(text) == expected


def test_layers_of_two_stacks_are_not_one_repeat() -> None:
    spans = [LayerSpan(first=p, last=p, stack=s, layer=0) for p, s in ((0, "a"), (2, "b"))]
    assert not list(find_repeats("AbAb", spans))


# ---- in a diff


def loss(p: Any, x: jax.Array) -> jax.Array:
    """A loop without name scopes. Scores have no parameter: they are in the layer of the weights before them."""
    x = x @ p["embed"]
    for layer in p["blocks"]:
        q, k = x @ layer["q"], x @ layer["k"]
        x = x + jnp.tanh(q @ k.T) @ layer["down"]
    return jnp.sum(x)


BLOCKS = {"embed": W, "blocks": [{"q": W, "k": W, "down": W}] * 5}
SCORES = f"(test_repeats.py:{loss.__code__.co_firstlineno + 5})"


def test_equal_layers_of_a_loop_are_shown_once() -> None:
    graph = policyc.diff("blocks -> mxfp8; blocks[-2:] -> keep", loss, BLOCKS, X).graph
    scopes = [n for _, n in graph.nodes(data=True) if n.get("kind") == "layers"]
    assert [(n["name"], n["members"]) for n in scopes] == [("blocks", ((0, 2),)), ("blocks", ((3, 4),))]
    replaced = [n["linear"] for _, n in graph.nodes(data=True) if n.get("reason") == "replaced"]
    assert {*replaced} == {1, 2, 3, 4}  # q, k, the scores, down: once, for three layers


def test_products_of_activations_are_in_the_layer_of_their_weights() -> None:
    data = policyc.diff("blocks -> mxfp8", loss, BLOCKS, X).to_dict()
    assert [(row["stack"], row["name"]) for row in data["linears"]] == [
        ("", "embed"),
        ("blocks", "q"), ("blocks", "k"), ("blocks", SCORES), ("blocks", "down")
    ]  # fmt: skip
    assert [run["layers"] for row in data["linears"] for run in row["runs"]] == [None] + [[0, 4]] * 4


def test_layers_that_differ_inside_stay_apart() -> None:
    def skip(p: Any, x: jax.Array) -> jax.Array:
        """The third layer reads another value: its equations are the same, its data flow is not."""
        x = first = x @ p["embed"]
        for number, layer in enumerate(p["blocks"]):
            x = jnp.tanh(x @ layer["q"]) + (first if number == 2 else x)
        return jnp.sum(x)

    graph = policyc.diff("blocks -> mxfp8", skip, {"embed": W, "blocks": [{"q": W}] * 4}, X).graph
    scopes = [n for _, n in graph.nodes(data=True) if n.get("kind") == "layers"]
    assert [n["members"] for n in scopes] == [((0, 1), (3, 3)), ((2, 2),)]
