"""Plain gradients of a recorded loss at fixed parameters, and their batch noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from policyc.experiments.record import RecordedLoss

ADAM_EPSILON = 1e-8


class BadLoss(ValueError):
    """The loss cannot be scored. The message says why."""


Arrays = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Plain gradients at fixed parameters, over the batches.

    `precondition` is that of Adam: 1 / (sqrt(mean_square) + epsilon).
    """

    mean: Arrays
    precondition: Arrays
    mean_square: Arrays
    losses: list[float]
    noise: float
    """Squared norm of the noise of one batch in Adam's update."""


def measure_gradients(recorded: RecordedLoss) -> Gradients:
    value_and_grad = jax.jit(jax.value_and_grad(recorded.plain_loss, allow_int=True))
    inputs = recorded.inputs
    total = [jnp.zeros(np.shape(x), jnp.float32) for x in inputs]
    squares = list(total)
    losses: list[float] = []
    for call in recorded.calls:
        loss, grads = value_and_grad(inputs, call.consts)
        losses.append(float(loss))
        wide = [as_float(g) for g in grads]
        total = [t + g for t, g in zip(total, wide, strict=True)]
        squares = [s + g * g for s, g in zip(squares, wide, strict=True)]
    again = float(value_and_grad(inputs, recorded.calls[-1].consts)[0])
    if again != losses[-1] and math.isfinite(again):
        raise BadLoss(
            f"the loss is not deterministic: the same parameters and batch gave {losses[-1]:.9g} and {again:.9g}; "
            "fix its random keys, and on a GPU set XLA_FLAGS=--xla_gpu_deterministic_ops=true"
        )
    count = len(recorded.calls)
    mean, mean_square = tuple(t / count for t in total), tuple(s / count for s in squares)
    # Weights that no batch reaches have no gradient, and no update.
    precondition = tuple(jnp.where(s > 0, 1 / (jnp.sqrt(s) + ADAM_EPSILON), 0) for s in mean_square)
    # Without a second batch, or with the same batch again, the noise is taken to be as large as the gradient.
    spread = [s - m * m if len(set(losses)) > 1 else s for s, m in zip(mean_square, mean, strict=True)]
    noise = sum(float(jnp.sum(p * p * s)) for p, s in zip(precondition, spread, strict=True))
    return Gradients(
        mean=mean,
        precondition=precondition,
        mean_square=mean_square,
        losses=losses,
        noise=noise * count / max(count - 1, 1),
    )


def as_float(gradient: Any) -> jax.Array:
    """A gradient in fp32; zeros for an integer input, which has none."""
    if not jnp.issubdtype(gradient.dtype, jnp.floating):
        return jnp.zeros(gradient.shape, jnp.float32)
    return jnp.asarray(gradient, jnp.float32)
