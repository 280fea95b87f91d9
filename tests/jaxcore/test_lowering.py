"""Functions that are lowered once for several modules, and source locations of one frame."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from policyc.jaxcore.lowering import call_lowered_once, single_frame_locations
from policyc.jaxcore.partition import PartitionRule, ShardIndex, partition

RULE = PartitionRule(
    name="rows", operands=((("rows", 1), ("columns", 1)),), results=((("rows", 1), ("columns", 1)),)
)


@dataclass(frozen=True, weakref_slot=True, slots=True)
class Multiply:
    factor: int
    traced: ClassVar[list[tuple[int, ...]]] = []

    def __call__(self, x: jax.Array) -> tuple[jax.Array]:
        self.traced.append(x.shape)
        return (x * self.factor,)


@pytest.fixture(autouse=True)
def _forget_traces() -> Iterator[None]:
    yield
    Multiply.traced.clear()


def multiply(_: ShardIndex, x: jax.Array, factor: int = 3) -> list[jax.Array]:
    return call_lowered_once(Multiply(factor), [(x.shape, x.dtype)], "cpu", x)


def test_two_partitioned_calls_lower_a_function_once() -> None:
    """Each call has a module of its own. Whole arrays are not traced at all, because no device has one."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    x = jax.device_put(jnp.arange(8.0).reshape(4, 2), NamedSharding(mesh, P("x")))
    run = jax.jit(lambda x: partition(multiply, RULE)(jnp.sin(partition(multiply, RULE)(x)[0]))[0])
    np.testing.assert_array_equal(run(x), 3 * np.asarray(jnp.sin(3 * jnp.arange(8.0).reshape(4, 2))))
    assert Multiply.traced == [(2, 2)]


def test_other_functions_and_shapes_are_lowered_again() -> None:
    index = ShardIndex(factors={})
    for size, factor in ((5, 4), (6, 4), (6, 5), (5, 4)):
        result = jax.jit(lambda x, factor=factor: multiply(index, x, factor)[0])(jnp.ones(size))
        np.testing.assert_array_equal(result, np.full(size, factor))
    assert Multiply.traced == [(5,), (6,), (6,)]


def test_locations_of_one_frame() -> None:
    def locations() -> str:
        def inner(x: jax.Array) -> jax.Array:
            return jnp.negative(x)

        # A new function, so that nothing is cached.
        return jax.jit(lambda x: inner(x)).lower(jnp.ones(2)).as_text(debug_info=True)

    assert "callsite" in locations()
    with single_frame_locations():
        assert "callsite" not in locations()
