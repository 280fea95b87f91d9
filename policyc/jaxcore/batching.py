"""Functions of arrays with a batch axis, under `vmap`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


def merge_mapped_axes(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays that all have a leading batch axis, as its results do, under any number of `vmap`s.

    The axis of a `vmap` becomes part of the batch, so the function itself need not support `vmap`.
    """

    @custom_vmap
    def run(*args: Any) -> Any:
        return function(*args)

    @run.def_vmap
    def run_mapped(size: int, mapped: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        def merge(x: jax.Array, is_mapped: bool) -> jax.Array:
            wide = x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
            return wide.reshape(-1, *wide.shape[2:])

        merged = jax.tree.map(merge, args, tuple(mapped))  # JAX may pass a list
        results = run(*merged)
        split = jax.tree.map(lambda r: r.reshape(size, -1, *r.shape[1:]), results)
        return split, jax.tree.map(lambda _: True, results)

    return run
