"""The table of containers: how values flow through each, and how each takes additional inputs.

The values are sets of names: which inputs of a program may reach a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Literal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from policyc.jaxcore import jaxprs
from policyc.jaxcore.containers import (
    CONTAINERS,
    OPAQUE,
    SCAN,
    IterationRange,
    NewBody,
    container_of,
    shard_map_parts,
)
from policyc.jaxcore.dataflow import unchanged_carries
from tests.support.jaxpr_tools import struct

Names = frozenset[str]


class Reaching:
    """Which inputs of a jaxpr may reach a value. `slice_inputs` and `split_over_devices` leave a mark."""

    def __init__(self) -> None:
        self.entered: list[tuple[str, int]] = []

    def run(self, jaxpr: Any, values: Sequence[Names]) -> list[Names]:
        opened = jaxprs.open_jaxpr(jaxpr)
        known = dict(zip(opened.invars, values, strict=True))

        def value(atom: Any) -> Names:
            return frozenset() if isinstance(atom, Literal) else known.get(atom, frozenset())

        for eqn in opened.eqns:
            operands = [value(a) for a in eqn.invars]
            container = container_of(eqn)
            if container is None:
                results = [frozenset[str]().union(*operands)] * len(eqn.outvars)
            else:
                results = container.propagate(eqn, operands, self._enter(eqn), self)
            known.update(zip(eqn.outvars, results, strict=True))
        return [value(a) for a in opened.outvars]

    def _enter(self, eqn: Any) -> Callable[[int, Sequence[Names]], list[Names]]:
        def enter(number: int, values: Sequence[Names]) -> list[Names]:
            self.entered.append((jaxprs.primitive_name(eqn), number))
            return self.run(jaxprs.sub_jaxprs(eqn)[number].jaxpr, values)

        return enter

    def join(self, values: Sequence[Names]) -> Names:
        return frozenset[str]().union(*values)

    def enter_loop(
        self, body: Any, consts: Sequence[Names], init: Sequence[Names], xs: Sequence[Names]
    ) -> list[Names]:
        unchanged = unchanged_carries(body, len(consts), len(init))
        return [v | {"invariant"} if same else v for v, same in zip(init, unchanged, strict=True)]

    def may_change(self, carry: Sequence[Names], others: Sequence[Names]) -> bool:
        return True

    def widen(self, carry: Names, result: Names) -> Names:
        return carry | result

    def leave_loop(self, result: Names, carry: Names | None) -> Names:
        return result | (frozenset({"stacked"}) if carry is None else carry)

    def slice_inputs(self, eqn: Any, values: Sequence[Names]) -> list[Names]:
        return [v | {"sliced"} for v in values]

    def split_over_devices(self, eqn: Any, values: Sequence[Names]) -> list[Names]:
        return [v | {"split"} for v in values]


def reaching(function: Callable[..., Any], *shapes: tuple[int, ...]) -> list[str]:
    """For each result of a function of a, b, c, ...: the inputs that may reach it, and the marks."""
    jaxpr = jax.make_jaxpr(function)(*(struct(*shape) for shape in shapes))
    names = [frozenset({name}) for name in "abcdef"[: len(shapes)]]
    return [" ".join(sorted(value)) for value in Reaching().run(jaxpr, names)]


# ---- how values flow


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_the_operands_of_a_call_are_the_inputs_of_its_jaxpr(wrap: Any) -> None:
    assert reaching(wrap(lambda a, b: (b * 2, a + b, 1.0)), (), ()) == ["b", "a b", ""]


def test_the_predicate_of_a_cond_is_no_input_of_its_branches() -> None:
    def program(a: Any, b: Any, c: Any) -> Any:
        return lax.cond(a > 0, lambda b, c: (b, c), lambda b, c: (c, c * 2), b, c)

    assert reaching(program, (), (), ()) == ["b c", "c"]


def test_a_shard_map_divides_its_operands_over_devices() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    program = jax.shard_map(
        lambda a, b: (b, a + b), mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    assert reaching(program, (4,), (4,)) == ["b split", "a b split"]


def test_values_travel_from_carry_to_carry_of_a_scan_until_nothing_changes() -> None:
    """`a` reaches the last of four carries only after three iterations."""

    def program(a: Any, b: Any, c: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            first, second, third, fourth = carry
            return (first + a, first, second, third), (fourth, x * 2)

        return lax.scan(body, (b, b, b, b), c)

    carried = ["a b"] * 4
    assert reaching(program, (), (), (3,)) == [*carried, "a b stacked", "c sliced stacked"]


def test_a_carry_that_a_loop_hands_on_is_invariant() -> None:
    """JAX itself makes a constant of such a carry, so the body is made by exchanging its carry and its input."""
    jaxpr = jax.make_jaxpr(lambda a, b: lax.scan(lambda h, x: (x, h), a, b))(struct(), struct(3))
    (scan,) = jaxprs.equations(jaxpr)
    (sub,) = jaxprs.sub_jaxprs(scan)
    exchanged = jaxprs.reorder_inputs(sub.jaxpr, lambda invars: invars[::-1])
    jaxpr = jaxprs.replace_equations(jaxpr, [jaxprs.replace_sub_jaxprs(scan, [(sub, exchanged)])])
    values = Reaching().run(jaxpr, [frozenset({"a"}), frozenset({"b"})])
    assert values == [{"a", "invariant"}, {"b", "sliced", "stacked"}]


def test_the_condition_and_the_body_of_a_while_have_constants_of_their_own() -> None:
    def program(a: Any, b: Any, c: Any, d: Any) -> Any:
        return lax.while_loop(lambda s: s[0] < a, lambda s: (s[0] + b, s[0] * s[1]), (c, d))

    assert reaching(program, (), (), (), ()) == ["b c", "b c d"]
    jaxpr = jax.make_jaxpr(program)(*[struct()] * 4)
    domain = Reaching()
    domain.run(jaxpr, [frozenset()] * 4)
    assert {number for _, number in domain.entered} == {0, 1}


# ---- additional inputs

X = struct(3)


def only_container(function: Callable[..., Any], *args: Any) -> Any:
    """The one equation of a function that holds jaxprs."""
    (eqn,) = [e for e in jaxprs.equations(jax.make_jaxpr(function)(*args)) if jaxprs.sub_jaxprs(e)]
    return eqn


def add_inputs(eqn: Any, counts: Sequence[int], sliced: bool = False) -> Any:
    """The equation, with additional inputs that each of its jaxprs does not use."""
    bodies = []
    for sub, count in zip(jaxprs.sub_jaxprs(eqn), counts, strict=True):
        inner = [jaxprs.new_var(jax.core.ShapedArray((), jnp.dtype("float32"))) for _ in range(count)]
        avals = [jaxprs.stacked_aval(3, v.aval) if sliced else v.aval for v in inner]
        operands = tuple(map(jaxprs.new_var, avals))
        body = jaxprs.replace_equations(sub.jaxpr, jaxprs.equations(sub.jaxpr), inner)
        bodies.append(NewBody(sub, body, operands, (sliced,) * count))
    container = container_of(eqn)
    assert container is not None
    return container.rebuild(eqn, bodies), [v for body in bodies for v in body.operands]


def input_count(sub: Any) -> int:
    return len(jaxprs.open_jaxpr(sub.jaxpr).invars)


def test_a_jit_has_a_sharding_and_a_layout_for_every_operand() -> None:
    eqn = only_container(lambda x, y: jax.jit(jnp.add, donate_argnums=0)(x, y), X, X)
    more, operands = add_inputs(eqn, [2])
    assert list(more.invars) == [*eqn.invars, *operands]
    assert more.params["donated_invars"] == (*eqn.params["donated_invars"], False, False)
    for param in ("in_shardings", "in_layouts", "donated_invars"):
        assert len(more.params[param]) == 4


def test_a_remat_takes_them_behind_its_own() -> None:
    eqn = only_container(jax.checkpoint(jnp.sin), X)
    more, operands = add_inputs(eqn, [1])
    assert list(more.invars) == [*eqn.invars, *operands]
    assert [input_count(sub) for sub in jaxprs.sub_jaxprs(more)] == [2]


def test_every_branch_takes_those_of_all_branches() -> None:
    eqn = only_container(
        lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, jnp.exp], x), struct(dtype=jnp.int32), X
    )
    more, operands = add_inputs(eqn, [1, 0, 2])
    assert list(more.invars) == [*eqn.invars, *operands]
    own = input_count(jaxprs.sub_jaxprs(eqn)[0])
    assert [input_count(sub) for sub in jaxprs.sub_jaxprs(more)] == [own + 3] * 3


def test_they_become_constants_of_the_jaxpr_of_a_while_that_uses_them() -> None:
    eqn = only_container(
        lambda a, b, x: lax.while_loop(lambda s: s.sum() < a.sum(), lambda s: s + b, x), X, X, X
    )
    names = [sub.param for sub in jaxprs.sub_jaxprs(eqn)]
    counts = [{"cond_jaxpr": 1, "body_jaxpr": 2}[name] for name in names]
    more, _ = add_inputs(eqn, counts)
    assert (eqn.params["cond_nconsts"], eqn.params["body_nconsts"]) == (1, 1)
    assert (more.params["cond_nconsts"], more.params["body_nconsts"]) == (2, 3)
    # The loop state stays at the end, where both jaxprs have it.
    assert more.invars[-1] is eqn.invars[-1]
    assert more.invars[0] is eqn.invars[0]
    assert more.invars[2] is eqn.invars[1]


@pytest.mark.parametrize("sliced", [False, True])
def test_they_become_constants_or_stacked_inputs_of_a_scan(sliced: bool) -> None:
    eqn = only_container(lambda a, x: lax.scan(lambda h, row: (h + a.sum(), row), 0.0, x), X, X)
    before = SCAN.parts(eqn, eqn.invars)
    more, operands = add_inputs(eqn, [2], sliced)
    after = SCAN.parts(more, more.invars)
    assert list(after.carry) == list(before.carry)
    assert list(after.consts) == [*before.consts, *(() if sliced else operands)]
    assert list(after.xs) == [*before.xs, *(operands if sliced else ())]
    (sub,) = jaxprs.sub_jaxprs(more)
    assert [v.aval.shape for v in jaxprs.open_jaxpr(sub.jaxpr).invars][-1] == ()


def test_nothing_can_be_added_to_a_shard_map_from_outside() -> None:
    assert [name for name, c in CONTAINERS.items() if not c.takes_extra_inputs] == ["shard_map"]


# ---- the tables


def test_what_is_opaque_is_not_entered() -> None:
    assert not CONTAINERS.keys() & OPAQUE.keys()
    eqn = only_container(jax.nn.relu, X)
    assert container_of(eqn) is None
    assert jaxprs.primitive_name(eqn) in OPAQUE


def test_loops_and_remats_are_known() -> None:
    assert {name for name, c in CONTAINERS.items() if c.is_loop} == {"scan", "while"}
    assert {"checkpoint", "remat2"} <= {name for name, c in CONTAINERS.items() if c.is_remat}


def test_how_a_shard_map_divides_its_operands() -> None:
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    specs = (P("a"), P(None, "a"), P(("a", "b")), P())
    program = jax.shard_map(lambda *xs: xs[3], mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    eqn = only_container(program, *[struct(8, 8)] * 4)
    assert shard_map_parts(eqn) == [(2, 1), (1, 2), (8, 1), (1, 1)]


def test_the_size_of_a_range() -> None:
    assert IterationRange(2, 5).size == 3
