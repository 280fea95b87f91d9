"""What an inference server computes apart from the codes of weights: a table of rules, and the recipes they give.

Linears that are quantized have the codes of the exported file. Everything else is computed in BF16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from policyc.compiler.planning.plan import Decision
from policyc.language.recipes import OPERANDS, Gemm, Recipe, Role, Treatment
from policyc.language.treatments import normalize_recipe
from policyc.numerics.quantize.reference.bits import E4M3, decode, encode_scaled, materialize
from policyc.serving.servable import served_format

Activations = Literal["static", "dynamic", "token", "none"]
"""Scales of activations: from the file, the maximum of the tensor or of each token. `none` keeps BF16."""

KVCache = Literal["bf16", "fp8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """What a server computes apart from the weights: how it scales activations, by format, and its KV cache."""

    activations: Mapping[str, Activations]
    kv_cache: KVCache = "bf16"

    @property
    def is_static(self) -> bool:
        return "static" in self.activations.values()


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """How a server scales activations whose file has static scales, and those whose file has none. By format."""

    version: str
    static: Mapping[str, Activations]
    otherwise: Mapping[str, Activations]

    def arithmetic(self, kv_cache: KVCache, *, has_scales: bool) -> Arithmetic:
        return Arithmetic(activations=self.static if has_scales else self.otherwise, kv_cache=kv_cache)


_STATIC: dict[str, Activations] = {"nvfp4": "static", "fp8": "static"}
SERVER_RULES: dict[str, Server] = {
    "vllm": Server(
        version="vLLM a014e35 (modelopt.py, compressed_tensors_w4a4_nvfp4.py, kv_cache.py)",
        static=_STATIC,
        otherwise={"nvfp4": "none", "fp8": "token"},
    ),
    "trtllm": Server(
        version="TensorRT-LLM 00bbf71 (linear.py)",
        static=_STATIC,
        otherwise={"nvfp4": "dynamic", "fp8": "dynamic"},
    ),
}
"""The servers, with the version whose source the row was read from.

Both cast keys and values of an FP8 cache to E4M3 with a scale of 1 if the file has none, as exported files do.
"""


def served_decision(decision: Decision, arithmetic: Arithmetic) -> Decision:
    """The decision of a site as a server runs it. Its GEMM is that of training if it is not quantized."""
    format = served_format(decision)
    if not format:
        return decision
    recipe = served_recipe(decision.applied_recipe, arithmetic.activations[format])
    return dataclasses.replace(decision, recipe=recipe)


def served_recipe(recipe: Recipe, activations: Activations) -> Recipe:
    """A recipe whose forward GEMM is that of a server. It has no backward GEMMs."""
    x, weight = recipe.gemm_treatments(Gemm.FPROP)
    plain = Treatment(format="bf16", element="bf16")
    outer = "row" if activations == "token" else "tensor"
    forward = {
        # Block scales of activations are those of the maximum, and fused linears share the outer scale of the weight.
        Role.ACTIVATION: plain
        if activations == "none"
        else dataclasses.replace(x, scale="amax", outer=outer),
        Role.WEIGHT: dataclasses.replace(weight, outer="shared"),
    }
    return normalize_recipe(Recipe(tuple(forward[r] if g is Gemm.FPROP else plain for g, r in OPERANDS)))


def round_cache(x: jax.Array) -> jax.Array:
    """Keys or values as a cache in FP8 returns them, with a scale of 1."""
    one, zero = jnp.float32(1), jnp.int32(0)
    codes = encode_scaled(x.astype(jnp.float32), one, one, zero, E4M3)
    return decode(materialize(codes), E4M3).astype(x.dtype)
