"""The size of a checkpoint of the bundled Llama, and the time and memory that writing and restoring it take."""

from __future__ import annotations

import math
from typing import Any

import jax

from policyc.numerics.targets import Target

_DEVICES_PER_HOST = {"gb200": 4, "gb300": 4}
_USUAL_DEVICES_PER_HOST = 8


def checkpoint_cost(state: Any, target: Target, devices: int, bandwidth: float) -> dict[str, float]:
    """The cost of a checkpoint of a state, which is a pytree of shapes with shardings, by name.

    A checkpoint has every array once, and whatever devices hold copies of, each of them reads. A host needs memory for
    the shards of its devices: they are copied there, and written while training goes on. `bandwidth` is that of the
    store, in bytes per second over all hosts.
    """
    arrays = jax.tree.leaves(state)
    total = sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)
    on_device = sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in arrays)
    devices_per_host = _DEVICES_PER_HOST.get(target.name, _USUAL_DEVICES_PER_HOST)
    return {
        "bytes": total,
        "bytes_per_device": on_device,
        "devices_per_host": devices_per_host,
        "host_memory": on_device * min(devices, devices_per_host),
        "restored_bytes": on_device * devices,
        "write_seconds": total / bandwidth,
        "restore_seconds": on_device * devices / bandwidth,
    }
