"""The Llama against an implementation that shares no code with it: Hugging Face transformers on the CPU."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "models"))

import jax
from jax.sharding import AxisType

weights = pytest.importorskip("llama.storage")
from llama import model as llama  # noqa: E402
from llama.configs import BadRun, Model  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compile")
SMALL = Model(
    layers=3, width=64, hidden=96, heads=4, kv_heads=2, head_dim=32, vocab=128, rope_scaling=8.0, compute="float32"
)  # fmt: skip


def mesh(**axes: int) -> jax.sharding.Mesh:
    shape = tuple(axes.get(name, 1) for name in ("data", "fsdp", "tensor", "context"))
    names = ("data", "fsdp", "tensor", "context")
    return jax.make_mesh(
        shape, names, axis_types=(AxisType.Auto,) * 4, devices=jax.devices()[: np.prod(shape)]
    )


@cache
def params(c: Model) -> llama.Params:
    return jax.jit(llama.init, static_argnums=1)(jax.random.key(1), c)


@pytest.fixture
def torch():
    found = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    with found.no_grad():
        yield found


def logits(params: llama.Params, tokens: np.ndarray, c: Model) -> jax.Array:
    return llama.linear(params, "lm_head", llama.hidden(params, tokens, c))


def close(ours: jax.Array, theirs: np.ndarray) -> None:
    # Both compute in fp32 and sum in their own order: over 96 and 64 products in three layers, then the head. That is
    # some tens of roundings of 6e-8 each, relative to the largest logit, and 1e-5 leaves room for them; a wrong
    # rotation, mask or norm is larger than 1e-2.
    theirs = np.asarray(theirs, np.float32)
    assert np.abs(np.asarray(ours) - theirs).max() <= 1e-5 * np.abs(theirs).max()


@pytest.mark.peers
@pytest.mark.parametrize("scan", [True, False])
def test_their_weights_give_their_logits(torch, tmp_path, scan):
    from transformers import LlamaConfig, LlamaForCausalLM

    c = Model(**{**SMALL.__dict__, "scan": scan})
    torch.manual_seed(0)
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192, "rope_theta": 500000.0}  # fmt: skip
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=128, rms_norm_eps=1e-5, rope_parameters=scaling, max_position_embeddings=131072,
        tie_word_embeddings=False, attn_implementation="eager", initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    # 300 positions: far enough that the scaled waves differ from the plain ones by more than the tolerance.
    tokens = np.random.default_rng(0).integers(0, 128, (2, 300))
    ours = logits(weights.load(tmp_path, c, mesh()), tokens, c)
    theirs = model(torch.tensor(tokens)).logits.numpy()
    close(ours, theirs)
    unscaled = logits(weights.load(tmp_path, c, mesh()), tokens, Model(**{**c.__dict__, "rope_scaling": 0.0}))
    assert np.abs(np.asarray(unscaled) - theirs).max() > 1e-3 * np.abs(theirs).max()


@pytest.mark.peers
def test_a_tied_head_is_a_copy_of_the_embedding(torch, tmp_path, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM

    c = Model(**{**SMALL.__dict__, "rope_scaling": 0.0})
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=128, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        tie_word_embeddings=True, attn_implementation="eager", initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    ours = weights.load(tmp_path, c, mesh())
    assert "has no head of its own" in capsys.readouterr().out
    tokens = np.random.default_rng(2).integers(0, 128, (2, 20))
    close(logits(ours, tokens, c), model(torch.tensor(tokens)).logits.numpy())


@pytest.mark.peers
def test_they_read_what_we_write(torch, tmp_path):
    from transformers import LlamaForCausalLM

    ours = params(SMALL)
    weights.save(ours, SMALL, tmp_path / "out", dtype="float32")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    tokens = np.random.default_rng(1).integers(0, 128, (2, 20))
    close(logits(ours, tokens, SMALL), model(torch.tensor(tokens)).logits.numpy())


@pytest.mark.parametrize("scan", [True, False])
def test_round_trip(tmp_path, monkeypatch, scan):
    monkeypatch.setattr(weights, "SHARD_BYTES", 40_000)
    c = Model(**{**SMALL.__dict__, "scan": scan})
    weights.save(params(c), c, tmp_path / "out", dtype="float32")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["model.layers.2.mlp.down_proj.weight"].endswith(".safetensors")
    again = weights.load(tmp_path / "out", c, mesh(fsdp=2, tensor=2))
    jax.tree.map(np.testing.assert_array_equal, again, params(c))
    assert not list(tmp_path.glob("*.unfinished"))


def test_bfloat16_is_rounded_once(tmp_path):
    weights.save(params(SMALL), SMALL, tmp_path / "out")
    again = weights.load(tmp_path / "out", SMALL, mesh())
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype("bfloat16")), again, params(SMALL))


def test_a_head_that_is_not_there_is_a_copy_of_the_embedding(tmp_path, capsys):
    from safetensors.numpy import load_file, save_file

    weights.save(params(SMALL), SMALL, tmp_path / "out", dtype="float32")
    file = tmp_path / "out" / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if k != "lm_head.weight"}, file)
    again = weights.load(tmp_path / "out", SMALL, mesh(fsdp=2, tensor=2))
    np.testing.assert_array_equal(again["lm_head"], again["embed"].T)
    assert "begins as a copy of the embedding" in capsys.readouterr().out


def test_another_model_is_refused(tmp_path):
    weights.save(params(SMALL), SMALL, tmp_path / "out")
    with pytest.raises(BadRun, match="num_hidden_layers: 3 there, 4 here"):
        weights.load(tmp_path / "out", Model(**{**SMALL.__dict__, "layers": 4}), mesh())
    (tmp_path / "out" / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(BadRun, match=r"model\.safetensors cannot be read, or is not whole"):
        weights.load(tmp_path / "out", SMALL, mesh())
    with pytest.raises(BadRun, match=r"config\.json cannot be read"):
        weights.load(tmp_path, SMALL, mesh())
