"""`quantize` and `scaled_gemm` as JAX primitives: a jaxpr shows one equation, not forty lines of arithmetic.

In: arrays, treatments, and the backend that is to run them. Out: `Quantized`s and products. The one trap: their
results have no derivative. Whoever wants one is inside a `custom_vjp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from policyc.jaxcore.define_primitive import DimSource, Shape, bind, define
from policyc.language.formats import FORMATS
from policyc.language.recipes import Treatment
from policyc.numerics import backends
from policyc.numerics import quantize as q
from policyc.numerics.backends import emulate
from policyc.numerics.backends.emulate import Dims, Operand
from policyc.numerics.quantize.blocks import layout_of
from policyc.numerics.quantize.layout import TILE, Axes, Layout, Quantized


@dataclass(frozen=True, slots=True)
class Spec:
    """What a quantize equation does. Prints as short as it can."""

    treatment: Treatment
    axes: Axes

    def __repr__(self) -> str:
        t, block = self.treatment, FORMATS[self.treatment.format].block
        words = [f"{TILE if t.tile2d else 1}x{block}" if block else "tensor", t.rounding]
        words += [t.element] if t.format == "fp8" else []
        words += [f"rht{t.rht}"] if t.rht else []
        words += [t.scale] if t.scale != "amax" else []
        words += [t.scale_rounding] if t.format == "mxfp4" else []
        words += [f"headroom{t.headroom}"] if t.headroom != 1 else []
        words += ["outer=row"] if t.outer == "row" else []
        return f"{','.join(words)}@{self.axes.axis}"


def _quantize(
    x: jax.Array, *words: jax.Array, spec: Spec, operand: str, backend: str,
    platform: str = "", alone: bool = False,
) -> Sequence[jax.Array]:  # fmt: skip
    # The words of a key, where something is random; both operands of a product have the same signs.
    key = q.Key(*words[:2]).fold(operand) if words else None
    signs = q.Key(*words[2:]).fold(operand.partition(".")[0] + ".signs") if words[2:] else None
    run = backends.load(backend).quantize
    out = run(x, spec.treatment, spec.axes, key=key, signs=signs, platform=platform, alone=alone)
    return [a for a in (out.codes, out.scales, out.amax, out.across) if a is not None]


def _quantize_shapes(x: Any, *words: Any, spec: Spec, operand: str, backend: str) -> list[Shape]:
    del words, operand, backend
    t, axes = spec.treatment, spec.axes
    layout, padded = layout_of(x.shape, t, axes)
    packed, scales = list(padded), list(padded)
    if layout.packed:
        packed[axes.axis] //= 2
    out: list[Shape] = [(tuple(packed), jnp.uint8)]
    if layout.block:
        scales[axes.axis] //= layout.block
        if layout.tile_axis is not None:
            scales[layout.tile_axis] //= TILE
        out.append((tuple(scales), jnp.uint8))
    if FORMATS[t.format].tensor_scale:
        spans = q.spanned(t, axes, layout, len(padded))
        out.append((tuple(1 if i - len(padded) in spans else n for i, n in enumerate(padded)), jnp.float32))
    if axes.both:
        out.append(((packed[-1], *packed[:-1]), jnp.uint8))
    return out


def _quantize_sources(x: Any, *words: Any, spec: Spec, operand: str, backend: str) -> list[list[DimSource]]:
    """Codes, scales and amax lie as their operand does."""
    results = _quantize_shapes(x, *words, spec=spec, operand=operand, backend=backend)
    along: list[DimSource] = [(0, i - x.ndim) for i in range(x.ndim)]
    if not spec.axes.both:
        return [along for _ in results]
    return [*(along for _ in results[1:]), [along[-1], *along[:-1]]]


PLATFORMS = ("cpu", "cuda")
"""Those that some backend treats in a way of their own."""

LOCAL = ("te",)
"""Backends whose calls neither `vmap` nor XLA can divide or repeat."""


@cache
def _quantizer(format: str, backend: str) -> Primitive:
    return define(
        f"{format}_quantize",
        _quantize,
        _quantize_shapes,
        _quantize_sources,
        platforms={name: partial(_quantize, platform=name) for name in PLATFORMS},
        alone={name: partial(_quantize, platform=name, alone=True) for name in PLATFORMS},
        needs_devices=backend != "emulate",
        local=backend if backend in LOCAL else "",
    )


@cache
def _multiplier(backend: str) -> Primitive:
    return define(
        "scaled_gemm",
        _gemm,
        _gemm_shapes,
        _gemm_sources,
        platforms={name: partial(_gemm, platform=name) for name in PLATFORMS},
        needs_devices=backend != "emulate",
        local=backend if backend in LOCAL else "",
    )


def quantize(
    x: jax.Array,
    treatment: Treatment,
    axes: Axes,
    *,
    operand: str = "",
    key: q.Key | None = None,
    signs: q.Key | None = None,
    backend: str = "emulate",
) -> Quantized:
    """`policyc.numerics.quantize.quantize` as one equation.

    `operand` is its name, `gemm.operand`: it is part of the key, and its first half of the key of fresh
    signs.
    """
    layout, _ = layout_of(x.shape, treatment, axes)
    key = key or q.key()
    words = {"rne": (), "sr": (key,), "ms_eden": (key, signs or key)}[treatment.rounding]
    flat = [w for k in words for w in (k.a, k.b)]
    spec = Spec(treatment, axes)
    out = bind(_quantizer(treatment.format, backend), x, *flat, spec=spec, operand=operand, backend=backend)
    return _rebuilt(layout, out)


def _rebuilt(layout: Layout, arrays: Sequence[jax.Array]) -> Quantized:
    f = FORMATS[layout.format]
    parts = iter(arrays)
    return Quantized(
        codes=next(parts),
        scales=next(parts) if f.block else None,
        amax=next(parts) if f.tensor_scale else None,
        across=next(parts, None),
        layout=layout,
    )


@dataclass(frozen=True, slots=True)
class Shown:
    """The layout of an operand, or None of a plain array. Prints as the format's name."""

    layout: Layout | None

    def __repr__(self) -> str:
        return self.layout.format if self.layout else "plain"

    def arrays(self) -> int:
        if self.layout is None:
            return 1
        f = FORMATS[self.layout.format]
        return 1 + bool(f.block) + f.tensor_scale

    def rebuilt(self, arrays: Sequence[jax.Array]) -> Operand:
        return arrays[0] if self.layout is None else _rebuilt(self.layout, arrays)

    def length(self, aval: Any, axis: int) -> int:
        """Of the operand itself, from that of its codes."""
        layout = self.layout
        if layout is not None and axis - aval.ndim == layout.axis:
            return layout.size
        if layout is not None and axis - aval.ndim == layout.tile_axis:
            return layout.tile_size
        return int(aval.shape[axis])


def _taken(operand: Operand) -> tuple[Shown, list[jax.Array]]:
    if isinstance(operand, Quantized):
        arrays = (operand.codes, operand.scales, operand.amax)
        return Shown(operand.layout), [a for a in arrays if a is not None]
    return Shown(None), [operand]


def _gemm(
    *arrays: jax.Array,
    lhs: Shown,
    rhs: Shown,
    dimension_numbers: Dims,
    out: Any,
    backend: str,
    platform: str = "",
) -> Sequence[jax.Array]:
    a, b = lhs.rebuilt(arrays[: lhs.arrays()]), rhs.rebuilt(arrays[lhs.arrays() :])
    return [backends.load(backend).gemm(a, b, dimension_numbers, out, platform=platform)]


def _gemm_shapes(
    *avals: Any, lhs: Shown, rhs: Shown, dimension_numbers: Dims, out: Any, backend: str
) -> list[Shape]:
    del backend
    a, b = avals[0], avals[lhs.arrays()]
    (lc, rc), (lb, rb) = dimension_numbers
    shape = [lhs.length(a, i) for i in lb]
    shape += [lhs.length(a, i) for i in range(a.ndim) if i not in (*lc, *lb)]
    shape += [rhs.length(b, i) for i in range(b.ndim) if i not in (*rc, *rb)]
    return [(tuple(shape), out)]


def _gemm_sources(
    *avals: Any, lhs: Shown, rhs: Shown, dimension_numbers: Dims, out: Any, backend: str
) -> list[list[DimSource]]:
    """As in `dot_general`; sums over what is divided among devices are finished."""
    del rhs, out, backend
    a, b = avals[0].ndim, avals[lhs.arrays()].ndim
    (lc, rc), (lb, rb) = dimension_numbers
    left: list[DimSource] = [(0, i - a) for i in (*lb, *(i for i in range(a) if i not in (*lc, *lb)))]
    return [left + [(lhs.arrays(), i - b) for i in range(b) if i not in (*rc, *rb)]]


def scaled_gemm(
    lhs: Operand, rhs: Operand, dimension_numbers: Dims, out: Any, *, backend: str = "emulate"
) -> jax.Array:
    """The product of two operands, each `Quantized` or plain, as one equation."""
    (left, a), (right, b) = _taken(lhs), _taken(rhs)
    params = {"lhs": left, "rhs": right, "dimension_numbers": dimension_numbers, "out": jnp.dtype(out)}
    return bind(_multiplier(backend), *a, *b, backend=backend, **params)[0]


def _ragged(
    sizes: jax.Array, *arrays: jax.Array, lhs: Shown, rhs: Shown, contracting: bool, out: Any,
    values: Any = jnp.bfloat16,
) -> Sequence[jax.Array]:  # fmt: skip
    a, b = lhs.rebuilt(arrays[: lhs.arrays()]), rhs.rebuilt(arrays[lhs.arrays() :])
    return [emulate.scaled_ragged_gemm(a, b, sizes, contracting, values).astype(out)]


def _ragged_shapes(
    sizes: Any, *avals: Any, lhs: Shown, rhs: Shown, contracting: bool, out: Any
) -> list[Shape]:
    a, b = avals[0], avals[lhs.arrays()]
    if contracting:
        return [((sizes.shape[0], lhs.length(a, 1), rhs.length(b, 1)), out)]
    return [((lhs.length(a, 0), rhs.length(b, 2)), out)]


def _ragged_sources(
    sizes: Any, *avals: Any, lhs: Shown, rhs: Shown, contracting: bool, out: Any
) -> list[list[DimSource]]:
    del sizes, avals, rhs, out
    # Operands count from the sizes of groups on.
    right = 1 + lhs.arrays()
    return [[None, (1, -1), (right, -1)] if contracting else [(1, -2), (right, -1)]]


SCALED_RAGGED_GEMM = define(
    "scaled_ragged_gemm",
    _ragged,
    _ragged_shapes,
    _ragged_sources,
    platforms={"cpu": partial(_ragged, values=jnp.float32)},
)


def scaled_ragged_gemm(
    lhs: Operand, rhs: Operand, sizes: jax.Array, *, contracting: bool, out: Any
) -> jax.Array:
    """Products of groups of rows, as one equation."""
    (left, a), (right, b) = _taken(lhs), _taken(rhs)
    dtype = jnp.dtype(out)
    return bind(SCALED_RAGGED_GEMM, sizes, *a, *b, lhs=left, rhs=right, contracting=contracting, out=dtype)[0]
