"""Faults of a layout that the statistics of a file show without the weights that it was made from.

They are found in trained models, whose channels differ: random weights look the same in any order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from policyc.serving.formats import E4M3, Array, StoredLinear, tile_rows, unswizzle
from policyc.serving.loaders import fuse

_Vector = npt.NDArray[np.float64]
_Fault = tuple[str, str, str]  # code, module, message

_SURE = 6.0  # standard deviations: once in 10^9 linears by chance
_NORMS = {"input_layernorm": ("q_proj", "k_proj", "v_proj"),
          "post_attention_layernorm": ("gate_proj", "up_proj", "w1", "w3")}  # fmt: skip
_NORM_BEFORE = {name: norm for norm, names in _NORMS.items() for name in names}
_WRITERS = {"down_proj": ("gate_proj", "up_proj"), "w2": ("w1", "w3")}


@dataclass(frozen=True, slots=True)
class Profile:
    """The logarithms of the mean squares of the rows and columns of a weight, and the largest stored scale or code."""

    rows: _Vector
    columns: _Vector
    top: float

    @classmethod
    def of(cls, linear: StoredLinear, values: npt.NDArray[np.float32]) -> Profile:
        squares = np.square(values, dtype=np.float32)
        tops = np.abs(values) if linear.scales is None else linear.scales.view(E4M3).astype(np.float32)
        rows, columns = (np.log(np.maximum(squares.mean(axis, dtype=np.float64), 1e-30)) for axis in (1, 0))
        return cls(rows, columns, float(tops.max(initial=0)))


def find_swizzled(linear: StoredLinear) -> Iterator[tuple[str, str]]:
    """Yields code and message for block scales that are in the order of GEMM kernels."""
    scales = linear.scales
    if scales is None or len(scales) % 128 or scales.shape[1] % 4:
        return
    ordered = unswizzle(scales)
    stored, other = _structure(scales), _structure(ordered)
    is_tiled = tile_rows(ordered) > tile_rows(scales)
    if is_tiled or other > max(_SURE * np.sqrt(2 * sum(scales.shape)) / scales.size, 1.5 * stored):
        reason = "they form tiles" if is_tiled else "rows and columns explain them"
        yield "swizzled-scales", f"{reason} only in the order of GEMM kernels: store them in row order"


def _structure(scales: Array) -> float:
    """The share of the variance of log scales that rows and columns explain, above that of scales in random order."""
    logs = np.log2(np.maximum(scales.view(E4M3).astype(np.float64), 2.0**-10))
    logs -= logs.mean()
    rows, columns = logs.mean(1, keepdims=True), logs.mean(0, keepdims=True)
    total = np.square(logs).sum()
    explained = 1 - np.square(logs - rows - columns).sum() / total if total else 0.0
    return float(explained - (sum(scales.shape) - 2) / scales.size)


def find_swapped(
    profiles: Mapping[str, Profile], packed: Collection[str], vectors: Mapping[str, Array]
) -> Iterator[_Fault]:
    """Yields linears whose columns fit the channels that they read only after neighbours are swapped.

    What writes a channel is not packed along it: the rows of gate and up for down, and the norm before the others.
    `vectors` are the norms by name.
    """
    scores: dict[str, dict[str, tuple[float, float]]] = {}
    for module in packed:
        parent, _, name = module.rpartition(".")
        writers = [f"{parent}.{writer}" for writer in _WRITERS.get(name, ())]
        block = parent.partition(".self_attn")[0].partition(".mlp")[0].partition(".block_sparse_moe")[0]
        norm = vectors.get(f"{block}.{_NORM_BEFORE.get(name)}.weight")
        if writers and all(writer in profiles for writer in writers):
            channels = sum(profiles[writer].rows for writer in writers)
        elif norm is not None:
            channels = np.log(np.abs(norm.astype(np.float64)) + 1e-6)
        else:
            continue
        columns = profiles[module].columns
        if columns.shape == np.shape(channels) and np.ptp(channels) and np.ptp(columns):
            swapped = columns[np.arange(len(columns)) ^ 1]
            own, other = (float(np.corrcoef(c, channels)[0, 1]) for c in (columns, swapped))
            scores.setdefault(name, {})[module] = own * len(columns) ** 0.5, other * len(columns) ** 0.5
    text = "its columns fit the channels that it reads only if neighbours are swapped: even columns are in high nibbles"
    for of_name in scores.values():
        own, other = (sum(pair[i] for pair in of_name.values()) / len(of_name) ** 0.5 for i in (0, 1))
        for module, pair in of_name.items():
            if any(abs(b) > max(_SURE, 2 * abs(a)) for a, b in (pair, (own, other))):
                yield "swapped-nibbles", module, text


def find_own_maxima(profiles: Mapping[str, Profile], stored: Mapping[str, StoredLinear]) -> Iterator[_Fault]:
    """Yields fused linears that all reach the largest scale, although they share an outer scale.

    Only the one with the largest weight of its group should, and others within 4 % of it.
    """
    others = hits = 0
    reached: list[str] = []
    for modules in fuse(profiles).values():
        is_shared = len({np.asarray(stored[module].outer).tobytes() for module in modules}) == 1
        if len(modules) > 1 and is_shared and stored[modules[0]].format != "fp8-row":
            top = max(profiles[module].top for module in modules)
            reaching = [module for module in modules if profiles[module].top >= 0.96 * top]
            others, hits = others + len(modules) - 1, hits + len(reaching) - 1
            reached += reaching if len(reaching) > 1 else []
    if others >= 4 and hits > 0.9 * others:
        text = "all linears of its group reach the largest scale: scales are of the maximum of each, the outer is not"
        yield from (("wrong-outer-scale", module, text) for module in reached)
