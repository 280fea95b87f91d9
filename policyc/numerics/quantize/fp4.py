"""FP4: E2M1 elements under one outer scale, without block scales. An ablation: no GPU multiplies it."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from policyc.numerics.quantize.bits import abs_bits, from_bits, materialize
from policyc.numerics.quantize.blocks import (
    QuantizeContext,
    encode_blocks,
    materialize_encoding_scale,
    outer_scale_axes,
    tensor_key,
)
from policyc.numerics.quantize.layout import Quantized


def quantize_fp4(x: jax.Array, context: QuantizeContext) -> Quantized:
    """Quantizes to FP4. The scale is that of FP8 with the bound of E2M1; each element is its own block in the key."""
    treatment, layout = context.treatment, context.layout
    x = materialize(x)
    magnitudes = abs_bits(x)
    amax = magnitudes.max(axis=outer_scale_axes(treatment, context.axes, layout, x.ndim), keepdims=True)
    key = context.key if treatment.rounding == "rne" else tensor_key(magnitudes, amax, context)
    enc, lift = materialize_encoding_scale(amax, context)
    # Two codes fill a byte: the encoding scale of the tensor is that of each pair.
    pairs = replace(context, layout=replace(layout, block=2))
    codes = encode_blocks(x.astype(jnp.float32) * lift, enc, pairs, key)
    return Quantized(codes=codes, scales=None, amax=from_bits(amax), layout=layout)
