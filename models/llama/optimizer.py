"""The optimizer of a run, AdamW or Muon, and its learning rate."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from policyc.models.llama.configs import RunConfig, warmup_fraction
from policyc.models.llama.model import Params

MUON_RMS = 0.2  # root mean square of Muon's update, about that of Adam's: arxiv.org/abs/2502.16982


def learning_rate(run: RunConfig, step: jax.Array) -> jax.Array:
    """The learning rate of a step, counted from 0: a linear warm-up, then the schedule."""
    progress = (step + 1) / run.steps
    warmup = warmup_fraction(run)
    rise = jnp.minimum(1.0, progress / warmup) if warmup else jnp.ones(())
    begin = {"cosine": warmup, "wsd": 1 - run.decay, "constant": 1.0}[run.schedule]
    decayed = jnp.clip((progress - begin) / (1 - begin), 0, 1) if begin < 1 else 0.0
    fall = (1 + jnp.cos(jnp.pi * decayed)) / 2 if run.schedule == "cosine" else 1 - decayed
    return run.learning_rate * rise * (run.final + (1 - run.final) * fall)


def make_optimizer(run: RunConfig) -> optax.GradientTransformation:
    """The optimizer without the learning rate. Norms do not decay."""
    decays = partial(jax.tree.map_with_path, lambda path, _: "norm" not in str(path[-1]))
    transform = optax.scale_by_adam(run.beta1, run.beta2, eps=1e-8)
    if run.optimizer == "muon":
        muon = optax.chain(
            optax.contrib.scale_by_muon(beta=run.momentum, weight_dimension_numbers=_matrix_axes),
            optax.stateless_with_tree_map(_scale_to_adam),
        )
        transform = optax.partition({"muon": muon, "adam": transform}, _choose_optimizers)
    return optax.chain(transform, optax.add_decayed_weights(run.weight_decay, mask=decays))


def _choose_optimizers(params: Params) -> Params:
    """Muon for the matrices of the blocks, Adam for norms, embedding and head."""

    def choose(path: Any, _: Any) -> str:
        is_block_matrix = path[0].key == "layers" and "norm" not in str(path[-1])
        return "muon" if is_block_matrix else "adam"

    return cast(Params, jax.tree.map_with_path(choose, params))


def _matrix_axes(params: Params) -> Params:
    """The last two axes of a weight are its matrix. The others are layers and experts: each has its own matrix."""
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    return cast(Params, jax.tree.map(lambda _: matrix, params))


def _scale_to_adam(update: jax.Array, _: Any) -> jax.Array:
    """Scales an orthogonal update to the root mean square of Adam's, so that both use the same learning rate."""
    size = MUON_RMS * math.sqrt(max(update.shape[-2:]))
    return size * update
