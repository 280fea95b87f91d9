"""The entries `policyc.apply` and `policyc.plan`.

What is executed is in fp8, which compiles fast: the format makes no difference here.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policyc
from tests.support.gemms import normal

W, X = normal(16, 16, divisor=4), normal(8, 16, seed=1)


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.square(jnp.tanh(x @ w) @ w))


# ---- apply


def test_apply_keeps_the_signature_and_composes() -> None:
    def f(w: Any, x: Any, *, scale: float = 1.0) -> Any:
        "doc"
        return scale * loss(w, x)

    g = policyc.apply("* -> fp8", f)
    assert g.__name__ == "f"
    assert g.__doc__ == "doc"
    value = g(W, X, scale=2.0)
    assert value != f(W, X, scale=2.0)
    jax.jit(g, static_argnames="scale").lower(W, X, scale=2.0)

    @jax.jit
    def transformed(w: Any, x: Any) -> Any:
        def body(w: Any, x: Any) -> Any:
            return w - 0.1 * jax.grad(g)(w, x), g(w, x)

        _, losses = jax.lax.scan(body, w, jnp.stack([x] * 3))
        mapped = jax.vmap(g, (None, 0))(w, jnp.stack([x, 2 * x]))
        return g(w, x, scale=2.0), mapped, jax.grad(jax.checkpoint(g))(w, x), losses

    jitted, mapped, gradient, losses = transformed(W, X)
    np.testing.assert_allclose(jitted, value, rtol=1e-4)  # one program and many, in float32
    np.testing.assert_allclose(mapped[0], value / 2, rtol=1e-4)
    assert gradient.shape == W.shape
    assert losses[-1] < losses[0]


def test_forward_mode_is_an_error() -> None:
    g = policyc.apply("* -> fp8", loss)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda w: g(w, X), (W,), (W,))
    with pytest.raises(NotImplementedError, match="a quantized GEMM can be differentiated once"):
        jax.jvp(jax.grad(lambda w: g(w, X)), (W,), (W,))


def test_the_policy_comes_first() -> None:
    with pytest.raises(TypeError, match=r"first argument must be a policy .*, not a function"):
        policyc.apply(loss, "* -> bf16")


@jax.custom_vjp
def opaque(w: Any, x: Any) -> Any:
    return x @ w


opaque.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, dy: (kept[1].T @ dy, dy @ kept[0].T))


def by_tokens(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w[jnp.argmax(x)]).sum()


STACK = jax.ShapeDtypeStruct((2, 16, 16), "float32")


@pytest.mark.parametrize(
    ("policy", "fn", "w", "options"),
    [
        ("* -> fp8 expect 3", loss, W, {}),
        ("* -> fp8; decoder -> fp8", loss, W, {}),
        ("w -> fp8; * where k > 0 -> bf16", loss, W, {}),
        ("* -> fp8; w[-1] -> keep", loss, W, {}),
        ("* -> fp8", lambda w, x: opaque(w, x).sum(), W, {}),
        ("* -> fp8; w[-1] -> keep", by_tokens, STACK, {}),
        ("* -> split(fprop=nvfp4(rht=wgrad), wgrad=nvfp4(rht=wgrad.grad))", loss, W, {}),
        ("* -> nvfp4", loss, W, {"require_native": True, "target": "h100"}),
    ],
)
def test_plan_raises_what_apply_raises(policy: str, fn: Any, w: Any, options: Any) -> None:
    raised = []
    for call in (
        policyc.plan,
        lambda policy, fn, *args, **k: jax.eval_shape(policyc.apply(policy, fn, **k), *args),
    ):
        with pytest.raises(policyc.PolicyError) as caught:
            call(policy, fn, w, X, **options)
        raised.append([(d.code, d.span and d.span.start, d.sites) for d in caught.value.diagnostics])
    assert raised[0] == raised[1]


def test_plan_and_apply_let_a_policy_pass_that_changes_nothing() -> None:
    policy = "w[-1] -> keep; decoder -> keep"
    policyc.plan(policy, by_tokens, STACK, X)
    jax.eval_shape(policyc.apply(policy, by_tokens), STACK, X)


def test_a_schedule_switches_without_touching_anything_else() -> None:
    policy = policyc.parse("w -> fp8\nafter 3 { w -> bf16 }")
    step = jax.jit(jax.value_and_grad(policyc.apply(policy, loss)))
    with pytest.raises(policyc.PolicyError, match="schedule"):
        step(W, X)
    early, late = (
        jax.jit(jax.value_and_grad(policyc.apply(f"w -> {r}", loss)))(W, X) for r in ("fp8", "bf16")
    )
    values = []
    for n in range(5):
        policyc.set_step(n)
        values.append(float(step(W, X)[0]))
    assert values == [float(early[0])] * 3 + [float(late[0])] * 2
    assert len(set(values)) == 2


# ---- plan


def test_parameters_may_be_any_arguments() -> None:
    def f(x: Any, a: Any, b: Any) -> Any:
        return ((x @ a) @ b).sum()

    for argnums in ((1, 2), (-2, -1)):
        plan = policyc.plan("a -> fp8; b -> nvfp4", f, X, W, W, param_argnums=argnums)
        assert [s.name for s in plan.sites] == ["a", "b"]
        assert [s.weight for s in plan.sites] == ["rhs", "rhs"]
    with pytest.raises(TypeError, match="param_argnums has 5"):
        policyc.plan("* -> fp8", f, X, W, W, param_argnums=5)
