"""Weights as safetensors: round trips, and logits compared with Hugging Face transformers, which shares no code."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from policyc.models.llama import corpora, data, partition, tensor_files
from policyc.models.llama import model as llama
from policyc.models.llama import weights as files
from policyc.models.llama.configs import ConfigError, ModelConfig
from tests.support.llama_runs import make_mesh

pytestmark = pytest.mark.any_jax
SMALL = ModelConfig(
    layers=3, width=64, hidden=96, heads=4, kv_heads=2, head_dim=32, vocab=128, rope_scaling=8.0, compute="float32"
)  # fmt: skip

MIXTURE = replace(SMALL, rope_scaling=0.0, experts=4)


@cache
def weights(config: ModelConfig) -> llama.Params:
    """Random weights of the usual size; norms are random too, near 1."""
    random = np.random.default_rng(1)

    def draw(spec: llama.ParamSpec) -> np.ndarray:
        values = (1 if spec.deviation == 0 else 0) + (spec.deviation or 0.1) * random.normal(size=spec.shape)
        return values.astype(np.float32)

    return jax.tree.map(draw, llama.param_specs(config))


def save(folder: Path, params: Any = None, config: ModelConfig = SMALL, dtype: str = "bfloat16") -> None:
    beside = files.export_files(config, 32, None, dtype)
    files.save_safetensors(weights(config) if params is None else params, config, folder, beside, dtype)


@pytest.fixture
def torch():
    library = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    with library.no_grad():
        yield library


def logits(params: llama.Params, tokens: np.ndarray, config: ModelConfig) -> jax.Array:
    return llama.linear(params, "lm_head", llama.run_blocks(params, tokens, config)[0])


def assert_close(ours: jax.Array, theirs: np.ndarray) -> None:
    # Both compute in float32, and sum in different orders: over 96 and 64 products in three layers, then the head. That
    # is some tens of roundings of 6e-8 each, relative to the largest logit, and 1e-5 leaves room for them. A wrong
    # rotation, mask or norm is larger than 1e-2.
    theirs = np.asarray(theirs, np.float32)
    assert np.abs(np.asarray(ours) - theirs).max() <= 1e-5 * np.abs(theirs).max()


@pytest.mark.peers
@pytest.mark.parametrize("scan", [True, False])
def test_weights_of_transformers_give_the_logits_of_transformers(torch, tmp_path, scan):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = replace(SMALL, scan=scan)
    torch.manual_seed(0)
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192, "rope_theta": 500000.0}  # fmt: skip
    theirs = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=128, rms_norm_eps=1e-5, attn_implementation="eager", initializer_range=0.2,
        rope_parameters=scaling, max_position_embeddings=131072, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(theirs).eval()
    model.save_pretrained(tmp_path)
    # 300 positions: far enough that the scaled frequencies differ from the plain ones by more than the tolerance.
    tokens = np.random.default_rng(0).integers(0, 128, (2, 300))
    ours = logits(files.load_safetensors(tmp_path, config, make_mesh()), tokens, config)
    theirs = model(torch.tensor(tokens)).logits.numpy()
    assert_close(ours, theirs)
    params = files.load_safetensors(tmp_path, config, make_mesh())
    unscaled = logits(params, tokens, replace(config, rope_scaling=0.0))
    assert np.abs(np.asarray(unscaled) - theirs).max() > 1e-3 * np.abs(theirs).max()


@pytest.mark.peers
@pytest.mark.parametrize("config", [SMALL, MIXTURE], ids=["llama", "mixtral"])
def test_transformers_reads_our_weights(torch, tmp_path, config):
    from transformers import AutoModelForCausalLM

    save(tmp_path / "out", config=config, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    tokens = np.random.default_rng(1).integers(0, 128, (2, 20))
    assert_close(logits(weights(config), tokens, config), model(torch.tensor(tokens)).logits.numpy())


def test_experts_have_the_names_and_shapes_of_mixtral(tmp_path):
    from safetensors.numpy import load_file

    save(tmp_path / "out", config=MIXTURE, dtype="float32")
    tensors, ours = load_file(tmp_path / "out" / "model.safetensors"), weights(MIXTURE)["layers"]["mlp"]
    name = "model.layers.2.block_sparse_moe"
    np.testing.assert_array_equal(tensors[f"{name}.gate.weight"], ours["router"][2].T)
    for theirs, projection in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        expected = ours["experts"][projection][2, 3].T
        np.testing.assert_array_equal(tensors[f"{name}.experts.3.{theirs}.weight"], expected)
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    fields = ("architectures", "model_type", "num_local_experts", "num_experts_per_tok")
    assert [about[field] for field in fields] == [["MixtralForCausalLM"], "mixtral", 4, 2]
    with pytest.raises(ConfigError, match="model_type: mixtral there, llama here"):
        files.load_safetensors(tmp_path / "out", replace(MIXTURE, experts=0), make_mesh())


TEXT = "def loss(params): return 'naïve 漢字'\n"


def save_with_tokenizer(folder: Path, config: ModelConfig, tokenizer: str | None) -> None:
    """An export as a run writes it, in float32."""
    beside = files.export_files(config, 64, tokenizer, "float32")
    files.save_safetensors(weights(config), config, folder, beside, "float32")


@pytest.mark.peers
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_auto_classes_of_transformers_read_an_export(torch, tmp_path, kind):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config, tokenizer = replace(SMALL, vocab=320), None
    if kind == "bpe":
        tokenizer = str(tmp_path / "tokenizer.json")
        corpora.train_tokenizer([TEXT.encode()] * 3, 280).save(tokenizer)
    save_with_tokenizer(tmp_path / "out", config, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    reader = AutoTokenizer.from_pretrained(tmp_path / "out")
    encode, _ = data.make_encoder(tokenizer)
    *tokens, end = next(encode(iter([TEXT.encode()]))).tolist()
    assert reader(TEXT)["input_ids"] == tokens
    assert reader.decode(tokens) == TEXT
    assert (reader.eos_token_id, model.config.max_position_embeddings) == (end, 64)
    ours = logits(weights(config), np.asarray([tokens]), config)
    assert_close(ours, model(torch.tensor([tokens])).logits.numpy())


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(
    ("model", "last"), [(SMALL, "mlp.down_proj"), (MIXTURE, "block_sparse_moe.experts.3.w2")]
)
def test_weights_survive_a_round_trip(tmp_path, monkeypatch, model, last, scan):
    monkeypatch.setattr(tensor_files, "SHARD_BYTES", 40_000)
    axes = {"expert": 2} if model.experts else {"tensor": 2}
    config, mesh = replace(model, scan=scan), make_mesh(fsdp=2, **axes)
    shardings = jax.tree.map(lambda spec: partition.sharding(mesh, spec.axes), llama.param_specs(config))
    sharded = jax.device_put(weights(config), shardings)
    save(tmp_path / "out", sharded, config, dtype="float32")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"][f"model.layers.2.{last}.weight"].endswith(".safetensors")
    loaded = files.load_safetensors(tmp_path / "out", config, mesh)
    jax.tree.map(np.testing.assert_array_equal, loaded, weights(config))
    assert not list(tmp_path.glob("*.unfinished"))


def test_weights_are_rounded_to_bfloat16_once(tmp_path):
    save(tmp_path / "out")
    loaded = files.load_safetensors(tmp_path / "out", SMALL, make_mesh())
    bfloat16 = jax.numpy.bfloat16
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(bfloat16)), loaded, weights(SMALL))


def test_a_missing_head_starts_as_a_copy_of_the_embedding(tmp_path, capsys):
    from safetensors.numpy import load_file, save_file

    save(tmp_path / "out", dtype="float32")
    file = tmp_path / "out" / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if k != "lm_head.weight"}, file)
    loaded = files.load_safetensors(tmp_path / "out", SMALL, make_mesh(fsdp=2, tensor=2))
    np.testing.assert_array_equal(loaded["lm_head"], loaded["embed"].T)
    assert "starts as a copy of the embedding" in capsys.readouterr().err


def test_weights_of_another_model_are_refused(tmp_path):
    save(tmp_path / "out")
    with pytest.raises(ConfigError, match="num_hidden_layers: 3 there, 4 here"):
        files.load_safetensors(tmp_path / "out", replace(SMALL, layers=4), make_mesh())
    (tmp_path / "out" / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read; truncated\?"):
        files.load_safetensors(tmp_path / "out", SMALL, make_mesh())
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        files.load_safetensors(tmp_path, SMALL, make_mesh())
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        files.load_safetensors(tmp_path, SMALL, make_mesh())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias: True there, False here"),
        ({"hidden_act": "gelu"}, "hidden_act: gelu there, silu here"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "rope_type: yarn there, llama3 here"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 2.0}},
         "high_freq_factor: 2.0 there, 4.0 here"),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_type: linear there, llama3 here"),
    ],
)  # fmt: skip
def test_what_this_model_does_not_compute_is_refused(tmp_path, changes, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(files.hf_config(SMALL, "float32", 32) | changes))
    with pytest.raises(ConfigError, match=message):
        files.load_safetensors(tmp_path, SMALL, make_mesh())


def test_a_tensor_that_is_not_used_is_refused(tmp_path):
    from safetensors.numpy import save_file

    save(tmp_path)
    save_file(
        {"model.layers.0.self_attn.q_proj.bias": np.zeros(8, np.float32)}, tmp_path / "more.safetensors"
    )
    with pytest.raises(ConfigError, match=r"q_proj\.bias, which this model does not use"):
        files.load_safetensors(tmp_path, SMALL, make_mesh())


def test_an_export_has_the_tokenizer_and_the_positions_of_its_run(tmp_path):
    """The tokenizer of a run without one is bytes. The library `tokenizers` reads it, and shares no code with it."""
    tokenizers = pytest.importorskip("tokenizers")
    save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"] == 32
    read = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Grüße, 世界 \x00\t\n" + "".join(map(chr, range(256)))
    assert read.encode(text).ids == list(text.encode())
    assert read.decode(read.encode(text).ids) == text
    assert read.encode("a<|end_of_text|>").ids == [97, 256]
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "<|end_of_text|>"
