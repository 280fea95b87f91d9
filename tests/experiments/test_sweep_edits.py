"""Edits of a policy for a sweep. Their texts are in tests/ui/commands/sweep_dry_run.txt."""

from __future__ import annotations

import pytest

from policyc import parse
from policyc.experiments.sweep.edits import ablate, apply_variants
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
    with pytest.raises(ValueError, match=r"the baseline 'bf16' cannot be applied.*--vs"):
        drop_equal_plans(listed, planned | {"bf16": PlannedPolicy(error="x"), "a": PlannedPolicy()})


def test_a_default_baseline_that_does_not_fit_the_program_is_left_out() -> None:
    listed = collect("mlp.* -> mxfp8\nvariant a { mlp.* -> mxfp4 }", baselines=("bf16", "fp8"))
    planned = {name: PlannedPolicy(digest=name) for name in ("bf16", "mine", "a")}
    planned["fp8"] = PlannedPolicy(error="no block\n1 | blocks.* -> fp8")
    fitting = drop_equal_plans(listed, planned, optional=["fp8"])
    assert fitting.baselines == ("bf16",)
    assert fitting.omitted[0].reason == "cannot be applied to the program: no block; choose others with --vs"
    swept = collect(str(load("fp8")), baselines=("bf16", "fp8"))  # the default is also what the user sweeps
    with pytest.raises(ValueError, match="the baseline 'fp8' cannot be applied"):
        drop_equal_plans(swept, planned, optional=["fp8"])


IN_THE_FAST_LANE = ("te_nvfp4", "llama_nvfp4")
NOTHING_TO_REMOVE = ("bf16", "fp8", "fp8_with_head", "mxfp8")
"""Policies without an option and without a rule that protects sites."""


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
