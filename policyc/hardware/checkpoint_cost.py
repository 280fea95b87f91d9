"""The size of a checkpoint of the bundled Llama, and the time and memory that writing and restoring it take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax

from policyc.numerics.targets import Target

_DEVICES_PER_HOST = {"gb200": 4, "gb300": 4}
_USUAL_DEVICES_PER_HOST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCost:
    """The bytes of a state: of the whole, and of the shards that a device and a host hold.

    A checkpoint has every array once. Whatever devices hold copies of, each of them reads.
    """

    bytes: int
    device_bytes: int
    devices: int
    devices_per_host: int

    @property
    def host_bytes(self) -> int:
        """Memory of a host for the shards of its devices: they are copied there, and written while training goes on."""
        return self.device_bytes * min(self.devices, self.devices_per_host)

    @property
    def restored_bytes(self) -> int:
        """What all devices read."""
        return self.device_bytes * self.devices

    def write_seconds(self, bandwidth: float) -> float:
        """Time to write it to a store of this bandwidth, in bytes per second over all hosts."""
        return self.bytes / bandwidth

    def restore_seconds(self, bandwidth: float) -> float:
        """Time to read it from a store of this bandwidth."""
        return self.restored_bytes / bandwidth


def checkpoint_cost(state: Any, target: Target, devices: int) -> CheckpointCost:
    """The cost of a checkpoint of a state: a pytree of shapes with shardings."""
    arrays = jax.tree.leaves(state)
    return CheckpointCost(
        bytes=sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays),
        device_bytes=sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in arrays),
        devices=devices,
        devices_per_host=_DEVICES_PER_HOST.get(target.name, _USUAL_DEVICES_PER_HOST),
    )
