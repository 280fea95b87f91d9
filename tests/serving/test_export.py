"""Exported codes: those of training, by an oracle of the formats and by what training quantizes."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import policyc
from policyc.models.llama import model as llama
from policyc.models.llama.configs import RunConfig
from policyc.models.llama.weights import hf_tensors, tensor_names
from policyc.numerics import operands, primitives
from policyc.numerics.quantize import block_values
from policyc.serving.audit import Reference, audit
from policyc.serving.linears import find_linears
from policyc.serving.llama_source import LlamaSource, read_source
from policyc.serving.loaders import FUSED, find_algorithms
from tests.support import rounding_oracle as oracle
from tests.support.command import ROOT
from tests.support.served import (
    MIXTURE,
    SMALL,
    decode,
    random_params,
    read_tensors,
    save,
    write_stats,
    write_tensors,
)

FUSED_PARTS = {part: parts for parts in FUSED.values() for part in parts}


def export(folder: Path, policy: str, **options: Any) -> tuple[Any, dict[str, np.ndarray]]:
    source = read_source(folder)
    options = {"names": source.names(), "config": source.hf_config, "out": folder.parent / "out", **options}
    written = policyc.export(
        jax.tree.map(np.asarray, source.load()), source.plan(policyc.parse(policy)), **options
    )
    return written, read_tensors(written.folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model") / "hf")


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """The model in a folder of the test."""
    (tmp_path / "hf").symlink_to(model)
    return tmp_path / "hf"


def master(folder: Path, module: str) -> np.ndarray:
    return read_tensors(folder)[f"{module}.weight"].astype(np.float32)


RECIPES = {
    "nvfp4": {},
    "nvfp4(scale2d=weights)": {"tile": 16},
    "nvfp4(rht=wgrad, sr=grad, scale2d=weights, outer=shared)": {"tile": 16},
}


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_and_scales_are_those_of_the_specification(recipe: str, format: str, folder: Path) -> None:
    """A linear that servers run alone has its own maximum, others that of their group."""
    _, tensors = export(folder, f"mlp.* -> {recipe}; q_proj, k_proj, v_proj -> {recipe}", format=format)
    is_modelopt = format == "modelopt"
    for name in ("mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "self_attn.k_proj"):
        module = f"model.layers.1.{name}"
        parent, _, last = module.rpartition(".")
        group = [master(folder, f"{parent}.{part}") for part in FUSED_PARTS.get(last, (last,))]
        amax = np.float32(max(np.abs(weight).max() for weight in group))
        expected = oracle.nvfp4(master(folder, module), amax=amax, **RECIPES[recipe])
        packed = tensors[f"{module}.weight" if is_modelopt else f"{module}.weight_packed"]
        assert packed.dtype == np.uint8
        np.testing.assert_array_equal(packed & 15, expected["codes"][:, ::2])
        np.testing.assert_array_equal(packed >> 4, expected["codes"][:, 1::2])
        rows = np.repeat(expected["scales"], RECIPES[recipe].get("tile", 1), 0)
        np.testing.assert_array_equal(tensors[f"{module}.weight_scale"].view(np.uint8), rows)
        if is_modelopt:
            assert tensors[f"{module}.weight_scale_2"] == amax / np.float32(2688)
            np.testing.assert_array_equal(decode(tensors, module), expected["dequantized"])
        else:
            assert tensors[f"{module}.weight_global_scale"] == [1 / (amax / np.float32(2688))]


def test_fp8_and_unquantized_linears_are_in_the_same_file(folder: Path) -> None:
    policy = "mlp.* -> nvfp4; o_proj -> fp8"
    _, tensors = export(folder, policy)
    weight = master(folder, "model.layers.0.self_attn.o_proj")
    amax = np.abs(weight).max()
    expected = np.clip(weight * (np.float32(448) / amax), -448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(tensors["model.layers.0.self_attn.o_proj.weight"], expected)
    assert tensors["model.layers.0.self_attn.o_proj.weight_scale"] == [amax / np.float32(448)]
    plain = read_tensors(folder)
    for name in (
        "model.embed_tokens",
        "model.layers.1.self_attn.q_proj",
        "lm_head",
        "model.layers.1.input_layernorm",
    ):
        np.testing.assert_array_equal(tensors[f"{name}.weight"], plain[f"{name}.weight"])
    assert {n.rpartition(".")[0] for n in tensors} == {n.rpartition(".")[0] for n in plain}


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
def test_fp8_may_have_a_scale_for_each_row(format: str, folder: Path, tmp_path: Path) -> None:
    """Then fused layers need no common scale, and activations are scaled per token, whatever was measured."""
    stats = write_stats(tmp_path / "stats.jsonl")
    written, tensors = export(folder, "q_proj, k_proj, v_proj, o_proj -> fp8(outer=row)", format=format, exact=True,
                              stats=stats)  # fmt: skip
    assert written.counts == {"fp8-row with dynamic input scales": 8}
    for name in ("q_proj", "o_proj"):
        module = f"model.layers.1.self_attn.{name}"
        weight = master(folder, module)
        amax = np.abs(weight).max(1, keepdims=True)
        expected = np.clip(weight * (np.float32(448) / amax), -448, 448).astype(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(tensors[f"{module}.weight"], expected)
        scales = tensors[f"{module}.weight_scale"]
        assert scales.shape == (amax.shape if format == "compressed-tensors" else amax.shape[:1])
        np.testing.assert_array_equal(scales.reshape(-1), (amax / np.float32(448)).reshape(-1))
        assert f"{module}.input_scale" not in tensors
    config = json.loads((written.folder / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert (group["weights"]["strategy"], group["input_activations"]["strategy"]) == ("channel", "token")
    assert config.get("quant_algo", "FP8_PER_CHANNEL_PER_TOKEN") == "FP8_PER_CHANNEL_PER_TOKEN"
    assert not audit(written.folder).findings


@pytest.mark.parametrize(
    "recipe",
    [
        "nvfp4",
        "nvfp4(scale2d=weights)",
        "nvfp4(scale=four_over_six)",
        "fp8",
        "fp8(outer=row)",
        "nvfp4(scale2d=weights, outer=shared)",
    ],
)
def test_the_file_has_what_training_quantizes(
    recipe: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records every weight that the differentiated loss quantizes."""
    quantized: list[np.ndarray] = []
    original = primitives.quantize, primitives.quantize_pair

    def of_tensor(amax: Any) -> Any:
        return np.asarray(amax) if recipe == "fp8(outer=row)" else np.float32(amax).max()

    def record(q: Any, operand: str) -> None:
        if operand == "fprop.rhs":
            jax.debug.callback(lambda v, a: quantized.append(np.asarray(v, np.float32) * of_tensor(a)),
                               block_values(q, jnp.float32), q.amax)  # fmt: skip

    def quantize(x: jax.Array, request: Any, **options: Any) -> Any:
        q = original[0](x, request, **options)
        record(q, request.operand)
        return q

    def quantize_pair(x: jax.Array, requests: Any, **options: Any) -> Any:
        pair = original[1](x, requests, **options)
        record(pair[0], requests[0].operand)
        return pair

    monkeypatch.setattr(operands.primitives, "quantize", quantize)
    monkeypatch.setattr(operands.primitives, "quantize_pair", quantize_pair)
    source = read_source(folder)
    params = source.load()
    policy = policyc.parse(f"down_proj, o_proj{', gate_proj, up_proj' * ('shared' in recipe)} -> {recipe}")
    tokens = jnp.zeros((1, 16), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens, "mask": tokens}
    loss = policyc.apply(policy, lambda p: llama.loss(p, batch, SMALL)[0])
    jax.block_until_ready(jax.grad(loss)(params))
    jax.effects_barrier()
    monkeypatch.undo()
    _, tensors = export(folder, str(policy), exact=True)
    seen = {values.tobytes() for values in quantized}
    linears = ("mlp.down_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")
    for layer in range(SMALL.layers):
        for name in linears if "shared" in recipe else linears[:2]:
            module = f"model.layers.{layer}.{name}"
            group = FUSED_PARTS.get(module.rpartition(".")[2], (module.rpartition(".")[2],))
            parent = module.rpartition(".")[0]
            amax = max(np.abs(master(folder, f"{parent}.{part}")).max() for part in group)
            if recipe == "fp8(outer=row)":
                amax = np.abs(master(folder, module)).max(1, keepdims=True)
            if recipe.startswith("fp8"):
                values = tensors[f"{module}.weight"].astype(np.float32)
            else:
                values = decode({**tensors, f"{module}.weight_global_scale": np.float32(1)}, module)
            assert np.ascontiguousarray((values * amax).T).tobytes() in seen, module


def test_fused_layers_share_a_scale_and_the_change_is_reported(folder: Path, tmp_path: Path) -> None:
    written, tensors = export(folder, "mlp.* -> nvfp4")
    changed = {change.module: change for change in written.changes}
    for layer in range(SMALL.layers):
        names = [f"model.layers.{layer}.mlp.{name}" for name in ("gate_proj", "up_proj")]
        smaller = min(names, key=lambda name: np.abs(master(folder, name)).max())
        assert set(names) & set(changed) == {smaller}  # the other one has the maximum of the group
        own, stored = oracle.nvfp4(master(folder, smaller)), decode(tensors, smaller)
        distance = np.linalg.norm(own["dequantized"] - stored) / np.linalg.norm(own["dequantized"])
        assert changed[smaller].difference == pytest.approx(distance, rel=1e-5)  # 1 / scale is rounded
    with pytest.raises(ValueError, match="gate_up_proj one outer scale: train with outer=shared"):
        export(folder, "mlp.* -> nvfp4", exact=True, out=tmp_path / "exact")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "out"]
    assert not export(folder, "down_proj, o_proj -> nvfp4", exact=True, out=tmp_path / "exact")[0].changes


def test_the_policy_for_rollout_exports_exactly(folder: Path) -> None:
    written, tensors = export(folder, str(policyc.load("rollout_nvfp4")), exact=True)
    assert not written.changes
    assert "model.layers.0.mlp.up_proj.weight_packed" in tensors


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
def test_static_scales_are_those_of_the_last_measurements(format: str, folder: Path, tmp_path: Path) -> None:
    rows = [{"step": step, "site": f"layers.mlp.{name}_proj", "layer": layer, "operand": "fprop.activation",
             "amax": (100 if step == 0 else 1) * (layer + 1)}
            for step in range(12) for layer in range(2) for name in ("gate", "up", "down")]  # fmt: skip
    stats = tmp_path / "stats.jsonl"
    stats.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"torn')
    _, tensors = export(folder, "mlp.* -> nvfp4", stats=stats, format=format)
    scale = np.float32(2) / np.float32(2688)
    if format == "modelopt":
        assert tensors["model.layers.1.mlp.up_proj.input_scale"] == scale
    else:
        assert tensors["model.layers.1.mlp.up_proj.input_global_scale"] == [1 / scale]
    with pytest.raises(ValueError, match=r"no activation of layers\.attention\.o_proj, layer 0"):
        export(folder, "o_proj -> nvfp4", stats=stats, out=tmp_path / "other")


REFUSED = {
    "mlp.* -> mxfp8": "write nvfp4 or fp8",
    "mlp.* -> nvfp4(sr=fprop)": "write sr=grad",
    "mlp.* -> nvfp4(mean_split=on)": "leave out mean_split",
    "mlp.* -> nvfp4(outer=row)": "write outer=tensor",
    "mlp.* -> nvfp4(scale2d=all)": "write scale2d=weights",
    "mlp.* -> nvfp4(rht=all)": "write rht=wgrad",
    "gate_proj -> nvfp4": "gate_up_proj: gate_proj nvfp4, up_proj bf16",
    "q_proj, k_proj, v_proj -> fp8; v_proj -> nvfp4": "give them one recipe",
    "scores -> nvfp4": "write keep",
    "* -> bf16": "nothing to export",
}


@pytest.mark.parametrize("policy", REFUSED)
def test_what_no_server_has_is_refused_with_the_edit(policy: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=REFUSED[policy]):
        export(folder, policy)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_a_contracted_dimension_needs_whole_blocks(tmp_path: Path) -> None:
    folder = save(tmp_path / "hf", SMALL.__class__(**{**vars_of(SMALL), "hidden": 40}))
    with pytest.raises(ValueError, match=r"down_proj: k is not a multiple of 16.*where k % 16 != 0"):
        export(folder, "mlp.* -> nvfp4")


def vars_of(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
def test_experts_have_the_names_of_mixtral_and_a_scale_each(format: str, tmp_path: Path) -> None:
    """w1 and w3 of an expert share an outer scale; each w2 has the codes of training. The router is kept."""
    folder = save(tmp_path / "hf", MIXTURE)
    written, tensors = export(folder, "experts -> nvfp4(scale2d=weights)", format=format)
    assert written.counts == {"nvfp4 with no input scales": MIXTURE.layers * MIXTURE.experts * 3}
    for expert in range(MIXTURE.experts):
        moe = "model.layers.1.block_sparse_moe"
        experts = {name: f"{moe}.experts.{expert}.{name}" for name in ("w1", "w2", "w3")}
        weights = {name: master(folder, module) for name, module in experts.items()}
        fused = max(np.abs(weights[name]).max() for name in ("w1", "w3"))
        for name, module in experts.items():
            amax = np.abs(weights[name]).max() if name == "w2" else fused
            expected = oracle.nvfp4(weights[name], amax=np.float32(amax), tile=16)["dequantized"]
            rtol = 0 if format == "modelopt" else 3e-7  # 1 / scale is rounded
            np.testing.assert_allclose(decode(tensors, module), expected, rtol=rtol)
    config = json.loads((written.folder / "config.json").read_text())["quantization_config"]
    assert {f"{moe}.gate", "lm_head"} <= set(config["ignore"])
    assert not any("experts" in name for name in config["ignore"])
    assert {change.module.rpartition(".")[2] for change in written.changes} <= {"w1", "w3"}
    source = read_source(folder)
    plan = source.plan(policyc.parse("experts -> nvfp4(scale2d=weights)"))
    linears = find_linears(source.load(), plan, source.phase(plan), source.names())
    result = audit(written.folder, Reference(linears=linears, has_weights=True))
    assert not result.findings
    assert {row.changed for row in result.linears if row.format} >= {0.0}
    with pytest.raises(ValueError, match=r"experts\.0\.w13 one outer scale: keep these experts"):
        export(folder, "experts -> nvfp4", exact=True, out=tmp_path / "exact")


def test_names_cover_every_parameter_of_the_bundled_models() -> None:
    for config in (SMALL, MIXTURE):
        names = tensor_names(config)
        tensors = {
            names[".".join(str(k.key) for k in path)].format(layer=layer, expert=expert)
            for path, _ in jax.tree.leaves_with_path(llama.param_specs(config))
            for layer in range(config.layers)
            for expert in range(config.experts or 1)
        }
        paths = jax.tree.leaves_with_path(llama.param_specs(config))
        assert tensors == {str(n) for path, _ in paths for n in hf_tensors(path, config)[0].flat}


# The parameters of an unmodified MaxText 0.2.5 with these sizes (decoder_block=llama2, 4 layers), as a plan names them.
MAXTEXT = {
    "decoder.decoder_norm.scale": (64,),
    "decoder.layers.mlp.wi_0.kernel": (64, 4, 128),
    "decoder.layers.mlp.wi_1.kernel": (64, 4, 128),
    "decoder.layers.mlp.wo.kernel": (128, 4, 64),
    "decoder.layers.post_self_attention_layer_norm.scale": (64, 4),
    "decoder.layers.pre_self_attention_layer_norm.scale": (64, 4),
    "decoder.layers.self_attention.key.kernel": (64, 4, 2, 16),
    "decoder.layers.self_attention.out.kernel": (4, 4, 16, 64),
    "decoder.layers.self_attention.query.kernel": (64, 4, 4, 16),
    "decoder.layers.self_attention.value.kernel": (64, 4, 2, 16),
    "decoder.logits_dense.kernel": (64, 256),
    "token_embedder.embedding": (256, 64),
}
PAGE = ROOT / "docs" / "howto" / "serving.md"


def maxtext_params() -> dict[str, Any]:
    random, params = np.random.default_rng(0), {}
    for path, shape in MAXTEXT.items():
        *parents, last = path.split(".")
        functools.reduce(lambda tree, name: tree.setdefault(name, {}), parents, params)[last] = (
            random.standard_t(5, shape).astype(np.float32)
        )
    return params


def maxtext_loss(params: Any, tokens: jax.Array) -> jax.Array:
    """The GEMMs of MaxText's Llama on its layout: layers are the second axis, heads an axis of their own."""
    embedding, decoder = params["token_embedder"]["embedding"], params["decoder"]
    stack = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), decoder["layers"])

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        attention, mlp = p["self_attention"], p["mlp"]
        y = x * p["pre_self_attention_layer_norm"]["scale"]
        q, k, v = (jnp.einsum("td,dhk->thk", y, attention[n]["kernel"]) for n in ("query", "key", "value"))
        mixed = q * jnp.repeat(jnp.tanh(k) + v, 2, 1)
        x = x + jnp.einsum("thk,hkd->td", mixed, attention["out"]["kernel"])
        y = x * p["post_self_attention_layer_norm"]["scale"]
        hidden = jax.nn.silu(y @ mlp["wi_0"]["kernel"]) * (y @ mlp["wi_1"]["kernel"])
        return x + hidden @ mlp["wo"]["kernel"], None

    x = jax.lax.scan(layer, embedding[tokens], stack)[0] * decoder["decoder_norm"]["scale"]
    return jnp.sum(jax.nn.logsumexp(x @ decoder["logits_dense"]["kernel"], -1))


@pytest.mark.skipif(not PAGE.exists(), reason="an installed package has no docs")
@pytest.mark.parametrize("tile", [1, 16])
def test_the_example_of_the_page_exports_the_llama_of_maxtext(tile: int, tmp_path: Path) -> None:
    """The code of the page, on the tree that MaxText makes."""
    (code,) = re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    params, out = maxtext_params(), tmp_path / "served"
    recipe = "nvfp4(scale2d=weights)" if tile > 1 else "nvfp4"
    (tmp_path / "serve.policy").write_text(f"mlp.*, self_attention.* -> {recipe}")
    names = {"loss": maxtext_loss, "params": params, "batch": jnp.arange(8), "hf_config": {"model_type": "llama"},
             "head_dim": 16}  # fmt: skip
    code = code.replace('"serve.policy"', repr(str(tmp_path / "serve.policy"))).replace(
        '"served"', repr(str(out))
    )
    exec(code, names)  # of this repository
    tensors, layers = read_tensors(out), params["decoder"]["layers"]
    halves = np.r_[0:16:2, 1:16:2]  # MaxText's rotary embedding has pairs next to each other
    for layer in range(4):
        attention = {n: w["kernel"][:, layer].reshape(64, -1).T for n, w in layers["self_attention"].items()}
        mlp = {n: w["kernel"][:, layer].T for n, w in layers["mlp"].items()}
        q, k = (attention[n].reshape(-1, 16, 64)[:, halves].reshape(-1, 64) for n in ("query", "key"))
        q = q * np.float32(4)
        out_proj = layers["self_attention"]["out"]["kernel"][:, layer].reshape(64, 64).T
        expected = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": attention["value"],
                    "mlp.gate_proj": mlp["wi_0"], "mlp.up_proj": mlp["wi_1"], "self_attn.o_proj": out_proj,
                    "mlp.down_proj": mlp["wo"]}  # fmt: skip
        groups = dict.fromkeys(
            list(expected)[:3], ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        )
        groups |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ("mlp.gate_proj", "mlp.up_proj"))
        for name, weight in expected.items():
            amax = np.float32(max(np.abs(expected[n]).max() for n in groups.get(name, (name,))))
            stored = decode(tensors, f"model.layers.{layer}.{name}")
            values = oracle.nvfp4(weight, amax=amax, tile=tile)["dequantized"]
            np.testing.assert_allclose(stored, values, rtol=3e-7)  # 1 / scale is rounded
        norm = tensors[f"model.layers.{layer}.input_layernorm.weight"].astype(np.float32)
        own = layers["pre_self_attention_layer_norm"]["scale"][:, layer]
        np.testing.assert_array_equal(norm, own.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert tensors["lm_head.weight"].shape == (256, 64)
    assert not audit(out).findings


def test_names_must_fit_the_parameters(tmp_path: Path) -> None:
    params = {"mlp": {"wi_0": np.ones((64, 32), np.float32), "wi_1": np.ones((64, 32), np.float32)}}
    plan = policyc.plan(
        "mlp.* -> nvfp4",
        lambda p, x: jnp.sum((x @ p["mlp"]["wi_0"]) * (x @ p["mlp"]["wi_1"])),
        params,
        np.ones((8, 64), np.float32),
    )
    names = {"mlp.wi[0]": "gate_proj.weight", "mlp.wi[1]": "up_proj.weight"}
    for edit, message in (
        ({"mlp.wi[1]": None}, r"no tensor for mlp\.wi\[1\]"),
        ({"lm_head": "lm_head.weight"}, "which no parameter is called"),
        ({"mlp.wi[1]": "gate_proj.weight"}, "the tensor gate_proj.weight"),
        ({"mlp.wi[1]": "{layer}.weight"}, "if it is a layer"),
    ):
        edited = {key: value for key, value in {**names, **edit}.items() if value}
        with pytest.raises(ValueError, match=message):
            policyc.export(params, plan, names=edited, out=tmp_path / "other", config={})
    with pytest.raises(ValueError, match=r"convert has mlp\.wi, which is not the weight of a site"):
        policyc.export(
            params, plan, names=names, convert={"mlp.wi": np.negative}, out=tmp_path / "other", config={}
        )
    assert not (tmp_path / "other").exists()


def test_converted_weights_say_what_changes(tmp_path: Path) -> None:
    """Rows in another order keep their codes, and so does a factor, unless linears that are fused have others."""
    random = np.random.default_rng(0)
    params = {name: random.normal(size=(64, 32)).astype(np.float32) for name in ("gate", "up", "down")}

    def loss(p: dict[str, Any], x: jax.Array) -> jax.Array:
        return jnp.sum((x @ p["gate"]) * (x @ p["up"])) + jnp.sum(jnp.tanh(x) @ p["down"])

    plan = policyc.plan("* -> nvfp4(outer=shared)", loss, params, np.ones((8, 64), np.float32))
    names = {name: f"mlp.{name}_proj.weight" for name in params}
    backwards = {name: lambda w: w[::-1] for name in params}
    for number, (convert, changed) in enumerate((
        (backwards, set()),
        ({"down": lambda w: w * 3}, set()),
        (backwards | {"gate": lambda w: w[::-1] * 3}, {"mlp.up_proj"}),  # gate has the maximum
    )):  # fmt: skip
        out = tmp_path / str(number)
        written = policyc.export(params, plan, names=names, convert=convert, out=out, config={})
        assert {change.module for change in written.changes} == changed
        for name, weight in params.items():
            expected = convert.get(name, np.array)(weight.T)
            stored = decode(read_tensors(out), f"mlp.{name}_proj")
            assert np.linalg.norm(stored - expected) < 0.2 * np.linalg.norm(expected)


def test_the_file_says_how_it_was_made_and_how_to_read_it(folder: Path) -> None:
    written, tensors = export(folder, "mlp.* -> nvfp4; o_proj -> fp8", about={"step": 7})
    about = json.loads((written.folder / "policyc.json").read_text())
    assert about["policy"]["text"] == str(policyc.parse("mlp.* -> nvfp4; o_proj -> fp8"))
    assert about["policy"]["sha256"] == policyc.parse(about["policy"]["text"]).sha256
    assert (about["step"], about["versions"]["policyc"]) == (7, policyc.__version__)
    assert about["backends"] == ["emulate"]
    config = json.loads((written.folder / "config.json").read_text())["quantization_config"]
    modules = sorted(
        {n.removesuffix(".weight") for n in tensors if n.endswith(("proj.weight", "lm_head.weight"))}
    )
    found = find_algorithms(config, [*modules, "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"])
    assert [found[f"model.layers.1.{n}"] for n in ("self_attn.o_proj", "self_attn.q_proj")] == ["fp8", ""]
    assert [found[n] for n in ("model.layers.0.mlp.up_proj", "lm_head")] == ["nvfp4", ""]
    assert "model.layers.1.self_attn.q_proj" in config["ignore"]
    with pytest.raises(ValueError, match="exists"):
        export(folder, "mlp.* -> nvfp4")


def test_the_phase_is_that_of_the_checkpoint() -> None:
    text = "mlp -> nvfp4; after 50% { down_proj @ fprop -> bf16 }"
    for step, expected in ((4, "nvfp4"), (5, "nvfp4"), (6, ""), (10, ""), (0, "")):
        source = LlamaSource(folder=Path(), checkpoint=Path(), model=SMALL, run=RunConfig(steps=10), policy=None,
                             step=step, hf_config={})  # fmt: skip
        plan = source.plan(policyc.parse(text))
        found = find_linears(source.abstract_params(), plan, source.phase(plan), source.names())
        assert {x.format for x in found if x.path.endswith("down_proj")} == {expected}, step
        assert {x.format for x in found if x.path.endswith("up_proj")} == {"nvfp4"}


def test_a_tied_head_is_stored_by_itself(tmp_path: Path) -> None:
    folder = save(tmp_path / "hf")
    tensors = {name: array for name, array in read_tensors(folder).items() if name != "lm_head.weight"}
    write_tensors(folder, tensors)
    written, stored = export(folder, "lm_head, o_proj -> nvfp4")
    assert not json.loads((written.folder / "config.json").read_text())["tie_word_embeddings"]
    values = decode(stored, "lm_head")
    expected = oracle.nvfp4(tensors["model.embed_tokens.weight"])["dequantized"]
    np.testing.assert_allclose(values, expected, rtol=3e-7)  # 1 / scale is rounded


@pytest.mark.parametrize("fault", ["nan", "disk"])
def test_nothing_stays_of_an_export_that_fails(
    fault: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = read_source(folder)
    params = jax.tree.map(np.array, source.load())
    if fault == "nan":
        params["layers"]["mlp"]["down_proj"][1, 0, 0] = np.nan
    else:
        monkeypatch.setattr(
            Path, "write_text", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left"))
        )
    with pytest.raises((ValueError, OSError), match=r"not finite|No space left"):
        policyc.export(params, source.plan(policyc.parse("mlp.* -> nvfp4")), names=source.names(),
                       config=source.hf_config, out=tmp_path / "out")  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_random_weights_have_different_maxima() -> None:
    layers = random_params(SMALL)["layers"]["mlp"]
    assert len({float(np.abs(layers[name][0]).max()) for name in ("gate_proj", "up_proj")}) == 2
