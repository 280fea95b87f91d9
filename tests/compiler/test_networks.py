"""The layers of networks side by side, and of passes through one network: each counts from 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from policyc.compiler.planning.plan import make_plan
from policyc.compiler.planning.plan_checks import check_plan, unknown_blocks
from policyc.compiler.tables.kind_tables import block_text, explain_kinds
from policyc.language.diagnostics import PolicyError
from policyc.language.loader import load, parse
from policyc.language.recipes import Gemm
from tests.support.jaxpr_tools import find_sites
from tests.support.network_programs import (
    ATTENTION,
    BATCH,
    FOR_RESIDUALS,
    MISREAD,
    MLP,
    OUT,
    TOKENS,
    WITHOUT_RESIDUALS,
    D,
    X,
    at,
    attend,
    cases,
    chain,
    make,
    mlp,
    norm,
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


def refusals(loss: Callable[..., Any], params: Any) -> list[str]:
    """Why a rule for a layer is refused; empty if it is not."""
    plan = make_plan(parse("* where layer >= -1 -> fp8"), find_sites(loss, params, X))
    return [d.message for d in unknown_blocks(plan)]


@pytest.mark.parametrize("arrangement", MISREAD)
@pytest.mark.parametrize("layer", ["pre-norm", "residual mlp", "gated"])
def test_networks_that_the_flow_cannot_tell_apart_have_no_layers(arrangement: str, layer: str) -> None:
    if (arrangement, layer) != (
        "exits without a list",
        "gated",
    ):  # this model has no repeated stack: layer 0 of 1
        assert refusals(*make(layer, arrangement))


@pytest.mark.parametrize("arrangement", FOR_RESIDUALS)
@pytest.mark.parametrize("layer", WITHOUT_RESIDUALS)
def test_layers_without_residuals_are_counted_right_or_not_at_all(arrangement: str, layer: str) -> None:
    loss, params = make(layer, arrangement)
    sites = [(site, true_layers(site)) for site in find_sites(loss, params, X)]
    assert refusals(loss, params) or all(
        site.block is not None
        and (tuple(site.attributes(la)["layer"] for la in site.layers()), site.block.count) == truth
        for site, truth in sites
        if truth is not None
    )


def generator_and_discriminator(p: Any, x: Any) -> Any:
    """They look like one network. The pass over other data shows that they are two."""

    def run(x: Any, weights: Any) -> Any:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return x

    return run(run(x[0], p["a"]), p["b"]).sum() + run(x[1], p["b"]).sum()


def recurrence(p: Any, x: Any) -> Any:
    h = jnp.zeros_like(x[0, :, 0])
    for step in range(TOKENS):
        h = jnp.tanh(x[0, :, step] @ p["a"][0] + h @ p["a"][1])
    return h.sum()


def recurrence_of_several_layers(p: Any, x: Any) -> Any:
    states = [jnp.zeros_like(x[0, :, 0])] * 3
    for step in range(TOKENS):
        h = x[0, :, step]
        for number in range(3):
            h = states[number] = jnp.tanh(h @ p["a"][number] + states[number] @ p["b"][number])
    return h.sum()


def modulated_by_its_input(p: Any, x: Any) -> Any:
    """FiLM: the shift of the first layer looks like a branch of the stream."""
    h, condition = x[0], jnp.tanh(x[0] @ p["one"])
    for q in p["l"]:
        modulated = norm(h) * (1 + condition @ q["scale"]) + condition @ q["shift"]
        h = h + attend(modulated, modulated, q)
        h = h + mlp(norm(h), q)
    return h.sum()


def stages_of_layers(p: Any, x: Any) -> Any:
    h = x[0]
    for layers in p["stages"]:
        for weight in layers:
            h = jnp.tanh(h @ weight)
    return h.sum()


_LISTS = {"a": [w(D, D)] * 3, "b": [w(D, D)] * 4}
_MODULATED = {"one": w(D, D), "l": [{**ATTENTION, **MLP, "scale": w(D, D), "shift": w(D, D)}] * 3}


@pytest.mark.parametrize(
    ("loss", "params", "reason"),
    [
        (generator_and_discriminator, _LISTS, "two passes count them differently"),
        (recurrence, _LISTS, "they may be time steps"),
        (stages_of_layers, {"stages": [[w(D, D)] * 2] * 3}, "equal products of an inner list"),
        (recurrence_of_several_layers, _LISTS, "the layers of a list of weights are in several networks"),
        (modulated_by_its_input, _MODULATED, "the layers of a list of weights are in several networks"),
    ],
)
def test_blocks_that_contradict_the_names_of_their_weights_have_no_layers(
    loss: Callable[..., Any], params: Any, reason: str
) -> None:
    (message,) = refusals(loss, params)
    assert reason in message


def test_a_block_whose_number_is_unknown_has_no_count() -> None:
    plan = make_plan(parse(""), find_sites(recurrence, _LISTS, X))
    assert {block_text([(site, ())]) for site in plan.sites if site.block is not None} == {"?"}
    assert "in a block, but policyc cannot tell which: several blocks" in explain_kinds(plan, "a[1]")


def masks_on_operands(p: Any, tables: Any, x: Any) -> Any:
    """The masks and shifts are slices of one table, so that a shifted operand looks like the sum of a branch."""

    def linear(h: Any, weight: Any, table: Any) -> tuple[Any, Any]:
        drop, shift, drop_result, pull = table
        out = (h * (1 - drop) + shift) @ weight
        return out * (1 - drop_result), (out * pull).sum()

    def body(h: Any, layer: Any) -> tuple[Any, Any]:
        (up, down), tables = layer
        hidden, first = linear(h, up, tables[0])
        out, second = linear(jax.nn.silu(hidden), down, tables[1])
        return h + out, first + second

    h, pulls = lax.scan(body, x[0, 0], ((p["up"], p["down"]), tables))
    return h.sum() + pulls.sum()


def test_a_part_of_a_branch_is_no_block() -> None:
    sites = find_sites(masks_on_operands, {"up": w(3, D, D), "down": w(3, D, D)}, w(3, 2, 4, TOKENS, D), X)
    numbers = [[site.attributes(layer)["layer"] for layer in site.layers()] for site in sites]
    assert numbers == [[0, 1, 2]] * 2


def fused(q: Any, k: Any, v: Any) -> Any:
    result = jax.ShapeDtypeStruct((BATCH, TOKENS, 1, D), q.dtype)
    return jax.ffi.ffi_call("f", result)(*(a[:, :, None] for a in (q, k, v)))


def dense(q: Any, k: Any, v: Any) -> Any:
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k)), v)


@pytest.mark.parametrize("hoisted", [False, True])
@pytest.mark.parametrize("memory", ["constant", "prefix", "data"])
@pytest.mark.parametrize("attention", [fused, dense])
def test_what_feeds_one_block_has_its_layer(attention: Any, memory: str, hoisted: bool) -> None:
    """Keys, values and a scale, computed in their layer or for all layers before the first."""
    layer = {**ATTENTION, **MLP, "scale": w(D, D)}
    params = {"l": [layer] * 3, "prefix": w(TOKENS, D), "out": w(D, OUT)}

    def loss(p: Any, x: Any) -> Any:
        constant = jnp.ones((BATCH, TOKENS, D))
        side = {
            "constant": constant,
            "data": x[1],  # of the input that the stream is a slice of
            "prefix": jnp.broadcast_to(p["prefix"], constant.shape),
        }[memory]

        def inputs(q: Any) -> list[Any]:
            return [side @ q["k"], side @ q["v"], constant @ q["scale"]]

        before = [inputs(q) if hoisted else None for q in p["l"]]
        h = x[0]
        for q, given in zip(p["l"], before, strict=True):
            k, v, scale = given or inputs(q)
            h = h + attention(norm(h) @ q["q"], k, v).reshape(h.shape) @ q["o"]
            h = h + scale * mlp(norm(h), q)
        return score(p, h)

    for site in find_sites(loss, params, X):
        if site.name.startswith("l["):
            assert site.block is not None, site.name
            assert (site.block.number[{}], site.block.count, site.block.unknown) == (
                int(site.name[2]),
                3,
                "",
            ), site.name


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
            (layers,) = plan.site_runs(site, plan.phases[0])
            assert layers.decision.recipe is not None
            bits.setdefault(truth[0][0], set()).add(layers.decision.recipe.bits(Gemm.FPROP))
    assert bits == {0: {4}, 1: {4}, **{number: {16} for number in range(2, 6)}}


def test_a_reference_that_the_loss_closes_over_has_no_layers_and_the_plan_says_so() -> None:
    layers = [{name: w(*array.shape) for name, array in {**ATTENTION, **MLP}.items()} for _ in range(2)]
    closed_over = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), {"l": layers, "out": w(D, OUT)})

    def loss(p: Any, x: Any) -> Any:
        def run(q: Any) -> Any:
            h = x[0]
            for layer in q["l"]:
                h = pre_norm(h, layer)
            return score(q, h)

        return run(p) - lax.stop_gradient(run(closed_over))

    sites = find_sites(loss, {"l": layers, "out": w(D, OUT)}, X)
    (warning,) = check_plan(make_plan(parse("* -> mxfp8; * where layer >= -1 -> keep"), sites))
    assert "arrays that the loss closes over" in warning.message
    assert not check_plan(make_plan(parse("* -> mxfp8"), sites))
