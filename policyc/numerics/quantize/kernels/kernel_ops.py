"""Operations of the NVFP4 kernels that differ between Pallas's Mosaic backend and JAX's interpreter of kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from policyc.jaxcore.primitives.inline_ptx import run_on_registers
from policyc.jaxcore.versions import MOSAIC_HAS_STORE, MOSAIC_LOAD_INDEX

GRID = ("tokens", "features")
"""The axes of the grid of kernel instances."""

Ref = Any
"""A Pallas reference to memory."""

Program = Callable[..., Sequence[Sequence[Any]]]
"""What one thread computes. It takes the words that the thread holds of each array, and each scalar as a word, and
returns the words that it holds of each result. See `block_programs`."""

_Shape = tuple[int, ...]


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

    def run(
        self, program: Program, inputs: Sequence[jax.Array], results: Sequence[_Shape]
    ) -> list[jax.Array]:
        """Runs a program on all threads. Inputs and results are uint32."""
        outputs = zip(program(*map(_split_words, inputs)), results, strict=True)
        return [_swap_halves(jnp.stack(own, axis=-1)) if len(shape) > 2 else own[0] for own, shape in outputs]


def _split_words(array: jax.Array) -> Any:
    """The words that each thread holds of an array, see `MosaicOps`. A scalar is a word itself."""
    if array.ndim > 2:
        array = _swap_halves(array)
        return [array[..., k] for k in range(array.shape[-1])]
    return [array] if array.ndim else array


def _swap_halves(array: jax.Array) -> jax.Array:
    """Gives the first halves of each two neighbouring rows of 8 words to the first one. Its own inverse."""
    *lead, rows, words = array.shape
    if words < 8:
        return array
    halves = array.reshape(*lead, rows // 2, 2, 2, words // 2)
    return halves.swapaxes(-3, -2).reshape(array.shape)


class MosaicOps:
    """The operations in Mosaic, for a GPU. Layouts say which elements of an array each thread holds.

    - words: (16, 8), one word per thread
    - columns: (16, 8, 8), 8 words of a column per thread
    - column halves: the same, but two neighbouring threads share two columns: the first one has the first halves
    - rows: (8, 16), one word per thread
    - blocks: (8, 16, 8), the 8 words of a block of features, shared in the same way
    - codes: (8, 16, 2), the 2 words of a block's codes per thread
    """

    def __init__(self, mosaic_gpu: Any) -> None:
        self.mosaic_gpu = mosaic_gpu
        tiled, tiling = mosaic_gpu.Layout.TILED, mosaic_gpu.Tiling
        over_blocks = {"warp_dims": (-6,), "lane_dims": (-3, -2), "vector_dim": -1}
        over_halves = {"warp_dims": (-8,), "lane_dims": (-5, -4, -3), "vector_dim": -1}
        self.layouts: dict[str, Any] = {
            "words": tiled(
                tiling(((16, 8), (4, 8), (1,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
            ),
            "rows": tiled(
                tiling(((8, 16), (2, 16), (1,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
            ),
            "blocks": tiled(tiling(((8, 16, 8), (2, 16, 8), (2, 4))), **over_halves),
            "column halves": tiled(tiling(((16, 8, 8), (4, 8, 8), (2, 4))), **over_halves),
            "codes": tiled(tiling(((8, 16, 2), (2, 16, 2))), **over_blocks),
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

    def run(
        self, program: Program, inputs: Sequence[jax.Array], results: Sequence[_Shape]
    ) -> list[jax.Array]:
        """Runs a program on all threads. Inputs and results are uint32."""
        layouts = [self._layout(array.shape) for array in inputs]
        kinds = [(shape, self._layout(shape)) for shape in results]
        return list(run_on_registers(program, inputs, layouts, kinds))

    def _layout(self, shape: _Shape) -> Any:
        """The layout of all arrays of a shape in programs, None for scalars."""
        if not shape:
            return None
        if len(shape) == 2:
            return self.layouts["words" if shape[1] == 8 else "rows"]
        if shape[2] == 2:
            return self.layouts["codes"]
        return self.layouts["column halves" if shape[1] == 8 else "blocks"]


KernelOps = InterpreterOps | MosaicOps
