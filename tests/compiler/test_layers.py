"""Layer indices: `layers[-2:]` means the layers of the parameter as it is stored, however the program runs them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import policyc
from policyc.compiler.sites.site import dotted
from policyc.compiler.tables.plan_tables import summary
from policyc.compiler.tables.site_table import site_rows, sites_table
from policyc.compiler.weights.provenance.integers import (
    Integers,
    LoopIterations,
    carried_integers,
    propagate_integers,
)
from policyc.language.recipes import Gemm
from tests.support.gemms import quick_jit
from tests.support.stacks.base import each, take

D = 4
X = jax.ShapeDtypeStruct((3, D), "float32")


def weights(*lead: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*lead, D, D), "float32")


def layer(p: Any, h: Any) -> Any:
    return h + jnp.tanh((h @ p["attn"]) @ p["mlp"])


def scan(stack: Any, h: Any, **options: Any) -> Any:
    return lax.scan(lambda h, p: (layer(p, h), None), h, stack, **options)[0]


STACK = {"layers": {"attn": weights(8), "mlp": weights(8)}}


def first_ones_differ(p, x):
    """The first two layers of a stack are of another kind, and the others start again at 0."""
    dense, rest = (take(p["layers"], part) for part in (slice(2), slice(2, None)))

    def body(i, h):
        return lax.cond(
            i < 2, lambda h: layer(take(dense, i), h), lambda h: jnp.sin(layer(take(rest, i - 2), h)), h
        )

    return lax.fori_loop(0, 8, body, x)


def quantized_layers(policy: str, loss: Callable[..., Any], params: Any) -> list[str]:
    """The paths of the layers that a policy puts into 8 bits."""
    plan = policyc.plan(policy, loss, params, X)
    return sorted(
        ".".join(map(str, run.site.layer_path(run.site.stack_indices(la))))
        for run in plan.runs()
        if run.decision.recipe is not None and run.decision.recipe.bits(Gemm.FPROP) == 8
        for la in run.layers
    )


def counted(p, x):
    return lax.fori_loop(0, 8, lambda i, h: layer(take(p["layers"], i), h), x)


def as_bf16(a: Any) -> Any:
    return a.astype("bfloat16").astype("float32")


@jax.custom_vjp
def product_by_hand(x: Any, w: Any) -> Any:
    """A GEMM whose three products have operands in bf16 and sums in fp32."""
    return as_bf16(x) @ as_bf16(w)


product_by_hand.defvjp(
    lambda x, w: (product_by_hand(x, w), (x, w)),
    lambda operands, dy: (
        as_bf16(dy) @ as_bf16(operands[1]).T,
        as_bf16(operands[0]).T @ as_bf16(dy),
    ),
)


@pytest.mark.slow
def test_gradients_are_those_of_one_layer_by_hand():
    """Every layer's gradient, against a loop in Python in which the GEMMs of layer 5 are done by hand."""
    keys = jax.random.split(jax.random.key(0), 3)
    stack = {n: 0.5 * jax.random.normal(k, (8, D, D)) for n, k in zip(("attn", "mlp"), keys[:2], strict=True)}
    x = jax.random.normal(keys[2], X.shape)

    def by_hand(p):
        h = x
        for index in range(8):
            product = product_by_hand if index == 5 else jnp.matmul
            q = take(p["layers"], index)
            h = h + jnp.tanh(product(product(h, q["attn"]), q["mlp"]))
            h = jnp.sin(h) if index > 1 else h
        return (h**2).sum()

    loss = policyc.apply("layers[5] -> bf16 expect 2", lambda p: (first_ones_differ(p, x) ** 2).sum())
    quantized, expected = (quick_jit(jax.grad(f))({"layers": stack})["layers"] for f in (loss, by_hand))
    for weight in stack:
        # Sums of four or fewer numbers of fp32 in another order. A wrong layer is off by 1e-3.
        np.testing.assert_allclose(quantized[weight], expected[weight], rtol=1e-5, atol=1e-5)


# ---- what cannot be followed: test_stack_programs.py, and


def test_products_without_a_weight_in_a_loop_over_two_layers_are_refused_by_scope():
    def loss(p, x):
        def pair(h, ws):
            with jax.named_scope("layers"):
                h = (h @ ws[0]) @ (h @ ws[1]).T @ h
            return h, None

        t = p["layers"]["attn"]
        return lax.scan(pair, x, (t[::2], t[1::2]))[0].sum()

    with pytest.raises(policyc.PolicyError, match="reads several layers"):
        quantized_layers("layers[-1] -> fp8", loss, STACK)


# ---- counting


def test_heads_that_are_taken_one_by_one_are_no_layers():
    """Only `q` has an axis of heads, so that an index of `layers` is one of layers."""

    def loss(p, x):
        def body(h, q):
            return h + sum((h @ q["q"][head]) @ q["o"] for head in range(2)), None

        return lax.scan(body, x, p["layers"])[0].sum()

    params = {"layers": {"q": weights(8, 2), "o": weights(8)}}
    paths = quantized_layers("layers[3] -> fp8", loss, params)
    assert paths == ["layers[3].o", "layers[3].o", "layers[3].q[0]", "layers[3].q[1]"]
    assert quantized_layers("layers[3].q[1] -> fp8", loss, params) == ["layers[3].q[1]"]


def by_kind(p, x):
    """Layers of two kinds, and one that no layer is of."""

    def body(h, ws):
        i, w = ws
        kind = jnp.where(i % 3 == 2, 1, 0)
        branches = [lambda h: jnp.tanh(h @ w), lambda h: h @ w + h, lambda h: jnp.sin(h @ w)]
        return lax.switch(kind, branches, h), None

    return lax.scan(body, x, (jnp.arange(8), p["layers"]["attn"]))[0].sum()


def test_a_branch_counts_in_the_iterations_that_take_it():
    plan = policyc.plan("layers[:4] -> mxfp8; layers[1:3] -> fp8", by_kind, STACK, X)
    assert [(site.count, site.repeats) for site in plan.sites] == [(6, 6), (2, 2)]
    assert plan.counts == (4, 2)
    first, second = plan.sites
    assert [la for site in (first, second) for la in site.layers()] == [
        (i,) for i in (0, 1, 3, 4, 6, 7, 2, 5)
    ]
    assert [row[1] for row in site_rows(plan)[1:]] == ["0,3", "1-2", "4-7"]


def test_an_index_is_computed_once_per_iteration_however_often_it_is_read():
    (add,) = jax.make_jaxpr(lambda i: i + i)(1).eqns
    reads: list[int] = []
    first = Integers(lambda _: reads.append(1) or np.asarray(1))
    body = jax.make_jaxpr(lambda i: i + 1)(1)
    (index,) = carried_integers(body, [], [first], [], LoopIterations((0,), 4, False))
    for _ in range(12):
        index = propagate_integers(add, [index, index])
    assert [int(index.evaluate({(0,): i})) for i in range(4)] == [4096 * (1 + i) for i in range(4)]
    assert len(reads) == 1


@pytest.mark.parametrize(
    ("length", "condition", "note"),
    [
        (4, lambda i, h: i % 2 == 0, ""),
        (4, lambda i, h: h[0, 0] > 0, "which branch is taken depends on values"),
        (100_000, lambda i, h: i % 2 == 0, "100000 iterations are too many to follow"),
    ],
)
def test_a_branch_of_which_it_is_not_known_when_it_is_taken_is_reported(length, condition, note):
    def loss(p, x):
        def body(h, i):
            return lax.cond(condition(i, h), lambda: jnp.tanh(h @ p["a"]), lambda: h @ p["b"]), None

        return lax.scan(body, x @ p["c"], jnp.arange(length))[0].sum()

    plan = policyc.plan("* -> fp8", loss, {name: weights() for name in "abc"}, X)
    line = f"2 sites in a branch, counted as always taken: {note}\n"
    assert {site.repeats for site in plan.sites} == {1, length if note else length // 2}
    assert [line in table for table in (summary(plan), sites_table(plan))] == [bool(note)] * 2


def test_a_gemm_in_a_while_loop_is_reported_as_one_iteration():
    def loss(p, x):
        def body(state):
            return state[0] + 1, jnp.tanh(state[1] @ lax.stop_gradient(p["a"]))

        return (lax.while_loop(lambda state: state[0] < 9, body, (0, x))[1] @ p["b"]).sum()

    plan = policyc.plan("* -> fp8", loss, {name: weights() for name in "ab"}, X)
    line = "33.3% of FLOPs are 1 site in a while loop, counted as one iteration: how many it runs"
    assert all(table.count(line) == 1 for table in (summary(plan), sites_table(plan)))


def test_a_table_has_the_indices_of_layers_in_policies():
    """Backwards, in groups, with a product of activations; and of two stacks whose paths differ in length."""

    def loss(p, x):
        def block(h, q):
            return h + ((h @ q["attn"]) @ (h @ q["mlp"]).T).sum(), None

        def group(h, members):
            return lax.scan(block, h, members)[0], None

        h = lax.scan(group, x, each(lambda a: a[::-1].reshape(4, 2, D, D), p["layers"]))[0]
        stack = jnp.concatenate([p["first"], p["deep"]["second"]])
        return lax.scan(lambda h, w: (h @ w, None), h, stack)[0].sum()

    params = {**STACK, "first": weights(2), "deep": {"second": weights(2)}}
    rows = site_rows(policyc.plan("layers[5] -> fp8; second[0] -> fp8", loss, params, X))
    cells = [row[:2] for row in rows[1:]]
    assert cells[:2] == [["layers.attn", "0-4,6-7"], ["layers.attn", "5"]]
    assert cells[4][0].startswith("layers.(test_layers.py:"), cells[4]
    assert [cell[1] for cell in cells[4:6]] == ["0-4,6-7", "5"]
    assert cells[6:] == [["first", "0-1"], ["deep.second", "0"], ["deep.second", "1"]]


@pytest.mark.parametrize(
    ("program", "policy", "lengths"),
    [
        (by_kind, "layers[:3] -> mxfp8", [3, 5]),
        # The second branch would read layer 7 in iteration 1, which does not take it.
        (lambda p, x: first_ones_differ(p, x).sum(), "layers[-1] -> mxfp8", [7, 1]),
    ],
)
def test_a_loop_is_not_split_for_a_branch_that_is_not_taken(program, policy, lengths):
    jaxpr = jax.make_jaxpr(policyc.apply(policy, program))(STACK, X)
    assert [eqn.params["length"] for eqn in jaxpr.eqns if eqn.primitive.name == "scan"] == lengths


def nested_activations(p, x):
    """Two stacks in one: a product of activations in the inner loop."""

    def block(h, q):
        with jax.named_scope("attention"):
            return h + jnp.einsum("rd,sd->rs", h, h * q["s"]) @ h @ q["w"], None

    with jax.named_scope("layers"):
        return lax.scan(lambda h, q: (lax.scan(block, h, q)[0], None), x, p["layers"])[0].sum()


@pytest.mark.parametrize(
    ("policy", "layers"),
    [
        ("attention -> fp8", [(i, j) for i in range(2) for j in range(3)]),
        ("layers[1].attention[0] -> fp8", [(1, 0)]),
        ("layers[5].attention -> fp8", [(1, 2)]),  # all six counted as one stack
    ],
)
def test_products_of_activations_in_nested_stacks_have_both_indices(policy, layers):
    scales = jax.ShapeDtypeStruct((2, 3, D), "float32")
    plan = policyc.plan(policy, nested_activations, {"layers": {"s": scales, "w": weights(2, 3)}}, X)
    scores = [s for s in plan.sites if s.weight is None]
    assert [s.count for s in scores] == [6, 6]
    for site in scores:
        decided = [la for la in site.layers() if plan.decisions()[site.address, la].recipe is not None]
        assert decided == layers


@pytest.mark.parametrize(
    ("selector", "layers"),
    [
        ("stages[1].layers[0]", [(1, 0)]),
        ("stages[-1].layers[:]", [(2, 0), (2, 1)]),
        ("stages.layers", [(i, j) for i in range(3) for j in range(2)]),
        ("stages[1]", "stages[1].layers[0].up"),
        ("layers[-1]", "stages[0].layers[1].up"),
    ],
)
def test_one_index_in_a_stack_in_a_stack_is_refused_if_it_can_be_read_in_two_ways(selector, layers):
    def loss(p, x):
        def stage(h, q):
            return lax.scan(lambda h, q: (h @ q["up"] @ q["down"], None), h, q)[0], None

        return lax.scan(stage, x, p["stages"]["layers"])[0].sum()

    params = {"stages": {"layers": {"up": weights(3, 2), "down": weights(3, 2)}}}
    if isinstance(layers, str):
        with pytest.raises(policyc.PolicyError, match=f"give both indices: {re.escape(layers)}"):
            policyc.plan(f"{selector} -> fp8", loss, params, X)
    else:
        plan = policyc.plan(f"{selector} -> fp8", loss, params, X)
        for site in plan.sites:
            decided = [la for la in site.layers() if plan.decisions()[site.address, la].recipe is not None]
            assert decided == layers


# ---- products of activations without a scope, as in Flax NNX and Equinox


def attention(p: Any, h: Any) -> Any:
    if "qkv" in p:
        q, k, v = jnp.split(h @ p["qkv"]["kernel"], 3, axis=-1)
    else:
        q, k, v = h @ p["q"], h @ p["k"], h @ p["v"]
    return jax.nn.softmax(q @ k.T) @ v @ p["o"]


def block(p: Any, h: Any) -> Any:
    h = h + attention(p["attn"], h)
    return h + jnp.tanh(h @ p["up"])


def block_params(*lead: int, fused: bool = False) -> Any:
    names = ("o",) if fused else ("q", "k", "v", "o")
    attn: Any = {name: weights(*lead) for name in names}
    if fused:
        attn["qkv"] = {"kernel": jax.ShapeDtypeStruct((*lead, D, 3 * D), "float32")}
    return {"attn": attn, "up": weights(*lead)}


@pytest.mark.parametrize("formula", ["td,lde->lte", "ltd,lde->te"])
def test_an_index_of_layers_that_one_product_reads_at_once_is_an_error(formula):
    """Such as the keys of all layers of a decoder. Another stack has the index."""

    def loss(p, x):
        y = jnp.einsum(formula, jnp.stack([x] * 3) if formula.startswith("l") else x, p["dec"]["layers"])
        return y.sum() + lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["enc"]["layers"])[0].sum()

    params = {"enc": {"layers": weights(3)}, "dec": {"layers": weights(3)}}
    with pytest.raises(policyc.PolicyError, match="one product reads all of its 3 x 4 x 4 elements at once"):
        policyc.plan("* -> fp8; layers[-1] -> bf16", loss, params, X)
    policyc.plan("* -> fp8; enc.layers[-1] -> bf16", loss, params, X)


def shared_keys(p, x):
    """All layers read the keys of the first one."""
    k = x @ p["layers"][0]["attn"]["k"]
    for q in p["layers"]:
        x = x + jax.nn.softmax((x @ q["attn"]["q"]) @ k.T) @ (x @ q["attn"]["v"])
    return x.sum()


def without_projections(p, x):
    for q in p["layers"]:
        x = jnp.tanh(x + x @ q["up"])
        x = x + (x @ x.T) @ x
    return x.sum()


def without_weights(p, x):
    return ((x @ x.T) @ x @ p["layers"][0]["up"]).sum()


@pytest.mark.parametrize(
    ("loss", "modules"),
    [
        (shared_keys, ["layers[0].attn"] * 2 + [""] * 4),
        (without_projections, ["layers[0]"] * 2 + [""] * 4),
        (without_weights, []),
    ],
)
def test_a_layer_that_is_not_certain_is_not_claimed(loss, modules):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        plan = policyc.plan("layers[0] -> fp8", loss, {"layers": [block_params() for _ in range(3)]}, X)
    assert ["has no layer" in str(w.message) for w in warned] == [True] * ("" in modules)
    sites = [s for s in plan.sites if s.weight is None]
    assert [dotted(m.path) for s in sites for m in s.modules] == modules
    assert ("has no layer, so no index matches it" in summary(plan)) == ("" in modules)
    assert (" ?  " in sites_table(plan)) == ("" in modules)


# ---- which operand is the weight, and what it is called


def weight_names(loss: Callable[..., Any], *args: Any, **options: Any) -> list[tuple[str, str | None]]:
    return [(s.name, s.weight) for s in policyc.plan("* -> fp8", loss, *args, **options).sites]


def apply_weight(h, w):
    return jnp.tanh(h @ w), None


COUNTS = {
    "a scan over a stack": (lambda p, x: lax.scan(apply_weight, x, p["w"])[0], weights(3), 3),
    "a weight for two iterations": (
        lambda p, x: lax.scan(lambda h, i: apply_weight(h, p["w"][i // 2]), x, jnp.arange(6))[0],
        weights(3),
        6,
    ),
    "a repeated stack": (
        lambda p, x: lax.scan(apply_weight, x, jnp.repeat(p["w"], 2, axis=0))[0],
        weights(3),
        6,
    ),
    "an entry twice": (
        lambda p, x: lax.scan(apply_weight, x, jnp.stack([p["w"][i] for i in (0, 1, 0)]))[0],
        [weights(), weights()],
        3,
    ),
    "microbatches": (
        lambda p, x: lax.scan(lambda c, row: (c, row @ p["w"]), 0, jnp.stack([x, x]))[1],
        weights(),
        1,
    ),
    "a shared block": (
        lambda p, x: lax.scan(lambda h, _: apply_weight(h, p["w"]), x, None, length=4)[0],
        weights(),
        1,
    ),
    "a loop around a stack": (
        lambda p, x: lax.fori_loop(0, 2, lambda _, h: lax.scan(apply_weight, h, p["w"])[0], x),
        weights(3),
        3,
    ),
    "a loop in Python": (lambda p, x: x @ p["w"] @ p["w"] @ p["w"] @ p["w"], weights(), 4),
    "recomputed": (
        lambda p, x: jax.checkpoint(lambda h: apply_weight(h, p["w"])[0])(x),
        weights(),
        1,
    ),
}
"""Programs, their parameter `w`, and how many sites `expect` counts. The table is in docs/reference/language.md."""


@pytest.mark.parametrize("name", COUNTS)
def test_expect_counts_layers_and_not_how_often_a_loop_repeats_them(name):
    program, w, count = COUNTS[name]
    plan = policyc.plan(f"w -> fp8 expect {count}", lambda p, x: program(p, x).sum(), {"w": w}, X)
    assert plan.counts == (count,)


@pytest.mark.parametrize("left", [False, True])
def test_data_that_is_differentiated_too_is_not_the_weight(left):
    square = jax.ShapeDtypeStruct((D, D), "float32")

    def loss(params, x):
        return (params["w"] @ x if left else x @ params["w"]).sum()

    names = weight_names(loss, {"w": weights()}, square, param_argnums=(0, 1))
    assert names == [("params.w", "lhs" if left else "rhs")]


def test_the_weight_of_a_vjp_of_two_arrays_may_be_on_the_left():
    w, x = jnp.ones((D, D)), jnp.ones((D, 3))
    with policyc.active("* -> bf16") as session:
        jax.vjp(lambda w, x: w @ x, w, x)
    (plan,) = session.plans
    assert [(s.name, s.weight) for s in plan.sites] == [("w", "lhs")]


FROZEN = {"layers": [{"up": jnp.ones((D, D))} for _ in range(2)]}


def adapted(lora, base, x):
    for a, w in zip(lora, base["layers"], strict=True):
        x = x @ w["up"] + (x @ a["down"]) @ a["up"]
    return x.sum()


LORA = [{"down": jnp.ones((D, 2)), "up": jnp.ones((2, D))} for _ in range(2)]


def test_frozen_weights_have_names_and_no_wgrad():
    plan = policyc.plan("base.* -> fp8 expect 2; lora.* -> keep", adapted, LORA, FROZEN, jnp.ones((3, D)))
    frozen = [s for s in plan.sites if s.name.startswith("base")]
    assert [s.name for s in frozen] == ["base.layers[0].up", "base.layers[1].up"]
    # No gradient of the first layer's input is needed either.
    assert [s.products for s in frozen] == [{Gemm.FPROP}, {Gemm.FPROP, Gemm.DGRAD}]


def test_a_frozen_array_in_all_layers_has_no_layer():
    base = {"layers": [{"up": FROZEN["layers"][0]["up"]}] * 2}
    plan = policyc.plan(
        "base -> fp8 expect 2; * where layer == 1 -> bf16", adapted, LORA, base, jnp.ones((3, D))
    )
    assert [s.name for s in plan.sites if s.name.startswith("base")] == ["base.layers.up"] * 2
    with pytest.raises(policyc.PolicyError, match="or several of them: one array is in all these places"):
        policyc.plan("base.layers[-1] -> fp8", adapted, LORA, base, jnp.ones((3, D)))


def as_numpy(tree: Any, dtype: str = "float32") -> Any:
    """Each leaf with other values, so that they can be told apart."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [np.full(a.shape, i, dtype) for i, a in enumerate(leaves)])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_frozen_weights_in_numpy_have_names(dtype):
    base = as_numpy(FROZEN, dtype)
    with policyc.active("base.layers[-1] -> fp8 expect 1; lora -> keep") as session:
        jax.eval_shape(lambda lora: jax.grad(adapted)(lora, base, jnp.ones((3, D))), LORA)
    assert [p.counts for p in session.plans] == [(1, 4)]
    plan = policyc.plan("base.* -> fp8", adapted, LORA, base, jnp.ones((3, D)))
    assert plan.counts == (2,)


def test_a_transposed_frozen_weight_in_numpy_has_its_name():
    def loss(p, base, x):
        return (x @ p @ base["w"].T).sum()

    base = {"w": np.arange(D * D, dtype="float32").reshape(D, D)}
    assert [n for n, _ in weight_names(loss, weights(), base, X)] == ["p", "base.w"]


def test_a_part_of_a_frozen_stack_in_numpy_has_a_name_and_no_index():
    def loss(p, base, x):
        return (x @ p @ base["w"][1]).sum()

    base = {"w": np.zeros((3, D, D), "float32")}
    assert [n for n, _ in weight_names(loss, weights(), base, X)] == ["p", "base.w"]
    with pytest.raises(policyc.PolicyError, match="NumPy takes a part"):
        policyc.plan("base.w[1] -> fp8", loss, weights(), base, X)


def test_equal_frozen_weights_that_were_converted_are_not_told_apart():
    def loss(p, base, x):
        return (x @ p @ base["a"] @ base["b"]).sum()

    base = {"a": np.zeros((D, D)), "b": np.zeros((D, D))}  # float64: JAX copies them
    assert [n.startswith("(") for n, _ in weight_names(loss, weights(), base, X)] == [False, True, True]


def test_a_batch_is_no_weight():
    def loss(w, batch):
        return (batch["x"]["y"] @ w).sum() + (batch["x"]["y"] @ batch["x"]["y"].T).sum()

    names = weight_names(loss, jnp.ones((D, D)), {"x": {"y": jnp.ones((3, D))}})
    assert [weight for _, weight in names] == ["rhs", None]
