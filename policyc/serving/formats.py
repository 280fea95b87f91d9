"""The file formats of inference servers: how they store a quantized linear, and how config.json describes it.

W[N, K] is stored with K last: two E2M1 codes to a byte, the even column in the low nibble, and E4M3 block scales
[N, K/16] in row order. ModelOpt stores the outer scale, compressed-tensors its reciprocal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Bytes: TypeAlias = npt.NDArray[np.uint8]

BLOCK = 16
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BOUNDS = {"nvfp4": 6 * 448.0, "fp8": 448.0, "fp8-row": 448.0}
"""The largest magnitude after division by the outer scale, by format. That of `fp8-row` has one for each row."""
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1_VALUES = np.concatenate([_E2M1, -_E2M1])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLinear:
    """A quantized linear in a file.

    Attributes:
      format: a key of `BOUNDS`.
      codes: [N, K/2] bytes for nvfp4, [N, K] bytes for FP8.
      scales: the bytes of the block scales; None for FP8.
      outer: the outer scale, or those of the rows, [N, 1]: a weight is code times block scale times this.
      input_outer: the outer scale of the activation; None if the file has none.
    """

    format: str
    codes: Bytes
    scales: Bytes | None
    outer: np.float32 | npt.NDArray[np.float32]
    input_outer: np.float32 | None = None

    def nibbles(self) -> Bytes:
        """The E2M1 codes, one to a byte."""
        return np.stack([self.codes & 15, self.codes >> 4], -1).reshape(len(self.codes), -1)

    def code_bytes(self) -> Bytes:
        """The codes of its format, one to a byte."""
        return self.codes if self.scales is None else self.nibbles()

    def block_values(self) -> npt.NDArray[np.float32]:
        """Codes times block scales, which fp32 holds exactly."""
        values: npt.NDArray[np.float32]
        if self.scales is None:
            values = self.codes.view(E4M3).astype(np.float32)
            return values
        values = E2M1_VALUES[self.nibbles()]
        values *= np.repeat(self.scales.view(E4M3).astype(np.float32), BLOCK, axis=1)
        return values

    def values(self) -> npt.NDArray[np.float32]:
        values: npt.NDArray[np.float32] = self.block_values() * self.outer
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """The names of the tensors of an NVFP4 linear. FP8 linears have `weight`, `weight_scale`, `input_scale` in both."""

    name: str
    codes: str
    outer: str
    input_outer: str
    is_reciprocal: bool
    scale_shape: tuple[int, ...]

    def suffixes(self, format: str) -> tuple[str, str, str]:
        """The tensors that hold the codes, the outer scale, and that of the activation."""
        fp8 = ("weight", "weight_scale", "input_scale")
        return (self.codes, self.outer, self.input_outer) if format == "nvfp4" else fp8

    def tensors(self, module: str, linear: StoredLinear) -> dict[str, Array]:
        """The tensors of a linear by name."""
        codes, outer, input_outer = self.suffixes(linear.format)
        is_fp4 = linear.scales is not None

        def scale(outer: np.float32 | Array) -> Array:
            value = np.asarray(1 / outer if is_fp4 and self.is_reciprocal else outer, np.float32)
            return value.reshape(value.shape[:1] + self.scale_shape)

        tensors: dict[str, Array] = {codes: linear.codes if is_fp4 else linear.codes.view(E4M3)}
        if linear.scales is not None:
            tensors["weight_scale"] = linear.scales.view(E4M3)
        tensors[outer] = scale(linear.outer)
        if linear.input_outer is not None:
            tensors[input_outer] = scale(linear.input_outer)
        return {f"{module}.{name}": np.ascontiguousarray(array) for name, array in tensors.items()}

    def read(self, module: str, names: Collection[str], load: Callable[[str], Array]) -> StoredLinear | None:
        """The linear as stored; None if it is not quantized. Raises ValueError if tensors are missing or misshapen."""
        for format in BOUNDS:
            codes, outer, input_outer = (f"{module}.{suffix}" for suffix in self.suffixes(format))
            expected = np.dtype(np.uint8) if format == "nvfp4" else E4M3
            if codes in names and (array := load(codes)).dtype == expected:
                break
        else:
            return None
        scales = f"{module}.weight_scale" if format == "nvfp4" else None
        if missing := [name for name in (scales, outer) if name and name not in names]:
            raise ValueError(
                f"it has {codes.removeprefix(module + '.')} but no {missing[0].rpartition('.')[2]}"
            )

        def outer_scale(name: str, rows: int = 1) -> Any:
            value: npt.NDArray[np.float32] = np.asarray(load(name), np.float32).reshape(-1)
            if value.size not in (1, rows):
                raise ValueError(f"{name.rpartition('.')[2]} has {value.size} elements: expected one")
            with np.errstate(divide="ignore"):
                value = np.float32(1) / value if scales and self.is_reciprocal else value
            return np.float32(value[0]) if value.size == 1 else value[:, None]

        values = outer_scale(outer, 1 if scales else len(array))
        return StoredLinear(
            format=format if np.size(values) == 1 else "fp8-row",
            codes=array.view(np.uint8),
            scales=_checked_scales(load(scales), array.shape) if scales else None,
            outer=values,
            input_outer=outer_scale(input_outer) if input_outer in names else None,
        )


def _checked_scales(scales: Array, codes: tuple[int, ...]) -> Bytes:
    expected = codes[0], codes[1] * 2 // BLOCK
    if scales.shape != expected or scales.dtype not in (E4M3, np.uint8):
        swizzled = -(-expected[0] // 128) * 128, -(-expected[1] // 4) * 4
        is_padded = scales.size == swizzled[0] * swizzled[1] and scales.shape != expected
        hint = ": they are padded to 128 x 4, as swizzled scales are" if is_padded else ""
        raise ValueError(f"weight_scale is {scales.dtype} {scales.shape}, not E4M3 {expected}{hint}")
    return scales.view(np.uint8)


MODELOPT = FileFormat(name="modelopt", codes="weight", outer="weight_scale_2", input_outer="input_scale",
                      is_reciprocal=False, scale_shape=())  # fmt: skip
COMPRESSED_TENSORS = FileFormat(name="compressed-tensors", codes="weight_packed", outer="weight_global_scale",
                                input_outer="input_global_scale", is_reciprocal=True, scale_shape=(1,))  # fmt: skip
FILE_FORMATS = {f.name: f for f in (COMPRESSED_TENSORS, MODELOPT)}

# ---- config.json

Scheme: TypeAlias = tuple[str, bool]
"""The format of a linear, and whether the file has an outer scale for its activation."""

ALGORITHMS: dict[str, Scheme] = {
    "NVFP4": ("nvfp4", True),
    "W4A16_NVFP4": ("nvfp4", False),
    "FP8": ("fp8", True),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8-row", False),
}
"""ModelOpt's names."""

_FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": BLOCK, "symmetric": True}
_FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
_WEIGHTS: dict[str, dict[str, Any]] = {
    "nvfp4": _FP4 | {"dynamic": False},
    "fp8": _FP8 | {"dynamic": False},
    "fp8-row": _FP8 | {"strategy": "channel", "dynamic": False},
}
_PER_TOKEN = _FP8 | {"strategy": "token", "dynamic": True}
_INPUTS: dict[Scheme, dict[str, Any] | None] = {
    ("nvfp4", True): _FP4 | {"dynamic": "local"},
    ("nvfp4", False): None,
    ("fp8", True): _FP8 | {"dynamic": False},
    ("fp8", False): _PER_TOKEN,
    ("fp8-row", True): _FP8 | {"dynamic": False},
    ("fp8-row", False): _PER_TOKEN,
}
_LAYOUTS = {"nvfp4": "nvfp4-pack-quantized", "fp8": "float-quantized", "fp8-row": "float-quantized"}


def describe_quantization(
    file_format: FileFormat, linears: Mapping[str, Scheme], ignored: Iterable[str], version: str
) -> dict[str, Any]:
    """The `quantization_config` of config.json. `ignored` are the modules that are linears and not quantized."""
    schemes = {
        scheme: [m for m, s in linears.items() if s == scheme] for scheme in sorted(set(linears.values()))
    }
    is_mixed = len(schemes) > 1
    groups: dict[str, dict[str, Any]] = {
        f"group_{number}": {
            "targets": modules if is_mixed else ["Linear"],
            "weights": _WEIGHTS[scheme[0]],
            "input_activations": _INPUTS[scheme],
            "output_activations": None,
        }
        for number, (scheme, modules) in enumerate(schemes.items())
    }
    about: dict[str, Any] = {
        "quant_method": file_format.name,
        "config_groups": groups,
        "ignore": sorted(ignored),
    }
    if file_format is COMPRESSED_TENSORS:
        for group, (format, _) in zip(groups.values(), schemes, strict=True):
            group["format"] = _LAYOUTS[format]
        layout = "mixed-precision" if is_mixed else _LAYOUTS[next(iter(schemes))[0]]
        return {**about, "format": layout, "quantization_status": "compressed", "kv_cache_scheme": None}
    names = {scheme: name for name, scheme in ALGORITHMS.items()}
    about |= {"quant_algo": "MIXED_PRECISION" if is_mixed else names[next(iter(schemes))]}
    about |= {
        "group_size": BLOCK,
        "kv_cache_scheme": None,
        "producer": {"name": "policyc", "version": version},
    }
    if is_mixed:
        about["quantized_layers"] = {
            module: {"quant_algo": names[scheme]} | ({"group_size": BLOCK} if scheme[0] == "nvfp4" else {})
            for module, scheme in linears.items()
        }
    return about


def describe_for_modelopt(config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of hf_quant_config.json, from the `quantization_config` of config.json."""
    kept = {key: config[key] for key in ("quant_algo", "group_size", "quantized_layers") if key in config}
    quantization = {**kept, "kv_cache_quant_algo": None, "exclude_modules": config["ignore"]}
    return {"producer": config["producer"], "quantization": quantization}


# ---- what blocks look like


def tile_rows(scales: Bytes) -> int:
    """The rows that share a block scale: 16 if all tiles of 16 rows do, otherwise 1."""
    rows = len(scales) // BLOCK * BLOCK
    tiles = scales[:rows].reshape(-1, BLOCK, scales.shape[1])
    is_tiled = bool(rows) and bool((tiles == tiles[:, :1]).all())
    return BLOCK if is_tiled and bool((scales[rows:] == scales[rows : rows + 1]).all()) else 1


def unswizzle(scales: Bytes) -> Bytes:
    """Block scales in row order, from the order in which GEMM kernels read them: tiles of 128 rows by 4 columns."""
    rows, columns = scales.shape
    tiles = scales.reshape(rows // 128, columns // 4, 32, 4, 4)
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(rows, columns)


def group_names(names: Iterable[str], limit: int = 3) -> str:
    """A few names, and how many others there are."""
    listed = list(names)
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")
