"""The forward pass of a server: against NumPy on the bytes of an exported file, and against that of training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import policyc
from policyc.models.llama.configs import ModelConfig
from policyc.serving.arithmetic import SERVER_RULES, Arithmetic, round_cache
from policyc.serving.llama_source import LlamaSource, read_source
from policyc.serving.rollout import (
    compare,
    find_source,
    make_rollout,
    score_batches,
)
from tests.support import rounding_oracle as oracle
from tests.support.served import decode, read_tensors, save, write_stats, write_tensors

TINY = ModelConfig(layers=2, width=32, hidden=48, heads=2, kv_heads=1, head_dim=16, vocab=24)
POLICY = "mlp.*, {q,k,v}_proj -> nvfp4(scale2d=weights); o_proj -> fp8"
SHARED = POLICY.replace("weights", "weights, outer=shared")
AMAX = 1.75  # smaller than some activations, so that static scales clip them
FACTORS = {"norm": 10, "proj": 6, "lm_head": 20}  # so that tokens differ in their probabilities
HEAD = TINY.head_dim
rng = np.random.default_rng(3)
TOKENS = rng.integers(0, TINY.vocab, (3, 13), dtype=np.int32)
BATCH = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:], "mask": np.ones((3, 12), np.int32)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its measurements, and the file that is exported with them."""
    folder = tmp_path_factory.mktemp("rollout")
    save(folder / "hf", TINY)
    larger = {name: array * next((f for word, f in FACTORS.items() if word in name), 1)
              for name, array in read_tensors(folder / "hf").items()}  # fmt: skip
    write_tensors(folder / "hf", {name: array.astype(ml_dtypes.bfloat16) for name, array in larger.items()})
    source = open_source(folder / "hf")
    params = jax.tree.map(np.asarray, source.load())
    policyc.export(
        params, source.plan(policyc.parse(POLICY)), names=source.names(), config=source.hf_config,
        out=folder / "served", stats=write_stats(folder / "stats.jsonl", AMAX), about={"source": str(folder / "hf")},
    )  # fmt: skip
    return folder


def open_source(folder: Path) -> LlamaSource:
    """In float32, in which NumPy and XLA differ by the order of sums only."""
    source = read_source(folder)
    return replace(source, model=replace(source.model, compute="float32"))


# ---- a Llama in NumPy, from the tensors of a file

Quantize = Callable[[np.ndarray], np.ndarray]


def fp4_rows(x: np.ndarray, how: str) -> np.ndarray:
    if how == "none":
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)
    if how == "token":
        return np.concatenate([oracle.nvfp4(row[None])["dequantized"] for row in x])
    amax = np.float32(AMAX) if how == "static" else np.abs(x).max()
    return oracle.nvfp4(np.clip(x, -amax, amax), amax=amax)["dequantized"]


def fp8_rows(x: np.ndarray, how: str) -> np.ndarray:
    if how == "none":
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)
    amax = {"static": np.float32(AMAX), "dynamic": np.abs(x).max(), "token": np.abs(x).max(1, keepdims=True)}[
        how
    ]
    scaled = np.clip(x * (np.float32(448) / amax), -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return scaled.astype(np.float32) * (amax / np.float32(448))


def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + TINY.norm_eps) * scale


def rotate(x: np.ndarray) -> np.ndarray:
    """Rotary positions of (rows, tokens, heads, head_dim)."""
    angles = np.arange(x.shape[1])[:, None] * TINY.rope_theta ** (-np.arange(0, HEAD, 2) / HEAD)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(np.float32)


def forward(tensors: dict[str, np.ndarray], how: str, kv_cache: str) -> np.ndarray:
    """The logits of BATCH."""
    plain = {name: array.astype(np.float32) for name, array in tensors.items()}
    rows, length = BATCH["tokens"].shape
    x = plain["model.embed_tokens.weight"][BATCH["tokens"].reshape(-1)]

    def linear(module: str, x: np.ndarray) -> np.ndarray:
        return fp4_rows(x, how) @ decode(tensors, module).T

    for layer in (f"model.layers.{number}" for number in range(TINY.layers)):
        h = norm(x, plain[f"{layer}.input_layernorm.weight"])
        q, k, v = (linear(f"{layer}.self_attn.{n}_proj", h).reshape(rows, length, -1, HEAD) for n in "qkv")
        q, k = rotate(q), rotate(k)
        if kv_cache == "fp8":
            k, v = (np.clip(t, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) for t in (k, v))
        k, v = (np.repeat(t, TINY.heads // TINY.kv_heads, 2) for t in (k, v))
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(HEAD)
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        y = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)
        o = f"{layer}.self_attn.o_proj"
        y = fp8_rows(y.reshape(rows * length, -1).astype(np.float32), how)
        x = x + y @ (plain[f"{o}.weight"] * plain[f"{o}.weight_scale"]).T
        h = norm(x, plain[f"{layer}.post_attention_layernorm.weight"])
        gate, up = (linear(f"{layer}.mlp.{name}_proj", h) for name in ("gate", "up"))
        x = x + linear(f"{layer}.mlp.down_proj", (gate / (1 + np.exp(-gate)) * up).astype(np.float32))
    logits = norm(x, plain["model.norm.weight"]) @ plain["lm_head.weight"].T
    return logits.reshape(rows, length, -1)


MODES = [("static", "fp8"), ("dynamic", "bf16"), ("token", "bf16"), ("none", "fp8")]


@pytest.mark.parametrize(("how", "kv_cache"), MODES)
def test_a_server_computes_what_numpy_computes_from_the_file(how: Any, kv_cache: Any, folders: Path) -> None:
    """Sums in another order may round a code the other way, which changes the later tokens of its row."""
    source = open_source(folders / "hf")
    options: dict[str, Any] = {"served": folders / "served"} if how == "static" else {"activations": how}
    rollout = make_rollout(source, policyc.parse(POLICY), SERVER_RULES["vllm"], kv_cache=kv_cache, **options)
    logp, _ = rollout.scorer()(rollout.served, BATCH)
    tensors = read_tensors(folders / "served")

    def errors(how: str, kv_cache: str) -> np.ndarray:
        logits = forward(tensors, how, kv_cache).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return np.abs(np.take_along_axis(expected, BATCH["targets"][..., None], -1)[..., 0] - logp)

    assert np.quantile(errors(how, kv_cache), 0.75) < 1e-5
    for other in {*MODES, (how, "bf16"), (how, "fp8")} - {(how, kv_cache)}:
        assert np.quantile(errors(*other), 0.25) > 1e-2, other


# ---- against training


def test_dynamic_scales_leave_no_gap_if_weights_share_theirs(folders: Path) -> None:
    """Dynamic scales of tensors are those of training, so every bit is. Weights under several scales are not."""
    source = open_source(folders / "hf")
    policy = policyc.parse(SHARED)
    rollout = make_rollout(source, policy, SERVER_RULES["trtllm"])
    assert rollout.arithmetic == Arithmetic(activations={"nvfp4": "dynamic", "fp8": "dynamic"})
    gap = rollout.gap([BATCH])
    assert (gap.nats, gap.kl, gap.agreement, gap.tokens) == (0, 0, 1, 36)
    gap = make_rollout(source, policyc.parse(POLICY), SERVER_RULES["trtllm"]).gap([BATCH])
    assert gap.nats != 0
    assert gap.kl > 0


def test_training_has_no_gap_to_itself_and_other_weights_have_one(folders: Path) -> None:
    source = open_source(folders / "hf")
    rollout = make_rollout(source, policyc.parse(POLICY), None)
    gap = rollout.gap([BATCH])
    assert (gap.nats, gap.kl, gap.agreement) == (0, 0, 1)
    other = {**rollout.params, "lm_head": rollout.params["lm_head"][:, ::-1]}
    gap = replace(rollout, served=other).gap([BATCH])
    assert gap.kl > 1e-3
    assert gap.agreement < 0.5


def test_k3_and_agreement_by_their_formulas() -> None:
    random = np.random.default_rng(0)
    a, b = (random.normal(-3, 1, (2, 3, 5)).astype(np.float32) for _ in range(2))
    top, other = (random.integers(0, 2, (2, 3, 5)) for _ in range(2))
    mask = random.integers(0, 2, (2, 3, 5))
    gap = compare(list(zip(a, top, strict=True)), list(zip(b, other, strict=True)), list(mask))
    kept = mask == 1
    d = (b.astype(np.float64) - a)[kept]
    assert gap.kl == pytest.approx(np.mean(np.exp(d) - 1 - d))
    assert gap.nats == pytest.approx(-d.mean())
    assert gap.agreement == np.mean((top == other)[kept])
    assert gap.tokens == kept.sum()


def test_the_cache_rounds_to_e4m3() -> None:
    x = np.concatenate([np.linspace(-500, 500, 999), np.geomspace(1e-4, 1, 500)]).astype(ml_dtypes.bfloat16)
    expected = np.clip(x.astype(np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(x.dtype)
    np.testing.assert_array_equal(jax.jit(round_cache)(x), expected)


def test_layers_that_are_kept_have_no_limit(folders: Path) -> None:
    """The second block is in BF16. Its padding must stay finite: attention multiplies it by 0."""
    policy = policyc.parse("* where layer == 0 and weight -> nvfp4")
    rollout = make_rollout(
        open_source(folders / "hf"), policy, SERVER_RULES["vllm"], stats=folders / "stats.jsonl"
    )
    assert np.isinf(rollout.served["layers"]["mlp"]["down_limit"]).tolist() == [False, True]
    ((logp, _),) = score_batches(rollout.scorer(), rollout.served, [BATCH])
    assert np.isfinite(logp).all()


def test_a_continuation_is_what_each_step_finds_most_likely(folders: Path) -> None:
    """Static scales do not depend on the tokens that are not known yet."""
    source = open_source(folders / "hf")
    rollout = make_rollout(source, policyc.parse(POLICY), SERVER_RULES["vllm"], served=folders / "served")
    batch = rollout.generate([3, 1, 4], 5)
    row = [*batch["tokens"][0], batch["targets"][0, -1]]
    assert row[:3] == [3, 1, 4]
    assert batch["mask"][0].tolist() == [0, 0, 1, 1, 1, 1, 1]
    _, ((top),) = rollout.scorer()(rollout.served, batch)
    np.testing.assert_array_equal(top[2:], row[3:])
    sampled = [rollout.generate([3, 1, 4], 5, 2.0, seed)["targets"][0, 2:].tolist() for seed in (0, 1, 1)]
    assert sampled[0] != sampled[1] == sampled[2]


# ---- folders


def test_a_served_folder_names_its_source_and_policy(folders: Path, tmp_path: Path) -> None:
    source, is_served = find_source(folders / "served")
    assert is_served
    assert source.folder == folders / "hf"
    assert source.trained_policy.sha256 == policyc.parse(POLICY).sha256
    assert find_source(folders / "hf") == (read_source(folders / "hf"), False)
    assert find_source(folders / "served", folders / "hf")[1]
    about = (folders / "served" / "policyc.json").read_text()
    (tmp_path / "policyc.json").write_text(about.replace("/hf", "/no"))
    with pytest.raises(ValueError, match="was exported from"):
        find_source(tmp_path)


def test_other_codes_than_those_of_the_policy_are_refused(folders: Path, tmp_path: Path) -> None:
    served = tmp_path / "served"
    served.mkdir()
    for file in (folders / "served").glob("*.json"):
        (served / file.name).write_text(file.read_text())
    tensors = {name: array.copy() for name, array in read_tensors(folders / "served").items()}
    tensors["model.layers.0.mlp.up_proj.weight_packed"][3, 1] ^= 1
    write_tensors(served, tensors)
    with pytest.raises(ValueError, match=r"^model\.layers\.0\.mlp\.up_proj: .* other codes"):
        make_rollout(open_source(folders / "hf"), policyc.parse(POLICY), SERVER_RULES["vllm"], served=served)


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (POLICY, {"activations": "static"}, "and 11 more: no static scale is known"),
        ("mlp.* -> mxfp8", {}, "write nvfp4 or fp8"),
        ("q_proj -> nvfp4; k_proj, v_proj -> fp8", {}, "servers run these linears as one"),
    ],
)
def test_what_a_server_cannot_run_is_refused(policy: str, options: Any, message: str, folders: Path) -> None:
    with pytest.raises(ValueError, match=message):
        make_rollout(open_source(folders / "hf"), policyc.parse(policy), SERVER_RULES["vllm"], **options)


def test_a_model_without_a_scan_has_the_same_limits(folders: Path) -> None:
    source = open_source(folders / "hf")
    options: dict[str, Any] = {"server": SERVER_RULES["vllm"], "served": folders / "served"}
    stacked = make_rollout(source, policyc.parse(POLICY), **options)
    unrolled = replace(source, model=replace(source.model, scan=False))
    listed = make_rollout(unrolled, policyc.parse(POLICY), **options)
    assert isinstance(listed.served["layers"], list)
    for part in ("attention", "mlp"):
        limits = {k: v for k, v in stacked.served["layers"][part].items() if k.endswith("_limit")}
        assert len(limits) == 2
        assert {k: listed.served["layers"][0][part][k] for k in limits} == {
            k: v[0] for k, v in limits.items()
        }
