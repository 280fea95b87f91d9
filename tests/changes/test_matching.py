"""Matches of equations: each equation of either side is in one match, and the matches turn before into after."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import Phase, given, settings
from hypothesis.strategies import integers, sampled_from
from jax import lax

import policyc
from policyc.changes.build import build_diff
from policyc.changes.graph import build_graph, children_of
from policyc.changes.matching import Match, MatchedLoss, Reason, match_losses
from policyc.compiler.matching.execution import ExecutionOptions
from policyc.compiler.planning.plan import Plan, make_plan
from policyc.compiler.rewriting.hoist import RewrittenLoss
from policyc.compiler.rewriting.rewrite import rewrite
from policyc.hardware.llama_step import Sizes, plan_step
from policyc.hardware.mesh import MeshShape
from policyc.hardware.training_step import TrainingStep
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.language.loader import parse
from policyc.language.policy import Policy
from tests.support.jaxpr_tools import struct
from tests.support.layered_models import GATED, REMAT, STACKED, UNROLLED, gated_model, model
from tests.support.layered_models import X as BATCH
from tests.support.parallel_programs import SHARDED_LOSSES
from tests.support.programs import applicable_rules, program

POLICIES = ("* -> keep", "* -> mxfp8", "* @ bwd -> nvfp4(sr=grad)", "* -> fp8; layers[0] -> keep")
W, X = struct(16, 16), struct(8, 16)


def rewritten(plan: Plan, policy: str) -> RewrittenLoss:
    other = make_plan(parse(policy), plan.sites)
    return rewrite(plan.sites, other.decisions(other.phases[0]))


def match_policies(plan: Plan, before: str, after: str) -> tuple[RewrittenLoss, RewrittenLoss, MatchedLoss]:
    sides = rewritten(plan, before), rewritten(plan, after)
    return *sides, match_losses(plan.sites.jaxpr, *sides)


# ---- applying a diff


def apply_matches(before: Any, after: Any, matches: Sequence[Match]) -> Any:
    """The jaxpr that the matches make of `before`. `after` only gives its inputs, results and containers.

    An equation that did not change comes from `before`. Another one comes from its match, and the jaxprs in it from
    the jaxprs in the equation before and the matches inside.
    """
    remaining = iter(jaxprs.equations(before))
    eqns = []
    for match in matches:
        old = [next(remaining) for _ in match.before]
        assert all(jaxprs.primitive_name(a) == jaxprs.primitive_name(b)
                   for a, b in zip(old, match.before, strict=True))  # fmt: skip
        if match.reason is None:
            eqns += old
        elif match.reason is Reason.ENTERED:
            eqns.append(apply_inside(old[0], match))
        else:
            if match.reason is Reason.SPLIT:
                check_pieces(match)
            eqns += match.after
    assert next(remaining, None) is None
    return jaxprs.replace_equations(after, eqns)


def apply_inside(old: Any, match: Match) -> Any:
    (new,) = match.after
    pairs = zip(jaxprs.sub_jaxprs(old), jaxprs.sub_jaxprs(new), match.inside, strict=True)
    return jaxprs.replace_sub_jaxprs(
        new, [(sub, apply_matches(was.jaxpr, sub.jaxpr, inner.matches)) for was, sub, inner in pairs]
    )


def check_pieces(match: Match) -> None:
    """The matches inside turn the body of each scan before into that of the scan after, and cover all iterations."""
    before, after = bodies_by_iteration(match.before), bodies_by_iteration(match.after)
    covered = []
    for inner in match.inside:
        assert inner.iterations is not None
        for iteration in range(inner.iterations.start, inner.iterations.stop):
            covered.append(iteration)
            applied = apply_matches(before[iteration], after[iteration], inner.matches)
            assert jaxprs.fingerprint(applied) == jaxprs.fingerprint(after[iteration])
    assert sorted(covered) == [*range(len(before))]


def bodies_by_iteration(eqns: Sequence[Any]) -> list[Any]:
    """The jaxpr that each iteration runs, where scans run one after another."""
    scans = [eqn for eqn in eqns if jaxprs.primitive_name(eqn) == "scan"]
    if scans[0].params["reverse"]:
        scans.reverse()
    return [jaxprs.sub_jaxprs(eqn)[0].jaxpr for eqn in scans for _ in range(eqn.params["length"])]


def side_equations(matches: Sequence[Match], side: str) -> Iterator[Any]:
    """The equations of one side in the matches of one jaxpr."""
    for match in matches:
        yield from match.after if side == "after" else match.before


def check_accounting(jaxpr: Any, matches: Sequence[Match], side: str) -> None:
    """Every equation of a side is in one match, and in its order."""
    matched = [*side_equations(matches, side)]
    assert [*map(id, matched)] == [*map(id, jaxprs.equations(jaxpr))]


def check_diff(plan: Plan, before: str, after: str) -> None:
    old, new, matched = match_policies(plan, before, after)
    check_accounting(old.jaxpr, matched.loss.matches, "before")
    check_accounting(new.jaxpr, matched.loss.matches, "after")
    applied = apply_matches(old.jaxpr, new.jaxpr, matched.loss.matches)
    assert jaxprs.fingerprint(applied) == jaxprs.fingerprint(new.jaxpr)
    if before == after:
        assert not any(match.reason for match in matched.all_matches())
    check_graph(plan, before, after, (len(jaxprs.equations(old.jaxpr)), len(jaxprs.equations(new.jaxpr))))


def check_graph(plan: Plan, before: str, after: str, equations: tuple[int, int]) -> None:
    """The graph has every equation of both losses once, where a scope counts for all layers that it stands for."""
    step = TrainingStep(plan=make_plan(parse(after), plan.sites))
    graph = build_graph(build_diff(step, before=parse(before)))
    counts = Counter[str]()

    def count(node: int, layers: int) -> None:
        for child in children_of(graph, node):
            data = graph.nodes[child]
            if data["type"] == "equation":
                counts[data["side"]] += layers
            elif data["kind"] in ("scope", "layers"):  # not what containers run, nor what is hoisted
                count(child, layers * sum(last - first + 1 for first, last in data["members"] or ((0, 0),)))

    count(0, 1)
    assert (counts["both"] + counts["before"], counts["both"] + counts["after"]) == equations


@pytest.mark.any_jax
@settings(max_examples=15, phases=[Phase.generate], deadline=None)
@given(integers(0, 2**32 - 1), integers(2, 5), sampled_from(POLICIES), sampled_from(POLICIES))
def test_the_diff_of_any_program_is_exact(seed: int, depth: int, before: str, after: str) -> None:
    random_program = program(seed, depth)
    plan = policyc.plan("* -> keep", random_program.loss, *random_program.args)
    check_diff(plan, *(applicable_rules(random_program, policy) for policy in (before, after)))


@pytest.mark.any_jax
@pytest.mark.parametrize("make", SHARDED_LOSSES, ids=lambda f: f.__name__)
def test_the_diff_of_a_sharded_program_is_exact(make: Any) -> None:
    """shard_map, ragged products, sharded arrays and explicit shardings."""
    sharded = make()
    with contextlib.nullcontext() if sharded.mesh is None else jax.set_mesh(sharded.mesh):
        plan = policyc.plan(sharded.policy, sharded.loss, *sharded.args)
        check_diff(plan, "* -> keep", sharded.policy)


@pytest.mark.parametrize("remat", REMAT)
@pytest.mark.parametrize(
    ("make", "params"),
    [(model, STACKED), (model, UNROLLED), (gated_model, GATED)],
    ids=["scan", "list", "gated"],
)
def test_the_diff_of_a_layered_program_is_exact(make: Any, params: Any, remat: str) -> None:
    plan = policyc.plan("* -> mxfp8", make(remat), params, BATCH[0])
    check_diff(plan, "* -> keep", "* -> mxfp8; layers[-1] -> nvfp4(sr=grad)")


@pytest.mark.any_jax
@pytest.mark.parametrize("unrolled", [False, True], ids=["scan", "unrolled"])
def test_the_diff_of_the_bundled_llama_is_exact(unrolled: bool) -> None:
    plan = plan_step(Policy(), "tiny", MeshShape(), Sizes(unrolled=unrolled), ExecutionOptions()).plan
    check_diff(plan, "* -> keep", "mlp.* -> mxfp8; layers[-1] -> nvfp4(sr=grad); lm_head -> bf16")


# ---- reasons


def attention(p: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(x @ p["q"]) * (x @ p["k"]) * (x @ p["v"]))


ATTENTION = dict.fromkeys("qkv", W)


def reasons(matched: MatchedLoss) -> list[str]:
    return [str(m.reason) for m in matched.all_matches() if m.reason]


def test_a_shared_quantization_is_added_for_its_readers() -> None:
    plan = policyc.plan("* -> keep", attention, ATTENTION, X)
    _, _, matched = match_policies(plan, "* -> keep", "* -> mxfp8; v -> keep")
    shared = [m for m in matched.all_matches() if m.reason is Reason.SHARED]
    names = {site.address: site.name for site in plan.sites}
    assert [[names[a] for a in m.readers] for m in shared] == [["q", "k"]]
    assert not shared[0].before
    assert reasons(matched) == ["shared", "replaced", "replaced"]


def test_only_what_differs_between_two_policies_is_shown() -> None:
    plan = policyc.plan("* -> keep", attention, ATTENTION, X)
    _, _, matched = match_policies(plan, "* -> fp8", "* -> fp8; v -> mxfp8")
    replaced = [m for m in matched.all_matches() if m.reason is Reason.REPLACED]
    names = {site.address: site.name for site in plan.sites}
    assert [names[m.address] for m in replaced] == ["v"]


def scanned(p: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["layers"])[0])


SCANNED = {"layers": struct(4, 16, 16)}


def test_scans_that_two_policies_split_differently_are_compared_by_layers() -> None:
    plan = policyc.plan("* -> keep", scanned, SCANNED, X)
    _, _, matched = match_policies(plan, "layers[0] -> fp8", "layers[:3] -> fp8")
    (split,) = [m for m in matched.all_matches() if m.reason is Reason.SPLIT]
    ranges = [(i.iterations.start, i.iterations.stop) for i in split.inside if i.iterations]
    changed = [any(m.reason for m in inner.matches) for inner in split.inside]
    assert [*zip(ranges, changed, strict=True)] == [((0, 1), False), ((1, 3), True), ((3, 4), False)]
