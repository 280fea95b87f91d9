"""`replay.evaluate` inside traces: what a plain evaluation gives, with less tracing and fewer linearizations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from policyc.jaxcore.hooks import replay
from policyc.jaxcore.jaxprs import reading as jaxprs
from tests.support.gemms import normal

X, W = normal(4, 8), normal(8, 8)
Gradient = Callable[[Callable[..., Any]], Callable[..., Any]]


@jax.custom_vjp
def doubled(x: Any) -> Any:
    return x * 2


doubled.defvjp(lambda x: (doubled(x), None), lambda _, dy: (dy * 2,))


def layer(x: Any, w: Any) -> Any:
    with jax.named_scope("product"):
        h = x @ w
    a, b = jnp.split(jnp.tanh(h) + h * h, 2, -1)  # several results, an operand that occurs twice
    zeros = jnp.maximum(a, 0.0) - jnp.maximum(b, -0.0)  # literals that are equal and not the same
    masked = jnp.where(zeros > 0, zeros, lax.stop_gradient(a))
    return jnp.concatenate([doubled(masked), lax.cond(b[0, 0] > 0, jnp.sin, jnp.cos, b)], -1)


def loss(x: Any, w: Any) -> Any:
    for i in range(4):  # the fewest that are linearized together
        with jax.named_scope(f"layers_{i}"):
            x = layer(x, w)
    return x.sum()


def pair() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The loss as a jaxpr that is evaluated plainly, and by `replay`."""
    closed = jax.make_jaxpr(loss)(X, W)
    return (lambda *a: jaxprs.evaluate(closed, *a)[0]), (lambda *a: replay.evaluate(closed, *a)[0])


def in_scan(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w: lax.scan(lambda c, _: (c - jax.grad(f, 1)(x, c), None), w, None, length=2)


def in_vmap(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.vmap(jax.grad(f, (0, 1)), in_axes=(None, 0))


@pytest.mark.parametrize(
    ("gradient", "w"),
    [(lambda f: jax.value_and_grad(f, (0, 1)), W), (in_scan, W), (in_vmap, normal(3, 8, 8))],
    ids=["grad", "scan", "vmap"],
)
def test_the_gradient_has_the_same_equations_names_and_places(gradient: Gradient, w: Any) -> None:
    plain, replayed = (jax.make_jaxpr(gradient(f))(X, w) for f in pair())
    assert value_numbers(replayed) == value_numbers(plain)
    assert replayed.out_avals == plain.out_avals


def under_jit(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(jax.jit(f), (0, 1))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, under_jit], ids=["trace", "jit", "grad"])
def test_a_trace_has_the_same_equations_names_and_places(transform: Gradient) -> None:
    with jax.named_scope("outer"):
        plain, replayed = (jax.make_jaxpr(transform(f))(X, W) for f in pair())
    assert value_numbers(replayed) == value_numbers(plain)
    assert replayed.out_avals == plain.out_avals


def test_a_trace_takes_equations_as_they_are() -> None:
    closed = jax.make_jaxpr(doubled)(X)
    traced = jax.make_jaxpr(lambda x: replay.evaluate(closed, x))(X)
    (before,), (after,) = closed.jaxpr.eqns, traced.jaxpr.eqns
    assert after.params["call_jaxpr"] is before.params["call_jaxpr"]


def test_a_gradient_takes_equations_as_they_are_where_it_does_not_differentiate() -> None:
    closed = jax.make_jaxpr(lambda x, y: (x * doubled(y)).sum())(X, X)
    traced = jax.make_jaxpr(jax.grad(lambda x, y: replay.evaluate(closed, x, y)[0]))(X, X)
    before, after = (
        [e.params["call_jaxpr"] for e in jaxprs.equations(j) if e.primitive is closed.jaxpr.eqns[0].primitive]
        for j in (closed, traced)
    )
    assert len(after) == 1
    assert after[0] is before[0]


def test_constants_and_results_of_a_trace_are_those_of_the_jaxpr() -> None:
    used, unused = normal(8), normal(8)

    def f(x: Any) -> Any:
        unused + 1.0
        return x * used, x, 2.0, used

    closed = jax.make_jaxpr(f)(X)
    traced = jax.make_jaxpr(lambda x: replay.evaluate(closed, x))(X)
    plain = jax.make_jaxpr(lambda x: jaxprs.evaluate(closed, x))(X)
    assert str(traced) == str(plain)
    assert list(map(id, traced.consts)) == list(map(id, plain.consts))


def test_operands_of_other_types_are_evaluated() -> None:
    closed = jax.make_jaxpr(lambda x: x * x)(X)
    narrow = jax.make_jaxpr(lambda x: replay.evaluate(closed, x))(X.astype(jnp.bfloat16))
    assert narrow.out_avals[0].dtype == jnp.bfloat16


def test_effects_are_evaluated() -> None:
    def f(x: Any) -> Any:
        jax.debug.print("{}", x.sum(), ordered=True)
        return x * 2

    closed = jax.make_jaxpr(f)(X)
    traced = jax.make_jaxpr(lambda x: replay.evaluate(closed, x))(X)
    assert traced.effects == closed.effects


def value_numbers(jaxpr: Any) -> tuple[list[int], list[int]]:
    """Hashes of how the results of a jaxpr are computed, and of all its equations in any order.

    Since JAX 0.12 the sum of two cotangents stands some equations later, as in JAX's own gradient of the program.
    """
    opened = jaxprs.open_jaxpr(jaxpr)
    numbers: dict[Any, int] = {v: i for i, v in enumerate([*opened.constvars, *opened.invars])}

    def number(atom: Any) -> int:
        return hash(repr(atom.val)) if isinstance(atom, Literal) else numbers[atom]

    equations: list[int] = []
    for eqn in opened.eqns:
        bodies = [value_numbers(sub.jaxpr) for sub in jaxprs.sub_jaxprs(eqn)]
        names = str(eqn.source_info.name_stack), jaxprs.source_place(eqn)
        # JAX wraps a backward rule once more each time that it is bound.
        params = {name: value for name, value in eqn.params.items() if name != "bwd"}
        params_text = jaxprs.parameters_text(jaxprs.replace_eqn(eqn, params=params))
        what = jaxprs.primitive_name(eqn), params_text, str(bodies), *names
        equations.append(hash((what, *map(number, eqn.invars))))
        numbers |= {v: hash((equations[-1], i, v.aval)) for i, v in enumerate(eqn.outvars)}
    return [number(v) for v in opened.outvars], sorted(equations)


def sines(x: Any, w: Any) -> Any:
    for _ in range(5):
        x = jnp.sin(x @ w)
    return x.sum()


def test_forward_over_reverse_has_the_same_values() -> None:
    closed = jax.make_jaxpr(sines)(X, W)

    def hessian_product(f: Callable[..., Any]) -> Any:
        return jax.jit(lambda x, w: jax.jvp(jax.grad(f, 1), (x, w), (x, w))[1])(X, W)

    replayed = hessian_product(lambda *args: replay.evaluate(closed, *args)[0])
    np.testing.assert_allclose(replayed, hessian_product(sines), rtol=1e-4, atol=1e-4)


def test_explicit_axes_stay_in_the_types() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x, w = jax.device_put(X, P("data")), jax.device_put(W, P())
        closed = jax.make_jaxpr(sines)(x, w)
        plain, replayed = (
            jax.make_jaxpr(jax.grad(lambda *args, e=evaluate: e(closed, *args)[0], (0, 1)))(x, w)
            for evaluate in (jaxprs.evaluate, replay.evaluate)
        )
    assert value_numbers(replayed) == value_numbers(plain)
    assert replayed.out_avals == plain.out_avals


def test_equal_equations_are_linearized_once() -> None:
    calls: list[float] = []
    scaled_p = Primitive("scaled")
    scaled_p.def_abstract_eval(lambda x, by: ShapedArray(x.shape, x.dtype))

    def jvp(primals: Any, tangents: Any, by: float) -> Any:
        calls.append(by)
        return scaled_p.bind(*primals, by=by), tangents[0] * by

    ad.primitive_jvps[scaled_p] = jvp

    def scale_often(x: Any) -> Any:
        for by in (2.0, 3.0) * 5 + (4.0,) * 2:
            x = scaled_p.bind(x, by=by)
        return x.sum()

    closed = jax.make_jaxpr(scale_often)(X)
    jax.make_jaxpr(jax.grad(lambda x: replay.evaluate(closed, x)[0]))(X)
    assert sorted(calls) == [2.0, 3.0, 4.0, 4.0]
