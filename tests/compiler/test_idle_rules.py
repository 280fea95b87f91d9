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
from policyc.language.diagnostics import Severity
from policyc.language.loader import parse
from tests.support.jaxpr_tools import find_sites, struct
from tests.support.planned_model import PARAMS, SITES, X, loss, plan_model

pytestmark = pytest.mark.any_jax

ERROR, WARNING = Severity.ERROR, Severity.WARNING


def idle(policy: str) -> list[tuple[str, str, Severity]]:
    """The rules that do nothing in the model with four layers: text, code and severity."""
    return [(d.span.text, d.code, d.severity) for d in idle_rules(plan_model(policy))]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("* -> fp8; layers[-1:] -> bf16; head -> keep", []),
        ("* -> fp8; heed -> bf16; tail -> fp8 expect 0", [("heed -> bf16", "unmatched-rule", WARNING)]),
        ("* -> fp8; heed -> nvfp4", [("heed -> nvfp4", "unmatched-rule", ERROR)]),
        # protected layers
        ("* -> fp8; blocks[-4:] -> bf16", [("blocks[-4:] -> bf16", "unmatched-rule", ERROR)]),
        ("* -> fp8; layers[9] -> keep", [("layers[9] -> keep", "unmatched-rule", ERROR)]),
        ("* -> fp8; blocks[-4:] -> bf16 expect 0", []),
        (
            "* -> bf16; blocks[-4:] -> keep",
            [("blocks[-4:] -> keep", "unmatched-rule", WARNING)],
        ),  # from nothing
        # overridden
        ("up -> fp8; layers[-4:] -> bf16", [("up -> fp8", "overridden-rule", ERROR)]),
        ("up -> fp8; layers[-3:] -> bf16", []),
        ("up -> fp8; * where k <= 16 -> bf16", [("up -> fp8", "overridden-rule", ERROR)]),
        ("up -> fp8; layers -> bf16", [("up -> fp8", "overridden-rule", WARNING)]),  # in any model with both
        ("up -> fp8 expect 4; layers[-4:] -> bf16", []),
        ("up -> bf16; layers[-4:] -> fp8", []),  # does not quantize: left to the linter
        ("up @ wgrad -> fp8; layers[-4:] @ fprop -> bf16", []),
        ("up -> fp8; after 50% { layers[-4:] -> bf16 }", []),
        ("after 50% { up -> fp8 }; layers[-4:] -> bf16", [("up -> fp8", "overridden-rule", ERROR)]),
    ],
)
def test_rules_that_do_nothing(policy: str, expected: list[tuple[str, str, Severity]]) -> None:
    assert idle(policy) == expected


def test_a_variant_may_override_a_rule_on_purpose() -> None:
    text = "up -> fp8; variant off { * -> bf16 }; variant tail { layers[-4:] -> bf16 }"
    off, tail = (make_plan(parse(text).variant(name), SITES, execution_options()) for name in ("off", "tail"))
    assert not list(idle_rules(off))
    assert [d.code for d in idle_rules(tail)] == ["overridden-rule"]


# ---- what to try


@pytest.mark.parametrize(
    ("policy", "help"),
    [
        ("* -> fp8; heed -> nvfp4", "did you mean 'head' instead of 'heed'?; "),
        ("layer.upp -> fp8", "did you mean 'layers' instead of 'layer'? and did you mean 'up' instead of 'upp'?; "),
        ("layers.head -> fp8", "'policyc sites' lists the names and kinds of its sites; "),
        ("* where router -> fp8", "'policyc sites' lists the names and kinds of its sites; "),
        ("up -> fp8; layers[-4:] -> bf16",
         "make the rules that override it match fewer sites, for instance a share of the layers ('-15%'), or"),
    ],
)  # fmt: skip
def test_the_help_names_the_nearest_names(policy: str, help: str) -> None:
    assert next(iter(idle_rules(plan_model(policy)))).help.startswith(help)


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
