"""A function of any arguments -> a closed jaxpr, and back.

In: a function, its arguments, and which of them are parameters. Out: a `TracedFunction`: the jaxpr, the path of each of
its inputs, and how to run another jaxpr in its place. The function is called exactly once. The one trap: only
parameters are inputs. Everything else is closed over as it is, so that configurations, strings, modules and
numbers that steer Python stay what they are, and so do results that are no traced arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from policyc.compiler.paths import leaf_paths
from policyc.jaxcore import autodiff, jaxprs
from policyc.language.selectors import DottedPath

_ARRAYS = (jax.Array, np.ndarray, np.generic, float, complex, jax.ShapeDtypeStruct)


@dataclass(frozen=True, slots=True)
class TracedFunction:
    """A function as a jaxpr. `paths` has the path of every input, None for what is not a parameter."""

    closed: Any
    paths: tuple[DottedPath | None, ...]
    tree: Any
    results: tuple[Any, ...]
    where: tuple[int, ...]

    def run(self, closed: Any, inputs: Sequence[Any]) -> Any:
        """What the function returns, with a jaxpr of the same inputs and results in the place of its own."""
        return self.result(jaxprs.evaluate(closed, *inputs))

    def result(self, values: Sequence[Any]) -> Any:
        """What the function returns where its jaxpr returns these values."""
        leaves = list(self.results)
        for at, value in zip(self.where, values, strict=True):
            leaves[at] = value
        return jax.tree.unflatten(self.tree, leaves)


def inputs_of(args: Sequence[Any], chosen: Sequence[int]) -> list[Any]:
    """The inputs that these arguments are to the jaxpr of `trace`."""
    leaves = [(i in chosen, leaf) for i, arg in enumerate(args) for leaf in jax.tree.leaves(arg)]
    return [leaf for parameter, leaf in leaves if _is_input(leaf, parameter)]


def _is_input(leaf: Any, parameter: bool) -> bool:
    return isinstance(leaf, _ARRAYS) if parameter else isinstance(leaf, jax.ShapeDtypeStruct)


def trace(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    chosen: Sequence[int],
    names: Sequence[str],
) -> TracedFunction:
    """Traces a call. `chosen` are the numbers of the arguments that are parameters, `names` what each is called."""
    named_leaves = dict(zip(chosen, leaf_groups(args, chosen, names), strict=True))
    flat = [jax.tree.flatten(arg) for arg in (*args, dict(kwargs))]
    inputs: list[Any] = []
    paths: list[DottedPath | None] = []
    slots: list[tuple[int, int]] = []
    for i, (leaves, _) in enumerate(flat):
        for j, leaf in enumerate(leaves):
            if _is_input(leaf, i in named_leaves):
                inputs.append(leaf)
                paths.append(named_leaves[i][j] if i in named_leaves else None)
                slots.append((i, j))
    box: list[tuple[Any, tuple[Any, ...], tuple[int, ...]]] = []

    def traceable(*parameters: Any) -> list[Any]:
        filled = [list(leaves) for leaves, _ in flat]
        for (i, j), value in zip(slots, parameters, strict=True):
            filled[i][j] = value
        *given, named = (
            jax.tree.unflatten(tree, leaves) for leaves, (_, tree) in zip(filled, flat, strict=True)
        )
        leaves, tree = jax.tree.flatten(fn(*given, **named))
        where = tuple(at for at, leaf in enumerate(leaves) if autodiff.is_tracer(leaf))
        box.append((tree, tuple(None if at in where else leaf for at, leaf in enumerate(leaves)), where))
        return [leaves[at] for at in where]

    closed = autodiff.traced_for(fn, traceable, inputs)
    tree, results, where = box[-1]
    return TracedFunction(closed, tuple(paths), tree, results, where)


def leaf_groups(args: Sequence[Any], chosen: Sequence[int], names: Sequence[str]) -> list[list[DottedPath]]:
    """The paths of the leaves of each chosen argument."""
    picked = [(name, args[i]) for i, name in zip(chosen, names, strict=True)]
    paths = iter(leaf_paths(picked))
    return [[next(paths) for _ in jax.tree.leaves(tree)] for _, tree in picked]
