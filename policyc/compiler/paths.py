"""What is differentiated, as leaves with names: pytree paths as dotted paths.

In: the differentiated arguments. Out: a `DottedPath` for every leaf. The one trap: `value` is a wrapper at the end of
a path (Flax NNX) and the name of a projection inside one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from policyc.language.selectors import DottedPath, PathSegment

_WRAPPERS = frozenset({"value", "raw_value", "_value"})
_COLLECTIONS = frozenset({"params"})
_TRAILING = re.compile(r"(.*[^_])_(\d{1,9})", re.DOTALL)


def leaf_paths(arguments: Sequence[tuple[str, Any]]) -> list[DottedPath]:
    """The path of every leaf of some named arguments, in the order of their leaves, with the sizes of stacks."""
    found: list[list[str]] = []
    for root, tree in arguments:
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
        found += [_texts(root, keys) for keys in _unpacked([keys for keys, _ in leaves])]
    if found and all(len(f) > 1 and f[0] in _COLLECTIONS for f in found):
        found = [f[1:] for f in found]
    return sized([parsed(f) for f in found])


def _unpacked(leaves: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Key paths without a tuple of one around everything: some frameworks pack their arguments so."""
    leaves = [_node_states(keys) for keys in leaves]
    only = {keys[0].idx if len(keys) > 1 and isinstance(keys[0], SequenceKey) else None for keys in leaves}
    return [keys[1:] for keys in leaves] if only == {0} else leaves


def _node_states(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    """Without the object that Flax NNX puts around the states of a differentiated module."""
    wrapped = len(keys) > 2 and isinstance(keys[0], GetAttrKey) and keys[0].name == "states"
    return keys[2:] if wrapped and isinstance(keys[1], SequenceKey) else keys


def _texts(root: str, keys: Sequence[Any]) -> list[str]:
    parts: list[str] = []
    for at, key in enumerate(keys):
        if isinstance(key, GetAttrKey) and key.name in _WRAPPERS and at == len(keys) - 1 and parts:
            continue
        parts += _text(key)
    return parts if parts and not parts[0].isdigit() else [root, *parts]


def _text(key: Any) -> list[str]:
    if isinstance(key, DictKey | FlattenedIndexKey):
        text = str(key.key)
    elif isinstance(key, GetAttrKey):
        text = key.name
    elif isinstance(key, SequenceKey):
        text = str(key.idx)
    else:
        text = str(key)
    return [part for part in re.split(r"[/.\[\]'\"]+", text) if part and part != "~"]


def parsed(texts: Iterable[str]) -> DottedPath:
    """Texts as names: `layers_3`, and `layers` before `3`, are index 3 of `layers`."""
    names: list[PathSegment] = []
    for text in texts:
        if text.isdigit() and len(text) < 10 and names and names[-1].index is None:
            names[-1] = PathSegment(names[-1].text, int(text))
        elif found := _TRAILING.fullmatch(text):
            names.append(PathSegment(found[1], int(found[2])))
        else:
            names.append(PathSegment(text))
    return tuple(names)


def sized(paths: Sequence[DottedPath]) -> list[DottedPath]:
    """The paths with the size of every unrolled stack in them: one more than the largest index seen."""
    largest: dict[tuple[DottedPath, str], int] = {}
    for path in dict.fromkeys(paths):
        for at, name in enumerate(path):
            if name.index is not None:
                key = (path[:at], name.text)
                largest[key] = max(largest.get(key, 0), name.index + 1)
    return [
        tuple(
            name if name.index is None else PathSegment(name.text, name.index, largest[path[:at], name.text])
            for at, name in enumerate(path)
        )
        for path in paths
    ]
