"""Emulated substitutes for Transformer Engine's kernels, for machines that cannot run them.

The layouts follow its sources. Rows have blocks along the last dimension. Columns are the rows of the transpose,
rotated first if requested. The scale of a 2D tile is repeated for each of its rows. The caller gives the maxima: on
several devices, those of the whole operand.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from policyc.language.recipes import Treatment
from policyc.numerics.backends.te_calls import Maxima, QuantizedMatrix, QuantizedOrders, QuantizerOutput
from policyc.numerics.quantize import Axes, Key, block_values, quantize
from policyc.numerics.quantize.kernels.block_programs import rotate
from policyc.numerics.quantize.reference.layout import Layout, Quantized, repeat_axis

SIGN_MASK = 0xD7E8
"""The signs of the rotation: bit i is set if sign i is negative."""


def quantize_rows(
    x: jax.Array, amax: jax.Array, state: jax.Array | None = None, *, two_d: bool = False
) -> QuantizedMatrix:
    """Returns (rows, length) float4 codes, and a scale for every 16 of them."""
    # The quantizer finds the maximum itself, so it gets extra rows, one of which holds `amax`. They are removed below.
    more = jnp.zeros((16, x.shape[1]), jnp.float32).at[0, 0].set(amax.reshape(()))
    rounding = "rne" if state is None else "sr"
    treatment = Treatment(format="nvfp4", element="e2m1", tile2d=two_d, rounding=rounding)
    key = None if state is None else Key(state[0], state[1])
    wide = jnp.concatenate([x.astype(jnp.float32), more])
    q = quantize(wide, treatment, Axes(axis=-1, contract=(-1,), tile=-2), key=key)
    assert q.scales is not None
    scales = (repeat_axis(q.scales, -2, 16) if two_d else q.scales)[: x.shape[0]]
    data = lax.bitcast_convert_type(q.codes[: x.shape[0]], jnp.float4_e2m1fn).reshape(x.shape)
    return QuantizedMatrix(data, lax.bitcast_convert_type(scales, jnp.float8_e4m3fn))


def rotate_columns(x: jax.Array) -> jax.Array:
    """The rotated rows of the transpose. Uses sums and differences: `custom_partitioning` takes no constant arrays."""
    groups = x.T.reshape(x.shape[1], -1, 16).astype(jnp.float32)
    words = lax.bitcast_convert_type(groups, jnp.uint32)
    pairs = jnp.stack(rotate([words[..., i] for i in range(16)]), axis=-1)
    return lax.bitcast_convert_type(pairs, jnp.bfloat16).reshape(x.T.shape)


def multiply_rows(left: QuantizedMatrix, right: QuantizedMatrix, alpha: jax.Array, out: Any) -> jax.Array:
    """The cuBLAS product: contracts the last dimension of both operands, and multiplies by alpha."""

    def values(operand: QuantizedMatrix) -> jax.Array:
        rows, length = operand.codes.shape
        layout = Layout(format="nvfp4", element="e2m1", axis=-1, block=16, size=length)
        codes = lax.bitcast_convert_type(operand.codes.reshape(rows, length // 2, 2), jnp.uint8)
        scales = lax.bitcast_convert_type(operand.scales, jnp.uint8)
        return block_values(Quantized(codes=codes, scales=scales, amax=None, layout=layout), jnp.float32)

    dims = (((1,), (1,)), ((), ()))
    return (lax.dot_general(values(left), values(right), dims, precision="highest") * alpha).astype(out)


class Engine:
    """A substitute for `te_calls.load()`. `joins` says whether it has the kernel that quantizes in one pass."""

    joins = True

    def joins_rotation(self) -> bool:
        return self.joins

    def rotation_matrix(self) -> np.ndarray:
        return np.zeros((16, 16), jnp.bfloat16)  # `rotate_columns` does not read it

    def quantize(
        self, x: Any, maxima: Maxima, state: Any, rotation: Any, output: QuantizerOutput
    ) -> QuantizedOrders:
        if rotation is not None:
            assert self.joins_rotation() or not output.rows
            assert not output.two_d
            assert maxima.rotated is not None
            rows = quantize_rows(x, maxima.plain, state) if output.rows else None
            columns = quantize_rows(rotate_columns(x), maxima.rotated, state)
            return QuantizedOrders(rows, columns, maxima.plain)
        rows, columns = (quantize_rows(a, maxima.plain, state, two_d=output.two_d) for a in (x, x.T))
        # A call that does not rotate may overwrite its maximum.
        return QuantizedOrders(
            rows if output.rows else None, columns if output.columns else None, -maxima.plain
        )

    def gemm(self, left: Any, right: Any, alpha: Any, out: Any) -> jax.Array:
        return multiply_rows(left, right, alpha, out)
