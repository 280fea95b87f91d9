"""Haiku's transformer, Levanter and Tunix, unmodified, under policies.

`make test-trainers` runs this in an environment of its own. Losses are compared with all digits that a trainer writes.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import re
from pathlib import Path

import pytest

from tests.support.trainer_runs import Command, Run, Trainer, formats, nvfp4_layers, train

SOURCES = Path(os.environ.get("TRAINERS_SOURCES", "sources-of-trainers")).resolve()
"""The folder of unpacked source distributions: `dm_haiku-0.0.17`."""

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.skipif(
        importlib.util.find_spec("levanter") is None,
        reason="the trainers are not installed: make test-trainers",
    ),
]

NVFP4 = "nvfp4(rht=wgrad, sr=grad, scale2d=weights)"

# ---- Haiku

HAIKU_PROGRAM = """
import random
from absl import app
from examples.transformer import train

random.seed(0)  # shuffles the data
train.MAX_STEPS, train.LOG_EVERY, train.NUM_LAYERS, train.LEARNING_RATE = 8, 1, 2, 3e-3
app.run(train.main)
"""
"""Haiku's example has its settings as constants of a module, and no flags for them."""


def prepare_haiku(scratch: Path) -> Command:
    (scratch / "program.py").write_text(HAIKU_PROGRAM)
    (scratch / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return Command(
        words=("program.py", "--dataset_path=text.txt", "--alsologtostderr"),
        folder=scratch,
        variables={"PYTHONPATH": str(SOURCES / "dm_haiku-0.0.17")},
    )


HAIKU = Trainer(
    name="haiku",
    prepare=prepare_haiku,
    read_losses=lambda _, printed: [float(loss) for loss in re.findall(r"'loss': ([\d.]+)", printed)],
    mlp=tuple(f"transformer.linear[{i}].w" for i in range(4)),
    attention=tuple(
        f"transformer.multi_head_attention[{i}].{name}.w"
        for i in range(2)
        for name in ("query", "key", "value", "linear")
    ),
    last_mlp=("transformer.linear[2].w", "transformer.linear[3].w"),
    last_block="transformer.linear[-2:].*",
)

# ---- Levanter

LEVANTER_CONFIG = """
data:
  tokenizer: tokenizer
  cache_dir: cache
  shuffle: false
  components:
    tiny:
      source: {type: url, train_urls: [data.jsonl]}
model:
  type: llama
  tokenizer: tokenizer
  max_seq_len: 64
  hidden_dim: 64
  intermediate_dim: 128
  num_layers: 4
  num_heads: 4
  num_kv_heads: 2
trainer:
  tracker: {type: json_logger}
  num_train_steps: 8
  train_batch_size: 4
  require_accelerator: false
  log_jaxprs: false
  log_xla_hlo: false
  distributed: {initialize_jax_distributed: false}
  checkpointer: {base_path: checkpoints}
optimizer: {learning_rate: 3.0e-3, warmup: 0}
"""
WORDS = 255


def prepare_levanter(scratch: Path) -> Command:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {str(i): i for i in range(WORDS)} | {"<end>": WORDS}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", bos_token="<end>")
    fast.save_pretrained(scratch / "tokenizer")
    starts = random.Random(0)
    texts = (
        " ".join(str((start + 3 * i) % WORDS) for i in range(300))
        for start in (starts.randrange(WORDS) for _ in range(50))
    )
    (scratch / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (scratch / "tiny.yaml").write_text(LEVANTER_CONFIG)
    return Command(
        words=("-m", "levanter.main.train_lm", "--config_path", "tiny.yaml"),
        folder=scratch,
        variables={"HF_HUB_OFFLINE": "1"},
    )


def read_levanter_losses(_: Path, printed: str) -> list[float]:
    steps = re.findall(r'"step": (\d+), "metrics": {"train/loss": ([\d.]+)', printed)
    return [float(loss) for loss in dict(steps).values()]  # Levanter logs the last step twice


LEVANTER_MLP = tuple(f"transformer.layers.stacked.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
LEVANTER = Trainer(
    name="levanter",
    prepare=prepare_levanter,
    read_losses=read_levanter_losses,
    mlp=LEVANTER_MLP,
    attention=tuple(f"transformer.layers.stacked.self_attn.{name}_proj.weight" for name in "qkvo"),
    last_mlp=LEVANTER_MLP,
    last_block="layers[-1].*.mlp.*",
    scanned_blocks=4,
)

# ---- Tunix

TUNIX_PROGRAM = """
import numpy as np
import optax
from flax import nnx
from tunix.models.llama3 import model as llama3
from tunix.sft import peft_trainer

config = llama3.ModelConfig(
    num_layers=3, vocab_size=64, embed_dim=64, hidden_dim=128, num_heads=4, head_dim=16, num_kv_heads=2,
    rope_theta=500_000, norm_eps=1e-5,
)
mask = np.ones((4, 32), bool)
batches = [
    peft_trainer.TrainingInput(input_tokens=(starts + 3 * np.arange(32)) % 64, input_mask=mask)
    for starts in np.random.default_rng(0).integers(0, 64, size=(8, 4, 1))
]


def model_inputs(batch):
    causal = np.tril(np.ones((32, 32), bool))[None].repeat(4, axis=0)
    positions = np.arange(32)[None].repeat(4, axis=0)
    return dict(
        input_tokens=batch.input_tokens, input_mask=batch.input_mask, positions=positions, attention_mask=causal
    )


trainer = peft_trainer.PeftTrainer(
    llama3.Llama3(config, rngs=nnx.Rngs(0)),
    optax.adam(3e-3),
    peft_trainer.TrainingConfig(eval_every_n_steps=100, max_steps=8),
).with_gen_model_input_fn(model_inputs)
trainer.train(batches)
print("losses", [float(loss) for loss in trainer.metrics_logger.get_metric_history("", "loss", "train")])
"""
"""Tunix is a library: its users write the program that gives its trainer a model and data."""


def prepare_tunix(scratch: Path) -> Command:
    (scratch / "program.py").write_text(TUNIX_PROGRAM)
    return Command(words=("program.py",), folder=scratch)


def read_tunix_losses(_: Path, printed: str) -> list[float]:
    (losses,) = re.findall(r"^losses (.*)$", printed, re.MULTILINE)
    return json.loads(losses)


def tunix_mlp(blocks: range) -> tuple[str, ...]:
    return tuple(f"layers[{i}].mlp.{name}_proj.kernel" for i in blocks for name in ("gate", "up", "down"))


TUNIX = Trainer(
    name="tunix",
    prepare=prepare_tunix,
    read_losses=read_tunix_losses,
    mlp=tunix_mlp(range(3)),
    attention=tuple(f"layers[{i}].attn.{name}_proj.w" for i in range(3) for name in "qkvo"),
    last_mlp=tunix_mlp(range(2, 3)),
    last_block="layers[-1].mlp.*",
)

# ---- the tests

TRAINERS = (HAIKU, LEVANTER, TUNIX)


def quantized(run: Run) -> dict[str, set[int]]:
    """The parameters in NVFP4, with the layers that are, from the plan. The rest must be in bfloat16."""
    layers = {site["parameters"][0]: nvfp4_layers(site) for site in run.sites if nvfp4_layers(site)}
    others = [site for site in run.sites if not nvfp4_layers(site)]
    assert others
    assert set().union(*map(formats, others)) == {"bf16"}
    return layers


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.name)
def test_keeping_everything_keeps_the_losses(trainer: Trainer) -> None:
    plain, kept = train(trainer, None), train(trainer, "* -> keep")
    assert kept.losses == plain.losses
    assert plain.losses[-1] < plain.losses[0]
    named = {site["parameters"][0] for site in kept.sites if site["parameters"]}
    assert named > {*trainer.mlp, *trainer.attention}


@pytest.mark.parametrize("name", ["te_nvfp4", "llama_nvfp4"])
@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.name)
def test_a_bundled_policy_quantizes_the_blocks(trainer: Trainer, name: str) -> None:
    plain, run = train(trainer, None), train(trainer, f'import "{name}.policy"')
    expected = trainer.mlp + trainer.attention if name == "te_nvfp4" else trainer.mlp
    assert quantized(run) == {name: set(range(trainer.scanned_blocks)) for name in expected}
    check_training(run, plain)


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.name)
def test_a_slice_quantizes_the_last_layer(trainer: Trainer) -> None:
    plain, run = train(trainer, None), train(trainer, f"* -> bf16; {trainer.last_block} -> {NVFP4}")
    assert quantized(run) == {name: {trainer.scanned_blocks - 1} for name in trainer.last_mlp}
    check_training(run, plain)


def check_training(run: Run, plain: Run) -> None:
    assert len(run.losses) == len(plain.losses)
    assert all(map(math.isfinite, run.losses))
    assert run.losses[-1] < run.losses[0]
    assert run.losses != plain.losses
    # A tiny model early in training: quantization changes the loss much less than training does.
    assert abs(run.losses[-1] - plain.losses[-1]) < (plain.losses[0] - plain.losses[-1]) / 2
