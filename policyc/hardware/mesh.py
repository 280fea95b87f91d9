"""The mesh of a training step: sizes of its axes, and the time to move bytes over one of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from policyc.numerics.targets import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """Sizes of the axes of a device mesh. Devices along the last axis are next to each other."""

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        return self.batch_shards * self.context * self.tensor

    @property
    def batch_shards(self) -> int:
        """Number of shards of the batch: data, fsdp and expert divide its sequences."""
        return self.data * self.fsdp * self.expert

    @property
    def token_shards(self) -> int:
        """Number of shards of the tokens: context divides each sequence as well."""
        return self.batch_shards * self.context

    def __str__(self) -> str:
        axes = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) > 1]
        return " ".join(axes) or "one device"


def check_modelled(mesh: MeshShape) -> None:
    """Raises ValueError for a mesh that the cost model does not cover."""
    if mesh.expert > 1:
        raise ValueError("the cost model does not know the expert axis: 'policyc compile' shows its traffic; "
                         "or estimate with fsdp instead")  # fmt: skip


def exchange_seconds(target: Target, bytes: float, size: int, stride: int) -> float:
    """Time to gather or scatter bytes over an axis of `size` devices, whose neighbours are `stride` devices apart.

    Each device of an NVLink domain fetches an equal part of the bytes outside of the domain over its network card, and
    shares it over NVLink.
    """
    domain = max(1, target.nvlink_domain // stride)
    near = max(d for d in range(1, size + 1) if size % d == 0 and d <= domain)
    domains = size // near
    nvlink = bytes * (near - 1) / near / target.nvlink_bandwidth
    network = bytes * (domains - 1) / domains / near / target.network_bandwidth
    return nvlink + network


_MOST_DIGITS = 9  # of the size of an axis: no machine has a billion GPUs


def parse_mesh(text: str, devices: int) -> MeshShape:
    """Parses `fsdp=8 tensor=4` (or with commas). Raises ValueError, with a remedy, if it is not for `devices`."""
    axes = [f.name for f in fields(MeshShape)]
    sizes: dict[str, int] = {}
    for word in text.replace(",", " ").split():
        name, equals, size = word.partition("=")
        is_count = size.isascii() and size.isdigit() and len(size) <= _MOST_DIGITS and int(size) > 0
        if name not in axes or not equals or not is_count:
            raise ValueError(
                f"'{word}' is not an axis of a mesh: write fsdp=8 tensor=4 (axes: {', '.join(axes)})"
            )
        if name in sizes:
            raise ValueError(f"the mesh has the axis '{name}' twice: write it once")
        sizes[name] = int(size)
    product = math.prod(sizes.values())
    if product != devices:
        free_axis = next((n for n in ("fsdp", "data") if n not in sizes), None)
        if free_axis is not None and devices % product == 0:
            remedy = f"add {free_axis}={devices // product}"
        else:
            remedy = f"use --devices {product}, or change a size"
        shape = " ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"a mesh of {shape} has {product} devices, not {devices}: {remedy}")
    return MeshShape(**sizes)
