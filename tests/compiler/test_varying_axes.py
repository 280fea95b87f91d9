"""Policies inside a `shard_map` that checks over which axes values vary, as it does by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import policyc
from tests.support.gemms import normal, quick_jit, slow

D = 32
MLP = {"up": normal(D, D, divisor=4), "down": normal(D, D, seed=1, divisor=4)}
STACK = {name: jnp.stack([w, w[::-1]]) for name, w in MLP.items()}
X = normal(64, D, seed=2)
GROUPS = jnp.array([20, 12], jnp.int32)


def mlp(p: Any, h: Any) -> Any:
    return jnp.tanh(h @ p["up"]) @ p["down"]


def row_parallel(p: Any, h: Any) -> Any:
    return lax.psum(mlp(p, h), "m")


def gathered(p: Any, h: Any) -> Any:
    return mlp(jax.tree.map(lambda a: lax.all_gather(a, "d", tiled=True), p), h)


def scatter(p: Any, h: Any) -> Any:
    h = jnp.tanh(lax.psum_scatter(h @ p["up"], "m", scatter_dimension=1, tiled=True))
    return lax.pmean(lax.all_gather(h, "m", axis=1, tiled=True) @ p["down"], "m")


def layers(layer: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    body = jax.checkpoint(lambda h, p: (h + layer(p, h), None))
    return lambda p, h: lax.scan(body, h, p)[0]


def attention(p: Any, h: Any) -> Any:
    """Over the rows of one device: 32 of 64."""
    rows = h.reshape(-1, 32, D)
    q = rows @ p["up"]
    return (jax.nn.softmax(q @ rows.swapaxes(1, 2)) @ rows @ p["down"]).reshape(h.shape)


def experts(p: Any, h: Any) -> Any:
    rows = h.reshape(-1, 32, D)
    up = [jnp.tanh(lax.ragged_dot(r, p["up"], GROUPS)) for r in rows]
    return jnp.concatenate([lax.ragged_dot(r, p["down"], GROUPS) for r in up])


def branches(p: Any, h: Any) -> Any:
    return lax.cond(p["up"][0, 0] > 0, lambda: h @ p["up"], lambda: jnp.tanh(h) @ p["up"]) @ p["down"]


def transposed(p: Any, h: Any) -> Any:
    return jnp.tanh(p["up"] @ h.T).T @ p["down"]


def varying(p: Any, h: Any) -> Any:
    return mlp(lax.pcast(p, ("d",), to="varying"), h)


COLUMNS = {"up": P(None, "m"), "down": P("m")}
PROGRAMS: dict[str, tuple[Callable[..., Any], Any, Any, Any, Callable[..., Any]]] = {
    "data": (mlp, MLP, P(), P("d"), mlp),
    "tensor": (row_parallel, MLP, COLUMNS, P("d"), mlp),
    "fsdp": (gathered, MLP, P("d"), P("d"), mlp),
    "scattered sums": (scatter, MLP, {"up": P("m"), "down": P()}, P("d", "m"), mlp),
    "rows on the right": (transposed, MLP, P(), P("d"), transposed),
    "varying by hand": (varying, MLP, P(), P("d"), mlp),
    "scan of remats": (layers(mlp), STACK, P(), P("d"), layers(mlp)),
    "scan of fsdp": (layers(gathered), STACK, P(None, "d"), P("d"), layers(mlp)),
    "scan of tensors": (
        layers(row_parallel),
        STACK,
        {"up": P(None, None, "m"), "down": P(None, "m")},
        P("d"),
        layers(mlp),
    ),
    "attention": (attention, MLP, P(), P("d"), attention),
    "experts": (experts, STACK, P(), P("d"), experts),
    "branches": (branches, MLP, P(), P("d"), branches),
}
"""The body, its parameters, the specs of these and of the rows, and the same model on one device."""


def square(h: Any) -> Any:
    return jnp.mean(h**2)


def losses(name: str) -> tuple[Callable[..., Any], Callable[..., Any], Any]:
    """The loss in a `shard_map`, the same loss without one, and the parameters."""
    body, params, specs, rows, plain = PROGRAMS[name]
    mesh = jax.make_mesh((2, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def local(p: Any, x: Any) -> Any:
        return lax.pmean(square(body(p, x)), "d")

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(specs, rows), out_specs=P())
    return sharded, lambda p, x: square(plain(p, x)), params


KEPT = ("fprop", "dgrad", "wgrad", "bwd", "fprop, dgrad", "fprop, wgrad")


@pytest.mark.parametrize("recipe", ["fp8", slow("nvfp4(rht=wgrad, sr=grad, scale2d=weights)")])
@pytest.mark.parametrize("name", PROGRAMS)
def test_some_products_may_be_kept(name: str, recipe: str) -> None:
    loss, _, params = losses(name)
    for kept in KEPT if recipe == "fp8" else KEPT[1:3]:
        step = policyc.apply(f"* -> {recipe}; * @ {kept} -> keep", loss)
        gradient = jax.eval_shape(jax.grad(step), params, X)
        assert jax.tree.map(jnp.shape, gradient) == jax.tree.map(jnp.shape, params)


@pytest.mark.parametrize("name", PROGRAMS)
def test_kept_products_have_the_gradients_of_one_device(name: str) -> None:
    """bf16 rounds each element alike on any number of devices. Sums have another order."""
    sharded, plain, params = losses(name)
    policy = "* -> bf16; * @ dgrad -> keep; down @ wgrad -> keep"
    gradients = (quick_jit(jax.grad(policyc.apply(policy, f)))(params, X) for f in (sharded, plain))
    for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(jnp.abs(b).max()))
