"""Rules that do nothing in a program, and what to try. Nothing is compiled."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import pytest

import policyc
from policyc.compiler.matching.execution import execution_options
from policyc.compiler.planning.idle_rules import idle_rules
from policyc.compiler.planning.plan import make_plan
from policyc.language.loader import parse
from tests.support.jaxpr_tools import find_sites, struct
from tests.support.planned_model import PARAMS, SITES, X, loss

pytestmark = pytest.mark.any_jax


def test_a_variant_may_override_a_rule_on_purpose() -> None:
    text = "up -> fp8; variant off { * -> bf16 }; variant tail { layers[-4:] -> bf16 }"
    off, tail = (make_plan(parse(text).variant(name), SITES, execution_options()) for name in ("off", "tail"))
    assert not list(idle_rules(off))
    assert [d.code for d in idle_rules(tail)] == ["overridden-rule"]


# ---- what to try


def test_a_suggested_name_is_one_that_a_rule_can_contain() -> None:
    params = {"encoder$params": {"Dense": [{"kernel": struct(16, 16)}]}}
    sites = find_sites(lambda p, x: x @ p["encoder$params"]["Dense"][0]["kernel"], params, X)
    plan = make_plan(parse("encoder_params -> bf16; encoder?params -> fp8"), sites)
    (diagnostic,) = idle_rules(plan)
    assert diagnostic.help == "did you mean 'encoder?params' instead of 'encoder_params'?"


# ---- in Python


def test_apply_and_plan_warn_alike() -> None:
    for policy, code in (
        ("* -> fp8; tail -> bf16", "unmatched-rule"),
        ("up -> fp8; layers -> bf16", "overridden-rule"),
    ):
        with pytest.warns(UserWarning, match=code):
            policyc.plan(policy, loss, PARAMS, X)
        with pytest.warns(UserWarning, match=code):
            jax.eval_shape(policyc.apply(policy, loss), PARAMS, X)


def test_a_session_warns_unless_its_plans_are_reported() -> None:
    params = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), PARAMS)
    x = jnp.ones(X.shape, X.dtype)
    with pytest.warns(UserWarning, match="unmatched-rule"), policyc.active("* -> fp8; tail -> bf16"):
        jax.eval_shape(jax.grad(loss), params, x)
    with warnings.catch_warnings(), policyc.active("* -> fp8; tail -> bf16", on_plan=lambda plan: None):
        warnings.simplefilter("error")
        jax.eval_shape(jax.grad(loss), params, x)
