"""A policy that changes nothing, and a loss without a GEMM: JAX runs them as it does without a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import policyc

X = jnp.array([1.0, -2.0, 3.0])
W = jnp.ones((4, 4)) / 7

KEEPING = ["* -> keep", "a.b -> keep; until 10% { * -> keep }"]
ELSEWHERE = "nothing.here -> mxfp8"
"""The loss is traced: the policy is about something else."""

Differentiate = Callable[[str, Callable[..., Any]], Callable[..., Any]]


def by_session(policy: str, loss: Callable[..., Any]) -> Callable[..., Any]:
    def gradient(*args: Any) -> Any:
        with policyc.active(policy, multiple_losses=True):
            return jax.grad(loss)(*args)

    return gradient


def by_function(policy: str, loss: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(policyc.apply(policy, loss, multiple_losses=True))


ways = pytest.mark.parametrize("differentiate", [by_session, by_function])


def reads_values(x: Any) -> Any:
    return jnp.sin(x).sum() if x[0] > 0 else jnp.cos(x).sum()


@ways
@pytest.mark.parametrize("policy", KEEPING)
def test_python_may_read_values_outside_of_jit(policy: str, differentiate: Differentiate) -> None:
    gradient = differentiate(policy, reads_values)
    assert (gradient(X) == jax.grad(reads_values)(X)).all()
    assert (gradient(-X) == jax.grad(reads_values)(-X)).all()
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(gradient)(X)


@ways
def test_another_policy_needs_a_loss_that_can_be_traced(differentiate: Differentiate) -> None:
    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        differentiate("* -> mxfp8", reads_values)(X)
    assert "cannot read the values" in "".join(caught.value.__notes__)


@ways
@pytest.mark.parametrize("policy", KEEPING)
def test_python_may_read_values_in_custom_rules(policy: str, differentiate: Differentiate) -> None:
    @jax.custom_vjp
    def f(x: Any) -> Any:
        return jnp.sin(x) if x > 0 else jnp.cos(x)

    f.defvjp(lambda x: (f(x), x), lambda x, g: (2 * g if x > 0 else 3 * g,))
    assert differentiate(policy, f)(1.0) == 2
    assert differentiate(policy, f)(-1.0) == 3


@ways
def test_a_loss_that_is_kept_is_called_once(differentiate: Differentiate) -> None:
    calls: list[int] = []

    def loss(w: Any) -> Any:
        calls.append(1)
        return (w @ w).sum()

    differentiate("* -> keep", loss)(W)
    assert len(calls) == 1


@ways
@pytest.mark.parametrize("policy", KEEPING)
def test_a_program_may_catch_what_xla_raises(policy: str, differentiate: Differentiate) -> None:
    """As jax.nn.dot_product_attention does, which tries a precision that CPUs do not have."""

    def loss(w: Any) -> Any:
        try:
            return jnp.einsum("ij,jk->ik", w, w, precision=jax.lax.DotAlgorithmPreset.F16_F16_F32).sum()
        except ValueError:
            return 3 * w.sum()

    w = jnp.ones((4, 4), jnp.float16)
    assert (differentiate(policy, loss)(w) == jax.grad(loss)(w)).all()


def test_a_session_that_changes_nothing_plans_only_where_asked() -> None:
    plans: list[policyc.Plan] = []
    with policyc.active("* -> keep") as session:
        jax.grad(lambda w: (w @ w).sum())(W)
    assert not session.plans
    with policyc.active("* -> keep", on_plan=plans.append) as session:
        jax.grad(lambda w: (w @ w).sum())(W)
    assert len(plans) == len(session.plans) == 1
    with policyc.active("* -> keep expect 1") as session:
        jax.grad(lambda w: (w @ w).sum())(W)
    assert len(session.plans) == 1


# ---- losses that are traced: the policy is about something else


@ways
def test_an_equation_without_results_is_kept(differentiate: Differentiate) -> None:
    check = Primitive("check")
    check.multiple_results = True
    check.def_abstract_eval(lambda w: [])
    check.def_impl(lambda w: [])
    ad.primitive_jvps[check] = lambda primals, tangents: ([], [])

    def loss(w: Any) -> Any:
        check.bind(w)
        return (w @ w).sum()

    assert (differentiate(ELSEWHERE, loss)(W) == jax.grad(loss)(W)).all()


def test_messages_name_the_function_of_the_program() -> None:
    def cube(w: Any) -> Any:
        return w**3

    with policyc.active(ELSEWHERE, multiple_losses=True):
        _, pullback = jax.vjp(cube, 2.0)
    with pytest.raises(TypeError, match="applied to cube"):
        pullback(1.0, 2.0)


@ways
def test_shardings_may_have_reduced_axes(differentiate: Differentiate) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "seq"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(64.0).reshape(8, 4, 2), P("data", "seq", None))
        w = jax.device_put(jnp.arange(12.0).reshape(2, 6), P("seq", None))

        @jax.shard_map(in_specs=P("seq", None), out_specs=P("seq", None, reduced={"data"}))
        def mark(w: Any) -> Any:
            return jax.lax.pcast(w, axis_name="data", to="reduced")

        @jax.shard_map(
            in_specs=P("seq", None, reduced={"data"}), out_specs=P(None, None, reduced={"seq", "data"})
        )
        def gather(w: Any) -> Any:
            return jax.lax.all_gather(w, axis_name="seq", tiled=True, to="reduced")

        def loss(w: Any) -> Any:
            return jnp.sin(jnp.einsum("btd,df->btf", x, gather(mark(w)))).sum()

        kept = jax.jit(differentiate(ELSEWHERE, loss))(w)
        assert kept.sharding == w.sharding
        assert (kept == jax.jit(jax.grad(loss))(w)).all()


@pytest.mark.parametrize("x64", [False, True])
def test_results_that_are_constants_are_arrays(x64: bool) -> None:
    """As under `jax.jit`. JAX's jaxprs hold such scalars as kinds of Python numbers, without the methods of arrays."""

    def loss(x: Any) -> Any:
        constants = (
            jnp.array(-1.0),
            jnp.float32(2),
            jnp.int8(3),
            jnp.bfloat16(4),
            jnp.array(True),
            jnp.array(5),
        )
        return (x * x).sum(), constants

    with jax.enable_x64(x64), policyc.active("* -> mxfp8", multiple_losses=True):
        _, constants = jax.grad(loss, has_aux=True)(X)
    with jax.enable_x64(x64):
        _, expected = jax.jit(jax.grad(loss, has_aux=True))(X)
    assert all(isinstance(constant, jax.Array) for constant in constants)
    assert [(c.aval, c.item()) for c in constants] == [(e.aval, e.item()) for e in expected]
