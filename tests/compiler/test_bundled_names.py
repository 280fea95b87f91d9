"""The bundled policies on the parameter names of public trainers. Plans only: nothing is compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import policyc
from policyc.language.recipes import Gemm
from tests.support.jaxpr_tools import find_sites, struct

W = struct(16, 16)

NAMES = {
    "t5x": {
        "mlp": "decoder/layers_#/mlp/wi_0/kernel", "attention": "decoder/layers_#/self_attention/query/kernel",
        "head": "decoder/logits_dense/kernel", "embedding": "token_embedder/embedding",
    },
    "big_vision": {
        "mlp": "Transformer/encoderblock_#/MlpBlock_0/Dense_0/kernel",
        "attention": "Transformer/encoderblock_#/MultiHeadDotProductAttention_0/query/kernel",
        "head": "head/kernel", "embedding": "embedding/kernel",
    },
    "lm1b": {
        "mlp": "decoder/encoderdecoderblock_#/MlpBlock_0/Dense_0/kernel",
        "attention": "decoder/encoderdecoderblock_#/MultiHeadDotProductAttention_0/query/kernel",
        "head": "decoder/logitdense/kernel", "embedding": "decoder/Embed_0/embedding",
    },
    "gemma": {
        "mlp": "transformer/layer_#/mlp/gating_einsum/w", "attention": "transformer/layer_#/attn/q_einsum/w",
        "embedding": "transformer/embedder/input_embedding",
    },
    "gpt-jax": {
        "mlp": "Block_#/MLP_0/Dense_0/kernel", "attention": "Block_#/CausalSelfAttention_0/c_attn/kernel",
        "head": "lm_head/kernel", "embedding": "wte/embedding",
    },
    "Hugging Face GPT-2": {
        "mlp": "transformer/h/#/mlp/c_fc/kernel", "attention": "transformer/h/#/attn/c_attn/kernel",
        "embedding": "transformer/wte/embedding",
    },
}  # fmt: skip
LAYERS = 12


def model(names: dict[str, str]) -> dict[str, Any]:
    """Parameters with these names, in nested dicts; `#` is the number of a layer."""
    params: dict[str, Any] = {}
    for template in names.values():
        for layer in range(LAYERS if "#" in template else 1):
            *folders, leaf = template.replace("#", str(layer)).split("/")
            inner = params
            for folder in folders:
                inner = inner.setdefault(folder, {})
            inner[leaf] = W
    return params


def loss(params: Any, x: Any) -> Any:
    return sum((x @ w).sum() for w in jax.tree.leaves(params))


def bits(policy: str, params: Any) -> dict[str, int]:
    """The bits of fprop of every parameter, by its path."""
    plan = policyc.plan(policy, loss, params, struct(4, 16))
    (phase, *_) = plan.phases
    bits_of = {}
    for site in plan.sites:
        (run,) = plan.site_runs(site, phase)
        bits_of[".".join(map(str, site.parameters[0].path))] = run.decision.recipe.bits(Gemm.FPROP)
    return bits_of


@pytest.mark.parametrize("trainer", NAMES)
def test_the_bundled_policies_quantize_the_blocks_of_public_trainers(trainer: str) -> None:
    names = NAMES[trainer]

    def of_part(decided: dict[str, int], part: str) -> list[int]:
        name = names[part].split("/")[-2].rstrip("0_#")
        return [b for path, b in decided.items() if name in path]

    params = model(names)
    full, mlps, tail = (bits(policy, params) for policy in ("te_nvfp4", "llama_nvfp4", "llama3_8b_nvfp4"))
    for part in ("head", "embedding"):
        for decided in (full, mlps, tail):
            assert part not in names or set(of_part(decided, part)) == {16}, part
    assert of_part(full, "mlp") == of_part(full, "attention") == of_part(mlps, "mlp") == [4] * LAYERS
    assert of_part(mlps, "attention") == [16] * LAYERS
    assert sorted(of_part(tail, "mlp")) == sorted(of_part(tail, "attention")) == [4] * 8 + [16] * 4


def test_the_bundled_policies_quantize_haiku() -> None:
    """Haiku numbers its modules across layers, and the first has no number."""
    params = {
        f"language_model/transformer/{name}{suffix}": {"w": W}
        for name in ("linear", "multi_head_attention/query")
        for suffix in ("", "_1")
    }
    params["language_model/linear"] = {"w": W}
    full, mlps = bits("te_nvfp4", params), bits("llama_nvfp4", params)
    assert [b for path, b in full.items() if "transformer" in path] == [4] * 4
    assert {b for path, b in mlps.items() if "transformer.linear" in path} == {4}
    assert {b for path, b in mlps.items() if "attention" in path} == {16}
    assert full["language_model.linear.w"] == mlps["language_model.linear.w"] == 16


def test_the_first_of_numbered_names_has_index_0() -> None:
    params = {
        "dense": {"kernel": W},
        "dense_1": {"kernel": W},
        "dense_2": {"kernel": W},
        "other": {"kernel": W},
    }
    decided = bits("* -> bf16; dense[0].* -> fp8; dense[-1].* -> nvfp4", params)
    assert list(decided.values()) == [8, 16, 4, 16]


def test_a_scope_that_describes_a_contraction_names_nothing() -> None:
    def scoped(params: Any, x: Any) -> Any:
        with jax.named_scope("mlp"), jax.named_scope("contract embed -> batch"):
            return jnp.sum(x @ params["up"])

    (site,) = find_sites(scoped, {"up": W}, struct(4, 16))
    assert [segment.text for segment in site.scope.path] == ["mlp"]
