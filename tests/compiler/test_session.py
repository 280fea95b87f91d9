"""`policyc.active`: every loss that a program differentiates runs under the policy, and nothing stays behind.

What is executed is in fp8, which compiles fast: the format makes no difference here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import policyc
from policyc.compiler.session import Session
from tests.support.gemms import normal
from tests.support.jaxpr_tools import primitive_counts, struct

W, X = normal(16, 16, divisor=4), normal(8, 16, seed=1)
ABSTRACT = struct(16, 16), struct(8, 16)


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.square(jnp.tanh(x @ w) @ w))


def quantized_gemms(f: Callable[..., Any], *args: Any) -> int:
    return primitive_counts(jax.make_jaxpr(f)(*(args or ABSTRACT)))["scaled_gemm"]


def differentiate(f: Callable[..., Any]) -> None:
    """Traces the derivative, without computing it."""
    jax.eval_shape(jax.grad(f), *ABSTRACT)


# ---- which derivatives are reached


@pytest.mark.parametrize(
    "entry",
    [
        lambda f: jax.grad(f),
        lambda f: jax.value_and_grad(f),
        lambda f: jax.jacrev(f),
        lambda f: jax.jit(jax.grad(f)),
        lambda f: lambda w, x: jax.vjp(f, w, x)[1](1.0),
        lambda f: lambda w, x: jax.vjp(partial(f, x=x), w)[1](1.0),
        lambda f: lambda w, x: jax.linear_transpose(jax.linearize(f, w, x)[1], w, x)(1.0),
        lambda f: jax.grad(jax.jit(f)),
        lambda f: jax.grad(jax.checkpoint(f)),
    ],
    ids=[
        "grad",
        "value_and_grad",
        "jacrev",
        "jit of grad",
        "vjp",
        "vjp of partial",
        "linearize",
        "grad of jit",
        "remat",
    ],
)
def test_active_reaches_every_entry_of_autodiff(entry: Any) -> None:
    derivative = entry(loss)
    assert quantized_gemms(derivative) == 0
    with policyc.active("* -> nvfp4") as session:
        assert quantized_gemms(entry(loss)) >= 5
        assert quantized_gemms(derivative) >= 5, "a derivative made before is reached too"
    assert session.plans
    assert session.matched
    assert quantized_gemms(derivative) == 0, "nothing stays behind"


def test_a_session_does_not_run_what_was_traced_under_an_earlier_one() -> None:
    """A later session may have the memory address, and so the `id`, of an earlier one."""
    policy = policyc.parse("* -> fp8")
    assert len({Session(policy=policy).cache_key for _ in range(8)}) == 8


def test_what_is_not_differentiated_is_not_quantized() -> None:
    with policyc.active("* -> fp8") as session:
        assert quantized_gemms(loss, W, X) == 0
    assert not session.plans


def test_a_step_that_was_compiled_before_is_compiled_again() -> None:
    step = jax.jit(jax.value_and_grad(loss))
    before = step(W, X)
    with policyc.active("* -> fp8"):
        inside = step(W, X)
    after = step(W, X)
    assert before[0] == after[0] != inside[0]


def test_a_jitted_loss_differentiated_outside_jit_is_compiled_once() -> None:
    from jax._src.interpreters import pxla

    inner, other, lowered = jax.jit(loss), W + 1, []
    original = pxla.lower_sharding_computation
    with policyc.active("* -> fp8"):
        jax.grad(inner)(W, X)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                pxla, "lower_sharding_computation", lambda *a, **k: lowered.append(1) or original(*a, **k)
            )
            jax.grad(inner)(other, X)
        assert not lowered


def test_the_loss_is_called_once() -> None:
    calls = []

    def counted(w: Any, x: Any) -> Any:
        calls.append(1)
        return loss(w, x)

    with policyc.active("* -> mxfp8"):
        jax.eval_shape(jax.jit(jax.value_and_grad(counted)), *ABSTRACT)
    assert len(calls) == 1
    jax.eval_shape(jax.jit(policyc.apply("* -> mxfp8", counted)), *ABSTRACT)
    assert len(calls) == 2


def test_the_inner_of_two_policies_wins() -> None:
    with policyc.active("* -> nvfp4") as outer, policyc.active("* -> keep"):
        assert quantized_gemms(jax.grad(loss)) == 0
    assert not outer.plans


def test_derivatives_inside_a_custom_rule_are_left_alone() -> None:
    @jax.custom_vjp
    def inner(w: Any, x: Any) -> Any:
        return jnp.sin(w).sum() * x.sum()

    def fwd(w: Any, x: Any) -> Any:
        out, pullback = jax.vjp(lambda w: jnp.sin(w).sum() * x.sum(), w)
        return out, pullback

    inner.defvjp(fwd, lambda pullback, g: (*pullback(g), None))
    with policyc.active("* -> mxfp8") as session:
        differentiate(lambda w, x: loss(w, x) + inner(w, x))
    assert len(session.plans) == 1


def test_a_derivative_taken_by_a_backward_rule_is_no_loss_of_its_own() -> None:
    """As in a loss that computes its logits piece by piece, and again in the backward pass."""

    @jax.custom_vjp
    def head(w: Any, h: Any) -> Any:
        return (h @ w).sum()

    head.defvjp(
        lambda w, h: (head(w, h), (w, h)),
        lambda saved, g: tuple(g * d for d in jax.grad(lambda w, h: (h @ w).sum(), argnums=(0, 1))(*saved)),
    )

    def f(params: Any, x: Any) -> Any:
        return head(params["head"], loss(params["body"], x) * x)

    w, x = ABSTRACT
    with policyc.active("body -> mxfp8 expect 2") as session:
        jax.eval_shape(jax.jit(jax.grad(f)), {"body": w, "head": w}, x)
    assert [[s.name for s in plan.sites] for plan in session.plans] == [["body", "body", "head"]]


@pytest.mark.parametrize(
    ("derivative", "is_forward"),
    [
        (lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)), True),
        (lambda f: jax.jacfwd(f), True),
        (lambda f: jax.jit(jax.jacfwd(f)), True),
        (lambda f: jax.grad(f), False),
        (lambda f: partial(jax.ad_checkpoint.print_saved_residuals, f), False),
    ],
    ids=["jvp", "jacfwd", "jit of jacfwd", "grad", "for JAX itself"],
)
def test_a_session_knows_that_forward_mode_was_used(derivative: Any, is_forward: bool) -> None:
    """JAX uses forward mode in reverse mode too: here for the cumulative product."""

    def loss(w: Any, x: Any) -> Any:
        return jnp.cumprod(x @ w, axis=0).sum()

    with policyc.active("* -> fp8") as session:
        jax.eval_shape(derivative(loss), *ABSTRACT)
    assert session.saw_forward_mode == is_forward


# ---- what a loss may take and return


def test_what_jax_differentiates_for_its_own_purposes_is_no_loss(capsys: pytest.CaptureFixture[str]) -> None:
    with policyc.active("* -> fp8") as session:
        jax.ad_checkpoint.print_saved_residuals(loss, *ABSTRACT)
    assert "f32[16,16]" in capsys.readouterr().out, "JAX differentiated the function"
    assert not session.plans


def test_closed_over_arrays_effects_and_dropout_keys() -> None:
    seen = []

    def f(w: Any, x: Any, key: Any) -> Any:
        jax.debug.callback(lambda v: seen.append(float(v)), x.sum())
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return loss(w, jnp.where(keep, x + X, 0))

    with policyc.active("* -> fp8"):
        value, _ = jax.jit(jax.value_and_grad(f))(W, X, jax.random.key(3))
        jax.effects_barrier()
    assert jnp.isfinite(value)
    assert len(seen) == 1


# ---- several losses


def other_loss(v: Any, x: Any) -> Any:
    return (x @ v).sum()


def test_a_later_loss_may_be_about_other_things_but_not_about_half_of_them() -> None:
    with policyc.active("w -> nvfp4 expect 2") as session:
        differentiate(loss)
        differentiate(other_loss)
        differentiate(lambda v, x: (v * v).sum())
        assert [sum(p.counts) for p in session.plans] == [2, 0, 0]
        with pytest.raises(policyc.PolicyError, match="expects 2 sites but matches 1"):
            differentiate(lambda w, x: (x @ w).sum())


def test_a_loss_traced_at_every_step_is_recorded_once() -> None:
    plans = []
    with policyc.active("* -> fp8", on_plan=plans.append) as session:
        for _ in range(3):
            differentiate(loss)
    assert session.plans == plans
    assert len(plans) == 1


def test_losses_that_differ_only_in_their_products_or_layers_are_recorded_each() -> None:
    def pair(w: Any, x: Any) -> Any:
        return jnp.square(w).sum(), jnp.tanh(x @ w).sum()

    def scanned(length: int, stack: Any, x: Any) -> Any:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack[:length])[0].sum()

    with policyc.active("w @ wgrad -> fp8; stack[2] -> fp8", multiple_losses=True) as session:
        jax.eval_shape(jax.grad(pair, has_aux=True), *ABSTRACT)
        jax.eval_shape(lambda w, x: jax.vjp(lambda w: pair(w, x), w)[0], *ABSTRACT)
        for length in (2, 3):
            jax.eval_shape(jax.grad(partial(scanned, length)), struct(4, 16, 16), ABSTRACT[1])
    assert [plan.counts for plan in session.plans] == [(0, 0), (1, 0), (0, 0), (0, 1)]
    assert not session.unmet


def test_a_policy_that_cannot_be_applied_leaves_nothing_behind() -> None:
    with pytest.raises(policyc.PolicyError, match="matches 2"), policyc.active("w -> fp8 expect 3"):
        differentiate(loss)
    assert quantized_gemms(jax.grad(loss)) == 0
