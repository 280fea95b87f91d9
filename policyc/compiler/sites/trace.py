"""Traces a function of any arguments to a closed jaxpr, calling it exactly once.

Only parameters (and `jax.ShapeDtypeStruct`s) become inputs of the jaxpr. Everything else is closed over as it is:
configurations, strings, modules, and numbers used in Python control flow. Results that are not traced arrays are
returned as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0
from jax.extend.core import ClosedJaxpr, Literal, Var

from policyc.base.garbage import paused_collection
from policyc.compiler.sites.paths import DATA_NAMES, leaf_paths
from policyc.jaxcore.hooks import autodiff, replay
from policyc.language.selectors import DottedPath

_ARRAY_TYPES = (jax.Array, np.ndarray, np.generic, float, complex, jax.ShapeDtypeStruct)


@dataclass(frozen=True, slots=True)
class FrozenWeight:
    """A weight that is not differentiated. `is_part`: the variable is only a part of it, taken by NumPy.

    It has several paths if one array is in several places.
    """

    paths: tuple[DottedPath, ...]
    shape: tuple[int, ...]
    is_part: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedFunction:
    """A function as a jaxpr. `paths` has the path of every input; None if the input is not a parameter."""

    jaxpr: ClosedJaxpr
    paths: tuple[DottedPath | None, ...]
    frozen: Mapping[Var, FrozenWeight]
    """The weights that are not differentiated."""
    result_tree: Any
    constant_results: tuple[Any, ...]
    traced_results: tuple[int, ...]
    """Which leaves of the result the jaxpr computes. The others are in `constant_results`."""

    def differentiated_results(self, *, has_aux: bool) -> list[bool]:
        """Which results of the jaxpr are differentiated: all, or with `has_aux` those in the first of a pair."""
        first = self.result_tree.children()[:1] if has_aux else [self.result_tree]
        count = sum(tree.num_leaves for tree in first)
        return [leaf < count for leaf in self.traced_results]

    def run(self, jaxpr: ClosedJaxpr, inputs: Sequence[Any]) -> Any:
        """The result of the function, computed by a jaxpr with the same results as its own."""
        values = replay.evaluate(jaxpr, *inputs)
        # For scalars that are constants, JAX returns its own subclasses of Python numbers.
        is_literal = (
            isinstance(var, Literal) and getattr(var.aval, "dtype", float0) != float0
            for var in jaxpr.jaxpr.outvars
        )
        return self.assemble_result(
            [jnp.asarray(v) if literal else v for v, literal in zip(values, is_literal, strict=True)]
        )

    def assemble_result(self, values: Sequence[Any]) -> Any:
        """The result of the function, from the results of its jaxpr."""
        leaves = list(self.constant_results)
        for index, value in zip(self.traced_results, values, strict=True):
            leaves[index] = value
        return jax.tree.unflatten(self.result_tree, leaves)


def jaxpr_inputs(args: Sequence[Any], param_argnums: Sequence[int]) -> list[Any]:
    """The leaves of the arguments that become inputs of the jaxpr in `trace`."""
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
    fixed: Mapping[str, Any] = MappingProxyType({}),
) -> TracedFunction:
    """Traces a call.

    Args:
      fn: the function.
      args, kwargs: what it is called with.
      param_argnums: which arguments hold parameters.
      names: the names of these arguments.
      fixed: other arguments that may hold weights, by name. They are not inputs of the jaxpr.
    """
    paths_of = dict(zip(param_argnums, paths_by_argument(args, param_argnums, names), strict=True))
    flat = [jax.tree.flatten(arg) for arg in (*args, dict(kwargs))]
    inputs: list[Any] = []
    paths: list[DottedPath | None] = []
    slots: list[tuple[int, int]] = []  # for each input: the numbers of its argument, and of its leaf there
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

    with paused_collection():
        jaxpr = autodiff.trace_as(fn, traceable, inputs)
    result_tree, constant_results, traced_results = results[-1]
    others = [value if path is None else None for path, value in zip(paths, inputs, strict=True)]
    return TracedFunction(
        jaxpr=jaxpr,
        paths=tuple(paths),
        frozen=_frozen_weights(jaxpr, others, fixed),
        result_tree=result_tree,
        constant_results=constant_results,
        traced_results=traced_results,
    )


def _frozen_weights(
    jaxpr: ClosedJaxpr, inputs: Sequence[Any], fixed: Mapping[str, Any]
) -> dict[Var, FrozenWeight]:
    """The variables of a jaxpr that are weights in arguments which are not differentiated.

    `inputs` has None for inputs that are differentiated. These are never frozen weights, even if the program passes the
    same array twice (a reference model often starts like this). Only trees count, not single arrays, and no trees whose
    name stands for data: a batch is not a weight.
    """
    trees = [(n, t) for n, t in fixed.items() if n.casefold() not in DATA_NAMES and not _is_leaf(t)]
    if not trees:
        return {}
    leaves = [leaf for _, tree in trees for leaf in jax.tree.leaves(tree)]
    paths = leaf_paths(trees, always_named=True)
    paths_of: dict[int, tuple[DottedPath, ...]] = {}
    for leaf, path in zip(leaves, paths, strict=True):
        paths_of[id(leaf)] = (*paths_of.get(id(leaf), ()), path)
    in_numpy = [
        (leaf, path)
        for leaf, path in zip(leaves, paths, strict=True)
        if isinstance(leaf, np.ndarray) and leaf.ndim > 1
    ]
    weights: dict[Var, FrozenWeight] = {}
    values = [
        *zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True),
        *zip(jaxpr.jaxpr.invars, inputs, strict=True),
    ]
    for var, value in values:
        if len(np.shape(value)) < 2:
            continue
        if id(value) in paths_of:
            weights[var] = FrozenWeight(paths_of[id(value)], np.shape(value))
        elif not isinstance(value, jax.core.Tracer | jax.ShapeDtypeStruct | jax.Array):
            weight = _numpy_weight(np.asarray(value), in_numpy)
            weights |= {} if weight is None else {var: weight}
    return weights


def _numpy_weight(
    constant: np.ndarray, leaves: Sequence[tuple[np.ndarray, DottedPath]]
) -> FrozenWeight | None:
    """The weight that a constant was made from: it has the same memory or, if JAX converted it, equal values.

    None if no weight matches, or several do.
    """
    matching = [(leaf, path) for leaf, path in leaves if np.may_share_memory(constant, leaf)]
    if not matching:
        matching = [
            (leaf, path)
            for leaf, path in leaves
            if leaf.shape == constant.shape and np.array_equal(leaf.astype(constant.dtype), constant)
        ]
    if len(matching) != 1:
        return None
    ((leaf, path),) = matching
    return FrozenWeight((path,), leaf.shape, is_part=constant.size != leaf.size)


def _is_leaf(tree: Any) -> bool:
    return jax.tree_util.treedef_is_leaf(jax.tree.structure(tree))


def paths_by_argument(
    args: Sequence[Any], param_argnums: Sequence[int], names: Sequence[str]
) -> list[list[DottedPath]]:
    """The paths of the leaves of each argument that holds parameters."""
    arguments = [(name, args[i]) for i, name in zip(param_argnums, names, strict=True)]
    paths = iter(leaf_paths(arguments))
    return [[next(paths) for _ in jax.tree.leaves(tree)] for _, tree in arguments]
