"""Aligns consecutive groups of rows: moves each group to start at a multiple of some number of rows, and back."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def pad_sizes(sizes: jax.Array, unit: int) -> jax.Array:
    """The number of rows of each group, rounded up to a multiple of `unit`."""
    return (sizes + unit - 1) // unit * unit


def align_groups(x: jax.Array, sizes: jax.Array, unit: int, *, axis: int = 0) -> jax.Array:
    """Moves the rows of each group to start at a multiple of `unit`, with zeros in between."""
    sizes = jnp.asarray(sizes)  # a NumPy array if the sizes are constants of the program
    count, groups = x.shape[axis], sizes.shape[0]
    length = count + -count % unit + groups * unit
    source = _move(jnp.arange(length), pad_sizes(sizes, unit), sizes, count)
    return jnp.take(x, source, axis=axis, mode="fill", fill_value=0)


def restore_groups(x: jax.Array, sizes: jax.Array, unit: int, count: int) -> jax.Array:
    """Undoes `align_groups`. `count` is the original number of rows. Rows that belong to no group become zeros."""
    sizes = jnp.asarray(sizes)
    source = _move(jnp.arange(count), sizes, pad_sizes(sizes, unit), x.shape[0])
    return jnp.take(x, source, axis=0, mode="fill", fill_value=0)


def _move(rows: jax.Array, sizes: jax.Array, other_sizes: jax.Array, missing: int) -> jax.Array:
    """Maps row indices to where the rows are once the groups have `other_sizes`; `missing` if they are not there."""
    ends = jnp.cumsum(sizes)
    group = jnp.clip(jnp.searchsorted(ends, rows, side="right"), 0, sizes.shape[0] - 1)
    inner = rows - (ends - sizes)[group]
    start = jnp.cumsum(other_sizes) - other_sizes
    is_there = (inner < other_sizes[group]) & (inner < sizes[group])
    return jnp.where(is_there, start[group] + inner, missing)
