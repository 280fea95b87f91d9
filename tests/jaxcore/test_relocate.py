"""Jitted functions moved to other devices: from the first four host devices to the last four, in reverse."""

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

from policyc.jaxcore import relocate


class Caught(BaseException):
    pass


def caught(call: Callable[[], Any]) -> relocate.JittedFunction:
    """What is about to be lowered."""
    found: list[relocate.JittedFunction] = []

    def stop(jitted: relocate.JittedFunction) -> None:
        found.append(jitted)
        raise Caught

    with relocate.intercept_lowering(stop), pytest.raises(Caught):
        call()
    return found[0]


def mesh(kind: AxisType) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"), axis_types=(kind,) * 2)


def placed(kind: AxisType, *spec: str | None) -> jax.Array:
    return jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh(kind), P(*spec)))


def constrained() -> tuple[Any, tuple[Any, ...]]:
    where = NamedSharding(mesh(AxisType.Auto), P("b", "a"))

    def body(h: Any, _: Any) -> Any:
        return jax.lax.with_sharding_constraint(h @ h, where), None

    return jax.jit(lambda x: jax.lax.scan(body, x, None, length=3)[0]), (placed(AxisType.Auto, "a"),)


def explicit() -> tuple[Any, tuple[Any, ...]]:
    def step(x: Any, y: Any) -> Any:
        return jnp.einsum("ij,jk->ik", x, y, out_sharding=P("a", "b"))

    x, y = placed(AxisType.Explicit, "a", None), placed(AxisType.Explicit, None, "b")
    return jax.jit(step), (x, y)


def manual() -> tuple[Any, tuple[Any, ...]]:
    inside = jax.shard_map(
        lambda x: jax.lax.psum(x, "b"), mesh=mesh(AxisType.Auto), in_specs=P("a", "b"), out_specs=P("a")
    )
    return jax.jit(inside), (placed(AxisType.Auto, "a", "b"),)


def jitted_for_a_place() -> tuple[Any, tuple[Any, ...]]:
    where = NamedSharding(mesh(AxisType.Auto), P("a"))
    step = jax.jit(lambda x: x @ x.T, in_shardings=where, out_shardings=where, donate_argnums=0)
    return step, (jax.ShapeDtypeStruct((8, 8), jnp.float32),)


def on_one() -> tuple[Any, tuple[Any, ...]]:
    return jax.jit(lambda x: x @ x), (jax.device_put(jnp.ones((8, 8)), jax.devices()[2]),)


def computations(executable: Any) -> str:
    """A compiled program, without where its lines come from."""
    text = executable.as_text()
    return re.sub(r", metadata=\{[^}]*\}", "", text[re.search(r"^(%|ENTRY)", text, re.MULTILINE).start() :])


@pytest.mark.parametrize("program", [constrained, explicit, manual, jitted_for_a_place, on_one])
def test_moved(program: Callable[[], tuple[Any, tuple[Any, ...]]]) -> None:
    """The same program, on other devices and on no others."""
    step, args = program()
    with jax.set_mesh(mesh(AxisType.Explicit)) if program is explicit else contextlib.nullcontext():
        stayed = step.lower(*args).compile()
        jitted = caught(lambda: step.lower(*args))
    here = relocate.devices_used(jitted)
    there = jax.devices()[::-1][: len(here)]
    moved = relocate.lower_for(jitted, there, "cpu").compile()
    assert computations(moved) == computations(stayed)
    for before, after in (
        (jax.tree.leaves(stayed.input_shardings), jax.tree.leaves(moved._in_shardings)),
        (jax.tree.leaves(stayed.output_shardings), jax.tree.leaves(moved._out_shardings)),
    ):
        assert len(before) == len(after)
        for old, new in zip(before, after, strict=True):
            assert old.device_set == set(here)
            assert new.device_set == set(there)
            # Which part of an array lies on which device.
            parts = dict(zip(here, there, strict=True))
            shares = new.devices_indices_map((8, 8))
            assert {parts[d]: i for d, i in old.devices_indices_map((8, 8)).items()} == shares


def test_a_function_that_names_no_device() -> None:
    """It is compiled for the first that is given, not for the first that is here."""
    jitted = caught(lambda: jax.jit(lambda x: x @ x)(np.ones((8, 8), np.float32)))
    assert relocate.devices_used(jitted) == []
    moved = relocate.lower_for(jitted, [jax.devices()[5]], "cpu").compile()
    assert jax.tree.leaves(moved._in_shardings) == [SingleDeviceSharding(jax.devices()[5])]


def test_what_it_prints_stays_here() -> None:
    def step(x: Any) -> Any:
        jax.debug.print("{}", x)
        return x * 2

    jitted = caught(lambda: jax.jit(step)(np.float32(1)))
    moved = relocate.lower_for(jitted, [jax.devices()[5]], "cpu")
    assert "callback" not in str(moved.stablehlo())


def test_a_call_back_is_named() -> None:
    jitted = caught(lambda: jax.jit(lambda x: jax.pure_callback(lambda v: v, x, x))(np.float32(1)))
    with pytest.raises(relocate.HasCallback, match=r"pure_callback \(.*test_relocate\.py:\d+\)"):
        relocate.devices_used(jitted)
