"""The training step of a bundled Llama configuration: its plan for an estimate, its jitted function for a compilation,
and the cost of its checkpoints.

All arguments are shapes: no arrays are created.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from policyc.compiler import pipeline
from policyc.compiler.matching.execution import ExecutionOptions
from policyc.hardware.mesh import MeshShape
from policyc.hardware.training_step import TrainingStep
from policyc.language.policy import Policy
from policyc.models.llama import model as llama
from policyc.models.llama import partition
from policyc.models.llama.configs import ConfigError, ModelConfig, RunConfig, find_config
from policyc.numerics.targets import Target

_DEVICES_PER_HOST = {"gb200": 4, "gb300": 4}
_USUAL_DEVICES_PER_HOST = 8
_SEQUENCES_PER_DEVICE = 2  # computed at once, unless --accumulate says otherwise
_TOKENS_PER_DEVICE = (
    2 * 8192
)  # of a step, unless --batch says otherwise: as in published runs, without microbatches


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Settings that replace those of a configuration, unless they are None."""

    batch: int | None = None
    sequence: int | None = None
    accumulate: int | None = None
    remat: str | None = None
    gather: str | None = None
    unrolled: bool = False
    """Unrolls the layers instead of scanning over them, as in the published runs that the cost model is fitted to."""


def plan_step(
    policy: Policy, name: str, mesh: MeshShape, sizes: Sizes, execution: ExecutionOptions
) -> TrainingStep:
    """Plans the step of a configuration under a policy. Raises ConfigError if the mesh does not divide its sizes."""
    # Trace for one device, with plain attention so that its products are visible, and with all logits at once. None of
    # this changes a GEMM.
    config, run = _configure(name, mesh, sizes, attention="xla", loss_chunks=1)
    arguments = abstract_arguments(config, run.batch // run.accumulate, run.sequence)

    def loss(params: Any, batch: Any) -> Any:
        return llama.loss(params, batch, config)

    call = pipeline.LossCall(fn=loss, args=arguments, param_argnums=(0,))
    return TrainingStep(
        plan=pipeline.plan_loss(policy, call, execution).plan,
        accumulate=run.accumulate,
        causal=True,
        remat=config.remat,
        gathers_once=run.gather == "once",
        model=config,
        sequences=run.batch,
        sequence=run.sequence,
    )


def jit_step(
    name: str, mesh: MeshShape, sizes: Sizes, devices: Sequence[jax.Device]
) -> tuple[jax.stages.Wrapped, tuple[Any, Any], RunConfig]:
    """The jitted training step of a configuration on these devices, its abstract state and batch, and its settings."""
    config, run = _configure(name, mesh, sizes, attention="cudnn")
    train_step = _load_train_step()
    shape = tuple(_axes(mesh).values())
    axis_types = (jax.sharding.AxisType.Auto,) * len(shape)
    device_mesh = jax.sharding.Mesh(np.array(devices).reshape(shape), partition.AXES, axis_types=axis_types)
    arguments = (
        train_step.abstract_state(config, run, device_mesh),
        partition.abstract_batch(run, device_mesh),
    )
    return train_step.make_train_step(config, run, device_mesh), arguments, run


def checkpoint_cost(
    name: str, mesh: MeshShape, sizes: Sizes, target: Target, bandwidth: float
) -> dict[str, float]:
    """The cost of a checkpoint of a configuration, as numbers by name.

    A checkpoint contains every array once. To restore it, each device reads its own copy of replicated arrays. A host
    needs memory for the shards of its devices: they are copied there, and written while training continues. `bandwidth`
    is that of the store, in bytes per second for all hosts together.
    """
    config, run = _configure(name, mesh, sizes)
    axes = _axes(mesh)
    abstract_mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
    state = _load_train_step().abstract_state(config, run, cast(jax.sharding.Mesh, abstract_mesh))
    arrays = jax.tree.leaves(state)
    total = sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)
    on_device = sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in arrays)
    devices_per_host = _DEVICES_PER_HOST.get(target.name, _USUAL_DEVICES_PER_HOST)
    return {
        "bytes": total,
        "bytes_per_device": on_device,
        "devices_per_host": devices_per_host,
        "host_memory": on_device * min(mesh.devices, devices_per_host),
        "restored_bytes": on_device * mesh.devices,
        "write_seconds": total / bandwidth,
        "restore_seconds": on_device * mesh.devices / bandwidth,
    }


def _load_train_step() -> Any:
    try:
        from policyc.models.llama import train_step
    except ModuleNotFoundError as error:
        raise ConfigError(f"this needs the package '{error.name}': pip install 'policyc[train]'") from None
    return train_step


def abstract_arguments(config: ModelConfig, rows: int, sequence: int) -> tuple[Any, Any]:
    """The shapes of the parameters and of a batch, for one device."""
    specs = llama.param_specs(config)
    params = jax.tree.map(lambda spec: partition.abstract_array(spec.shape, jnp.float32), specs)
    tokens = partition.abstract_array((rows, sequence), jnp.int32)
    return params, dict.fromkeys(("tokens", "targets", "mask"), tokens)


def _configure(name: str, mesh: MeshShape, sizes: Sizes, **options: Any) -> tuple[ModelConfig, RunConfig]:
    """A configuration with these sizes and options. Raises ConfigError if the mesh does not divide it."""
    config, run = find_config(name)
    sequence = sizes.sequence or run.sequence
    batch = sizes.batch or _fit_batch(run.batch, sequence, mesh)
    accumulate = sizes.accumulate or _accumulate(batch, mesh)
    if sizes.unrolled:
        options["scan"] = False
    config = dataclasses.replace(config, remat=sizes.remat or config.remat, **options)
    run = dataclasses.replace(
        run, batch=batch, sequence=sequence, accumulate=accumulate, gather=sizes.gather or run.gather
    )
    partition.check_divisible(config, run, _axes(mesh))
    return config, run


def _axes(mesh: MeshShape) -> dict[str, int]:
    return {axis: getattr(mesh, axis) for axis in partition.AXES}


def _fit_batch(batch: int, sequence: int, mesh: MeshShape) -> int:
    """The batch of a configuration, cut to what some devices train on in a step, and a multiple of their number."""
    share = min(batch // mesh.batch_shards, _TOKENS_PER_DEVICE // sequence)
    return max(1, share) * mesh.batch_shards


def _accumulate(batch: int, mesh: MeshShape) -> int:
    """The smallest number of microbatches with at most `_SEQUENCES_PER_DEVICE` sequences per device."""
    if batch % mesh.batch_shards:
        return 1  # refused, for any number of microbatches
    share = batch // mesh.batch_shards
    counts = (n for n in range(1, share + 1) if share % n == 0 and share // n <= _SEQUENCES_PER_DEVICE)
    return next(counts, 1)
