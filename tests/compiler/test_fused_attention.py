"""Kinds of the products around an attention that is one call: nothing here is lowered or run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl

from policyc.compiler.planning.plan import make_plan
from policyc.compiler.tables.kind_tables import explain_kinds
from policyc.language.loader import parse
from tests.compiler.test_kinds import kind_and_blocks
from tests.support.jaxpr_tools import find_sites
from tests.support.kind_programs import (
    BATCH,
    BLOCK_PARAMS,
    HEADS,
    HIDDEN,
    LM_PARAMS,
    TOKEN_IDS,
    TOKENS,
    WIDTH,
    cross_entropy,
    layer_norm,
    mlp,
    outside,
    rms_norm,
    rotate,
    scanned,
    split_heads,
    stack,
    unrolled,
    weight,
)

PROJECTIONS = ("attention",) * 4
BLOCK = (*PROJECTIONS, "mlp", "mlp")
SIZE = WIDTH // HEADS


def like(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def foreign(q: Any, k: Any, v: Any) -> Any:
    """Under a name that says nothing."""
    return jax.ffi.ffi_call("f", like(q))(q, k, v)


def foreign_with_more_results(q: Any, k: Any, v: Any) -> Any:
    """As of Transformer Engine: with a bias, a seed and lengths, and the logarithms of the sums."""
    sums = jax.ShapeDtypeStruct((BATCH, HEADS, TOKENS), jnp.float32)
    bias, seed, lengths = jnp.zeros((1, HEADS, TOKENS, TOKENS)), jnp.zeros(4, int), jnp.full(BATCH, TOKENS)
    return jax.ffi.ffi_call("f", (like(q), sums))(q, k, v, bias, seed, lengths)[0]


@jax.custom_vjp
def differentiable(q: Any, k: Any, v: Any) -> Any:
    return foreign(q, k, v)


differentiable.defvjp(
    lambda q, k, v: (foreign(q, k, v), (q, k, v)),
    lambda saved, g: jax.ffi.ffi_call("b", [like(a) for a in saved])(g, *saved),
)


def cudnn(q: Any, k: Any, v: Any) -> Any:
    half = (a.astype(jnp.bfloat16) for a in (q, k, v))
    return jax.nn.dot_product_attention(*half, is_causal=True, implementation="cudnn").astype(q.dtype)


def kernel(body: Callable[..., None]) -> Callable[..., Any]:
    spec = pl.BlockSpec((None, TOKENS, None, SIZE), lambda b, h: (b, 0, h, 0))

    def call(q: Any, k: Any, v: Any) -> Any:
        return pl.pallas_call(
            body, grid=(BATCH, HEADS), in_specs=[spec] * 3, out_specs=spec, out_shape=like(q)
        )(q, k, v)

    return call


def without_products(q: Any, k: Any, v: Any, out: Any) -> None:
    logits = (q[...][:, None] * k[...][None]).sum(-1)
    out[...] = (jax.nn.softmax(logits)[..., None] * v[...][None]).sum(1)


CALLS: dict[str, Callable[..., Any]] = {
    "cudnn": cudnn,
    "a foreign function": foreign,
    "a foreign function with more operands and results": foreign_with_more_results,
    "a foreign function with its own derivative": differentiable,
    "a kernel without products": kernel(without_products),
}


@pytest.fixture(autouse=True)
def cudnn_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX asks for the version of cuDNN when it traces."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91002)


def self_attention(x: Any, p: Any, call: Callable[..., Any]) -> Any:
    q, k, v = (split_heads(x @ p[name]) for name in ("w1", "w2", "w3"))
    return call(q, k, v).reshape(x.shape) @ p["w4"]


def block(x: Any, p: Any, attention: Callable[[Any, Any], Any]) -> Any:
    x = x + attention(layer_norm(x, p["s1"]), p)
    return x + mlp(layer_norm(x, p["s2"]), p)


def language_model(attention: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    def loss(p: Any) -> Any:
        x = p["table"][TOKEN_IDS]
        for layer in p["l"]:
            x = block(x, layer, attention)
        return cross_entropy(layer_norm(x, p["s"]) @ p["out"])

    return loss


def kinds_of(loss: Callable[[Any], Any], params: Any) -> list[Any]:
    return [kind_and_blocks(site) for site in find_sites(loss, params)]


UNROLLED = {**LM_PARAMS, "l": [BLOCK_PARAMS] * 3}


@pytest.mark.parametrize("name", CALLS)
def test_fused_attention_in_a_scan(name: str) -> None:
    def loss(p: Any) -> Any:
        def step(x: Any, layer: Any) -> Any:
            return block(x, layer, lambda h, q: self_attention(h, q, CALLS[name])), None

        x, _ = lax.scan(step, p["table"][TOKEN_IDS], p["l"])
        return cross_entropy(x @ p["out"])

    params = {**LM_PARAMS, "l": stack(4, BLOCK_PARAMS)}
    assert kinds_of(loss, params) == [*scanned(4, *BLOCK), *outside("head")]


@pytest.mark.parametrize("name", CALLS)
def test_fused_attention_of_one_product_with_rotary_positions_and_norms(name: str) -> None:
    def attention(x: Any, p: Any) -> Any:
        q, k, v = (split_heads(part) for part in jnp.split(x @ p["w1"], 3, -1))
        return CALLS[name](rms_norm(rotate(q)), rms_norm(rotate(k)), v).reshape(x.shape) @ p["w4"]

    layer = {**BLOCK_PARAMS, "w1": weight(WIDTH, 3 * WIDTH)}
    expected = [*unrolled(3, "attention", "attention", "mlp", "mlp"), *outside("head")]
    assert kinds_of(language_model(attention), {**UNROLLED, "l": [layer] * 3}) == expected


def test_fused_cross_attention_with_fewer_heads_of_keys() -> None:
    """The memory is read by keys and values alone."""

    def loss(p: Any) -> Any:
        x, memory = p["table"][TOKEN_IDS], jnp.ones((BATCH, 5, WIDTH))
        for layer in p["l"]:
            q = split_heads(x @ layer["w1"])
            k, v = (split_heads(memory @ layer[name], 1) for name in ("w2", "w3"))
            x = x + foreign(q, k, v).reshape(x.shape) @ layer["w4"]
            x = x + mlp(x, layer)
        return cross_entropy(x @ p["out"])

    layer = {**BLOCK_PARAMS, "w2": weight(WIDTH, SIZE), "w3": weight(WIDTH, SIZE)}
    expected = [*unrolled(3, *BLOCK), *outside("head")]
    assert kinds_of(loss, {**UNROLLED, "l": [layer] * 3}) == expected


def packed(name: str) -> Callable[[Any, Any], Any]:
    def attention(x: Any, p: Any) -> Any:
        result = jax.ShapeDtypeStruct((BATCH, TOKENS, HEADS, SIZE), x.dtype)
        qkv = (x @ p["w1"]).reshape(BATCH, TOKENS, 3, HEADS, SIZE)
        return jax.ffi.ffi_call(name, result)(qkv).reshape(x.shape) @ p["w4"]

    return attention


@pytest.mark.parametrize(("name", "kind"), [("te_fused_attn_forward", "attention"), ("f", "")])
def test_the_name_decides_about_a_call_with_packed_operands(name: str, kind: str) -> None:
    """Without it, nothing is said: neither attention nor mlp."""
    layer = {**BLOCK_PARAMS, "w1": weight(WIDTH, 3 * WIDTH)}
    expected = [*unrolled(3, kind, kind, "mlp", "mlp"), *outside("head")]
    assert kinds_of(language_model(packed(name)), {**UNROLLED, "l": [layer] * 3}) == expected


def foreign_norm(x: Any) -> Any:
    """The normalized values and what the derivative needs."""
    return jax.ffi.ffi_call("norm", (like(x), jax.ShapeDtypeStruct(x.shape[:-1], x.dtype)))(x)[0]


def test_other_foreign_functions_are_no_attention() -> None:
    """A norm, and rotary positions of queries and keys and values at once."""

    def rotated(*operands: Any) -> Any:
        return foreign(*jax.ffi.ffi_call("attn_rope", [like(a) for a in operands])(*operands))

    def loss(p: Any) -> Any:
        x = p["table"][TOKEN_IDS]
        for layer in p["l"]:
            x = x + self_attention(foreign_norm(x), layer, rotated)
            x = x + foreign_norm(foreign_norm(x @ layer["w5"]) @ layer["w6"])
        return cross_entropy(x @ p["out"])

    expected = [*unrolled(3, *PROJECTIONS, "mlp", "mlp"), *outside("head")]
    assert kinds_of(loss, {**UNROLLED, "l": [BLOCK_PARAMS] * 3}) == expected


@pytest.mark.parametrize("names", [("w5", "w7"), ("w5", "w7", "w8")])
def test_a_call_that_may_combine_its_operands_elementwise_is_not_known(names: tuple[str, ...]) -> None:
    """Arrays of one shape without heads may also be keys and values: the products around the call have no kind."""

    def loss(p: Any) -> Any:
        x = p["table"][TOKEN_IDS]
        for layer in p["l"]:
            operands = [x @ layer[name] for name in names]
            x = x + jax.ffi.ffi_call("f", like(operands[0]))(*operands) @ layer["w6"]
        return cross_entropy(x @ p["out"])

    layer = {
        "w5": weight(WIDTH, HIDDEN),
        "w6": weight(HIDDEN, WIDTH),
        **dict.fromkeys(("w7", "w8"), weight(WIDTH, HIDDEN)),
    }
    expected = [*unrolled(3, *[""] * len(names), ""), *outside("head")]
    assert kinds_of(loss, {**UNROLLED, "l": [layer] * 3}) == expected


def test_the_reason_names_the_call() -> None:
    loss = language_model(lambda x, p: self_attention(x, p, foreign))
    plan = make_plan(parse(""), find_sites(loss, UNROLLED))
    assert "its result is an operand of the attention at " in explain_kinds(plan, "l[1].w1")
    assert "it multiplies the result of the attention at " in explain_kinds(plan, "l[1].w4")
