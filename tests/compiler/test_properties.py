"""Properties of every program: keeping changes nothing, and a plan is what runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis.strategies import integers

import policyc
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.language.recipes import Gemm
from tests.support.jaxpr_tools import (
    count_by_scope,
    equations_with_scopes,
    gemm_scope,
    is_gemm_scope,
    lowered_text,
    without_dead_code,
)
from tests.support.programs import Program, program, with_rule_if_applicable

DEEP = settings(phases=[Phase.explicit, Phase.generate], print_blob=True)
seeds = integers(0, 2**32 - 1)
NOTHING = "nothing.here -> nvfp4 expect 0"  # so that it is traced: policies that can only keep are not
KEEPING = ["* -> keep", "* @ fprop -> keep; layers[-1:] -> keep", "other.nothing -> mxfp8 expect 0"]


# ---- keeping


@settings(DEEP, max_examples=4)
@given(seeds)
@example(0)
@example(3)
def test_keeping_everything_changes_nothing(seed: int) -> None:
    """The program that is lowered is the same, to the letter, so that nothing has to be compiled."""
    random_program = program(seed)
    loss, args = random_program.loss, random_program.args
    *rules, last = KEEPING[seed % len(KEEPING)].split("; ")
    policy = f"{with_rule_if_applicable(random_program, rules[0], last) if rules else last}; {NOTHING}"
    assert str(jax.make_jaxpr(policyc.apply(policy, loss))(*args)) == str(jax.make_jaxpr(loss)(*args))
    plain, kept = (
        lowered_text(jax.jit(jax.value_and_grad(f)).lower(*args)) for f in (loss, policyc.apply(policy, loss))
    )
    with policyc.active(policy):
        kept_by_session = lowered_text(jax.jit(jax.value_and_grad(loss)).lower(*args))
    assert plain == kept == kept_by_session


# ---- the plan and the gradient


def quantized_products(jaxpr: Any) -> Counter[tuple[str, Gemm]]:
    """The quantized products in a jaxpr, by the scope of the GEMM and by product."""
    counts: Counter[tuple[str, Gemm]] = Counter()
    for scopes, eqn in equations_with_scopes(jaxpr, ()):
        if jaxprs.primitive_name(eqn) == "scaled_gemm":
            (name,) = [s for s in scopes if is_gemm_scope(s)]
            (gemm,) = [s.partition(".")[0] for s in scopes if s.partition(".")[0] in set(Gemm)]
            counts[name, Gemm(gemm)] += 1
    return counts


def check_counts(random_program: Program, policy: str) -> None:
    """Every product of the plan is in the gradient, by site and by product, as often as in the original's gradient.

    A backward product is there once, however deep in scans, branches and remats its site is. A forward one is there
    once, and once more where a remat computes it again: the original says where.
    """
    loss, args = random_program.loss, random_program.args
    plan = policyc.plan(policy, loss, *args)
    original = count_by_scope(without_dead_code(jax.make_jaxpr(jax.grad(loss))(*args)), "dot_general")
    gradient = without_dead_code(jax.make_jaxpr(jax.grad(policyc.apply(policy, loss)))(*args))
    expected: Counter[tuple[str, Gemm]] = Counter()
    for site in plan.sites:
        backward = site.products - {Gemm.FPROP}
        expected.update({(gemm_scope(site), g): 1 for g in backward})
        expected[gemm_scope(site), Gemm.FPROP] = original[gemm_scope(site)] - len(backward)
    assert quantized_products(gradient) == expected
    assert count_by_scope(gradient, "scaled_gemm") == original
    assert not count_by_scope(gradient, "dot_general")


@settings(DEEP, max_examples=8)
@given(seeds, integers(2, 5))
def test_the_gradient_of_any_program_has_the_products_of_the_plan(seed: int, depth: int) -> None:
    check_counts(program(seed, depth), "* -> nvfp4")


@pytest.mark.filterwarnings("ignore:.*has no layer")  # products of activations that no stack has
@settings(DEEP, max_examples=4)
@given(seeds)
@example(2078)
def test_which_products_run_where_layers_are_treated_differently(seed: int) -> None:
    """Some products are kept, and some only in some layers."""
    random_program = program(seed)
    policy = with_rule_if_applicable(random_program, "* @ bwd -> fp8", "layers[0] @ dgrad -> keep")
    plan = policyc.plan(policy, random_program.loss, *random_program.args)
    planned = set()
    for site in plan.sites:
        for layer in site.layers():
            recipe = plan.decisions()[site.address, layer].recipe
            if recipe is not None:
                planned |= {(gemm_scope(site), g) for g in site.products if recipe.bits(g)}
    gradient = jax.make_jaxpr(jax.grad(policyc.apply(policy, random_program.loss)))(*random_program.args)
    assert set(quantized_products(without_dead_code(gradient))) == planned
