"""Which backward products a GEMM has. The oracle is the gradient's own jaxpr, as JAX makes it of the unchanged loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import Phase, given, settings
from hypothesis.strategies import integers
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import policyc
from policyc.compiler.pipeline import compile_plan
from policyc.jaxcore.primitives import derivatives
from policyc.language.recipes import Gemm
from tests.support.jaxpr_tools import count_by_scope, gemm_scope, struct, without_dead_code
from tests.support.programs import USES, CutGradientBuilder, program

X, W = struct(4, 8), struct(8, 8)
SETTINGS = settings(phases=[Phase.generate], print_blob=True, deadline=None)


def backward_products(loss: Callable[..., Any], *args: Any, has_aux: bool = False) -> Counter[str]:
    """How many products of each scope the gradient has that the loss has not."""
    gradient = jax.make_jaxpr(jax.value_and_grad(loss, has_aux=has_aux))(*args)
    counts = count_by_scope(without_dead_code(gradient), "dot_general")
    counts.subtract(count_by_scope(without_dead_code(jax.make_jaxpr(loss)(*args)), "dot_general"))
    return Counter({scope: count for scope, count in counts.items() if count})


def planned_products(loss: Callable[..., Any], *args: Any, has_aux: bool = False) -> Counter[str]:
    """How many backward products of each scope the plan has."""
    plan = policyc.plan("* -> fp8", loss, *args, has_aux=has_aux)
    counts = Counter[str]()
    for site in plan.sites:
        counts[gemm_scope(site)] += len(site.products - {Gemm.FPROP})
    return +counts


def check_products(loss: Callable[..., Any], *args: Any, has_aux: bool = False) -> Counter[str]:
    planned = planned_products(loss, *args, has_aux=has_aux)
    assert planned == backward_products(loss, *args, has_aux=has_aux)
    return planned


# ---- any program


@settings(SETTINGS, max_examples=15)
@given(integers(0, 2**32 - 1), integers(2, 4))
def test_a_plan_of_any_program_has_the_products_of_its_gradient(seed: int, depth: int) -> None:
    random_program = program(seed, depth, CutGradientBuilder)
    check_products(random_program.loss, *random_program.args)


# ---- what cuts a gradient


def named_gemm(name: str, x: Any, w: Any) -> Any:
    with jax.named_scope(name):
        return x @ w


def two_gemms(use: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """The result of g1 is used in some way. That of g0 is also used in another, so that it has a gradient."""

    def loss(p: Any, x: Any) -> Any:
        h = named_gemm("g0", x, p["a"])
        return use(h, named_gemm("g1", h, p["b"])).sum()

    return loss


@pytest.mark.parametrize("use", USES)
def test_what_cuts_a_gradient(use: Any) -> None:
    check_products(two_gemms(use), {"a": W, "b": W}, X)


def test_arrays_that_one_equation_moves_get_separate_cotangents() -> None:
    loss = two_gemms(lambda h, y: jax.device_put((h, y), jax.devices()[0])[0])
    assert check_products(loss, {"a": W, "b": W}, X) == {"g0": 1}


def auxiliary(p: Any, x: Any) -> Any:
    h = jnp.tanh(named_gemm("g0", x, p["a"]))
    return jnp.square(h).sum(), {"logits": named_gemm("g1", h, p["b"]), "constant": 3}


def test_a_gemm_of_an_auxiliary_result_has_only_fprop() -> None:
    params = {"a": W, "b": W}
    assert check_products(auxiliary, params, X, has_aux=True) == {"g0": 1}
    with policyc.active("* -> fp8") as session:
        jax.eval_shape(jax.grad(auxiliary, has_aux=True), params, X)
    (plan,) = session.plans
    assert [site.products for site in plan.sites] == [{Gemm.FPROP, Gemm.WGRAD}, {Gemm.FPROP}]


def test_without_has_aux_every_result_may_be_differentiated() -> None:
    plan = policyc.plan("* -> fp8", auxiliary, {"a": W, "b": W}, X)
    assert [len(site.products) for site in plan.sites] == [2, 3]


# ---- containers


def scan_with_unused_stack(f: Any, p: Any, x: Any) -> Any:
    """The stacked results are not used."""
    return lax.scan(lambda h, w: (jnp.sin(h), f(w, h)), x, p["w"][None])[0]


def scan_with_late_carry(f: Any, p: Any, x: Any) -> Any:
    """The product reaches the result only after three iterations."""

    def body(carry: Any, w: Any) -> Any:
        a, b, _ = carry
        return (f(w, x), a, b), None

    return lax.scan(body, (x, x, x), jnp.stack([p["w"]] * 4))[0][2]


def cond_with_unused_result(f: Any, p: Any, x: Any) -> Any:
    return lax.cond(x[0, 0] > 0, lambda w, h: (h, f(w, h)), lambda w, h: (h, h), p["w"], x * p["w"][0])[0]


def jit_with_unused_result(f: Any, p: Any, x: Any) -> Any:
    return jax.jit(lambda w, h: (h, f(w, h)))(p["w"], x * p["w"][0])[0]


def remat_with_unused_result(f: Any, p: Any, x: Any) -> Any:
    return jax.checkpoint(lambda w, h: (h, f(w, h)))(p["w"], x * p["w"][0])[0]


def shard_map_with_unused_result(f: Any, p: Any, x: Any) -> Any:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    return jax.shard_map(lambda w, h: (h, f(w, h)), mesh=mesh, **specs)(p["w"], x * p["w"][0])[0]


def in_condition_of_while(f: Any, p: Any, x: Any) -> Any:
    h = x * p["w"][0]
    steps = lax.while_loop(lambda i: i < f(p["w"], h).sum(), lambda i: i + 1, 0)
    return h * steps


@pytest.mark.parametrize(
    ("container", "count"),
    [
        (scan_with_unused_stack, 0),
        (scan_with_late_carry, 1),
        (cond_with_unused_result, 0),
        (jit_with_unused_result, 0),
        (remat_with_unused_result, 0),
        (shard_map_with_unused_result, 0),
        (in_condition_of_while, 0),
    ],
)
def test_a_gradient_is_followed_backwards_through_a_container(container: Any, count: int) -> None:
    def loss(p: Any, x: Any) -> Any:
        return jnp.square(container(lambda w, h: named_gemm("g0", h, w), p, x)).sum()

    assert check_products(loss, {"w": W}, X)["g0"] == count


def test_a_carry_of_a_while_is_followed_backwards_until_nothing_changes() -> None:
    """JAX differentiates no `while` in reverse, so there is no gradient to compare with."""

    def loss(p: Any, x: Any) -> Any:
        def body(carry: Any) -> Any:
            a, b, _ = carry
            return x @ p["a"], a, b @ p["b"]

        return lax.while_loop(lambda carry: carry[1].sum() < 3, body, (x, x, x))[1]

    plan = policyc.plan("* -> fp8", loss, {"a": W, "b": W}, X)
    products = {site.name: site.products for site in plan.sites}
    assert products == {"a": {Gemm.FPROP, Gemm.WGRAD}, "b": {Gemm.FPROP}}


def test_what_is_written_to_a_reference_may_have_a_gradient() -> None:
    def loss(p: Any, x: Any) -> Any:
        ref = jax.new_ref(jnp.zeros((4, 8)))
        ref[...] = x @ p["w"]
        return ref[...].sum()

    plan = policyc.plan("* -> fp8", loss, {"w": W}, X)
    assert [site.products for site in plan.sites] == [{Gemm.FPROP, Gemm.WGRAD}]


# ---- what follows from the products


def test_a_rule_for_products_that_do_not_exist_matches_nothing() -> None:
    plan = policyc.plan(
        "* @ wgrad -> fp8; * @ fprop -> fp8",
        two_gemms(lambda h, y: h + lax.stop_gradient(y)),
        {"a": W, "b": W},
        X,
    )
    assert plan.counts == (1, 2)


def hoisted_arrays(use: Callable[[Any], Any]) -> int:
    """How many arrays are computed of the weight of a loop before the loop runs."""

    def loss(p: Any, x: Any) -> Any:
        return lax.scan(lambda h, _: (jnp.tanh(h + use(h @ p["w"])), None), x, None, length=3)[0].sum()

    plan = policyc.plan("* -> mxfp8", loss, {"w": struct(32, 32)}, struct(32, 32))
    return sum(len(extra.avals) for extra in compile_plan(plan).hoisted)


def test_nothing_is_quantized_in_advance_for_a_product_that_does_not_exist() -> None:
    """fprop reads elements and scales in blocks along k. Only dgrad reads others, along n."""
    assert (hoisted_arrays(lambda y: y), hoisted_arrays(lax.stop_gradient)) == (4, 2)


# ---- the rules of JAX that are relied on


@pytest.mark.parametrize(
    ("function", "operands"),
    [
        (jnp.floor, [False]),
        (jnp.sin, [True]),
        (lax.stop_gradient, [False]),
        (lambda x: lax.convert_element_type(x, jnp.int32), [True]),
    ],
)
def test_which_operands_jax_differentiates(function: Any, operands: list[bool]) -> None:
    (eqn,) = jax.make_jaxpr(function)(1.0).jaxpr.eqns[-1:]
    if eqn.params.get("jaxpr") is not None:
        (eqn,) = eqn.params["jaxpr"].jaxpr.eqns
    assert derivatives.operands_with_cotangent(eqn, [True]) == operands
