"""Reading, rebuilding and comparing jaxprs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.reading import AxisEnv
from tests.support.jaxpr_tools import primitive_counts, struct

X = struct(4, 4)


def nested(x: jax.Array) -> jax.Array:
    """A jit, a scan and a cond in each other."""

    def body(h: jax.Array, row: jax.Array) -> Any:
        return lax.cond(h[0] > 0, jnp.sin, lambda h: jnp.cos(h) + row, h), None

    return lax.scan(jax.jit(body), x[0], x)[0]


def only(jaxpr: Any, primitive: str) -> Any:
    (eqn,) = [e for e in jaxprs.all_equations(jaxpr) if jaxprs.primitive_name(e) == primitive]
    return eqn


# ---- sub-jaxprs


def test_the_jaxprs_of_an_equation_in_the_order_of_its_parameters() -> None:
    jaxpr = jax.make_jaxpr(nested)(X)
    (scan,) = jaxprs.sub_jaxprs(only(jaxpr, "scan"))
    assert scan.index is None
    branches = jaxprs.sub_jaxprs(only(jaxpr, "cond"))
    assert [(sub.param, sub.index) for sub in branches] == [("branches", 0), ("branches", 1)]
    assert [primitive_counts(sub.jaxpr)["sin"] for sub in branches] == [0, 1]
    assert jaxprs.sub_jaxprs(only(jaxpr, "sin")) == ()


def test_sub_jaxprs_are_replaced_in_their_places() -> None:
    cond = only(jax.make_jaxpr(nested)(X), "cond")
    first, second = jaxprs.sub_jaxprs(cond)
    swapped = jaxprs.replace_sub_jaxprs(cond, [(first, second.jaxpr), (second, first.jaxpr)])
    assert [sub.jaxpr for sub in jaxprs.sub_jaxprs(swapped)] == [second.jaxpr, first.jaxpr]
    assert isinstance(swapped.params["branches"], type(cond.params["branches"]))


# ---- map_equations


def test_map_equations_changes_and_removes_at_every_depth() -> None:
    def change(eqn: Any) -> Any:
        name = jaxprs.primitive_name(eqn)
        if name == "debug_print" or name == "debug_callback":
            return None
        return jaxprs.replace_eqn(eqn, primitive=lax.exp_p) if name == "tanh" else eqn

    @jax.jit
    def program(x: jax.Array) -> jax.Array:
        def body(h: jax.Array, _: None) -> Any:
            jax.debug.print("{}", h)
            return jnp.tanh(h), None

        return jnp.tanh(lax.scan(body, x, None, length=2)[0])

    jaxpr = jax.make_jaxpr(program)(X)
    changed = primitive_counts(jaxprs.map_equations(jaxpr, change))
    assert changed["exp"] == 2
    assert not {"tanh", "debug_print", "debug_callback"} & changed.keys()
    assert primitive_counts(jaxpr)["tanh"] == 2, "the original is as it was"


# ---- equations


def test_names_and_place_of_an_equation() -> None:
    def program(x: jax.Array) -> jax.Array:
        with jax.named_scope("a"), jax.named_scope("b/c"):
            return jnp.sin(x)

    eqn = only(jax.make_jaxpr(jax.vmap(program))(X), "sin")
    assert jaxprs.name_scopes(eqn) == ("a", "b", "c"), "without what vmap adds"
    file, _, line = jaxprs.source_place(eqn).rpartition(":")
    assert (Path(file).name, int(line)) == (Path(__file__).name, program.__code__.co_firstlineno + 2)


def test_a_sharding_is_explicit_where_the_type_states_it() -> None:
    def result_sharding(kind: AxisType) -> Any:
        mesh = jax.make_mesh((2,), ("a",), axis_types=(kind,), devices=jax.devices()[:2])
        with jax.set_mesh(mesh):
            x = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(mesh, P("a")))
            return jaxprs.explicit_sharding(only(jax.make_jaxpr(jnp.sin)(x), "sin"))

    assert result_sharding(AxisType.Auto) is None
    assert result_sharding(AxisType.Explicit).spec == P("a")


def test_the_axes_of_nested_shard_maps() -> None:
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    program = jax.shard_map(
        lambda x: x * 2, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}, check_vma=False
    )
    env = AxisEnv().enter_shard_map(only(jax.make_jaxpr(jax.jit(program))(X), "shard_map"))
    assert env == AxisEnv((("a", 2),), check_vma=False)


# ---- making and evaluating equations


def test_inline_defines_the_results_of_the_equation_it_replaces() -> None:
    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(X)
    eqn = only(jaxpr, "sin")
    table = np.arange(4, dtype=np.float32)
    template = jax.make_jaxpr(lambda x: jnp.tanh(x) + table)(X)
    inlined = jaxprs.inline(template, eqn.invars, eqn)
    assert inlined[-1].outvars == eqn.outvars
    eqns = [new for e in jaxprs.equations(jaxpr) for new in (inlined if e is eqn else [e])]
    x = np.ones((4, 4), np.float32)
    (result,) = jaxprs.evaluate(jaxprs.replace_equations(jaxpr, eqns), x)
    np.testing.assert_allclose(result, (np.tanh(x) + table) * 2, rtol=1e-6)  # float32


def test_inline_refuses_a_result_that_no_equation_defines() -> None:
    eqn = only(jax.make_jaxpr(jnp.sin)(X), "sin")
    with pytest.raises(TypeError, match="must come from an equation"):
        jaxprs.inline(jax.make_jaxpr(lambda x: x)(X), eqn.invars, eqn)


def test_evaluate_keeps_name_scopes() -> None:
    def program(x: jax.Array) -> jax.Array:
        with jax.named_scope("inner"):
            return jnp.sin(x)

    jaxpr = jax.make_jaxpr(program)(X)

    def again(x: jax.Array) -> Any:
        with jax.named_scope("outer"):
            return jaxprs.evaluate(jaxpr, x)

    assert jaxprs.name_scopes(only(jax.make_jaxpr(again)(X), "sin")) == ("outer", "inner")


# ---- fingerprints


def fingerprint(function: Any, *args: Any) -> str:
    return jaxprs.fingerprint(jax.make_jaxpr(function)(*(args or (X,))))


def test_equal_computations_have_equal_fingerprints() -> None:
    """Whatever their variables and functions are called, and wherever their functions are in memory."""

    def program(scale: float) -> Any:
        layer = jax.checkpoint(jax.nn.relu, policy=jax.checkpoint_policies.save_only_these_names("a"))
        return lambda x: jax.pure_callback(lambda v: v, X, layer(nested(x) * scale) + x) @ x

    assert fingerprint(program(2)) == fingerprint(program(2))
    assert fingerprint(program(2)) != fingerprint(program(3))
    assert fingerprint(lambda a: jnp.sin(a) + 1) == fingerprint(lambda b: jnp.sin(b) + 1)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (jnp.sin, jnp.cos),
        (lambda x: x @ x, lambda x: x @ x.T),
        (lambda x: x * 2, lambda x: x * 3),
        (lambda x: jnp.sum(x, 0), lambda x: jnp.sum(x, 1)),
        (lambda x: (x, x + 1), lambda x: (x + 1, x)),
        (lambda x: jax.jit(jnp.sin)(x), lambda x: jax.jit(jnp.cos)(x)),
        (
            lambda x: lax.scan(lambda h, r: (h + r, None), x[0], x),
            lambda x: lax.scan(lambda h, r: (h - r, None), x[0], x),
        ),
        (
            lambda x: lax.scan(lambda h, r: (h + r, None), x[0], x),
            lambda x: lax.scan(lambda h, r: (h + r, None), x[0], x, reverse=True),
        ),
    ],
)
def test_different_computations_have_different_fingerprints(one: Any, other: Any) -> None:
    assert fingerprint(one) != fingerprint(other)


def test_a_fingerprint_depends_on_types() -> None:
    assert fingerprint(jnp.sin, struct(4)) != fingerprint(jnp.sin, struct(5))
    assert fingerprint(jnp.sin, struct(4)) != fingerprint(jnp.sin, struct(4, dtype=jnp.bfloat16))
