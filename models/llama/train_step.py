"""One step of training: the gradient in parts, the update, and what happens on a NaN, an Inf or a spike of the loss.

The host does not wait for a step to learn whether it is faulty. The device itself keeps the old weights after a faulty
step, and the host reads the result later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh

import policyc
from policyc.models.llama import model as llama
from policyc.models.llama import partition
from policyc.models.llama.configs import ModelConfig, RunConfig, runs_of_seeds
from policyc.models.llama.model import Batch, Params
from policyc.models.llama.optimizer import learning_rate, make_optimizer

State = dict[str, Any]
Metrics = dict[str, Any]

GROW_AFTER = 1000  # finite steps after which the loss scale doubles
MEAN_DECAY = 0.95  # of the running mean of the loss


def init_state(config: ModelConfig, run: RunConfig, mesh: Mesh) -> State:
    """The state before the first step. With several seeds, their states are stacked."""
    shardings = _shardings(_abstract_state_of_one(config, run, mesh))
    make = jax.jit(partial(_make_state, config, run), out_shardings=shardings)
    states = [make(jax.random.key(one.seed)) for one in runs_of_seeds(run)]
    return cast(State, states[0] if run.seeds is None else jax.tree.map(lambda *a: jnp.stack(a), *states))


def abstract_state(config: ModelConfig, run: RunConfig, mesh: Mesh) -> State:
    """The shapes and shardings of the state."""
    state = _abstract_state_of_one(config, run, mesh)
    return state if run.seeds is None else partition.stack_abstract(state, len(runs_of_seeds(run)), mesh)


def _abstract_state_of_one(config: ModelConfig, run: RunConfig, mesh: Mesh) -> State:
    params = jax.tree.map(lambda spec: partition.sharding(mesh, spec.axes), llama.param_specs(config))
    replicated = partition.sharding(mesh, ())
    shapes = jax.eval_shape(partial(_make_state, config, run), jax.random.key(0))
    shardings = jax.tree.map(lambda _: replicated, shapes) | {"params": params}
    # Moments are sharded like their parameters. Under Muon, each optimizer has those of its own parameters.
    is_masked: Any = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
    options: Any = {"transform_non_params": lambda _: replicated, "is_leaf": is_masked}
    shardings["adam"] = optax.tree_map_params(
        make_optimizer(run), lambda x, s: x if is_masked(x) else s, shapes["adam"], params, **options
    )
    arrays = jax.tree.map(lambda x, s: partition.abstract_array(x.shape, x.dtype, s), shapes, shardings)
    return cast(State, arrays)


def _make_state(config: ModelConfig, run: RunConfig, key: jax.Array) -> State:
    params = llama.init_params(key, config)
    counts = dict.fromkeys(("step", "skipped", "good", "faults"), jnp.zeros((), jnp.int32))
    floats = {"scale": jnp.float32(run.loss_scale or 1), "mean": jnp.float32(jnp.inf)}
    return {"params": params, "adam": make_optimizer(run).init(params), **counts, **floats}


def _shardings(abstract: State) -> State:
    return cast(State, jax.tree.map(lambda array: array.sharding, abstract))


def gradients(
    params: Params, batch: Batch, scale: jax.Array, config: ModelConfig, run: RunConfig, mesh: Mesh
) -> tuple[Params, Metrics]:
    """The scaled gradient of the mean loss over all unmasked tokens, computed in `accumulate` parts, and that `loss`.

    If there are experts, also `loads`: the share of each expert in each layer.
    """
    # If all tokens are end tokens, the count is 0 and the loss is NaN: a faulty step.
    count = jnp.sum(batch["mask"].astype(jnp.float32))
    if run.gather == "each":
        return _sum_parts(params, batch, (scale, count), config, run, mesh)

    specs = llama.param_specs(config)
    axes_of_params = jax.tree.map(lambda spec: partition.sharding(mesh, spec.axes).spec, specs)
    axes_of_rows = partition.sharding(mesh, ("batch",)).spec

    def on_device(
        shards: Params, rows: Batch, scale_and_count: tuple[jax.Array, jax.Array]
    ) -> tuple[Params, Metrics]:
        # The embedding table stays in float32, because its gradient adds up the rows of equal tokens.
        dtypes = {name: "float32" if name == "embed" else config.compute for name in specs}
        whole = {
            name: jax.tree.map(partial(_gather, dtype=dtype), specs[name], shards[name])
            for name, dtype in dtypes.items()
        }
        grads, measured = _sum_parts(whole, rows, scale_and_count, config, run, None)
        sums = {"loss": lax.psum(measured.pop("loss"), ("data", "fsdp"))}
        means = {name: lax.pmean(array, ("data", "fsdp")) for name, array in measured.items()}
        return jax.tree.map(_add_over_devices, specs, grads), sums | means

    mapped: Callable[..., tuple[Params, Metrics]] = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(axes_of_params, axes_of_rows, partition.sharding(mesh, ()).spec),
        out_specs=(axes_of_params, partition.sharding(mesh, ()).spec),
        check_vma=False,  # with the check, the gradient of a norm would be summed over devices in every part
    )
    return mapped(params, batch, (scale, count))


def _sum_parts(
    params: Params,
    batch: Batch,
    scale_and_count: tuple[jax.Array, jax.Array],
    config: ModelConfig,
    run: RunConfig,
    mesh: Mesh | None,
) -> tuple[Params, Metrics]:
    """The sums of gradient and loss over the parts of a batch, in float32."""
    scale, count = scale_and_count

    def objective(params: Params, part: Batch) -> tuple[jax.Array, Metrics]:
        (nats, penalty), loads = llama.loss_and_loads(params, part, config, mesh, run.z_loss)
        measured = {"loss": nats / count} | ({} if loads is None else {"loads": loads / run.accumulate})
        return scale * (nats + penalty) / count, measured

    gradient: Callable[[Params, Batch], tuple[Params, Metrics]] = jax.grad(objective, has_aux=True)
    if run.accumulate == 1:
        grads, measured = gradient(params, batch)
        return jax.tree.map(lambda g: g.astype(jnp.float32), grads), measured

    def add(total: Any, part: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradient(params, part)), None

    measured = {"loss": jnp.zeros(())}
    if config.experts:
        measured["loads"] = jnp.zeros((config.layers, config.experts))
    zero = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params), measured
    parts = jax.tree.map(lambda rows: partition.split_interleaved(rows, 0, run.accumulate), batch)
    parts = jax.tree.map(lambda rows: partition.constrain(rows, mesh, None, "batch", "sequence"), parts)
    return lax.scan(add, zero, parts)[0]


def _gather(spec: llama.ParamSpec, shard: jax.Array, dtype: str) -> jax.Array:
    """A whole parameter from the shards of all devices, inside a shard_map. A sharded one is gathered in `dtype`."""
    if "width" not in spec.axes:
        return shard
    axis = spec.axes.index("width")
    return cast(jax.Array, lax.all_gather(shard.astype(dtype), "fsdp", axis=axis, tiled=True))


def _add_over_devices(spec: llama.ParamSpec, gradient: jax.Array) -> jax.Array:
    """A device's shard of the sum of all devices' gradients, inside a shard_map."""
    if "width" not in spec.axes:
        return cast(jax.Array, lax.psum(gradient, ("data", "fsdp")))
    scattered = lax.psum_scatter(gradient, "fsdp", scatter_dimension=spec.axes.index("width"), tiled=True)
    return cast(jax.Array, lax.psum(scattered, "data"))


def _unscale_and_clip(grads: Params, scale: jax.Array, run: RunConfig) -> tuple[Params, jax.Array]:
    """The gradient without the loss scale, clipped to a norm of `--clip`, and its norm before clipping."""
    if run.loss_scale:
        grads = jax.tree.map(lambda g: g / scale, grads)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    if run.clip:
        grads = jax.tree.map(lambda g: g * jnp.minimum(1, run.clip / norm), grads)
    return grads, norm


def _finish_step(
    state: State, new: State, nats: jax.Array, norm: jax.Array, run: RunConfig
) -> tuple[State, jax.Array]:
    """The state after a step, and whether the step is fine. A faulty step keeps the old weights.

    `new` has the parameters and the optimizer of the next state, used if the step is fine. A fault that stops the run
    changes only the number of faults in a row. Later steps, which the host may already have started, change nothing.
    """
    mean, scale = state["mean"], state["scale"]
    finite = jnp.isfinite(nats) & jnp.isfinite(norm)
    fine = finite & (nats <= mean + run.spike) if run.spike else finite
    good, new_scale = jnp.where(finite, state["good"] + 1, 0), scale
    is_fault = ~fine
    if run.loss_scale:
        grown = jnp.where(good % GROW_AFTER == 0, 2 * scale, scale)
        new_scale = jnp.where(finite, grown, scale / 2)
        is_fault &= ~(jnp.isfinite(nats) & ~jnp.isfinite(norm) & (new_scale >= 1))  # overflows are expected
    limit = 1 if run.on_fault == "stop" else run.max_skips
    has_stopped = state["faults"] >= limit
    faults = jnp.where(is_fault, state["faults"] + 1, 0)
    stops = has_stopped | (faults >= limit)
    new_mean = jnp.where(jnp.isinf(mean), nats, MEAN_DECAY * mean + (1 - MEAN_DECAY) * nats)
    new = new | {"mean": new_mean}
    counts = {
        "step": state["step"] + 1,
        "skipped": state["skipped"] + ~fine,
        "good": good,
        "scale": new_scale,
    }
    kept = jax.tree.map(lambda a, b: jnp.where(fine & ~stops, a, b), new, {name: state[name] for name in new})
    counted = {name: jnp.where(stops, state[name], count) for name, count in counts.items()}
    return kept | counted | {"faults": jnp.where(has_stopped, state["faults"], faults)}, fine & ~has_stopped


def _norms(params: Params, grads: Params, state: State, run: RunConfig) -> Params:
    """The norms of each parameter and its gradient, per layer, every `--norms-every` steps; zeros at other steps."""

    def norm(path: Any, array: jax.Array) -> jax.Array:
        first = 1 if path[0].key == "layers" and hasattr(path[1], "key") else 0  # layers are stacked
        return jnp.sqrt(jnp.sum(array.astype(jnp.float32) ** 2, axis=range(first, array.ndim)))

    def measure() -> Params:
        unscaled = jax.tree.map(lambda norm: norm / state["scale"], jax.tree.map_with_path(norm, grads))
        return {"gradient_norms": unscaled, "weight_norms": jax.tree.map_with_path(norm, params)}

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(measure))
    is_due = (state["step"] + 1) % run.norms_every == 0
    return cast(Params, lax.cond(is_due, measure, lambda: zeros))


def make_train_step(config: ModelConfig, run: RunConfig, mesh: Mesh) -> jax.stages.Wrapped:
    """The jitted function (state, batch) -> (state, metrics). It donates the state.

    With several seeds, all three have a leading axis of seeds.
    """

    def step(seed: Any, state: State, batch: Batch) -> tuple[State, Metrics]:
        rate = learning_rate(run, state["step"])
        with policyc.rounding_step(state["step"], seed=seed):
            grads, measured = gradients(state["params"], batch, state["scale"], config, run, mesh)
        norms = {"norms": _norms(state["params"], grads, state, run)} if run.norms_every else {}
        grads, norm = _unscale_and_clip(grads, state["scale"], run)
        updates, adam = make_optimizer(run).update(grads, state["adam"], state["params"])
        params = jax.tree.map(lambda p, u: p - rate * u, state["params"], updates)
        state_after, fine = _finish_step(state, {"params": params, "adam": adam}, measured["loss"], norm, run)
        metrics = {"loss": measured["loss"], "grad_norm": norm, "learning_rate": rate, "is_fine": fine,
                   "mean_loss": state["mean"], "skipped": state_after["skipped"], "faults": state_after["faults"],
                   "loss_scale": state_after["scale"], **norms}  # fmt: skip
        if run.packing == "whole":
            metrics["padding"] = jnp.sum(batch["segments"] < 0)
        if config.experts:
            metrics["largest_expert_load"] = jnp.max(measured["loads"])
        return state_after, metrics

    # Without out_shardings, XLA may return equivalent shardings in another form, and the next call would recompile.
    shardings = _shardings(abstract_state(config, run, mesh))
    step_of_run = partial(step, run.seed) if run.seeds is None else partial(jax.vmap(step), _seeds(run))
    return jax.jit(step_of_run, donate_argnums=0, out_shardings=(shardings, None))


def _seeds(run: RunConfig) -> jax.Array:
    return jnp.array([one.seed for one in runs_of_seeds(run)], jnp.uint32)


def mean_loss(config: ModelConfig, mesh: Mesh, stride: int, params: Params, batch: Batch) -> jax.Array:
    """The mean loss over every `stride`-th row of a batch."""
    part = {name: rows[::stride] for name, rows in batch.items()}
    return llama.loss(params, part, config, mesh)[0] / jnp.maximum(part["mask"].sum(), 1)


def make_eval_step(config: ModelConfig, run: RunConfig, mesh: Mesh, under_policy: bool) -> jax.stages.Wrapped:
    """The jitted function (params, batch) -> losses: as in training and, under a policy, also without the policy.

    With a document mask, also `tokens`: the number of tokens that predict, which differs between batches.

    With several seeds, the parameters and the losses have a leading axis of seeds. The batch is the same for all.
    """
    loss = partial(mean_loss, config, mesh, 1)

    def evaluate(params: Params, batch: Batch) -> Metrics:
        # A policy applies only to functions that are differentiated. XLA removes the unused gradient.
        losses = {"validation_loss": jax.value_and_grad(loss)(params, batch)[0]}
        if under_policy:
            losses["validation_loss_evaluated_in_bf16"] = loss(params, batch)
        return losses | ({"tokens": batch["mask"].sum()} if run.document_mask else {})

    def evaluate_seeds(params: Params, batch: Batch) -> Metrics:
        return jax.vmap(evaluate, in_axes=(0, None))(params, batch)

    return jax.jit(evaluate if run.seeds is None else evaluate_seeds)


def average_losses(losses: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The mean of each loss over batches, weighted by their `tokens` if there are any."""
    names = [name for name in losses[0] if name != "tokens"]
    tokens = [each["tokens"] for each in losses] if "tokens" in losses[0] else None
    return {name: np.average([each[name] for each in losses], axis=0, weights=tokens) for name in names}
