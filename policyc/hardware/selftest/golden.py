"""NVIDIA's reference vectors for NVFP4: tensors with the codes and scales that Transformer Engine computes for them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import ml_dtypes
import numpy as np

from policyc.language.recipes import Treatment
from policyc.numerics.quantize import Axes

_DATA = resources.files("policyc.hardware.selftest") / "data"

ROWS, COLUMNS = Axes(axis=-1, tile=-2), Axes(axis=-2, tile=-1)
SHAPE = (64, 128)
"""All cases but one fit into this shape. Padding with zeros changes neither blocks nor maxima."""


@cache
def read_cases() -> dict[str, dict[str, Any]]:
    """The description of each case, by its name."""
    cases: dict[str, dict[str, Any]] = json.loads((_DATA / "nvfp4_reference.json").read_text())
    return cases


@cache
def read_arrays() -> Mapping[str, np.ndarray]:
    """The arrays of all cases. The README of the data in tests/data describes them."""
    with resources.as_file(_DATA / "nvfp4_reference.npz") as path, np.load(path) as arrays:
        return dict(arrays)


def load_tensor(case: str) -> np.ndarray:
    """The tensor of a case."""
    x = read_arrays()[f"{case}/x"]
    return x.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else x


def treatment_of(case: str, *, rotated: bool = False) -> Treatment:
    """The treatment that gives the vectors of a case."""
    return Treatment(
        format="nvfp4",
        element="e2m1",
        tile2d=read_cases()[case]["tile"][0] == 16,
        rht=16 if rotated else 0,
        outer="row" if case.startswith("rowscaled") else "tensor",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenTensor:
    """A padded tensor, how it is quantized, and the result without padding: one code per byte, one scale per block.

    `order` has the quantized axis last. `is_extreme` says that its magnitudes are near the ends of fp32.
    """

    name: str
    x: np.ndarray
    treatment: Treatment
    axes: Axes
    order: tuple[int, int]
    codes: np.ndarray
    scales: np.ndarray
    is_extreme: bool


def golden_tensors() -> Iterator[GoldenTensor]:
    """Yields every case whose bits are specified, along its rows and, if the data have them, along its columns."""
    arrays = read_arrays()
    for case, about in read_cases().items():
        fits = all(n <= limit for n, limit in zip(about["shape"], SHAPE, strict=True))
        if case.startswith("4over6") or not fits:
            continue
        for suffix, axes, order in (("", ROWS, (0, 1)), ("_t", COLUMNS, (1, 0))):
            is_rotated = bool(about["rht"] and suffix)
            if f"{case}/q{suffix}" not in arrays or (is_rotated and not about["random_sign"]):
                continue
            tensor, packed = load_tensor(case), arrays[f"{case}/q{suffix}"]
            codes = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
            wide = tensor.astype(np.float32).transpose(order)
            # The kernels keep the sign of a zero, and of a denormal that becomes one. The reference does not.
            codes = np.where((np.abs(wide) < 1e-44) & np.signbit(wide) & (codes == 0), 8, codes)
            yield GoldenTensor(
                name=f"{case}{suffix}",
                x=np.pad(tensor, [(0, n - m) for m, n in zip(tensor.shape, SHAPE, strict=True)]),
                treatment=treatment_of(case, rotated=is_rotated),
                axes=axes,
                order=order,
                codes=codes,
                scales=arrays[f"{case}/s{suffix}"],
                is_extreme="edge" in about["tags"],
            )
