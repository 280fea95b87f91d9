"""Checks that hold for the diff of any gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from policyc.changes.gradient import match_tagged, tagged_gradient
from policyc.changes.matching import Match, MatchedLoss, Reason
from policyc.compiler.planning.plan import Plan, make_plan
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.language.loader import parse
from policyc.language.policy import Policy
from tests.support.jaxpr_tools import without_dead_code


def plain_gradient(plan: Plan) -> Any:
    """The jaxpr of the gradient of a plan's loss, by `jax.vjp` alone."""
    closed, inputs = plan.sites.jaxpr, plan.sites.loss.differentiated_inputs

    def gradient(*values: Any) -> Any:
        constants = values[len(closed.jaxpr.invars) :]
        arguments = [*values[: len(closed.jaxpr.invars)]]

        def loss(*replaced: Any) -> Any:
            for number, value in zip(inputs, replaced, strict=True):
                arguments[number] = value
            return jax.core.eval_jaxpr(closed.jaxpr, constants, *arguments)

        outputs, pullback = jax.vjp(loss, *(arguments[number] for number in inputs))
        return outputs, pullback([jnp.full_like(o, 1.0) for o in outputs])

    variables = [*closed.jaxpr.invars, *closed.jaxpr.constvars]
    return without_dead_code(jax.make_jaxpr(gradient)(*(v.aval for v in variables)))


def match_plans(plan: Plan, policy: str = "") -> MatchedLoss:
    """Matches the gradients of a plan's loss under `policy` (default: none) and under the plan."""
    before = make_plan(parse(policy) if policy else Policy(), plan.sites)
    sides = [tagged_gradient(p, p.decisions(p.phases[0])) for p in (before, plan)]
    matched = match_tagged(sides[0], sides[1], plan.sites)
    check_level(matched.loss.matches, sides[0], sides[1])
    return matched


def check_level(matches: tuple[Match, ...], before: Any, after: Any) -> None:
    """Asserts that every equation of both jaxprs is in exactly one match, in nested jaxprs too."""
    for side, jaxpr in (("before", before), ("after", after)):
        matched = Counter(id(eqn) for match in matches for eqn in getattr(match, side))
        assert matched == Counter(id(eqn) for eqn in jaxprs.equations(jaxpr))
    for match in matches:
        if match.reason is Reason.ENTERED:
            subs = zip(*(jaxprs.sub_jaxprs(e) for e in (*match.before, *match.after)), strict=True)
            for inner, (old, new) in zip(match.inside, subs, strict=True):
                check_level(inner.matches, old.jaxpr, new.jaxpr)


def check_gradient(plan: Plan) -> None:
    before = make_plan(Policy(), plan.sites)
    tagged = tagged_gradient(before, before.decisions(before.phases[0]))
    assert jaxprs.fingerprint(tagged) == jaxprs.fingerprint(plain_gradient(plan))
    matched = match_plans(plan)
    products = {
        (m.address, m.product)
        for m in matched.all_matches()
        if m.reason is Reason.REPLACED and m.before and m.after and m.product
    }
    decisions = plan.decisions(plan.phases[0])
    planned = {
        (site.address, gemm)
        for site in plan.sites
        for layer in site.layers()
        for gemm in site.products
        if (recipe := decisions[site.address, layer].recipe) is not None and recipe.bits(gemm)
    }
    unpaired = {*unpaired_sites(plan, matched)}
    assert all((address, gemm) in products or address in unpaired for address, gemm in planned)


def unpaired_sites(plan: Plan, matched: MatchedLoss) -> Iterator[Any]:
    """The sites in containers of which JAX derives different numbers of copies: they are shown as removed and added."""
    for match in matched.all_matches():
        if match.reason is Reason.DERIVED and match.address:
            depth = len(match.address)
            yield from (site.address for site in plan.sites if site.address[:depth] == match.address)
