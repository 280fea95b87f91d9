"""Audits of served checkpoints: planted faults are named, files of others are read, and loaders match as they do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import policyc
from policyc.serving.audit import Audit, Reference, audit
from policyc.serving.formats import FILE_FORMATS
from policyc.serving.linears import find_linears
from policyc.serving.llama_source import read_source
from policyc.serving.loaders import LoadError, find_algorithms
from tests.support.command import policyc as run_policyc
from tests.support.served import (
    SMALL,
    edit_json,
    read_tensors,
    save,
    trained_params,
    write_stats,
    write_tensors,
)

pytestmark = pytest.mark.any_jax
POLICY = "mlp.* -> nvfp4; o_proj -> fp8; q_proj, k_proj, v_proj -> nvfp4"
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, as it was trained and as each layout serves it."""
    folder = tmp_path_factory.mktemp("model")
    source = read_source(save(folder / "hf"))
    params, plan = jax.tree.map(np.asarray, source.load()), source.plan(policyc.parse(POLICY))
    stats = write_stats(folder / "stats.jsonl")
    for format in ("modelopt", "compressed-tensors"):
        policyc.export(params, plan, names=source.names(), config=source.hf_config, out=folder / format, format=format,
                       stats=stats)  # fmt: skip
    return {name: folder / name for name in ("hf", *FILE_FORMATS)}


def reference(folders: dict[str, Path], policy: str = POLICY) -> Reference:
    source = read_source(folders["hf"])
    params, plan = jax.tree.map(np.asarray, source.load()), source.plan(policyc.parse(policy))
    return Reference(linears=find_linears(params, plan, source.phase(plan), source.names()), has_weights=True)


def codes_of(result: Audit) -> dict[str, set[str]]:
    codes = {finding.code for finding in result.findings}
    return {code: {m for f in result.findings if f.code == code for m in f.modules} for code in codes}


@pytest.mark.parametrize("format", FILE_FORMATS)
def test_an_exported_file_has_no_findings(format: str, folders: dict[str, Path]) -> None:
    for against in (None, reference(folders)):
        result = audit(folders[format], against)
        assert not result.findings
        rows = {row.module: row for row in result.linears}
        assert len(rows) == 2 * 7 + 1
        down, output = rows["model.layers.1.mlp.down_proj"], rows["model.layers.0.self_attn.o_proj"]
        assert (down.format, down.block, down.served, down.static_input) == ("nvfp4", "1x16", "nvfp4", True)
        assert (output.format, output.block, output.served) == ("fp8", "tensor", "fp8")
        assert (rows["lm_head"].format, rows["lm_head"].served) == ("bfloat16", "")
    assert down.changed == 0
    assert 0.05 < (down.error or 0) < 0.2
    assert 0 < (output.error or 1) < 0.05


def swizzle(scales: np.ndarray) -> np.ndarray:
    """Block scales in the order of cuBLAS: element (r, c) of a tile of 128 x 4 is at 16 (r % 32) + 4 (r / 32) + c."""
    rows, columns = scales.shape
    flat = np.zeros(rows * columns, np.uint8)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * (columns // 4) + c // 4
            flat[tile * 512 + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4] = scales[r, c].view(np.uint8)
    return flat.reshape(rows, columns).view(ml_dtypes.float8_e4m3fn)


DOWN, GATE, UP = (f"model.layers.1.mlp.{name}_proj" for name in ("down", "gate", "up"))


def edit(name: str, change: Callable[[np.ndarray], Any]) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        tensors[name] = np.asarray(change(tensors[name]), tensors[name].dtype)

    return apply


def own_scales(tensors: Tensors) -> None:
    """The outer scale of one linear of a group, halved, with its block scales doubled: the same values."""
    tensors[f"{UP}.weight_scale_2"] = tensors[f"{UP}.weight_scale_2"] * np.float32(2)
    tensors[f"{UP}.weight_scale"] = (tensors[f"{UP}.weight_scale"].astype(np.float32) / 2).astype(
        ml_dtypes.float8_e4m3fn
    )


def one_amax(tensors: Tensors) -> None:
    """Block scales under the maximum of a linear, outer scale under that of its group."""
    tensors[f"{UP}.weight_scale"] = (tensors[f"{UP}.weight_scale"].astype(np.float32) / 2).astype(
        ml_dtypes.float8_e4m3fn
    )


# Each fault with the code that names it with the weights of the run at hand, and without.
FAULTS: dict[str, tuple[Callable[[Tensors], None], str, str]] = {
    "reciprocal outer scale": (edit(f"{DOWN}.weight_scale_2", lambda s: 1 / s), "reciprocal-scale", "reciprocal-scale"),
    "reciprocal input scale": (edit(f"{DOWN}.input_scale", lambda s: 1 / s), "reciprocal-scale", "reciprocal-scale"),
    "swapped nibbles": (edit(f"{DOWN}.weight", lambda c: c >> 4 | c << 4), "swapped-nibbles", ""),
    "swizzled scales": (edit(f"{DOWN}.weight_scale", swizzle), "swizzled-scales", ""),
    "own scales in a fused layer": (own_scales, "fused-scales", "fused-scales"),
    "one amax for blocks, another outside": (one_amax, "wrong-outer-scale", ""),
    "a NaN scale": (edit(f"{DOWN}.weight_scale", lambda s: np.full_like(s, np.nan)), "block-scales", "block-scales"),
    "a zero outer scale": (edit(f"{DOWN}.weight_scale_2", np.zeros_like), "outer-scale", "outer-scale"),
    "other weights": (edit(f"{DOWN}.weight", lambda c: c[::-1]), "other-weights", ""),
    "no outer scale": (lambda t: t.pop(f"{DOWN}.weight_scale_2"), "unreadable-tensors", "unreadable-tensors"),
    "scales padded for kernels": (
        lambda t: t.__setitem__(f"{DOWN}.weight_scale", np.zeros((1, 128 * 24), ml_dtypes.float8_e4m3fn)),
        "unreadable-tensors", "unreadable-tensors"),
}  # fmt: skip


def of_all(suffix: str, change: Callable[[np.ndarray], Any]) -> Callable[[Tensors], None]:
    """Changes the tensors of all NVFP4 linears with this name."""

    def apply(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith(suffix) and tensors[n].ndim == 2]:
            if f"{name.rpartition('.')[0]}.weight_scale_2" in tensors:
                edit(name, change)(tensors)

    return apply


def own_maxima(tensors: Tensors) -> None:
    """Block scales of all fused linears under their own maximum, outer scales under that of their group."""
    for name in [n for n in tensors if n.endswith(".weight_scale") and tensors[n].ndim == 2]:
        scales = tensors[name].astype(np.float32)
        tensors[name] = (scales * (448 / scales.max())).astype(ml_dtypes.float8_e4m3fn)


# What statistics name in a trained model, without its weights.
LAYOUT_FAULTS = {
    "swapped nibbles": (of_all(".weight", lambda c: c >> 4 | c << 4), "swapped-nibbles"),
    "swapped nibbles of one linear": (edit(f"{DOWN}.weight", lambda c: c >> 4 | c << 4), "swapped-nibbles"),
    "swizzled scales": (
        of_all(".weight_scale", lambda s: swizzle(s) if len(s) % 128 == 0 else s),
        "swizzled-scales",
    ),
    "one amax for blocks, another outside": (own_maxima, "wrong-outer-scale"),
}


@pytest.fixture(scope="module", params=["1x16", "16x16"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the channels of a trained one, served with blocks or tiles."""
    folder = tmp_path_factory.mktemp("trained")
    source = read_source(save(folder / "hf", params=trained_params(SMALL)))
    params = jax.tree.map(np.asarray, source.load())
    recipe = "nvfp4" if request.param == "1x16" else "nvfp4(scale2d=weights)"
    plan = source.plan(policyc.parse(f"mlp.*, attention.{{q,k,v,o}}_proj -> {recipe}"))
    written = policyc.export(params, plan, names=source.names(), config=source.hf_config, out=folder / "served",
                             format="modelopt")  # fmt: skip
    assert not audit(written.folder).findings
    return written.folder


@pytest.mark.parametrize("fault", LAYOUT_FAULTS)
def test_a_trained_model_shows_faults_of_its_layout(fault: str, trained: Path, tmp_path: Path) -> None:
    plant, code = LAYOUT_FAULTS[fault]
    folder = shutil.copytree(trained, tmp_path / "served")
    tensors = read_tensors(folder)
    plant(tensors)
    write_tensors(folder, tensors)
    found = codes_of(audit(folder))
    assert set(found) == {code}
    assert DOWN in found[code] or fault.startswith("one amax")
    assert len(found[code]) == 1 or "one linear" not in fault


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str, folders: dict[str, Path], tmp_path: Path) -> None:
    plant, code, alone = FAULTS[fault]
    folder = shutil.copytree(folders["modelopt"], tmp_path / "served")
    tensors = read_tensors(folder)
    plant(tensors)
    write_tensors(folder, tensors)
    found = codes_of(audit(folder, reference(folders)))
    assert found[code] <= {DOWN, GATE, UP}
    assert set().union(*found.values()) <= {DOWN, GATE, UP}  # and nothing else is blamed
    assert set(codes_of(audit(folder))) == ({alone} if alone else set())


def test_the_reciprocal_of_compressed_tensors_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["compressed-tensors"], tmp_path / "served")
    tensors = read_tensors(folder)
    edit(f"{DOWN}.weight_global_scale", lambda s: 1 / s)(tensors)
    write_tensors(folder, tensors)
    assert codes_of(audit(folder)) == {"reciprocal-scale": {DOWN}}


def test_fp8_files_of_others_may_have_a_scale_for_each_row(folders: dict[str, Path], tmp_path: Path) -> None:
    """The configuration must say so, too: loaders then expect as many scales as rows."""
    folder = shutil.copytree(folders["compressed-tensors"], tmp_path / "served")
    tensors, module = read_tensors(folder), "model.layers.1.self_attn.o_proj"
    for layer in range(2):
        name = module.replace("1", str(layer))
        weight = read_tensors(folders["hf"])[f"{name}.weight"].astype(np.float32)
        scales = np.abs(weight).max(1, keepdims=True) / np.float32(448)
        tensors[f"{name}.weight"] = (weight / scales).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}.weight_scale"] = scales
    write_tensors(folder, tensors)
    assert set(codes_of(audit(folder))) == {"wrong-format"}
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    for group in config["config_groups"].values():
        if group["weights"]["num_bits"] == 8:
            group["weights"]["strategy"] = "channel"
    edit_json(folder / "config.json", **config)
    result = audit(folder, reference(folders, POLICY.replace("-> fp8", "-> fp8(outer=row)")))
    (row,) = (row for row in result.linears if row.module == module)
    assert not result.findings
    assert (row.format, row.block, 0 < (row.error or 1) < 0.05) == ("fp8-row", "row", True)


def test_an_outer_scale_of_a_smaller_maximum_saturates(folders: dict[str, Path], tmp_path: Path) -> None:
    """All linears of a group under the maximum of the one that has the smaller."""
    folder = shutil.copytree(folders["modelopt"], tmp_path / "served")
    tensors = read_tensors(folder)
    for name in (GATE, UP):
        blocks = tensors[f"{name}.weight_scale"].astype(np.float32) * 4
        tensors[f"{name}.weight_scale"] = np.minimum(blocks, 448).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}.weight_scale_2"] = tensors[f"{name}.weight_scale_2"] / np.float32(4)
    write_tensors(folder, tensors)
    found = codes_of(audit(folder, reference(folders)))
    assert set(found) == {"wrong-outer-scale"}


LISTS = {
    "a missing entry": (["lm_head"], "missing-ignore", {"lm_head"}),
    "an entry that is part of a name": (["model.layers.1.mlp.down"], "ignored-codes", {DOWN}),
    "a wildcard": (["model.layers.1.mlp.*"], "ignored-codes", {DOWN, GATE, UP}),
}


@pytest.mark.parametrize("case", LISTS)
def test_the_ignore_list_is_expanded_as_loaders_do(
    case: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    names, code, modules = LISTS[case]
    folder = shutil.copytree(folders["modelopt"], tmp_path / "served")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    layers = {**config["quantized_layers"], "lm_head": {"quant_algo": "FP8"}}
    ignore = [] if case == "a missing entry" else [*config["ignore"], *names]
    edit_json(
        folder / "config.json",
        ignore=ignore,
        quantized_layers=layers if not ignore else config["quantized_layers"],
    )
    found = codes_of(audit(folder))
    assert found == {code: modules}


def test_the_policy_and_the_file_disagree(folders: dict[str, Path]) -> None:
    found = audit(folders["modelopt"], reference(folders, "mlp.* -> nvfp4(scale2d=weights)"))
    assert codes_of(found) == {
        "policy-disagrees": {f"model.layers.{i}.self_attn.{n}_proj" for i in (0, 1) for n in "qkvo"}
    }
    changed = {row.module: row.changed for row in found.linears}
    assert (changed[DOWN] or 0) > 0.01  # other codes than the policy's


# ---- the command


def test_the_exit_code_is_for_ci(folders: dict[str, Path], tmp_path: Path) -> None:
    served, run = str(folders["modelopt"]), str(folders["hf"])
    policy = tmp_path / "trained.policy"
    policy.write_text(POLICY)
    result = run_policyc("audit", served, "--run", run, "--policy", policy)
    assert (result.code, "no findings" in result.out) == (0, True)
    other = run_policyc("audit", served, "--policy", "te_nvfp4", "--format", "json")
    assert other.code == 1
    assert {f["code"] for f in json.loads(other.out)["findings"]} == {"policy-disagrees"}
    result = run_policyc("audit", run)
    assert (result.code, "is not quantized" in result.err) == (2, True)
    for arguments, message in (
        (["audit", served, "--run", run], "name it with --policy"),
        (["export", run, "--folder", tmp_path / "a"], "name it with --policy"),
        (["export", served, "--policy", "fp8", "--folder", tmp_path / "a"], "does not use: is it a Llama?"),
        (["export", tmp_path, "--policy", "fp8", "--folder", tmp_path / "a"], "neither a run"),
    ):
        result = run_policyc(*arguments)
        assert (result.code, message in result.err) == (1, True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trained.policy"]


def test_damaged_files_are_errors(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["modelopt"], tmp_path / "served")
    file = folder / "model.safetensors"
    content = file.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"\xff" * 64):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="was not written by safetensors"):
            audit(folder)
    file.unlink()
    with pytest.raises(ValueError, match="has no safetensors"):
        audit(folder)


# ---- loaders

ALL = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
CT = {"quant_method": "compressed-tensors"}
FP4 = {"weights": {"type": "float", "num_bits": 4, "strategy": "tensor_group"}}
FP8 = {"weights": {"type": "float", "num_bits": 8, "strategy": "tensor"}}
GATE_UP = ["m.mlp.gate_proj", "m.mlp.up_proj"]
LOADS: list[tuple[dict[str, Any], list[str], str | dict[str, str]]] = [
    # The published case: the router `mlp.gate` is excluded, and with it `mlp.gate_up_proj`.
    ({**ALL, "ignore": ["m.mlp.gate"]}, ["m.mlp.gate", *GATE_UP], dict.fromkeys(["m.mlp.gate", *GATE_UP], "")),
    ({**ALL, "ignore": ["lm_head"]}, ["lm_head", *GATE_UP], {"lm_head": ""} | dict.fromkeys(GATE_UP, "nvfp4")),
    ({**ALL, "ignore": ["*.self_attn*"]}, ["m.self_attn.o_proj", "m.mlp.down_proj"],
     {"m.self_attn.o_proj": "", "m.mlp.down_proj": "nvfp4"}),
    ({**ALL, "ignore": ["m.mlp.gate_proj"]}, GATE_UP, "a part of m.mlp.gate_up_proj only"),
    ({"quantization": {"quant_algo": "NVFP4", "exclude_modules": []}}, GATE_UP, "lacks group_size, kv_"),
    ({**ALL, "quant_algo": "INT4"}, GATE_UP, "quant_algo is 'INT4'"),
    ({**ALL, "quant_algo": "MIXED_PRECISION", "quantized_layers": {"m.mlp.gate_proj": {"quant_algo": "FP8"}}}, GATE_UP,
     "several formats: FP8, none"),
    # compressed-tensors: an entry is a whole name, or a regular expression that matches the start of one.
    ({**CT, "ignore": ["m.mlp.gate"], "config_groups": {"a": {"targets": ["Linear"], **FP4}}}, ["m.mlp.gate", *GATE_UP],
     {"m.mlp.gate": ""} | dict.fromkeys(GATE_UP, "nvfp4")),
    ({**CT, "ignore": ["re:m.mlp.gate"], "config_groups": {"a": {"targets": ["Linear"], **FP4}}}, GATE_UP,
     "gate_proj none, up_proj nvfp4"),
    ({**CT, "config_groups": {"a": {"targets": ["Linear"], **FP4}, "b": {"targets": ["re:.*o_proj$"], **FP8}}},
     ["m.o_proj", "m.down_proj"], {"m.o_proj": "fp8", "m.down_proj": "nvfp4"}),
    ({"quant_method": "gptq"}, GATE_UP, "quant_method is 'gptq'"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "modules", "expected"), LOADS)
def test_loaders_match(config: dict[str, Any], modules: list[str], expected: str | dict[str, str]) -> None:
    if isinstance(expected, dict):
        assert find_algorithms(config, modules) == expected
    else:
        with pytest.raises(LoadError, match=expected):
            find_algorithms(config, modules)
