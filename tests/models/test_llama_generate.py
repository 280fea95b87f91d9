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

import policyc
from tests.support.command import policyc as command
from tests.support.llama_runs import SHORT, make_mesh

pytest.importorskip("orbax.checkpoint", reason="orbax is not installed: pip install 'policyc[train]'")
from policyc.models.llama import checkpoints, generate, partition, train_step, trained, weights
from policyc.models.llama import model as llama
from policyc.models.llama.checkpoints import DamagedCheckpointError
from policyc.models.llama.configs import ConfigError, ModelConfig, RunConfig, runs_of_seeds
from policyc.models.llama.generate import Generator, Sampling

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
    ("changes", "policy"),
    [
        ({"layers": 1}, "mlp.* -> mxfp4"),
        ({"scan": False}, None),
        ({"experts": 4, "layers": 1}, None),
    ],
    ids=["policy", "unrolled", "experts"],
)
def test_greedy_tokens_are_those_of_the_model(changes, policy):
    """MXFP4 scales the blocks of a token: it does not matter which other tokens are computed with it."""
    config, prompt = replace(SMALL, **changes), [5, 7, 11]
    params = make_params(config)

    def transform(function: Any) -> Any:
        return policyc.apply(policy, function, has_aux=True)

    def logits(params: Any, tokens: Any) -> Any:
        return llama.linear(params, "lm_head", llama.run_blocks(params, tokens, config)[0]), None

    sampling = Sampling(tokens=10, temperature=0)
    generator = Generator(params, config, sampling, 3, transform if policy else None)
    drawn = list(generator.generate(prompt))
    full = jax.jit(transform(logits) if policy else logits)(params, jnp.array([[*prompt, *drawn]]))[0]
    assert_greedy(prompt, drawn, jnp.argmax(full[0], axis=-1).tolist())
    if policy:
        assert drawn != list(Generator(params, config, sampling, 3).generate(prompt))


def test_a_policy_reaches_the_weights_by_name():
    """Traced, not compiled."""
    params, cache = make_params(), generate.make_cache(SMALL, 4)
    function = policyc.apply(
        "layers.attention.q_proj, layers.mlp.* -> mxfp8\nlm_head -> bf16",
        lambda *args: generate.forward(*args, config=SMALL), has_aux=True,
    )  # fmt: skip
    text = str(jax.make_jaxpr(function)(params, cache, jnp.zeros((1, 1), jnp.int32), 0, 0))
    assert text.count("scaled_gemm") >= 4


# ---- sampling


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(temperature=0), {2}),
        (Sampling(temperature=1.0), {0, 1, 2, 3, 4}),
        (Sampling(temperature=1.0, top_k=2), {2, 4}),
        (Sampling(temperature=1.0, top_p=0.71), {2, 4, 0}),  # 0.4 + 0.3 is not enough
        (Sampling(temperature=1.0, top_k=3, top_p=0.95), {2, 4, 0}),
        (Sampling(temperature=0.25, top_k=9, top_p=0.1), {2}),  # never nothing
        (Sampling(temperature=0.25, top_p=0.7), {2}),  # 0.4**4 is 73 % of the sum of all fourth powers
    ],
    ids=str,
)
def test_tokens_are_drawn_from_the_allowed_ones(sampling, allowed):
    probabilities = np.array([0.15, 0.1, 0.4, 0.05, 0.3])
    keys = jax.random.split(jax.random.key(0), 2000)
    draw = jax.vmap(
        lambda key: generate.sample(jnp.log(jnp.asarray(probabilities, jnp.float32)), key, sampling)
    )
    counts = np.bincount(draw(keys), minlength=5)
    assert set(np.flatnonzero(counts)) == allowed
    weights = np.where(
        [n in allowed for n in range(5)], probabilities ** (1 / (sampling.temperature or 1)), 0
    )
    expected = weights / weights.sum()
    # Five standard deviations of a binomial frequency: wrong by chance once in a million draws.
    assert np.all(np.abs(counts / 2000 - expected) <= 5 * np.sqrt(expected * (1 - expected) / 2000))


# ---- texts


def test_bytes_are_printed_when_their_characters_are_complete():
    codec = trained.ByteCodec()
    assert codec.encode("aé".encode()) == [97, 0xC3, 0xA9]
    assert list(codec.decode([97], [0xC3, 0xA9, 98, 300, 0xFF])) == ["", "é", "b", "", "\ufffd", ""]
    # Begun in the prompt; never completed.
    assert "".join(codec.decode([97, 0xC3], [0xA9, 0xE2])) == "é\ufffd"


def test_a_tokenizer_prints_what_a_token_adds(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from policyc.models.llama.weights import tokenizer_files

    (tmp_path / "tokenizer.json").write_text(tokenizer_files(None)["tokenizer.json"])
    codec = trained.TokenizerCodec(tmp_path / "tokenizer.json")
    assert codec.end == 256
    assert codec.encode("aé".encode()) == [97, 0xC3, 0xA9]
    assert list(codec.decode([97], [0xC3, 0xA9, 98])) == ["é", "b", ""]
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    words.decoder = tokenizers.decoders.Metaspace()
    words.save(str(tmp_path / "words.json"))
    codec = trained.TokenizerCodec(tmp_path / "words.json")
    assert codec.end == 2
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        trained.TokenizerCodec(tmp_path / "none.json")


# ---- folders


def save_params(folder: Path, **identity: Any) -> dict[str, Any]:
    """A checkpoint of step 3. Its state has leaves before and after the parameters."""
    leaves = {name: np.arange(4, dtype=np.float32) + n for n, name in enumerate(("adam", "zeta"))}
    state = {**leaves, "params": {"norm": np.ones(4, np.float32), "w": np.arange(8, dtype=np.float32)}}
    manager = checkpoints.Checkpoints(folder, 2, identity)
    manager.save(3, jax.tree.map(jnp.asarray, state), 0)
    manager.close()
    return state


def test_parameters_are_read_without_the_rest_and_compared_with_their_hash(tmp_path):
    folder = tmp_path / "checkpoints"
    state = save_params(folder, seeds=None, steps=8)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(lambda a: partition.abstract_array(a.shape, a.dtype, sharding), state)
    before = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*"))
    params, identity = checkpoints.read_params(folder, 3, lambda _: shapes)
    jax.tree.map(np.testing.assert_array_equal, params, state["params"])
    assert identity == {"seeds": None, "steps": 8}
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*")) == before
    about = folder / "3" / "about" / "metadata"
    text = json.loads(about.read_text())
    digits = text["state"]

    def replace_hash(changed: str) -> None:
        other = {name: value for name, value in text.items() if name != "hash"} | {"state": changed}
        about.write_text(json.dumps(other | {"hash": checkpoints._hash_json(other)}))

    replace_hash("0" * 16 + digits[16:])  # of the optimizer: not read
    checkpoints.read_params(folder, 3, lambda _: shapes)
    replace_hash(digits[:16] + "0" * 16 + digits[32:])
    with pytest.raises(DamagedCheckpointError, match="its contents are not those that were written"):
        checkpoints.read_params(folder, 3, lambda _: shapes)
    about.write_text(json.dumps(text))
    data = next(path for path in (folder / "3" / "state").rglob("d/*") if path.is_file())
    data.unlink()
    with pytest.raises(DamagedCheckpointError):
        checkpoints.read_params(folder, 3, lambda _: shapes)
    manager = checkpoints.Checkpoints(folder, 2, {"policy": None, checkpoints.CONTENTS: "endless"})
    with pytest.raises(ConfigError, match=r"no checkpoint of .* can be read"):
        manager.restore(shapes, accept_changes=True)


def test_a_checkpoint_that_the_run_replaces_meanwhile_is_read_anew(tmp_path, monkeypatch):
    """A run goes on: it saved step 6 and removed step 3 while that was read."""
    saved = iter([[3], [6], [6]])
    monkeypatch.setattr(trained, "saved_steps", lambda _: next(saved))

    def read(_: Path, step: int, *__: Any) -> tuple[Any, dict[str, Any]]:
        if step == 3:
            raise DamagedCheckpointError("a file is missing")
        return {"norm": step}, {}

    monkeypatch.setattr(trained, "read_params", read)
    assert trained._read_params(tmp_path, None, SMALL, RunConfig()) == ({"norm": 6}, 6)
    monkeypatch.setattr(trained, "saved_steps", lambda _: [3])
    with pytest.raises(ConfigError, match=r"(?s)/3 is damaged: a file is missing.*--step"):
        trained._read_params(tmp_path, None, SMALL, RunConfig())


def write_run(folder: Path, **settings: Any) -> Path:
    """A folder with the run.json of a small run."""
    folder.mkdir(parents=True)
    settings = (
        vars(SMALL) | vars(RunConfig(**(SHORT | {"data": "stdlib"}))) | settings | {"a_later_setting": 1}
    )
    (folder / "run.json").write_text(json.dumps({"settings": settings, "policy_sha256": None}))
    return folder


def test_a_run_without_checkpoints_is_refused(tmp_path):
    folder = write_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="run has no checkpoint: train it with --checkpoint-every N"):
        trained.load_trained(folder)
    (folder / "exports" / "8").mkdir(parents=True)
    (folder / "exports" / "8" / "config.json").touch()
    with pytest.raises(ConfigError, match=r"run has no checkpoint: use its export .*/run/exports/8"):
        trained.load_trained(folder)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no run\.json and no config\.json: .*RUN/exports/STEP"):
        trained.load_trained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is an export"):
        trained.load_trained(tmp_path, step=3)
    with pytest.raises(ConfigError, match=r"config\.json does not describe a Llama"):
        trained.load_trained(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"run\.json cannot be read"):
        trained.load_trained(tmp_path)


@pytest.mark.parametrize(
    ("settings", "tokenizer", "message"),
    [
        (
            {"data": "tokens:corpus.bin"},
            None,
            r"was trained on tokens \(tokens:corpus\.bin\).*--tokenizer FILE",
        ),
        (
            {"tokenizer": "gone.json"},
            None,
            r"with the tokenizer gone\.json, which is not here: .*--tokenizer FILE",
        ),
        ({}, "gone.json", r"--tokenizer gone\.json: there is no such file"),
    ],
)
def test_a_run_without_its_tokenizer_is_refused(tmp_path, settings, tokenizer, message):
    run = replace(RunConfig(), **settings)
    with pytest.raises(ConfigError, match=message):
        trained._find_codec(tmp_path, run, tokenizer)


# ---- the command


@pytest.fixture
def fake_model(monkeypatch):
    """A model whose continuation of every prompt is 'hé', and then the end of the document."""
    model = trained.TrainedModel(
        config=SMALL, params={}, codec=trained.ByteCodec(), positions=32, name="runs/a, step 8",
        policy="llama_nvfp4 (0123abcd)", step=8, steps=8,
    )  # fmt: skip
    monkeypatch.setattr(trained, "load_trained", lambda *_: model)
    monkeypatch.setattr(Generator, "generate", lambda *_: iter([*"hé".encode(), 256, 1]))


@pytest.mark.usefixtures("fake_model")
@pytest.mark.parametrize(("is_terminal", "printed"), [(True, "a\\x1b[2J\n\n"), (False, "a\x1b[2J\n\n")])
def test_a_terminal_gets_no_control_characters(monkeypatch, capsys, is_terminal, printed):
    from policyc.cli.generate import _continue

    monkeypatch.setattr(Generator, "generate", lambda *_: iter(b"\x1b[2J\n"))
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    generator = object.__new__(Generator)
    _continue(trained.load_trained(Path("a")), generator, 0, (b"a", [97]), "text")
    assert capsys.readouterr().out == printed


@pytest.mark.usefixtures("fake_model")
def test_generate_prints_prompts_and_their_continuations():
    ran = command("generate", "runs/a", "--prompt", "a", "--prompt", "", "--tokens", "4")
    assert (ran.code, ran.out) == (0, "ahé\nhé\n")
    assert ran.err == (
        "policyc: runs/a, step 8: float32, no policy (trained under llama_nvfp4 (0123abcd)); "
        "at most 4 tokens, temperature 0.8, top-k all, top-p 1, seed 0\n"
    )
    ran = command(
        "generate", "runs/a", "--prompt", "a", "--tokens", "40", "--format", "json", "--temperature", "0"
    )
    assert json.loads(ran.out) == {"prompt": "a", "text": "hé", "tokens": [104, 0xC3, 0xA9], "ended": True}
    assert "warning: 1 + 40 tokens: the model was trained on sequences of 32" in ran.err
    assert (
        "no policy (trained under llama_nvfp4 (0123abcd)); at most 40 tokens, the most probable ones"
        in ran.err
    )


@pytest.mark.usefixtures("fake_model")
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--prompt", "a", "--policy", "no_such_policy"], 2, "no bundled policy of that name"),
        (["--prompt", "a", "--temperature", "-1"], 2, "--temperature"),
        (["--prompt", "a", "--top-p", "0"], 2, "--top-p"),
    ],
)
def test_wrong_options_of_generate_are_refused(words, code, message):
    ran = command("generate", "runs/a", *words)
    assert ran.code == code, ran.err
    assert message in ran.err


def save_first_step(out: Path, seeds: str | None) -> None:
    """The folders of a run, or of several seeds, with a checkpoint of the initial state."""
    run = RunConfig(**(SHORT | {"data": "stdlib"}), seeds=seeds)
    config, mesh = replace(SMALL, compute="bfloat16"), make_mesh()
    folders = [out] if seeds is None else [out / f"seed{seed}" for seed in seeds.split(",")]
    for folder, one in zip(folders, runs_of_seeds(run), strict=True):
        write_run(folder, **vars(config), seed=one.seed)
    manager = checkpoints.Checkpoints(folders[0] / "checkpoints", 2, {"seeds": seeds})
    manager.save(1, train_step.init_state(config, run, mesh), 0)
    manager.close()


@pytest.mark.slow
def test_runs_seeds_and_exports_give_their_parameters(tmp_path, monkeypatch):
    """Compared with the initial weights of each seed, rounded to bfloat16 except for norms."""
    monkeypatch.chdir(tmp_path)
    save_first_step(Path("one"), None)
    save_first_step(Path("many"), "1,0")
    expected = {}
    for seed in (0, 1):
        params = llama.init_params(jax.random.key(seed), SMALL)
        expected[seed] = jax.tree.map(
            lambda array: np.asarray(array.astype(jnp.bfloat16), np.float32), params
        )
    files = weights.export_files(SMALL, 32, None)
    weights.save_safetensors(expected[1], SMALL, Path("export"), files)
    for name, seed in (("one", 0), ("many/seed0", 0), ("many/seed1", 1), ("export", 1)):
        params = trained.load_trained(Path(name)).params
        assert params["norm"].dtype == jnp.float32
        assert params["lm_head"].dtype == jnp.bfloat16
        # Compiled and interpreted initial weights differ in their last bit of float32, which may change a bfloat16.
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=2**-7),
            params,
            expected[seed],
        )
    ran = command("generate", "one", "--prompt", "a", "--step", "2")
    assert (ran.code, "has no checkpoint of step 2: there are 1" in ran.err) == (1, True)
    ran = command("generate", "one", "--prompt", "a", "--tokens", "3", "--policy", "bf16")
    assert (ran.code, ran.out[:1]) == (0, "a"), ran.err
    assert "one, step 1: bfloat16, policy bf16, backend auto; at most " in ran.err


@pytest.mark.parametrize("is_new", [False, True])
def test_a_config_of_another_program_is_read(tmp_path, is_new):
    """Transformers 4 has rope_scaling and torch_dtype, transformers 5 has rope_parameters and dtype."""
    content = json.loads(weights.export_files(replace(SMALL, experts=4), 64, None)["config.json"])
    if is_new:
        rope = content.pop("rope_scaling") | {"rope_theta": content.pop("rope_theta")}
        content |= {"rope_parameters": rope, "dtype": content.pop("torch_dtype")}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert weights.read_config(tmp_path) == (replace(SMALL, experts=4, compute="bfloat16"), 64)
    del content["head_dim"], content["num_key_value_heads"]  # optional
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert weights.read_config(tmp_path)[0].kv_heads == SMALL.heads
