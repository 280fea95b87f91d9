"""Writes a model as servers read it, with the codes of training."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from policyc import __version__
from policyc.base.files import explain_unreadable, read_json_lines
from policyc.compiler.matching.decisions import Phase
from policyc.compiler.planning.plan import Plan
from policyc.serving.formats import (
    ALGORITHMS,
    FILE_FORMATS,
    MODELOPT,
    Array,
    FileFormat,
    Scheme,
    StoredLinear,
    describe_for_modelopt,
    describe_quantization,
    group_names,
)
from policyc.serving.linears import (
    Convert,
    Linear,
    Names,
    find_key,
    find_linears,
    find_sharing,
    input_scale,
    plain_tensor,
    quantize_served,
)
from policyc.serving.loaders import find_algorithms, fuse

_MEASUREMENTS = 10  # the last ones of a run, whose largest magnitude sets a static scale

FormatName = Literal["compressed-tensors", "modelopt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A linear whose stored codes are not those of training, because a server runs it with others as one.

    `codes` is the fraction of codes that differ; of values, if `convert` changes the weight. `difference` is the norm
    of the difference of the values over the norm of those of training.
    """

    module: str
    served: str
    codes: float
    difference: float

    def __str__(self) -> str:
        codes, values = 100 * self.codes, 100 * self.difference
        return f"{self.module}: {codes:.2f} % of the codes differ, the values by {values:.2f} %"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written: the folder, the number of linears of each scheme, and what differs from training."""

    folder: Path
    counts: Mapping[str, int]
    changes: tuple[Change, ...]
    bytes: int


def export(
    params: Any,
    plan: Plan,
    *,
    names: Names,
    convert: Mapping[str, Convert] | None = None,
    out: str | Path,
    format: FormatName = "compressed-tensors",
    config: Mapping[str, Any],
    files: Mapping[str, str] | None = None,
    stats: str | Path | None = None,
    phase: Phase | None = None,
    exact: bool = False,
    about: Mapping[str, Any] | None = None,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
) -> Exported:
    """Writes a folder that vLLM, SGLang, TensorRT-LLM or transformers reads, with the codes that training computes.

    Servers run q, k, v and gate, up as one linear each, with one outer scale. Where training used several, not
    `outer=shared`, the weights of such a group are quantized again, and `changes` says what that changed.

    Args:
      params: the parameters that the loss of the plan was traced with.
      plan: what `policyc.plan` returns.
      names: the tensor in the file of each parameter, see `Names`.
      convert: for parameters that the server's model has in another form: a function of the weight [N, K], as its GEMM
        reads it, that permutes rows or multiplies by a factor. `changes` says if codes change.
      out: the folder, which must not exist. It gets its name once it is complete.
      format: the layout of the file.
      config: the content of config.json, without the quantization.
      files: other files to write, such as those of the tokenizer, by name.
      stats: the `stats.jsonl` of a run. Its magnitudes set the static scales of activations. Without it, NVFP4 weights
        are served with activations in BF16, and FP8 activations are scaled per token.
      phase: the phase of the policy's schedule; the last one by default.
      exact: raise an error instead of changing a code.
      about: entries to add to `policyc.json`, which says how the file was made.
      dtype: the type of tensors that are not quantized.

    Returns:
      What was written, and what differs from training.

    Raises:
      ValueError: something cannot be served. The message names the edit of the policy. Nothing is written.
    """
    from policyc.models.llama.tensor_files import write_folder

    file_format, folder = FILE_FORMATS[format], Path(out)
    if folder.exists():
        raise ValueError(f"'{folder}' exists: choose another folder")
    phase = plan.phases[-1] if phase is None else phase
    linears = find_linears(params, plan, phase, names, convert)
    maxima = read_maxima(Path(stats)) if stats is not None else None
    schemes = find_schemes(linears, file_format, is_static=maxima is not None)
    quantization = make_quantization(linears, schemes, file_format)
    plain = _plain_tensors(jax.tree.leaves(params), plan, names, linears, dtype)
    changes: list[Change] = []

    def tensors() -> Iterator[tuple[str, Array]]:
        for linear, stored in _quantize_all(linears, maxima, changes, exact=exact):
            if stored is None:
                yield f"{linear.module}.weight", plain_tensor(linear.load_converted(), dtype)
            else:
                yield from file_format.tensors(linear.module, stored).items()
        yield from plain

    described = {
        "config.json": {**config, "quantization_config": quantization},
        "policyc.json": _describe(plan, phase, schemes) | dict(about or {}),
    }
    if file_format is MODELOPT:
        described["hf_quant_config.json"] = describe_for_modelopt(quantization)
    texts = {name: json.dumps(content, indent=1) + "\n" for name, content in described.items()}
    size = write_folder(folder, tensors(), dict(files or {}) | texts)
    counts: dict[str, int] = {}
    for format_name, is_input in schemes.values():
        scales = "static" if is_input else "no" if format_name == "nvfp4" else "dynamic"
        label = f"{format_name} with {scales} input scales"
        counts[label] = counts.get(label, 0) + 1
    return Exported(folder=folder, counts=counts, changes=tuple(changes), bytes=size)


def find_schemes(linears: Sequence[Linear], file_format: FileFormat, *, is_static: bool) -> dict[str, Scheme]:
    """The scheme of each quantized linear. Raises ValueError if a server runs linears of several formats as one."""
    schemes: dict[str, Scheme] = {
        x.module: (x.format, is_static and not x.scales_tokens) for x in linears if x.format
    }
    if not schemes:
        raise ValueError("the policy quantizes no weight in this phase: there is nothing to export")
    by_name = {linear.module: linear for linear in linears}
    mixed = [
        f"{served}: " + ", ".join(f"{m.rpartition('.')[2]} {by_name[m].format or 'bf16'}" for m in modules)
        for served, modules in fuse(by_name).items()
        if len({by_name[m].format and by_name[m].weight_treatment for m in modules}) > 1
    ]
    if mixed:
        raise ValueError("servers run these linears as one, in one format: give them one recipe\n  "
                         + "\n  ".join(mixed))  # fmt: skip
    if file_format is MODELOPT and (faulty := set(schemes.values()) - set(ALGORITHMS.values())):
        raise ValueError("; ".join(_NOT_OF_MODELOPT[scheme] for scheme in sorted(faulty)))
    return schemes


_NOT_OF_MODELOPT: dict[Scheme, str] = {
    (
        "fp8",
        False,
    ): "ModelOpt's FP8 needs the scales of activations: train with --stats-every and name the run's "
    "stats.jsonl, write fp8(outer=row), or choose compressed-tensors",
    (
        "fp8-row",
        True,
    ): "ModelOpt's FP8 with a scale for each row scales activations per token: write outer=row for "
    "both operands, leave out --stats, or choose compressed-tensors",
}


def make_quantization(
    linears: Sequence[Linear], schemes: Mapping[str, Scheme], file_format: FileFormat
) -> dict[str, Any]:
    """The `quantization_config` of the file. Raises ValueError if a loader would not read it as it is meant."""
    modules = [linear.module for linear in linears]
    ignored = [module for module in modules if module not in schemes]
    config = describe_quantization(file_format, schemes, ignored, __version__)
    for read in [config, *([describe_for_modelopt(config)] if file_format is MODELOPT else [])]:
        found = find_algorithms(read, modules)
        if wrong := [m for m in modules if found[m] != schemes.get(m, ("",))[0]]:
            raise ValueError(f"a loader would take {group_names(wrong)} for "
                             f"{found[wrong[0]] or 'not quantized'}: its list of ignored modules matches by substring, "
                             "so a module that is kept must not be a part of another's name")  # fmt: skip
    return config


def _quantize_all(
    linears: Sequence[Linear], maxima: Mapping[Any, float] | None, changes: list[Change], *, exact: bool
) -> Iterator[tuple[Linear, StoredLinear | None]]:
    by_name, sharing = {linear.module: linear for linear in linears}, find_sharing(linears)
    for served, modules in fuse(by_name).items():
        group = [by_name[module] for module in modules]
        if not group[0].format:
            yield from ((linear, None) for linear in group)
            continue
        scale = None if group[0].scales_tokens else _static_scale(group, maxima)
        for linear, (stored, trained) in zip(group, quantize_served(group, sharing), strict=True):
            if change := _compare(linear, served, trained, stored):
                changes.append(change)
                if exact:
                    edit = "keep these experts" if linear.site.is_ragged else "train with outer=shared"
                    raise ValueError(f"{change}: servers give {served} one outer scale: {edit}")
            yield linear, replace(stored, input_outer=scale)


def _compare(linear: Linear, served: str, trained: StoredLinear, stored: StoredLinear) -> Change | None:
    codes = trained.code_bytes(), stored.code_bytes()
    scales = trained.scales, stored.scales
    same_scales = scales[0] is None or scales[1] is None or np.array_equal(scales[0], scales[1])
    same_outer = np.array_equal(trained.outer, stored.outer)
    if linear.convert is None and same_outer and same_scales and np.array_equal(*codes):
        return None
    a, b = trained.values().astype(np.float64), stored.values().astype(np.float64)
    differs = codes[0] != codes[1]
    if linear.convert is not None:
        a = linear.convert(a)
        differs = np.abs(a - b) > 1e-6 * np.abs(a)  # an outer scale is rounded to fp32
        if not differs.any():
            return None
    return Change(
        module=linear.module,
        served=served,
        codes=float(np.mean(differs)),
        difference=float(np.linalg.norm(a - b) / (np.linalg.norm(a) or 1)),
    )


def _static_scale(group: Sequence[Linear], maxima: Mapping[Any, float] | None) -> np.float32 | None:
    if maxima is None:
        return None
    keys = [(linear.path, linear.layer) for linear in group]
    if missing := [key for key in keys if key not in maxima]:
        path, layer = missing[0]
        where = path if layer is None else f"{path}, layer {layer}"
        raise ValueError(f"the measurements have no activation of {where}: measure the run that you export, under the "
                         "same policy")  # fmt: skip
    return input_scale(group[0].format, max(maxima[key] for key in keys))


def read_maxima(path: Path) -> dict[tuple[str, int | None], float]:
    """The largest magnitude of the activation of each linear, by path and layer, in the last measurements of a run."""
    with explain_unreadable(path, "--stats-every"):
        rows = [row for row in read_json_lines(path) if "step" in row]
        steps = sorted({row["step"] for row in rows})[-_MEASUREMENTS:]
    maxima: dict[tuple[str, int | None], float] = {}
    for row in rows:
        if row["step"] in steps and row.get("operand") == "fprop.activation" and row.get("amax"):
            key = row["site"], row["layer"]
            maxima[key] = max(maxima.get(key, 0.0), row["amax"])
    return maxima


# ---- what is not quantized


def _plain_tensors(
    leaves: Sequence[Any], plan: Plan, names: Names, linears: Sequence[Linear], dtype: str
) -> Iterator[tuple[str, Array]]:
    """The parameters that are not linears. A stack of layers is stored as one tensor for each layer."""
    stored = {linear.path for linear in linears}
    slots = [slot for site in plan.sites for template in site.parameters for slot in template.slots]
    stacks = dict.fromkeys((slot.axis, slot.size) for slot in slots if slot.axis is not None)

    def tensors() -> Iterator[tuple[str, Array]]:
        for path, leaf in zip(plan.sites.parameters, leaves, strict=True):
            named = find_key(path, names)
            assert named is not None  # check_names
            key, index = named
            if key in stored:
                continue
            if "{layer}" not in names[key] or index is not None:
                yield names[key].format(layer=index), plain_tensor(leaf, dtype)
                continue
            axes = [axis for axis, size in stacks if axis < leaf.ndim and leaf.shape[axis] == size]
            if not axes:
                raise ValueError(
                    f"names: {key} has no axis with the layers of the model's sites: leave out {{layer}}"
                )
            for layer in range(leaf.shape[axes[0]]):
                yield names[key].format(layer=layer), plain_tensor(np.take(leaf, layer, axes[0]), dtype)

    return tensors()


# ---- how it was made


def _describe(plan: Plan, phase: Phase, schemes: Mapping[str, Scheme]) -> dict[str, Any]:
    packages = {name: version(name) for name in ("jax", "jaxlib", "numpy")}
    lowerings = (lowering for decision in plan.decisions(phase).values() for lowering in decision.lowerings)
    return {
        "policy": {"name": plan.policy.name, "sha256": plan.policy.sha256, "text": str(plan.policy)},
        "seed": plan.policy.seed,
        "phase": plan.label(phase),
        "backends": sorted({lowering.backend for lowering in lowerings if lowering.backend}),
        "formats": {module: format for module, (format, _) in schemes.items()},
        "versions": {"policyc": __version__, "python": platform.python_version(), **packages},
    }
