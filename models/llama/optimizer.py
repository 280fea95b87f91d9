"""One step of training: gradients in parts, AdamW, and what happens when a number goes wrong.

In: a state and a batch. Out: the next state and what was measured. The one trap: the host must not wait to find out
about a faulty step. The device itself leaves the weights as they were; the host reads it later, and stops or counts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from llama import model as llama
from llama.configs import Model, Run

State = dict[str, Any]

GROW_AFTER = 1000  # good steps until the loss scale doubles
MEAN_OVER = 0.95  # of the running mean of the loss


def learning_rate(run: Run, step: jax.Array) -> jax.Array:
    """At a step, counted from 0: up to the peak, and down at the end."""
    at = (step + 1) / run.steps
    rise = jnp.minimum(1.0, at / run.warmup) if run.warmup else jnp.ones(())
    begin = {"cosine": run.warmup, "wsd": 1 - run.decay, "constant": 1.0}[run.schedule]
    done = jnp.clip((at - begin) / (1 - begin), 0, 1) if begin < 1 else 0.0
    fall = (1 + jnp.cos(jnp.pi * done)) / 2 if run.schedule == "cosine" else 1 - done
    return run.learning_rate * rise * (run.final + (1 - run.final) * fall)


def adamw(run: Run) -> optax.GradientTransformation:
    """AdamW, but for the learning rate. Norms do not decay."""
    decayed = partial(jax.tree.map_with_path, lambda path, _: "norm" not in str(path[-1]))
    adam = optax.scale_by_adam(run.beta1, run.beta2, eps=1e-8)
    return optax.chain(adam, optax.add_decayed_weights(run.weight_decay, mask=decayed))


def first_state(c: Model, run: Run, mesh: Mesh) -> tuple[State, Callable[[], State]]:
    """The state's shapes and places, and a function that makes it where it belongs."""

    def make() -> State:
        params = llama.init(jax.random.key(run.seed), c)
        counts = dict.fromkeys(("step", "skipped", "good"), jnp.zeros((), jnp.int32))
        floats = {"scale": jnp.float32(run.loss_scale or 1), "mean": jnp.float32(jnp.inf)}
        return {"params": params, "adam": adamw(run).init(params), **counts, **floats}

    where = jax.tree.map(lambda leaf: llama.sharding(mesh, leaf.axes), llama.table(c))
    shapes, everywhere = jax.eval_shape(make), NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda _: everywhere, shapes) | {"params": where}
    # Adam's moments lie where their parameters lie.
    rest: Any = {"transform_non_params": lambda _: everywhere}
    placed["adam"] = optax.tree_map_params(adamw(run), lambda _, s: s, shapes["adam"], where, **rest)
    described = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, placed)
    return described, jax.jit(make, out_shardings=placed)


def gradients(params: Any, batch: Any, scale: jax.Array, c: Model, run: Run, mesh: Mesh) -> tuple[Any, Any]:
    """Of the mean over all tokens that count, in `accumulate` parts; and that mean."""
    count = jnp.maximum(jnp.sum(batch["mask"].astype(jnp.float32)), 1)

    def objective(params: Any, part: Any) -> tuple[jax.Array, jax.Array]:
        nats, z = llama.loss(params, part, c, mesh, run.z_loss)
        return scale * (nats + z) / count, nats / count

    derivative = jax.grad(objective, has_aux=True)
    if run.accumulate == 1:
        return derivative(params, batch)

    def add(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, derivative(params, part)), None

    zero = jax.tree.map(jnp.zeros_like, params), jnp.zeros(())
    parts = jax.tree.map(lambda rows: llama.in_parts(rows, 0, run.accumulate), batch)
    parts = jax.tree.map(lambda rows: llama.constrain(rows, mesh, None, "batch", "sequence"), parts)
    return lax.scan(add, zero, parts)[0]


def train_step(c: Model, run: Run, mesh: Mesh) -> Callable[[State, Any], tuple[State, dict[str, jax.Array]]]:
    """The compiled step. It takes the state's memory."""

    def step(state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
        old = {name: state[name] for name in ("params", "adam", "mean")}
        scale, mean, rate = state["scale"], state["mean"], learning_rate(run, state["step"])
        grads, nats = gradients(old["params"], batch, scale, c, run, mesh)
        if run.loss_scale:
            grads = jax.tree.map(lambda g: g / scale, grads)
        size = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        if run.clip:
            grads = jax.tree.map(lambda g: g * jnp.minimum(1, run.clip / size), grads)
        updates, adam = adamw(run).update(grads, old["adam"], old["params"])
        params = jax.tree.map(lambda p, u: p - rate * u, old["params"], updates)

        finite = jnp.isfinite(nats) & jnp.isfinite(size)
        fine = finite & (nats <= mean + run.spike) if run.spike else finite
        running = jnp.where(jnp.isinf(mean), nats, MEAN_OVER * mean + (1 - MEAN_OVER) * nats)
        new = {"params": params, "adam": adam, "mean": running}
        after = jax.tree.map(lambda a, b: jnp.where(fine, a, b), new, old)
        good, skipped = jnp.where(finite, state["good"] + 1, 0), state["skipped"] + ~fine
        after |= {"step": state["step"] + 1, "skipped": skipped, "good": good, "scale": scale}
        if run.loss_scale:
            grown = jnp.where(good % GROW_AFTER == 0, 2 * scale, scale)
            after["scale"] = jnp.where(finite, grown, scale / 2)
        measured = {"loss": nats, "grad_norm": size, "learning_rate": rate, "fine": fine,
                    "skipped": skipped, "loss_scale": after["scale"]}  # fmt: skip
        return after, measured

    # Said, and not left to XLA: a state that came back with its places named otherwise would be compiled for again.
    where = jax.tree.map(lambda a: a.sharding, first_state(c, run, mesh)[0])
    return jax.jit(step, donate_argnums=0, out_shardings=(where, None))


def mean_loss(c: Model, mesh: Mesh, every: int, params: Any, batch: Any) -> jax.Array:
    """The loss of every n-th row of a batch."""
    part = {name: rows[::every] for name, rows in batch.items()}
    return llama.loss(params, part, c, mesh)[0] / part["mask"].sum()


def validation(c: Model, mesh: Mesh, plain: bool) -> Callable[[Any, Any], dict[str, jax.Array]]:
    """The loss of a batch as training computes it and, where it is asked for, plainly. A policy changes what is
    differentiated: so the first one is, and XLA removes the gradient that nobody reads.
    """
    loss = partial(mean_loss, c, mesh, 1)

    def evaluate(params: Any, batch: Any) -> dict[str, jax.Array]:
        found = {"validation_loss": jax.value_and_grad(loss)(params, batch)[0]}
        return found | ({"validation_loss_plain": loss(params, batch)} if plain else {})

    return jax.jit(evaluate)
