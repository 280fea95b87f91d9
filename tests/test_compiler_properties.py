"""What must hold of every program: keeping changes nothing, splitting changes nothing, and a plan is what runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policyc
from policyc import jaxprs
from policyc import rewrite as rewriting
from policyc.recipes import Gemm
from policyc.sites import Site
from tests.programs import program

SEEDS = [
    pytest.param(seed, marks=() if seed in (0, 3, 5) else pytest.mark.slow, id=str(seed)) for seed in range(7)
]
KEEPING = ["* -> keep", "* @ fprop -> keep; layers[-1:] -> keep", "nothing.here -> nvfp4"]


def same(a: Any, b: Any) -> bool:
    return all(
        np.array_equal(np.asarray(x), np.asarray(y))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_keeping_everything_changes_nothing(seed):
    made = program(seed)
    policy = KEEPING[seed % len(KEEPING)]
    plain = jax.jit(jax.value_and_grad(made.loss))
    kept = jax.jit(jax.value_and_grad(policyc.apply(policy, made.loss)))
    args = (made.params, made.batch)
    assert str(jax.make_jaxpr(policyc.apply(policy, made.loss))(*args)) == str(
        jax.make_jaxpr(made.loss)(*args)
    )
    assert hlo(plain, args) == hlo(kept, args)
    assert same(plain(*args), kept(*args))
    with policyc.active(policy):
        assert same(plain(*args), kept(*args))


def hlo(f: Any, args: Any) -> str:
    text = f.lower(*args).as_text()
    return text.partition("\n")[2]  # the first line has the function's name


@pytest.mark.parametrize("seed", SEEDS)
def test_a_split_scan_equals_the_unsplit_one(seed, monkeypatch):
    made = program(seed)
    args = (made.params, made.batch)
    policy = "* -> fp8; layers -> nvfp4"

    def run() -> Any:
        return jax.jit(jax.value_and_grad(policyc.apply(policy, made.loss)))(*args)

    whole = run()
    runs = rewriting._Rewriter._runs
    split = Counter()

    def one_by_one(self, stack, inside, fixed):
        found = [
            rewriting.Run(i, i + 1) for r in runs(self, stack, inside, fixed) for i in range(r.start, r.stop)
        ]
        split[len(found)] += 1
        return found[:1] and [rewriting.Run(0, found[0].stop), *_rest(found)]

    monkeypatch.setattr(rewriting._Rewriter, "_runs", one_by_one)
    rewriting._known.clear()
    apart = run()
    rewriting._known.clear()
    if not any(s.stacks for s in policyc.plan(policy, made.loss, *args).sites):
        assert not split
    assert same(whole, apart)


def _rest(found):
    """Two layers and then the others, where there are so many."""
    return found[1:] if len(found) < 4 else [found[1], rewriting.Run(found[2].start, found[-1].stop)]


def products_found(closed: Any) -> Counter:
    """The quantized products in a jaxpr, by the scope of the GEMM and by product."""
    found: Counter = Counter()
    operands = {"fprop.lhs": Gemm.FPROP, "dgrad.dy": Gemm.DGRAD, "wgrad.dy": Gemm.WGRAD}
    for stack, eqn in scoped(closed, ()):
        gemm = operands.get(str(eqn.params.get("operand")))
        if gemm is not None:
            (name,) = [s for s in stack if s.startswith("g") and s[1:].isdigit()]
            found[name, gemm] += 1
    return found


def scoped(held: Any, outer: tuple[str, ...]) -> Any:
    for eqn in jaxprs.body_eqns(held):
        stack = (*outer, *jaxprs.scopes(eqn))
        yield stack, eqn
        for body in jaxprs.bodies(eqn):
            yield from scoped(body.held, stack)


def scope_of(site: Site) -> str:
    (name,) = [str(n) for n in site.scope.path if n.text.startswith("g") and n.text[1:].isdigit()]
    return name


def without_dead_code(closed: Any) -> Any:
    """What is left of a jaxpr when nothing is computed in vain."""
    from jax._src.interpreters import partial_eval as pe

    opened, _ = pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return opened


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", ["* -> nvfp4", "* @ bwd -> fp8; layers[0] @ dgrad -> keep"])
def test_the_plan_is_what_the_gradient_runs(seed, policy):
    made = program(seed)
    args = (made.params, made.batch)
    plan = policyc.plan(policy, made.loss, *args)
    planned = set()
    for site in plan.sites:
        for layer in site.layers():
            recipe = plan.decisions()[site.address, layer].recipe
            if recipe is not None:
                planned |= {(scope_of(site), g) for g in site.products if recipe.bits(g)}
    gradient = jax.make_jaxpr(jax.grad(policyc.apply(policy, made.loss)))(*args)
    found = products_found(without_dead_code(gradient))
    assert set(found) == planned
    left = [
        e for _, e in scoped(without_dead_code(gradient), ()) if jaxprs.primitive_name(e) == "dot_general"
    ]
    if policy == "* -> nvfp4":
        assert not left


def test_products_are_counted_once_where_nothing_is_computed_twice():
    def loss(p, x):
        for i in range(3):
            with jax.named_scope(f"g{i}"):
                x = jnp.tanh(x @ p[i])
        return x.sum()

    p, x = [jnp.ones((16, 16))] * 3, jnp.ones((4, 16))
    gradient = without_dead_code(jax.make_jaxpr(jax.grad(policyc.apply("* -> nvfp4", loss)))(p, x))
    expected = {(f"g{i}", g): 1 for i in range(3) for g in Gemm}
    del expected["g0", Gemm.DGRAD]  # the batch has no gradient
    assert products_found(gradient) == expected
