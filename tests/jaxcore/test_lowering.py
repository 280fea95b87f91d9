"""Functions that are lowered once for several modules, and source locations of one frame."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import ShapedArray
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from policyc.jaxcore.primitives import lowering
from policyc.jaxcore.primitives.lowering import call_lowered_once, single_frame_locations
from policyc.jaxcore.primitives.partition import PartitionRule, ShardIndex, partition

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


@dataclass
class Client:
    """XLA's client, with devices of these kinds."""

    platform: str
    kinds: list[str]

    def local_devices(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(device_kind=kind) for kind in self.kinds]


@pytest.mark.parametrize(
    ("client", "starts"),
    [
        (Client("gpu", ["H200", "H200"]), True),
        (Client("gpu", ["H200", "B200"]), False),
        (Client("cpu", ["cpu"]), False),
        (None, False),
    ],
)
def test_kernels_are_compiled_ahead_for_gpus_of_one_kind(
    client: Client | None, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(lowering, "_start_compiling", lambda *call: started.append(call))
    operand = ShapedArray((2,), np.dtype("float32"))
    lowering._compile_ahead(client, [operand], function=Multiply(2), platform="cuda", results=())
    assert [call[1] for call in started] == [(((2,), operand.dtype),)] * starts


def test_an_error_in_compiling_ahead_is_ignored(capfd: pytest.CaptureFixture[str]) -> None:
    """It is raised where the program is compiled. Here no CUDA program can be compiled for a CPU."""
    shapes = (((3,), np.dtype("float32")),)
    lowering._start_compiling(Multiply(7), shapes, "cuda", False, jax.devices()[0])
    for thread in threading.enumerate():
        if thread.name == "policyc-kernel":
            thread.join()
    assert Multiply.traced == [(3,)]
    assert not capfd.readouterr().err


def test_locations_of_one_frame() -> None:
    def locations() -> str:
        def inner(x: jax.Array) -> jax.Array:
            return jnp.negative(x)

        # A new function, so that nothing is cached.
        return jax.jit(lambda x: inner(x)).lower(jnp.ones(2)).as_text(debug_info=True)

    assert "callsite" in locations()
    with single_frame_locations():
        assert "callsite" not in locations()
