"""cuDNN's NVFP4 GEMMs over groups of rows, for mixtures of experts on Blackwell.

The kernels are those of `cudnn.jax`, in the package nvidia-cudnn-frontend. They are compiled while a program is
lowered, which takes some 15 seconds per shape. They require groups that start at multiples of 256 rows (128 if the rows
are contracted), and block scales in atoms of 128 rows by 4 blocks. Operands are quantized by the other backends.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

from policyc.jaxcore.primitives.define_primitive import LoweringContext
from policyc.jaxcore.primitives.partition import Dims, PartitionRule, ShardIndex, partition
from policyc.numerics.backends.backend import GemmQuery, Obstacle
from policyc.numerics.backends.emulate import Emulation
from policyc.numerics.backends.xla import Rows, as_rows, row_scales
from policyc.numerics.groups import align_groups, pad_sizes, restore_groups
from policyc.numerics.quantize.reference.layout import Operand, Quantized
from policyc.numerics.quantize.reference.values import apply_outer_scale

INSTALL = "pip install nvidia-cudnn-frontend"

_BLOCK = 16
_ROWS, _TOKENS = 256, 128
"""Groups of rows start at multiples of the first number, contracted groups of tokens at multiples of the second."""
_FEATURES = 128
_ATOM_ROWS, _ATOM_BLOCKS = 128, 4


class CudnnGroups(Emulation):
    """cuDNN's GEMMs over groups of rows. Operands are quantized by the emulation."""

    multiplies_values: bool = False
    runs_anywhere: bool = False
    only_ragged: bool = True
    fallback: str = "xla"
    batched_by: str = "emulate"
    needs_devices: bool = True
    moves_groups: bool = True
    calls: Mapping[str, str] = MappingProxyType({"nvfp4": "CuteDSLRT_NvJaxCutlassCall_v2"})

    def is_candidate(self, query: GemmQuery) -> bool:
        return query.ragged

    def find_missing_library(self) -> str:
        """Why cuDNN's kernels cannot be used here; empty if they can."""
        try:
            _load()
        except ImportError as error:
            return f"cuDNN's grouped GEMMs are not installed ({error}). To install them: {INSTALL}"
        return ""

    def obstacle(self, query: GemmQuery) -> Obstacle | None:
        """The first limit of this backend that a GEMM exceeds, if any."""
        if not query.ragged:
            return Obstacle("cuDNN runs only GEMMs over ragged groups", "other backends run it")
        if query.format != "nvfp4" or query.right.format != "nvfp4":
            return Obstacle(f"cuDNN runs only nvfp4, not {query.format}", "use nvfp4, or keep it in bf16")
        if any(t.outer == "row" for t in (query.left, query.right)):
            return Obstacle("cuDNN's grouped GEMM has one outer scale per group", "use outer=tensor")
        sizes = {"m": query.m, "n": query.n, "k": query.k}
        features = ("m", "n") if query.gemm == "wgrad" else ("n", "k")
        for name in features:
            size = sizes[name]
            if size % _FEATURES:
                limit = f"{name} % {_FEATURES} == 0"
                reason = f"cuDNN's grouped GEMM requires {limit}, but {query.gemm} has {size}"
                return Obstacle(reason, f"pad {size} to {size + -size % _FEATURES}")
        if any(dtype != "bfloat16" for dtype in query.types[: 1 if query.gemm != "wgrad" else 2]):
            return Obstacle("cuDNN's grouped GEMM returns bfloat16", "compute in bfloat16")
        return None

    def ragged_gemm(
        self,
        lhs: Operand,
        rhs: Operand,
        sizes: jax.Array,
        contracting: bool,
        out: Any,
        context: LoweringContext,
    ) -> jax.Array:
        """Products of groups of rows, by cuDNN on GPUs."""
        assert isinstance(lhs, Quantized)
        assert isinstance(rhs, Quantized)
        is_exact = contracting or out in (jnp.bfloat16, jnp.float16)
        if context.platform != "cuda" or not context.knows_division or not is_exact:
            if context.platform == "cuda":
                warnings.warn(_EMULATED, stacklevel=2)
            return super().ragged_gemm(lhs, rhs, sizes, contracting, out, context)
        left, _ = as_rows(lhs, (0,) if contracting else (1,), ())
        right, _ = as_rows(rhs, *(((0,), ()) if contracting else ((1,), (0,))))
        arrays, structure = jax.tree.flatten((left, right))
        multiply = contract_groups if contracting else multiply_groups

        def run(index: ShardIndex, sizes: jax.Array, *shards: jax.Array) -> tuple[jax.Array]:
            del index
            left, right = jax.tree.unflatten(structure, shards)
            return (multiply(left, right, sizes, out),)

        if context.single_device:
            return run(ShardIndex(factors={}), sizes, *arrays)[0]
        return partition(run, _rule(left, right, contracting))(sizes, *arrays)[0]


BACKEND = CudnnGroups()


def _load() -> Any:
    import cudnn

    if not hasattr(cudnn, "grouped_gemm_quant_jax_forward"):
        raise ImportError("this version of cudnn has no grouped_gemm_quant_jax_forward")
    return cudnn


# ---- products of groups


_EMULATED = (
    "a product over ragged groups is emulated: cuDNN's grouped GEMM cannot run under a vmap around the loss or in a "
    "shard_map over only some axes of the mesh, and cannot return fp32"
)


def _rule(left: Rows, right: Rows, contracting: bool) -> PartitionRule:
    """Partitioning rule. Each device has all rows and groups. The columns of the result may be divided."""
    whole = {"rows", "groups", "contracted", "one"}

    def dims(rows: Rows, lead: str, name: str) -> tuple[Dims, ...]:
        tile = rows.codes.shape[1] // rows.scales.shape[1]
        parts = [((lead, 1), (name, unit), ("contracted", 1)) for unit in (tile, 1)]
        outer = ((lead, 1), ("one", 1), ("one", 1))
        return (*parts, *([outer] * (2 if rows.mantissa is not None else 0)))

    first = "k" if contracting else "rows"
    second = "one" if contracting else "groups"
    tile = right.codes.shape[1] // right.scales.shape[1]
    columns = ("n", tile)
    result: Dims = (("groups", 1), (first, 1), columns) if contracting else ((first, 1), columns)
    return PartitionRule(
        name="grouped GEMM",
        operands=((("groups", 1),), *dims(left, "one", first), *dims(right, second, "n")),
        results=(result,),
        whole=frozenset(whole | {first}),
    )


def multiply_groups(left: Rows, right: Rows, sizes: jax.Array, out: Any) -> jax.Array:
    """(1, m, k), (g, n, k), (g,) -> (m, n): each row is multiplied by the matrix of its group."""
    count = left.codes.shape[1]
    codes, scales = (align_groups(x[0], sizes, _ROWS) for x in (left.codes, row_scales(left)))
    ends = jnp.cumsum(pad_sizes(sizes, _ROWS)).astype(jnp.int32)
    product = _call_rows(
        codes,
        right.codes,
        _as_scales(_atoms(scales)),
        _as_scales(jax.vmap(_atoms)(row_scales(right))),
        ends,
        _outer_scale(left) * _outer_scale(right),
        jnp.dtype(out),
    )
    return restore_groups(product, sizes, _ROWS, count)


def contract_groups(left: Rows, right: Rows, sizes: jax.Array, out: Any) -> jax.Array:
    """(1, k, m), (1, n, m), (g,) -> (g, k, n): each group of tokens, in whole blocks, is contracted."""
    blocks, unit = sizes // _BLOCK, _TOKENS // _BLOCK

    def align(rows: Rows) -> tuple[jax.Array, jax.Array]:
        bytes_ = rows.codes[0].reshape(rows.codes.shape[1], -1, _BLOCK // 2)
        codes = align_groups(bytes_, blocks, unit, axis=1)
        scales = align_groups(row_scales(rows)[0], blocks, unit, axis=1)
        atoms = _order_by_group(_atoms(scales), pad_sizes(blocks, unit) // _ATOM_BLOCKS)
        return codes.reshape(codes.shape[0], -1), _as_scales(atoms)

    (a, a_scales), (b, b_scales) = align(left), align(right)
    ends = jnp.cumsum(pad_sizes(sizes, _TOKENS)).astype(jnp.int32)
    left_outer, right_outer = (jnp.broadcast_to(_outer_scale(rows), sizes.shape) for rows in (left, right))
    return _call_tokens(a, b, a_scales, b_scales, ends, (left_outer, right_outer), jnp.dtype(out))


def _outer_scale(rows: Rows) -> jax.Array:
    """The outer scales as fp32 numbers, one for each index of the batch."""
    if rows.mantissa is None or rows.exponent is None:
        return jnp.ones(rows.codes.shape[0], jnp.float32)
    return apply_outer_scale(jnp.float32(1), rows.mantissa, rows.exponent)[:, 0, 0]


def _atoms(scales: jax.Array) -> jax.Array:
    """(rows, blocks) as (rows / 128, blocks / 4, 32, 4, 4): in an atom, a row r is at [r % 32, r // 32]."""
    rows, blocks = scales.shape
    padded = jnp.pad(scales, ((0, -rows % _ATOM_ROWS), (0, -blocks % _ATOM_BLOCKS)))
    split = padded.reshape(-1, 4, _ATOM_ROWS // 4, padded.shape[1] // _ATOM_BLOCKS, _ATOM_BLOCKS)
    return split.transpose(0, 3, 2, 1, 4)


def _order_by_group(atoms: jax.Array, sizes: jax.Array) -> jax.Array:
    """Reorders atoms so that those of each group are contiguous, row by row.

    `sizes` are the numbers of atom columns per group.
    """
    rows, columns = atoms.shape[:2]
    position = jnp.arange(rows * columns)
    ends = jnp.cumsum(sizes)
    group = jnp.clip(jnp.searchsorted(rows * ends, position, side="right"), 0, sizes.shape[0] - 1)
    first, width = (ends - sizes)[group], jnp.maximum(sizes[group], 1)
    inner = position - rows * first
    source = (inner // width) * columns + first + inner % width
    source = jnp.where(position < rows * ends[-1], source, rows * columns)
    return jnp.take(atoms.reshape(rows * columns, -1), source, axis=0, mode="fill", fill_value=0)


def _as_scales(atoms: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(atoms.reshape(-1), jnp.float8_e4m3fn)


# ---- the library


def _call_rows(
    codes: jax.Array,
    weights: jax.Array,
    scales: jax.Array,
    weight_scales: jax.Array,
    ends: jax.Array,
    outer: jax.Array,
    out: Any,
) -> jax.Array:
    """Multiplies rows (m, k / 2), in groups that end at `ends`, by one matrix per group (g, n, k / 2)."""
    product: jax.Array = _load().grouped_gemm_quant_jax_forward(
        codes, weights, scales, weight_scales, ends, outer, d_dtype=out, sf_vec_size=_BLOCK
    )["d_tensor"]
    return product


def _call_tokens(
    left: jax.Array,
    right: jax.Array,
    left_scales: jax.Array,
    right_scales: jax.Array,
    ends: jax.Array,
    outer: tuple[jax.Array, jax.Array],
    out: Any,
) -> jax.Array:
    """(k, m / 2), (n, m / 2) -> (g, k, n), contracted in groups of tokens that end at `ends`."""
    product: jax.Array = _load().grouped_gemm_wgrad_jax_sm100(
        left,
        right,
        ends,
        wgrad_dtype=out,
        sfa_tensor=left_scales,
        sfb_tensor=right_scales,
        global_scale_a=outer[0],
        global_scale_b=outer[1],
        sf_vec_size=_BLOCK,
    )["wgrad_tensor"]
    return product


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@contextlib.contextmanager
def compiling_for(capability: tuple[int, int], processors: int) -> Iterator[None]:
    """Compiles the kernels for a GPU that is not present, by answering the library's questions about the GPU."""
    if BACKEND.find_missing_library():
        yield
        return
    import cutlass.utils
    from cudnn.gemm.cutedsl.grouped.quant import jax_api as rows
    from cudnn.gemm.cutedsl.grouped.wgrad import jax_api as tokens

    class Hardware:
        def get_max_active_clusters(self, size: int) -> int:
            return processors // size

    answers = {"get_compute_capability": lambda: capability, "get_device_type": lambda: "blackwell"}
    with contextlib.ExitStack() as stack:
        # Not `mock.patch.dict`, which would also undo variables that libraries set meanwhile.
        stack.callback(_set_variable, "CUTE_DSL_ARCH", os.environ.get("CUTE_DSL_ARCH"))
        _set_variable("CUTE_DSL_ARCH", "sm_{}{}a".format(*capability))
        stack.enter_context(mock.patch.object(cutlass.utils, "HardwareInfo", Hardware))
        for module in (rows, tokens):
            for name, answer in answers.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, answer))
        yield
