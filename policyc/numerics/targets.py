"""The table of targets: for each GPU, the formats it multiplies natively, its speed, memory and links.

To add a GPU, add a row to `_ROWS` and, if there is one, XLA's description of it to `policyc/hardware/gpus`. Bandwidths
between GPUs are bytes per second in one direction: half of what a vendor calls "bidirectional".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from policyc.base.text import did_you_mean

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A GPU.

    Attributes:
      device_kind: the name that JAX reports for the device.
      peaks: dense operations per second in each format that backends train in natively. Other formats are emulated in
        bf16.
      inference_peaks: dense operations per second in formats that the matrix units multiply, but that no backend
        trains in on this GPU.
      memory_bytes, memory_bandwidth: the size and bandwidth of its own memory.
      nvlink_bandwidth: bandwidth to the other GPUs of its NVLink domain.
      network_bandwidth: bandwidth to all other GPUs.
      nvlink_domain: the number of GPUs that NVLink connects.
      measured: cost model constants that were measured on this kind of GPU, keyed by their names in
        `hardware.gemm_cost`.
    """

    name: str
    device_kind: str
    compute_capability: tuple[int, int]
    peaks: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    nvlink_bandwidth: float
    network_bandwidth: float
    nvlink_domain: int
    inference_peaks: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats that backends train in natively."""
        return tuple(self.peaks)

    def is_native(self, format: str) -> bool:
        """Whether backends train in this format natively. `keep` is never emulated, so it counts as native."""
        return format == "keep" or format in self.peaks

    def runs_as(self, format: str) -> str:
        """The format that the matrix units multiply: `format` itself, or bf16 if it is emulated."""
        return format if format in self.peaks else "bf16"

    def peak(self, format: str) -> float:
        """Dense operations per second in a format, native or emulated."""
        return self.peaks[self.runs_as(format)]


def get_target(name: str) -> Target:
    """Returns the target with this name, in any case. Raises KeyError with a message that lists the known names."""
    target = TARGETS.get(name.lower())
    if target is None:
        raise KeyError(f"no target named '{name}': {did_you_mean(name, TARGETS)}")
    return target


def find_by_device_kind(device_kind: str) -> Target | None:
    """Returns the target for JAX's `device_kind`, such as 'NVIDIA H200', or None if it is not in the table.

    MIG slices are not in the table, nor are PCIe cards of GPUs that it lists as SXM: their speeds differ.
    """
    for target in TARGETS.values():
        if target.device_kind == device_kind:
            return target
    match = re.fullmatch(r"NVIDIA (\w+)(?: \d+ ?GB HBM\w+)?", device_kind)
    return TARGETS.get(match[1].lower()) if match else None


def _peaks(bf16: float, fp8: float, fp4: float | None = None) -> dict[str, float]:
    """Peaks by format, from TFLOP/s.

    f32 runs as TF32, at half the rate of bf16. fp8 and mxfp8 share a rate; so do nvfp4 and mxfp4.
    """
    tflops = {"f32": bf16 / 2, "bf16": bf16, "fp8": fp8}
    if fp4 is not None:
        tflops |= {"mxfp8": fp8, "nvfp4": fp4, "mxfp4": fp4}
    return {format: value * TERA for format, value in tflops.items()}


TRAINS_FP4 = ((10, 0), (10, 3))
"""Compute capabilities with stochastic rounding to FP4, which Transformer Engine's recipe needs."""

TargetName = Literal["h100", "h200", "b200", "gb200", "b300", "gb300", "pro6000", "rtx5090", "spark", "rubin"]

_PRO_6000 = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"

# name, device kind, compute capability, peaks, memory (GB, TB/s), NVLink and network (GB/s), GPUs per NVLink domain
_ROWS = (
    ("h100", "NVIDIA H100 80GB HBM3", (9, 0), _peaks(989, 1979), (80, 3.35), (450, 50), 8),
    ("h200", "NVIDIA H200 141GB HBM3e", (9, 0), _peaks(989, 1979), (141, 4.8), (450, 50), 8),
    ("b200", "NVIDIA B200", (10, 0), _peaks(2250, 4500, 9000), (180, 8), (900, 50), 8),
    ("gb200", "NVIDIA GB200", (10, 0), _peaks(2450, 4900, 9800), (186, 8), (900, 50), 72),
    ("b300", "NVIDIA B300", (10, 3), _peaks(2250, 4500, 13500), (288, 8), (900, 100), 8),
    ("gb300", "NVIDIA GB300", (10, 3), _peaks(2450, 4900, 14700), (279, 8), (900, 100), 72),
    # GPUs without NVLink. Their NVLink column holds PCIe 5.0 or, for the Spark, its network card.
    ("pro6000", _PRO_6000, (12, 0), _peaks(500, 1000, 2000), (96, 1.792), (64, 50), 1),
    ("rtx5090", "NVIDIA GeForce RTX 5090", (12, 0), _peaks(209.5, 419, 1676), (32, 1.792), (64, 50), 1),
    ("spark", "NVIDIA GB10", (12, 1), _peaks(125, 250, 500), (128, 0.273), (25, 25), 1),
    # Preliminary vendor figures. The name that JAX will report is not known yet.
    ("rubin", "NVIDIA Rubin", (10, 7), _peaks(4000, 17500, 35000), (288, 22), (1800, 200), 72),
)  # fmt: skip


def _is_trained(format: str, capability: tuple[int, int]) -> bool:
    """Whether backends train in a format on GPUs of this compute capability: always in f32, bf16 and fp8."""
    return format in ("f32", "bf16", "fp8") or capability in TRAINS_FP4


TARGETS: dict[str, Target] = {
    name: Target(
        name=name,
        device_kind=device_kind,
        compute_capability=capability,
        peaks={f: peak for f, peak in peaks.items() if _is_trained(f, capability)},
        inference_peaks={f: peak for f, peak in peaks.items() if not _is_trained(f, capability)},
        memory_bytes=memory * GIGA,
        memory_bandwidth=bandwidth * TERA,
        nvlink_bandwidth=nvlink * GIGA,
        network_bandwidth=network * GIGA,
        nvlink_domain=domain,
    )
    for name, device_kind, capability, peaks, (memory, bandwidth), (nvlink, network), domain in _ROWS
}
