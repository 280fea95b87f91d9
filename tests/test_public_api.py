"""The names of `policyc` itself: all of them resolve, and former spellings still work and warn."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import policyc

X, W = (jax.device_put(np.ones(shape, np.float32)) for shape in ((4, 16), (16, 8)))


def loss(x: jax.Array, w: jax.Array) -> jax.Array:
    return (x @ w).sum()


@pytest.mark.parametrize("name", policyc.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(policyc, name) is not None
    assert name in dir(policyc)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        policyc.quantise  # noqa: B018


@pytest.mark.parametrize(
    ("old", "new"), [("step", "set_step"), ("results_in", "set_output_dir"), ("observes", "should_observe")]
)
def test_a_former_name_still_works_and_warns(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"policyc\.{old} is now policyc\.{new}"):
        function = getattr(policyc, old)
    assert function is getattr(policyc, new)


def test_plan_takes_weights_for_param_argnums() -> None:
    with pytest.warns(DeprecationWarning, match="plan: weights= is now param_argnums="):
        plan = policyc.plan("* -> fp8", loss, X, W, weights=1)
    expected = policyc.plan("* -> fp8", loss, X, W, param_argnums=1)
    other = policyc.plan("* -> fp8", loss, X, W, param_argnums=0)
    assert [site.parameters for site in plan.sites] == [site.parameters for site in expected.sites]
    assert [site.parameters for site in plan.sites] != [site.parameters for site in other.sites]


def test_apply_takes_weights_for_param_argnums() -> None:
    with pytest.warns(DeprecationWarning, match="apply: weights= is now param_argnums="):
        old = policyc.apply("* -> fp8", loss, weights=1)
    new = policyc.apply("* -> fp8", loss, param_argnums=1)
    assert str(jax.make_jaxpr(old)(X, W)) == str(jax.make_jaxpr(new)(X, W))
    assert str(jax.make_jaxpr(old)(X, W)) != str(jax.make_jaxpr(loss)(X, W))


def test_active_takes_several_for_multiple_losses() -> None:
    """An `expect` that the first loss does not meet is an error only without it."""
    policy = "x -> fp8 expect 1\nw -> fp8 expect 1\n"
    with pytest.raises(policyc.PolicyError), policyc.active(policy):
        jax.make_jaxpr(jax.grad(loss))(X, W)
    with pytest.warns(DeprecationWarning, match="active: several= is now multiple_losses="):
        active = policyc.active(policy, several=True)
    with active as session:
        jax.make_jaxpr(jax.grad(loss))(X, W)
        assert session.unmet
        jax.make_jaxpr(jax.grad(loss, argnums=1))(X, W)
    assert not session.unmet
