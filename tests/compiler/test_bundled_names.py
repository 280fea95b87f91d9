"""The bundled policies on models of many architectures and with the names of public trainers. Plans only: nothing is
compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import policyc
from policyc.compiler.plan import make_plan
from policyc.language.recipes import Gemm
from tests.support.jaxpr_tools import find_sites, struct
from tests.support.kind_programs import (
    ATTENTION,
    HIDDEN,
    PIXELS,
    PROGRAMS,
    TABLE,
    TOKEN_IDS,
    VOCABULARY,
    WIDTH,
    Expected,
    KindProgram,
    attend,
    cross_entropy,
    outside,
    rms_norm,
    sites_of,
    split_heads,
    unrolled,
    weight,
)

pytestmark = pytest.mark.any_jax

LAYERS = 6
TAIL = 4
"""The number of blocks that llama3_8b_nvfp4 keeps in BF16."""

LINEARS = {"attention", "mlp", "experts"}
MLPS = {"mlp", "experts"}


def bits(policy: str, loss: Callable[..., Any], *args: Any) -> list[list[int]]:
    """The bits of fprop of every site in each layer."""
    return bits_of_plan(policyc.plan(policy, loss, *args))


def bits_of_plan(plan: policyc.Plan) -> list[list[int]]:
    (phase,) = plan.phases
    return [
        [
            run.decision.recipe.bits(Gemm.FPROP)
            for run in plan.site_layer_ranges(site, phase)
            for _ in run.layers
        ]
        for site in plan.sites
    ]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_the_bundled_policies_quantize_their_kinds_in_any_architecture(program: KindProgram) -> None:
    sites = sites_of(program.name)
    for policy, kinds, low in (
        ("te_nvfp4", LINEARS, 4),
        ("llama_nvfp4", MLPS, 4),
        ("fp8", LINEARS, 8),
        ("quartet2", LINEARS, 4),
    ):
        decided = [set(site) for site in bits_of_plan(make_plan(policyc.load(policy), sites))]
        takes_all = policy == "llama_nvfp4"  # the others ask for `block`
        expected = [
            {low if kind in kinds and (blocks or takes_all) else 16} for kind, blocks in program.expected
        ]
        assert decided == expected, policy


# ---- the names of public trainers


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Names of the parameters of a stack of blocks. `{i}` is the number of a block, `{even}` and `{odd}` are those of
    linears that are numbered across blocks.

    `attention` and `cross` are the queries, keys, values and result; keys and values, or all three, may be fused. `mlp`
    is up and down, or gate, up and down.
    """

    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    cross: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Names of a public trainer's parameters, as its source at this version has them.

    With two stacks, the second is a decoder. Without a head, the embedding is the head. `scope` is a name scope around
    the model.
    """

    source: str
    stacks: tuple[Stack, ...]
    embedding: str
    head: str = ""
    scope: str = ""
    is_vision: bool = False


def under(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}" for name in names)


T5_ATTENTION = ("query/kernel", "key/kernel", "value/kernel", "out/kernel")
FLAX_ATTENTION = under("MultiHeadDotProductAttention_0", *T5_ATTENTION)
FLAX_MLP = ("MlpBlock_0/Dense_0/kernel", "MlpBlock_0/Dense_1/kernel")

TRAINERS = (
    Trainer(
        source="google-research/t5x cc342d4, t5x/examples/t5/network.py",
        stacks=(
            Stack(
                attention=under("encoder/layers_{i}/attention", *T5_ATTENTION),
                mlp=under("encoder/layers_{i}/mlp", "wi_0/kernel", "wi_1/kernel", "wo/kernel"),
            ),
            Stack(
                attention=under("decoder/layers_{i}/self_attention", *T5_ATTENTION),
                cross=under("decoder/layers_{i}/encoder_decoder_attention", *T5_ATTENTION),
                mlp=under("decoder/layers_{i}/mlp", "wi_0/kernel", "wi_1/kernel", "wo/kernel"),
            ),
        ),
        embedding="token_embedder/embedding",
        head="decoder/logits_dense/kernel",
    ),
    Trainer(
        source="google-research/big_vision 0127fb6, big_vision/models/vit.py",
        stacks=(
            Stack(
                attention=under("Transformer/encoderblock_{i}", *FLAX_ATTENTION),
                mlp=under("Transformer/encoderblock_{i}", *FLAX_MLP),
            ),
        ),
        embedding="embedding/kernel",
        head="head/kernel",
        is_vision=True,
    ),
    Trainer(
        source="flax 0.12.12, examples/lm1b/models.py",
        stacks=(
            Stack(
                attention=under("decoder/encoderdecoderblock_{i}", *FLAX_ATTENTION),
                mlp=under("decoder/encoderdecoderblock_{i}", *FLAX_MLP),
            ),
        ),
        embedding="decoder/Embed_0/embedding",
        head="decoder/logitdense/kernel",
    ),
    Trainer(
        source="flax 0.12.12, examples/gemma/transformer.py",
        stacks=(
            Stack(
                attention=under(
                    "layers/{i}/attn", "q_einsum/kernel", "kv_einsum/kernel", "attn_vec_einsum/kernel"
                ),
                mlp=under("layers/{i}/mlp", "gate_proj/kernel", "up_proj/kernel", "down_proj/kernel"),
            ),
        ),
        embedding="embedder/embedding",
    ),
    Trainer(
        source="gemma 4.0.1, gemma/gm/nn/_transformer.py",
        stacks=(
            Stack(
                attention=under("layer_{i}/attn", "q_einsum/w", "kv_einsum/w", "attn_vec_einsum/w"),
                mlp=under("layer_{i}/mlp", "gating_einsum", "linear"),
            ),
        ),
        embedding="embedder/input_embedding",
        scope="Gemma3_1B._apply_attention",
    ),
    Trainer(
        source="jenkspt/gpt-jax f22a46e, model.py",
        stacks=(
            Stack(
                attention=under("params/{i}/attn", "c_attn/kernel", "c_proj/kernel"),
                mlp=under("params/{i}/mlp", "c_fc/kernel", "c_proj/kernel"),
            ),
        ),
        embedding="params/wte/embedding",
    ),
    Trainer(
        source="dm-haiku 0.0.17, examples/transformer/model.py",
        stacks=(
            Stack(
                attention=under(
                    "transformer/multi_head_attention_{i}", "query/w", "key/w", "value/w", "linear/w"
                ),
                mlp=("transformer/linear_{even}/w", "transformer/linear_{odd}/w"),
            ),
        ),
        embedding="language_model/embed/embeddings",
        head="language_model/linear/w",
        scope="language_model",
    ),
)


def numbered(names: tuple[str, ...], block: int) -> list[str]:
    """The names in a block. Haiku gives the first of `linear, linear_1, ...` no number."""
    filled = [name.format(i=block, even=2 * block, odd=2 * block + 1) for name in names]
    return [name.replace("_0/", "/") if name.startswith("transformer/") else name for name in filled]


def nested(shapes: dict[str, Any]) -> dict[str, Any]:
    """Parameters with these names, in nested dicts."""
    params: dict[str, Any] = {}
    for name, shape in shapes.items():
        *folders, leaf = name.split("/")
        inner = params
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[leaf] = shape
    return params


def lookup(params: Any, name: str) -> Any:
    for key in name.split("/"):
        params = params[key]
    return params


def stack_shapes(stack: Stack) -> dict[str, Any]:
    shapes: dict[str, Any] = {}
    for block in range(LAYERS):
        for names in filter(None, (stack.attention, stack.cross)):
            *inputs, out = numbered(names, block)
            parts = (1,) * (len(inputs) - 1) + (
                4 - len(inputs),
            )  # the last projection has what the others have not
            shapes |= {name: weight(WIDTH, n * WIDTH) for name, n in zip(inputs, parts, strict=True)}
            shapes[out] = weight(WIDTH, WIDTH)
        *inputs, down = numbered(stack.mlp, block)
        shapes |= dict.fromkeys(inputs, weight(WIDTH, HIDDEN)) | {down: weight(HIDDEN, WIDTH)}
    return shapes


def shapes_of(trainer: Trainer) -> dict[str, Any]:
    shapes = {trainer.embedding: weight(PIXELS.shape[-1], WIDTH) if trainer.is_vision else TABLE}
    for stack in trainer.stacks:
        shapes |= stack_shapes(stack)
    return shapes | ({trainer.head: weight(WIDTH, VOCABULARY)} if trainer.head else {})


def attention(x: Any, weights: list[Any], memory: Any = None) -> Any:
    *inputs, out = weights
    source = x if memory is None else memory
    if len(inputs) == 1:
        q, k, v = jnp.split(x @ inputs[0], 3, -1)
    else:
        q = x @ inputs[0]
        k, v = jnp.split(jnp.concatenate([source @ w for w in inputs[1:]], -1), 2, -1)
    return attend(*map(split_heads, (q, k, v)), causal=memory is None).reshape(x.shape) @ out


def run_stack(params: Any, stack: Stack, x: Any, memory: Any) -> Any:
    for block in range(LAYERS):
        own, cross, (*up, down) = (
            [lookup(params, name) for name in numbered(names, block)]
            for names in (stack.attention, stack.cross, stack.mlp)
        )
        x = x + attention(rms_norm(x), own)
        if cross:
            x = x + attention(rms_norm(x), cross, memory)
        h = rms_norm(x)
        x = x + (jax.nn.silu(h @ up[0]) * (h @ up[1] if len(up) == 2 else 1)) @ down
    return rms_norm(x)


def loss_of(trainer: Trainer) -> Callable[[Any], Any]:
    def loss(params: Any) -> Any:
        table = lookup(params, trainer.embedding)
        with jax.named_scope(trainer.scope) if trainer.scope else nullcontext():
            memory = None
            for stack in trainer.stacks:
                memory = run_stack(
                    params, stack, PIXELS @ table if trainer.is_vision else table[TOKEN_IDS], memory
                )
            return cross_entropy(memory @ (lookup(params, trainer.head) if trainer.head else table.T))

    return loss


def expected_of(trainer: Trainer) -> list[Expected]:
    """The kind and the block of every site."""
    expected = outside("embedding") if trainer.is_vision else []
    for stack in trainer.stacks:
        parts = [
            ("attention",) * (len(names) - 1) + ATTENTION[3:]
            for names in (stack.attention, stack.cross)
            if names
        ]
        kinds = [kind for part in parts for kind in part] + ["mlp"] * len(stack.mlp)
        expected += unrolled(LAYERS, *kinds)
    return expected + outside("head")


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.source.split(",")[0])
def test_the_bundled_policies_quantize_the_blocks_of_public_trainers(trainer: Trainer) -> None:
    loss, params, expected = loss_of(trainer), nested(shapes_of(trainer)), expected_of(trainer)
    assert bits("te_nvfp4", loss, params) == [[4 if kind in LINEARS else 16] for kind, _ in expected]
    assert bits("llama_nvfp4", loss, params) == [[4 if kind in MLPS else 16] for kind, _ in expected]
    with_tail = bits("llama3_8b_nvfp4", loss, params)
    assert with_tail == [
        [4 if kind in LINEARS and block[0] < LAYERS - TAIL else 16] for kind, block in expected
    ]


def test_attention_that_pools_after_the_last_block_stays_in_bf16() -> None:
    trainer = next(trainer for trainer in TRAINERS if trainer.is_vision)
    pool = under("MAPHead_0", *FLAX_ATTENTION)
    shapes = (
        shapes_of(trainer) | dict.fromkeys(pool, weight(WIDTH, WIDTH)) | {"MAPHead_0/probe": weight(WIDTH)}
    )

    def loss(params: Any) -> Any:
        x = run_stack(params, trainer.stacks[0], PIXELS @ lookup(params, trainer.embedding), None)
        probe = jnp.broadcast_to(lookup(params, "MAPHead_0/probe"), (len(x), 1, WIDTH))
        pooled = attention(probe, [lookup(params, name) for name in pool], memory=x)
        return cross_entropy(pooled @ lookup(params, trainer.head), TOKEN_IDS[:, :1])

    *others, head = expected_of(trainer)
    expected = [*others, *outside(*ATTENTION), head]
    decided = bits("te_nvfp4", loss, nested(shapes))
    assert decided == [[4 if kind in LINEARS and block else 16] for kind, block in expected]


# ---- names


def test_the_first_of_numbered_names_has_index_0() -> None:
    names = ("dense/kernel", "dense_1/kernel", "dense_2/kernel", "other/kernel")

    def loss(params: Any) -> Any:
        return sum((jnp.ones((4, WIDTH)) @ lookup(params, name)).sum() for name in names)

    params = nested(dict.fromkeys(names, weight(WIDTH, WIDTH)))
    assert bits("* -> bf16; dense[0].* -> fp8; dense[-1].* -> nvfp4", loss, params) == [[8], [16], [4], [16]]


def test_a_scope_that_describes_a_contraction_names_nothing() -> None:
    def scoped(params: Any, x: Any) -> Any:
        with jax.named_scope("mlp"), jax.named_scope("contract embed -> batch"), jax.named_scope("bt,th->bh"):
            return jnp.sum(x @ params["up"])

    (site,) = find_sites(scoped, {"up": struct(16, 16)}, struct(4, 16))
    assert [segment.text for segment in site.scope.path] == ["mlp"]
