"""Small models of each framework, trained for some steps under a policy without a change to their code.

The formats are those that compile fast: what is tested is that GEMMs are found, named and replaced.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import policyc
from policyc.compiler.plan_checks import check_plan
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


@jax.custom_vjp
def cross_entropy(logits, labels):
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, 16), -1))


def _cross_entropy_backward(residuals, gradient):
    logits, labels = residuals
    return gradient * (jax.nn.softmax(logits) - jax.nn.one_hot(labels, 16)) / len(labels), None


cross_entropy.defvjp(
    lambda logits, labels: (cross_entropy(logits, labels), (logits, labels)), _cross_entropy_backward
)


@jax.custom_vjp
def rescaled(x, w):
    """A function with its own backward rule and a GEMM, which no policy can reach."""
    return x @ w


rescaled.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, dy: (dy @ saved[1].T, saved[0].T @ dy))


def mixture(params, tokens, key):
    """Tied embeddings, a scan of blocks with a remat that saves by name, experts by vmap and by ragged_dot, dropout;
    computed in bfloat16.
    """
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    h = params["embed"][tokens]

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("quantization", "hidden"))
    def block(h, layer):
        hidden = checkpoint_name(jax.nn.silu(h @ layer["up"]), "hidden")
        return h + hidden @ layer["down"], None

    h, _ = jax.lax.scan(block, h, params["layers"])
    h = jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h, 0)
    h = h + jax.vmap(lambda w: jnp.tanh(h @ w))(params["experts"]).mean(0)
    sizes = jnp.array([3, len(tokens) - 3], jnp.int32)
    h = h + jax.lax.ragged_dot(h, params["routed"], sizes)
    h = rescaled(h, params["own"])
    logits = (h @ params["embed"].T).astype(jnp.float32)
    return cross_entropy(logits, (tokens + 1) % 16), {"norm": jnp.linalg.norm(logits), "kind": "mixture"}


@pytest.mark.slow
def test_a_model_with_every_kind_of_gemm():
    def weights(seed, *shape):
        return jax.random.normal(jax.random.key(seed), shape) / 4

    first_params = {
            "embed": weights(0, 16, 16), "layers": {"up": weights(1, 2, 16, 32), "down": weights(2, 2, 32, 16)},
            "experts": weights(3, 2, 16, 16), "routed": weights(4, 2, 16, 16), "own": weights(5, 16, 16),
        }  # fmt: skip
    batches = jax.random.randint(jax.random.key(6), (2, 8), 0, 16)
    keys = [jax.random.key(n) for n in range(4)]

    def train():
        @jax.jit
        def step(params, key):
            def micro(total, tokens):
                (value, aux), grads = jax.value_and_grad(mixture, has_aux=True)(params, tokens, key)
                assert aux["kind"] == "mixture"
                return jax.tree.map(jnp.add, total, grads), (value, aux["norm"])

            total, (values, _) = jax.lax.scan(micro, jax.tree.map(jnp.zeros_like, params), batches)
            return jax.tree.map(lambda p, g: p - 0.2 * g, params, total), values.mean()

        params, losses = first_params, []
        for key in keys:
            params, value = step(params, key)
            losses.append(float(value))
        return losses

    rules = "* -> fp8; embed -> keep expect 1; layers[0] -> mxfp8 expect 2; experts -> mxfp8 expect 1"
    plan = plan_of_training(train, f"{rules}; routed -> fp8 expect 1; own -> keep expect 1")
    assert names(plan) == ["layers.up", "layers.down", "experts", "routed", "own", "embed"]
    assert [s.is_ragged for s in plan.sites].count(True) == 1
    with policyc.active(rules), pytest.raises(policyc.PolicyError, match=r"opaque-site.*'own'"):
        train()


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
