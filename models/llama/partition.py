"""The mesh of a run, and the shardings of arrays by their logical axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from policyc.models.llama.configs import ConfigError, ModelConfig, RunConfig, runs_of_seeds

AXES = ("data", "fsdp", "expert", "tensor", "context")
# The mesh axes that divide each logical axis. Attention needs whole sequences, so inside it the context axis divides
# heads instead.
AXIS_RULES: dict[str | None, Any] = {"batch": ("data", "fsdp", "expert"), "rows": ("data", "expert"),
                                     "sequence": "context", "width": "fsdp", "inner": "tensor", "expert": "expert",
                                     "heads": ("tensor", "context"), None: None}  # fmt: skip


def make_mesh(config: ModelConfig, run: RunConfig) -> Mesh:
    """The mesh of a run, over all devices."""
    fixed = {
        "fsdp": run.fsdp_axis,
        "expert": run.expert_axis,
        "tensor": run.tensor_axis,
        "context": run.context_axis,
    }
    count, rest = jax.device_count(), math.prod(fixed.values())
    if run.seeds is not None and count > 1:
        raise ConfigError(f"--seeds runs on one device, but there are {count}: choose one, for example with "
                          "CUDA_VISIBLE_DEVICES=0, or start a process per seed with --seed")  # fmt: skip
    if run.data_axis < 1 and count % rest:
        axes = " x ".join(f"--{name}-axis {size}" for name, size in fixed.items() if size > 1)
        there = "there is 1" if count == 1 else f"there are {count}"
        raise ConfigError(f"{axes} needs a multiple of {rest} devices, but {there}: change the axes")
    data = run.data_axis if run.data_axis > 0 else count // rest
    if data * rest != count:
        mesh = " x ".join(f"{size} {name}" for name, size in {"data": data, **fixed}.items())
        raise ConfigError(
            f"a mesh of {mesh} does not fit {count} devices: change the axes, or omit --data-axis"
        )
    check_masked_attention(config, run)
    check_divisible(config, run, {"data": data, **fixed})
    return jax.make_mesh((data, *fixed.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_divisible(config: ModelConfig, run: RunConfig, axes: Mapping[str, int]) -> None:
    """Raises ConfigError unless a mesh with these axes divides every size evenly."""
    data, fsdp, expert, tensor, context = (axes[name] for name in AXES)
    if run.gather == "once" and expert * tensor * context > 1:
        raise ConfigError("--gather once: every device computes with whole weights and sequences, so expert, tensor "
                          "and context must be 1")  # fmt: skip
    if expert > 1 and not config.experts:
        raise ConfigError(
            f"an expert axis of {expert} splits the experts, but the model has none: add --experts"
        )
    parts, by_expert = run.accumulate * data * fsdp * expert, " x expert" if expert > 1 else ""
    multiples = (
        ("heads", config.heads, config.kv_heads, "key and value heads"),
        ("head_dim", config.head_dim, 2, "rotary embedding"),
        ("batch", run.batch, parts, f"accumulate x data x fsdp{by_expert}"),
        ("sequence", run.sequence, config.loss_chunks * context, "loss_chunks x context"),
        ("heads", config.heads, tensor * context, "tensor x context"),
        ("width", config.width, fsdp, "fsdp"),
        ("hidden", config.hidden, tensor, "tensor"),
        ("experts", config.experts, expert, "expert"),
        ("kv_heads x head_dim", config.kv_heads * config.head_dim, tensor, "tensor"),
        ("vocab", config.vocab, tensor, "tensor"),
    )
    uneven = [f"{n} {size} is not a multiple of {by} ({why})" for n, size, by, why in multiples if size % by]
    if uneven:
        only_batch = run.batch % parts and len(uneven) == 1
        fix = f"--batch {-(-run.batch // parts) * parts} fits" if only_batch else "change the sizes"
        raise ConfigError(f"{'; '.join(uneven)}: {fix}; or change the axes of the mesh")


def check_masked_attention(config: ModelConfig, run: RunConfig) -> None:
    """Raises ConfigError if cuDNN's attention cannot run these settings with a document mask."""
    if not run.document_mask or attention_implementation(config) == "xla":
        return
    if run.seeds is not None:
        raise ConfigError("--document-mask: JAX cannot batch cuDNN's attention over seeds if it has a mask: use "
                          "--attention xla")  # fmt: skip
    if run.sequence % 2:
        raise ConfigError(
            f"--document-mask: cuDNN's attention with a mask needs an even --sequence, not {run.sequence}"
        )


def attention_implementation(config: ModelConfig) -> Literal["cudnn", "xla"]:
    """The implementation of attention, with "auto" resolved for the default backend."""
    if config.attention == "auto":
        return "cudnn" if jax.default_backend() == "gpu" and config.compute == "bfloat16" else "xla"
    return cast(Literal["cudnn", "xla"], config.attention)


def sharding(mesh: Mesh, axes: Sequence[str | None]) -> NamedSharding:
    """The sharding of an array with these logical axes."""
    spec = PartitionSpec(*(AXIS_RULES[name] for name in axes))
    return NamedSharding(mesh, spec)


def constrain(x: jax.Array, mesh: Mesh | None, *axes: str | None) -> jax.Array:
    """`x` with a sharding constraint, unless there is only one device."""
    if mesh is None or mesh.size == 1:
        return x
    constrained: jax.Array = lax.with_sharding_constraint(x, sharding(mesh, axes))
    return constrained


def split_interleaved(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Splits an axis into `count` stacked parts of every `count`-th entry. Each part is on all devices of the axis."""
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, count, *x.shape[axis + 1 :]), axis + 1, 0)


def abstract_batch(run: RunConfig, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and shardings of a batch. With several seeds, their batches are stacked."""
    array = abstract_array((run.batch, run.sequence), jnp.int32, sharding(mesh, ("batch", "sequence")))
    names = ("tokens", "targets", "mask", *(("segments", "positions") if run.document_mask else ()))
    batch = dict.fromkeys(names, array)
    return batch if run.seeds is None else stack_abstract(batch, len(runs_of_seeds(run)), mesh)


def stack_abstract(tree: Any, count: int, mesh: Mesh) -> Any:
    """The shapes of `count` stacked trees. They are not sharded: several seeds run on one device."""

    def stack(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return abstract_array((count, *array.shape), array.dtype, sharding(mesh, ()))

    return jax.tree.map(stack, tree)


def abstract_array(shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
