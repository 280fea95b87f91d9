"""Losses on eight host devices (set up by `tests/conftest.py`): sharded arrays, shard_map, a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.gemms import normal

W, X = normal(32, 32, divisor=6), normal(16, 32, seed=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedLoss:
    """A loss, its arguments, how many sites it has, and a policy that quantizes all of them."""

    loss: Any
    args: tuple[Any, ...]
    sites: int
    policy: str
    mesh: Mesh | None = None
    """The mesh to set while the loss runs, if its axes are explicit."""


def auto_mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def in_shard_map() -> ShardedLoss:
    """Rows sharded over devices, a weight that is gathered, and a mean over devices."""
    mesh = auto_mesh()

    def local(w, x):
        h = jnp.tanh(x @ jax.lax.all_gather(w, "model", axis=0, tiled=True))
        return jax.lax.pmean(jnp.mean(h**2), ("data", "model"))

    def loss(p, x):
        f = jax.shard_map(local, mesh=mesh, in_specs=(P("model"), P("data")), out_specs=P(), check_vma=False)
        return f(p["w"], x)

    return ShardedLoss(loss=loss, args=({"w": W}, X), sites=1, policy="w -> fp8")


def stack_in_shard_map() -> ShardedLoss:
    """A scan in a shard_map that checks varying axes."""
    mesh = auto_mesh()

    def local(w, x):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)
        return jax.lax.psum(jnp.sum(h**2), "data")

    def loss(p, x):
        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(p["layers"], x)

    params = {"layers": jnp.stack([W] * 3)}
    return ShardedLoss(loss=loss, args=(params, X), sites=1, policy="* -> mxfp8; layers[-1:] -> fp8")


def ragged_in_shard_map() -> ShardedLoss:
    mesh = auto_mesh()
    sizes = jnp.array([1, 3], jnp.int32)

    def local(w, x):
        return jax.lax.psum(jnp.sum(jax.lax.ragged_dot(x, w, sizes) ** 2), "data")

    def loss(p, x):
        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(p["experts"], x)

    return ShardedLoss(
        loss=loss, args=({"experts": jnp.stack([W] * 2)}, X), sites=1, policy="experts -> mxfp8"
    )


def sharded_arrays() -> ShardedLoss:
    """Arrays with shardings, under jit, with constraints."""
    mesh = auto_mesh()

    def loss(p, x):
        h = jax.lax.with_sharding_constraint(x @ p["up"], NamedSharding(mesh, P("data", "model")))
        return jnp.mean((jnp.tanh(h) @ p["down"]) ** 2)

    params = {
        "up": jax.device_put(W, NamedSharding(mesh, P(None, "model"))),
        "down": jax.device_put(W, NamedSharding(mesh, P("model", None))),
    }
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    return ShardedLoss(loss=loss, args=(params, x), sites=2, policy="up -> fp8; down -> mxfp8")


def explicit_shardings() -> ShardedLoss:
    """Arrays with explicit shardings: they are part of the types."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

    def loss(p, x):
        h = jnp.tanh(x @ p["up"])
        h = jax.sharding.reshard(h, P("data", None))
        return jnp.mean((h @ p["down"]) ** 2)

    params = {
        "up": jax.device_put(W, NamedSharding(mesh, P(None, "model"))),
        "down": jax.device_put(W, NamedSharding(mesh, P(None, None))),
    }
    x = jax.device_put(X, NamedSharding(mesh, P("data", None)))
    return ShardedLoss(loss=loss, args=(params, x), sites=2, policy="up -> fp8; down -> mxfp8", mesh=mesh)


SHARDED_LOSSES = (in_shard_map, stack_in_shard_map, ragged_in_shard_map, sharded_arrays, explicit_shardings)


def gradient_in_shard_map() -> Any:
    """A step that differentiates the loss inside the shard_map."""

    def local(w, x):
        value, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return jax.lax.pmean(value, "data"), jax.lax.pmean(grad, "data")

    return jax.jit(
        jax.shard_map(
            local, mesh=auto_mesh(), in_specs=(P(), P("data")), out_specs=(P(), P()), check_vma=False
        )
    )


# ---- a pipeline

STAGES, MICRO = 4, 3
LAYERS, BATCHES = normal(2 * STAGES, 16, 16, seed=2, divisor=8), normal(MICRO, 2, 16, seed=3)


def residual_layers(h: jax.Array, layers: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), h, layers)[0]


def unpipelined(p: Any, x: jax.Array) -> jax.Array:
    """The loss of the pipeline, computed without one."""
    return jnp.mean((jax.vmap(residual_layers, (0, None))(x, p["layers"].reshape(-1, 16, 16)) - 1) ** 2)


def pipelined_by_ppermute(p: Any, x: jax.Array) -> jax.Array:
    """GPipe: each device has one stage. In a scan over time, ppermute passes activations to the next stage."""
    mesh = jax.make_mesh((STAGES,), ("stage",), axis_types=(AxisType.Auto,), devices=jax.devices()[:STAGES])

    def local(layers, x):
        stage = jax.lax.axis_index("stage")
        state, out = jax.lax.pcast((jnp.zeros_like(x[0]), jnp.zeros_like(x)), ("stage",), to="varying")

        def tick(carry, time):
            state, out = carry
            state = jnp.where(stage == 0, x[jnp.minimum(time, MICRO - 1)], state)
            state = residual_layers(state, layers)
            is_finished = (stage == STAGES - 1) & (time >= STAGES - 1)
            out = jnp.where(is_finished, out.at[time - STAGES + 1].set(state), out)
            state = jax.lax.ppermute(state, "stage", [(i, (i + 1) % STAGES) for i in range(STAGES)])
            return (state, out), None

        (_, out), _ = jax.lax.scan(tick, (state, out), jnp.arange(MICRO + STAGES - 1))
        return jax.lax.psum(jnp.where(stage == STAGES - 1, jnp.mean((out - 1) ** 2), 0.0), "stage")

    return jax.shard_map(local, mesh=mesh, in_specs=(P("stage"), P()), out_specs=P())(p["layers"], x)
