"""Hoisting: a weight is quantized once per step, and each layer of a stack rounds with random bits of its own.

A weight is not quantized again for each part of an accumulated batch, nor in a remat. Most tests count equations of the
gradient's jaxpr. The one with `quantize_in_place` compares results with those without hoisting, bit by bit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import policyc
from policyc.compiler import pipeline
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs import transform
from tests.support.jaxpr_tools import without_dead_code
from tests.support.layered_models import (
    LAYERS,
    PARTS,
    REMAT,
    STACKED,
    UNROLLED,
    WIDTH,
    X,
    accumulated,
    assert_same_bits,
    block,
    model,
    weight,
)
from tests.support.programs import program

TWO_WAYS, SQUARE = "* -> nvfp4", "* -> nvfp4(scale2d=weights)"
SPLIT = f"{SQUARE}; layers[1:3] -> fp8; layers[-1].down -> keep"


@pytest.fixture
def quantize_in_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A function that turns hoisting off: from then on, every weight is quantized where it is used."""
    rewritten: list[None] = []

    def switch() -> None:
        def rewrite(sites: Any, *rest: Any) -> Any:
            rewritten.append(None)
            blind = {a: replace(e, is_hoistable=False) for a, e in sites.loss.equations.items()}
            return original(replace(sites, traced=replace(sites.loss, equations=blind)), *rest)

        original = pipeline.rewrite
        monkeypatch.setattr(pipeline, "rewrite", rewrite)
        transform._transformed.clear()

    yield switch
    transform._transformed.clear()
    assert rewritten  # no cache had the result


def weights_quantized(f: Callable[..., Any], *args: Any, operand: str = "rhs") -> Counter[tuple[int, ...]]:
    """How many equations quantize a weight, by the lengths of the scans around them. Dead code does not count."""
    return _count_quantizers(without_dead_code(jax.make_jaxpr(f)(*args)), (), operand)


def _count_quantizers(jaxpr: Any, scans: tuple[int, ...], weight_operand: str) -> Counter[tuple[int, ...]]:
    counts: Counter[tuple[int, ...]] = Counter()
    for eqn in jaxprs.equations(jaxpr):
        name = jaxprs.primitive_name(eqn)
        reads = {f"fprop.{weight_operand}", f"dgrad.{weight_operand}"}
        if name.endswith("_quantize") and not reads.isdisjoint(eqn.params["operands"]):
            counts[scans] += 1
        inside = (*scans, eqn.params["length"]) if name == "scan" else scans
        for sub in jaxprs.sub_jaxprs(eqn):
            counts += _count_quantizers(sub.jaxpr, inside, weight_operand)
    return counts


# ---- how often a weight is quantized

PER_WEIGHT = {TWO_WAYS: 1, SQUARE: 1, "* -> fp8": 1, "* -> mxfp8": 2}
"""Square tiles and whole tensors serve fprop and dgrad. Blocks run along what each of the two contracts: one equation
quantizes to nvfp4 for both."""


@pytest.mark.parametrize(
    ("policy", "remat"),
    [*((policy, "full") for policy in PER_WEIGHT), *((SQUARE, r) for r in REMAT if r != "full")],
)
def test_a_weight_is_quantized_once_per_step(policy: str, remat: str) -> None:
    step, each = accumulated(model(remat)), PER_WEIGHT[policy]
    with policyc.active(policy):
        stacked, unrolled = (weights_quantized(step, params, X) for params in (STACKED, UNROLLED))
    # One equation quantizes all layers of a stack, but a loop if it quantizes for two GEMMs.
    assert stacked == ({(): each, (LAYERS,): 2 * each} if policy == TWO_WAYS else {(): 3 * each})
    assert unrolled == {(): 1 + 4 * each}, "nothing is differentiated by x: the first weight has no dgrad"


def test_the_ranges_of_a_split_stack_are_quantized_separately() -> None:
    # Layers 0, 1 and 2, and 3, which keeps `down`: 2, 2 and 1 equations, and one outside the stack.
    expected = {(): 6}
    with policyc.active(SPLIT):
        assert weights_quantized(accumulated(model("full")), STACKED, X) == expected
    applied = accumulated(policyc.apply(SPLIT, model("full")))
    assert weights_quantized(applied, STACKED, X) == expected


def test_without_accumulation_a_remat_does_not_quantize_again() -> None:
    with policyc.active(SQUARE):
        for remat in REMAT:
            counts = weights_quantized(jax.grad(model(remat)), STACKED, X[0])
            assert counts.total() == 3, remat


def test_a_loop_over_one_weight_quantizes_it_once() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        def body(h: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ p["recurrent"] + row @ p["input"]), None

        return jnp.sum(lax.scan(body, x[0], x)[0])

    params = {"recurrent": weight(WIDTH, WIDTH), "input": weight(WIDTH, WIDTH).T.copy()}
    with policyc.active(SQUARE):
        assert weights_quantized(jax.grad(loss), params, X) == {(): 2}


def test_a_weight_on_the_left() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(p["w"].T @ x.T))

    with policyc.active(TWO_WAYS):
        counts = weights_quantized(accumulated(loss), {"w": weight(WIDTH, WIDTH)}, X, operand="lhs")
    assert counts == {(): 1}


def test_a_weight_that_depends_on_the_data_is_quantized_where_it_is_used() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        expert = lax.dynamic_index_in_dim(p["w"], jnp.argmax(x[0]) % LAYERS, keepdims=False)
        return jnp.sum(jnp.tanh(x @ expert) @ p["v"])

    params = {"w": weight(LAYERS, WIDTH, WIDTH), "v": weight(WIDTH, WIDTH)}
    with policyc.active(SQUARE):
        assert weights_quantized(accumulated(loss), params, X) == {(PARTS,): 1, (): 1}


def test_a_weight_with_random_signs_is_quantized_where_it_is_used() -> None:
    """The signs depend on the product that the weight enters."""
    with policyc.active("* -> nvfp4(rounding=ms_eden)"):
        counts = weights_quantized(accumulated(model("none")), UNROLLED, X)
    assert counts == {(): 5, (PARTS,): 4}


# ---- the same bits as without hoisting


@pytest.mark.slow
def test_hoisting_changes_no_bit(quantize_in_place: Callable[[], None]) -> None:
    """A split stack with a remat, on eight devices over which its weights are sharded.

    The same arrays are gathered with and without hoisting: codes. A test below shows that unrolled layers round alike.
    """
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P(None, "fsdp"))
    width = 64
    params = jax.device_put(
        {"layers": {"up": weight(3, width, width), "down": weight(3, width, width)}}, rows
    )
    parts = jax.device_put(weight(PARTS, 16, width), rows)
    policy = "* -> mxfp8; layers[0].up -> fp8"

    def loss(p: Any, x: jax.Array) -> jax.Array:
        h, _ = lax.scan(lambda h, each: (REMAT["named"](block)(h, each), None), x, p["layers"])
        return jnp.mean(jnp.square(h))

    def run() -> tuple[Any, str]:
        with policyc.active(policy):
            compiled = jax.jit(accumulated(loss)).lower(params, parts).compile()
        return compiled(params, parts), compiled.as_text()

    hoisted, text = run()
    quantize_in_place()
    in_place, other = run()
    assert_same_bits(hoisted, in_place)
    assert gathered_types(text) == gathered_types(other)
    with policyc.active(policy):
        counts = weights_quantized(accumulated(loss), params, parts)
    assert min(map(len, counts)) > 0, "in place is inside the loop over the parts of the batch"


def gathered_types(text: str) -> set[str]:
    """The types of what a compiled program gathers from all devices."""
    lines = (line.partition(" = ")[2] for line in text.splitlines() if " all-gather" in line)
    return {line.partition("{")[0] for line in lines}


# ---- random bits


@pytest.mark.any_jax
@pytest.mark.slow
def test_a_stack_rounds_alike_scanned_split_and_unrolled() -> None:
    stack = weight(2, WIDTH, WIDTH)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        if isinstance(p["layers"], list):
            for w in p["layers"]:
                x = x + jnp.tanh(x @ w)
        else:
            x, _ = lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, p["layers"])
        return jnp.mean(jnp.square(x))

    def gradients(policy: str, layers: Any) -> Any:
        with policyc.active(policy):
            return jax.jit(jax.grad(loss))({"layers": layers}, X[0])["layers"]

    scanned = gradients("* -> mxfp4(sr=grad)", stack)
    unrolled = gradients("* -> mxfp4(sr=grad)", list(stack))
    # In the split stack, layer 0 has another recipe.
    split = gradients("* -> mxfp4(sr=grad); layers[0] @ dgrad -> bf16", stack)
    assert_same_bits(list(scanned), unrolled)
    assert_same_bits(scanned[1], split[1])


def test_equal_layers_round_with_bits_of_their_own() -> None:
    x, slope = weight(64, WIDTH), weight(64, 3 * WIDTH)[:, :WIDTH]

    def loss(p: Any) -> jax.Array:
        def body(total: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return total + jnp.sum((x @ w) * slope), None

        return lax.scan(body, jnp.zeros(()), p["layers"])[0]

    params = {"layers": jnp.stack([weight(WIDTH, WIDTH)] * 3)}
    with policyc.active("* -> mxfp4(sr=grad)"):
        first, second, third = jax.jit(jax.grad(loss))(params)["layers"]
    assert not jnp.array_equal(first, second)
    assert not jnp.array_equal(second, third)
    with policyc.active("* -> mxfp4"):
        first, second, _ = jax.jit(jax.grad(loss))(params)["layers"]
        jaxpr = jax.make_jaxpr(jax.grad(loss))(params)
    assert_same_bits(first, second)
    assert "u32" not in str(jaxpr), "nothing is random, and no layer needs a number"


def test_every_layer_has_a_number_of_its_own() -> None:
    """In nested stacks too, whatever their paths are, and in a stack inside a jit that is called several times."""
    depths = set()
    for seed in range(8):
        random_program = program(seed, 4)
        for site in policyc.plan(
            "* -> nvfp4", random_program.loss, random_program.params, random_program.batch
        ).sites:
            ordinals = site.loop_ordinals()
            assert len(set(ordinals)) == len(ordinals) == math.prod(loop.size for loop in site.loops)
            depths.add(len(site.loops))
    assert depths >= {0, 1, 2}


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
def test_a_loss_with_hoisted_weights_is_differentiated_from_outside(wrap: Callable[..., Any]) -> None:
    """Outside the derivative, weights are quantized in the trace of the wrapped loss, as constants of it."""
    loss = policyc.apply(SQUARE, model("full"))
    wrapped = jax.jit(jax.grad(wrap(loss)))(UNROLLED, X[0])
    assert_same_bits(wrapped, jax.jit(jax.grad(loss))(UNROLLED, X[0]))
