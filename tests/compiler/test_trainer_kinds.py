"""Kinds, blocks and decisions of bundled policies in public trainers. Programs are traced; no step is executed.

`make test-trainers` runs this in environments of its own: Hugging Face's models in Flax need an older version of
Transformers than Levanter. `UPDATE_SNAPSHOTS=1 make test-trainers` writes the table of `docs/results/trainers.md`.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.compiler.test_public_trainers import prepare_haiku, prepare_levanter, prepare_tunix
from tests.compiler.test_trainers import program_words
from tests.support.kind_programs import ATTENTION, BLOCK, outside, scanned, unrolled
from tests.support.trainer_plans import POLICIES, Expected, PlannedSite, plan_trainers
from tests.support.trainer_runs import ROOT, Command

pytestmark = pytest.mark.trainers

PAGE = ROOT / "docs" / "results" / "trainers.md"
MAX_WITHOUT_KIND = 0.05
LINEARS = {"attention", "mlp", "experts"}

HAS_TRAINERS = importlib.util.find_spec("maxtext") is not None
HAS_HF_FLAX = not HAS_TRAINERS and importlib.util.find_spec("transformers") is not None
"""The trainers have a version of Transformers without models in Flax."""

# ---- what a person says who has read the models' sources

LLAMA = (*ATTENTION, "mlp", "mlp", "mlp")
FUSED = ("attention", "scores", "scores", "attention")
"""One product makes queries, keys and values."""
MAXTEXT_BLOCKS = 6
EXPERTS = ("router", "experts", "experts", "experts", "")
"""The last product adds up the results of a token's experts: it reads no weight, and is in no attention."""
LATENT_ATTENTION = (*["attention"] * 3, "scores", "scores", "attention")
"""MLA without a low-rank factor of the queries: queries, the latent vector, keys and values from it."""


def blocks(numbers: Sequence[int], *kinds: str) -> list[Expected]:
    """Sites of one scan, whose iterations are these blocks."""
    return [(kind, tuple(numbers)) for kind in kinds]


MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 128,
    "megablox": "false",  # a kernel for TPUs; else ragged_dot
}

MAXTEXT: dict[str, tuple[dict[str, object], list[Expected]]] = {
    "Llama 2": ({}, [*scanned(MAXTEXT_BLOCKS, *LLAMA), *outside("head")]),
    "Llama 2, `scan_layers=false`": (
        {"scan_layers": "false"},
        [*unrolled(MAXTEXT_BLOCKS, *LLAMA), *outside("head")],
    ),
    "Gemma 2": (
        {"decoder_block": "gemma2", "base_num_decoder_layers": 3},  # pairs of a local and a global block
        [*blocks((0, 2, 4), *LLAMA), *blocks((1, 3, 5), *LLAMA), *outside("head")],
    ),
    "Mixtral": (
        {"decoder_block": "mixtral", **MIXTURE},
        [*scanned(MAXTEXT_BLOCKS, *ATTENTION, *EXPERTS), *outside("head")],
    ),
    "DeepSeek V2": (
        {
            "decoder_block": "deepseek",
            **MIXTURE,
            "first_num_dense_layers": 2,
            "shared_experts": 1,
            "attention_type": "mla",
            "q_lora_rank": 0,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "base_num_kv_heads": 4,
        },
        [
            *blocks((0, 1), *LATENT_ATTENTION, "mlp", "mlp", "mlp"),
            *blocks((2, 3, 4, 5), *LATENT_ATTENTION, *EXPERTS, "mlp", "mlp", "mlp"),
            *outside("head"),
        ],
    ),
}

OTHERS: dict[str, tuple[Callable[[Path], Command], list[Expected]]] = {
    "Levanter: Llama": (prepare_levanter, [*scanned(4, *LLAMA), *outside("head")]),
    "Tunix: Llama 3": (prepare_tunix, [*unrolled(3, *LLAMA), *outside("head")]),
    "Haiku: transformer": (prepare_haiku, [*unrolled(2, *BLOCK), *outside("head")]),
}
"""Each with a function that writes its program into a folder."""

HF_FLAX: dict[str, tuple[str, list[Expected]]] = {
    "GPT-2": ("GPT2", [*unrolled(3, *FUSED, "mlp", "mlp"), *outside("head")]),
    "Llama": ("Llama", [*unrolled(3, *LLAMA), *outside("head")]),
    "BERT, masked tokens": ("Bert", [*unrolled(3, *BLOCK), *outside("head", "head")]),
    "BART": ("Bart", [*unrolled(2, *BLOCK), *unrolled(3, *ATTENTION, *BLOCK), *outside("head")]),
    "ViT": ("ViT", [*unrolled(3, *BLOCK), *outside("head")]),
}

HF_PROGRAM = """
import sys
import jax
import jax.numpy as jnp
import optax
import transformers

sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2)
tokens = jnp.arange(16).reshape(2, 8)
config, model, inputs = {
    "GPT2": lambda: (dict(n_embd=32, n_layer=3, n_head=2, n_positions=16, vocab_size=64), "GPT2LMHeadModel", {}),
    "Llama": lambda: (dict(**sizes, num_key_value_heads=2), "LlamaForCausalLM", {}),
    "Bert": lambda: (sizes, "BertForMaskedLM", {}),
    "Bart": lambda: (
        dict(
            vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=3, encoder_ffn_dim=64, decoder_ffn_dim=64,
            encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=16,
        ),
        "BartForConditionalGeneration",
        {"decoder_input_ids": tokens},
    ),
    "ViT": lambda: (
        dict(**sizes, image_size=16, patch_size=4, num_labels=10),
        "ViTForImageClassification",
        {"pixel_values": jnp.ones((2, 3, 16, 16))},
    ),
}[sys.argv[1]]()
config = getattr(transformers, sys.argv[1] + "Config")(**config)
model = getattr(transformers, "Flax" + model)(config, _do_init=False)
inputs = inputs if "pixel_values" in inputs else {"input_ids": tokens, **inputs}


def loss(params):
    logits = model(**inputs, params=params, train=True, dropout_rng=jax.random.key(0)).logits
    labels = tokens if logits.ndim == 3 else tokens[:, 0] % 10
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


jax.jit(jax.value_and_grad(loss)).lower(model.params_shape_tree)
"""

EXPECTED: dict[str, list[Expected]] = {
    **{f"MaxText: {name}": sites for name, (_, sites) in MAXTEXT.items()},
    **{name: sites for name, (_, sites) in OTHERS.items()},
    **{f"HF Flax: {name}": sites for name, (_, sites) in HF_FLAX.items()},
}


# ---- what policyc says


@cache
def plan_maxtext() -> dict[str, list[PlannedSite]]:
    folder = Path(mkdtemp(prefix="policyc-trainers-"))
    programs = {
        name: program_words(
            run_name="kinds",
            base_output_directory=folder,
            **{"base_num_decoder_layers": MAXTEXT_BLOCKS, **settings},
        )
        for name, (settings, _) in MAXTEXT.items()
    }
    return plan_trainers(programs, folder, {"DECOUPLE_GCLOUD": "TRUE"})


@cache
def plan_other(row: str) -> list[PlannedSite]:
    prepare, _ = OTHERS[row]
    command = prepare(Path(mkdtemp(prefix="policyc-trainers-")))
    return plan_trainers({row: command.words}, command.folder, command.variables)[row]


@cache
def plan_hf_flax() -> dict[str, list[PlannedSite]]:
    folder = Path(mkdtemp(prefix="policyc-trainers-"))
    (folder / "program.py").write_text(HF_PROGRAM)
    return plan_trainers({name: ("program.py", model) for name, (model, _) in HF_FLAX.items()}, folder)


def planned(row: str) -> list[PlannedSite]:
    """The sites of a row of the table."""
    trainer, _, name = row.partition(": ")
    if row in OTHERS and HAS_TRAINERS:
        return plan_other(row)
    if not (HAS_HF_FLAX if trainer == "HF Flax" else HAS_TRAINERS):
        pytest.skip(f"{trainer} is not installed: make test-trainers")
    return (plan_hf_flax if trainer == "HF Flax" else plan_maxtext)()[name]


# ---- the tests

each_row = pytest.mark.parametrize(
    "row", [row for row in EXPECTED if row.startswith("HF Flax") == HAS_HF_FLAX]
)


@each_row
def test_every_site_has_the_expected_kind_and_block(row: str) -> None:
    assert [site.kind_and_blocks for site in planned(row)] == EXPECTED[row]


def test_few_sites_have_no_kind() -> None:
    kinds = [kind for sites in EXPECTED.values() for kind, _ in sites]
    assert kinds.count("") <= MAX_WITHOUT_KIND * len(kinds)


DECIDES: dict[str, tuple[set[str], int, int]] = {
    "te_nvfp4": (LINEARS, 4, 0),
    "llama_nvfp4": (LINEARS - {"attention"}, 4, 0),
    "llama3_8b_nvfp4": (LINEARS, 4, 4),
    "fp8": (LINEARS, 8, 0),
}
"""For each policy: which kinds it quantizes in blocks, to how many bits, and how many of the last blocks it keeps."""


@each_row
@pytest.mark.parametrize("policy", POLICIES)
def test_a_bundled_policy_quantizes_its_kinds(policy: str, row: str) -> None:
    kinds, low, tail = DECIDES[policy]
    expected = EXPECTED[row]
    for site, (kind, numbers), count in zip(planned(row), expected, block_counts(expected), strict=True):
        bits = [low if kind in kinds and number < count - tail else 16 for number in numbers]
        assert site.bits[policy] == (bits or [16]), site.name


def block_counts(sites: Sequence[Expected]) -> list[int]:
    """For each site, how many blocks its stack has. An encoder and a decoder each count from 0."""
    counts: list[int] = []
    stacks: list[int] = []
    first = 0
    for _, numbers in sites:
        if numbers and (not counts or (min(numbers) == 0 and first > 0)):
            counts.append(0)
        if numbers:
            first = min(numbers)
            counts[-1] = max(counts[-1], 1 + max(numbers))
        stacks.append(len(counts) - 1)
    return [counts[stack] if counts else 0 for stack in stacks]


def row_text(row: str, sites: Sequence[PlannedSite]) -> str:
    """A row of the table of the page: GEMMs by kind, and how many of them each policy quantizes."""
    kinds = Counter[str]()
    for site in sites:
        kinds[site.kind or "no kind"] += len(site.bits[POLICIES[0]])
    low = [sum(bits < 16 for site in sites for bits in site.bits[policy]) for policy in POLICIES]
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"| {row} | {counts} | " + " | ".join(map(str, low)) + " |"


@each_row
def test_the_page_has_what_is_planned(row: str) -> None:
    text, page = row_text(row, planned(row)), PAGE.read_text(encoding="utf-8")
    if os.environ.get("UPDATE_SNAPSHOTS"):
        page = re.sub(rf"^\| {re.escape(row)} \|.*$", lambda _: text, page, flags=re.MULTILINE)
        PAGE.write_text(page, encoding="utf-8")
    assert text in page.splitlines()


TABLE_HEADER = f"| trainer and model | GEMMs | {' | '.join(f'`{name}`' for name in POLICIES)} |"


def test_the_table_of_the_page_has_these_rows() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = lines[lines.index(TABLE_HEADER) + 2 :]
    names = [line.split(" | ")[0].removeprefix("| ") for line in rows[: rows.index("")]]
    assert names == list(EXPECTED)
