"""A GEMM for Hopper GPUs (Pallas, Mosaic) that applies outer scales to its fp32 sums and writes them as bfloat16.

Without it, cuBLAS writes the fp32 sums and another kernel reads them, or XLA generates a slower GEMM in Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from policyc.jaxcore.primitives.define_primitive import LoweringContext
from policyc.jaxcore.primitives.lowering import call_lowered_once
from policyc.numerics.dimensions import DimensionNumbers
from policyc.numerics.quantize.reference.values import Scale, find_factors_in_kernel

NAME = "policyc_gemm"
"""The name of the kernel in profiles and compiled programs."""

_CAPABILITY = 9
"""The major compute capability of Hopper GPUs. The instruction of the matrix unit exists only there."""

_GROUPS = 2
"""Groups of 128 threads that multiply. Another one copies operands."""
_SIDE = 128
"""Rows and columns of the part of a tile that one group multiplies."""
_ROWS, _COLUMNS, _DEPTH = _GROUPS * _SIDE, _SIDE, 64
"""The tile of the result that a kernel instance computes at once, and the length that it contracts in one step."""
_STAGES = 4
"""The steps whose operands fit into shared memory."""
_WRITTEN = 64
"""Rows and columns of the pieces in which a group writes its part of a tile."""
_LEAST_BUSY = 0.85
"""The least fraction of multiprocessors that have a tile, over all turns. For other products, XLA has smaller tiles."""
_BAND = 8
"""Tiles are multiplied in bands of this many rows of tiles, column by column: so what they read is still in a cache."""


def fits(
    a: jax.Array, b: jax.Array, dimensions: DimensionNumbers, out: Any, context: LoweringContext
) -> bool:
    """Whether the kernel can multiply these values, and its tiles keep the multiprocessors busy."""
    gpu = context.gpu
    if gpu is None or gpu.capability != _CAPABILITY or not context.single_device or context.is_mapped:
        return False
    ((lc, rc), (lb, rb)) = dimensions
    if lb or rb or lc != (a.ndim - 1,) or b.ndim != 2 or len(rc) != 1:
        return False
    if not a.dtype == b.dtype == jnp.dtype(out) == jnp.bfloat16:
        return False
    rows, columns, depth = prod(a.shape[:-1]), b.shape[1 - rc[0]], a.shape[-1]
    if rows % _ROWS or columns % _COLUMNS or depth % _DEPTH:
        return False
    tiles = (rows // _ROWS) * (columns // _COLUMNS)
    turns = -(-tiles // gpu.multiprocessors)
    return tiles >= _LEAST_BUSY * turns * gpu.multiprocessors


def multiply(
    a: jax.Array,
    b: jax.Array,
    dimensions: DimensionNumbers,
    scales: Sequence[Scale],
    context: LoweringContext,
) -> jax.Array:
    """The product of bfloat16 values times outer scales of whole tensors. Requires `fits`."""
    (_, (contracted,)), _ = dimensions
    assert context.gpu is not None
    kernel = HopperGemm(
        bounds=tuple(bound for _, bound in scales),
        contracts_last=contracted == 1,
        instances=context.gpu.multiprocessors,
    )
    shape = (*a.shape[:-1], b.shape[1 - contracted])
    operands = (a.reshape(-1, a.shape[-1]), b, *(amax.reshape(1) for amax, _ in scales))
    result = ((prod(shape[:-1]), shape[-1]), jnp.bfloat16)
    return call_lowered_once(kernel, [result], context.platform, *operands)[0].reshape(shape)


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class HopperGemm:
    """The kernel. Called with a (rows, depth), b, and the amax of each outer scale.

    Attributes:
      bounds: the bounds of the outer scales.
      contracts_last: b is (columns, depth) instead of (depth, columns).
      instances: how many instances run, each on its share of the tiles.
    """

    bounds: tuple[float, ...]
    contracts_last: bool
    instances: int

    def __call__(self, a: jax.Array, b: jax.Array, *maxima: jax.Array) -> Sequence[jax.Array]:
        from jax.experimental.pallas import mosaic_gpu

        shape = (a.shape[0], b.shape[0 if self.contracts_last else 1])

        body = partial(_multiply, mosaic_gpu, self)
        body.__name__ = NAME  # type: ignore[attr-defined]
        run = mosaic_gpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(shape, jnp.bfloat16),
            grid=(self.instances,),
            grid_names=("instances",),
            num_threads=_GROUPS + 1,
            thread_name="group",
            compiler_params=mosaic_gpu.CompilerParams(lowering_semantics=mosaic_gpu.LoweringSemantics.Lane),
        )
        return [run(a, b, *maxima)]


Ref = Any
"""A Pallas reference to memory."""


def _multiply(gpu: Any, gemm: HopperGemm, a: Ref, b: Ref, *refs: Ref) -> None:
    """The body of the kernel. `refs` has the maxima, then the result. `gpu` is Pallas's module for Mosaic."""
    *maxima, result = refs
    first, second = find_factors_in_kernel([amax[0] for amax in maxima], gemm.bounds)
    group = lax.axis_index("group")
    tiles = a.shape[0] // _ROWS, result.shape[1] // _COLUMNS
    own_rows = pl.ds(group * _SIDE, _SIDE)
    pipeline = partial(_make_pipeline, gpu, gemm.contracts_last, own_rows, a.shape[1] // _DEPTH)

    @partial(
        pl.run_scoped,
        buffers=pipeline(None).get_allocations(a, b),
        written=gpu.SMEM((_GROUPS, 2, _WRITTEN, _WRITTEN), jnp.bfloat16, transforms=_transforms(gpu)),
        collective_axes="group",
    )
    def _(buffers: Any, written: Ref) -> None:
        def multiply_tile(loop: Any) -> None:
            i, j = gpu.planar_snake(loop.index[0], tiles, 0, _BAND)
            rows, columns = pl.ds(i * _ROWS, _ROWS), pl.ds(j * _COLUMNS, _COLUMNS)

            def run(run_pipeline: Callable[[Ref], None]) -> None:
                @partial(pl.run_scoped, sums=gpu.ACC((_SIDE, _COLUMNS), jnp.float32))
                def _(sums: Ref) -> None:
                    run_pipeline(sums)
                    scaled = (sums[...] * first * second).astype(jnp.bfloat16)
                    _write_part(gpu, scaled, written.at[group], result.at[rows, columns].at[own_rows])

            columns_of_b = b.at[columns] if gemm.contracts_last else b.at[:, columns]
            pipeline(run)(a.at[rows], columns_of_b, allocations=buffers)

        gpu.nd_loop((tiles[0] * tiles[1],), collective_axes="instances")(multiply_tile)

    gpu.wait_smem_to_gmem(0, wait_read_only=True)


def _make_pipeline(
    gpu: Any, contracts_last: bool, own_rows: Any, steps: int, run: Callable[..., None] | None
) -> Any:
    """Copies operands to shared memory while others are multiplied. Each group that multiplies calls `run`."""

    def add_product(_: Any, a: Ref, b: Ref, sums: Ref) -> Ref:
        gpu.wgmma(sums, a.at[own_rows], b.transpose((1, 0)) if contracts_last else b)
        gpu.wgmma_wait(0)
        return sums

    b_block = (_COLUMNS, _DEPTH) if contracts_last else (_DEPTH, _COLUMNS)
    spec = partial(gpu.BlockSpec, transforms=_transforms(gpu), memory_space=gpu.SMEM)
    return gpu.emit_pipeline_warp_specialized(
        add_product,
        grid=(steps,),
        in_specs=[
            spec((_ROWS, _DEPTH), lambda k: (0, k)),
            spec(b_block, lambda k: (0, k) if contracts_last else (k, 0)),
        ],
        memory_registers=40,
        wg_axis="group",
        num_compute_wgs=_GROUPS,
        max_concurrent_steps=_STAGES,
        compute_context=run or (lambda _: None),
    )


def _write_part(gpu: Any, part: jax.Array, written: Ref, result: Ref) -> None:
    """Writes the part of a group in pieces, from two buffers in turn."""
    for piece in range((_SIDE // _WRITTEN) * (_COLUMNS // _WRITTEN)):
        i, j = divmod(piece, _COLUMNS // _WRITTEN)
        index = tuple(slice(k * _WRITTEN, (k + 1) * _WRITTEN) for k in (i, j))
        buffer = written.at[piece % 2]
        gpu.wait_smem_to_gmem(1, wait_read_only=True)  # all but the other buffer are copied
        buffer[...] = part[index]
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(buffer, result.at[index])


def _transforms(gpu: Any) -> tuple[Any, ...]:
    """How bfloat16 numbers lie in shared memory: rows of 64, whose parts of 16 bytes are swapped to avoid conflicts."""
    return gpu.TilingTransform((8, 64)), gpu.SwizzleTransform(128)
