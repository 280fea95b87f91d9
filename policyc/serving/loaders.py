"""What the loaders of inference servers make of the modules of a file: which are quantized, and which are fused.

The rules are those of vLLM's `modelopt.py` and `compressed_tensors/utils.py` (0.19), which SGLang shares, and of the
package compressed-tensors (0.20), which transformers uses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from policyc.serving.formats import ALGORITHMS

FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
}
"""The linears that servers run as one, with one outer scale for all. Those of w13 are of one expert."""
_FUSED_NAMES = {part: fused for fused, parts in FUSED.items() for part in parts}


class LoadError(ValueError):
    """A server refuses to load the file."""


def fused_name(module: str) -> str:
    """The name of the server's module that runs a linear: `mlp.gate_up_proj` for `mlp.gate_proj`."""
    parent, dot, name = module.rpartition(".")
    return f"{parent}{dot}{_FUSED_NAMES.get(name, name)}"


def fuse(modules: Iterable[str]) -> dict[str, list[str]]:
    """The linears of each module of the server."""
    groups: dict[str, list[str]] = {}
    for module in modules:
        groups.setdefault(fused_name(module), []).append(module)
    return groups


def find_algorithms(config: Mapping[str, Any], modules: Sequence[str]) -> dict[str, str]:
    """The format that a loader expects of each linear; empty for those it takes as they are.

    Args:
      config: the `quantization_config` of config.json, or the content of hf_quant_config.json.
      modules: the linears of the file.

    Raises LoadError if a server refuses the file.
    """
    method = str(config.get("quant_method", "modelopt" if "quantization" in config else ""))
    if method.startswith("modelopt"):
        return _find_for_modelopt(config, modules)
    if method == "compressed-tensors":
        return _find_for_compressed_tensors(config, modules)
    raise LoadError(f"quant_method is '{method}': only modelopt and compressed-tensors are known")


# ---- ModelOpt


def _find_for_modelopt(config: Mapping[str, Any], modules: Sequence[str]) -> dict[str, str]:
    settings: Mapping[str, Any] = config.get("quantization", config)
    ignore = settings.get("exclude_modules", settings.get("ignore", [])) or []
    algorithm = str(settings.get("quant_algo", "")).upper()
    layers: Mapping[str, Mapping[str, str]] = settings.get("quantized_layers", {})
    if algorithm != "MIXED_PRECISION" and algorithm not in ALGORITHMS:
        raise LoadError(f"quant_algo is '{algorithm}': known are {', '.join(ALGORITHMS)} and MIXED_PRECISION")
    if missing := [key for key in _REQUIRED if "quantization" in config and key not in settings]:
        raise LoadError(f"hf_quant_config.json lacks {', '.join(missing)}")
    found: dict[str, str] = {}
    for served, parts in fuse(modules).items():
        names = {algorithm}
        if excludes(ignore, served, parts):
            names = {""}
        elif algorithm == "MIXED_PRECISION":
            names = {layers.get(part, {}).get("quant_algo", "").upper() for part in parts}
        if len(names) > 1:
            raise LoadError(
                f"{served} would have several formats: {', '.join(sorted(n or 'none' for n in names))}"
            )
        found |= dict.fromkeys(parts, ALGORITHMS[name][0] if (name := names.pop()) in ALGORITHMS else "")
    return found


_REQUIRED = ("group_size", "kv_cache_quant_algo", "exclude_modules")


def excludes(ignore: Sequence[str], served: str, parts: Sequence[str]) -> bool:
    """Whether ModelOpt's list excludes a module: by a full name, by a part of its name, or by a wildcard.

    The second is why `mlp.gate` also excludes `mlp.gate_up_proj`.
    """
    listed = [part in ignore for part in parts]
    if any(listed) and not all(listed):
        raise LoadError(
            f"the list of excluded modules has a part of {served} only: all of it must have one format"
        )
    return all(listed) or any(entry in served or fnmatchcase(served, entry) for entry in ignore)


# ---- compressed-tensors


def _find_for_compressed_tensors(config: Mapping[str, Any], modules: Sequence[str]) -> dict[str, str]:
    ignore: Sequence[str] = config.get("ignore") or []
    found: dict[str, str] = {}
    for served, parts in fuse(modules).items():
        formats = {part: _format_of(config, part) if not _matches(part, ignore) else "" for part in parts}
        if len(set(formats.values())) > 1:
            each = ", ".join(f"{part.rpartition('.')[2]} {f or 'none'}" for part, f in formats.items())
            raise LoadError(f"{served} would have several formats: {each}")
        found |= formats
    return found


_FORMATS = {
    ("float", 4, "tensor_group"): "nvfp4",
    ("float", 8, "tensor"): "fp8",
    ("float", 8, "channel"): "fp8-row",
}
"""By type, bits and strategy of the weights."""


def _format_of(config: Mapping[str, Any], module: str) -> str:
    """The format of the first group that names a linear, by its name or as a `Linear`."""
    groups: Iterable[Mapping[str, Any]] = config.get("config_groups", {}).values()
    for is_class in (False, True):
        for group in groups:
            targets = group.get("targets", ())
            if "Linear" in targets if is_class else _matches(module, targets):
                weights = group.get("weights") or {}
                key = str(weights.get("type")), weights.get("num_bits", 0), weights.get("strategy", "tensor")
                return _FORMATS.get(key, "another format")
    return ""


def _matches(module: str, targets: Iterable[str]) -> bool:
    return any(re.match(t[3:], module) is not None if t.startswith("re:") else t == module for t in targets)
