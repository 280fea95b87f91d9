"""GPU kernels (Pallas, Triton) for quantizers that make fewer passes over memory than XLA's code.

For NVFP4, one kernel finds the maxima of the rotated blocks and a second one writes their codes. The rotated matrix is
never in memory: the second kernel computes it again on the matrix units, while it waits for memory. For FP8, one kernel
writes the codes in both orders. XLA cannot partition a kernel, so they run only in programs on one device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from policyc.language.recipes import Treatment
from policyc.numerics.quantize import random
from policyc.numerics.quantize.bits import (
    E2M1,
    Element,
    abs_bits,
    encode_scaled,
    round_nearest,
    round_stochastic,
    sign_bit,
)
from policyc.numerics.quantize.hadamard import default_signs, sylvester
from policyc.numerics.quantize.layout import Axes

GROUP = 16
"""The tokens of a block: one kernel instance rotates and quantizes this many rows."""

_COLUMNS, _WARPS = 128, 2
"""The columns and the warps of one instance of the NVFP4 kernels."""
_SQUARE, _SQUARE_WARPS = 128, 8
"""The rows and columns, and the warps, of one instance of the FP8 kernel."""
_RANDOM_BITS = 16


def fits(x: jax.Array, treatment: Treatment, axes: Axes) -> bool:
    """Whether the kernels can quantize this operand."""
    t = treatment
    if x.dtype != jnp.bfloat16 or x.ndim < 2 or t.outer != "tensor" or axes.batch:
        return False
    if t.format == "fp8":
        return axes.both_orders and prod(x.shape[:-1]) % _SQUARE == 0 and x.shape[-1] % _SQUARE == 0
    has_whole_blocks = x.ndim == 2 and x.shape[0] % GROUP == 0 and x.shape[1] % _COLUMNS == 0
    is_plain = t.format == "nvfp4" and t.scale == "amax" and t.rht == GROUP and t.rounding in ("rne", "sr")
    return has_whole_blocks and is_plain and axes.axis == -2


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The kernels. `interpret` runs them without a GPU, slowly."""

    interpret: bool = False

    def maxima(self, x: jax.Array) -> jax.Array:
        """The bits of the maximum of each block of 16 rotated tokens."""
        out = ((x.shape[0] // GROUP, x.shape[1]), jnp.int32)
        return _call(_maxima, out, (1, _COLUMNS), x, interpret=self.interpret)

    def codes(
        self, x: jax.Array, enc: jax.Array, lift: jax.Array, key: random.Key, treatment: Treatment
    ) -> jax.Array:
        """The packed codes of the rotated matrix. `enc` has one number per block; `lift` and the key are scalars."""
        out = ((x.shape[0] // 2, x.shape[1]), jnp.uint8)
        body = partial(_codes, stochastic=treatment.rounding == "sr", columns=x.shape[1])
        scalars = [jnp.reshape(jnp.asarray(a), (1, 1)) for a in (lift, key.a, key.b)]
        return _call(body, out, (GROUP // 2, _COLUMNS), x, enc, *scalars, interpret=self.interpret)

    def both_orders(
        self, x: jax.Array, lift: jax.Array, enc: jax.Array, amax: jax.Array, element: Element
    ) -> tuple[jax.Array, jax.Array]:
        """The FP8 codes, and the same with the last axis first. `lift`, `enc` and `amax` are scalars."""
        flat = x.reshape(-1, x.shape[-1])
        rows, columns = flat.shape
        tile = ((_SQUARE, _SQUARE), lambda i, j: (i, j))
        transposed_tile = ((_SQUARE, _SQUARE), lambda i, j: (j, i))
        scalar = ((1, 1), lambda *_: (0, 0))
        codes, transposed = pl.pallas_call(
            partial(_both, element=element),
            [_shape_dtype((rows, columns), jnp.uint8), _shape_dtype((columns, rows), jnp.uint8)],
            grid=(rows // _SQUARE, columns // _SQUARE),
            in_specs=[pl.BlockSpec(*s) for s in (tile, scalar, scalar, scalar)],
            out_specs=[pl.BlockSpec(*s) for s in (tile, transposed_tile)],
            **_compiler_options(_SQUARE_WARPS, self.interpret),
        )(flat, *(a.reshape(1, 1) for a in (lift, enc, amax)))
        return codes.reshape(x.shape), transposed.reshape(x.shape[-1], *x.shape[:-1])


def _call(
    body: Any,
    out: tuple[tuple[int, int], Any],
    block: tuple[int, int],
    x: jax.Array,
    *rest: jax.Array,
    interpret: bool,
) -> jax.Array:
    """Calls a kernel on groups of tokens. `out` is the shape and dtype of its result, `block` that of one instance."""
    matrix = (default_signs(GROUP)[:, None] * sylvester(GROUP) / 4).T.astype(jnp.bfloat16)

    def spec(shape: tuple[int, int], moves: bool) -> pl.BlockSpec:
        return pl.BlockSpec(shape, (lambda i, j: (i, j)) if moves else (lambda *_: (0, 0)))

    specs = [spec((GROUP, _COLUMNS), True), spec((GROUP, GROUP), False)]
    specs += [spec((1, 1), False) if a.size == 1 else spec((1, _COLUMNS), True) for a in rest]
    grid = (x.shape[0] // GROUP, x.shape[1] // _COLUMNS)
    run = pl.pallas_call(
        body,
        _shape_dtype(*out),
        grid=grid,
        in_specs=specs,
        out_specs=spec(block, True),
        **_compiler_options(_WARPS, interpret),
    )
    result: jax.Array = run(x, matrix, *rest)
    return result


def _shape_dtype(shape: tuple[int, int], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _compiler_options(warps: int, interpret: bool) -> dict[str, Any]:
    if interpret:
        return {"interpret": True}
    from jax.experimental.pallas import triton  # cannot be imported without a GPU build of JAX

    return {"compiler_params": triton.CompilerParams(num_warps=warps)}


def _rotate(x: Any, matrix: Any) -> jax.Array:
    rotated = jnp.dot(matrix[...], x[...], preferred_element_type=jnp.float32)
    return rotated.astype(jnp.bfloat16)


def _maxima(x: Any, matrix: Any, out: Any) -> None:
    bits = abs_bits(_rotate(x, matrix).astype(jnp.float32))
    out[...] = jnp.max(bits, axis=0, keepdims=True)


def _codes(
    x: Any, matrix: Any, enc: Any, lift: Any, a: Any, b: Any, out: Any, *, stochastic: bool, columns: int
) -> None:
    scaled = _rotate(x, matrix).astype(jnp.float32) * lift[...] * enc[...]
    rows = lax.broadcasted_iota(jnp.int32, scaled.shape, 0)
    if stochastic:
        # One word for a pair of tokens, by its index in the whole matrix: 16 bits each.
        pair = pl.program_id(0) * (GROUP // 2) + rows // 2
        column = pl.program_id(1) * _COLUMNS + lax.broadcasted_iota(jnp.int32, scaled.shape, 1)
        index = (pair * columns + column).astype(jnp.uint32)
        word = random.mix(index ^ a[...], b[...])
        bits = (jnp.where(rows % 2 == 0, word, word >> 16) & 0xFFFF).astype(jnp.int32)
        magnitude = round_stochastic(jnp.abs(scaled), bits, _RANDOM_BITS, E2M1)
    else:
        magnitude = round_nearest(jnp.abs(scaled), E2M1)
    code = (magnitude | sign_bit(scaled, E2M1)) << (4 * (rows % 2))
    pairs = code.reshape(GROUP // 2, 2, code.shape[1])
    out[...] = jnp.sum(pairs, axis=1).astype(jnp.uint8)


def _both(x: Any, lift: Any, enc: Any, amax: Any, codes: Any, transposed: Any, *, element: Element) -> None:
    values = x[...].astype(jnp.float32)
    encoded = encode_scaled(values, lift[...], enc[...], amax[...], element).astype(jnp.uint8)
    codes[...] = encoded
    transposed[...] = encoded.T
