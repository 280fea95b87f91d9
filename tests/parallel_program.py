"""Programs on eight host devices; `tests/test_parallel.py` runs this file by itself, since devices are counted once."""

from __future__ import annotations

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import policyc
from policyc import jaxprs

W = jnp.asarray(np.random.default_rng(0).standard_normal((32, 32)), jnp.float32) / 6
X = jnp.asarray(np.random.default_rng(1).standard_normal((16, 32)), jnp.float32)
POLICY = "* -> nvfp4; layers[-1:] -> fp8"


def check(loss: Any, *args: Any, sites: int) -> None:
    """Keeping changes nothing; quantizing runs, and every site of it is quantized in the gradient."""
    plain = jax.jit(jax.value_and_grad(loss))
    kept = jax.jit(jax.value_and_grad(policyc.apply("* -> keep", loss)))
    for a, b in zip(jax.tree.leaves(plain(*args)), jax.tree.leaves(kept(*args)), strict=True):
        np.testing.assert_array_equal(a, b)
    plan = policyc.plan(POLICY, loss, *args)
    plan.check()
    assert len(plan.sites) == sites, [s.name for s in plan.sites]
    assert all(s.weight for s in plan.sites)
    with policyc.active(POLICY):
        value, grads = plain(*args)
        gradient = jax.make_jaxpr(jax.grad(loss))(*args)
    found = Counter(jaxprs.primitive_name(e) for e in jaxprs.every_eqn(gradient))
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


PROGRAMS = {
    f.__name__: f
    for f in (shard_map, shard_map_checked, ragged_in_shard_map, gradient_inside, sharded_arrays, explicit)
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
