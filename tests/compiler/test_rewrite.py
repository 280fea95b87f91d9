"""The rewritten jaxpr: sites become quantized GEMMs, wherever they are, and nothing else changes.

Most tests read the jaxpr. What is executed is in fp8, which compiles fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad

import policyc
from policyc.compiler.planning.plan import make_plan
from policyc.compiler.rewriting.rewrite import rewrite
from policyc.experiments.taps import TAP, TappedLoss
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.containers import CONTAINERS, Container
from policyc.language.loader import parse
from policyc.numerics import gemm
from policyc.numerics.products import gemm_products
from tests.support.jaxpr_tools import find_sites, primitive_counts, struct, without_dead_code

W, X = struct(16, 16), struct(8, 16)


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.square(jnp.tanh(x @ w) @ w))


def traced(f: Callable[..., Any], *args: Any) -> Any:
    return jax.make_jaxpr(f)(*args)


# ---- containers


def test_a_gemm_stays_in_the_mesh_it_was_written_in() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    everywhere = jax.sharding.PartitionSpec(None, None)
    w, x = (np.random.default_rng(0).standard_normal(s.shape).astype(np.float32) for s in (W, X))

    def f(w: Any, x: Any) -> Any:
        product = jax.sharding.auto_axes(lambda w, x: x @ w, out_sharding=everywhere)
        return (product(w, x @ w) ** 2).sum()

    with jax.set_mesh(mesh):
        w, x = jax.sharding.reshard(w, everywhere), jax.sharding.reshard(x, everywhere)
        plain = jax.jit(jax.grad(f))(w, x)
        np.testing.assert_array_equal(jax.jit(jax.grad(policyc.apply("* -> f32", f)))(w, x), plain)
        assert jnp.isfinite(jax.jit(jax.grad(policyc.apply("* -> fp8", f)))(w, x)).all()


def test_a_new_container_needs_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an entry in the table of containers, analysis, rewrite and telemetry enter it."""
    call = Primitive("nested_call")
    call.multiple_results = True
    call.def_abstract_eval(lambda *_, body: [v.aval for v in body.jaxpr.outvars])

    def f(p: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            (h,) = call.bind(h, w, body=jax.make_jaxpr(lambda h, w: jnp.tanh(h @ w))(h, w))
            return h, None

        return lax.scan(layer, x, p["layers"])[0].sum()

    params = {"layers": struct(3, 16, 16)}
    (site,) = find_sites(f, params, X)
    assert "'nested_call', which the compiler does not know" in site.opaque

    monkeypatch.setitem(CONTAINERS, "nested_call", Container())
    sites = find_sites(f, params, X)
    (site,) = sites
    assert (site.name, site.weight, site.count, site.opaque) == ("layers", "rhs", 3, "")

    plan = make_plan(parse("layers -> mxfp4(sr=grad); layers[0] -> keep"), sites)
    rewritten = rewrite(sites, plan.decisions())
    kept, quantized = [
        e for e in jaxprs.all_equations(rewritten.jaxpr) if jaxprs.primitive_name(e) == "nested_call"
    ]
    assert primitive_counts(kept.params["body"])["dot_general"] == 1
    counts = primitive_counts(quantized.params["body"])
    assert (counts["scaled_gemm"], counts["dot_general"]) == (1, 0)
    # The random key of each layer is an extra input, which passes through the new container.
    assert len(rewritten.hoisted) == 1
    assert len(quantized.invars) == len(kept.invars) + 2

    tapped = TappedLoss(plan, plan.decisions())
    (call_with_tap,) = [
        e for e in jaxprs.all_equations(tapped.jaxpr)
        if jaxprs.primitive_name(e) == "nested_call" and len(e.invars) > 2
    ]  # fmt: skip
    assert len(call_with_tap.invars) == len(quantized.invars) + 1
    assert [e.content for e in tapped._extra].count(TAP) == 1
    (tap,) = tapped.taps()
    assert tap.shape[0] == 2, "a tap for each layer that is measured"


# ---- what is kept


def test_equal_layers_of_an_unrolled_model_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def counted(spec: Any) -> Any:
        calls.append(spec)
        return gemm_products(spec)

    monkeypatch.setattr(gemm, "gemm_products", counted)

    def count(layers: int) -> int:
        def deep(ws: Any, x: Any) -> Any:
            for w in ws:
                x = jnp.tanh(x @ w)
            return jnp.mean(x)

        calls.clear()
        jax.clear_caches()
        traced(jax.value_and_grad(policyc.apply("* -> fp8", deep)), [W] * layers, X)
        return len(calls)

    assert 0 < count(6) == count(12)


def test_a_gemm_inside_a_custom_rule_can_be_kept() -> None:
    @jax.custom_vjp
    def inner(w: Any, x: Any) -> Any:
        with jax.named_scope("head"):
            return (x @ w).sum()

    inner.defvjp(lambda w, x: (inner(w, x), (w, x)), lambda r, g: (g * r[0], g * r[1]))

    def f(w: Any, x: Any) -> Any:
        with jax.named_scope("body"):
            h = x @ w
        return inner(w, h)

    gradient = without_dead_code(traced(jax.grad(policyc.apply("* -> nvfp4; head -> keep", f)), W, X))
    assert primitive_counts(gradient)["scaled_gemm"] == 2, "fprop and wgrad of the body"


def test_applying_twice_is_applying_once() -> None:
    once = policyc.apply("* -> nvfp4", loss)
    twice = policyc.apply("* -> nvfp4", once)
    first, second = (primitive_counts(traced(jax.grad(f), W, X)) for f in (once, twice))
    assert first["scaled_gemm"] == second["scaled_gemm"] > 0


# ---- the new equations


def test_ragged_products() -> None:
    def f(w: Any, x: Any, sizes: Any) -> Any:
        return jnp.square(lax.ragged_dot(x, w, sizes)).sum()

    random = np.random.default_rng(0)
    w = random.standard_normal((2, 16, 16)).astype(np.float32)
    x = random.standard_normal((8, 16)).astype(np.float32)
    sizes = np.array([3, 5], np.int32)
    quantized = policyc.apply("* -> fp8 expect 1", f)
    counts = primitive_counts(traced(jax.grad(quantized), w, x, sizes))
    assert counts["scaled_ragged_gemm"] >= 2
    assert not counts["ragged_dot_general"]
    value, expected = jax.jit(quantized)(w, x, sizes), jax.jit(f)(w, x, sizes)
    assert abs(value - expected) < 0.1 * abs(expected)


def test_a_checkpoint_policy_sees_a_primitive_that_is_called_like_one_of_policyc() -> None:
    """It sees the `dot_general` in place of policyc's primitive, and only of that."""
    theirs = Primitive("scaled_gemm")
    theirs.def_abstract_eval(lambda x: x)
    ad.deflinear2(theirs, lambda ct, _: (ct,))
    seen: list[Any] = []

    def save_nothing(primitive: Any, *_: Any, **__: Any) -> bool:
        seen.append(primitive)
        return False

    def f(w: Any, x: Any) -> Any:
        return jax.checkpoint(lambda w, x: jnp.sin(theirs.bind(x @ w)).sum(), policy=save_nothing)(w, x)

    jax.make_jaxpr(jax.grad(policyc.apply("* -> mxfp8", f)))(W, X)
    assert theirs in seen
    assert lax.dot_general_p in seen
