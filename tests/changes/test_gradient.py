"""Gradients before and after: tags change no equation, and each equation is in one match, by site and product."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import Phase, given, settings
from hypothesis.strategies import integers, sampled_from
from jax import lax

import policyc
from policyc.changes.graph import children_of
from policyc.changes.matching import MatchedLoss, Reason
from policyc.compiler.planning.plan import Plan
from policyc.jaxcore.jaxprs import reading as jaxprs
from tests.support.diff_checks import check_gradient, match_plans
from tests.support.jaxpr_tools import struct
from tests.support.programs import applicable_rules, program

POLICIES = ("* -> mxfp8", "* @ bwd -> nvfp4(sr=grad)", "* -> fp8; layers[0] -> keep")
W, X = struct(16, 16), struct(8, 16)


@pytest.mark.slow
@settings(max_examples=8, phases=[Phase.generate], deadline=None)
@given(integers(0, 2**32 - 1), integers(2, 4), sampled_from(POLICIES))
def test_the_gradient_of_any_program_is_matched(seed: int, depth: int, policy: str) -> None:
    random_program = program(seed, depth)
    policy = applicable_rules(random_program, policy)
    check_gradient(policyc.plan(policy, random_program.loss, *random_program.args))


# ---- products


def square(p: Any, x: jax.Array) -> jax.Array:
    """All operands have the same shape, so that a product cannot be told by its shape."""
    h = jnp.tanh(x @ p["first"])
    return jnp.sum(jnp.tanh(p["left"] @ h))


SQUARE = {"first": W, "left": W}


def replaced(matched: MatchedLoss, plan: Plan) -> list[tuple[str, str]]:
    names = {site.address: site.name for site in plan.sites}
    return [
        (names[m.address], m.product)
        for m in matched.all_matches()
        if m.before and any(jaxprs.primitive_name(eqn) == "scaled_gemm" for eqn in m.after)
    ]


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_only_the_product_that_a_rule_takes_is_replaced(gemm: str) -> None:
    plan = policyc.plan(f"left @ {gemm} -> mxfp8", square, SQUARE, W)
    assert replaced(match_plans(plan), plan) == [("left", gemm)]


def test_the_weight_may_be_the_left_operand() -> None:
    """dgrad of a weight on the left contracts the weight: it reads the weight's quantized codes."""
    plan = policyc.plan("* -> mxfp8", square, SQUARE, W)
    matched = match_plans(plan)
    operands = {}
    for match in matched.all_matches():
        for eqn in match.after:
            if jaxprs.primitive_name(eqn) == "mxfp8_quantize" and match.product:
                operands.setdefault(match.product, set()).update(eqn.params["operands"])
    assert operands["wgrad"] <= {"wgrad.lhs", "wgrad.rhs", "wgrad.dy"}
    assert operands["dgrad"] <= {"dgrad.lhs", "dgrad.rhs", "dgrad.dy"}


def test_a_split_scan_of_a_gradient_is_compared_by_layers() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["layers"])[0])

    plan = policyc.plan("* -> mxfp8; layers[0] -> keep", loss, {"layers": struct(4, 16, 16)}, X)
    split = [m for m in match_plans(plan).all_matches() if m.reason is Reason.SPLIT]
    pieces = [
        [(i.iterations.start, i.iterations.stop) for i in m.inside if i.iterations is not None] for m in split
    ]
    assert pieces == [[(0, 1), (1, 4)], [(1, 4), (0, 1)]]  # forward, then backward from the last layer
    for match in split:
        changed = [any(m.reason for m in inner.matches) for inner in match.inside]
        kept = [i.iterations is not None and i.iterations.start == 0 for i in match.inside]
        assert [not c for c in changed] == kept


def test_two_policies_with_hoisted_weights() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        body = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
        return jnp.sum(lax.scan(body, x, p["layers"])[0])

    plan = policyc.plan("* -> mxfp8", loss, {"layers": struct(4, 16, 16)}, X)
    assert any(m.reason for m in match_plans(plan, "* -> fp8").all_matches())
    assert not any(m.reason for m in match_plans(plan, "* -> mxfp8").all_matches())


def test_branches_that_share_a_jaxpr_are_told_apart() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        def branch(w: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.tanh(x @ w)

        return jnp.sum(lax.cond(x[0, 0] > 0, branch, branch, p["w"], x))

    plan = policyc.plan("* -> mxfp8", loss, {"w": W}, X)
    assert len(plan.sites) == 2
    check_gradient(plan)


def test_layers_that_share_a_jaxpr_are_told_apart() -> None:
    """JAX traces a function under `jax.checkpoint` or `jax.jit` once for all layers that call it."""
    inner = jax.jit(lambda h, w: jnp.sin(h @ w))
    block = jax.checkpoint(lambda h, up, down: jnp.tanh(inner(h @ up, down)))

    def loss(p: Any, x: jax.Array) -> jax.Array:
        for layer in p["layers"]:
            x = block(x, layer["up"], layer["down"])
        return jnp.sum(x)

    plan = policyc.plan("layers[1:3] -> mxfp8", loss, {"layers": [{"up": W, "down": W}] * 4}, W)
    assert len({id(jaxprs.sub_jaxprs(eqn)[0].jaxpr) for eqn in plan.sites.jaxpr.eqns[:4]}) == 1
    check_gradient(plan)
    names = {site.address: f"{site.name} {number // 2}" for number, site in enumerate(plan.sites)}
    changed = {
        (names[m.address], m.product)
        for m in match_plans(plan).all_matches()
        if m.reason is Reason.REPLACED and m.before and m.after
    }
    expected = {(f"layers[{n}].{name} {n}", gemm) for n in (1, 2) for name in ("up", "down")
                for gemm in ("fprop", "dgrad", "wgrad")}  # fmt: skip
    assert changed == expected


def test_what_is_moved_out_of_layers_stays_in_their_scopes() -> None:
    """A weight in a remat is quantized once per step, before all layers. It is shown under its layer."""
    block = jax.checkpoint(lambda h, w: jnp.tanh(h @ w.astype(h.dtype)))

    def loss(p: Any, x: jax.Array) -> jax.Array:
        x = x.astype(jnp.bfloat16) @ p["embed"].astype(jnp.bfloat16)
        for number, w in enumerate(p["layers"]):
            with jax.named_scope(f"layers_{number}"):
                x = block(x, w)
        return jnp.sum(x)

    graph = policyc.diff("layers -> mxfp8", loss, {"embed": W, "layers": [W] * 4}, X, grad=True).graph
    forward = children_of(graph, 0)[0]
    scopes = [graph.nodes[n] for n in children_of(graph, forward) if graph.nodes[n]["type"] == "scope"]
    assert [(n["name"], n["members"]) for n in scopes] == [("layers", ((0, 3),)), ("layers", ((0, 3),))]
