"""Which body of a primitive is lowered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from policyc.jaxcore.primitives.define_primitive import LoweringContext, PrimitiveRules, bind, define

OPERATIONS = {"any": "sine", "one device": "cosine", "partitioned": "tanh"}


def body(x: jax.Array, context: LoweringContext) -> list[jax.Array]:
    assert context.platform == "cpu"
    if context.single_device:
        return [jnp.cos(x)]
    return [jnp.tanh(x) if context.can_partition else jnp.sin(x)]


PRIMITIVE = define(
    "body_by_context",
    PrimitiveRules(
        body=body,
        shapes=lambda x: [(x.shape, x.dtype)],
        dim_sources=lambda x: [[(0, i - x.ndim) for i in range(x.ndim)]],
        needs_devices=True,
    ),
)


def run(x: jax.Array) -> jax.Array:
    return bind(PRIMITIVE, x)[0]


def run_in_shard_map(axes: set[str], mesh: Mesh, x: jax.Array) -> jax.Array:
    mapped: Callable[[jax.Array], jax.Array] = jax.shard_map(
        run, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names=axes
    )
    return mapped(x)


CASES: dict[str, tuple[int, Any, str]] = {
    "on one device": (1, None, "one device"),
    "on several": (4, None, "partitioned"),
    "under vmap": (4, lambda mesh, x: jax.vmap(run)(x), "any"),
    "in a shard_map": (4, partial(run_in_shard_map, {"a", "b"}), "partitioned"),
    "in a shard_map over some axes": (4, partial(run_in_shard_map, {"a"}), "any"),
}


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs 4 devices: XLA_FLAGS in conftest")
@pytest.mark.parametrize(("devices", "function", "expected"), CASES.values(), ids=CASES)
def test_the_body_depends_on_what_divides_the_work(devices: int, function: Any, expected: str) -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:devices]).reshape(-1, min(devices, 2)), ("a", "b"))
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, P("a")))
    text = jax.jit(partial(function, mesh) if function else run).lower(x).as_text()
    assert [name for name, operation in OPERATIONS.items() if f"stablehlo.{operation} " in text] == [expected]
