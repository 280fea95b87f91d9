"""A small Llama in the Hugging Face layout for tests of serving, and readers that share no code with policyc."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from policyc.models.llama import model as llama
from policyc.models.llama import weights
from policyc.models.llama.configs import ModelConfig

SMALL = ModelConfig(layers=2, width=128, hidden=384, heads=4, kv_heads=2, head_dim=32, vocab=64)
MIXTURE = replace(SMALL, experts=2, hidden=64)
DTYPES = {"BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F32": np.float32, "U8": np.uint8}


@cache
def random_params(config: ModelConfig) -> llama.Params:
    """Random weights. Those of a layer have different maxima, so that no two linears share an outer scale."""
    random = np.random.default_rng(1)
    return jax.tree.map(
        lambda spec: ((spec.deviation or 0.1) * random.standard_t(5, spec.shape)).astype(np.float32),
        llama.param_specs(config),
    )


def save(folder: Path, config: ModelConfig = SMALL, params: Any = None) -> Path:
    """Saves weights, by default random ones, as trainers do."""
    files = weights.export_files(config, 32, None)
    weights.save_safetensors(random_params(config) if params is None else params, config, folder, files)
    return folder


def trained_params(config: ModelConfig) -> llama.Params:
    """Random weights with the channels of a trained model: what reads a large channel has large columns."""
    random, params = np.random.default_rng(2), jax.tree.map(np.array, random_params(config))
    layers, hidden = params["layers"], np.exp(random.normal(size=(config.layers, 1, config.hidden)) / 2)
    norms = np.exp(random.normal(size=(2, config.layers, config.width, 1)) / 2)
    layers["attention_norm"][:], layers["mlp_norm"][:] = norms[0, ..., 0], norms[1, ..., 0]
    for name in ("q_proj", "k_proj", "v_proj"):
        layers["attention"][name] *= norms[0]
    for name in ("gate_proj", "up_proj"):
        layers["mlp"][name] *= norms[1] * hidden
    layers["mlp"]["down_proj"] *= hidden.swapaxes(1, 2)
    return jax.tree.map(lambda a: a.astype(np.float32), params)


def write_stats(path: Path, amax: float = 3.7) -> Path:
    """Measurements of a run: each activation has this largest magnitude."""
    sites = [
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        *(f"attention.{n}_proj" for n in "qkvo"),
    ]
    row = {"step": 0, "operand": "fprop.activation", "amax": amax}
    rows = [
        {**row, "site": f"layers.{site}", "layer": layer} for site in sites for layer in range(SMALL.layers)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder. The format is a length, a JSON header, and bytes."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        for name, about in json.loads(content[8:start]).items():
            if name != "__metadata__":
                first, last = about["data_offsets"]
                array = np.frombuffer(content[start + first : start + last], DTYPES[about["dtype"]])
                tensors[name] = array.reshape(about["shape"])
    return tensors


def write_tensors(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    save_file({n: np.ascontiguousarray(a) for n, a in tensors.items()}, folder / "model.safetensors")


def decode(tensors: dict[str, np.ndarray], module: str) -> np.ndarray:
    """The values of an NVFP4 linear of either layout, by the casts of ml_dtypes."""
    is_modelopt = f"{module}.weight_scale_2" in tensors
    packed = tensors[f"{module}.{'weight' if is_modelopt else 'weight_packed'}"]
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    blocks = values * np.repeat(tensors[f"{module}.weight_scale"].astype(np.float32), 16, 1)
    if is_modelopt:
        return blocks * tensors[f"{module}.weight_scale_2"]
    return blocks / tensors[f"{module}.weight_global_scale"]


def edit_json(path: Path, **entries: Any) -> None:
    """Replaces entries of the quantization in config.json."""
    content = json.loads(path.read_text())
    content["quantization_config"].update(entries)
    path.write_text(json.dumps(content))
