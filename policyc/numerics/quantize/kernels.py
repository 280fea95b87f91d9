"""Passes over memory as GPU kernels, where they are fewer than those that XLA makes.

In: a bfloat16 matrix whose rows are tokens. Out: for NVFP4 the maxima of its rotated blocks, then their codes; the
rotated matrix is never stored: it is made again in the second pass, on the matrix units, while memory is waited for.
For FP8 its codes, and once more transposed. The one trap: XLA cannot divide a kernel among devices, so these run where
a program has one device.
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
    round_nearest,
    round_stochastic,
    scaled_code,
    sign_code,
)
from policyc.numerics.quantize.hadamard import default_signs, sylvester
from policyc.numerics.quantize.layout import Axes

GROUP = 16
_COLUMNS = 128
_WARPS = 2
_SQUARE = 128
_SQUARE_WARPS = 8
_RANDOM_BITS = 16


def fit(x: jax.Array, treatment: Treatment, axes: Axes) -> bool:
    """Is this an operand that the kernels take?"""
    t = treatment
    if x.dtype != jnp.bfloat16 or x.ndim < 2 or t.outer != "tensor" or axes.batch:
        return False
    if t.format == "fp8":
        return axes.both and prod(x.shape[:-1]) % _SQUARE == 0 and x.shape[-1] % _SQUARE == 0
    whole = x.ndim == 2 and x.shape[0] % GROUP == 0 and x.shape[1] % _COLUMNS == 0
    plain = t.format == "nvfp4" and t.scale == "amax" and t.rht == GROUP and t.rounding in ("rne", "sr")
    return whole and plain and axes.axis == -2


@dataclass(frozen=True, slots=True)
class Kernels:
    """All of them. `interpret` runs them without a GPU, slowly."""

    interpret: bool = False

    def maxima(self, x: jax.Array) -> jax.Array:
        """Bits of the maximum of each block of 16 rotated tokens."""
        out = ((x.shape[0] // GROUP, x.shape[1]), jnp.int32)
        return _call(_maxima, out, (1, _COLUMNS), x, interpret=self.interpret)

    def codes(
        self, x: jax.Array, enc: jax.Array, lift: jax.Array, key: random.Key, treatment: Treatment
    ) -> jax.Array:
        """Packed codes of the rotated matrix. `enc` has a number for each block, `lift` and the key's words one."""
        out = ((x.shape[0] // 2, x.shape[1]), jnp.uint8)
        body = partial(_codes, stochastic=treatment.rounding == "sr", columns=x.shape[1])
        one = [jnp.reshape(jnp.asarray(a), (1, 1)) for a in (lift, key.a, key.b)]
        return _call(body, out, (GROUP // 2, _COLUMNS), x, enc, *one, interpret=self.interpret)

    def both(
        self, x: jax.Array, lift: jax.Array, enc: jax.Array, amax: jax.Array, element: Element
    ) -> tuple[jax.Array, jax.Array]:
        """Codes of FP8, and the same with the last axis first. The scales are one number each."""
        flat = x.reshape(-1, x.shape[-1])
        rows, columns = flat.shape
        tile, turned = ((_SQUARE, _SQUARE), lambda i, j: (i, j)), ((_SQUARE, _SQUARE), lambda i, j: (j, i))
        one = ((1, 1), lambda *_: (0, 0))
        codes, across = pl.pallas_call(
            partial(_both, element=element),
            [_result((rows, columns), jnp.uint8), _result((columns, rows), jnp.uint8)],
            grid=(rows // _SQUARE, columns // _SQUARE),
            in_specs=[pl.BlockSpec(*s) for s in (tile, one, one, one)],
            out_specs=[pl.BlockSpec(*s) for s in (tile, turned)],
            **_options(_SQUARE_WARPS, self.interpret),
        )(flat, *(a.reshape(1, 1) for a in (lift, enc, amax)))
        return codes.reshape(x.shape), across.reshape(x.shape[-1], *x.shape[:-1])


def _call(
    body: Any,
    out: tuple[tuple[int, int], Any],
    block: tuple[int, int],
    x: jax.Array,
    *rest: jax.Array,
    interpret: bool,
) -> jax.Array:
    matrix = (default_signs(GROUP)[:, None] * sylvester(GROUP) / 4).T.astype(jnp.bfloat16)

    def spec(shape: tuple[int, int], moves: bool) -> pl.BlockSpec:
        return pl.BlockSpec(shape, (lambda i, j: (i, j)) if moves else (lambda *_: (0, 0)))

    specs = [spec((GROUP, _COLUMNS), True), spec((GROUP, GROUP), False)]
    specs += [spec((1, 1), False) if a.size == 1 else spec((1, _COLUMNS), True) for a in rest]
    grid = (x.shape[0] // GROUP, x.shape[1] // _COLUMNS)
    run = pl.pallas_call(
        body,
        _result(*out),
        grid=grid,
        in_specs=specs,
        out_specs=spec(block, True),
        **_options(_WARPS, interpret),
    )
    return run(x, matrix, *rest)  # type: ignore[no-any-return]


def _result(shape: tuple[int, int], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]  # JAX does not annotate it


def _options(warps: int, interpret: bool) -> dict[str, Any]:
    if interpret:
        return {"interpret": True}
    from jax.experimental.pallas import triton  # not there where there is no GPU to build for

    return {"compiler_params": triton.CompilerParams(num_warps=warps)}


def _rotated(x: Any, matrix: Any) -> jax.Array:
    turned = jnp.dot(matrix[...], x[...], preferred_element_type=jnp.float32)
    return turned.astype(jnp.bfloat16)


def _maxima(x: Any, matrix: Any, out: Any) -> None:
    bits = abs_bits(_rotated(x, matrix).astype(jnp.float32))
    out[...] = jnp.max(bits, axis=0, keepdims=True)


def _codes(
    x: Any, matrix: Any, enc: Any, lift: Any, a: Any, b: Any, out: Any, *, stochastic: bool, columns: int
) -> None:
    scaled = _rotated(x, matrix).astype(jnp.float32) * lift[...] * enc[...]
    rows = lax.broadcasted_iota(jnp.int32, scaled.shape, 0)
    if stochastic:
        # One word for a pair of tokens, by its index in the whole matrix: 16 bits each.
        pair = pl.program_id(0) * (GROUP // 2) + rows // 2
        column = pl.program_id(1) * _COLUMNS + lax.broadcasted_iota(jnp.int32, scaled.shape, 1)
        index = (pair * columns + column).astype(jnp.uint32)
        word = random.mix(index ^ a[...], b[...])
        chance = (jnp.where(rows % 2 == 0, word, word >> 16) & 0xFFFF).astype(jnp.int32)
        magnitude = round_stochastic(jnp.abs(scaled), chance, _RANDOM_BITS, E2M1)
    else:
        magnitude = round_nearest(jnp.abs(scaled), E2M1)
    code = (magnitude | sign_code(scaled, E2M1)) << (4 * (rows % 2))
    pairs = code.reshape(GROUP // 2, 2, code.shape[1])
    out[...] = jnp.sum(pairs, axis=1).astype(jnp.uint8)


def _both(x: Any, lift: Any, enc: Any, amax: Any, codes: Any, across: Any, *, element: Element) -> None:
    values = x[...].astype(jnp.float32)
    found = scaled_code(values, lift[...], enc[...], amax[...], element).astype(jnp.uint8)
    codes[...] = found
    across[...] = found.T
