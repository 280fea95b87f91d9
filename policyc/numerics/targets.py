"""The table of targets: what a GPU does natively, how fast, and how XLA's compiler is told of it.

In: a name, or the kind of a device that is here. Out: a `Target`. To add a target, add a row to `TARGETS`. The one
trap: bandwidths between GPUs are of one direction, in bytes: half of what a vendor's "bidirectional" says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from policyc.language.diagnostics import did_you_mean

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What XLA's deviceless compiler asks about a GPU, besides what all GPUs of its architecture share."""

    device_kind: str
    cores: int
    clock_ghz: float
    matrix_clock_ghz: float
    memory_clock_ghz: float
    memory_bytes: int
    memory_bandwidth: int
    l2_bytes: int
    pcie_bandwidth: int | None
    dnn_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A GPU. `peaks` are dense operations a second, by format; a format that is not there is emulated in bf16."""

    name: str
    sm: tuple[int, int]
    peaks: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    nvlink_bandwidth: float
    network_bandwidth: float
    nvlink_domain: int
    chip: Chip

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats that its matrix units multiply."""
        return tuple(self.peaks)

    def native(self, format: str) -> bool:
        """Do its matrix units multiply this format? `keep` is whatever the program has, and never emulated."""
        return format == "keep" or format in self.peaks

    def runs_as(self, format: str) -> str:
        """The format that the matrix units see: `format` itself, or bf16 where it is emulated."""
        return format if format in self.peaks else "bf16"

    def peak(self, format: str) -> float:
        """Dense operations a second in a format, emulated or not."""
        return self.peaks[self.runs_as(format)]

    @property
    def description(self) -> str:
        """The GPU as XLA's deviceless compiler takes it: a GpuTargetConfigProto in text form."""
        return "".join(f"{line}\n" for line in _description(self))


def target(name: str) -> Target:
    """The target of a name. Raises KeyError with a sentence that says what is known."""
    found = TARGETS.get(name.lower())
    if found is None:
        raise KeyError(f"no target named '{name}': {did_you_mean(name, TARGETS)}")
    return found


def of_device_kind(kind: str) -> Target | None:
    """The target that a device is, from JAX's `device_kind`: 'NVIDIA H200'. None for anything else.

    A part of a GPU, or its PCIe version, is another device with other speeds.
    """
    words = re.fullmatch(r"NVIDIA (\w+)(?: \d+ ?GB HBM\w+)?", kind)
    return TARGETS.get(words[1].lower()) if words else None


def _peaks(bf16: float, fp8: float, four_bits: float | None = None) -> dict[str, float]:
    """TF32, which stands for f32, has half the rate of bf16; both 8-bit formats, and both 4-bit ones, share a rate."""
    found = {"f32": bf16 / 2, "bf16": bf16, "fp8": fp8}
    if four_bits is not None:
        found |= {"mxfp8": fp8, "nvfp4": four_bits, "mxfp4": four_bits}
    return {name: value * TERA for name, value in found.items()}


TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target(
            name="h100",
            sm=(9, 0),
            peaks=_peaks(989, 1979),
            memory_bytes=80 * GIGA,
            memory_bandwidth=3.35 * TERA,
            nvlink_bandwidth=450 * GIGA,
            network_bandwidth=50 * GIGA,
            nvlink_domain=8,
            chip=Chip(
                device_kind="NVIDIA H100 80GB HBM3",
                cores=132,
                clock_ghz=1.98,
                matrix_clock_ghz=1.8295201,
                memory_clock_ghz=2.619,
                memory_bytes=84942979072,
                memory_bandwidth=3352320000000,
                l2_bytes=52428800,
                pcie_bandwidth=34359738368,
                dnn_version="9.10.0",
            ),
        ),
        Target(
            name="h200",
            sm=(9, 0),
            peaks=_peaks(989, 1979),
            memory_bytes=141 * GIGA,
            memory_bandwidth=4.8 * TERA,
            nvlink_bandwidth=450 * GIGA,
            network_bandwidth=50 * GIGA,
            nvlink_domain=8,
            chip=Chip(
                device_kind="NVIDIA H200 141GB HBM3e",
                cores=132,
                clock_ghz=1.98,
                matrix_clock_ghz=1.8295201,
                memory_clock_ghz=3.75,
                memory_bytes=151397597184,
                memory_bandwidth=4800000000000,
                l2_bytes=52428800,
                pcie_bandwidth=34359738368,
                dnn_version="9.10.0",
            ),
        ),
        Target(
            name="b200",
            sm=(10, 0),
            peaks=_peaks(2250, 4500, 9000),
            memory_bytes=180 * GIGA,
            memory_bandwidth=8 * TERA,
            nvlink_bandwidth=900 * GIGA,
            network_bandwidth=50 * GIGA,
            nvlink_domain=8,
            chip=Chip(
                device_kind="NVIDIA B200",
                cores=148,
                clock_ghz=1.965,
                matrix_clock_ghz=1.8353101,
                memory_clock_ghz=3.996,
                memory_bytes=191514411008,
                memory_bandwidth=7672320000000,
                l2_bytes=132644864,
                pcie_bandwidth=68719476736,
                dnn_version="9.10.0",
            ),
        ),
        Target(
            name="gb200",
            sm=(10, 0),
            peaks=_peaks(2450, 4900, 9800),
            memory_bytes=186 * GIGA,
            memory_bandwidth=8 * TERA,
            nvlink_bandwidth=900 * GIGA,
            network_bandwidth=50 * GIGA,
            nvlink_domain=72,
            chip=Chip(
                device_kind="NVIDIA GB200",
                cores=152,
                clock_ghz=2.062,
                matrix_clock_ghz=1.9259081,
                memory_clock_ghz=3.996,
                memory_bytes=197897748480,
                memory_bandwidth=7928064000000,
                l2_bytes=135528448,
                pcie_bandwidth=2147483648,
                dnn_version="9.15.0",
            ),
        ),
        Target(
            name="b300",
            sm=(10, 3),
            peaks=_peaks(2250, 4500, 13500),
            memory_bytes=288 * GIGA,
            memory_bandwidth=8 * TERA,
            nvlink_bandwidth=900 * GIGA,
            network_bandwidth=100 * GIGA,
            nvlink_domain=8,
            chip=Chip(
                device_kind="NVIDIA B300",
                cores=158,
                clock_ghz=1.965,
                matrix_clock_ghz=1.8353101,
                memory_clock_ghz=3.996,
                memory_bytes=297021865984,
                memory_bandwidth=7936000000000,
                l2_bytes=135528448,
                pcie_bandwidth=None,
                dnn_version="9.10.0",
            ),
        ),
        Target(
            name="gb300",
            sm=(10, 3),
            peaks=_peaks(2450, 4900, 14700),
            memory_bytes=279 * GIGA,
            memory_bandwidth=8 * TERA,
            nvlink_bandwidth=900 * GIGA,
            network_bandwidth=100 * GIGA,
            nvlink_domain=72,
            chip=Chip(
                device_kind="NVIDIA GB300",
                cores=152,
                clock_ghz=2.07,
                matrix_clock_ghz=1.93338,
                memory_clock_ghz=3.996,
                memory_bytes=297021079552,
                memory_bandwidth=7928064000000,
                l2_bytes=135528448,
                pcie_bandwidth=-1,
                dnn_version="9.15.0",
            ),
        ),
    )
}


# ---- XLA's description of a GPU

# XLA's numbers of element types.
_S8, _S32, _U8, _U32, _F16, _F32, _F64, _BF16, _F4 = 2, 4, 6, 8, 10, 11, 12, 16, 32
_F8 = (19, 20, 23, 24, 25, 28, 29, 33, 35, 36)


def _description(of: Target) -> Iterator[str]:
    chip, (major, minor) = of.chip, of.sm
    yield "gpu_device_info {"
    yield "  threads_per_block_limit: 1024"
    yield "  threads_per_warp: 32"
    yield "  shared_memory_per_block: 49152"
    yield "  shared_memory_per_core: 233472"
    yield "  threads_per_core_limit: 2048"
    yield f"  core_count: {chip.cores}"
    yield "  fpus_per_core: 128"
    yield "  block_dim_limit_x: 2147483647"
    yield "  block_dim_limit_y: 65535"
    yield "  block_dim_limit_z: 65535"
    yield f"  memory_bandwidth: {chip.memory_bandwidth}"
    yield f"  l2_cache_size: {chip.l2_bytes}"
    yield f"  clock_rate_ghz: {chip.clock_ghz}"
    yield f"  device_memory_size: {chip.memory_bytes}"
    yield "  shared_memory_per_block_optin: 232448"
    yield "  cuda_compute_capability {"
    yield f"    major: {major}"
    if minor:
        yield f"    minor: {minor}"
    yield "    feature_extension: ACCELERATED_FEATURES"
    yield "  }"
    yield "  registers_per_core_limit: 65536"
    yield "  registers_per_block_limit: 65536"
    yield "  scalar_unit_description {"
    yield from _rates(_scalar_rates(of))
    yield "  }"
    yield "  matrix_unit_description {"
    yield from _rates(_matrix_rates(of))
    yield "  }"
    yield "  thread_dim_limit_x: 1024"
    yield "  thread_dim_limit_y: 1024"
    yield "  thread_dim_limit_z: 64"
    yield '  device_vendor: "NVIDIA Corporation"'
    yield f'  platform_version: "Compute Capability {major}.{minor}a"'
    clocks = f"{chip.clock_ghz * 1e6:.0f}KHz clock, {chip.memory_clock_ghz * 1e6:.0f}KHz mem clock"
    sizes = f"{chip.memory_bytes}B RAM, {chip.cores} cores, {clocks}, {chip.l2_bytes}B L2$"
    yield f'  model_str: "sm_{major}.{minor}a with {sizes}"'
    yield "  device_address_bits: 64"
    if chip.pcie_bandwidth is not None:
        yield f"  pcie_bandwidth: {chip.pcie_bandwidth}"
    yield "  ecc_enabled: true"
    yield f'  name: "{chip.device_kind}"'
    yield f"  mem_clock_ghz: {chip.memory_clock_ghz}"
    yield "  reserved_shared_memory_per_block: 1024"
    yield "  max_blocks_per_multiprocessor: 32"
    yield '  driver_version: "13.0.0"'
    yield '  runtime_version: "12.8.0"'
    yield '  compile_time_toolkit_version: "12.8.0"'
    yield f'  dnn_version: "{chip.dnn_version}"'
    yield '  cub_version: "3.1.2"'
    yield "  device_interconnect_info {"
    yield "    active_links: 18"
    yield "  }"
    yield "  collective_memory_granularity: 2097152"
    yield "}"
    yield 'platform_name: "CUDA"'
    yield f'device_description_str: "{chip.device_kind}"'


Rate = tuple[float, int, int]
"""A clock in GHz, units per core, operations per clock."""


def _scalar_rates(of: Target) -> dict[int, Rate]:
    half = 2 if of.sm[0] == 9 else 1  # Hopper's scalar units do two 16-bit operations at once
    clock = of.chip.clock_ghz
    wide = {_S32: 64, _U32: 64, _F16: 128, _F32: 128, _F64: 64, _BF16: 128}
    return {key: (clock, units, half if key in (_F16, _BF16) else 1) for key, units in wide.items()}


def _matrix_rates(of: Target) -> dict[int, Rate]:
    """Of 8-bit operations, half as many in 16 bits, a quarter in TF32, twice as many in 4."""
    hopper = of.sm[0] == 9
    clock, eight = of.chip.matrix_clock_ghz, 1024 if hopper else 2048
    rates = dict.fromkeys((_S8, _U8, *_F8), eight) | {_F16: eight // 2, _BF16: eight // 2, _F32: eight // 4}
    found = {key: (clock, 4, ops) for key, ops in rates.items()}
    if of.native("nvfp4"):
        found[_F4] = (clock, 4, 2 * eight)
    return found | {_F64: (of.chip.clock_ghz, 4, 32 if hopper else 16)}


def _rates(rates: Mapping[int, Rate]) -> Iterator[str]:
    for key, (clock, units, ops) in sorted(rates.items()):
        yield "    rate_infos {"
        yield f"      key: {key}"
        yield "      value {"
        yield f"        clock_rate_ghz: {clock}"
        yield f"        units_per_core: {units}"
        yield f"        ops_per_clock: {ops}"
        yield "      }"
        yield "    }"
