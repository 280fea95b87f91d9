"""Small models of each framework, trained some steps under a policy without a change to their code."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policyc

X = jnp.asarray(np.random.default_rng(0).standard_normal((8, 16)), jnp.float32)
Y = jnp.sin(X.sum(-1, keepdims=True))


def trained(train: Any, policy: str) -> tuple[list[float], policyc.Plan]:
    """Losses of a training under a policy, and its plan; without and with everything kept they are the same."""
    plain = train()
    with policyc.active("* -> keep"):
        assert train() == plain
    with policyc.active(policy) as session:
        losses = train()
    assert session.plans
    session.plans[0].check()
    assert losses != plain
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(losses[0], plain[0], rtol=0.3)
    return losses, session.plans[0]


def sgd(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.002 * g, params, grads)


def names(plan: policyc.Plan) -> list[str]:
    return [s.name for s in plan.sites]


def test_plain_jax():
    def loss(params, x):
        for i in range(2):
            with jax.named_scope(f"layers_{i}"), jax.named_scope("mlp"):
                x = x + jnp.tanh(x @ params["layers"][i]["up"]) @ params["layers"][i]["down"]
        return jnp.mean((x.sum(-1, keepdims=True) - Y) ** 2)

    def train():
        w = jax.random.normal(jax.random.key(0), (16, 16)) * 0.1
        params = {"layers": [{"up": w, "down": w}] * 2}
        step = jax.jit(jax.value_and_grad(loss))
        losses = []
        for _ in range(5):
            value, grads = step(params, X)
            params = sgd(params, grads)
            losses.append(float(value))
        return losses

    _, plan = trained(train, "mlp -> fp8 expect 4; layers[-1:].mlp -> mxfp8 expect 2")
    assert names(plan) == ["layers[0].up", "layers[0].down", "layers[1].up", "layers[1].down"]


def test_flax_linen_with_scan_and_remat():
    nn = pytest.importorskip("flax.linen")
    optax = pytest.importorskip("optax")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, h, _):
            up = nn.Dense(32, name="up", dtype=jnp.bfloat16)(h)
            h = h + nn.Dense(16, name="down", dtype=jnp.bfloat16)(jax.nn.gelu(up)).astype(h.dtype)
            return nn.Dropout(0.1, deterministic=False)(h), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            stacked = nn.scan(
                nn.remat(Block),
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=3,
            )
            h, _ = stacked(name="layers")(x, None)
            return nn.Dense(1, name="head")(h)

    model = Model()

    def train():
        params = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
        tx = optax.adam(3e-3)

        @jax.jit
        def step(params, state, key):
            def loss(p):
                y = model.apply(p, X, rngs={"dropout": key})
                return jnp.mean((y - Y) ** 2), {"mean": y.mean()}

            (value, _), grads = jax.value_and_grad(loss, has_aux=True)(params)
            updates, state = tx.update(grads, state)
            return optax.apply_updates(params, updates), state, value

        state, losses = tx.init(params), []
        for _ in range(5):
            params, state, value = step(params, state, jax.random.key(7))
            losses.append(float(value))
        return losses

    _, plan = trained(
        train, "layers -> nvfp4 expect 6; layers[-1:].up -> keep expect 1; layers[0].down @ bwd -> fp8"
    )
    assert names(plan) == ["layers.up.kernel", "layers.down.kernel", "head.kernel"]
    assert [s.count for s in plan.sites] == [3, 3, 1]


def test_flax_nnx():
    nnx = pytest.importorskip("flax.nnx")
    optax = pytest.importorskip("optax")

    class Mlp(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(16, 32, rngs=rngs)
            self.value = nnx.Linear(32, 16, rngs=rngs)

        def __call__(self, x):
            return x + self.value(jax.nn.relu(self.up(x)))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.mlp = Mlp(rngs)
            self.head = nnx.Linear(16, 1, rngs=rngs)

        def __call__(self, x):
            return self.head(self.mlp(x))

    def train():
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(X) - Y) ** 2))(model)
            optimizer.update(model, grads)
            return value

        return [float(step(model, optimizer)) for _ in range(5)]

    _, plan = trained(train, "mlp -> nvfp4 expect 2; head -> bf16 expect 1")
    assert names(plan) == ["mlp.up.kernel", "mlp.value.kernel", "head.kernel"]


def test_equinox():
    eqx = pytest.importorskip("equinox")

    def train():
        model = eqx.nn.MLP(16, 1, 32, 2, key=jax.random.key(0))

        @eqx.filter_jit
        def step(model):
            @eqx.filter_value_and_grad
            def loss(model):
                return jnp.mean((jax.vmap(model)(X) - Y) ** 2)

            value, grads = loss(model)
            return value, eqx.apply_updates(model, jax.tree.map(lambda g: -0.05 * g, grads))

        losses = []
        for _ in range(5):
            value, model = step(model)
            losses.append(float(value))
        return losses

    _, plan = trained(train, "layers -> fp8 expect 3; layers[-1:] -> keep expect 1")
    assert names(plan) == ["layers[0].weight", "layers[1].weight", "layers[2].weight"]


def test_haiku():
    hk = pytest.importorskip("haiku")

    def train():
        model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([32, 16, 1])(x)))
        params = model.init(jax.random.key(0), X)
        step = jax.jit(jax.value_and_grad(lambda p: jnp.mean((model.apply(p, X) - Y) ** 2)))
        losses = []
        for _ in range(5):
            value, grads = step(params)
            params = sgd(params, grads)
            losses.append(float(value))
        return losses

    _, plan = trained(train, "mlp -> nvfp4 expect 3; linear_2 -> keep expect 1")
    assert len(plan.sites) == 3
