"""Audits a served checkpoint: what its tensors are, what a loader makes of them, and how they differ from training."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from policyc.base.files import explain_unreadable, parse_json, read_json
from policyc.base.progress import track
from policyc.serving.formats import (
    BOUNDS,
    E4M3,
    FILE_FORMATS,
    MODELOPT,
    Array,
    FileFormat,
    StoredLinear,
    group_names,
    tile_rows,
    unswizzle,
)
from policyc.serving.layout_evidence import Profile, find_own_maxima, find_swapped, find_swizzled
from policyc.serving.linears import Linear, find_sharing, quantize_served
from policyc.serving.loaders import LoadError, find_algorithms, fuse

_LARGEST_WEIGHT = 1e3  # weights of trained models are below 100
_LARGEST_INPUT = 1e6  # activations of trained models are below 1e5
_TOP_SCALE = 0x7E  # 448


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault of a checkpoint: its code, the modules that have it, what is wrong and what to do."""

    code: str
    modules: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        return f"{self.code}: {group_names(self.modules)}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedLinear:
    """A linear of a checkpoint.

    Attributes:
      format: of its weight: nvfp4, fp8, fp8-row, or the dtype if it is not quantized.
      block: the elements that share a scale: 1x16, 16x16, row or tensor.
      served: the format that the loader expects; empty if none.
      outer: the outer scale; None if it is not quantized.
      static_input: whether the file has an outer scale for its activation.
      dead: the fraction of blocks whose scale is zero, but not their codes; None if there are none.
      saturated: the fraction of blocks with the largest scale, or of FP8 codes with the largest magnitude.
      error: the norm of the difference to the master weights over their norm; None without them.
      changed: the fraction of codes that differ from those of the policy; None without a run.
    """

    module: str
    format: str
    block: str = ""
    served: str = ""
    outer: float | None = None
    static_input: bool = False
    dead: float | None = None
    saturated: float | None = None
    error: float | None = None
    changed: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    folder: Path
    file_format: str
    linears: tuple[AuditedLinear, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a checkpoint should be: the linears of a policy, and whether their weights can be loaded."""

    linears: Sequence[Linear]
    has_weights: bool


def audit(folder: Path, reference: Reference | None = None) -> Audit:
    """Audits the checkpoint in a folder. Raises ValueError if it cannot be read or is not quantized."""
    names, load, configs, file_format = _open_checkpoint(folder)
    faults: list[tuple[str, str, str]] = []  # code, module, message
    modules = _find_modules(names, load)
    stored: dict[str, StoredLinear | None] = {}
    for module in track(modules):
        try:
            stored[module] = file_format.read(module, names, load)
        except ValueError as error:
            faults.append(("unreadable-tensors", module, str(error)))
    served = _expand(configs, modules, stored, faults)
    rows = []
    profiles: dict[str, Profile] = {}
    for module, linear in track(stored.items()):
        row = AuditedLinear(module=module, format="", served=served.get(module, ""))
        if linear is None:
            rows.append(replace(row, format=str(load(f"{module}.weight").dtype)))
            continue
        found = list(find_faults(linear))
        if not found:
            profiles[module] = Profile.of(linear, linear.block_values())
            found += find_swizzled(linear) if reference is None or not reference.has_weights else ()
        faults += ((code, module, text) for code, text in found)
        rows.append(_describe(row, linear))
    quantized = {module: linear for module, linear in stored.items() if linear is not None}
    faults += _find_fused_faults(quantized, file_format)
    if reference is None or not reference.has_weights:
        norms = {name: load(name) for name in names if name.endswith("norm.weight")}
        packed = [module for module in profiles if quantized[module].scales is not None]
        faults += find_swapped(profiles, packed, norms)
        faults += find_own_maxima(profiles, quantized)
    if reference is not None:
        rows = list(_compare_all(rows, stored, reference, faults))
    findings: dict[tuple[str, str], list[str]] = {}
    for code, module, message in faults:
        findings.setdefault((code, message), []).append(module)
    return Audit(
        folder=folder,
        file_format=file_format.name,
        linears=tuple(rows),
        findings=tuple(
            Finding(code=code, modules=tuple(where), message=text) for (code, text), where in findings.items()
        ),
    )


# ---- reading


def read_linears(folder: Path) -> dict[str, StoredLinear | None]:
    """The linears of a checkpoint; None for those that are not quantized. Raises ValueError if it cannot be read."""
    names, load, _, file_format = _open_checkpoint(folder)
    return {module: file_format.read(module, names, load) for module in _find_modules(names, load)}


def _open_checkpoint(
    folder: Path,
) -> tuple[list[str], Callable[[str], Array], dict[str, dict[str, Any]], FileFormat]:
    """The names of all tensors, a function that loads one, and how the file is described: by itself, and its format."""
    names, load = _open_tensors(folder)
    configs = _read_configs(folder)
    method = str(next(iter(configs.values())).get("quant_method", "modelopt"))
    file_format = FILE_FORMATS.get("modelopt" if method.startswith("modelopt") else method)
    if file_format is None:
        raise ValueError(f"'{folder}' has quant_method {method}: only {' and '.join(FILE_FORMATS)} are known")
    return names, load, configs, file_format


def _open_tensors(folder: Path) -> tuple[list[str], Callable[[str], Array]]:
    """The names of all tensors of a checkpoint, and a function that loads one."""
    tensors: dict[str, tuple[Path, int, Mapping[str, Any]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with explain_unreadable(file, "safetensors"), file.open("rb") as stream:
            start = 8 + int.from_bytes(stream.read(8), "little")
            size = file.stat().st_size
            if start > size:
                raise ValueError("truncated")
            header = parse_json(stream.read(start - 8))
            for name, about in header.items():
                if name != "__metadata__":
                    shape, (first, last) = about["shape"], about["data_offsets"]
                    if (
                        start + last > size
                        or last - first != math.prod(shape) * _DTYPES[about["dtype"]].itemsize
                    ):
                        raise ValueError("truncated")
                    tensors[name] = file, start + first, about
    if not tensors:
        raise ValueError(f"'{folder}' has no safetensors")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        with explain_unreadable(index, "a trainer"):
            listed = set(read_json(index)["weight_map"])
        if missing := sorted(listed - set(tensors)):
            raise ValueError(f"'{folder}' lacks {group_names(missing)}")

    def load(name: str) -> Array:
        file, offset, about = tensors[name]
        shape = tuple(about["shape"])
        return (
            np.memmap(file, _DTYPES[about["dtype"]], "r", offset, shape)
            if math.prod(shape)
            else np.zeros(shape)
        )

    return list(tensors), load


_DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": E4M3,
    "F64": np.dtype("f8"),
    "F32": np.dtype("f4"),
    "F16": np.dtype("f2"),
    "I64": np.dtype("i8"),
    "I32": np.dtype("i4"),
    "I16": np.dtype("i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
"""The types of safetensors. The library gives numpy no tensors in FP8."""


def _read_configs(folder: Path) -> dict[str, dict[str, Any]]:
    """The descriptions of the quantization, by file. Loaders prefer config.json."""
    found: dict[str, dict[str, Any]] = {}
    for name, key in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        path = folder / name
        if path.exists():
            with explain_unreadable(path, "a quantizer"):
                content = read_json(path)
                if key in content:
                    found[name] = content[key] if name == "config.json" else content
    if not found:
        raise ValueError(
            f"'{folder}' is not quantized: neither config.json nor hf_quant_config.json says how"
        )
    return found


def _find_modules(names: Sequence[str], load: Callable[[str], Array]) -> list[str]:
    """The linears of a checkpoint: modules with codes, and with other matrices except embeddings."""
    found: dict[str, None] = {}
    for name in sorted(names, key=lambda n: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", n)]):
        module, _, suffix = name.rpartition(".")
        if suffix == "weight_packed" or (
            suffix == "weight" and "embed" not in module and load(name).ndim == 2
        ):
            found[module] = None
    return list(found)


def _expand(
    configs: Mapping[str, Mapping[str, Any]],
    modules: Sequence[str],
    stored: Mapping[str, StoredLinear | None],
    faults: list[tuple[str, str, str]],
) -> dict[str, str]:
    """The format that a loader expects of each linear, from config.json if there is one."""
    expected: dict[str, str] = {}
    for file, config in reversed(list(configs.items())):
        try:
            expected = find_algorithms(config, modules)
        except LoadError as error:
            faults.append(("refused-by-loaders", file, str(error)))
            continue
        for module, linear in stored.items():
            actual = "" if linear is None else linear.format
            if expected[module] == actual:
                continue
            if not actual:
                text = (
                    "it is not quantized, and the loader expects codes: add its full name to the ignore list"
                )
                faults.append(("missing-ignore", module, f"{file}: {text}"))
            elif not expected[module]:
                text = "it has codes, and the loader takes it as not quantized: an entry of the ignore list matches it"
                faults.append(("ignored-codes", module, f"{file}: {text}"))
            else:
                faults.append(
                    (
                        "wrong-format",
                        module,
                        f"{file}: it is {actual}, and the loader expects {expected[module]}",
                    )
                )
    return expected


# ---- one linear


def find_faults(linear: StoredLinear) -> Iterator[tuple[str, str]]:
    """Yields code and message of what is wrong with a linear by itself."""
    if not ((linear.outer > 0) & (linear.outer < np.inf)).all():
        yield "outer-scale", "its outer scale is zero, negative, infinite or NaN"
        return
    outer = float(np.max(linear.outer))
    if linear.scales is not None and (linear.scales >= 0x7F).any():
        yield "block-scales", "some of its block scales are NaN or negative"
        return
    top = float(np.max(np.abs(linear.block_values()), initial=0))
    if not np.isfinite(top):
        yield "codes", "some of its codes are NaN"
    elif top * outer > _LARGEST_WEIGHT > top / outer:
        yield (
            "reciprocal-scale",
            f"its largest weight would be {top * outer:.1e}: the outer scale is stored inverted",
        )
    bound, scale = BOUNDS[linear.format], linear.input_outer
    if scale is not None and not 0 < bound * float(scale) < _LARGEST_INPUT:
        amax = bound * float(scale)
        yield (
            "reciprocal-scale",
            f"its largest activation would be {amax:.1e}: the input scale is stored inverted",
        )


def _describe(row: AuditedLinear, linear: StoredLinear) -> AuditedLinear:
    row = replace(
        row,
        format=linear.format,
        outer=float(np.max(linear.outer)),
        static_input=linear.input_outer is not None,
    )
    if linear.scales is None:
        block = "row" if linear.format == "fp8-row" else "tensor"
        return replace(row, block=block, saturated=float(np.mean(linear.codes & 0x7F == _TOP_SCALE)))
    blocks = (linear.nibbles() & 7).reshape(*linear.scales.shape, -1)
    return replace(
        row,
        block=f"{tile_rows(linear.scales)}x16",
        dead=float(np.mean((linear.scales == 0) & blocks.any(-1))),
        saturated=float(np.mean(linear.scales == _TOP_SCALE)),
    )


def _find_fused_faults(
    quantized: Mapping[str, StoredLinear], file_format: FileFormat
) -> Iterator[tuple[str, str, str]]:
    """Linears that servers run as one: they take the largest stored scale for all, and do not rescale the blocks."""
    worst: dict[str, list[tuple[str, float]]] = {}
    for modules in fuse(quantized).values():
        group = [quantized[module] for module in modules]
        if any(linear.format == "fp8-row" for linear in group):
            continue
        scales = [float(linear.outer) for linear in group]
        taken = max(scales) if file_format is MODELOPT or group[0].format == "fp8" else min(scales)
        pairs = [
            (m, max(taken / s, s / taken)) for m, s in zip(modules, scales, strict=True) if 0 < s != taken
        ]
        worst.setdefault(group[0].format, []).extend(pairs)
    effects = {
        "nvfp4": "without rescaling its blocks: its weights would be wrong by a factor of up to {:.3g}",
        "fp8": "and quantize it again, by a factor of up to {:.3g}",
    }
    for format, differing in worst.items():
        for module, _ in differing:
            factor = max(factor for _, factor in differing)
            text = f"servers run it with others under one outer scale, {effects[format].format(factor)}"
            yield "fused-scales", module, text


# ---- against training


def _compare_all(
    rows: Sequence[AuditedLinear],
    stored: Mapping[str, StoredLinear | None],
    reference: Reference,
    faults: list[tuple[str, str, str]],
) -> Iterator[AuditedLinear]:
    """The rows with differences to the policy and the weights. Appends what disagrees."""
    by_name, sharing = (
        {linear.module: linear for linear in reference.linears},
        find_sharing(reference.linears),
    )
    found = {row.module: row for row in rows}
    missing, unknown = sorted(set(by_name) - set(stored)), sorted(set(found) - set(by_name))
    faults.extend(
        ("missing-linear", module, "the policy has it, and the file does not") for module in missing
    )
    faults.extend(("unknown-linear", module, "the file has it, and the model does not") for module in unknown)
    for modules in track(fuse(m for m in by_name if m in found).values()):
        group = [by_name[module] for module in modules]
        weights = [linear.load().astype(np.float32) for linear in group] if reference.has_weights else []
        expected: Sequence[StoredLinear | None] = [None] * len(group)
        if weights and all(linear.format for linear in group):
            expected = [stored for stored, _ in quantize_served(group, sharing)]
        for number, (linear, module) in enumerate(zip(group, modules, strict=True)):
            actual = stored[module]
            if linear.format != (actual.format if actual else ""):
                text = f"the policy says {linear.format or 'bf16'}, and the file has {found[module].format}"
                faults.append(("policy-disagrees", module, text))
            if not weights or actual is None:
                continue
            amax = max(float(np.abs(weight).max(initial=0)) for weight in weights)
            found[module], fault = _compare(found[module], actual, expected[number], weights[number], amax)
            if fault:
                faults.append((fault[0], module, fault[1]))
    yield from (found[row.module] for row in rows)


def _compare(
    row: AuditedLinear,
    actual: StoredLinear,
    expected: StoredLinear | None,
    weight: npt.NDArray[np.float32],
    amax: float,
) -> tuple[AuditedLinear, tuple[str, str] | None]:  # fmt: skip
    """The row with its difference to training, and what explains it if it is not rounding."""
    codes = actual.code_bytes()
    if codes.shape != weight.shape:
        return row, ("other-weights", f"its shape is not that of the weight, {weight.shape}")
    if expected is not None and expected.format == actual.format:
        row = replace(row, changed=float(np.mean(codes != expected.code_bytes())))
    values = actual.values()
    row = replace(row, error=_distance(values, weight))
    return row, _explain(actual, values, weight, row.error or 0.0, amax)


def _explain(
    actual: StoredLinear, values: npt.NDArray[np.float32], weight: npt.NDArray[np.float32], error: float, amax: float
) -> tuple[str, str] | None:  # fmt: skip
    """The fault that explains a difference: the one without which less than half of it is left."""
    hypotheses: dict[tuple[str, str], Callable[[], npt.NDArray[np.float32]]] = {
        ("reciprocal-scale", "the outer scale is stored inverted"):
            lambda: replace(actual, outer=np.float32(1) / actual.outer).values(),
    }  # fmt: skip
    if actual.scales is not None:
        rows, columns = actual.scales.shape
        swapped = replace(actual, codes=((actual.codes >> 4) | (actual.codes << 4)).astype(np.uint8))
        hypotheses["swapped-nibbles", "the even column is in the high nibble"] = swapped.values
        if rows % 128 == 0 and columns % 4 == 0:
            text = "block scales are in the order of GEMM kernels: store them in row order"
            hypotheses["swizzled-scales", text] = replace(actual, scales=unswizzle(actual.scales)).values
    factor = float(np.vdot(values, weight) / (np.vdot(values, values) or 1))
    if factor > 0 and abs(np.log(factor)) > 0.02:  # more than rounding does
        times = f"its values are {1 / factor:.3g} times the weights"
        text = f"{times}: block scales and outer scale belong to different maxima"
        hypotheses["wrong-outer-scale", text] = partial(np.multiply, values, np.float32(factor))
    with np.errstate(all="ignore"):
        for fault, decode in hypotheses.items():
            if not _distance(decode(), weight) > error / 2:
                return fault
    held = BOUNDS[actual.format] * float(np.max(actual.outer))
    if held < amax * (1 - 1e-3) and not (actual.scales is not None and (actual.scales < _TOP_SCALE).all()):
        return (
            "wrong-outer-scale",
            "its outer scale is that of a smaller maximum than the largest weight of its group: it saturates",
        )
    if error > 0.5:  # rounding to four bits is below 0.2
        return "other-weights", "its values are not those of the run"
    return None


def _distance(values: npt.NDArray[np.float32], weight: npt.NDArray[np.float32]) -> float:
    """The norm of the difference over that of the weight."""
    distance = np.linalg.norm(values.astype(np.float64) - weight) / (
        np.linalg.norm(weight.astype(np.float64)) or 1
    )
    return float(distance) if np.isfinite(distance) else float("inf")


# ---- output


def as_text(result: Audit) -> str:
    """A line for all linears that differ only in their layer, then the findings."""
    groups: dict[tuple[Any, ...], list[AuditedLinear]] = {}
    for row in result.linears:
        key = re.sub(r"\.\d+\.", ".*.", row.module), row.format, row.block, row.served, row.static_input
        groups.setdefault(key, []).append(row)
    lines = [f"{result.folder}: {result.file_format}", ""]
    header = ("linears", "", "format", "block", "loader", "input", "dead", "saturated", "error", "changed")
    table = [header]
    for (name, format, block, served, is_static), rows in groups.items():
        largest = [
            _percent(max((v for r in rows if (v := getattr(r, field)) is not None), default=None))
            for field in ("dead", "saturated", "error", "changed")
        ]
        scale = "static" if is_static else "-"
        table.append((name, f"x{len(rows)}", format, block or "-", served or "-", scale, *largest))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines += [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    lines += ["", *map(str, result.findings)] if result.findings else ["", "no findings"]
    return "\n".join(lines) + "\n"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def as_json(result: Audit) -> str:
    """Every linear, and the findings."""
    return json.dumps({**asdict(result), "folder": str(result.folder)}, indent=1) + "\n"
