"""`Transform`, by a subclass that replaces `sin` by `cos`: in every container, with and without extra inputs.

The results are compared with those of the same program written with `cos`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.reading import AxisEnv
from policyc.jaxcore.jaxprs.transform import (
    Address,
    BoundInput,
    ExtraInput,
    Position,
    Replacement,
    Transform,
    TransformedJaxpr,
)
from tests.support.gemms import normal
from tests.support.jaxpr_tools import addresses_of, primitive_counts

Function = Callable[[jax.Array], jax.Array]
X = normal(4, 3)


class CosForSin(Transform):
    """Replaces `sin(x)` by `cos(x)`, or by `cos(x) * scale` with an extra input for `scale`.

    With `iterations`, only in these iterations of every scan. `sliced`: each iteration of a scan has its own scale.
    """

    def __init__(
        self, jaxpr: Any, *, iterations: set[int] | None = None, scaled: bool = False, sliced: bool = False
    ) -> None:
        self.sines = set(addresses_of(jaxpr, "sin"))
        self.scans = set(addresses_of(jaxpr, "scan"))
        self.iterations = iterations
        self.scaled, self.sliced = scaled, sliced

    def key(self, position: Position) -> Hashable | None:
        depth = len(position.address)
        below = tuple(sorted(a[depth:] for a in self.sines if a[:depth] == position.address))
        kept = any(i not in (self.iterations or ()) for i in position.iterations.values())
        return None if kept or not below else (self, below)

    def replace_equation(self, eqn: Any, position: Position, shared: Any) -> Replacement | None:
        if position.address not in self.sines:
            return None
        if not self.scaled:
            cos = jaxprs.trace_at(jnp.cos, [eqn.invars[0].aval], eqn, position.axis_env)
            return Replacement(tuple(jaxprs.inline(cos, eqn.invars, eqn)))
        aval = jaxprs.array_aval((), "float32", eqn, position.axis_env)
        scale = BoundInput.new(ExtraInput(position.address, jaxprs.name_scopes(eqn), (aval,)))
        avals = [eqn.invars[0].aval, aval]
        scaled = jaxprs.trace_at(lambda x, s: jnp.cos(x) * s, avals, eqn, position.axis_env)
        return Replacement(tuple(jaxprs.inline(scaled, [*eqn.invars, *scale.variables], eqn)), (scale,))

    def is_stack(self, address: Address) -> bool:
        return self.iterations is not None and address in self.scans

    def slices(self, scan: Address, extra: ExtraInput) -> bool:
        return self.sliced


def replace_sin(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, TransformedJaxpr]:
    """The jaxpr of a function before and after the replacement."""
    jaxpr = jax.make_jaxpr(function)(*args)
    return jaxpr, CosForSin(jaxpr, **options).transform(jaxpr)


def assert_close(results: Any, expected: Any) -> None:
    """Equal but for some last bits of float32: the two programs are compiled separately."""
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def assert_computes(after: TransformedJaxpr, values: Sequence[Any], expected: Function) -> None:
    """With these values of its extra inputs, the jaxpr computes what the function does. Compiled in one go."""
    run = jax.jit(lambda x, values: (jaxprs.evaluate(after.jaxpr, x, *values), expected(x)))
    assert_close(*run(X, values))


def named(name: str, f: Function) -> Function:
    """The function in a name scope, by which its equation can be told from the others."""

    def scoped(x: jax.Array) -> jax.Array:
        with jax.named_scope(name):
            return f(x)

    return scoped


# ---- programs with one or two calls of a function in a container


def in_jit(a: Function, b: Function) -> Any:
    return jax.jit(lambda x: b(jax.jit(a)(x) * 2))


def in_remat(a: Function, b: Function) -> Any:
    return jax.checkpoint(lambda x: a(x) + jax.checkpoint(b, policy=jax.checkpoint_policies.dots_saveable)(x))


def in_branches(a: Function, b: Function) -> Any:
    def program(x: jax.Array) -> Any:
        return [lax.cond(x[0, 0] > bound, lambda x: a(x) + x, b, x) for bound in (-10.0, 10.0)]

    return program


def in_one_of_three_branches(a: Function, b: Function) -> Any:
    def program(x: jax.Array) -> Any:
        branches = [jnp.exp, lambda x: b(a(x)), jnp.square]
        return [lax.switch(i + x.astype(int)[0, 0] * 0, branches, x) for i in range(3)]

    return program


def in_while(a: Function, b: Function) -> Any:
    """One in the condition, which reads a constant, and one in the body, which reads another."""

    def program(x: jax.Array) -> Any:
        def going_on(state: Any) -> Any:
            return (state[0] < 5) & (a(x).sum() < 1e6)

        return lax.while_loop(going_on, lambda s: (s[0] + 1, b(s[1]) + 0.5 * x), (0, x))[1]

    return program


def in_scan(a: Function, b: Function) -> Any:
    def program(x: jax.Array) -> Any:
        return lax.scan(lambda h, row: (a(h) + x[0], b(row)), x[1], x)

    return program


def in_nested_scans(a: Function, b: Function) -> Any:
    def program(x: jax.Array) -> Any:
        def outer(h: jax.Array, row: jax.Array) -> Any:
            return lax.scan(lambda h, item: (a(h) + item, h), h + b(row).sum(), row)

        return lax.scan(outer, 0.0, x)

    return program


def in_everything(a: Function, b: Function) -> Any:
    @jax.jit
    def layer(h: jax.Array, row: jax.Array) -> Any:
        h = lax.cond(h[0] > 0, jax.checkpoint(lambda h: a(h)), lambda h: h, h)
        return lax.fori_loop(0, 2, lambda _, h: b(h) + row, h), None

    return lambda x: lax.scan(layer, x[0], x)[0]


PROGRAMS = [
    in_jit, in_remat, in_branches, in_one_of_three_branches, in_while, in_scan, in_nested_scans, in_everything,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_primitive_is_replaced_inside_containers(program: Any) -> None:
    before, after = replace_sin(program(jnp.sin, jnp.sin), X)
    counts, expected = primitive_counts(after.jaxpr), primitive_counts(before)
    assert (counts["sin"], counts["cos"]) == (0, expected.pop("sin"))
    assert not after.inputs
    assert counts - expected == {"cos": counts["cos"]}, "nothing else is added"


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_extra_input_reaches_its_equation(program: Any) -> None:
    """Each `sin` has an extra input of its own, in whatever container, and takes the value that is passed for it."""
    _, after = replace_sin(program(named("a", jnp.sin), named("b", jnp.sin)), X, scaled=True)
    scales = {"a": 1.5, "b": -0.5}
    values = [jnp.float32(scales[extra.content[-1]]) for extra in after.inputs]
    assert {extra.content[-1] for extra in after.inputs} == {"a", "b"}
    expected = program(lambda x: jnp.cos(x) * scales["a"], lambda x: jnp.cos(x) * scales["b"])
    assert_computes(after, values, expected)


def test_a_shard_map_is_entered_under_its_axes() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def program(f: Function) -> Any:
        def local(x: jax.Array) -> jax.Array:
            return lax.psum(f(x), "data")

        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P()))

    seen: list[AxisEnv] = []

    class Recording(CosForSin):
        def replace_equation(self, eqn: Any, position: Position, shared: Any) -> Replacement | None:
            seen.append(position.axis_env)
            return super().replace_equation(eqn, position, shared)

    jaxpr = jax.make_jaxpr(program(jnp.sin))(X)
    after = Recording(jaxpr).transform(jaxpr)
    assert seen[-1].axes == (("data", 2),)
    assert_computes(after, (), program(jnp.cos))


# ---- what does not change


def test_a_jaxpr_without_the_primitive_stays_the_same_object() -> None:
    jaxpr, after = replace_sin(in_everything(jnp.tanh, jnp.exp), X)
    assert after.jaxpr is jaxpr


def test_equations_that_do_not_change_stay_the_same_objects() -> None:
    def program(x: jax.Array) -> jax.Array:
        h = jax.jit(jnp.tanh)(x)
        h = jax.jit(jnp.sin)(h)
        return lax.scan(lambda h, row: (h + row, None), h[0], h)[0] * 2

    before, after = replace_sin(program, X)
    pairs = list(zip(jaxprs.equations(before), jaxprs.equations(after.jaxpr), strict=True))
    changed = [jaxprs.primitive_name(a) for a, b in pairs if a is not b]
    assert changed == ["jit"]
    # Results keep their variables, so that later equations need no change.
    assert all(a.outvars == b.outvars for a, b in pairs)


def test_a_replacement_keeps_the_names_and_the_place_of_its_equation() -> None:
    def program(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer"):
            return jax.jit(named("inner", jnp.sin))(x)

    before, after = replace_sin(program, X)
    ((_, old),), ((call, new),) = (
        [(c, e) for c in jaxprs.equations(j) for s in jaxprs.sub_jaxprs(c) for e in jaxprs.equations(s.jaxpr)]
        for j in (before, after.jaxpr)
    )
    assert jaxprs.primitive_name(new) == "cos"
    assert (jaxprs.name_scopes(call), jaxprs.name_scopes(new)) == (("outer",), ("inner",))
    assert jaxprs.source_place(new) == jaxprs.source_place(old)


def test_a_jaxpr_that_is_called_twice_stays_one_jaxpr() -> None:
    layer = jax.jit(jnp.sin)

    def program(x: jax.Array) -> jax.Array:
        return layer(layer(x))

    _, after = replace_sin(program, X, scaled=True)
    first, second = (sub.jaxpr for e in jaxprs.equations(after.jaxpr) for sub in jaxprs.sub_jaxprs(e))
    assert first is second
    # Each call has its own extra input, with the address of its own equation.
    assert [extra.address for extra in after.inputs] == [(0, 0, 0), (1, 0, 0)]
    values = jnp.float32(2), jnp.float32(3)
    assert_computes(after, values, lambda x: jnp.cos(jnp.cos(x) * 2) * 3)


def test_a_container_may_be_adapted() -> None:
    class Unoptimized(CosForSin):
        def change_container(self, eqn: Any) -> Any:
            return jaxprs.replace_eqn(eqn, params={**eqn.params, "name": "changed"})

    jaxpr = jax.make_jaxpr(lambda x: jax.jit(jnp.tanh)(jax.jit(jnp.sin)(x)))(X)
    after = Unoptimized(jaxpr).transform(jaxpr)
    assert [eqn.params["name"] for eqn in jaxprs.equations(after.jaxpr)] == ["changed", "tanh"]


# ---- scans


def scanned(f: Function, g: Function, chosen: set[int], length: int, **options: Any) -> Any:
    """A scan that calls `g` in the chosen iterations, else `f`. It has a carry, a constant and two outputs."""

    def program(x: jax.Array) -> Any:
        rows = jnp.stack([x[i % 4] * (i + 1) for i in range(length)])
        use_g = jnp.array([i in chosen for i in range(length)])

        def body(h: jax.Array, inputs: Any) -> Any:
            row, takes_g = inputs
            h = jnp.where(takes_g, g(h), f(h)) + row * x[0]
            return h, (h.sum(), row)

        return lax.scan(body, x[1], (rows, use_g), **options)

    return program


@pytest.mark.parametrize(
    ("chosen", "scans", "options"),
    [
        ({0}, 2, {}),
        ({1, 2}, 3, {}),
        ({0, 2, 4}, 5, {"unroll": 2}),
        ({4}, 2, {"reverse": True}),
        ({1, 2}, 3, {"reverse": True, "unroll": 3}),
        ({0, 1, 2, 3, 4}, 1, {"reverse": True}),
        (set(), 1, {}),
    ],
)
def test_a_scan_is_split_into_ranges_of_equal_iterations(
    chosen: set[int], scans: int, options: dict[str, Any]
) -> None:
    _, after = replace_sin(scanned(jnp.sin, jnp.sin, set(), 5, **options), X, iterations=chosen)
    split = [e for e in jaxprs.equations(after.jaxpr) if jaxprs.primitive_name(e) == "scan"]
    assert len(split) == scans
    assert sum(e.params["length"] for e in split) == 5
    assert all(e.params["reverse"] == options.get("reverse", False) for e in split)
    assert_computes(after, (), scanned(jnp.sin, jnp.cos, chosen, 5, **options))


@pytest.mark.parametrize(
    ("iterations", "options"),
    [(None, {}), (None, {"reverse": True}), ({1, 2}, {"unroll": 2}), ({0, 3}, {"reverse": True})],
)
def test_a_scan_slices_an_extra_input(iterations: set[int] | None, options: dict[str, Any]) -> None:
    """Each iteration takes its own scale, also where the scan is split."""
    length = 4
    scales = jnp.arange(1.0, length + 1)

    def body(h: jax.Array, row: jax.Array) -> Any:
        return jnp.sin(h) + row, h

    def scaled_body(h: jax.Array, inputs: Any) -> Any:
        row, scale, is_chosen = inputs
        return jnp.where(is_chosen, jnp.cos(h) * scale, jnp.sin(h)) + row, h

    _, after = replace_sin(
        lambda x: lax.scan(body, x[1], x, **options), X, iterations=iterations, scaled=True, sliced=True
    )
    pieces = [extra.ranges for extra in after.inputs]
    assert all(len(ranges) == 1 for ranges in pieces)
    values = [scales[r.start : r.stop] for (r,) in pieces]
    chosen = jnp.array([iterations is None or i in iterations for i in range(length)])
    assert_computes(after, values, lambda x: lax.scan(scaled_body, x[1], (x, scales, chosen), **options))


@pytest.mark.parametrize("options", [{}, {"reverse": True}])
def test_the_gradient_of_a_split_stack_is_concatenated(options: dict[str, Any]) -> None:
    """The gradient of each range is a part of the stack's. None is padded to the whole stack and added."""
    chosen = {1, 2}

    def program(x: jax.Array) -> jax.Array:
        return jnp.sum(lax.scan(lambda h, row: (jnp.sin(h) * row, None), jnp.ones(3), x, **options)[0])

    def unrolled(x: jax.Array) -> jax.Array:
        h = jnp.ones(3)
        for i in reversed(range(4)) if options else range(4):
            h = (jnp.cos(h) if i in chosen else jnp.sin(h)) * x[i]
        return jnp.sum(h)

    _, after = replace_sin(program, X, iterations=chosen)
    gradient = jax.grad(lambda x: jaxprs.evaluate(after.jaxpr, x)[0])
    counts = primitive_counts(jax.make_jaxpr(gradient)(X))
    assert (counts["pad"], counts["concatenate"]) == (0, 1)
    assert_close(*jax.jit(lambda x: (gradient(x), jax.grad(unrolled)(x)))(X))


def test_nested_scans_slice_an_extra_input_each() -> None:
    def program(x: jax.Array) -> Any:
        return lax.scan(
            lambda h, row: (lax.scan(lambda h, i: (jnp.sin(h) + i, None), h, row)[0], None), 0.0, x
        )

    _, after = replace_sin(program, X, scaled=True, sliced=True)
    (extra,) = after.inputs
    assert [(r.start, r.stop) for r in extra.ranges] == [(0, 4), (0, 3)]
    (aval,) = extra.avals
    assert aval.shape == (4, 3)
    h = 0.0
    for row in np.asarray(X):
        for item in row:
            h = np.cos(h) * 0.5 + item
    (result,) = jaxprs.evaluate(after.jaxpr, X, jnp.full((4, 3), 0.5))
    np.testing.assert_allclose(result, h, rtol=1e-5)  # one is float64


def test_a_split_scan_of_a_jitted_layer_in_a_jit() -> None:
    """The carry passes from range to range inside the containers around the scan."""

    def program(f: Function, g: Function) -> Any:
        layer = jax.jit(lambda h, row: f(h) + row)
        other = jax.jit(lambda h, row: g(h) + row)

        @jax.jit
        def run(x: jax.Array) -> jax.Array:
            if f is g:
                return lax.scan(lambda h, row: (layer(h, row), None), x[0], x)[0]
            h = x[0]
            for i in range(4):
                h = (other if i == 2 else layer)(h, x[i])
            return h

        return run

    _, after = replace_sin(program(jnp.sin, jnp.sin), X, iterations={2})
    assert_computes(after, (), program(jnp.sin, jnp.cos))
