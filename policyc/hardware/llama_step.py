"""The Llama driver that ships with policyc, without running it: the plan of a configuration, or its whole step.

In: a policy, the name of a configuration, sizes. Out: a `TrainingStep` for the cost model, or a step and the shapes
and places of its arguments for a compiler. No array is made: all is traced with shapes. The one trap: the driver is no
part of the package. It is imported as its own scripts import it, from the folder of models.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from policyc.compiler import pipeline
from policyc.hardware.step_cost import BlockShape, MeshShape, TrainingStep
from policyc.language.bundled import data_folder
from policyc.language.diagnostics import did_you_mean
from policyc.language.policy import Policy

_AT_ONCE = 2  # sequences that a device computes at a time, unless something else is asked for


class BadRun(ValueError):
    """Such a run is not possible; the message says what to change."""


def _module(name: str) -> ModuleType:
    home = str(data_folder("models"))
    if home not in sys.path:
        sys.path.append(home)
    return importlib.import_module(f"llama.{name}")


def configuration(name: str) -> tuple[Any, Any]:
    """The model and the run of a configuration. Raises BadRun where there is none of that name."""
    known = _module("configs").CONFIGS
    if name not in known:
        raise BadRun(f"no configuration named '{name}': {did_you_mean(name, known)}")
    return known[name][0], known[name][1]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What may be asked of a configuration; None is what it says itself."""

    batch: int | None = None
    sequence: int | None = None
    accumulate: int | None = None
    remat: str | None = None


def work(policy: Policy, name: str, mesh: MeshShape, sizes: Sizes, backend: str) -> TrainingStep:
    """A step of a configuration under a policy, on a mesh that must divide it."""
    model, run = _sized(name, mesh, sizes)
    # Traced on one device with plain attention: so its products are seen. Neither changes a GEMM.
    model = dataclasses.replace(model, attention="xla", loss_chunks=1)
    plan = pipeline.plan(policy, _loss(model), *_shapes(model, run.batch // run.accumulate, run.sequence))
    block = BlockShape(
        layers=model.layers,
        width=model.width,
        heads_width=model.heads * model.head_dim,
        kv_width=model.kv_heads * model.head_dim,
    )
    return TrainingStep(
        plan=plan, accumulate=run.accumulate, causal=True, remat=model.remat, backend=backend, block=block
    )


def check(name: str, mesh: MeshShape, sizes: Sizes) -> None:
    """Raises BadRun where a mesh does not divide a configuration."""
    _sized(name, mesh, sizes)


def _sized(name: str, mesh: MeshShape, sizes: Sizes) -> tuple[Any, Any]:
    """The model and the run of a configuration with other sizes."""
    model, run = configuration(name)
    batch, sequence = sizes.batch or run.batch, sizes.sequence or run.sequence
    accumulate = sizes.accumulate or _parts(batch, mesh)
    _check(model, batch, sequence, accumulate, mesh)
    model = dataclasses.replace(model, remat=sizes.remat or model.remat)
    return model, dataclasses.replace(run, batch=batch, sequence=sequence, accumulate=accumulate)


def step(
    name: str, mesh: MeshShape, sizes: Sizes, devices: Sequence[Any]
) -> tuple[Any, tuple[Any, Any], Any]:
    """The jitted training step of a configuration on these devices, its state and batch as shapes, and the run."""
    import jax
    import numpy as np

    model, run = _sized(name, mesh, sizes)
    model = dataclasses.replace(model, attention="cudnn")
    try:
        optimizer = _module("optimizer")
    except ModuleNotFoundError as error:
        raise BadRun(f"the driver needs the package '{error.name}': pip install 'policyc[train]'") from None
    driver = _module("model")
    axes = tuple(getattr(mesh, axis) for axis in driver.AXES)
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    laid = jax.sharding.Mesh(np.array(devices).reshape(axes), driver.AXES, axis_types=kinds)
    state, _ = optimizer.first_state(model, run, laid)
    return optimizer.train_step(model, run, laid), (state, driver.described_batch(run, laid)), run


def _loss(model: Any) -> Any:
    loss = _module("model").loss
    return lambda params, batch: loss(params, batch, model)


def _shapes(model: Any, rows: int, sequence: int) -> tuple[Any, Any]:
    import jax

    def array(shape: tuple[int, ...], dtype: str) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]

    of = _module("model")
    params = jax.tree.map(lambda leaf: array(leaf.shape, "float32"), of.table(model))
    return params, dict.fromkeys(("tokens", "targets", "mask"), array((rows, sequence), "int32"))


def _parts(batch: int, mesh: MeshShape) -> int:
    """The fewest parts in which a device has two sequences at a time or fewer."""
    share = batch // mesh.batch_shards
    return next((n for n in range(1, share + 1) if share % n == 0 and share // n <= _AT_ONCE), 1)


def _check(model: Any, batch: int, sequence: int, accumulate: int, mesh: MeshShape) -> None:
    if batch < mesh.batch_shards:
        whole = mesh.batch_shards % batch == 0 and mesh.tensor == mesh.context == 1
        other = f"--mesh 'fsdp={batch} tensor={mesh.batch_shards // batch}'" if whole else "fewer devices"
        raise BadRun(
            f"{mesh.batch_shards} devices over data and fsdp are too many for a batch of {batch}: "
            f"--batch {mesh.batch_shards}, or {other}"
        )
    if batch % accumulate or (batch // accumulate) % mesh.batch_shards:
        raise BadRun(
            f"a batch of {batch} in {accumulate} parts does not divide over {mesh.batch_shards} devices (data x fsdp): "
            f"--batch {-(-batch // (mesh.batch_shards * accumulate)) * mesh.batch_shards * accumulate}"
        )
    uneven = [
        f"{what} {size} is no multiple of {by} ({axes})"
        for what, size, by, axes in (
            ("sequence", sequence, mesh.context, "context"),
            ("heads", model.heads, mesh.tensor * mesh.context, "tensor x context"),
            ("hidden", model.hidden, mesh.tensor, "tensor"),
        )
        if size % by
    ]
    if uneven:
        raise BadRun(
            f"the mesh does not divide the model: {'; '.join(uneven)}: take smaller axes, and fsdp for the rest"
        )
