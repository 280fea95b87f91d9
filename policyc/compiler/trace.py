"""Traces a function of any arguments to a closed jaxpr, calling it exactly once.

Only parameters (and `jax.ShapeDtypeStruct`s) become inputs of the jaxpr. Everything else is closed over as it is:
configurations, strings, modules and numbers that steer Python stay what they are, and so do results that are not traced
arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from policyc.compiler.paths import leaf_paths
from policyc.jaxcore import autodiff, jaxprs
from policyc.language.selectors import DottedPath

_ARRAY_TYPES = (jax.Array, np.ndarray, np.generic, float, complex, jax.ShapeDtypeStruct)


@dataclass(frozen=True, slots=True)
class TracedFunction:
    """A function as a jaxpr. `paths` has the path of every input, None for what is not a parameter."""

    jaxpr: ClosedJaxpr
    paths: tuple[DottedPath | None, ...]
    result_tree: Any
    constant_results: tuple[Any, ...]
    traced_results: tuple[int, ...]
    """Which leaves of the result the jaxpr computes. The others are in `constant_results`."""

    def run(self, jaxpr: ClosedJaxpr, inputs: Sequence[Any]) -> Any:
        """The result of the function, computed by a jaxpr with the same results as its own."""
        return self.assemble_result(jaxprs.evaluate(jaxpr, *inputs))

    def assemble_result(self, values: Sequence[Any]) -> Any:
        """The result of the function, from the results of its jaxpr."""
        leaves = list(self.constant_results)
        for index, value in zip(self.traced_results, values, strict=True):
            leaves[index] = value
        return jax.tree.unflatten(self.result_tree, leaves)


def jaxpr_inputs(args: Sequence[Any], param_argnums: Sequence[int]) -> list[Any]:
    """The leaves of the arguments that are inputs of the jaxpr of `trace`."""
    leaves = [(i in param_argnums, leaf) for i, arg in enumerate(args) for leaf in jax.tree.leaves(arg)]
    return [leaf for is_parameter, leaf in leaves if _is_input(leaf, is_parameter)]


def _is_input(leaf: Any, is_parameter: bool) -> bool:
    return isinstance(leaf, _ARRAY_TYPES) if is_parameter else isinstance(leaf, jax.ShapeDtypeStruct)


def trace(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    param_argnums: Sequence[int],
    names: Sequence[str],
) -> TracedFunction:
    """Traces a call. `param_argnums` are the arguments that hold parameters, `names` their names."""
    paths_of = dict(zip(param_argnums, paths_by_argument(args, param_argnums, names), strict=True))
    flat = [jax.tree.flatten(arg) for arg in (*args, dict(kwargs))]
    inputs: list[Any] = []
    paths: list[DottedPath | None] = []
    slots: list[tuple[int, int]] = []  # of each input: its argument, and its leaf there
    for argnum, (leaves, _) in enumerate(flat):
        for number, leaf in enumerate(leaves):
            if _is_input(leaf, argnum in paths_of):
                inputs.append(leaf)
                paths.append(paths_of[argnum][number] if argnum in paths_of else None)
                slots.append((argnum, number))
    results: list[tuple[Any, tuple[Any, ...], tuple[int, ...]]] = []

    def traceable(*values: Any) -> list[Any]:
        filled = [list(leaves) for leaves, _ in flat]
        for (argnum, number), value in zip(slots, values, strict=True):
            filled[argnum][number] = value
        *positional, named = (
            jax.tree.unflatten(tree, leaves) for leaves, (_, tree) in zip(filled, flat, strict=True)
        )
        leaves, tree = jax.tree.flatten(fn(*positional, **named))
        traced = tuple(i for i, leaf in enumerate(leaves) if autodiff.is_tracer(leaf))
        results.append((tree, tuple(None if i in traced else leaf for i, leaf in enumerate(leaves)), traced))
        return [leaves[i] for i in traced]

    jaxpr = autodiff.trace_as(fn, traceable, inputs)
    return TracedFunction(jaxpr, tuple(paths), *results[-1])


def paths_by_argument(
    args: Sequence[Any], param_argnums: Sequence[int], names: Sequence[str]
) -> list[list[DottedPath]]:
    """The paths of the leaves of each argument that holds parameters."""
    arguments = [(name, args[i]) for i, name in zip(param_argnums, names, strict=True)]
    paths = iter(leaf_paths(arguments))
    return [[next(paths) for _ in jax.tree.leaves(tree)] for _, tree in arguments]
