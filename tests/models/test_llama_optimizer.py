"""Muon, against an implementation in numpy: which parameters it updates, and by what."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from policyc.models.llama import configs, optimizer, partition, train_step
from tests.support import llama_runs

pytestmark = pytest.mark.any_jax
CONFIG = configs.ModelConfig(**llama_runs.SMALL, compute=llama_runs.DTYPE)
RUN = configs.RunConfig(**llama_runs.SHORT, optimizer="muon", weight_decay=0.3)
STEPS = 3


def orthogonalize(matrix: np.ndarray) -> np.ndarray:
    """Five steps of Newton and Schulz, as published by Keller Jordan, in float64."""
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def muon_updates(gradients: list[np.ndarray], momentum: float) -> list[np.ndarray]:
    """The updates of one matrix: Nesterov's momentum with corrected biases, orthogonalized, with Adam's size."""
    mean, updates = np.zeros_like(gradients[0]), []
    for step, gradient in enumerate(gradients, start=1):
        mean = momentum * mean + (1 - momentum) * gradient
        ahead = momentum * mean / (1 - momentum ** (step + 1))
        ahead = ahead + (1 - momentum) * gradient / (1 - momentum**step)
        updates.append(0.2 * np.sqrt(max(gradient.shape)) * orthogonalize(ahead))
    return updates


def adam_updates(gradients: list[np.ndarray], beta1: float, beta2: float) -> list[np.ndarray]:
    mean, square, updates = np.zeros_like(gradients[0]), np.zeros_like(gradients[0]), []
    for step, gradient in enumerate(gradients, start=1):
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        updates.append(mean / (1 - beta1**step) / (np.sqrt(square / (1 - beta2**step)) + 1e-8))
    return updates


SHAPES = {
    "embed": (12, 8),
    "layers": {
        "attention": {"q_proj": (2, 8, 12)},
        "mlp": {"experts": {"down_proj": (2, 3, 16, 8)}},
        "mlp_norm": (2, 8),
    },
    "norm": (8,),
}
AXES = {
    "embed": ("inner", "width"),
    "q_proj": (None, "width", "inner"),
    "down_proj": (None, None, "inner", "width"),
}


def map_shapes(function: Any) -> Any:
    """A tree of parameters. `function` takes the name and the shape of each."""
    return jax.tree.map_with_path(
        lambda path, shape: function(path[-1].key, shape), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )


def expected_updates(path: str, parameter: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    """The updates of all steps, stacked."""
    if "norm" in path:
        return np.stack(adam_updates([*gradients], RUN.beta1, RUN.beta2))
    if "layers" not in path:
        updates = np.stack(adam_updates([*gradients], RUN.beta1, RUN.beta2))
    else:
        updates = np.zeros_like(gradients)
        for index in np.ndindex(parameter.shape[:-2]):
            of_matrix = [gradient[index] for gradient in gradients]
            updates[:, *index] = muon_updates(of_matrix, RUN.momentum)
    return updates + RUN.weight_decay * parameter


def test_muon_updates_each_matrix_of_the_blocks_and_adamw_the_rest() -> None:
    """Of stacked layers and experts, on four devices that divide the matrices."""
    random, mesh = np.random.default_rng(0), llama_runs.make_mesh(fsdp=2, tensor=2)

    def draw(name: str, shape: tuple[int, ...]) -> jax.Array:
        values = random.standard_normal((STEPS + 1, *shape), dtype=np.float32)
        return jax.device_put(values, partition.sharding(mesh, (None, *AXES.get(name, (None,) * len(shape)))))

    values = map_shapes(draw)  # the parameters, and the gradients of each step
    transform = optimizer.make_optimizer(RUN)

    @jax.jit
    def run_steps(values: Any) -> Any:
        params, *gradients = (jax.tree.map(lambda a, i=i: a[i], values) for i in range(STEPS + 1))
        state, updates = transform.init(params), []
        for gradient in gradients:
            update, state = transform.update(gradient, state, params)
            updates.append(update)
        return updates

    updates = run_steps(values)
    by_path = [dict(jax.tree.leaves_with_path(update)) for update in updates]
    for path, array in jax.tree.leaves_with_path(values):
        name = jax.tree_util.keystr(path)
        wide = np.asarray(array, np.float64)
        # An iteration multiplies a small singular value, and its float32 error, by at most 3.4445. Five of them make
        # 485 roundings (6e-8) of a matrix whose largest singular value is 1, and the size of Adam is 0.2 sqrt(16).
        actual = np.stack([leaves[path] for leaves in by_path])
        np.testing.assert_allclose(actual, expected_updates(name, wide[0], wide[1:]), atol=3e-5, err_msg=name)


@pytest.mark.parametrize("scan", [True, False])
def test_the_state_of_muon_is_divided_like_its_parameters(scan: bool) -> None:
    config = dataclasses.replace(CONFIG, scan=scan)
    state = train_step.abstract_state(config, RUN, llama_runs.make_mesh(fsdp=2, tensor=2))
    specs = {
        jax.tree_util.keystr(path): array.sharding.spec for path, array in jax.tree.leaves_with_path(state)
    }
    moments = [name for name in specs if ".mu[" in name or ".nu[" in name]
    for name in moments:
        assert specs[name] == specs["['params']" + name[name.index("u[") + 1 :]]
    # One moment for each of seven matrices, two for the norms, the embedding and the head.
    layers = 1 if scan else config.layers
    assert len(moments) == layers * (7 + 2 * 2) + 2 * 3
