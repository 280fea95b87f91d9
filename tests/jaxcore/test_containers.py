"""The table of containers. How values flow through each: tests/compiler/test_activity.py and test_analysis.py. How each
takes additional inputs: test_transform.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.containers import CONTAINERS, OPAQUE, NewBody, container_of, shard_map_parts
from tests.support.jaxpr_tools import struct

X = struct(3)


def only_container(function: Callable[..., Any], *args: Any) -> Any:
    """The one equation of a function that holds jaxprs."""
    (eqn,) = [e for e in jaxprs.equations(jax.make_jaxpr(function)(*args)) if jaxprs.sub_jaxprs(e)]
    return eqn


def test_a_jit_has_a_sharding_and_a_layout_for_every_operand() -> None:
    eqn = only_container(lambda x, y: jax.jit(jnp.add, donate_argnums=0)(x, y), X, X)
    (sub,) = jaxprs.sub_jaxprs(eqn)
    inner, operands = (
        [jaxprs.new_var(jax.core.ShapedArray((3,), jnp.dtype("float32"))) for _ in range(2)] for _ in range(2)
    )
    body = jaxprs.replace_equations(sub.jaxpr, jaxprs.equations(sub.jaxpr), inner)
    container = container_of(eqn)
    assert container is not None
    more = container.rebuild(eqn, [NewBody(sub, body, tuple(operands), (False, False))])
    assert list(more.invars) == [*eqn.invars, *operands]
    assert more.params["donated_invars"] == (*eqn.params["donated_invars"], False, False)
    for param in ("in_shardings", "in_layouts", "donated_invars"):
        assert len(more.params[param]) == 4


def test_nothing_can_be_added_to_a_shard_map_from_outside() -> None:
    assert [name for name, c in CONTAINERS.items() if not c.takes_extra_inputs] == ["shard_map"]


def test_what_is_opaque_is_not_entered() -> None:
    assert not CONTAINERS.keys() & OPAQUE.keys()
    eqn = only_container(jax.nn.relu, X)
    assert container_of(eqn) is None
    assert jaxprs.primitive_name(eqn) in OPAQUE


def test_loops_and_remats_are_known() -> None:
    assert {name for name, c in CONTAINERS.items() if c.is_loop} == {"scan", "while"}
    assert {name for name, c in CONTAINERS.items() if c.is_remat} == {"remat2"}


def test_how_a_shard_map_divides_its_operands() -> None:
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    specs = (P("a"), P(None, "a"), P(("a", "b")), P())
    program = jax.shard_map(lambda *xs: xs[3], mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    eqn = only_container(program, *[struct(8, 8)] * 4)
    assert shard_map_parts(eqn) == [(2, 1), (1, 2), (8, 1), (1, 1)]
