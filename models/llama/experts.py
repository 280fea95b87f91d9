"""The mixture of experts of a block: a router chooses a few experts for each token, and only these compute it.

No token is dropped: its copies, one for each of its experts, are sorted by expert, and `lax.ragged_dot` multiplies the
copies of each expert by the weights of that expert.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from policyc.models.llama.configs import ModelConfig

TOKENS: PartitionSpec = PartitionSpec(
    ("data", "fsdp", "expert"), "context"
)  # the sharding of batch and sequence


class RouterSummary(NamedTuple):
    """Statistics of a layer's router: its balance loss, and the experts' shares of the tokens, which add up to 1."""

    balance_loss: jax.Array
    loads: jax.Array


def mix_experts(
    params: dict[str, Any],
    x: jax.Array,
    config: ModelConfig,
    mesh: Mesh | None,
    is_padding: jax.Array | None = None,
) -> tuple[jax.Array, RouterSummary]:
    """The outputs of each token's experts, summed with the router's weights. The router's summary ignores padding."""
    experts, weights, summary = route(params["router"], x, config, is_padding)
    with jax.named_scope("experts"):
        if mesh is None or mesh.size == 1:
            return run_experts(params["experts"], x, experts, weights), summary
        up = PartitionSpec("expert", "fsdp", "tensor")
        down = PartitionSpec("expert", "tensor", "fsdp")
        axes = {"gate_proj": up, "up_proj": up, "down_proj": down}
        on_devices: Any = jax.shard_map(
            _run_on_device, mesh=mesh, in_specs=(axes, TOKENS, TOKENS, TOKENS), out_specs=TOKENS
        )
        return on_devices(params["experts"], x, experts, weights), summary


def route(
    router: jax.Array, x: jax.Array, config: ModelConfig, is_padding: jax.Array | None
) -> tuple[jax.Array, jax.Array, RouterSummary]:
    """The experts of each token, their weights in float32, which add up to 1, and a summary."""
    with jax.named_scope("router"):
        logits = jnp.dot(x.astype(jnp.float32), router, precision=lax.Precision.HIGHEST)
    probabilities = jax.nn.softmax(logits)
    largest, experts = lax.top_k(probabilities, config.experts_per_token)
    is_chosen = jnp.any(experts[..., None] == jnp.arange(config.experts), axis=-2)
    fractions = _mean(is_chosen.astype(jnp.float32), is_padding)  # of the tokens, for each expert
    summary = RouterSummary(
        balance_loss=config.experts * jnp.sum(fractions * _mean(probabilities, is_padding)),
        loads=fractions / config.experts_per_token,
    )
    return experts, largest / jnp.sum(largest, axis=-1, keepdims=True), summary


def _mean(values: jax.Array, is_padding: jax.Array | None) -> jax.Array:
    """The mean over the tokens of a batch, which are its first two axes."""
    if is_padding is None:
        return jnp.mean(values, axis=(0, 1))
    is_token = ~is_padding.reshape(*is_padding.shape, *(1,) * (values.ndim - 2))
    # A device may have padding only.
    return jnp.sum(values, axis=(0, 1), where=is_token) / jnp.maximum(jnp.sum(is_token), 1)


def _run_on_device(
    params: dict[str, jax.Array], x: jax.Array, experts: jax.Array, weights: jax.Array
) -> jax.Array:
    """Runs this device's experts on the tokens of all devices of the expert axis, and adds up their results."""

    def gather_width(weight: jax.Array, axis: int) -> jax.Array:
        return cast(jax.Array, lax.all_gather(weight.astype(x.dtype), "fsdp", axis=axis, tiled=True))

    axes_of_width = {"gate_proj": 1, "up_proj": 1, "down_proj": 2}
    whole = {name: gather_width(params[name], axis) for name, axis in axes_of_width.items()}
    gather_tokens = partial(lax.all_gather, axis_name="expert", axis=0, tiled=True)
    first = lax.axis_index("expert") * whole["gate_proj"].shape[0]
    y = run_experts(whole, gather_tokens(x), gather_tokens(experts) - first, gather_tokens(weights))
    y = lax.psum(y, "tensor")  # each device of this axis has a part of the hidden sizes
    return cast(jax.Array, lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True))


def run_experts(
    params: dict[str, jax.Array], x: jax.Array, experts: jax.Array, weights: jax.Array
) -> jax.Array:
    """The weighted sums of the outputs of these experts. Out-of-range numbers in `experts` belong to other devices."""
    count, per_token = params["gate_proj"].shape[0], experts.shape[-1]
    is_here = ((experts >= 0) & (experts < count)).reshape(-1)
    group = jnp.where(is_here, experts.reshape(-1), count)  # experts of other devices come last
    order = jnp.argsort(group)
    sizes = jnp.sum(group[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)

    def multiply(name: str, rows: jax.Array) -> jax.Array:
        with jax.named_scope(name):
            return lax.ragged_dot(rows, params[name].astype(rows.dtype), sizes)

    rows = _permute(jnp.repeat(x.reshape(-1, x.shape[-1]), per_token, axis=0), order)
    hidden = jax.nn.silu(multiply("gate_proj", rows)) * multiply("up_proj", rows)
    results = _permute(multiply("down_proj", hidden), jnp.argsort(order))
    results = jnp.where(is_here[:, None], results, 0).astype(jnp.float32)
    weighted = results.reshape(-1, per_token, x.shape[-1]) * weights.reshape(-1, per_token, 1)
    return jnp.sum(weighted, axis=1).astype(x.dtype).reshape(x.shape)


def _permute(rows: jax.Array, order: jax.Array) -> jax.Array:
    """Permutes rows. The indices are declared unique, so that the gradient needs no accumulation."""
    return rows.at[order].get(unique_indices=True, mode="promise_in_bounds")
