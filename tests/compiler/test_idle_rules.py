"""Rules that do nothing in a program, and the rules that would work instead. Nothing is compiled."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import policyc
from policyc.compiler.matching.execution import execution_options
from policyc.compiler.planning.idle_rules import idle_rules
from policyc.compiler.planning.plan import make_plan
from policyc.compiler.planning.plan_checks import check_plan
from policyc.language.diagnostics import PolicyError, Severity
from policyc.language.loader import parse
from tests.support.command import ROOT
from tests.support.jaxpr_tools import find_sites, struct
from tests.support.kind_programs import sites_of
from tests.support.planned_model import PARAMS, SITES, X, loss, plan_model

pytestmark = pytest.mark.any_jax

ERROR, WARNING = Severity.ERROR, Severity.WARNING


def idle(policy: str) -> list[tuple[str, str, Severity]]:
    """The rules that do nothing in the model with four layers: text, code and severity."""
    return [(d.span.text, d.code, d.severity) for d in idle_rules(plan_model(policy))]


def first_help(policy: str) -> str:
    return next(iter(idle_rules(plan_model(policy)))).help


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


def test_errors_are_raised_and_warnings_returned() -> None:
    plan = plan_model("* -> fp8; heed -> nvfp4; up -> fp8; layers[-4:] -> bf16; tail -> bf16")
    with pytest.raises(PolicyError) as caught:
        check_plan(plan)
    assert [d.code for d in caught.value.diagnostics] == ["unmatched-rule", "overridden-rule"]
    assert check_plan(plan, may_miss=True) == ()
    (warning,) = check_plan(plan_model("* -> fp8; tail -> bf16"))
    assert (warning.code, warning.severity) == ("unmatched-rule", WARNING)


def test_a_variant_may_override_a_rule_on_purpose() -> None:
    text = "up -> fp8; variant off { * -> bf16 }; variant tail { layers[-4:] -> bf16 }"
    off, tail = (make_plan(parse(text).variant(name), SITES, execution_options()) for name in ("off", "tail"))
    assert not list(idle_rules(off))
    assert [d.code for d in idle_rules(tail)] == ["overridden-rule"]


# ---- the rule that would work


@pytest.mark.parametrize(
    ("policy", "help"),
    [
        ("* -> fp8; blocks[-2:].up -> bf16", "write 'layers[-2:].up -> bf16'; "),
        ("* -> fp8; blocks[-2:].other.* -> bf16", "write 'layers[-2:] -> bf16'; "),
        ("* -> fp8; heed -> nvfp4", "did you mean 'head' instead of 'heed'?; "),
        (
            "up -> fp8; layers[-4:] -> bf16",
            "the rule that overrides it takes every layer of this model: write 'layers[-15%:] -> bf16' instead",
        ),
        ("up -> fp8; layers -> bf16", "move it below the rules that override it, or remove it"),
        ("up -> fp8; up -> bf16", "remove it, or the rules that override it"),
        # Not below what protects layers or sizes.
        (
            "up -> fp8; layers[:5].* -> bf16",
            "make the rules that override it match fewer sites, or remove this rule",
        ),
        (
            "up -> fp8; * where k <= 16 -> bf16",
            "make the rules that override it match fewer sites, or remove this rule",
        ),
    ],
)
def test_the_help_names_a_rule_that_works(policy: str, help: str) -> None:
    assert first_help(policy).startswith(help)


def test_the_policy_of_the_readme_in_a_small_model_gets_a_shorter_tail() -> None:
    """Its rule for the last four blocks takes all three. Moving the other rule below would end the protection."""
    sites = sites_of("gpt_unrolled")
    lines = re.findall(r"^\* .*->.*", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert "layer >= -4" in lines[-1]
    (diagnostic,) = idle_rules(make_plan(parse("\n".join(lines)), sites, execution_options()))
    better = "* where mlp and layer >= -15% -> bf16"
    assert diagnostic.help.startswith(
        f"the rule that overrides it takes every layer of this model: write '{better}' instead"
    )
    counts = make_plan(parse("\n".join([*lines[:-1], better])), sites, execution_options()).counts
    assert counts[-2:] == (6, 2)


@pytest.mark.parametrize(
    ("rule", "suggested", "count"),
    [
        ("mlp.* -> nvfp4", "* where mlp -> nvfp4", 6),
        ("layers[-2:].mlp.* -> nvfp4", "* where mlp and layer >= -2 -> nvfp4", 4),
        ("l[-2:].mlp.* -> nvfp4", "* where mlp and layer >= -2 -> nvfp4", 4),
        ("blocks[:50%].ffn -> fp8", "* where mlp and layer < 50% -> fp8", 2),
        ("layers[-1].mlp.* -> fp8", "* where mlp and layer == -1 -> fp8", 2),
        ("layers[1:-1].mlp.* -> fp8", "* where mlp and layer >= 1 and layer < -1 -> fp8", 2),
        ("mlp.*, attn.* -> fp8", "* where mlp or attention -> fp8", 18),
        ("{mlp,feed_forward}.* -> fp8", "* where mlp -> fp8", 6),
        ("self_attention.mlp @ wgrad where k > 16 -> fp8", "* @ wgrad where mlp and k > 16 -> fp8", 3),
        ("mlp.* -> fp8 expect 6", "* where mlp -> fp8 expect 6", 6),
    ],
)
def test_the_rule_by_kind_is_given_if_it_works_here(rule: str, suggested: str, count: int) -> None:
    """In a model of three blocks whose names say nothing: `l[0].w1` and so on."""
    sites = sites_of("gpt_unrolled")
    with pytest.raises(PolicyError) as caught:
        check_plan(make_plan(parse(rule), sites, execution_options()))
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.help.startswith(f"write '{suggested}'; ")
    assert make_plan(parse(suggested), sites, execution_options()).counts == (count,)


@pytest.mark.parametrize(
    "rule", ["experts.* -> fp8", "mlp.up -> fp8", "layers[::2].mlp.* -> fp8", "mlp.* -> fp8 expect 9"]
)
def test_no_rule_by_kind_is_given_if_it_does_not_work_or_says_something_else(rule: str) -> None:
    plan = make_plan(parse(rule), sites_of("gpt_unrolled"), execution_options())
    with pytest.raises(PolicyError) as caught:
        check_plan(plan)
    assert "where" not in caught.value.diagnostics[0].help


def test_a_suggested_rule_does_something() -> None:
    plan = plan_model("up -> fp8; layers[-4:] -> bf16")
    suggested = parse(first_help("up -> fp8; layers[-4:] -> bf16").split("'")[1]).rules[0]
    rules = (plan.policy.rules[0], suggested)
    assert not list(idle_rules(replace(plan, policy=replace(plan.policy, rules=rules), _decisions={})))


def help_of(policy: str, sites: Any = None) -> list[str]:
    plan = plan_model(policy) if sites is None else make_plan(parse(policy), sites, execution_options())
    return [d.help for d in idle_rules(plan)]


def test_what_the_author_may_have_meant() -> None:
    assert help_of("something.quite.different -> bf16") == [
        "paths here look like layers.up, layers.down, head"
    ]
    flat = find_sites(lambda p, x: x @ p["a"] @ p["b"], {"a": struct(16, 16), "b": struct(16, 16)}, X)
    assert help_of("a[0] -> bf16", flat) == ["this model has no stacks: no path has an index"]
    none = find_sites(lambda p, x: (p * x).sum(), struct(8, 16), X)
    assert help_of("a -> bf16", none) == ["the loss has no GEMM at all"]


def test_scopes_are_listed_beside_parameters() -> None:
    def loss(p: Any, x: Any) -> Any:
        with jax.named_scope("readout"):
            return x @ p["a"]

    (help,) = help_of("something -> bf16", find_sites(loss, {"a": struct(16, 16)}, X))
    assert help == "paths here look like a; scopes look like readout"


def test_a_kind_that_the_model_does_not_have() -> None:
    here = "sites here are 8 mlp, 1 head"
    assert help_of("* where router or experts -> bf16") == [f"no site here is experts or router: {here}"]
    assert help_of("layers[-1:].attention.* -> bf16") == [f"no site here is attention: {here}"]


def test_many_paths_are_cut() -> None:
    params = {name: struct(16, 16) for name in "abcde"}

    def loss(p: Any, x: Any) -> Any:
        for name in "abcde":
            x = x @ p[name]
        return x

    (help,) = help_of("something -> bf16", find_sites(loss, params, X))
    assert help == "paths here look like a, b, c, ... (5 in all)"


def test_paths_are_names_that_a_rule_can_match() -> None:
    def loss(p: Any, x: Any) -> Any:
        return (x @ x.T) @ x @ p["a"]  # the first two have no weight: only a place in this file

    (help,) = help_of("something -> bf16", find_sites(loss, {"a": struct(16, 16)}, X))
    assert help == "paths here look like a"


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
