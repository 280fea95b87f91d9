"""Operations of the NVFP4 kernels that differ between Pallas's Mosaic backend and JAX's interpreter of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from policyc.jaxcore.versions import MOSAIC_HAS_STORE, MOSAIC_LOAD_INDEX
from policyc.numerics.quantize.bits import abs_bits, from_bits

GRID = ("tokens", "features")
"""The axes of the grid of kernel instances."""

Ref = Any
"""A Pallas reference to memory."""


class InterpreterOps:
    """The operations in JAX's interpreter of kernels."""

    def index(self, axis: int) -> jax.Array:
        return pl.program_id(axis)

    def load(self, ref: Ref, index: Any, layout: str) -> jax.Array:
        del layout
        loaded: jax.Array = ref[index]
        return loaded

    def store(self, ref: Ref, index: Any, array: jax.Array) -> None:
        ref[index] = array

    def iota(self, shape: tuple[int, ...], axis: int, layout: str) -> jax.Array:
        del layout
        return lax.broadcasted_iota(jnp.uint32, shape, axis)

    def expand(self, x: jax.Array, shape: tuple[int, ...], layout: str) -> jax.Array:
        """Repeats x along a new last axis."""
        del layout
        return lax.broadcast_in_dim(x, shape, tuple(range(x.ndim)))

    def largest(self, values: Sequence[jax.Array]) -> jax.Array:
        """The largest magnitude of fp32 numbers, or NaN. Compared as integers: a CPU treats denormals as zero."""
        return from_bits(reduce(jnp.maximum, map(abs_bits, values)))

    def add_zero(self, x: jax.Array) -> jax.Array:
        """Turns negative zeros into positive ones. XLA would drop an addition of zero."""
        return jnp.where(x == jnp.float32(0), jnp.float32(0), x)

    def round_bf16(self, x: jax.Array) -> jax.Array:
        """Rounds fp32 numbers to bfloat16 precision; their dtype stays fp32. XLA would drop a cast and its inverse."""
        return lax.reduce_precision(x, 8, 7)


class MosaicOps:
    """The operations in Mosaic, for a GPU. Layouts say which elements of an array each thread holds.

    - words: (16, 8), one word per thread
    - rows: (8, 16), one word per thread
    - blocks: (tokens, 16, 8), the 8 words of a block per thread
    - columns: (16, 8, 8), 8 words of a column per thread
    """

    def __init__(self, mosaic_gpu: Any) -> None:
        self.mosaic_gpu = mosaic_gpu
        tiled, tiling = mosaic_gpu.Layout.TILED, mosaic_gpu.Tiling
        over_blocks = {"warp_dims": (-6,), "lane_dims": (-3, -2), "vector_dim": -1}
        self.layouts: dict[str, Any] = {
            "words": tiled(
                tiling(((16, 8), (4, 8), (1,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
            ),
            "rows": tiled(
                tiling(((8, 16), (2, 16), (1,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
            ),
            "blocks": tiled(tiling(((8, 16, 8), (2, 16, 8))), **over_blocks),
            "columns": tiled(tiling(((16, 8, 8), (4, 8, 8))), **over_blocks),
        }

    def index(self, axis: int) -> jax.Array:
        return lax.axis_index(GRID[axis])

    def load(self, ref: Ref, index: Any, layout: str) -> jax.Array:
        # With `optimized`, Mosaic rejects layouts that have no special instruction.
        loaded: jax.Array = self.mosaic_gpu.load(
            ref.at[index], *MOSAIC_LOAD_INDEX, layout=self.layouts[layout], optimized=False
        )
        return loaded

    def store(self, ref: Ref, index: Any, array: jax.Array) -> None:
        if MOSAIC_HAS_STORE:
            self.mosaic_gpu.store(ref.at[index], array, optimized=False)
        else:
            ref[index] = array

    def iota(self, shape: tuple[int, ...], axis: int, layout: str) -> jax.Array:
        layout_of_array = self.layouts[layout]
        numbers: jax.Array = self.mosaic_gpu.broadcasted_iota(jnp.uint32, shape, axis, layout=layout_of_array)
        return numbers

    def expand(self, x: jax.Array, shape: tuple[int, ...], layout: str) -> jax.Array:
        wide = lax.broadcast_in_dim(x, shape, tuple(range(x.ndim)))
        cast: jax.Array = self.mosaic_gpu.layout_cast(wide, self.layouts[layout])
        return cast

    def largest(self, values: Sequence[jax.Array]) -> jax.Array:
        largest: jax.Array = reduce(jnp.maximum, map(jnp.abs, values))
        return largest

    def add_zero(self, x: jax.Array) -> jax.Array:
        total: jax.Array = x + jnp.float32(0)
        return total

    def round_bf16(self, x: jax.Array) -> jax.Array:
        return x.astype(jnp.bfloat16).astype(jnp.float32)


KernelOps = InterpreterOps | MosaicOps
