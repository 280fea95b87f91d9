"""Weights are quantized once a step: not in every part of an accumulated batch, and not again in a remat. What several
products read is quantized once too. And layers of a stack round by random bits of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import policyc
from policyc.compiler import pipeline
from policyc.compiler.rewrite import SiteRewriter
from policyc.jaxcore import jaxprs
from tests.compiler.test_properties import without_dead_code
from tests.support.programs import program

pytestmark = pytest.mark.usefixtures("quick_compile")

WIDTH, HIDDEN, LAYERS, PARTS = 16, 32, 4, 2
NAMED = jax.checkpoint_policies.save_only_these_names("quantization")
REMAT: dict[str, Callable[..., Any]] = {
    "none": lambda f: f,
    "full": jax.checkpoint,
    "named": lambda f: jax.checkpoint(f, policy=NAMED),
    "dots": lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable),
}
TWO_WAYS, SQUARE = "* -> nvfp4", "* -> nvfp4(scale2d=weights)"
SPLIT = f"{SQUARE}; layers[1:3] -> fp8; layers[-1].down -> keep"
Loss = Callable[[Any, jax.Array], jax.Array]


def weight(*shape: int) -> jax.Array:
    values = np.random.default_rng(shape).standard_normal(shape) / np.sqrt(shape[-2])
    return jnp.asarray(values, jnp.float32)


STACKED = {"layers": {"up": weight(LAYERS, WIDTH, HIDDEN), "down": weight(LAYERS, HIDDEN, WIDTH)},
           "head": weight(WIDTH, WIDTH)}  # fmt: skip
UNROLLED = {
    **STACKED,
    "layers": [jax.tree.map(lambda w, i=i: w[i], STACKED["layers"]) for i in range(2)],
}
X = weight(PARTS, 16, WIDTH)


def block(h: jax.Array, p: Any) -> jax.Array:
    up, down = (p[name].astype(h.dtype) for name in ("up", "down"))
    return h + jnp.tanh(h @ up) @ down


def model(remat: str) -> Loss:
    layer = REMAT[remat](block)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        h = x.astype(jnp.bfloat16)
        if isinstance(p["layers"], list):
            for each in p["layers"]:
                h = layer(h, each)
        else:
            h, _ = lax.scan(lambda h, each: (layer(h, each), None), h, p["layers"])
        return jnp.mean(jnp.square((h @ p["head"].astype(h.dtype)).astype(jnp.float32)))

    return loss


def accumulated(loss: Loss) -> Callable[[Any, jax.Array], Any]:
    """The sum of losses and of gradients over the parts of a batch, as people write it."""

    def step(p: Any, parts: jax.Array) -> Any:
        def body(total: Any, part: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(p, part)), None

        zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)
        return lax.scan(body, zero, parts)[0]

    return step


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Called, it has every weight quantized where it is used."""

    def switch() -> None:
        def rewrite(sites: Any, decisions: Any, outside: Any) -> Any:
            blind = tuple(replace(s, origin=None) for s in sites)
            return original(replace(sites, sites=blind), decisions, outside)

        original = pipeline.rewrite
        monkeypatch.setattr(pipeline, "rewrite", rewrite)
        jax.clear_caches()

    yield switch
    jax.clear_caches()


def weights_quantized(f: Callable[..., Any], *args: Any, operand: str = "rhs") -> Counter:
    """How often equations quantize a weight, by the lengths of the loops around them; those in vain do not count."""
    return counted(without_dead_code(jax.make_jaxpr(f)(*args)), (), operand)


def counted(closed: Any, loops: tuple[int, ...], operands: str) -> Counter:
    found: Counter = Counter()
    for eqn in jaxprs.equations(closed):
        name = jaxprs.primitive_name(eqn)
        gemm, _, operand = str(eqn.params.get("operand", "")).partition(".")
        if name.endswith("_quantize") and operand == operands and gemm != "wgrad":
            found[loops] += 1
        inside = (*loops, eqn.params["length"]) if name == "scan" else loops
        for body in jaxprs.sub_jaxprs(eqn):
            found += counted(body.jaxpr, inside, operands)
    return found


def same(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


PER_WEIGHT = {TWO_WAYS: 2, SQUARE: 1, "* -> fp8": 1, "* -> mxfp8": 2}
"""Square tiles and whole tensors serve fprop and dgrad; blocks run along what each of them contracts."""


@pytest.mark.parametrize("remat", REMAT)
@pytest.mark.parametrize("policy", PER_WEIGHT)
def test_once_a_step_whatever_is_done_again(policy, remat):
    step, each = accumulated(model(remat)), PER_WEIGHT[policy]
    with policyc.active(policy):
        stacked, unrolled = (weights_quantized(step, params, X) for params in (STACKED, UNROLLED))
    assert stacked == {(): each, (LAYERS,): 2 * each}
    assert unrolled == {(): 1 + 4 * each}, "nothing is differentiated by x: the first weight has no dgrad"


def test_a_stack_that_is_split():
    with policyc.active(SPLIT):
        found = weights_quantized(accumulated(model("full")), STACKED, X)
    # Layers 0, 1 and 2, and 3, of which the last keeps `down`.
    assert found == {(): 1, (1,): 3, (2,): 2}


@pytest.mark.parametrize(
    ("params", "policy", "remat"),
    [
        pytest.param(STACKED, TWO_WAYS, "full", marks=pytest.mark.slow),
        (STACKED, SPLIT, "named"),
        pytest.param(UNROLLED, SQUARE, "full", marks=pytest.mark.slow),
        (UNROLLED, "* -> fp8", "dots"),
    ],
)
def test_to_the_bit(params, policy, remat, in_place):
    step = accumulated(model(remat))

    def run() -> tuple[Any, Counter]:
        with policyc.active(policy):
            return jax.jit(step)(params, X), weights_quantized(step, params, X)

    once, _ = run()
    in_place()
    before, found = run()
    assert min(map(len, found)) > 0, "in place is inside of the loop"
    same(once, before)


def test_apply_is_the_same():
    step = accumulated(policyc.apply(SPLIT, model("full")))
    assert weights_quantized(step, STACKED, X) == {(): 1, (1,): 3, (2,): 2}


def test_without_accumulation_a_remat_does_not_quantize_again():
    with policyc.active(SQUARE):
        for remat in REMAT:
            found = weights_quantized(jax.grad(model(remat)), STACKED, X[0])
            assert found == {(): 1, (LAYERS,): 2}, remat


def test_a_loop_over_one_weight_quantizes_it_once():
    def loss(p: Any, x: jax.Array) -> jax.Array:
        def body(h: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ p["recurrent"] + row @ p["input"]), None

        return jnp.sum(lax.scan(body, x[0], x)[0])

    params = {"recurrent": weight(WIDTH, WIDTH), "input": weight(WIDTH, WIDTH).T.copy()}
    with policyc.active(SQUARE):
        found = weights_quantized(jax.grad(loss), params, X)
    assert found == {(): 2}


def test_a_weight_on_the_left():
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(p["w"].T @ x.T))

    with policyc.active(TWO_WAYS):
        found = weights_quantized(accumulated(loss), {"w": weight(WIDTH, WIDTH)}, X, operand="lhs")
    assert found == {(): 1}


def test_what_cannot_be_followed_stays_where_it_is():
    def loss(p: Any, x: jax.Array) -> jax.Array:
        chosen = lax.dynamic_index_in_dim(p["w"], jnp.argmax(x[0]) % LAYERS, keepdims=False)
        return jnp.sum(jnp.tanh(x @ chosen) @ p["v"])

    params = {"w": weight(LAYERS, WIDTH, WIDTH), "v": weight(WIDTH, WIDTH)}
    with policyc.active(SQUARE):
        found = weights_quantized(accumulated(loss), params, X)
    assert found == {(PARTS,): 1, (): 1}


def test_fresh_signs_stay_random():
    """What is random in a weight depends on the product it enters, and is not made beforehand."""
    with policyc.active("* -> nvfp4(rounding=ms_eden)"):
        found = weights_quantized(accumulated(model("none")), UNROLLED, X)
    assert found == {(): 5, (PARTS,): 4}


def test_nothing_kept_is_touched():
    step = accumulated(model("full"))
    plain = str(jax.make_jaxpr(step)(STACKED, X))
    with policyc.active("* -> keep"):
        assert str(jax.make_jaxpr(step)(STACKED, X)) == plain


@pytest.mark.parametrize("seed", [3])
def test_any_program(seed, in_place):
    any_program(seed, in_place)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 32))
def test_any_program_at_length(seed, in_place):
    """In a format that compiles fast: what is handed through containers is handed alike in all."""
    any_program(seed, in_place, "mxfp8")


def any_program(seed: int, in_place: Callable[[], None], format: str = "nvfp4") -> None:
    """Nested scans, branches, loops, jits and remats: the same bits, and no weight quantized inside of a batch."""
    made = program(seed, 4)
    step, parts = accumulated(made.loss), jnp.stack([made.batch] * PARTS)

    def run() -> Any:
        with policyc.active(f"* -> {format}; layers[0] -> fp8"):
            return jax.jit(step)(made.params, parts)

    once = run()
    in_place()
    same(once, run())


def test_on_eight_devices(in_place):
    """Weights lie on all devices, and are gathered as codes."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P(None, "fsdp"))
    width = 64
    params = jax.device_put(
        {"layers": {"up": weight(2, width, width), "down": weight(2, width, width)}}, rows
    )
    parts = jax.device_put(weight(PARTS, 16, width), rows)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        h, _ = lax.scan(lambda h, each: (jax.checkpoint(block)(h, each), None), x, p["layers"])
        return jnp.mean(jnp.square(h))

    def run() -> tuple[Any, str]:
        with policyc.active(SQUARE):
            compiled = jax.jit(accumulated(loss)).lower(params, parts).compile()
        return compiled(params, parts), compiled.as_text()

    once, text = run()
    in_place()
    before, other = run()
    same(once, before)
    assert gathered(text) == gathered(other)


def gathered(text: str) -> set[str]:
    """The types of what is gathered from all devices."""
    lines = (line.partition(" = ")[2] for line in text.splitlines() if " all-gather" in line)
    return {line.partition("{")[0] for line in lines}


# ---- random bits


def test_a_stack_rounds_alike_scanned_split_and_unrolled():
    few = jax.tree.map(lambda w: w[:2], STACKED["layers"])
    apart = [jax.tree.map(lambda w, i=i: w[i], few) for i in range(2)]

    def gradients(policy: str, layers: Any) -> Any:
        with policyc.active(policy):
            return jax.jit(jax.grad(model("none")))({**STACKED, "layers": layers}, X[0])

    whole, unrolled = (gradients("* -> mxfp4(sr=grad)", layers) for layers in (few, apart))
    same(whole["head"], unrolled["head"])
    split = gradients("* -> mxfp4(sr=grad); layers[0].up @ dgrad -> bf16", few)
    same(jax.tree.map(lambda w: w[1], whole["layers"]), jax.tree.map(lambda w: w[1], split["layers"]))
    for i, layer in enumerate(unrolled["layers"]):
        same(jax.tree.map(lambda w, i=i: w[i], whole["layers"]), layer)


def test_equal_layers_round_by_bits_of_their_own():
    x, slope = weight(64, WIDTH), weight(64, 3 * WIDTH)[:, :WIDTH]

    def loss(p: Any) -> jax.Array:
        def body(total: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return total + jnp.sum((x @ w) * slope), None

        return lax.scan(body, jnp.zeros(()), p["layers"])[0]

    params = {"layers": jnp.stack([weight(WIDTH, WIDTH)] * 3)}
    with policyc.active("* -> nvfp4(sr=grad)"):
        one, two, three = jax.jit(jax.grad(loss))(params)["layers"]
    assert not jnp.array_equal(one, two)
    assert not jnp.array_equal(two, three)
    with policyc.active("* -> nvfp4"):
        one, two, _ = jax.jit(jax.grad(loss))(params)["layers"]
        closed = jax.make_jaxpr(jax.grad(loss))(params)
    same(one, two)
    assert "u32" not in str(closed), "nothing is random, and nobody counts"


def test_every_layer_has_a_number_of_its_own():
    """Nested stacks too, whatever their paths say; and a stack inside of a jit that is called for each of several."""
    found = set()
    for seed in range(8):
        made = program(seed, 4)
        sites = policyc.plan("* -> nvfp4", made.loss, made.params, made.batch).sites
        for site in sites:
            numbers = site.loop_ordinals()
            assert len(set(numbers)) == len(numbers) == site.count
            found.add(len(site.stacks))
    assert found >= {0, 1, 2}


# ---- activations that several products read

GATED = {**STACKED, "layers": {**STACKED["layers"], "gate": weight(LAYERS, WIDTH, HIDDEN) + 0.1}}
RANDOM = "* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)"
ONE, TWO = "* -> fp8", "* -> mxfp8"
"""Codes of whole tensors serve fprop and wgrad."""


def gated(remat: str, unrolled: bool = False) -> Loss:
    def block(h: jax.Array, p: Any) -> jax.Array:
        gate, up, down = (p[name].astype(h.dtype) for name in ("gate", "up", "down"))
        return h + (jnp.tanh(h @ gate) * (h @ up)) @ down

    layer = REMAT[remat](block)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        h = x.astype(jnp.bfloat16)
        if unrolled:
            for at in range(2):
                h = layer(h, jax.tree.map(lambda w, at=at: w[at], p["layers"]))
        else:
            h, _ = lax.scan(lambda h, each: (layer(h, each), None), h, p["layers"])
        return jnp.mean(jnp.square(h.astype(jnp.float32)))

    return loss


def activations_quantized(f: Callable[..., Any], *args: Any) -> int:
    closed = without_dead_code(jax.make_jaxpr(f)(*args))
    found = [e for e in jaxprs.all_equations(closed) if jaxprs.primitive_name(e).endswith("_quantize")]
    return sum(e.params["operand"].endswith(".lhs") for e in found)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Called, it has every activation quantized where it is used."""

    def switch() -> None:
        monkeypatch.setattr(SiteRewriter, "share", lambda *_: {})
        jax.clear_caches()

    yield switch
    jax.clear_caches()


QUICK = [(ONE, "none", False), (ONE, "full", False), (ONE, "dots", True), (TWO, "named", False)]
LATER = [(TWO, "full", True), (RANDOM, "none", False), (RANDOM, "named", True), (RANDOM, "dots", False)]


@pytest.mark.parametrize(
    ("policy", "remat", "unrolled"), [*QUICK, *(pytest.param(*c, marks=pytest.mark.slow) for c in LATER)]
)
def test_what_two_products_read_is_quantized_once(
    policy: str, remat: str, unrolled: bool, apart: Callable[[], None]
) -> None:
    """And to the same bits as where it is used."""
    loss, x = gated(remat, unrolled), X[0]
    step = jax.jit(jax.value_and_grad(policyc.apply(policy, loss), argnums=(0, 1)))
    once, found = activations_quantized(step, GATED, x), step(GATED, x)
    apart()
    step = jax.jit(jax.value_and_grad(policyc.apply(policy, loss), argnums=(0, 1)))
    each, wanted = activations_quantized(step, GATED, x), step(GATED, x)
    same(found, wanted)
    assert once < each
    if remat in ("none", "named"):
        # Of three products in a block, two read the same.
        blocks = (1 if policy == ONE else 2) * (2 if unrolled else 1)
        assert (once, each) == (2 * blocks, 3 * blocks)


def test_what_is_treated_differently_is_quantized_apart() -> None:
    def quantized(policy: str) -> int:
        return activations_quantized(jax.value_and_grad(policyc.apply(policy, gated("none"))), GATED, X[0])

    assert quantized("* -> mxfp8") == 2 * 2
    assert quantized("* -> mxfp8; gate -> fp8") == 2 + 1 + 2
    assert quantized("* -> mxfp8; gate -> keep") == 2 + 2
    # Codes of fprop alike, those of wgrad not.
    assert quantized("* -> mxfp8; gate @ wgrad -> bf16") == 2 + 1 + 2
