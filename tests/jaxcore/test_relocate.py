"""Jitted functions are compiled for other devices: for the last four host devices, in reverse, instead of the first."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from policyc.jaxcore.hooks import relocate


class LoweringStopped(BaseException):
    pass


def intercept(call: Callable[[], Any]) -> relocate.JittedFunction:
    """The jitted function that a call is about to lower."""
    intercepted: list[relocate.JittedFunction] = []

    def stop(jitted: relocate.JittedFunction) -> None:
        intercepted.append(jitted)
        raise LoweringStopped

    with relocate.intercept_lowering(stop), pytest.raises(LoweringStopped):
        call()
    return intercepted[0]


def mesh(kind: AxisType) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"), axis_types=(kind,) * 2)


def sharded_ones(kind: AxisType, *spec: str | None) -> jax.Array:
    return jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh(kind), P(*spec)))


def constrained() -> tuple[Any, tuple[Any, ...]]:
    sharding = NamedSharding(mesh(AxisType.Auto), P("b", "a"))

    def body(h: Any, _: Any) -> Any:
        return jax.lax.with_sharding_constraint(h @ h, sharding), None

    return jax.jit(lambda x: jax.lax.scan(body, x, None, length=3)[0]), (sharded_ones(AxisType.Auto, "a"),)


def explicit() -> tuple[Any, tuple[Any, ...]]:
    def step(x: Any, y: Any) -> Any:
        return jnp.einsum("ij,jk->ik", x, y, out_sharding=P("a", "b"))

    x, y = sharded_ones(AxisType.Explicit, "a", None), sharded_ones(AxisType.Explicit, None, "b")
    return jax.jit(step), (x, y)


def manual() -> tuple[Any, tuple[Any, ...]]:
    inside = jax.shard_map(
        lambda x: jax.lax.psum(x, "b"), mesh=mesh(AxisType.Auto), in_specs=P("a", "b"), out_specs=P("a")
    )
    return jax.jit(inside), (sharded_ones(AxisType.Auto, "a", "b"),)


def jitted_with_shardings() -> tuple[Any, tuple[Any, ...]]:
    sharding = NamedSharding(mesh(AxisType.Auto), P("a"))
    step = jax.jit(lambda x: x @ x.T, in_shardings=sharding, out_shardings=sharding, donate_argnums=0)
    return step, (jax.ShapeDtypeStruct((8, 8), jnp.float32),)


def on_one_device() -> tuple[Any, tuple[Any, ...]]:
    return jax.jit(lambda x: x @ x), (jax.device_put(jnp.ones((8, 8)), jax.devices()[2]),)


def computations(executable: Any) -> str:
    """The text of a compiled program, without source locations."""
    text = executable.as_text()
    return re.sub(r", metadata=\{[^}]*\}", "", text[re.search(r"^(%|ENTRY)", text, re.MULTILINE).start() :])


@pytest.mark.parametrize("program", [constrained, explicit, manual, jitted_with_shardings, on_one_device])
def test_a_function_runs_on_other_devices_only(program: Callable[[], tuple[Any, tuple[Any, ...]]]) -> None:
    """The compiled program is the same, and so are the shardings, but for the devices."""
    step, args = program()
    with jax.set_mesh(mesh(AxisType.Explicit)) if program is explicit else contextlib.nullcontext():
        unmoved = step.lower(*args).compile()
        jitted = intercept(lambda: step.lower(*args))
    here = relocate.devices_used(jitted)
    there = jax.devices()[::-1][: len(here)]
    moved = relocate.lower_for(jitted, there, "cpu").compile()
    assert computations(moved) == computations(unmoved)
    for before, after in (
        (jax.tree.leaves(unmoved.input_shardings), jax.tree.leaves(moved._in_shardings)),
        (jax.tree.leaves(unmoved.output_shardings), jax.tree.leaves(moved._out_shardings)),
    ):
        assert len(before) == len(after)
        for old, new in zip(before, after, strict=True):
            assert old.device_set == set(here)
            assert new.device_set == set(there)
            # Each new device holds the part of an array that its counterpart held.
            counterpart = dict(zip(here, there, strict=True))
            parts = new.devices_indices_map((8, 8))
            assert {counterpart[d]: i for d, i in old.devices_indices_map((8, 8)).items()} == parts


def test_a_function_that_names_no_device_runs_on_the_first_given_one() -> None:
    jitted = intercept(lambda: jax.jit(lambda x: x @ x)(np.ones((8, 8), np.float32)))
    assert relocate.devices_used(jitted) == []
    moved = relocate.lower_for(jitted, [jax.devices()[5]], "cpu").compile()
    assert jax.tree.leaves(moved._in_shardings) == [SingleDeviceSharding(jax.devices()[5])]


def test_debug_prints_are_left_out() -> None:
    def step(x: Any) -> Any:
        jax.debug.print("{}", x)
        return x * 2

    jitted = intercept(lambda: jax.jit(step)(np.float32(1)))
    moved = relocate.lower_for(jitted, [jax.devices()[5]], "cpu")
    assert "callback" not in str(moved.stablehlo())


def test_a_callback_is_refused_with_its_place() -> None:
    jitted = intercept(lambda: jax.jit(lambda x: jax.pure_callback(lambda v: v, x, x))(np.float32(1)))
    with pytest.raises(relocate.HasCallback, match=r"pure_callback \(.*test_relocate\.py:\d+\)"):
        relocate.devices_used(jitted)
