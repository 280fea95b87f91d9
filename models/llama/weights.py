"""Weights as safetensors in the Hugging Face layout, in and out.

In: a folder and a model. Out: parameters on their devices; or a folder that transformers reads. The one trap: Hugging
Face keeps a linear as (out, in), one tensor for each layer; here it is (in, out), and scanned layers are stacked.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from llama import model as llama
from llama.configs import BadRun, Model, library

SHARD_BYTES = 5 * 10**9
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NAMES = {"embed": EMBED, "norm": "model.norm.weight", "lm_head": HEAD, "attention": "self_attn",
         "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}  # fmt: skip


def theirs(path: tuple[Any, ...], c: Model) -> tuple[list[str], bool]:
    """The names of a parameter's tensors, one or a layer's each, and whether they are turned."""
    names = [str(k.key) for k in path if hasattr(k, "key")]
    turned = names[-1].endswith(("_proj", "lm_head"))
    if names[0] != "layers":
        return [NAMES[names[0]]], turned
    inner = ".".join(NAMES.get(n, n) for n in names[1:])
    layers = range(c.layers) if c.scan else [path[1].idx]
    return [f"model.layers.{i}.{inner}.weight" for i in layers], turned


def config_json(c: Model, dtype: str = "bfloat16") -> dict[str, Any]:
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
    write = library("safetensors.numpy", "train").save_file
    unfinished = folder.with_name(folder.name + ".unfinished")
    total = sum(a.size for a in jax.tree.leaves(params)) * jax.numpy.dtype(dtype).itemsize
    count, done, files = math.ceil(total / SHARD_BYTES), 0, {}

    def file_of(tensor: tuple[str, np.ndarray]) -> str:
        nonlocal done
        name, array = tensor
        files[name] = f"model-{done * count // total + 1:05d}-of-{count:05d}.safetensors"
        files[name] = files[name] if count > 1 else "model.safetensors"
        done += array.nbytes
        return files[name]

    unfinished.mkdir(parents=True, exist_ok=True)
    for file, tensors in itertools.groupby(_tensors(params, c, dtype), file_of):
        held = dict(tensors)
        if jax.process_index() == 0:
            write(held, unfinished / file, metadata={"format": "pt"})
    if jax.process_index() == 0:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        if count > 1:
            (unfinished / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        (unfinished / "config.json").write_text(json.dumps(config_json(c, dtype), indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)


def _tensors(params: Any, c: Model, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    for path, value in jax.tree_util.tree_flatten_with_path(params)[0]:
        names, turned = theirs(path, c)
        whole = multihost_utils.process_allgather(value, tiled=True) if jax.process_count() > 1 else value
        for name, one in zip(names, whole if c.scan and path[0].key == "layers" else [whole], strict=True):
            array = np.asarray(one).astype(jax.numpy.dtype(dtype))
            yield name, np.ascontiguousarray(array.T if turned else array)


def load(folder: Path, c: Model, mesh: Mesh) -> Any:
    """Parameters in fp32, each device reading its own part."""
    safetensors = library("safetensors", "train")
    _check(folder, c)
    files: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            opened = safetensors.safe_open(path, framework="np")
        except (safetensors.SafetensorError, OSError) as error:
            raise BadRun(f"{path} is no whole safetensors file: {error}") from None
        files |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
    if HEAD not in files and EMBED in files:
        files[HEAD] = files[EMBED]
        print(
            f"{folder} has no head of its own: it begins as a copy of the embedding, and is trained by itself"
        )

    def leaf(path: Any, entry: llama.Leaf, where: Any) -> Any:
        names, turned = theirs(path, c)

        def one(name: str, index: tuple[slice, ...]) -> np.ndarray:
            part = files[name][tuple(reversed(index)) if turned else index]
            return (part.T if turned else part).astype(np.float32)

        def piece(index: tuple[slice, ...]) -> np.ndarray:
            if len(entry.shape) == len(files[names[0]].get_shape()):
                return one(names[0], index)
            return np.stack([one(n, index[1:]) for n in names[index[0]]])

        return jax.make_array_from_callback(entry.shape, where, piece)

    is_leaf = lambda x: isinstance(x, llama.Leaf)  # noqa: E731
    tree = jax.tree_util.tree_flatten_with_path(llama.table(c), is_leaf=is_leaf)[0]
    missing = [name for path, _ in tree for name in theirs(path, c)[0] if name not in files]
    if missing:
        raise BadRun(
            f"{folder} has no tensor named {missing[0]} ({len(missing)} are missing): is it a Llama?"
        )
    return jax.tree_util.tree_map_with_path(leaf, llama.table(c), llama.shardings(c, mesh), is_leaf=is_leaf)


def _check(folder: Path, c: Model) -> None:
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise BadRun(f"--init-from {folder}: its config.json cannot be read ({error})") from None
    ropes = found.get("rope_parameters") or found.get("rope_scaling") or {}  # as transformers 5 and 4 say it
    found = {"rope_theta": ropes.get("rope_theta")} | found | {"rope_scaling": ropes.get("factor", 0.0)}
    named = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "rope_theta")  # fmt: skip
    wanted = {n: config_json(c)[n] for n in named} | {"rope_scaling": c.rope_scaling}
    differ = [
        f"{n}: {found[n]} there, {w} here" for n, w in wanted.items() if found.get(n, w) not in (w, None)
    ]
    if differ:
        raise BadRun(f"--init-from {folder} holds another model:\n  " + "\n  ".join(differ))
