"""Exported files, read by the libraries of servers. They share no code with policyc."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policyc
from policyc.models.llama import model as llama
from policyc.serving.audit import Reference, audit
from policyc.serving.linears import find_linears
from policyc.serving.llama_source import read_source
from tests.support import rounding_oracle as oracle
from tests.support.served import MIXTURE, SMALL, read_tensors, save, write_stats

pytestmark = [
    pytest.mark.servers,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]
POLICY = "mlp.* -> nvfp4(scale2d=weights); q_proj, k_proj, v_proj -> nvfp4; o_proj -> fp8"
FP4 = "mlp.* -> nvfp4(scale2d=weights); attention.{q,k,v,o}_proj -> nvfp4"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("model")
    source = read_source(save(folder / "hf"))
    params = jax.tree.map(np.asarray, source.load())
    stats = write_stats(folder / "stats.jsonl")
    cases: dict[str, tuple[str, Any, Any]] = {
        "weights": (POLICY, "compressed-tensors", None),
        "rows": (POLICY.replace("-> fp8", "-> fp8(outer=row)"), "compressed-tensors", None),
        "modelopt_rows": ("o_proj -> fp8(outer=row)", "modelopt", None),
        "modelopt": (FP4, "modelopt", stats),
        "compressed": (FP4, "compressed-tensors", stats),
    }
    for name, (policy, format, measured) in cases.items():
        policyc.export(params, source.plan(policyc.parse(policy)), names=source.names(), config=source.hf_config,
                       out=folder / name, format=format, stats=measured, files=source.files())  # fmt: skip
    experts = read_source(save(folder / "mixtral", MIXTURE))
    for format in ("modelopt", "compressed-tensors"):
        policyc.export(jax.tree.map(np.asarray, experts.load()), experts.plan(policyc.parse("experts -> nvfp4")),
                       names=experts.names(), config=experts.hf_config, out=folder / f"{format}_experts",
                       format=format)  # fmt: skip
    return {path.name: path for path in folder.iterdir()}


def load(folder: Path) -> dict[str, Any]:
    return dict(pytest.importorskip("safetensors.torch").load_file(folder / "model.safetensors"))


def modules(tensors: dict[str, Any], suffix: str) -> list[str]:
    return sorted(name.removesuffix(f".{suffix}") for name in tensors if name.endswith(f".{suffix}"))


def block_values(folder: Path, module: str) -> np.ndarray:
    """Codes times block scales of an exported file, with the casts of ml_dtypes."""
    tensors = read_tensors(folder)
    packed, scales = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"].astype(np.float32)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    return (
        oracle.GRID[codes & 7] * np.where(codes & 8, oracle.f32(-1), oracle.f32(1)) * np.repeat(scales, 16, 1)
    )


@pytest.mark.parametrize(
    ("ours", "modelopt", "count"),
    [
        ("compressed", "modelopt", 7 * SMALL.layers),
        ("compressed-tensors_experts", "modelopt_experts", 3 * MIXTURE.experts * MIXTURE.layers),
    ],
)
def test_compressed_tensors_decodes_what_training_computes_with(
    ours: str, modelopt: str, count: int, folders: dict[str, Path]
) -> None:
    torch = pytest.importorskip("torch")
    nvfp4 = pytest.importorskip("compressed_tensors.compressors.nvfp4")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    config = json.loads((folders[ours] / "config.json").read_text())["quantization_config"]
    (scheme,) = quantization.QuantizationConfig.model_validate(config).config_groups.values()
    tensors, served = load(folders[ours]), load(folders[modelopt])
    names = modules(tensors, "weight_packed")
    assert len(names) == count
    for module in names:
        state = {n.rpartition(".")[2]: t for n, t in tensors.items() if n.startswith(f"{module}.")}
        decoded = nvfp4.NVFP4PackedCompressor.decompress(state, scheme)["weight"]
        blocks, outer = block_values(folders[modelopt], module), served[f"{module}.weight_scale_2"].numpy()
        # It divides the block scales by the reciprocal of the outer scale in fp32, and decodes to bfloat16.
        scales = np.repeat(state["weight_scale"].float().numpy(), 16, 1)
        divided = scales / state["weight_global_scale"].numpy()
        values = np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales != 0) * divided
        assert decoded.dtype == torch.bfloat16
        assert torch.equal(decoded, torch.from_numpy(values).to(torch.bfloat16)), module
        np.testing.assert_allclose(values, blocks * outer, rtol=2**-22)  # two more roundings than in training


def test_the_converter_turns_one_layout_into_the_other_byte_for_byte(folders: dict[str, Path]) -> None:
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4")
    torch = pytest.importorskip("torch")
    config = json.loads((folders["compressed"] / "config.json").read_text())["quantization_config"]
    converter = converters.ModelOptNvfp4Converter(ignore=config["ignore"], targets=["re:.*_proj$"])
    converted, ours = converter.process(load(folders["modelopt"])), load(folders["compressed"])
    assert set(converted) == set(ours)
    for name, tensor in ours.items():
        same = converted[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        assert torch.equal(*same), name


def test_modelopt_reads_the_same_values(folders: dict[str, Path]) -> None:
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("modelopt.torch.quantization.qtensor.nvfp4_tensor")
    tensors = load(folders["modelopt"])
    for module in modules(tensors, "weight_scale_2"):
        codes, scales, outer = (
            tensors[f"{module}.{n}"] for n in ("weight", "weight_scale", "weight_scale_2")
        )
        shape = torch.Size((codes.shape[0], codes.shape[1] * 2))
        read = library.NVFP4QTensor(shape, torch.float32, codes)
        decoded = read.dequantize(dtype=torch.float32, scale=scales, double_scale=outer, block_sizes={-1: 16})
        expected = block_values(folders["modelopt"], module) * outer.numpy()
        # It multiplies the scales first, and so rounds once more: one ulp.
        np.testing.assert_allclose(decoded.numpy(), expected, rtol=2**-23)


def test_gfloat_decodes_the_same_codes(folders: dict[str, Path]) -> None:
    gfloat = pytest.importorskip("gfloat")
    formats = pytest.importorskip("gfloat.formats")
    e2m1, e4m3 = (
        np.array([gfloat.decode_float(info, code).fval for code in range(2**info.k)], np.float32)
        for info in (formats.format_info_ocp_e2m1, formats.format_info_ocp_e4m3)
    )
    tensors = read_tensors(folders["modelopt"])
    module = "model.layers.1.mlp.down_proj"
    packed, scales = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"].view(np.uint8)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    decoded = e2m1[codes] * np.repeat(e4m3[scales], 16, 1)
    np.testing.assert_array_equal(decoded, block_values(folders["modelopt"], module))


def test_rows_of_fp8_are_decoded_as_they_were_trained(folders: dict[str, Path]) -> None:
    """By compressed-tensors, exactly; ModelOpt's file has the same codes and scales, in one dimension."""
    torch = pytest.importorskip("torch")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    config = json.loads((folders["rows"] / "config.json").read_text())["quantization_config"]
    schemes = quantization.QuantizationConfig.model_validate(config).config_groups.values()
    (scheme,) = (s for s in schemes if s.weights.num_bits == 8)
    assert (scheme.weights.strategy, scheme.input_activations.strategy) == ("channel", "token")
    compressor = compressors.BaseCompressor.get_value_from_registry("float-quantized")
    tensors, others, masters = (load(folders[name]) for name in ("rows", "modelopt_rows", "hf"))
    for layer in range(SMALL.layers):
        module = f"model.layers.{layer}.self_attn.o_proj"
        state = {n: tensors[f"{module}.{n}"] for n in ("weight", "weight_scale")}
        decoded = compressor.decompress(dict(state), scheme)["weight"]
        assert torch.equal(decoded, state["weight"].float() * state["weight_scale"])
        weight = masters[f"{module}.weight"].float()
        assert torch.equal(state["weight_scale"], weight.abs().amax(1, keepdim=True) / 448)
        assert torch.linalg.norm(decoded - weight) < 0.04 * torch.linalg.norm(weight)
        assert torch.equal(others[f"{module}.weight"].view(torch.uint8), state["weight"].view(torch.uint8))
        assert torch.equal(others[f"{module}.weight_scale"], state["weight_scale"][:, 0])


@pytest.mark.parametrize("name", ["weights", "rows", "compressed"])
def test_transformers_computes_the_logits_of_the_emulation(name: str, folders: dict[str, Path]) -> None:
    """The same weights, of 4 and 8 bits, in transformers and in the bundled Llama."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    served = transformers.AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.bfloat16)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folders["hf"], dtype=torch.bfloat16)
    tokens = np.random.default_rng(0).integers(0, SMALL.vocab, (2, 48))
    with torch.no_grad():
        theirs, unquantized = (m(torch.from_numpy(tokens)).logits.float().numpy() for m in (served, plain))
    source = read_source(folders["hf"])
    params = source.load()
    # The forward GEMMs of the policy: the weights in NVFP4, activations as they are, or as training quantizes them.
    policy = policyc.parse(
        {"compressed": FP4, "rows": POLICY.replace("fp8", "fp8(outer=row)")}.get(name, POLICY)
    )
    batch = {"tokens": jnp.asarray(tokens), "targets": jnp.asarray(tokens), "mask": jnp.ones(tokens.shape)}

    def logits(params: Any) -> tuple[jax.Array, jax.Array]:
        x, _ = llama.run_blocks(params, batch["tokens"], SMALL)
        y = llama.linear(params, "lm_head", x).astype(jnp.float32)
        return jnp.sum(y), y

    (_, ours), _ = jax.value_and_grad(policyc.apply(policy, logits, has_aux=True), has_aux=True)(params)

    def distance(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    rounding = distance(np.asarray(ours), unquantized)  # what the whole quantization changes
    # Static scales and fused groups differ from training by less than quantization itself does; without quantized
    # activations, half of the rounding is missing.
    assert distance(theirs, np.asarray(ours)) < rounding
    assert 0.3 * rounding < distance(theirs, unquantized) < 1.5 * rounding


def test_files_of_modelopt_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    """Weights that ModelOpt itself quantized, under the maximum of the group: the audit has no findings."""
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("modelopt.torch.quantization.qtensor.nvfp4_tensor")
    save_file = pytest.importorskip("safetensors.torch").save_file
    folder = Path(shutil.copytree(folders["modelopt"], tmp_path / "served"))
    tensors, plain = load(folder), load(folders["hf"])
    for module in modules(tensors, "weight_scale_2"):
        weight = plain[f"{module}.weight"].float()
        quantized, scales, outer = library.NVFP4QTensor.quantize(
            weight, 16, weights_scaling_factor_2=tensors[f"{module}.weight_scale_2"]
        )
        tensors[f"{module}.weight"] = quantized._quantized_data
        tensors[f"{module}.weight_scale"] = scales.to(torch.float8_e4m3fn)
        tensors[f"{module}.weight_scale_2"] = outer
    save_file(tensors, folder / "model.safetensors")
    source = read_source(folders["hf"])
    plan = source.plan(policyc.parse(FP4.replace("scale2d=weights", "scale=amax")))
    linears = find_linears(source.load(), plan, source.phase(plan), source.names())
    result = audit(folder, Reference(linears=linears, has_weights=True))
    assert not result.findings
    changed = {row.module: row.changed for row in result.linears if row.format == "nvfp4"}
    assert len(changed) == 7 * SMALL.layers
    assert (
        max(changed.values()) < 5e-3
    )  # it divides where training multiplies, which rounds 1 code in 1000 differently
