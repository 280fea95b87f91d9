"""Plans: which rule decides about each product, in each phase. Nothing is compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from policyc.compiler.execution import execution_options
from policyc.compiler.plan import Choice, Plan, gemm_queries, make_plan
from policyc.language.diagnostics import PolicyError
from policyc.language.loader import parse
from policyc.language.recipes import Gemm
from tests.support.jaxpr_tools import find_sites, struct
from tests.support.planned_model import DOWN, HEAD, SCHEDULE, SITES, UP, X, plan

FPROP, DGRAD, WGRAD = Gemm


def rules(plan: Plan, site: Any, gemm: Gemm = FPROP, phase: Any = ()) -> list[int | None]:
    """The rule that decides about a product of each layer."""
    decisions = plan.decisions(phase)
    return [decisions[site.address, layer].choice(gemm).rule for layer in site.layers()]


# ---- which rule decides


def test_a_later_rule_wins() -> None:
    made = plan("* -> fp8; layers[-2:] -> mxfp8; layers.up -> bf16")
    assert rules(made, UP) == [2, 2, 2, 2]
    assert rules(made, DOWN) == [0, 0, 1, 1]
    assert rules(made, HEAD) == [0]


def test_the_rules_that_lost_are_listed_nearest_first() -> None:
    made = plan("* -> fp8; layers -> mxfp8; head -> keep; up -> bf16")
    assert made.decisions()[UP.address, (0,)].choice(FPROP) == Choice(3, (1, 0))
    assert made.decisions()[HEAD.address, ()].choice(WGRAD) == Choice(2, (0,))


def test_what_no_rule_matches_is_kept() -> None:
    made = plan("head -> fp8")
    decision = made.decisions()[UP.address, (0,)]
    assert decision.recipe is None
    assert decision.choices == (Choice(None),) * 3


def test_a_rule_about_some_products_leaves_the_others() -> None:
    made = plan("* -> mxfp8; head @ wgrad -> bf16; layers @ dgrad, wgrad -> keep")
    assert [rules(made, HEAD, gemm) for gemm in Gemm] == [[0], [0], [1]]
    assert [rules(made, UP, gemm) for gemm in Gemm] == [[0] * 4, [2] * 4, [2] * 4]
    recipe = made.decisions()[HEAD.address, ()].recipe
    assert recipe is not None
    assert [recipe.gemm_treatments(gemm)[0].format for gemm in Gemm] == ["mxfp8", "mxfp8", "bf16"]


def test_a_recipe_that_keeps_every_product_changes_nothing() -> None:
    made = plan("* -> nvfp4; * -> keep")
    assert all(decision.recipe is None for decision in made.decisions().values())
    assert not made.quantizes
    assert plan("* -> nvfp4; * @ fprop -> keep").quantizes


@pytest.mark.parametrize(
    ("condition", "matched"),
    [
        ("k >= 32", [DOWN]),
        ("n == 64 and weight", [HEAD]),
        ("n <= 32 and k <= 16", [UP]),
        ("not weight", []),
        ("batch == 1", [UP, DOWN, HEAD]),
        ("flops > 10000", [HEAD]),
    ],
)
def test_where_chooses_sites_by_their_sizes(condition: str, matched: list[Any]) -> None:
    made = plan(f"* where {condition} -> fp8")
    assert [site for site in SITES if rules(made, site)[0] is not None] == matched


def test_a_weight_is_matched_by_its_scope_too() -> None:
    def scoped(p: Any, x: Any) -> Any:
        with jax.named_scope("attention"), jax.named_scope("query"):
            return x @ p["kernel"]

    sites = find_sites(scoped, {"kernel": struct(16, 32)}, X)
    assert make_plan(parse("query -> fp8; kernel -> bf16; attention.key -> fp8"), sites).counts == (1, 1, 0)


def test_counts_are_of_layers_whichever_rule_decides() -> None:
    made = plan("* -> fp8; layers -> mxfp8; layers[1:3].up, head -> keep; nothing -> fp8; * @ wgrad -> bf16")
    assert made.counts == (9, 8, 3, 0, 9)


# ---- phases


def test_a_policy_without_a_schedule_has_one_phase() -> None:
    made = plan("* -> fp8")
    assert made.phases == ((),)
    assert made.label(()) == "always"
    assert made.phase(7, None) == ()


def test_each_phase_has_its_own_decisions() -> None:
    """In a training of less than 20 steps, half of them are done before step 10."""
    made = plan(SCHEDULE)
    decided = {
        made.label(p): (rules(made, HEAD, FPROP, p)[0], rules(made, UP, FPROP, p)[0]) for p in made.phases
    }
    assert decided == {
        "until 10 and until 50%": (1, 0),
        "after 10 and until 50%": (0, 0),
        "until 10 and after 50%": (1, 2),
        "after 10 and after 50%": (0, 2),
    }
    assert [made.in_force(rule, (False, True)) for rule in range(3)] == [True, False, True]


def test_the_phase_at_a_step() -> None:
    made = plan(SCHEDULE)
    long = {step: made.label(made.phase(step, 100)) for step in (0, 9, 10, 49, 50, 99)}
    assert long == {
        0: "until 10 and until 50%", 9: "until 10 and until 50%", 10: "after 10 and until 50%",
        49: "after 10 and until 50%", 50: "after 10 and after 50%", 99: "after 10 and after 50%",
    }  # fmt: skip
    assert made.label(made.phase(8, 10)) == "until 10 and after 50%"
    # A rule counts the sites that it matches in any phase.
    assert made.counts == (9, 1, 8)


def test_a_percentage_needs_the_number_of_all_steps() -> None:
    with pytest.raises(PolicyError, match="percentage of the training") as caught:
        plan(SCHEDULE).phase(3, None)
    assert [d.code for d in caught.value.diagnostics] == ["schedule-without-step"]
    assert plan("* -> fp8\nuntil 10 { head -> keep }").phase(3, None) == (True,)


# ---- runs and products


def test_consecutive_layers_with_one_decision_are_one_run() -> None:
    made = plan("* -> fp8; layers[1:3].up -> bf16; head -> keep")
    runs = list(made.site_runs(UP))
    assert [run.layers for run in runs] == [((0,),), ((1,), (2,)), ((3,),)]
    assert runs[0].decision == runs[2].decision != runs[1].decision
    assert [(run.site.name, len(run.layers)) for run in made.runs()] == [
        ("layers.up", 1), ("layers.up", 2), ("layers.up", 1), ("layers.down", 4), ("head", 1),
    ]  # fmt: skip


def test_the_products_of_a_run_are_those_of_its_site() -> None:
    def first(p: Any, x: Any) -> Any:
        return jnp.tanh(x @ p["a"]) @ p["b"]

    sites = find_sites(first, {"a": struct(16, 16), "b": struct(16, 16)}, X)
    made = make_plan(parse("* -> fp8; b @ dgrad -> keep"), sites)
    assert [(p.run.site.name, p.gemm, p.choice.rule) for p in made.products()] == [
        ("a", FPROP, 0), ("a", WGRAD, 0), ("b", FPROP, 0), ("b", DGRAD, 1), ("b", WGRAD, 0),
    ]  # fmt: skip
    assert all(p.lowering.backend for p in made.products() if p.choice.rule == 0)


# ---- how products run


def test_a_query_has_the_sizes_and_types_of_each_product() -> None:
    made = plan("* -> mxfp8; head @ wgrad -> bf16")
    recipe = made.decisions()[HEAD.address, ()].recipe
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
    recipe = plan("* -> mxfp8").decisions()[HEAD.address, ()].recipe
    assert recipe is not None
    fprop, dgrad, wgrad = gemm_queries(site, recipe)
    x, w, dy = "float16", "bfloat16", "float32"
    assert (fprop.types, dgrad.types, wgrad.types) == ((x, w), (dy, w), (x, dy))


def test_products_are_native_where_the_target_can_run_them() -> None:
    params = {"a": struct(512, 512), "b": struct(512, 512)}
    sites = find_sites(lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"], params, struct(512, 512))

    def native(policy: str, **execution: Any) -> set[tuple[str, bool]]:
        made = make_plan(parse(policy), sites, execution_options(**execution))
        return {(p.run.site.name, p.lowering.native) for p in made.products()}

    assert native("* -> fp8; b -> nvfp4", target="gb200") == {("a", True), ("b", True)}
    assert native("* -> fp8; b -> nvfp4", target="h100") == {("a", True), ("b", False)}
    assert native("* -> fp8; b -> bf16", target="gb200", backend="emulate") == {("a", False), ("b", True)}


def test_decisions_are_computed_once() -> None:
    made = plan(SCHEDULE)
    assert made.decisions(made.phases[0]) is made.decisions(made.phases[0])
    # Equal decisions of different layers are one object, so that comparing them is cheap.
    decisions = made.decisions(made.phases[0])
    assert decisions[UP.address, (0,)] is decisions[UP.address, (1,)]
