"""The mixture of experts: its results, gradients and losses against plain formulas, on one device and on several."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policyc
from policyc.language.recipes import Gemm
from policyc.models.llama import configs, experts, partition, train_step
from policyc.models.llama import model as llama
from tests.support import llama_runs
from tests.support.jaxpr_tools import primitive_counts

CONFIG = configs.ModelConfig(**llama_runs.SMALL | {"hidden": 16}, compute="float32", experts=4)
SHAPE = (8, 6)  # batch, sequence


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def mix_in_numpy(params: Any, x: np.ndarray, per_token: int) -> tuple[np.ndarray, float, np.ndarray]:
    """Token by token: the result, the balance loss and the share of each expert."""
    tokens, router, weights = x.reshape(-1, x.shape[-1]), params["router"], params["experts"]
    count, results = router.shape[1], np.zeros_like(tokens)
    assigned, probability = np.zeros(count), np.zeros(count)
    for number, token in enumerate(tokens):
        exponentials = np.exp(token @ router)
        probabilities = exponentials / exponentials.sum()
        chosen = np.argsort(-probabilities)[:per_token]
        for expert in chosen:
            gate, up = (token @ weights[name][expert] for name in ("gate_proj", "up_proj"))
            result = (silu(gate) * up) @ weights["down_proj"][expert]
            results[number] += probabilities[expert] / probabilities[chosen].sum() * result
        assigned[chosen] += 1
        probability += probabilities
    balance = count * np.sum(assigned / len(tokens) * probability / len(tokens))
    return results.reshape(x.shape), balance, assigned / assigned.sum()


def mix_densely(params: Any, x: jax.Array) -> jax.Array:
    """Every expert on every token, and weights of zero for those that were not chosen. For its derivative."""
    probabilities = jax.nn.softmax(x @ params["router"])
    smallest = jnp.sort(probabilities)[..., -CONFIG.experts_per_token, None]
    weights = jnp.where(probabilities >= smallest, probabilities, 0)
    weights = weights / weights.sum(-1, keepdims=True)
    gate, up = (jnp.einsum("bsw,ewh->bseh", x, params["experts"][n]) for n in ("gate_proj", "up_proj"))
    results = jnp.einsum("bseh,ehw->bsew", jax.nn.silu(gate) * up, params["experts"]["down_proj"])
    return jnp.sum(weights[..., None] * results, axis=2)


@cache
def arguments() -> tuple[Any, np.ndarray, np.ndarray]:
    """Parameters of one layer, an input, and a cotangent of the result."""
    draw = partial(np.random.default_rng(0).standard_normal, dtype=np.float32)
    specs = llama.param_specs(configs.ModelConfig(**vars(CONFIG) | {"scan": False}))["layers"][0]["mlp"]
    params = jax.tree.map(lambda spec: draw(spec.shape) / 4, specs)
    return params, draw((*SHAPE, CONFIG.width)), draw((*SHAPE, CONFIG.width))


def run_layer(axes: dict[str, int]) -> tuple[Any, Any]:
    """The results of the layer on a mesh, and the gradient of its product with the cotangent."""
    params, x, cotangent = arguments()
    mesh = llama_runs.make_mesh(**axes)
    specs = llama.param_specs(configs.ModelConfig(**vars(CONFIG) | {"scan": False}))["layers"][0]["mlp"]
    params = jax.tree.map(lambda p, s: jax.device_put(p, partition.sharding(mesh, s.axes)), params, specs)
    x = jax.device_put(x, partition.sharding(mesh, ("batch", "sequence", None)))

    def objective(params: Any, x: jax.Array) -> Any:
        y, summary = experts.mix_experts(params, x, CONFIG, mesh)
        return jnp.sum(y * cotangent), (y, summary)

    gradients, results = jax.jit(jax.grad(objective, (0, 1), has_aux=True))(params, x)
    return jax.device_get(results), jax.device_get(gradients)


@pytest.mark.any_jax
@pytest.mark.parametrize(
    "axes",
    [
        {"fsdp": 2, "expert": 2, "tensor": 2},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "expert": 2, "context": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_experts_compute_the_plain_formulas(axes: dict[str, int]) -> None:
    params, x, cotangent = arguments()
    (y, summary), gradients = run_layer(axes)
    wide = jax.tree.map(lambda array: array.astype(np.float64), params)
    expected, balance, loads = mix_in_numpy(wide, x.astype(np.float64), CONFIG.experts_per_token)
    # Sums of at most 32 products of numbers near 1, in float32 (6e-8), three times in a row.
    np.testing.assert_allclose(y, expected, atol=2e-5)
    np.testing.assert_allclose(summary.balance_loss, balance, rtol=1e-5)
    np.testing.assert_allclose(summary.loads, loads, rtol=1e-6)
    dense = jax.jit(jax.grad(lambda params, x: jnp.sum(mix_densely(params, x) * cotangent), (0, 1)))(
        params, x
    )
    # As above, and a weight gets the sum of 48 tokens.
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-4), gradients, jax.device_get(dense))


def test_padding_does_not_count_for_the_router() -> None:
    """Its summary is that of the tokens alone."""
    params, x, _ = arguments()
    is_padding = np.zeros(SHAPE, bool)
    is_padding[3:, 1:] = True
    is_padding[5] = True
    _, _, summary = jax.jit(partial(experts.route, config=CONFIG))(params["router"], x, is_padding=is_padding)
    tokens = x[~is_padding][None].astype(np.float64)
    wide = jax.tree.map(lambda array: array.astype(np.float64), params)
    _, balance, loads = mix_in_numpy(wide, tokens, CONFIG.experts_per_token)
    # Float32, as above.
    np.testing.assert_allclose(summary.balance_loss, balance, rtol=1e-5)
    np.testing.assert_allclose(summary.loads, loads, rtol=1e-6)


# ---- whole steps


RUN = configs.RunConfig(**llama_runs.SHORT)


def run_steps(axes: dict[str, int], **settings: Any) -> list[tuple[float, float]]:
    """The loss and the largest share of an expert, in each step on a mesh."""
    mesh, run = llama_runs.make_mesh(**axes), configs.RunConfig(**llama_runs.SHORT | settings)
    state, step = train_step.init_state(CONFIG, run, mesh), train_step.make_train_step(CONFIG, run, mesh)
    tokens = np.random.default_rng(0).integers(
        CONFIG.vocab, size=(run.batch, run.sequence + 1), dtype=np.int32
    )
    arrays = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": np.ones_like(tokens[:, 1:])}
    batch = jax.device_put(arrays, partition.sharding(mesh, ("batch", "sequence")))
    rows = []
    for _ in range(2):
        state, measured = step(state, batch)
        rows.append((float(measured["loss"]), float(measured["largest_expert_load"])))
    return rows


@pytest.mark.slow
def test_eight_devices_give_the_losses_of_one() -> None:
    """Also in parts. The second loss sees the first update."""
    several = run_steps({"fsdp": 2, "expert": 2, "tensor": 2}, accumulate=2)
    # Float32, in another order of sums: some ulps of a gradient, which Adam divides by its own size.
    np.testing.assert_allclose(several, run_steps({}, accumulate=2), rtol=1e-5)


# ---- policies


def abstract_loss(axes: dict[str, int]) -> tuple[Any, Any, Any]:
    """The loss on a mesh, and its abstract arguments."""
    config, mesh = configs.ModelConfig(**vars(CONFIG) | {"compute": "bfloat16"}), llama_runs.make_mesh(**axes)
    state = train_step.abstract_state(config, RUN, mesh)
    loss = partial(llama.loss, config=config, mesh=mesh)
    return (
        lambda params, batch: sum(loss(params, batch)),
        state["params"],
        partition.abstract_batch(RUN, mesh),
    )


@pytest.mark.parametrize("policy", ["te_nvfp4", "llama_nvfp4", pytest.param("fp8", marks=pytest.mark.slow)])
def test_policies_quantize_experts_and_no_router(policy: str) -> None:
    loss, params, batch = abstract_loss({})
    plan = policyc.plan(policy, loss, params, batch)
    decisions = plan.decisions(plan.phases[0])
    bits = {}
    for site in plan.sites:
        recipes = [decisions[site.address, layer].recipe for layer in site.layers()]
        bits[site.name] = {recipe.bits(Gemm.FPROP) for recipe in recipes if recipe is not None}
    narrow = {"fp8": 8}.get(policy, 4)
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert bits[f"layers.mlp.experts.{name}"] == {narrow}
    assert bits["layers.mlp.router"] == {16}


def test_experts_on_several_devices_run_under_a_policy() -> None:
    """Three products of three weights, of each layer's experts on a device. The last layer is kept."""
    loss, params, batch = abstract_loss({"fsdp": 2, "expert": 2, "tensor": 2})
    policy = "layers.mlp.experts -> mxfp8\nlayers[-1].mlp.experts -> keep"
    with policyc.active(policy):
        gradient = jax.make_jaxpr(jax.grad(loss))(params, batch)
    counts = primitive_counts(gradient)
    assert (counts["scaled_ragged_gemm"], counts["ragged_dot_general"]) == (9, 9)
