"""Pytree key paths as dotted paths: trees in, names out. Nothing is traced or compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import pytest
from jax.tree_util import GetAttrKey

from policyc.compiler.sites.paths import add_stack_sizes, leaf_paths
from policyc.language.selectors import PathSegment, parse_path


def names(*trees: Any) -> list[str]:
    """The paths of the leaves of some arguments called `a`, `b`, ... in dotted spelling."""
    return [".".join(map(str, path)) for path in leaf_paths([*zip("abcdef", trees, strict=False)])]


def sizes(*trees: Any) -> dict[str, tuple[int | None, ...]]:
    """The size of each segment of each path."""
    paths = leaf_paths([*zip("abcdef", trees, strict=False)])
    return {".".join(map(str, path)): tuple(segment.size for segment in path) for path in paths}


@jax.tree_util.register_dataclass
@dataclass
class Linear:
    kernel: Any
    bias: Any


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_pytree_with_keys_class
class Wrapper:
    """A leaf in a wrapper, as Flax NNX has it: the last key of its path is an attribute."""

    def __init__(self, leaf: Any, attribute: str = "value") -> None:
        self.leaf, self.attribute = leaf, attribute

    def tree_flatten_with_keys(self):
        return ((GetAttrKey(self.attribute), self.leaf),), self.attribute

    @classmethod
    def tree_unflatten(cls, attribute, leaves):
        return cls(*leaves, attribute)


@jax.tree_util.register_pytree_node_class
class Box:
    """Leaves in a node without names, as Haliax has it: the last key of a path is a number."""

    def __init__(self, *leaves: Any) -> None:
        self.leaves = leaves

    def tree_flatten(self):
        return self.leaves, None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


@jax.tree_util.register_pytree_with_keys_class
class NodeStates:
    """The object that Flax NNX puts around the states of a differentiated module."""

    def __init__(self, *states: Any) -> None:
        self.states = states

    def tree_flatten_with_keys(self):
        return ((GetAttrKey("states"), self.states),), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children[0])


NAMES: dict[str, tuple[tuple[Any, ...], list[str]]] = {
    "keys of a dict": (({"mlp": {"up": 0, "down": 0}},), ["mlp.down", "mlp.up"]),
    "the order of JAX": (({"b": [0, {"z": 0, "y": 0}], "a": (0,)},), ["a[0]", "b[0]", "b[1].y", "b[1].z"]),
    "fields of a dataclass": (({"head": Linear(0, 0)},), ["head.kernel", "head.bias"]),
    "fields of a named tuple": (({"head": Pair(0, 0)},), ["head.first", "head.second"]),
    "positions in a list": (({"layers": [{"w": 0}, {"w": 0}]},), ["layers[0].w", "layers[1].w"]),
    "integer keys of a dict": (({"layers": {0: {"w": 0}, 1: {"w": 0}}},), ["layers[0].w", "layers[1].w"]),
    "a path of Haiku in one key": (({"mlp/~/linear_0": {"w": 0}},), ["mlp.linear[0].w"]),
    "a path of Equinox in one key": (({".blocks[2]['up']": 0},), ["blocks[2].up"]),
    "a digit that is no number": (
        ({"x": {"²": 0}},),
        ["x.²"],
    ),  # `"²".isdigit()` is true, but `int("²")` raises
    # ---- the name of the argument
    "bare arrays": ((0, 0), ["a", "b"]),
    "a list of arrays": (([0, 0],), ["a[0]", "a[1]"]),
    "one argument": (({"w": 0},), ["w"]),
    "several arguments": (({"w": 0}, {"w": 0}), ["a.w", "b.w"]),
    "one argument with leaves": (({"w": 0}, {}), ["w"]),
    # ---- what frameworks put around the parameters
    **{
        f"a wrapper with {attribute}": (({"mlp": {"kernel": Wrapper(0, attribute)}},), ["mlp.kernel"])
        for attribute in ("value", "raw_value", "_value")
    },
    "a wrapper alone": ((Wrapper(0),), ["value"]),  # without it, the leaf would have no name of its own
    "a projection called value": (
        ({"attention": {"value": {"kernel": Wrapper(0)}}},),
        ["attention.value.kernel"],
    ),
    "an array called value": (({"attention": {"value": 0}},), ["attention.value"]),
    "a collection around everything": (({"params": {"mlp": 0}},), ["mlp"]),
    "collections of two arguments": (({"params": {"mlp": 0}}, {"params": {"head": 0}}), ["a.mlp", "b.head"]),
    "a collection beside others": (
        ({"params": {"mlp": 0}, "stats": {"mean": 0}},),
        ["params.mlp", "stats.mean"],
    ),
    "an array called params": (({"params": 0},), ["params"]),
    "a tuple of one": ((({"mlp": {"up": 0, "down": 0}},),), ["mlp.down", "mlp.up"]),
    "a tuple of two": ((({"mlp": 0}, {"head": 0}),), ["a[0].mlp", "a[1].head"]),
    "node states of Flax": ((NodeStates({"mlp": {"kernel": Wrapper(0)}}),), ["mlp.kernel"]),
    "nodes of one leaf": (({"proj": {"weight": Box(1)}, "norm": Box(2)},), ["norm", "proj.weight"]),
    "a node of two leaves": (({"linear": Box(1, 2)},), ["linear[0]", "linear[1]"]),
    "a node of one leaf alone": ((Box(1),), ["a[0]"]),
}


@pytest.mark.parametrize(("trees", "expected"), NAMES.values(), ids=NAMES.keys())
def test_the_names_of_leaves(trees, expected):
    assert names(*trees) == expected


def test_flax_nnx_modules_have_plain_names():
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.value = nnx.Linear(2, 2, use_bias=False, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(2, 2, use_bias=False, rngs=rngs) for _ in range(2)])

    state = nnx.state(Block(nnx.Rngs(0)))
    assert names(state) == ["layers[0].kernel", "layers[1].kernel", "value.kernel"]


# ---- indices and sizes


def test_the_three_spellings_of_an_index_are_one():
    expected = (PathSegment("layers", 3, 4), PathSegment("w"))
    assert leaf_paths([("a", {"layers_3": {"w": 0}})]) == [expected]
    assert leaf_paths([("a", {"layers": {"3": {"w": 0}}})]) == [expected]
    assert leaf_paths([("a", {"layers[3]": {"w": 0}})]) == [expected]
    assert leaf_paths([("a", {"layers.3.w": 0})]) == [expected]


@pytest.mark.parametrize("digits", [1, 9, 10, 18, 19, 40])
def test_a_leaf_and_the_text_of_its_path_agree_on_how_long_an_index_may_be(digits):
    """A parameter with a long number in its name must be found by the selector that spells it the same way."""
    for name in (f"layers_{'7' * digits}", f"layers.{'7' * digits}", f"layers[{'7' * digits}]"):
        (leaf,) = leaf_paths([("a", {name: {"w": 0}})])
        assert leaf == tuple(add_stack_sizes([parse_path(f"{name}.w")])[0])
        assert (leaf[0].index is not None) is (digits <= 18)


def test_the_size_of_a_stack_is_one_more_than_its_largest_index():
    assert sizes({"layers_0": 0, "layers_5": 0}) == {"layers[0]": (6,), "layers[5]": (6,)}


def test_stacks_of_one_name_in_different_places_have_their_own_sizes():
    tree = {"encoder": {"layers": [0, 0]}, "decoder": {"layers": [0, 0, 0]}}
    assert {path: size[1] for path, size in sizes(tree).items()} == {
        "encoder.layers[0]": 2,
        "encoder.layers[1]": 2,
        "decoder.layers[0]": 3,
        "decoder.layers[1]": 3,
        "decoder.layers[2]": 3,
    }


def test_a_list_in_an_argument_called_params_keeps_its_index():
    assert [".".join(map(str, p)) for p in leaf_paths([("params", [{"w": 0}, {"w": 0}])])] == [
        "params[0].w", "params[1].w",
    ]  # fmt: skip


def test_sizes_are_added_to_repeated_and_empty_paths():
    path = (PathSegment("x"), PathSegment("layers", 1))
    sized = (PathSegment("x"), PathSegment("layers", 1, 2))
    assert add_stack_sizes([path, (), path]) == [sized, (), sized]


def test_no_leaves_have_no_paths():
    assert leaf_paths([]) == leaf_paths([("a", {})]) == leaf_paths([("a", None)]) == []


def test_a_key_of_an_unknown_kind_prints_itself():
    """A key class of another library is read from its text."""

    @jax.tree_util.register_pytree_with_keys_class
    class Custom:
        def __init__(self, leaf: Any) -> None:
            self.leaf = leaf

        def tree_flatten_with_keys(self):
            return ((".mine", self.leaf),), None

        @classmethod
        def tree_unflatten(cls, _, leaves):
            return cls(*leaves)

    assert names({"outer": Custom(0)}) == ["outer.mine"]
