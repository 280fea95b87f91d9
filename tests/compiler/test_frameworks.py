"""Small models of each framework, trained for some steps under a policy without a change to their code.

The formats are those that compile fast: what is tested is that GEMMs are found, named and replaced.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policyc
from policyc.compiler.planning.plan_checks import check_plan
from tests.support.gemms import normal

X = normal(8, 16)
Y = jax.device_put(np.sin(np.asarray(X).sum(-1, keepdims=True)))


def plan_of_training(train: Any, policy: str) -> policyc.Plan:
    """Runs a training plainly, with everything kept, and under a policy. Returns the plan of the last.

    With everything kept the losses are the same. Under the policy they are others, and fall. What a training starts
    from is made before, because JAX traces every operation again under another policy.
    """
    plain = train()
    with policyc.active("* -> keep", on_plan=check_plan):
        assert train() == plain
    with policyc.active(policy) as session:
        losses = train()
    assert session.plans
    check_plan(session.plans[0])
    assert losses != plain
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(losses[0], plain[0], rtol=0.3)
    return session.plans[0]


def names(plan: policyc.Plan) -> list[str]:
    return [s.name for s in plan.sites]


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
                length=2,
            )
            h, _ = stacked(name="layers")(x, None)
            return nn.Dense(1, name="head")(h)

    model = Model()

    first_params = jax.jit(model.init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
    tx = optax.adam(3e-3)
    first_state, key = tx.init(first_params), jax.random.key(7)

    def train():
        @jax.jit
        def step(params, state, key):
            def loss(p):
                y = model.apply(p, X, rngs={"dropout": key})
                return jnp.mean((y - Y) ** 2), {"mean": y.mean()}

            (value, _), grads = jax.value_and_grad(loss, has_aux=True)(params)
            updates, state = tx.update(grads, state)
            return optax.apply_updates(params, updates), state, value

        params, state, losses = first_params, first_state, []
        for _ in range(5):
            params, state, value = step(params, state, key)
            losses.append(float(value))
        return losses

    plan = plan_of_training(
        train, "layers -> mxfp8 expect 4; layers[-1:].up -> keep expect 1; layers[0].down @ bwd -> fp8"
    )
    assert names(plan) == ["layers.up.kernel", "layers.down.kernel", "head.kernel"]
    assert [s.count for s in plan.sites] == [2, 2, 1]


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

    first_model = Model(nnx.Rngs(0))
    graph, first_state = nnx.split((first_model, nnx.Optimizer(first_model, optax.adam(3e-3), wrt=nnx.Param)))

    def train():
        model, optimizer = nnx.merge(graph, jax.tree.map(lambda x: x, first_state))  # a copy: steps change it

        @nnx.jit
        def step(model, optimizer):
            value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(X) - Y) ** 2))(model)
            optimizer.update(model, grads)
            return value

        return [float(step(model, optimizer)) for _ in range(5)]

    plan = plan_of_training(train, "mlp -> fp8 expect 2; head -> bf16 expect 1")
    assert names(plan) == ["mlp.up.kernel", "mlp.value.kernel", "head.kernel"]


def test_equinox():
    eqx = pytest.importorskip("equinox")

    first_model = eqx.nn.MLP(16, 1, 32, 2, key=jax.random.key(0))

    def train():
        @eqx.filter_jit
        def step(model):
            @eqx.filter_value_and_grad
            def loss(model):
                return jnp.mean((jax.vmap(model)(X) - Y) ** 2)

            value, grads = loss(model)
            return value, eqx.apply_updates(model, jax.tree.map(lambda g: -0.05 * g, grads))

        model, losses = first_model, []
        for _ in range(5):
            value, model = step(model)
            losses.append(float(value))
        return losses

    plan = plan_of_training(train, "layers -> fp8 expect 3; layers[-1:] -> keep expect 1")
    assert names(plan) == ["layers[0].weight", "layers[1].weight", "layers[2].weight"]
