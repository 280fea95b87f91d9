"""Programs on eight host devices, which `tests/conftest.py` asks for."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import policyc
from policyc.compiler.plan_checks import check_plan
from policyc.jaxcore import jaxprs

W = jnp.asarray(np.random.default_rng(0).standard_normal((32, 32)), jnp.float32) / 6
X = jnp.asarray(np.random.default_rng(1).standard_normal((16, 32)), jnp.float32)
POLICY = "* -> mxfp8; w, up -> nvfp4; layers[-1:] -> fp8"
"""NVFP4 takes three times as long to compile: one site of it in a program is enough."""


def moved(p: jax.Array, slope: jax.Array) -> jax.Array:
    """A step against the slope, of a fiftieth of the parameter's size, whatever the loss is measured in."""
    return p - 0.02 * jnp.abs(p).max() * slope / jnp.abs(slope).max()


def check(loss: Any, *args: Any, sites: int) -> None:
    """Keeping changes nothing; quantizing trains, and every site of it is quantized in the gradient."""
    plain = jax.jit(jax.value_and_grad(loss))
    kept = jax.jit(jax.value_and_grad(policyc.apply("* -> keep", loss)))
    for a, b in zip(jax.tree.leaves(plain(*args)), jax.tree.leaves(kept(*args)), strict=True):
        np.testing.assert_array_equal(a, b)
    plan = policyc.plan(POLICY, loss, *args)
    check_plan(plan)
    assert len(plan.sites) == sites, [s.name for s in plan.sites]
    assert all(s.weight for s in plan.sites)
    with policyc.active(POLICY):
        value, grads = plain(*args)
        gradient = jax.make_jaxpr(jax.grad(loss))(*args)
        params, last = args[0], value
        for _ in range(4):
            last, slopes = plain(params, *args[1:])
            params = jax.tree.map(moved, params, slopes)
    assert last < value
    found = Counter(jaxprs.primitive_name(e) for e in jaxprs.all_equations(gradient))
    assert found["scaled_gemm"] + found["scaled_ragged_gemm"] >= 2 * sites, found
    assert not found["dot_general"], found
    assert jnp.isfinite(value)
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))
    np.testing.assert_allclose(value, plain(*args)[0], rtol=0.5)
    with policyc.active(POLICY, backend="xla"):
        again = plain(*args)
    # Sums in another order; what they move by a last bit may be a code of the next layer, a tenth of its value.
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves((value, grads)), strict=True):
        np.testing.assert_allclose(a, b, atol=0.01 * float(jnp.abs(b).max()))


def auto() -> Any:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def shard_map() -> None:
    """Data parallel rows, a weight that is gathered, a sum over devices."""
    mesh = auto()

    def local(w, x):
        h = jnp.tanh(x @ jax.lax.all_gather(w, "model", axis=0, tiled=True))
        return jax.lax.pmean(jnp.mean(h**2), ("data", "model"))

    def loss(p, x):
        f = jax.shard_map(local, mesh=mesh, in_specs=(P("model"), P("data")), out_specs=P(), check_vma=False)
        return f(p["w"], x)

    check(loss, {"w": W}, X, sites=1)


def shard_map_checked() -> None:
    mesh = auto()

    def local(w, x):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)
        return jax.lax.psum(jnp.sum(h**2), "data")

    def loss(p, x):
        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(p["layers"], x)

    check(loss, {"layers": jnp.stack([W] * 3)}, X, sites=1)


def ragged_in_shard_map() -> None:
    mesh = auto()
    sizes = jnp.array([1, 3], jnp.int32)

    def local(w, x):
        return jax.lax.psum(jnp.sum(jax.lax.ragged_dot(x, w, sizes) ** 2), "data")

    def loss(p, x):
        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(p["experts"], x)

    check(loss, {"experts": jnp.stack([W] * 2)}, X, sites=1)


def gradient_inside() -> None:
    """The loss is differentiated inside the shard_map."""
    mesh = auto()

    def local(w, x):
        value, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return jax.lax.pmean(value, "data"), jax.lax.pmean(grad, "data")

    step = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()), check_vma=False)
    )
    plain = step(W, X)
    with policyc.active("w -> nvfp4 expect 1"):
        value, grad = step(W, X)
    assert value != plain[0]
    np.testing.assert_allclose(grad, plain[1], atol=0.1)


def sharded_arrays() -> None:
    """Arrays that say where they are, under jit, with constraints."""
    mesh = auto()

    def loss(p, x):
        h = jax.lax.with_sharding_constraint(x @ p["up"], NamedSharding(mesh, P("data", "model")))
        return jnp.mean((jnp.tanh(h) @ p["down"]) ** 2)

    params = {
        "up": jax.device_put(W, NamedSharding(mesh, P(None, "model"))),
        "down": jax.device_put(W, NamedSharding(mesh, P("model", None))),
    }
    check(loss, params, jax.device_put(X, NamedSharding(mesh, P("data"))), sites=2)


def explicit() -> None:
    """Shardings in the types."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        params = {
            "up": jax.device_put(W, NamedSharding(mesh, P(None, "model"))),
            "down": jax.device_put(W, NamedSharding(mesh, P(None, None))),
        }
        x = jax.device_put(X, NamedSharding(mesh, P("data", None)))

        def loss(p, x):
            h = jnp.tanh(x @ p["up"])
            h = jax.sharding.reshard(h, P("data", None))
            return jnp.mean((h @ p["down"]) ** 2)

        check(loss, params, x, sites=2)


# ---- pipelines

STAGES, MICRO = 4, 3
LAYERS = jnp.asarray(np.random.default_rng(2).standard_normal((2 * STAGES, 16, 16)), jnp.float32) / 8
BATCHES = jnp.asarray(np.random.default_rng(3).standard_normal((MICRO, 2, 16)), jnp.float32)


def residual(h: jax.Array, layers: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), h, layers)[0]


def whole(p: Any, x: jax.Array) -> jax.Array:
    """What every pipeline computes, without one."""
    return jnp.mean((jax.vmap(residual, (0, None))(x, p["layers"].reshape(-1, 16, 16)) - 1) ** 2)


def handed_on(p: Any, x: jax.Array) -> jax.Array:
    """GPipe: a stage on each device, activations handed on by ppermute in a scan over time."""
    mesh = jax.make_mesh((STAGES,), ("stage",), axis_types=(AxisType.Auto,), devices=jax.devices()[:STAGES])

    def local(layers, x):
        stage = jax.lax.axis_index("stage")
        state, out = jax.lax.pcast((jnp.zeros_like(x[0]), jnp.zeros_like(x)), ("stage",), to="varying")

        def tick(carry, time):
            state, out = carry
            state = jnp.where(stage == 0, x[jnp.minimum(time, MICRO - 1)], state)
            state = residual(state, layers)
            done = (stage == STAGES - 1) & (time >= STAGES - 1)
            out = jnp.where(done, out.at[time - STAGES + 1].set(state), out)
            state = jax.lax.ppermute(state, "stage", [(i, (i + 1) % STAGES) for i in range(STAGES)])
            return (state, out), None

        (_, out), _ = jax.lax.scan(tick, (state, out), jnp.arange(MICRO + STAGES - 1))
        return jax.lax.psum(jnp.where(stage == STAGES - 1, jnp.mean((out - 1) ** 2), 0.0), "stage")

    return jax.shard_map(local, mesh=mesh, in_specs=(P("stage"), P()), out_specs=P())(p["layers"], x)


def shifted(p: Any, x: jax.Array) -> jax.Array:
    """All stages at once by vmap, the activations shifted from one to the next: one GEMM with stages for a batch."""
    layers = p["layers"].reshape(STAGES, 2, 16, 16)

    def tick(carry, time):
        state, out = carry
        state = jnp.concatenate([x[jnp.minimum(time, MICRO - 1)][None], state[:-1]])
        state = jax.vmap(residual)(state, layers)
        return (state, out.at[time - STAGES + 1].set(state[-1])), None

    start = (jnp.zeros((STAGES, *x.shape[1:])), jnp.zeros_like(x))
    (_, out), _ = jax.lax.scan(tick, start, jnp.arange(MICRO + STAGES - 1))
    return jnp.mean((out - 1) ** 2)


def trained(loss: Any, policy: str | None) -> list[float]:
    step, params, losses = jax.jit(jax.value_and_grad(loss)), {"layers": LAYERS}, []
    with contextlib.nullcontext() if policy is None else policyc.active(policy):
        for _ in range(3):
            value, grads = step(params, BATCHES)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
            losses.append(float(value))
    return losses


def pipeline(loss: Any, policy: str) -> None:
    """Keeping changes no bit; quantized, it learns, and starts as the model without a pipeline under the same rules."""
    plain = trained(loss, None)
    assert trained(loss, "* -> keep") == plain
    args = {"layers": LAYERS}, BATCHES
    np.testing.assert_allclose(plain[0], jax.jit(whole)(*args), rtol=1e-5)  # the same sums in another order
    losses = trained(loss, policy)
    assert losses != plain
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(
        losses[0], jax.jit(policyc.apply(policy, whole))(*args), rtol=0.02
    )  # scales of fp8 are of other tensors


def pipeline_by_ppermute() -> None:
    pipeline(handed_on, "layers -> fp8 expect 8; layers[1::2] -> keep expect 4")
    plan = policyc.plan("layers -> fp8; layers[-1:] -> keep expect 1", handed_on, {"layers": LAYERS}, BATCHES)
    with pytest.raises(policyc.PolicyError, match="divided over 4 devices"):
        check_plan(plan)


def pipeline_by_vmap() -> None:
    pipeline(shifted, "layers -> fp8")


PROGRAMS = (
    shard_map, shard_map_checked, ragged_in_shard_map, gradient_inside, sharded_arrays, explicit, pipeline_by_ppermute,
    pipeline_by_vmap,
)  # fmt: skip
