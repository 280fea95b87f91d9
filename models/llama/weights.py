"""Weights as safetensors in the Hugging Face layout, in and out.

In: a folder and a model. Out: parameters on their devices; or a folder that transformers reads. The one trap: Hugging
Face keeps a linear as (out, in), one tensor for each layer; here it is (in, out), and scanned layers are stacked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from llama import model as llama
from llama.configs import BadRun, Model

SHARD_BYTES = 5 * 10**9
NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "attention": "self_attn",
}
_TURNED = "_proj", "lm_head"


def _theirs(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The name of a parameter, with {} for the layer, and whether it is turned."""
    names = [str(k.key) for k in path if hasattr(k, "key")]
    turned = names[-1].endswith(_TURNED)
    if names[0] != "layers":
        return NAMES[names[0]], turned
    inner = ".".join(NAMES.get(n, n) for n in names[1:])
    return f"model.layers.{{}}.{inner}" + ("" if inner.endswith(".weight") else ".weight"), turned


def config_json(c: Model, dtype: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": c.width,
        "intermediate_size": c.hidden, "num_hidden_layers": c.layers, "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim, "vocab_size": c.vocab,
        "rms_norm_eps": c.norm_eps, "rope_theta": c.rope_theta, "hidden_act": "silu", "attention_bias": False,
        "mlp_bias": False, "tie_word_embeddings": False, "max_position_embeddings": 131072, "torch_dtype": dtype,
    }  # fmt: skip
    if c.rope_scaling:
        found["rope_scaling"] = {"rope_type": "llama3", "factor": c.rope_scaling, "low_freq_factor": 1.0,
                                 "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    return found


def save(params: Any, c: Model, folder: Path, dtype: str = "bfloat16") -> None:
    """Writes a folder that `from_pretrained` reads. It appears under its name when it is whole."""
    from safetensors.numpy import save_file

    unfinished = folder.with_name(folder.name + ".unfinished")
    main = jax.process_index() == 0
    if main:
        unfinished.mkdir(parents=True, exist_ok=True)
    where: dict[str, int] = {}
    held: dict[str, np.ndarray] = {}
    shards = total = 0
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32

    def write() -> None:
        nonlocal shards
        shards += 1
        save_file(held, unfinished / f"shard-{shards}", metadata={"format": "pt"})
        where.update(dict.fromkeys(held, shards))
        held.clear()

    for name, value in _tensors(params, c):
        if main:
            held[name] = np.ascontiguousarray(value.astype(kind))
            total += held[name].nbytes
            if sum(t.nbytes for t in held.values()) > SHARD_BYTES:
                write()
    if not main:
        return
    if held:
        write()
    names = {
        n: f"model-{n:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        for n in range(1, shards + 1)
    }
    for number, name in names.items():
        (unfinished / f"shard-{number}").rename(unfinished / name)
    if shards > 1:
        index = {"metadata": {"total_size": total}, "weight_map": {k: names[n] for k, n in where.items()}}
        (unfinished / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (unfinished / "config.json").write_text(json.dumps(config_json(c, dtype), indent=1))
    if folder.exists():
        import shutil

        shutil.rmtree(folder)
    unfinished.rename(folder)


def _tensors(params: Any, c: Model) -> Iterator[tuple[str, np.ndarray]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    for path, value in leaves:
        name, turned = _theirs(path)
        whole = multihost_utils.process_allgather(value, tiled=True) if jax.process_count() > 1 else value
        if "{}" in name and c.scan:
            each: list[tuple[Any, Any]] = [(i, whole[i]) for i in range(c.layers)]
        else:
            each = [(path[1].idx if "{}" in name else "", whole)]
        for at, one in each:
            array = np.asarray(one)
            yield name.format(at), array.T if turned else array


def load(folder: Path, c: Model, mesh: Mesh) -> Any:
    """Parameters in fp32, each device reading its own part."""
    from safetensors import SafetensorError, safe_open

    _check(folder, c)
    files: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            opened = safe_open(path, framework="np")
        except (SafetensorError, OSError) as error:
            raise BadRun(f"{path} is no whole safetensors file: {error}") from None
        files |= dict.fromkeys(opened.keys(), opened)
    if "lm_head.weight" not in files and "model.embed_tokens.weight" in files:
        files["lm_head.weight"] = files["model.embed_tokens.weight"]
    missing: list[str] = []

    def leaf(path: Any, entry: llama.Leaf, where: Any) -> Any:
        name, turned = _theirs(path)
        stacked = "{}" in name and c.scan
        names = (
            [name.format(i) for i in range(c.layers)]
            if stacked
            else [name.format(path[1].idx if "{}" in name else "")]
        )
        missing.extend(n for n in names if n not in files)
        if missing:
            return None

        def one(name: str, index: tuple[slice, ...]) -> np.ndarray:
            stored = name if name in files[name].keys() else "model.embed_tokens.weight"  # noqa: SIM118
            part = files[name].get_slice(stored)[tuple(reversed(index)) if turned else index]
            return (part.T if turned else part).astype(np.float32)

        def piece(index: tuple[slice, ...]) -> np.ndarray:
            if not stacked:
                return one(names[0], index)
            return np.stack([one(n, index[1:]) for n in names[index[0]]])

        return jax.make_array_from_callback(entry.shape, where, piece)

    is_leaf = lambda x: isinstance(x, llama.Leaf)  # noqa: E731
    params = jax.tree_util.tree_map_with_path(leaf, llama.table(c), llama.shardings(c, mesh), is_leaf=is_leaf)
    if missing:
        raise BadRun(
            f"{folder} has no tensor named {missing[0]} ({len(missing)} are missing): is it a Llama?"
        )
    return params


def _check(folder: Path, c: Model) -> None:
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadRun(f"--init-from {folder}: its config.json cannot be read ({error})") from None
    ropes = found.get("rope_parameters") or {}
    found = {"rope_theta": ropes.get("rope_theta"), "head_dim": None, **found}
    wanted = config_json(c, "")
    names = ["model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "rope_theta"]  # fmt: skip
    differ = [f"{n}: {found.get(n)} there, {wanted[n]} here" for n in names
              if found.get(n) is not None and found.get(n) != wanted[n]]  # fmt: skip
    scaling = found.get("rope_scaling") or (ropes if ropes.get("rope_type") == "llama3" else {})
    if scaling.get("factor", 0) != c.rope_scaling:
        differ.append(f"rope scaling: {scaling.get('factor', 0)} there, {c.rope_scaling} here")
    if differ:
        raise BadRun(f"--init-from {folder} holds another model:\n  " + "\n  ".join(differ))
