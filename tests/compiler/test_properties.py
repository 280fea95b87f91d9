"""What must hold of every program: keeping changes nothing, splitting changes nothing, and a plan is what runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis.strategies import integers

import policyc
from policyc.compiler.sites import Site
from policyc.jaxcore import jaxprs, transform
from policyc.jaxcore.containers import IterationRange
from policyc.jaxcore.transform import Transform
from policyc.language.recipes import Gemm
from tests.support.programs import Program, program

pytestmark = pytest.mark.usefixtures("quick_compile")

SEEDS = [pytest.param(seed, id=str(seed)) for seed in (0, 3)]
DEEP = settings(max_examples=12, phases=[Phase.generate], print_blob=True)
seeds = integers(0, 2**32 - 1)
KEEPING = ["* -> keep", "* @ fprop -> keep; layers[-1:] -> keep", "nothing.here -> nvfp4"]


def same(a: Any, b: Any) -> bool:
    return all(
        np.array_equal(np.asarray(x), np.asarray(y))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_keeping_everything_changes_nothing(seed):
    keeping(seed)


@pytest.mark.slow
@DEEP
@given(seeds)
def test_keeping_everything_changes_nothing_of_any_program(seed):
    keeping(seed)


def keeping(seed: int) -> None:
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
def test_a_split_scan_equals_the_unsplit_one(seed):
    splitting(seed)


@pytest.mark.slow
@DEEP
@given(seeds)
def test_a_split_scan_equals_the_unsplit_one_of_any_program(seed):
    splitting(seed)


def splitting(seed: int) -> None:
    made = program(seed)
    args = (made.params, made.batch)
    policy = "* -> fp8; layers -> mxfp4(sr=grad)"  # whose random bits are each layer's own

    def run() -> Any:
        return jax.jit(jax.value_and_grad(policyc.apply(policy, made.loss)))(*args)

    whole = run()
    ranges = Transform.iteration_ranges
    split = Counter()

    def one_by_one(self, scan, position):
        iterations = [
            IterationRange(i, i + 1) for r in ranges(self, scan, position) for i in range(r.start, r.stop)
        ]
        if self.is_stack(position.address):
            split[len(iterations)] += 1
        return iterations[:1] and [IterationRange(0, iterations[0].stop), *_rest(iterations)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transform, "iteration_ranges", one_by_one)
        transform._transformed.clear()
        apart = run()
        transform._transformed.clear()
    if not any(s.stacks for s in policyc.plan(policy, made.loss, *args).sites):
        assert not split
    assert same(whole, apart)


def _rest(found):
    """Two layers and then the others, where there are so many."""
    return found[1:] if len(found) < 4 else [found[1], IterationRange(found[2].start, found[-1].stop)]


def products_found(closed: Any) -> Counter:
    """The quantized products in a jaxpr, by the scope of the GEMM and by product."""
    found: Counter = Counter()
    for stack, eqn in scoped(closed, ()):
        if jaxprs.primitive_name(eqn) == "scaled_gemm":
            (name,) = [s for s in stack if s.startswith("g") and s[1:].isdigit()]
            (gemm,) = [s.partition(".")[0] for s in stack if s.partition(".")[0] in set(Gemm)]
            found[name, Gemm(gemm)] += 1
    return found


def scoped(held: Any, outer: tuple[str, ...]) -> Any:
    for eqn in jaxprs.equations(held):
        stack = (*outer, *jaxprs.name_scopes(eqn))
        yield stack, eqn
        for body in jaxprs.sub_jaxprs(eqn):
            yield from scoped(body.jaxpr, stack)


def scope_of(site: Site) -> str:
    (name,) = [str(n) for n in site.scope.path if n.text.startswith("g") and n.text[1:].isdigit()]
    return name


def without_dead_code(closed: Any) -> Any:
    """What is left of a jaxpr when nothing is computed in vain."""
    from jax._src.interpreters import partial_eval as pe

    opened, _ = pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return opened


def check_counts(made: Program, policy: str) -> None:
    """Every product of the plan is in the gradient, by site and by product, as often as in the original's gradient.

    A backward product stands there once, however deep in scans, branches and remats its site is. A forward one stands
    there once, and once more where a remat computes it again: the original says where.
    """
    args = (made.params, made.batch)
    plan = policyc.plan(policy, made.loss, *args)
    original = by_scope(without_dead_code(jax.make_jaxpr(jax.grad(made.loss))(*args)), "dot_general")
    gradient = without_dead_code(jax.make_jaxpr(jax.grad(policyc.apply(policy, made.loss)))(*args))
    expected: Counter = Counter()
    for site in plan.sites:
        backward = site.products - {Gemm.FPROP}
        expected.update({(scope_of(site), g): 1 for g in backward})
        expected[scope_of(site), Gemm.FPROP] = original[scope_of(site)] - len(backward)
    assert products_found(gradient) == expected
    assert by_scope(gradient, "scaled_gemm") == original
    assert not by_scope(gradient, "dot_general")


def by_scope(closed: Any, primitive: str) -> Counter:
    """How often a primitive is in a jaxpr, by the scope of the GEMM it belongs to."""
    found: Counter = Counter()
    for stack, eqn in scoped(closed, ()):
        names = [s for s in stack if s.startswith("g") and s[1:].isdigit()]
        if jaxprs.primitive_name(eqn) == primitive and names:
            found[names[0]] += 1
    return found


@settings(DEEP, max_examples=6)
@given(seeds)
def test_products_are_counted(seed):
    check_counts(program(seed), "* -> nvfp4")


@pytest.mark.slow
@settings(DEEP, max_examples=100)
@given(seeds, integers(2, 5))
def test_products_are_counted_in_any_program(seed, depth):
    check_counts(program(seed, depth), "* -> nvfp4")


@settings(DEEP, max_examples=4)
@given(seeds)
def test_layers_and_products_apart(seed):
    """Which products run where layers are treated differently, and some are kept."""
    made = program(seed)
    args = (made.params, made.batch)
    policy = "* @ bwd -> fp8; layers[0] @ dgrad -> keep"
    plan = policyc.plan(policy, made.loss, *args)
    planned = set()
    for site in plan.sites:
        for layer in site.layers():
            recipe = plan.decisions()[site.address, layer].recipe
            if recipe is not None:
                planned |= {(scope_of(site), g) for g in site.products if recipe.bits(g)}
    gradient = jax.make_jaxpr(jax.grad(policyc.apply(policy, made.loss)))(*args)
    assert set(products_found(without_dead_code(gradient))) == planned
