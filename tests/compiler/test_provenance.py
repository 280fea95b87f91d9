"""What became of each equation of a loss: every equation of the rewritten loss is accounted for, once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import Phase, given, settings
from hypothesis.strategies import integers, sampled_from

import policyc
from policyc.compiler.pipeline import compile_plan
from policyc.compiler.planning.plan import Plan
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.containers import container_of
from policyc.jaxcore.jaxprs.transform import Address, Replacement
from tests.support.jaxpr_tools import struct
from tests.support.programs import applicable_rules, program

POLICIES = ("* -> mxfp8", "* @ bwd -> nvfp4(sr=grad)", "* -> fp8; layers[0] -> keep", "* -> keep")
W, X = struct(16, 16), struct(8, 16)


def check_replacements(
    original: Any, new: Any, replacements: Sequence[Replacement], changed: set[Address], outer: Address = ()
) -> Iterator[Address]:
    """Checks one jaxpr and the jaxprs inside it. Yields the addresses of the equations that were replaced."""
    old_eqns, new_eqns = jaxprs.equations(original), jaxprs.equations(new)
    assert len(old_eqns) == len(replacements)
    accounted = [eqn for replacement in replacements for eqn in replacement.eqns]
    assert [*map(id, accounted)] == [*map(id, new_eqns)]
    assert len({*map(id, accounted)}) == len(accounted)
    for number, (eqn, replacement) in enumerate(zip(old_eqns, replacements, strict=True)):
        address = (*outer, number)
        below = {a for a in changed if a[: len(address)] == address}
        if not below:
            assert len(replacement.eqns) == 1
            assert replacement.eqns[0] is eqn
        elif below == {address}:
            assert not replacement.bodies
            assert eqn not in replacement.eqns
            assert replacement.eqns[-1].outvars == eqn.outvars
            yield address
        else:
            yield from check_container(eqn, replacement, changed, address)


def check_container(
    eqn: Any, replacement: Replacement, changed: set[Address], address: Address
) -> Iterator[Address]:
    subs = jaxprs.sub_jaxprs(eqn)
    containers = [e for e in replacement.eqns if e.primitive is eqn.primitive and container_of(e)]
    if len(replacement.eqns) == 1:
        assert [scope.number for scope in replacement.bodies] == [*range(len(subs))]
        bodies = [sub.jaxpr for sub in jaxprs.sub_jaxprs(containers[0])]
    else:  # a split scan: its pieces, in the order in which they run, cover all iterations
        ranges = [s.iterations for s in replacement.bodies]
        iterations = [i for r in ranges if r is not None for i in range(r.start, r.stop)]
        assert sorted(iterations) == [*range(eqn.params["length"])]
        assert [r.size for r in ranges if r is not None] == [e.params["length"] for e in containers]
        starts = [r.start for r in ranges if r is not None]
        assert starts == sorted(starts, reverse=eqn.params["reverse"])
        bodies = [jaxprs.sub_jaxprs(e)[0].jaxpr for e in containers]
    assert len(bodies) == len(replacement.bodies)
    for scope, body in zip(replacement.bodies, bodies, strict=True):
        inside = subs[scope.number].jaxpr
        if scope.transformed.replacements:
            yield from check_replacements(
                inside, body, scope.transformed.replacements, changed, (*address, scope.number)
            )
        else:
            assert [*map(id, jaxprs.equations(body))] == [*map(id, jaxprs.equations(inside))]


def check_plan(plan: Plan) -> None:
    rewritten = compile_plan(plan)
    decisions = plan.decisions(plan.phases[0])
    changed = {
        site.address
        for site in plan.sites
        if not site.opaque and any(decisions[site.address, la].recipe is not None for la in site.layers())
    }
    if not changed:
        assert rewritten.jaxpr is plan.sites.jaxpr
        assert rewritten.replacements == ()
        return
    replaced = check_replacements(plan.sites.jaxpr, rewritten.jaxpr, rewritten.replacements, changed)
    assert {*replaced} == changed


@settings(max_examples=30, phases=[Phase.generate], deadline=None)
@given(integers(0, 2**32 - 1), integers(2, 5), sampled_from(POLICIES))
def test_every_equation_of_a_random_program_is_accounted_for(seed: int, depth: int, policy: str) -> None:
    random_program = program(seed, depth)
    policy = applicable_rules(random_program, policy)
    check_plan(policyc.plan(policy, random_program.loss, *random_program.args))


def test_a_shared_quantization_names_its_readers() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ p["q"]) * (x @ p["k"]) * (x @ p["v"]))

    plan = policyc.plan("* -> mxfp8; v -> nvfp4", loss, dict.fromkeys("qkv", W), X)
    check_plan(plan)
    numbers = {s.name: s.address[0] for s in plan.sites}
    first = compile_plan(plan).replacements[numbers["q"]]
    assert first.readers == (numbers["q"], numbers["k"])
    shared = first.eqns[: first.added]
    assert any(jaxprs.primitive_name(e).endswith("_quantize") for e in shared)
    assert compile_plan(plan).replacements[numbers["v"]].added == 0
