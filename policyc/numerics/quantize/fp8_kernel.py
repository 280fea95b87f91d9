"""A GPU kernel (Pallas, Triton) that writes FP8 codes in both orders in one pass.

XLA cannot partition it, so it runs only in programs on one device. Pallas's Mosaic backend has no faster way to
transpose bytes yet, so this kernel stays on Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from policyc.language.recipes import Treatment
from policyc.numerics.quantize.layout import Axes

_SQUARE, _WARPS = 128, 8
"""The side of the square that one kernel instance reads, and the number of warps of an instance."""

Encode = Callable[[jax.Array, jax.Array], jax.Array]
"""Encodes fp32 values, given the bits of the largest magnitude of the whole array."""


def fits(x: jax.Array, treatment: Treatment, axes: Axes) -> bool:
    """Whether the kernel can quantize this operand."""
    is_plain = treatment.format == "fp8" and treatment.outer == "tensor" and not axes.batch
    if not is_plain or not axes.both_orders or x.dtype != jnp.bfloat16 or x.ndim < 2:
        return False
    return prod(x.shape[:-1]) % _SQUARE == 0 and x.shape[-1] % _SQUARE == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Kernel:
    """The kernel. `interpret` runs it without a GPU, slowly."""

    interpret: bool = False

    def both_orders(self, x: jax.Array, amax: jax.Array, encode: Encode) -> tuple[jax.Array, jax.Array]:
        """The codes, and the codes with the last axis moved first. `amax` has the bits of one number."""
        flat = x.reshape(-1, x.shape[-1])
        rows, columns = flat.shape
        square = ((_SQUARE, _SQUARE), lambda i, j: (i, j))
        transposed_square = ((_SQUARE, _SQUARE), lambda i, j: (j, i))
        scalar = ((1, 1), lambda *_: (0, 0))
        codes, transposed = pl.pallas_call(
            partial(_both, encode=encode),
            [jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in ((rows, columns), (columns, rows))],
            grid=(rows // _SQUARE, columns // _SQUARE),
            in_specs=[pl.BlockSpec(*s) for s in (square, scalar)],
            out_specs=[pl.BlockSpec(*s) for s in (square, transposed_square)],
            **_compiler_options(self.interpret),
        )(flat, amax.reshape(1, 1))
        return codes.reshape(x.shape), transposed.reshape(x.shape[-1], *x.shape[:-1])


def _compiler_options(interpret: bool) -> dict[str, Any]:
    if interpret:
        return {"interpret": True}
    from jax.experimental.pallas import triton  # cannot be imported without a GPU build of JAX

    return {"compiler_params": triton.CompilerParams(num_warps=_WARPS)}


def _both(x: Any, amax: Any, codes: Any, transposed: Any, *, encode: Encode) -> None:
    encoded = encode(x[...].astype(jnp.float32), amax[...])
    codes[...] = encoded
    transposed[...] = encoded.T
