"""Where arrays lie: a mesh of data, fsdp, tensor and context axes, and names for what they divide.

In: the sizes of the axes. Out: a mesh, shardings by name, and each process's rows of a batch. The one trap: attention
needs whole sequences. Where the context axis divides them, heads are divided over it instead for as long as
attention lasts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from llama.configs import BadRun, Model, Run

AXES = ("data", "fsdp", "tensor", "context")
DIVIDES: dict[str | None, Any] = {
    "batch": ("data", "fsdp"),
    "sequence": "context",
    "width": "fsdp",
    "inner": "tensor",
    "heads": ("tensor", "context"),
    None: None,
}


def make(model: Model, run: Run) -> Mesh:
    """The mesh of a run; all that does not divide evenly is an error."""
    count = jax.device_count()
    rest = run.fsdp_axis * run.tensor_axis * run.context_axis
    data = run.data_axis if run.data_axis > 0 else count // rest
    if data * rest != count:
        raise BadRun(
            f"a mesh of {data} data x {run.fsdp_axis} fsdp x {run.tensor_axis} tensor x {run.context_axis} "
            f"context is not {count} devices: change the axes, or leave --data-axis out"
        )
    part = run.batch // run.accumulate
    across = run.tensor_axis * run.context_axis
    uneven = [
        f"{name} {size} is not a multiple of {by} ({why})"
        for name, size, by, why in (
            ("batch" if run.accumulate == 1 else "a part of the batch,", part, data * run.fsdp_axis, "data x fsdp"),
            ("sequence", run.sequence // model.loss_chunks, run.context_axis, "context"),
            ("heads", model.heads, across, "tensor x context"),
            ("width", model.width, run.fsdp_axis, "fsdp"),
            ("hidden", model.hidden, run.tensor_axis, "tensor"),
            ("kv_heads x head_dim", model.kv_heads * model.head_dim, run.tensor_axis, "tensor"),
            ("vocab", model.vocab, run.tensor_axis, "tensor"),
        )
        if size % by
    ]  # fmt: skip
    if uneven:
        raise BadRun("the mesh does not divide the model: " + "; ".join(uneven))
    shape = (data, run.fsdp_axis, run.tensor_axis, run.context_axis)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def sharding(mesh: Mesh, names: Sequence[str | None]) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(DIVIDES[name] for name in names)))


def constrain(x: jax.Array, mesh: Mesh | None, *names: str | None) -> jax.Array:
    """`x`, divided so. On one device there is nothing to say."""
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, sharding(mesh, names))


def share(mesh: Mesh, batch: int) -> tuple[int, int]:
    """Which part of each batch this process reads, of how many. Processes that hold the same rows read the same."""
    rows: dict[int, set[int]] = {}
    for device, (held,) in sharding(mesh, ("batch",)).devices_indices_map((batch,)).items():
        rows.setdefault(device.process_index, set()).update(range(batch)[held])
    parts = sorted({(min(held), max(held)) for held in rows.values()})
    if any(low != at * batch // len(parts) for at, (low, _) in enumerate(parts)):
        raise BadRun("processes hold overlapping rows: make tensor x context divide their devices evenly")
    own = rows[jax.process_index()]
    return parts.index((min(own), max(own))), len(parts)


def placed(local: dict[str, np.ndarray], mesh: Mesh, parts: int = 1) -> dict[str, jax.Array]:
    """This process's rows of a batch, on the devices."""
    place = sharding(mesh, ("batch", "sequence"))
    return {
        name: jax.make_array_from_process_local_data(place, rows, (len(rows) * parts, *rows.shape[1:]))
        for name, rows in local.items()
    }
