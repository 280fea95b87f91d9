"""Edits of a policy for a sweep. The expected texts are written by hand."""

from __future__ import annotations

import pytest

from policyc import parse
from policyc.experiments.sweep.edits import ablate, apply_variants, make_grid, parse_grid
from policyc.experiments.sweep.planning import PlannedPolicy
from policyc.experiments.sweep.variants import (
    SweepVariant,
    VariantList,
    collect_variants,
    drop_equal_plans,
    load_baseline,
    policy_name,
    semantic_key,
)
from policyc.language.bundled import bundled_policies
from policyc.language.formatter import format_text
from policyc.language.loader import load, parse_with_diagnostics

pytestmark = pytest.mark.any_jax

TWO_RECIPES = """
recipe nv = nvfp4(rht=wgrad, rht_size=32, sr=grad)
* -> bf16
mlp.* -> nv
head -> mxfp4(sr=grad)
layers[-1] -> bf16
after 90% { mlp.* @ fprop -> f32 }
variant fp8 { recipe nv = fp8 }
"""


def recipes(edited: list[SweepVariant]) -> dict[str, list[str]]:
    """The recipes that each edit has: named ones, and those that rules have themselves."""
    return {
        e.name: [str(d.recipe) for d in e.policy.recipes]
        + [str(r.recipe) for r in e.policy.rules if str(r.recipe) not in ("bf16", "f32", "nv")]
        for e in edited
    }


def test_ablations_remove_one_option_or_one_protecting_rule() -> None:
    edited = ablate(parse(TWO_RECIPES))
    whole = ["nvfp4(rht=wgrad, rht_size=32, sr=grad)", "mxfp4(sr=grad)"]
    assert recipes(edited) == {
        "no_rht": ["nvfp4(sr=grad)", whole[1]],  # the size goes with the transform
        "no_rht_size": ["nvfp4(rht=wgrad, sr=grad)", whole[1]],
        "no_sr_nv": ["nvfp4(rht=wgrad, rht_size=32)", whole[1]],
        "no_sr_rule_3": [whole[0], "mxfp4"],
        "no_rule_4": whole,
        "no_rule_5": whole,
    }
    without_tail, without_switch = edited[-2:]
    assert [str(r) for r in without_tail.policy.rules] == [
        "* -> bf16", "mlp.* -> nv", "head -> mxfp4(sr=grad)", "mlp.* @ fprop -> f32",
    ]  # fmt: skip
    assert without_switch.edit == "without rule 5: mlp.* @ fprop -> f32"
    assert len(without_switch.policy.rules) == 4
    assert all(not e.policy.variants for e in edited)


def test_a_grid_sets_and_removes_options() -> None:
    policy = parse(TWO_RECIPES)
    edited = recipes(make_grid(policy, parse_grid("nv.sr = grad, {grad,weights}; rht=none, fprop")))
    size = "rht_size=32"
    assert edited == {
        "nv_sr_grad-rht_none": ["nvfp4(sr=grad)", "mxfp4(sr=grad)"],
        "nv_sr_grad-rht_fprop": [f"nvfp4(rht=fprop, {size}, sr=grad)", "mxfp4(sr=grad, rht=fprop)"],
        "nv_sr_grad_weights-rht_none": ["nvfp4(sr={grad,weights})", "mxfp4(sr=grad)"],
        "nv_sr_grad_weights-rht_fprop": [
            f"nvfp4(rht=fprop, {size}, sr={{grad,weights}})",
            "mxfp4(sr=grad, rht=fprop)",
        ],
    }


def test_a_policy_can_be_a_baseline_of_its_edits() -> None:
    policy = parse("mlp.* -> nvfp4(sr=grad)")
    base = SweepVariant(name="p", policy=policy, edit="the policy")
    listed = collect_variants([load_baseline("bf16"), base], [base], ablate(policy))
    assert [(v.name, v.role) for v in listed.variants] == [
        ("bf16", "baseline"),
        ("p", "baseline"),
        ("no_sr", "edit"),
    ]
    assert listed.policy == "p"
    assert listed.omitted == ()


def test_no_variant_has_the_name_of_a_file_of_the_sweep() -> None:
    names = ("sweep.json", "report.html", ".lock")
    policies = [
        SweepVariant(name=name, policy=parse(f"seed = {n}\nmlp.* -> fp8"), edit="a policy")
        for n, name in enumerate(names)
    ]
    listed = collect_variants([], policies, [])
    assert [variant.name for variant in listed.variants] == [f"policy_{name}" for name in names]


def test_a_policy_has_a_name_that_can_be_a_folder() -> None:
    assert [policy_name(name) for name in ("a/b c.policy", "te_nvfp4", "...policy", "x/.policy")] == [
        "b c", "te_nvfp4", "policy", "policy",
    ]  # fmt: skip


def test_policies_that_mean_the_same_have_the_same_key() -> None:
    one = parse("recipe a = nvfp4(sr=grad)\nmlp.* -> a")
    assert semantic_key(one) == semantic_key(parse("mlp.* -> nvfp4(rht=none, sr=grad)  # in place"))
    assert semantic_key(one) != semantic_key(parse("seed = 1\nmlp.* -> nvfp4(sr=grad)"))
    assert semantic_key(one) != semantic_key(parse("mlp.* -> nvfp4"))


def collect(text: str, names: tuple[str, ...] = ("all",), baselines: tuple[str, ...] = ()) -> VariantList:
    policy = parse(text)
    base = SweepVariant(name="mine", policy=policy, edit="the policy mine")
    return collect_variants(
        [load_baseline(name) for name in baselines], [base], apply_variants(policy, names)
    )


def test_an_edit_that_changes_nothing_is_not_run() -> None:
    listed = collect("mlp.* -> fp8\nvariant same { mlp.* -> fp8 }\nvariant e5m2 { mlp.* -> mxfp8 }")
    # A repeated rule is another text ...
    assert [v.name for v in listed.variants] == ["mine", "same", "e5m2"]
    planned = {"mine": "a", "same": "a", "e5m2": "b"}  # ... but the same plan
    listed = drop_equal_plans(listed, {n: PlannedPolicy(digest=d) for n, d in planned.items()})
    assert [v.name for v in listed.variants] == ["mine", "e5m2"]
    assert [(o.name, o.reason) for o in listed.omitted] == [
        ("same", "does the same to this program as 'mine'")
    ]
    # A policy that does what a baseline does is that baseline for its edits.
    listed = collect("mlp.* -> fp8\nvariant a { mlp.* -> mxfp8 }", baselines=("fp8",))
    planned = {"fp8": "a", "mine": "a", "a": "b"}
    listed = drop_equal_plans(listed, {n: PlannedPolicy(digest=d) for n, d in planned.items()})
    assert ([v.name for v in listed.variants], listed.policy) == (["fp8", "a"], "fp8")
    listed = collect("recipe r = fp8\nmlp.* -> r\nvariant e5m2 { recipe r = fp8(grad=e5m2) }")
    assert [(o.name, o.reason) for o in listed.omitted] == [("e5m2", "the same policy as 'mine'")]


def test_a_policy_that_does_not_fit_the_program_ends_the_sweep_and_an_edit_is_left_out() -> None:
    listed = collect("mlp.* -> fp8\nvariant a { mpl.* -> mxfp8 }", baselines=("bf16",))
    planned = {"bf16": PlannedPolicy(digest="0"), "mine": PlannedPolicy(digest="1")}
    fitting = drop_equal_plans(listed, planned | {"a": PlannedPolicy(error="matches nothing")})
    assert [v.name for v in fitting.variants] == ["bf16", "mine"]
    assert fitting.omitted[0].reason == "cannot be applied to the program: matches nothing"
    with pytest.raises(ValueError, match=r"the baseline 'bf16' cannot be applied.*--baseline"):
        drop_equal_plans(listed, planned | {"bf16": PlannedPolicy(error="x"), "a": PlannedPolicy()})


def test_a_default_baseline_that_does_not_fit_the_program_is_left_out() -> None:
    listed = collect("mlp.* -> mxfp8\nvariant a { mlp.* -> mxfp4 }", baselines=("bf16", "fp8"))
    planned = {name: PlannedPolicy(digest=name) for name in ("bf16", "mine", "a")}
    planned["fp8"] = PlannedPolicy(error="no block\n1 | blocks.* -> fp8")
    fitting = drop_equal_plans(listed, planned, optional=["fp8"])
    assert fitting.baselines == ("bf16",)
    assert (
        fitting.omitted[0].reason
        == "cannot be applied to the program: no block; choose others with --baseline"
    )
    swept = collect(str(load("fp8")), baselines=("bf16", "fp8"))  # the default is also what the user sweeps
    with pytest.raises(ValueError, match="the baseline 'fp8' cannot be applied"):
        drop_equal_plans(swept, planned, optional=["fp8"])


def test_a_variant_with_the_name_of_a_baseline_gets_another_name() -> None:
    listed = collect("mlp.* -> mxfp8\nvariant fp8 { mlp.* -> fp8 }", baselines=("fp8",))
    assert [v.name for v in listed.variants] == ["fp8", "mine", "mine_fp8"]
    assert listed.baselines == ("fp8",)


def test_an_invalid_edit_is_not_run() -> None:
    policy = parse("* -> bf16\nmlp.* -> nvfp4(sr=grad, scale2d=weights)")
    base = SweepVariant(name="mine", policy=policy, edit="the policy mine")
    edits = [*make_grid(policy, parse_grid("rounding=ms_eden")), *ablate(policy)]
    listed = collect_variants([], [base], edits)
    assert [v.name for v in listed.variants] == ["mine", "no_sr", "no_scale2d"]
    assert "contradictory-options" in listed.omitted[0].reason


IN_THE_FAST_LANE = ("te_nvfp4", "llama_nvfp4")
NOTHING_TO_REMOVE = ("bf16", "fp8", "mxfp8")
"""Policies without an option and without a rule that protects sites."""


@pytest.mark.parametrize("name", NOTHING_TO_REMOVE)
def test_a_policy_without_anything_to_remove_says_so(name: str) -> None:
    with pytest.raises(ValueError, match="nothing to remove"):
        list(ablate(load(name)))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_THE_FAST_LANE else pytest.mark.slow)
        for name in bundled_policies()
        if name not in NOTHING_TO_REMOVE
    ],
)
def test_edits_of_bundled_policies_are_policies_and_all_differ(name: str) -> None:
    policy = load(name)
    edits = [*ablate(policy), *apply_variants(policy, ("all",))]
    base = SweepVariant(name=policy_name(name), policy=policy, edit=f"the policy {name}")
    listed = collect_variants([], [base], edits)
    assert len(listed.variants) + len(listed.omitted) == len(edits) + 1
    assert len({v.text.partition("\n\n")[2] for v in listed.variants}) == len(listed.variants)
    assert {o.reason.partition(" as ")[0] for o in listed.omitted} <= {"the same policy"}
    for variant in listed.variants:
        loaded = parse_with_diagnostics(variant.text)
        assert not loaded.diagnostics
        assert format_text(loaded.file.source.text) == variant.text
        # A policy also has variants.
        assert loaded.policy.sha256 == variant.sha256 or variant.role == "policy"
