"""A first policy for a model decides as the policy that it is like, and says what it does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from policyc.compiler.planning.first_policy import NoRuleFits, write_first_policy
from policyc.compiler.planning.plan import make_plan
from policyc.compiler.planning.plan_checks import check_plan
from policyc.compiler.sites.site_list import Sites
from policyc.language.diagnostics import SourceText
from policyc.language.formatter import format_text
from policyc.language.loader import load, parse, parse_with_diagnostics
from policyc.language.parser import read_statements
from policyc.language.policy import Policy
from policyc.linter.api import lint_loaded
from tests.support.command import policyc
from tests.support.jaxpr_tools import find_sites, struct
from tests.support.kind_programs import sites_of


def first_policy(like: Policy, sites: Sites) -> str:
    return write_first_policy(like, sites, "a test")


@pytest.mark.parametrize("like", ["llama_nvfp4", "nvfp4_late_switch", "quartet2", "fp8"])
@pytest.mark.parametrize("name", ["gpt_scanned_tied", "mixture_ragged_scanned"])
def test_it_decides_as_the_policy_that_it_is_like(name: str, like: str) -> None:
    sites = sites_of(name)
    known = make_plan(load(like), sites)
    text = first_policy(known.policy, sites)
    plan = make_plan(parse(text), sites)
    assert plan.phases == known.phases
    for phase in plan.phases:
        recipes = {key: d.recipe for key, d in plan.decisions(phase).items()}
        assert recipes == {key: d.recipe for key, d in known.decisions(phase).items()}
    assert all(rule.expect for rule in plan.policy.rules)
    check_plan(plan)  # every `expect` holds, and no rule is idle
    file, _ = read_statements(SourceText(text))
    assert format_text(file.source.text) == text
    assert not lint_loaded(parse_with_diagnostics(text))


def opaque_loss(params: Any, x: Any) -> Any:
    @jax.custom_vjp
    def opaque(x: Any, w: Any) -> Any:
        return x @ w

    opaque.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, dy: (dy @ saved[1].T, saved[0].T @ dy))
    return jnp.sum(opaque(jnp.tanh(x @ params["up"]), params["inside"]))


def test_what_the_compiler_cannot_change_is_kept() -> None:
    sites = find_sites(opaque_loss, {"up": struct(32, 64), "inside": struct(64, 32)}, struct(16, 32))
    assert [site.name for site in sites if site.opaque] == ["inside"]
    text = first_policy(parse("* -> bf16"), sites)
    assert "inside -> keep expect 1" in " ".join(text.split())
    check_plan(make_plan(parse(text), sites))


def test_a_name_of_a_program_cannot_leave_its_comment() -> None:
    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(x @ params["a\n* -> nvfp4"])

    sites = find_sites(loss, {"a\n* -> nvfp4": struct(32, 64)}, struct(16, 32))
    (rule,) = parse(first_policy(parse("* -> bf16"), sites)).rules
    assert str(rule) == "* -> bf16 expect 1"


def test_a_policy_that_does_not_fit_is_refused() -> None:
    sites = sites_of("gpt_scanned_tied")
    with pytest.raises(NoRuleFits, match="decides about any site"):
        first_policy(parse("nothing -> fp8"), sites)


def test_it_starts_with_the_recommended_policy() -> None:
    result = policyc("init", "--config", "llama3_8b", "--target", "h200")
    assert result.code == 0
    assert result.err.startswith("policyc: recommended on h200: fp8, ")
    assert {str(rule.recipe) for rule in parse(result.out).rules} == {"bf16", "linear"}
    like = policyc("init", "--config", "llama3_8b", "--like", "fp8")
    assert like.out == result.out


def test_a_suppression_does_not_have_the_reason_of_another_policy() -> None:
    text = first_policy(load("llama_nvfp4"), sites_of("gpt_scanned_tied"))
    assert "# allow: no-high-precision-tail -- as in llama_nvfp4" in text


def test_it_keeps_sites_whose_kinds_are_open() -> None:
    sites = sites_of("gated_recurrence_with_dense_experts_and_attention")
    text = first_policy(load("llama_nvfp4"), sites)
    check_plan(make_plan(parse(text), sites))  # raises if a rule needs an open kind
