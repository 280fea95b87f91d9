"""The bundled policies on the parameter names of public trainers. Plans only: nothing is compiled."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import policyc
from policyc.language.recipes import Gemm
from tests.support.jaxpr_tools import find_sites, struct

W = struct(16, 16)

LAYERS = 6
TAIL = 4
"""The number of blocks that llama3_8b_nvfp4 keeps in BF16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Names of a public trainer's parameters, as its source at this version has them. `#` is the number of a block.

    `scope` is a name scope around the blocks. `per_block` is how many parameters a block adds to each stack of its MLP:
    two where linears are numbered across blocks.
    """

    source: str
    mlp: tuple[str, ...]
    attention: tuple[str, ...]
    others: tuple[str, ...]
    scope: str = ""
    per_block: int = 1


TRAINERS = (
    Trainer(
        source="google-research/t5x cc342d4, t5x/examples/t5/network.py",
        mlp=("encoder/layers_#/mlp/wi_0/kernel", "decoder/layers_#/mlp/wo/kernel"),
        attention=(
            "encoder/layers_#/attention/query/kernel", "decoder/layers_#/self_attention/out/kernel",
            "decoder/layers_#/encoder_decoder_attention/key/kernel",
        ),
        others=("decoder/logits_dense/kernel", "token_embedder/embedding", "decoder/relpos_bias/rel_embedding"),
    ),
    Trainer(
        source="google-research/big_vision 0127fb6, big_vision/models/vit.py",
        mlp=("Transformer/encoderblock_#/MlpBlock_0/Dense_0/kernel",),
        attention=("Transformer/encoderblock_#/MultiHeadDotProductAttention_0/query/kernel",),
        others=(
            "embedding/kernel", "head/kernel", "MAPHead_0/MlpBlock_0/Dense_0/kernel",
            "MAPHead_0/MultiHeadDotProductAttention_0/query/kernel",
        ),
    ),
    Trainer(
        source="flax 0.12.12, examples/lm1b/models.py",
        mlp=("decoder/encoderdecoderblock_#/MlpBlock_0/Dense_0/kernel",),
        attention=("decoder/encoderdecoderblock_#/MultiHeadDotProductAttention_0/query/kernel",),
        others=("decoder/logitdense/kernel", "decoder/Embed_0/embedding"),
    ),
    Trainer(
        source="flax 0.12.12, examples/gemma/transformer.py",
        mlp=("layers/#/mlp/gate_proj/kernel", "layers/#/mlp/down_proj/kernel"),
        attention=("layers/#/attn/q_einsum/kernel", "layers/#/attn/attn_vec_einsum/kernel"),
        others=("embedder/embedding",),
    ),
    Trainer(
        source="gemma 4.0.1, gemma/gm/nn/_transformer.py",
        mlp=("layer_#/mlp/gating_einsum", "layer_#/mlp/linear"),
        attention=("layer_#/attn/q_einsum/w", "layer_#/attn/attn_vec_einsum/w"),
        others=("embedder/input_embedding",),
        scope="Gemma3_1B._apply_attention",
    ),
    Trainer(
        source="jenkspt/gpt-jax f22a46e, model.py",
        mlp=("params/#/mlp/c_fc/kernel", "params/#/mlp/c_proj/kernel"),
        attention=("params/#/attn/c_attn/kernel", "params/#/attn/c_proj/kernel"),
        others=("params/wte/embedding",),
    ),
    Trainer(
        source="dm-haiku 0.0.17, examples/transformer/model.py",
        mlp=("transformer/linear_#/w",),
        attention=("transformer/multi_head_attention_#/query/w", "transformer/multi_head_attention_#/linear/w"),
        others=("language_model/linear/w", "language_model/embed/embeddings"),
        scope="language_model",
        per_block=2,
    ),
)  # fmt: skip


def numbered(template: str, count: int) -> list[str]:
    """The names of a stack. Haiku gives the first of `linear, linear_1, ...` no number."""
    names = [template.replace("#", str(i)) for i in range(count)]
    return [names[0].replace("_0/", "/"), *names[1:]] if template.startswith("transformer/") else names


def nested(names: list[str]) -> dict[str, Any]:
    """Parameters with these names, in nested dicts. Each has another width, which tells their GEMMs apart."""
    params: dict[str, Any] = {}
    for position, name in enumerate(names):
        *folders, leaf = name.split("/")
        inner = params
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[leaf] = struct(16, 16 * (position + 1))
    return params


def bits(policy: str, names: list[str], scope: str = "") -> dict[str, int]:
    """The bits of fprop of every parameter, by its name."""

    def loss(params: Any, x: Any) -> Any:
        with jax.named_scope(scope) if scope else nullcontext():
            return sum((x @ w).sum() for w in jax.tree.leaves(params))

    plan = policyc.plan(policy, loss, nested(names), struct(4, 16))
    (phase, *_) = plan.phases
    runs = {names[site.n // 16 - 1]: plan.site_runs(site, phase) for site in plan.sites}
    assert len(runs) == len(names)
    return {name: run.decision.recipe.bits(Gemm.FPROP) for name, (run,) in runs.items()}


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.source.split(",")[0])
def test_the_bundled_policies_quantize_the_blocks_of_public_trainers(trainer: Trainer) -> None:
    mlps = [numbered(template, LAYERS * trainer.per_block) for template in trainer.mlp]
    attentions = [numbered(template, LAYERS) for template in trainer.attention]
    names = [name for stack in (*mlps, *attentions, trainer.others) for name in stack]
    decide = partial(bits, names=names, scope=trainer.scope)
    full, only_mlps, with_tail = decide("te_nvfp4"), decide("llama_nvfp4"), decide("llama3_8b_nvfp4")
    for decided in (full, only_mlps, with_tail):
        assert {decided[name] for name in trainer.others} == {16}
    for stacks, mlp_bits, kept in ((mlps, 4, TAIL * trainer.per_block), (attentions, 16, TAIL)):
        for stack in stacks:
            assert {full[name] for name in stack} == {4}
            assert {only_mlps[name] for name in stack} == {mlp_bits}
            assert [with_tail[name] for name in stack] == [4] * (len(stack) - kept) + [16] * kept


def test_the_first_of_numbered_names_has_index_0() -> None:
    names = ["dense/kernel", "dense_1/kernel", "dense_2/kernel", "other/kernel"]
    decided = bits("* -> bf16; dense[0].* -> fp8; dense[-1].* -> nvfp4", names)
    assert [decided[name] for name in names] == [8, 16, 4, 16]


def test_a_scope_that_describes_a_contraction_names_nothing() -> None:
    def scoped(params: Any, x: Any) -> Any:
        with jax.named_scope("mlp"), jax.named_scope("contract embed -> batch"), jax.named_scope("bt,th->bh"):
            return jnp.sum(x @ params["up"])

    (site,) = find_sites(scoped, {"up": W}, struct(4, 16))
    assert [segment.text for segment in site.scope.path] == ["mlp"]
