"""Weights as safetensors in the Hugging Face layout of Llama, or of Mixtral if there are experts, with a tokenizer.

Hugging Face stores a linear as (out, in), one tensor per layer and expert. Here it is (in, out); experts are stacked,
and so are layers that are scanned.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from policyc.models.llama import configs, partition
from policyc.models.llama import model as llama
from policyc.models.llama.configs import ConfigError, ModelConfig
from policyc.models.llama.data import END, END_TOKENS
from policyc.models.llama.tensor_files import write_folder

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
HF_NAMES = {"embed": EMBED, "norm": "model.norm.weight", "lm_head": HEAD, "attention": "self_attn",
            "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}  # fmt: skip
MIXTRAL_NAMES = {
    "mlp": "block_sparse_moe",
    "router": "gate",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}
HF_FIELDS = {"hidden_size": "width", "intermediate_size": "hidden", "num_hidden_layers": "layers",
             "head_dim": "head_dim", "num_attention_heads": "heads", "num_key_value_heads": "kv_heads",
             "vocab_size": "vocab", "rms_norm_eps": "norm_eps", "rope_theta": "rope_theta"}  # fmt: skip
EXPERT_FIELDS = {"num_local_experts": "experts", "num_experts_per_tok": "experts_per_token"}
LLAMA3_ROPE: dict[str, float] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Fixed properties of this model. A config.json with another value belongs to another model.
FIXED_FIELDS: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
MIXTRAL_FIELDS: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_act": "silu",
    "sliding_window": None,
    "router_jitter_noise": 0.0,
}


def hf_tensors(path: tuple[Any, ...], config: ModelConfig) -> tuple[np.ndarray, bool]:
    """The names of a parameter's tensors, in an array with its stacked axes, and whether they are stored transposed."""
    names = [str(entry.key) for entry in path if hasattr(entry, "key")]
    is_transposed = names[-1].endswith(("_proj", "lm_head", "router"))
    if names[0] != "layers":
        return np.array(HF_NAMES[names[0]], object), is_transposed
    renamed = HF_NAMES | (MIXTRAL_NAMES if config.experts else {})
    inner = ".".join(renamed.get(name, name) for name in names[1:])
    layers = range(config.layers) if config.scan else [path[1].idx]
    tensors: list[Any] = [f"model.layers.{layer}.{inner}.weight" for layer in layers]
    if "experts" in names:
        numbers = range(config.experts)
        tensors = [[name.replace("experts", f"experts.{n}") for n in numbers] for name in tensors]
    return np.array(tensors if config.scan else tensors[0], object), is_transposed


def tensor_names(config: ModelConfig) -> dict[str, str]:
    """The names of tensors for `policyc.export`: by parameter, with {layer} and {expert} for indices."""
    names = {}
    one = replace(config, scan=True, layers=1, experts=min(1, config.experts))
    for path, _ in jax.tree.leaves_with_path(llama.param_specs(one)):
        tensor = str(hf_tensors(path, one)[0].flat[0])
        key = ".".join(str(entry.key) for entry in path)
        names[key] = tensor.replace("layers.0.", "layers.{layer}.").replace("experts.0.", "experts.{expert}.")
    return names


def hf_config(config: ModelConfig, dtype: str, positions: int) -> dict[str, Any]:
    """The content of config.json. `positions` is the length of the sequences that the model was trained on."""
    fixed = {
        "architectures": ["MixtralForCausalLM" if config.experts else "LlamaForCausalLM"],
        "torch_dtype": dtype,
        "tie_word_embeddings": False,
        **_fixed_fields(config),
    }
    rope = {"rope_type": "llama3", "factor": config.rope_scaling, **LLAMA3_ROPE}
    sizes = {name: getattr(config, field) for name, field in _size_fields(config).items()}
    scaling = {"rope_scaling": rope if config.rope_scaling else None}
    losses = {"router_aux_loss_coef": config.balance_loss} if config.experts else {}
    return {**fixed, **sizes, **scaling, **losses, "max_position_embeddings": positions}


def _fixed_fields(config: ModelConfig) -> dict[str, Any]:
    return MIXTRAL_FIELDS if config.experts else FIXED_FIELDS


def _size_fields(config: ModelConfig) -> dict[str, str]:
    return HF_FIELDS | (EXPERT_FIELDS if config.experts else {})


def export_files(
    config: ModelConfig, positions: int, tokenizer: str | None, dtype: str = "bfloat16"
) -> dict[str, str]:
    """The files of an export other than its tensors."""
    content = json.dumps(hf_config(config, dtype, positions), indent=1)
    return {"config.json": content, **tokenizer_files(tokenizer)}


def tokenizer_files(tokenizer: str | None) -> dict[str, str]:
    """The files from which `AutoTokenizer` reads the tokenizer of a run. Without one, tokens are bytes."""
    if tokenizer is not None:
        text = configs.read_file(Path(tokenizer)).decode("utf-8")
        contents = {token["content"] for token in json.loads(text).get("added_tokens", ())}
        end = next((token for token in END_TOKENS if token in contents), None)
    else:
        end, text = END_TOKENS[0], json.dumps(_byte_tokenizer(END_TOKENS[0]), ensure_ascii=False)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    return {"tokenizer.json": text, "tokenizer_config.json": json.dumps(about, indent=1)}


def _byte_tokenizer(end: str) -> dict[str, Any]:
    """A tokenizer.json in which every byte is a token. Unprintable bytes are written as characters from U+0100 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = {
        "id": END,
        "content": end,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    }
    return {"version": "1.0", "added_tokens": [{**added, "special": True}], "pre_tokenizer": byte_level,
            "decoder": byte_level, "model": {"type": "BPE", "vocab": letters, "merges": []}}  # fmt: skip


def save_safetensors(
    params: Any, config: ModelConfig, folder: Path, files: Mapping[str, str], dtype: str = "bfloat16"
) -> None:
    """Writes weights and `files` to a folder, which gets its name only when it is complete."""
    write_folder(folder, _numpy_tensors(params, config, dtype), files)


def _numpy_tensors(params: Any, config: ModelConfig, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    for path, value in jax.tree_util.tree_flatten_with_path(params)[0]:
        names, is_transposed = hf_tensors(path, config)
        whole = np.asarray(multihost_utils.process_allgather(value, tiled=True))
        for index, name in np.ndenumerate(names):
            array = whole[index].astype(jax.numpy.dtype(dtype))
            yield name, np.ascontiguousarray(array.T if is_transposed else array)


def _read_hf_config(folder: Path) -> dict[str, Any]:
    """A config.json with the RoPE fields merged in. Transformers 4 calls them rope_scaling, 5 rope_parameters."""
    theirs = configs.parse_json(configs.read_file(folder / "config.json"))
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    lengths = {name: rope.get(name) for name in LLAMA3_ROPE}
    return {**rope, **theirs, **lengths, "rope_type": kind, "rope_factor": rope.get("factor", 0.0)}


def read_config(folder: Path) -> ModelConfig:
    """The model of a folder in the Hugging Face layout. Raises ConfigError if it is no Llama or Mixtral."""
    try:
        theirs = _read_hf_config(folder)
        sizes = HF_FIELDS | (EXPERT_FIELDS if theirs.get("model_type") == "mixtral" else {})
        given = {field: theirs[name] for name, field in sizes.items() if theirs.get(name) is not None}
        given.setdefault("head_dim", given["width"] // given["heads"])
        given.setdefault("kv_heads", given["heads"])
        config = ModelConfig(**given, rope_scaling=float(theirs["rope_factor"] or 0))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / 'config.json'} cannot be read as that of a Llama: {error!r}") from None
    _check_same_model(folder, theirs, config)
    return config


def load_safetensors(folder: Path, config: ModelConfig, mesh: Mesh) -> Any:
    """Parameters in float32. Each device reads only its own part."""
    slices: dict[str, Any] = {}
    file = folder / "config.json"
    try:
        theirs = _read_hf_config(folder)
        for file in sorted(folder.glob("*.safetensors")):
            opened: Any = safe_open(file, framework="np")
            slices |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, ValueError, AttributeError, SafetensorError) as error:
        raise ConfigError(f"{folder}: {file.name} cannot be read; truncated? {error}") from None
    _check_same_model(folder, theirs, config)
    if HEAD not in slices and EMBED in slices:
        slices[HEAD] = slices[EMBED]
        note = f"{folder} has no head: the head starts as a copy of the embedding and is no longer tied to it"
        print(note, file=sys.stderr)

    specs = llama.param_specs(config)
    used = {name for path, _ in jax.tree.leaves_with_path(specs) for name in hf_tensors(path, config)[0].flat}
    if unused := sorted(
        name for name in slices if name not in used and not name.endswith("rotary_emb.inv_freq")
    ):
        others = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise ConfigError(
            f"{folder} has the tensor {unused[0]}{others}, which this model does not use: is it a Llama?"
        )

    def load(path: Any, spec: llama.ParamSpec) -> jax.Array:
        names, is_transposed = hf_tensors(path, config)
        if missing := [name for name in names.flat if name not in slices]:
            raise ConfigError(f"{folder} has no tensor named {missing[0]}: is it a Llama?")

        def read(index: Any) -> np.ndarray:
            part, tensors = index[names.ndim :], np.asarray(names[index[: names.ndim]])
            arrays = [slices[n][part[::-1]].T if is_transposed else slices[n][part] for n in tensors.flat]
            return np.stack(arrays).reshape(*tensors.shape, *arrays[0].shape).astype(np.float32)

        return jax.make_array_from_callback(spec.shape, partition.sharding(mesh, spec.axes), read)

    return jax.tree.map_with_path(load, specs)


def _check_same_model(folder: Path, theirs: dict[str, Any], config: ModelConfig) -> None:
    """Raises ConfigError if a config.json describes another model."""
    ours = {**hf_config(config, "", 0), "rope_type": "llama3" if config.rope_scaling else "default",
            "rope_factor": config.rope_scaling, **LLAMA3_ROPE}  # fmt: skip
    compared = [*_size_fields(config), *_fixed_fields(config), "rope_type", "rope_factor"]
    if theirs["rope_type"] == ours["rope_type"] == "llama3":
        compared += LLAMA3_ROPE
    names = [name for name in compared if theirs.get(name) not in (None, ours[name])]
    if names:
        differences = "".join(f"\n  {name}: {theirs[name]} there, {ours[name]} here" for name in names)
        raise ConfigError(f"{folder} holds another model:{differences}\nchange --config or these sizes")
