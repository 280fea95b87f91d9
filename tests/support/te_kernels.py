"""Substitutes for Transformer Engine's kernels on machines that cannot run them: the emulation of plain 2D arrays.

The layouts follow its sources. Rows have blocks along the last dimension. Columns are the transpose, with blocks along
the rows of the input, rotated first if requested. The scale of a 2D tile is repeated for each of its rows.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from policyc.language.recipes import Treatment
from policyc.numerics.quantize import Axes, block_values, quantize
from policyc.numerics.quantize.layout import Layout, Quantized, repeat_axis

ROWS, COLUMNS, BOTH = "rows", "columns", "both"
ONE, TWO = "1D", "2D"


class KernelResult(NamedTuple):
    """What a quantizing kernel writes."""

    data: jax.Array
    scale_inv: jax.Array
    amax: jax.Array


def quantize_rows(x: jax.Array, two_d: bool = False, rotated: bool = False) -> KernelResult:
    """One result of a kernel: (rows, length) of float4, and a scale for each 16 of them."""
    treatment = Treatment(format="nvfp4", element="e2m1", rht=16 * rotated, tile2d=two_d)
    q = quantize(x, treatment, Axes(axis=-1, contract=(-1,), tile=-2))
    assert q.scales is not None and q.amax is not None  # noqa: PT018
    scales = repeat_axis(q.scales, -2, 16) if two_d else q.scales
    data = lax.bitcast_convert_type(q.codes, jnp.float4_e2m1fn).reshape(x.shape)
    return KernelResult(data, lax.bitcast_convert_type(scales, jnp.float8_e4m3fn), q.amax.reshape(1))


def multiply_rows(left: Any, right: Any, alpha: jax.Array, out: Any) -> jax.Array:
    """The cuBLAS product: both operands contracted along the last dimension, times alpha."""

    def values(operand: Any) -> jax.Array:
        rows, length = operand.data.shape
        layout = Layout(format="nvfp4", element="e2m1", axis=-1, block=16, size=length)
        codes = lax.bitcast_convert_type(operand.data.reshape(rows, length // 2, 2), jnp.uint8)
        scales = lax.bitcast_convert_type(operand.scale_inv, jnp.uint8)
        return block_values(Quantized(codes=codes, scales=scales, amax=None, layout=layout), jnp.float32)

    dims = (((1,), (1,)), ((), ()))
    return (lax.dot_general(values(left), values(right), dims, precision="highest") * alpha).astype(out)


def engine() -> Any:
    """A substitute for the parts of Transformer Engine that the backend uses."""

    def quantize(x: Any, quantizer: Any, flatten_axis: int) -> Any:
        assert flatten_axis == 1
        two_d = quantizer.scaling_mode == TWO
        columns = RowsAndColumns(quantize_rows(x.data.T, two_d, quantizer.use_rht))
        # Transformer Engine has no kernel for columns alone, unless they are rotated, and none that rotates rows.
        if quantizer.q_layout == COLUMNS:
            assert quantizer.use_rht
            return columns.colwise_tensor
        return columns if quantizer.q_layout == BOTH else quantize_rows(x.data, two_d)

    def gemm(left: Any, right: Any, contracting_dims: Any) -> jax.Array:
        assert contracting_dims == ((1,), (1,))
        return multiply_rows(left, right, left.amax / 2688 * (right.amax / 2688), left.dq_dtype)

    factory = SimpleNamespace(create=lambda **fields: SimpleNamespace(**fields))
    return SimpleNamespace(
        quantize=quantize,
        gemm=gemm,
        NoScaleTensor=lambda **fields: SimpleNamespace(**fields),
        QuantizeLayout=SimpleNamespace(ROWWISE=ROWS, COLWISE=COLUMNS, ROWWISE_COLWISE=BOTH),
        QuantizerFactory=factory,
        ScaledTensor2x=RowsAndColumns,
        ScaledTensorFactory=SimpleNamespace(create_1x=factory.create),
        ScalingMode=SimpleNamespace(NVFP4_1D_SCALING=ONE, NVFP4_2D_SCALING=TWO),
    )


class RowsAndColumns(NamedTuple):
    """What a kernel for rows and columns writes. The backend reads only the columns."""

    colwise_tensor: KernelResult
