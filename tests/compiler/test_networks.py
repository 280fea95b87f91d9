"""The layers of networks side by side, and of passes through one network: each counts from 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from policyc.compiler.plan import make_plan
from policyc.compiler.plan_checks import check_plan
from policyc.language.diagnostics import PolicyError
from policyc.language.loader import load, parse
from policyc.language.recipes import Gemm
from tests.support.jaxpr_tools import find_sites
from tests.support.network_programs import (
    ATTENTION,
    MLP,
    OUT,
    D,
    X,
    at,
    cases,
    chain,
    make,
    pre_norm,
    score,
    true_layers,
    w,
)

pytestmark = pytest.mark.any_jax


@pytest.mark.parametrize("case", list(cases()), ids=" / ".join)
def test_each_network_counts_its_layers_from_0(case: tuple[str, str, str]) -> None:
    for site in find_sites(*make(*case), X):
        if (truth := true_layers(site)) is not None:
            assert site.block is not None, site.name
            assert not site.block.unknown, site.name
            numbers = tuple(site.attributes(layer)["layer"] for layer in site.layers())
            assert (numbers, site.block.count) == truth, site.name


def take(stack: Any, index: Any) -> Any:
    return jax.tree.map(lambda a: a[index], stack)


def prefetched(p: Any, x: Any) -> Any:
    def body(carry: Any, i: Any) -> Any:
        return (pre_norm(*carry), take(p["l"], jnp.minimum(i + 1, 3))), None

    return lax.scan(body, (x, take(p["l"], 0)), jnp.arange(4))[0][0]


def prefetched_after_a_scan(p: Any, x: Any) -> Any:
    return prefetched(p, lax.scan(lambda h, q: (pre_norm(h, q), None), x, p["l"])[0])


def rolled_in_the_carry(p: Any, x: Any) -> Any:
    def body(carry: Any, _: Any) -> Any:
        h, stack = carry
        return (pre_norm(h, take(stack, 0)), jax.tree.map(lambda a: jnp.roll(a, -1, 0), stack)), None

    return lax.scan(body, (x, p["l"]), length=4)[0][0]


def float_index(p: Any, x: Any) -> Any:
    def body(_: Any, carry: Any) -> Any:
        return pre_norm(carry[0], take(p["l"], carry[1].astype(int))), carry[1] + 1.0

    return lax.fori_loop(0, 4, body, (x, 0.0))[0]


def while_loop(p: Any, x: Any) -> Any:
    def body(carry: Any) -> Any:
        return pre_norm(carry[0], take(p["l"], carry[1])), carry[1] + 1

    return lax.while_loop(lambda carry: carry[1] < 4, body, (x, 0))[0]


def order_of_the_data(p: Any, x: Any) -> Any:
    order = jnp.argsort(x[0, 0, :4])
    return lax.scan(lambda h, i: (pre_norm(h, take(p["l"], i)), None), x, order)[0]


def shared_weights(p: Any, x: Any) -> Any:
    return lax.scan(lambda h, _: (pre_norm(h, take(p["l"], 0)), None), x, length=4)[0]


UNKNOWN = {
    prefetched: "the loop around it carries it",
    prefetched_after_a_scan: "the loop around it carries it",
    rolled_in_the_carry: "the loop around it carries it",
    float_index: "its index is computed in float32",
    while_loop: "its index is computed from constants by operations that policyc does not evaluate",
    order_of_the_data: "its index is computed from values that are not known before the program runs",
    shared_weights: "all iterations of the loop around it share its weight",
}


@pytest.mark.parametrize("model", UNKNOWN)
def test_a_loop_whose_index_is_unknown_has_no_layers(model: Callable[[Any, Any], Any]) -> None:
    stack = jax.tree.map(lambda a: w(4, *a.shape), {**ATTENTION, **MLP})
    sites = find_sites(lambda p, x: score(p, model(p, x[0])), {"l": stack, "out": w(D, OUT)}, X)
    for rule in ("* where layer == 0 -> fp8", "* -> fp8; * where layer >= -1 -> keep"):
        with pytest.raises(PolicyError) as error:
            check_plan(make_plan(parse(rule), sites))
        (diagnostic,) = error.value.diagnostics
        assert diagnostic.code == "opaque-index"
        assert UNKNOWN[model] in diagnostic.message
    check_plan(make_plan(parse("* where mlp -> fp8"), sites))


def test_dpo_keeps_the_last_four_blocks_of_each_pass() -> None:
    """Six unrolled blocks: the chosen and the rejected answer, and the passes of a reference, an argument."""

    def log_likelihood(p: Any, h: Any) -> Any:
        return score(p, chain(layer, h, p["l"]))

    def layer(h: Any, p: Any, numbers: Any, depth: int) -> Any:
        with at(numbers, depth):
            return pre_norm(h, p)

    def loss(p: Any, reference: Any, x: Any) -> Any:
        margins = [log_likelihood(q, x[0]) - log_likelihood(q, x[1]) for q in (p, reference)]
        return -jax.nn.log_sigmoid(margins[0] - lax.stop_gradient(margins[1]))

    def params() -> Any:
        return {
            "l": [{n: w(*a.shape) for n, a in {**ATTENTION, **MLP}.items()} for _ in range(6)],
            "out": w(D, OUT),
        }

    plan = make_plan(load("llama3_8b_nvfp4"), find_sites(loss, params(), params(), X))
    check_plan(plan)
    bits: dict[int, set[int]] = {}
    for site in plan.sites:
        if (truth := true_layers(site)) is not None and site.weight is not None:
            (layers,) = plan.site_layer_ranges(site, plan.phases[0])
            assert layers.decision.recipe is not None
            bits.setdefault(truth[0][0], set()).add(layers.decision.recipe.bits(Gemm.FPROP))
    assert bits == {0: {4}, 1: {4}, **{number: {16} for number in range(2, 6)}}


def test_passes_that_count_the_same_weights_differently_have_no_layers() -> None:
    """A generator and its discriminator look like one network. The pass over other data shows that they are two."""

    def run(x: Any, weights: Any) -> Any:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return x

    def loss(p: Any, x: Any) -> Any:
        return run(run(x[0], p["g"]), p["d"]).sum() + run(x[1], p["d"]).sum()

    sites = find_sites(loss, {"g": [w(D, D)] * 3, "d": [w(D, D)] * 4}, X)
    assert {site.block.unknown for site in sites if site.block is not None} == {
        "another pass of the program counts the same weights as other layers"
    }
