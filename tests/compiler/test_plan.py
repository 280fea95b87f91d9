"""Plans: which rule decides about each product, in each phase. Nothing is compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import policyc
from policyc.compiler.matching.execution import execution_options
from policyc.compiler.planning.plan import gemm_queries, make_plan
from policyc.compiler.tables.plan_json import as_json
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.language.diagnostics import PolicyError
from policyc.language.loader import parse
from policyc.language.recipes import Gemm
from tests.support.jaxpr_tools import find_sites, struct
from tests.support.planned_model import HEAD, SCHEDULE, UP, X, plan_model

# ---- which rule decides


def test_a_weight_is_matched_by_its_scope_too() -> None:
    def scoped(p: Any, x: Any) -> Any:
        with jax.named_scope("attention"), jax.named_scope("query"):
            return x @ p["kernel"]

    sites = find_sites(scoped, {"kernel": struct(16, 32)}, X)
    assert make_plan(parse("query -> fp8; kernel -> bf16; attention.key -> fp8"), sites).counts == (1, 1, 0)


# ---- phases


def test_the_phase_at_a_step() -> None:
    plan = plan_model(SCHEDULE)
    long = {step: plan.label(plan.phase(step, 100)) for step in (0, 9, 10, 49, 50, 99)}
    assert long == {
        0: "until 10 and until 50%", 9: "until 10 and until 50%", 10: "after 10 and until 50%",
        49: "after 10 and until 50%", 50: "after 10 and after 50%", 99: "after 10 and after 50%",
    }  # fmt: skip
    assert plan.label(plan.phase(8, 10)) == "until 10 and after 50%"
    # A rule counts the sites that it matches in any phase.
    assert plan.counts == (9, 1, 8)


def test_a_percentage_needs_the_number_of_all_steps() -> None:
    with pytest.raises(PolicyError, match="percentage of the training") as caught:
        plan_model(SCHEDULE).phase(3, None)
    assert [d.code for d in caught.value.diagnostics] == ["schedule-without-step"]
    assert plan_model("* -> fp8\nuntil 10 { head -> keep }").phase(3, None) == (True,)
    assert plan_model("* -> fp8").phase(7, None) == ()


# ---- how products run


def test_a_query_has_the_sizes_and_types_of_each_product() -> None:
    plan = plan_model("* -> mxfp8; head @ wgrad -> bf16")
    recipe = plan.decisions()[HEAD.address, ()].recipe
    assert recipe is not None
    fprop, dgrad, wgrad = gemm_queries(HEAD, recipe)
    assert (fprop.m, fprop.n, fprop.k) == (8, 64, 16)
    assert (dgrad.m, dgrad.n, dgrad.k) == (8, 16, 64)
    assert (wgrad.m, wgrad.n, wgrad.k) == (16, 64, 8)
    assert [q.left.format for q in (fprop, dgrad, wgrad)] == ["mxfp8", "mxfp8", "bf16"]
    assert not any(q.ragged for q in (fprop, dgrad, wgrad))


def test_the_types_of_a_query_follow_the_roles() -> None:
    """Also where the weight is the left operand."""

    def left(p: Any, x: Any) -> Any:
        return lax.dot_general(p["w"], x, (((0,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    (site,) = find_sites(left, {"w": struct(16, 32, dtype=jnp.bfloat16)}, struct(8, 16, dtype=jnp.float16))
    recipe = plan_model("* -> mxfp8").decisions()[HEAD.address, ()].recipe
    assert recipe is not None
    fprop, dgrad, wgrad = gemm_queries(site, recipe)
    x, w, dy = "float16", "bfloat16", "float32"
    assert (fprop.types, dgrad.types, wgrad.types) == ((x, w), (dy, w), (x, dy))


@pytest.mark.parametrize(
    "recipe",
    [
        "nvfp4(scale2d=weights)",
        "nvfp4(rht=wgrad, sr=grad, scale2d=weights)",
        "nvfp4(scale=four_over_six, scale2d=weights)",
        "nvfp4(rounding=ms_eden)",
        "mxfp4(sr={grad,fprop.activations})",
    ],
)
@pytest.mark.parametrize("has_weight", [True, False])
def test_operands_run_as_planned(recipe: str, has_weight: bool) -> None:
    """Also in a product of two activations, which has no 2D scales."""

    def loss(p: Any, x: Any) -> Any:
        y = jnp.tanh(x @ p["w"])
        return jnp.sum(y @ p["w"] if has_weight else jnp.tanh(y @ y.T) @ y)

    policy = f"* where {'weight' if has_weight else 'not weight'} -> {recipe}"
    args = {"w": struct(128, 128)}, struct(128, 128)
    plan = policyc.plan(policy, loss, *args)
    planned = {(p.gemm, t) for p in plan.products() if p.bits for t in p.treatments}
    gradient = jax.make_jaxpr(jax.grad(policyc.apply(policy, loss)))(*args)
    ran = set()
    for eqn in jaxprs.all_equations(gradient):
        if jaxprs.primitive_name(eqn).endswith("_quantize"):
            pairs = zip(eqn.params["operands"], eqn.params["specs"], strict=False)
            ran |= {(Gemm(operand.partition(".")[0]), spec.treatment) for operand, spec in pairs}
    assert ran <= planned
    assert {gemm for gemm, _ in ran} == {gemm for gemm, _ in planned}
    assert ("16x16" in as_json(plan)) == any(t.tile2d for _, t in ran)


def test_products_are_native_where_the_target_can_run_them() -> None:
    params = {"a": struct(512, 512), "b": struct(512, 512)}
    sites = find_sites(lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"], params, struct(512, 512))

    def native(policy: str, **execution: Any) -> set[tuple[str, bool]]:
        plan = make_plan(parse(policy), sites, execution_options(**execution))
        return {(p.site.name, p.lowering.native) for p in plan.products()}

    assert native("* -> fp8; b -> nvfp4", target="gb200") == {("a", True), ("b", True)}
    assert native("* -> fp8; b -> nvfp4", target="h100") == {("a", True), ("b", False)}
    assert native("* -> fp8; b -> bf16", target="gb200", backend="emulate") == {("a", False), ("b", True)}


def test_sites_of_equal_sizes_are_decided_apart_if_only_one_has_a_weight() -> None:
    def two(p: Any, x: Any) -> Any:
        h = x @ p["w"]
        return jnp.tanh(h) @ h

    sites = find_sites(two, {"w": struct(16, 16)}, struct(16, 16))
    plan = make_plan(parse("* -> nvfp4(scale2d=weights)"), sites)
    tiled = [any(t.tile2d for t in run.decision.applied_recipe.treatments) for run in plan.runs()]
    assert tiled == [True, False]


def test_decisions_are_computed_once() -> None:
    plan = plan_model(SCHEDULE)
    assert plan.decisions(plan.phases[0]) is plan.decisions(plan.phases[0])
    # Equal decisions of different layers are one object, so that comparing them is cheap.
    decisions = plan.decisions(plan.phases[0])
    assert decisions[UP.address, (0,)] is decisions[UP.address, (1,)]
