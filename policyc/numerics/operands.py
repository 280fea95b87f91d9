"""Casts or quantizes the operands of GEMMs, as their treatments say."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from policyc.language.formats import FORMATS
from policyc.language.recipes import Gemm, Role, Treatment
from policyc.numerics import backends, primitives
from policyc.numerics.dimensions import free_dims
from policyc.numerics.products import OperandSpec
from policyc.numerics.quantize import Axes, Key, Operand, Quantized, Request
from policyc.numerics.quantize.reference.layout import move_first_axes

CHECKPOINT_NAME = "quantization"
"""The name of saved quantized tensors, for policies of `jax.checkpoint`."""

_READ_AT_ONCE = (
    (Gemm.FPROP, Role.ACTIVATION),
    (Gemm.DGRAD, Role.GRADIENT),
    (Gemm.WGRAD, Role.GRADIENT),
)
"""Operands that only the GEMM right after their quantizer reads: x in fprop, and dy."""

CAST_DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32}
"""The dtype of the formats that only cast."""

Parts = tuple[Operand, ...]
"""An operand as it enters a GEMM: one array, or the residual and the mean of a split operand."""

Keys = tuple[Key, Key]
"""The key of stochastic rounding, and the key of fresh signs."""


def quantize_operand(
    x: jax.Array,
    spec: OperandSpec,
    keys: Keys,
    *,
    save: bool = False,
    decode_tiles: bool = False,
    shared_maximum: jax.Array | None = None,
) -> Parts:
    """Casts an operand, or quantizes it, or splits it into residual and mean and quantizes both.

    Args:
      save: whether to name the quantized tensors, so that a policy of `jax.checkpoint` can save them.
      decode_tiles: whether to write a weight with 2D tiles as values instead of codes, if the backend multiplies
        values. All GEMMs of the weight share them, and they take no more memory than the weight in bfloat16.
      shared_maximum: see `Request`.
    """
    treatment = spec.treatment
    if not FORMATS[treatment.format].is_quantized:
        return (cast_operand(x, treatment),)
    if treatment.mean_split:
        parts: tuple[Quantized, ...] = _quantize_split(x, spec, keys)
    else:
        parts = (_quantize(x, spec, keys, decode_tiles=decode_tiles, shared_maximum=shared_maximum),)
    # Values take four times the memory of codes, so they are recomputed instead of saved.
    return tuple(p if p.layout.decoded else _name_for_checkpoint(p) for p in parts) if save else parts


def cast_operand(x: jax.Array, treatment: Treatment) -> jax.Array:
    """Casts an operand to a format that does not quantize. `keep` leaves it as it is."""
    dtype = CAST_DTYPES.get(treatment.format)
    return x if dtype is None else x.astype(dtype)


def _quantize(
    x: jax.Array,
    spec: OperandSpec,
    keys: Keys,
    *,
    suffix: str = "",
    decode_tiles: bool = False,
    shared_maximum: jax.Array | None = None,
) -> Quantized:
    treatment = _of_codes(spec.treatment)
    # The codes of an activation are kept until wgrad.
    is_fixed_tile = treatment.tile2d and treatment.rounding == "rne" and spec.role is not Role.ACTIVATION
    decoded = decode_tiles and is_fixed_tile and backends.load(spec.backend).multiplies_values
    request = Request(treatment, spec.axes, decoded, spec.name + suffix, *keys, shared_maximum)
    return primitives.quantize(x, request, backend=spec.backend)


def _of_codes(treatment: Treatment) -> Treatment:
    """The treatment without the option of a GEMM, which does not affect the codes."""
    return replace(treatment, sums="fp32")


def split_mean(x: jax.Array, tokens: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """The residual, in the dtype of x, and the mean over tokens, in fp32."""
    mean = jnp.mean(x.astype(jnp.float32), axis=tokens, keepdims=True)
    return (x.astype(jnp.float32) - mean).astype(x.dtype), mean


def _quantize_split(x: jax.Array, spec: OperandSpec, keys: Keys) -> tuple[Quantized, Quantized]:
    """The residual and the mean over tokens, each quantized."""
    residual, mean = split_mean(x, spec.tokens)
    quantized_residual = _quantize(residual, spec, keys)
    if spec.contracts_tokens:
        # The mean is a single token, so its blocks run along features and there is nothing to rotate.
        t, batch = spec.treatment, spec.axes.batch
        features = free_dims(x.ndim, spec.tokens, tuple(i + x.ndim for i in batch))
        spec = replace(
            spec,
            treatment=replace(t, rht=0, rounding="rne" if t.rounding == "rne" else "sr", outer="tensor"),
            axes=Axes(axis=features[-1] - x.ndim, batch=batch),
        )
    return quantized_residual, _quantize(mean, spec, keys, suffix=".mean")


def _name_for_checkpoint(q: Quantized) -> Quantized:
    return cast("Quantized", checkpoint_name(q, CHECKPOINT_NAME))


def has_same_codes(one: Treatment, other: Treatment) -> bool:
    """Whether an operand has the same codes in two GEMMs that contract different dimensions of it.

    True for 2D tiles and for formats with one scale per tensor, unless the operand is rotated or its mean is split off.
    Scales per row depend on the contracted dimension. `other` may decode the codes of `one`.
    """
    if other.dequantized:
        return True
    is_square = one.tile2d or not (FORMATS[one.format].block or one.outer == "row")
    return _of_codes(one) == _of_codes(other) and is_square and not one.rht and not one.mean_split


def shares_codes(one: OperandSpec, other: OperandSpec) -> bool:
    """Whether an operand can be quantized once for two GEMMs."""
    return FORMATS[one.treatment.format].is_quantized and has_same_codes(one.treatment, other.treatment)


def can_quantize_pair(one: OperandSpec, other: OperandSpec) -> bool:
    """Whether one quantizer can write an operand for two GEMMs, so that the backend may read the operand less often."""
    if one.backend != other.backend:
        return False
    if shares_codes(one, other):
        return False
    treatments = (one.treatment, other.treatment)
    if all(t.format == "fp8" and t.outer == "row" for t in treatments):
        return backends.load(one.backend).pairs_rows
    is_plain = all(not t.has_random_signs and not t.mean_split for t in treatments)
    return is_plain and {t.format for t in treatments} == {"nvfp4"}


def quantize_pair(
    x: jax.Array,
    one: OperandSpec,
    other: OperandSpec,
    keys: Keys,
    *,
    save: bool = False,
    shared_maximum: jax.Array | None = None,
) -> tuple[Quantized, Quantized]:
    """Quantizes an operand for two GEMMs at once. Requires `can_quantize_pair`.

    If the backend multiplies values, an operand that is read right away is written as values: codes would only be
    decoded again. An operand that is kept longer has codes.
    """
    multiplies_values = backends.load(one.backend).multiplies_values
    first, second = (
        Request(
            _of_codes(o.treatment),
            o.axes,
            multiplies_values and (o.gemm, o.role) in _READ_AT_ONCE,
            o.name,
            keys[0],
            shared_maximum=shared_maximum,
        )
        for o in (one, other)
    )
    now, later = primitives.quantize_pair(x, (first, second), backend=one.backend)
    if not save:
        return now, later
    now = now if first.decoded else _name_for_checkpoint(now)
    return now, _save_in_memory_order(later, other.axes)


def _save_in_memory_order(q: Quantized, axes: Axes) -> Quantized:
    """Names an operand for `jax.checkpoint` with its contracted axes last, as kernels write it and GEMMs read it.

    In this order, XLA can stack the operands of all layers and read one of them without transposing it.
    """
    ndim = q.codes.ndim
    contract = tuple(ndim + i for i in axes.contract)
    order = (*free_dims(ndim, contract), *contract)
    original = sorted(range(ndim), key=order.__getitem__)
    moved = jax.tree.map(lambda a: a.transpose(order), (q.codes, q.scales))
    codes, scales = jax.tree.map(lambda a: a.transpose(original), checkpoint_name(moved, CHECKPOINT_NAME))
    return replace(q, codes=codes, scales=scales, amax=checkpoint_name(q.amax, CHECKPOINT_NAME))


def save_code_order(parts: Parts, spec: OperandSpec) -> Parts:
    """Keeps the codes that a GEMM of the backward pass reads, in the order in which the quantizer wrote them.

    `select_code_order` moves their axes when the GEMM runs. If they were moved before they are saved, XLA would choose
    different layouts for the stacks that the loops over layers write and read, and transpose the codes twice.
    """

    def save(part: Operand) -> Operand:
        if not isinstance(part, Quantized) or part.transposed_codes is None:
            return part
        if part.layout.packed:
            return part.select_packing(spec.axes.axis)
        if spec.axes.axis == -1:
            return replace(part, transposed_codes=None)
        layout = replace(part.layout, moved_axes=spec.axes.second_order)
        return replace(part, codes=_as_words(part.transposed_codes), transposed_codes=None, layout=layout)

    return tuple(map(save, parts))


def select_code_order(parts: Parts, spec: OperandSpec) -> Parts:
    """Selects the codes in the order that a GEMM reads, with the axes of the operand. Also sets `Layout.fast_sums`."""

    def select(part: Operand) -> Operand:
        if not isinstance(part, Quantized):
            return part
        layout = replace(part.layout, fast_sums=spec.treatment.sums == "fast", moved_axes=0)
        if part.layout.moved_axes:
            codes = move_first_axes(_as_bytes(part.codes), part.layout.moved_axes)
            return replace(part, codes=codes, layout=layout)
        part = replace(part, layout=layout)
        if part.transposed_codes is None:
            return part
        if part.layout.packed:
            return part.select_packing(spec.axes.axis)
        codes = part.codes
        if spec.axes.axis != -1:
            codes = move_first_axes(part.transposed_codes, spec.axes.second_order)
        return replace(part, codes=codes, transposed_codes=None)

    return tuple(map(select, parts))


_WORD = 4


def _as_words(codes: jax.Array) -> jax.Array:
    """Codes as 32-bit words, if the last dimension has whole words. A GPU fills a stack of bytes with zeros slowly."""
    if codes.shape[-1] % _WORD:
        return codes
    return lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], -1, _WORD), jnp.uint32)


def _as_bytes(words: jax.Array) -> jax.Array:
    """The codes in the result of `_as_words`."""
    if words.dtype == jnp.uint8:
        return words
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:-1], -1)
