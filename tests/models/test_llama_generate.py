"""Texts from trained models: greedy tokens against the model that was trained, sampling, codecs, folders of runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.command import policyc as command
from tests.support.llama_runs import SHORT, make_mesh

pytest.importorskip("orbax.checkpoint", reason="orbax is not installed: pip install 'policyc[train]'")
from policyc.models.llama import checkpoints, generate, train_step
from policyc.models.llama import model as llama
from policyc.models.llama.configs import ConfigError, ModelConfig, RunConfig
from policyc.models.llama.generate import Generator, Sampling, TrainedModel

pytestmark = pytest.mark.any_jax
SMALL = ModelConfig(
    layers=2, width=32, hidden=64, heads=4, kv_heads=2, head_dim=8, vocab=272, rope_scaling=8.0, compute="float32"
)  # fmt: skip


def make_params(config: ModelConfig = SMALL, scale: float = 10.0) -> llama.Params:
    """Random weights, so large that the most probable tokens vary."""
    random = np.random.default_rng(3)

    def draw(spec: llama.ParamSpec) -> jax.Array:
        if spec.deviation == 0:
            return jax.device_put(np.ones(spec.shape, np.float32))
        # `jnp.asarray` would compile a program for every shape.
        return jax.device_put((scale * spec.deviation * random.normal(size=spec.shape)).astype(np.float32))

    return jax.tree.map(draw, llama.param_specs(config))


def predict_next(params: llama.Params, tokens: jax.Array) -> jax.Array:
    """The most probable token after each prefix of a row, by the model that is trained, without a cache."""
    x = llama.run_blocks(params, tokens, SMALL)[0]
    return jnp.argmax(llama.linear(params, "lm_head", x)[0], axis=-1)


def assert_greedy(prompt: list[int], drawn: list[int], predicted: list[int]) -> None:
    assert drawn == predicted[len(prompt) - 1 : -1]
    assert len(set(drawn)) > len(drawn) // 2  # not the same token again and again


def test_greedy_tokens_are_those_of_the_model_that_is_trained():
    """One generator continues prompts of several lengths: the shorter ones are padded."""
    params = make_params()
    generator = Generator(params, SMALL, Sampling(tokens=12, temperature=0), longest=9)
    oracle = jax.jit(predict_next)
    for prompt in ([5, 7, 11, 250, 3, 17, 2, 9, 80], [42], [1, 2, 3]):
        drawn = list(generator.generate(prompt))
        assert len(drawn) == 12
        # One shape is compiled; what follows changes nothing.
        padded = [*prompt, *drawn, *[0] * (9 - len(prompt))]
        assert_greedy(prompt, drawn, oracle(params, jnp.array([padded])).tolist()[: len(prompt) + 12])
    assert generator._advance._cache_size() == 2  # one program for prompts, one for tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"scan": False}, {"experts": 4, "layers": 1}], ids=["unrolled", "experts"]
)
def test_greedy_tokens_are_those_of_the_model(changes):
    config, prompt = replace(SMALL, **changes), [5, 7, 11]
    params = make_params(config)

    def logits(params: Any, tokens: Any) -> Any:
        return llama.linear(params, "lm_head", llama.run_blocks(params, tokens, config)[0])

    drawn = list(Generator(params, config, Sampling(tokens=10, temperature=0), 3).generate(prompt))
    full = jax.jit(logits)(params, jnp.array([[*prompt, *drawn]]))
    assert_greedy(prompt, drawn, jnp.argmax(full[0], axis=-1).tolist())


# ---- sampling


@pytest.mark.parametrize("temperature", [0, 0.25, 1])
def test_tokens_are_drawn_by_their_probabilities(temperature):
    probabilities = np.array([0.15, 0.1, 0.4, 0.05, 0.3])
    keys, logits = jax.random.split(jax.random.key(0), 2000), jnp.log(jnp.asarray(probabilities, jnp.float32))
    draw = jax.vmap(lambda key: generate.sample(logits, key, Sampling(temperature=temperature)))
    counts = np.bincount(draw(keys), minlength=5)
    weights = probabilities ** (1 / temperature) if temperature else np.eye(5)[2]
    expected = weights / weights.sum()
    # Five standard deviations of a binomial frequency: wrong by chance once in a million draws.
    assert np.all(np.abs(counts / 2000 - expected) <= 5 * np.sqrt(expected * (1 - expected) / 2000))


# ---- texts


def make_model(**changes: Any) -> TrainedModel:
    about = {"config": SMALL, "params": {}, "positions": 32, "name": "runs/a, step 8"}
    return TrainedModel(**(about | changes))


def test_texts_become_bytes_and_back():
    model = make_model()
    assert model.encode("aé".encode()) == [97, 0xC3, 0xA9]
    assert model.encode(b"") == [256]
    assert model.decode([256, 97, 0xC3, 0xA9, 300, 0xFF]) == "aé\ufffd"  # 300 is not a byte


def test_texts_become_tokens_of_a_tokenizer_and_back(tmp_path):
    pytest.importorskip("tokenizers")
    from policyc.models.llama.weights import tokenizer_files

    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer_files(None)["tokenizer.json"])
    tokenizer, end = generate._find_tokenizer(tmp_path, RunConfig(tokenizer=str(path)))
    model = make_model(tokenizer=tokenizer, end=end)
    assert end == 256
    assert model.encode("aé".encode()) == [97, 0xC3, 0xA9]
    assert model.encode(b"") == [256]
    assert model.decode([256, 97, 0xC3, 0xA9]) == "aé"


# ---- folders


def write_run(folder: Path, **settings: Any) -> Path:
    """A folder with the run.json of a small run."""
    folder.mkdir(parents=True)
    settings = (
        vars(SMALL) | vars(RunConfig(**(SHORT | {"data": "stdlib"}))) | settings | {"a_later_setting": 1}
    )
    (folder / "run.json").write_text(json.dumps({"settings": settings, "policy_sha256": None}))
    return folder


def test_a_run_without_checkpoints_or_of_several_seeds_is_refused(tmp_path):
    folder = write_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="run has no checkpoint: train it with --checkpoint-every N"):
        generate.load_trained(folder)
    manager = checkpoints.Checkpoints(folder / "checkpoints", 2, {"seeds": "0,1"})
    manager.save(3, {"params": jnp.ones(4)}, 0)
    manager.close()
    with pytest.raises(ConfigError, match=r"checkpoints/3 holds several seeds, 0,1: use a run of one seed"):
        generate.load_trained(folder)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no run\.json: name the folder of a run"):
        generate.load_trained(tmp_path)
    for text in ("[]", '{"settings": 1}', '{"settings": {"data": 5}}', '{"settings": {"layers": null}}'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(ConfigError, match=r"run\.json cannot be read"):
            generate.load_trained(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": "tokens:corpus.bin"}, r"was trained on tokens \(tokens:corpus\.bin\) without --tokenizer"),
        ({"tokenizer": "gone.json"}, r"with the tokenizer gone\.json, which cannot be found"),
    ],
)
def test_a_run_without_its_tokenizer_is_refused(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        generate.load_trained(write_run(tmp_path / "run", **settings))


# ---- the command


@pytest.fixture
def fake_model(monkeypatch):
    """A model whose continuation of every prompt is 'hé', and then the end of the document."""
    monkeypatch.setattr(generate, "load_trained", lambda *_: make_model())
    monkeypatch.setattr(Generator, "generate", lambda *_: iter([*"hé".encode(), 256, 1]))


@pytest.mark.usefixtures("fake_model")
@pytest.mark.parametrize(("is_terminal", "printed"), [(True, "a\\x1b[2J\n\n"), (False, "a\x1b[2J\n\n")])
def test_a_terminal_gets_no_control_characters(monkeypatch, capsys, is_terminal, printed):
    from policyc.cli.generate import _continue_all

    monkeypatch.setattr(Generator, "generate", lambda *_: iter(b"\x1b[2J\n"))
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    _continue_all(make_model(), [b"a"], Sampling())
    assert capsys.readouterr().out == printed


@pytest.mark.usefixtures("fake_model")
def test_generate_prints_prompts_and_their_continuations():
    ran = command("generate", "runs/a", "--prompt", "a", "--prompt", "", "--tokens", "4")
    assert (ran.code, ran.out) == (0, "ahé\nhé\n")
    assert ran.err == "policyc: runs/a, step 8: float32, at most 4 tokens, temperature 0.8, seed 0\n"
    ran = command("generate", "runs/a", "--prompt", "a", "--tokens", "40", "--temperature", "0")
    assert "warning: 1 + 40 tokens: the model was trained on sequences of 32" in ran.err


@pytest.mark.usefixtures("fake_model")
@pytest.mark.parametrize("words", [["--prompt", "a", "--temperature", "-1"], []])
def test_wrong_options_of_generate_are_refused(words):
    ran = command("generate", "runs/a", *words)
    assert ran.code == 2
    assert (words or ["--prompt"])[-2 if words else 0] in ran.err


@pytest.mark.slow
def test_a_run_gives_its_parameters(tmp_path, monkeypatch):
    """Compared with its initial weights, rounded to bfloat16 except for norms."""
    monkeypatch.chdir(tmp_path)
    run, config = RunConfig(**(SHORT | {"data": "stdlib"})), replace(SMALL, compute="bfloat16")
    write_run(Path("one"), **vars(config))
    manager = checkpoints.Checkpoints(Path("one/checkpoints"), 2, {"seeds": None})
    manager.save(1, train_step.init_state(config, run, make_mesh()), 0)
    manager.close()
    params = generate.load_trained(Path("one")).params
    assert params["norm"].dtype == jnp.float32
    assert params["lm_head"].dtype == jnp.bfloat16
    expected = llama.init_params(jax.random.key(0), SMALL)
    # Compiled and interpreted initial weights differ in their last bit of float32, which may change a bfloat16.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a.astype(jnp.float32), np.asarray(b.astype(jnp.bfloat16), np.float32), rtol=2**-7
        ),
        params,
        expected,
    )
    ran = command("generate", "one", "--prompt", "a", "--tokens", "3")
    assert (ran.code, ran.out[:1]) == (0, "a"), ran.err
    assert "one, step 1, trained under no policy: bfloat16, at most 3 tokens" in ran.err
