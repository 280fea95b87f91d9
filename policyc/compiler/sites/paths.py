"""Names the leaves of the differentiated arguments: pytree key paths as dotted paths.

At the end of a key path, `value` is a wrapper (Flax NNX). Before the end, it may be the name of a projection.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from policyc.language.selectors import DottedPath, PathSegment, is_index, read_segments

_WRAPPERS = frozenset({"value", "raw_value", "_value"})
_COLLECTIONS = frozenset({"params"})

_KeyPath = tuple[Any, ...]

DATA_NAMES = frozenset({
    "x", "xs", "y", "h", "z", "batch", "data", "input", "inputs", "tokens", "images", "features", "hidden",
    "activations", "targets", "labels", "rng", "key", "obs", "observation", "observations", "actions",
})  # fmt: skip
"""Argument names that stand for data, not weights."""


def leaf_paths(arguments: Sequence[tuple[str, Any]], *, always_named: bool = False) -> list[DottedPath]:
    """Returns the path of every leaf of some named arguments, in the order of the leaves, with stack sizes.

    If only one argument has leaves, its name appears only in the paths that would otherwise be empty or start with an
    index. Otherwise, or with `always_named`, every path starts with the name of its argument.
    """
    trees = [(name, jax.tree_util.tree_flatten_with_path(tree)[0]) for name, tree in arguments]
    with_name = always_named or sum(bool(leaves) for _, leaves in trees) > 1
    texts: list[list[str]] = []
    for argument_name, leaves in trees:
        of_argument = [
            _path_texts(argument_name, keys) for keys in _strip_packing([keys for keys, _ in leaves])
        ]
        if all(len(t) > 1 and t[0] in _COLLECTIONS and not is_index(t[1]) for t in of_argument):
            of_argument = [t[1:] for t in of_argument]
        if with_name:
            of_argument = [t if t[0] == argument_name else [argument_name, *t] for t in of_argument]
        texts += of_argument
    return add_stack_sizes([read_segments(t) for t in texts])


def add_stack_sizes(paths: Sequence[DottedPath]) -> list[DottedPath]:
    """Sets the size of every unrolled stack in the paths: one more than the largest index seen in any of them.

    A name without an index gets index 0 if the same name also occurs with an index (`dense`, `dense_1`).
    """
    paths = _number_first_members(paths)
    sizes: dict[tuple[DottedPath, str], int] = {}
    for path in dict.fromkeys(paths):
        for depth, segment in enumerate(path):
            if segment.index is not None:
                stack = (path[:depth], segment.text)
                sizes[stack] = max(sizes.get(stack, 0), segment.index + 1)
    return [
        tuple(
            segment
            if segment.index is None
            else PathSegment(segment.text, segment.index, sizes[path[:depth], segment.text])
            for depth, segment in enumerate(path)
        )
        for path in paths
    ]


def _number_first_members(paths: Sequence[DottedPath]) -> list[DottedPath]:
    """Gives index 0 to a name without an index, if the same name also occurs with index 1 and never with index 0."""
    numbered = {segment.text for path in paths for segment in path if segment.index == 1}
    indices: dict[tuple[DottedPath, str], set[int | None]] = {}
    for path in dict.fromkeys(paths):
        for depth, segment in enumerate(path):
            if segment.text in numbered:
                indices.setdefault((path[:depth], segment.text), set()).add(segment.index)
    first = {stack for stack, seen in indices.items() if {None, 1} <= seen and 0 not in seen}
    if not first:
        return list(paths)
    return [
        tuple(
            PathSegment(segment.text, 0)
            if segment.index is None and (path[:depth], segment.text) in first
            else segment
            for depth, segment in enumerate(path)
        )
        for path in paths
    ]


def _strip_packing(key_paths: list[_KeyPath]) -> list[_KeyPath]:
    """Removes wrappers that frameworks add around parameters: NNX states, single-leaf boxes, one-element tuples."""
    return _strip_tuple_of_one(_strip_boxes([_strip_node_states(keys) for keys in key_paths]))


def _strip_tuple_of_one(key_paths: list[_KeyPath]) -> list[_KeyPath]:
    """Removes a one-element tuple around all leaves. Some frameworks pack their arguments in one."""
    first = {
        keys[0].idx if len(keys) > 1 and isinstance(keys[0], SequenceKey) else None for keys in key_paths
    }
    return [keys[1:] for keys in key_paths] if first == {0} else key_paths


def _strip_boxes(key_paths: list[_KeyPath]) -> list[_KeyPath]:
    """Removes the last key of a leaf that is alone in a node without field names, such as a Haliax named array."""
    leaf_counts = Counter(keys[:-1] for keys in key_paths)
    return [
        keys[:-1]
        if len(keys) > 1 and isinstance(keys[-1], FlattenedIndexKey) and leaf_counts[keys[:-1]] == 1
        else keys
        for keys in key_paths
    ]


def _strip_node_states(keys: _KeyPath) -> _KeyPath:
    """Removes the object that Flax NNX puts around the states of a differentiated module (`.states[0]`)."""
    wrapped = len(keys) > 2 and isinstance(keys[0], GetAttrKey) and keys[0].name == "states"
    return keys[2:] if wrapped and isinstance(keys[1], SequenceKey) else keys


def _path_texts(argument_name: str, keys: _KeyPath) -> list[str]:
    """Returns the components of a leaf's path, before indices are parsed."""
    texts: list[str] = []
    for position, key in enumerate(keys):
        is_last = position == len(keys) - 1
        if isinstance(key, GetAttrKey) and key.name in _WRAPPERS and is_last and texts:
            continue
        texts += _key_texts(key)
    return texts if texts and not is_index(texts[0]) else [argument_name, *texts]


def _key_texts(key: Any) -> tuple[str, ...]:
    """Returns the names in one key. There may be several: Haiku uses keys such as `mlp/~/linear_0`."""
    if isinstance(key, DictKey):
        return _names_in(str(key.key))
    if isinstance(key, SequenceKey):
        return _names_in(str(key.idx))
    if isinstance(key, GetAttrKey):
        return _names_in(key.name)
    return _names_in(str(key.key if isinstance(key, FlattenedIndexKey) else key))


@lru_cache(maxsize=1024)  # the layers of a model have the same keys
def _names_in(text: str) -> tuple[str, ...]:
    return tuple(part for part in re.split(r"[/.\[\]'\"]+", text) if part and part != "~")
