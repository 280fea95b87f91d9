"""The entries: apply, plan, active and step, on programs as people write them.

What is executed is in MXFP8, which compiles in a third of the time of NVFP4: the format makes no difference here.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policyc
from policyc.compiler.plan_checks import check_plan
from policyc.jaxcore import jaxprs
from policyc.language.recipes import Gemm

pytestmark = pytest.mark.usefixtures("quick_compile")

W = jnp.asarray(np.random.default_rng(0).standard_normal((16, 16)), jnp.float32) / 4
X = jnp.asarray(np.random.default_rng(1).standard_normal((8, 16)), jnp.float32)


def count(f, *args) -> Counter:
    return Counter(jaxprs.primitive_name(e) for e in jaxprs.all_equations(jax.make_jaxpr(f)(*args)))


def gemms(f, *args) -> int:
    return count(f, *args)["scaled_gemm"]


def loss(w, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ w) @ w))


def test_apply_keeps_the_signature_and_composes():
    def f(w, x, *, scale=1.0):
        "doc"
        return scale * loss(w, x)

    g = policyc.apply("* -> mxfp8", f)
    assert g.__name__ == "f"
    assert g.__doc__ == "doc"
    value = g(W, X, scale=2.0)
    assert jnp.allclose(value, jax.jit(g, static_argnames="scale")(W, X, scale=2.0), rtol=1e-4)
    assert value != f(W, X, scale=2.0)
    assert jax.vmap(g, (None, 0))(W, jnp.stack([X, X])).shape == (2,)
    assert jax.grad(jax.checkpoint(g))(W, X).shape == W.shape

    def body(w, x):
        return w - 0.1 * jax.grad(g)(w, x), g(w, x)

    _, losses = jax.lax.scan(body, W, jnp.stack([X] * 3))
    assert losses[-1] < losses[0]


def test_the_policy_comes_first():
    with pytest.raises(TypeError, match=r"first argument is the policy .*, not a function"):
        policyc.apply(loss, "* -> bf16")


def test_weights_may_be_any_arguments():
    def f(x, a, b):
        return ((x @ a) @ b).sum()

    plan = policyc.plan("a -> fp8; b -> nvfp4", f, X, W, W, param_argnums=(1, 2))
    assert [s.name for s in plan.sites] == ["a", "b"]
    assert [s.weight for s in plan.sites] == ["rhs", "rhs"]
    with pytest.raises(TypeError, match="param_argnums has 5"):
        policyc.plan("* -> fp8", f, X, W, W, param_argnums=5)


def test_plan_takes_abstract_arguments():
    shape = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    plan = policyc.plan("* -> nvfp4", loss, shape, jax.ShapeDtypeStruct((64, 1024), jnp.bfloat16))
    assert [(s.m, s.n, s.k) for s in plan.sites] == [(64, 1024, 1024)] * 2


@pytest.mark.parametrize(
    "entry",
    [
        lambda f: jax.grad(f),
        lambda f: jax.value_and_grad(f),
        lambda f: jax.jacrev(f),
        lambda f: jax.jit(jax.grad(f)),
        lambda f: lambda w, x: jax.vjp(f, w, x)[1](1.0),
        lambda f: lambda w, x: jax.vjp(partial(f, x=x), w)[1](1.0),
        lambda f: jax.grad(jax.jit(f)),
        lambda f: jax.grad(jax.checkpoint(f)),
    ],
)
def test_active_reaches_every_entry_of_autodiff(entry):
    derivative = entry(loss)
    assert gemms(derivative, W, X) == 0
    with policyc.active("* -> nvfp4") as session:
        assert gemms(entry(loss), W, X) >= 5
        assert gemms(derivative, W, X) >= 5, "a derivative made before is reached too"
    assert session.plans
    assert session.matched
    assert gemms(derivative, W, X) == 0, "nothing stays behind"


def test_a_step_that_was_compiled_before_is_compiled_again():
    step = jax.jit(jax.value_and_grad(loss))
    before = step(W, X)
    with policyc.active("* -> mxfp8"):
        inside = step(W, X)
    after = step(W, X)
    assert before[0] == after[0] != inside[0]


def test_the_loss_is_traced_exactly_once():
    calls = []

    def f(w, x):
        calls.append(1)
        return loss(w, x)

    with policyc.active("* -> mxfp8"):
        jax.jit(jax.value_and_grad(f))(W, X)
    assert len(calls) == 1
    jax.jit(policyc.apply("* -> mxfp8", f))(W, X)
    assert len(calls) == 2


def test_what_is_no_array_is_carried_through():
    class Config:
        depth = 2

    def f(params, x, config, mode, *, flag):
        assert isinstance(config, Config)
        assert isinstance(mode, str)
        if flag and x.shape[0] > 1:
            for _ in range(config.depth):
                x = jnp.tanh(x @ params["w"])
        return x.sum(), {"mode": mode, "none": None, "n": 3, "mean": x.mean(), "config": config}

    params = {"w": W, "nothing": None}
    with policyc.active("* -> fp8"):
        (value, aux), grads = jax.value_and_grad(f, has_aux=True)(params, X, Config(), "train", flag=True)
    assert aux["mode"] == "train"
    assert aux["n"] == 3
    assert aux["none"] is None
    assert isinstance(aux["config"], Config)
    assert aux["mean"].shape == ()
    assert grads["nothing"] is None
    assert jnp.isfinite(value)


def test_closed_over_arrays_effects_and_dropout_keys():
    seen = []

    def f(w, x, key):
        jax.debug.callback(lambda v: seen.append(float(v)), x.sum())
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return loss(w, jnp.where(keep, x + X, 0))

    with policyc.active("* -> fp8"):
        value, _ = jax.jit(jax.value_and_grad(f))(W, X, jax.random.key(3))
        jax.effects_barrier()
    assert jnp.isfinite(value)
    assert len(seen) == 1


def test_gradient_accumulation_inside_a_scan():
    def step(w, batches):
        def micro(total, x):
            value, grad = jax.value_and_grad(loss)(w, x)
            return total + grad, value

        return jax.lax.scan(micro, jnp.zeros_like(w), batches)

    batches = jnp.stack([X, X * 2])
    with policyc.active("* -> mxfp8") as session:
        total, values = jax.jit(step)(W, batches)
    (plan,) = session.plans
    assert [s.count for s in plan.sites] == [1, 1]
    assert values.shape == (2,)
    assert jnp.isfinite(total).all()


def test_derivatives_inside_a_custom_rule_are_left_alone():
    @jax.custom_vjp
    def inner(w, x):
        return jnp.sin(w).sum() * x.sum()

    def fwd(w, x):
        out, pullback = jax.vjp(lambda w: jnp.sin(w).sum() * x.sum(), w)
        return out, pullback

    inner.defvjp(fwd, lambda pullback, g: (*pullback(g), None))

    def f(w, x):
        return loss(w, x) + inner(w, x)

    with policyc.active("* -> mxfp8") as session:
        jax.jit(jax.grad(f))(W, X)
    assert len(session.plans) == 1


def test_a_derivative_taken_by_a_backward_rule_is_no_loss_of_its_own():
    """As in a loss that computes its logits piece by piece and again on the way back."""

    @jax.custom_vjp
    def head(w, h):
        return (h @ w).sum()

    head.defvjp(
        lambda w, h: (head(w, h), (w, h)),
        lambda saved, g: tuple(g * d for d in jax.grad(lambda w, h: (h @ w).sum(), argnums=(0, 1))(*saved)),
    )

    def f(params, x):
        return head(params["head"], loss(params["body"], x) * x)

    params = {"body": W, "head": W}
    with policyc.active("body -> mxfp8 expect 2") as session:
        jax.jit(jax.grad(f))(params, X)
    assert [[s.name for s in plan.sites] for plan in session.plans] == [["body", "body", "head"]]


def test_a_gemm_stays_in_the_mesh_it_was_written_in():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    everywhere = jax.sharding.PartitionSpec(None, None)

    def f(w, x):
        product = jax.sharding.auto_axes(lambda w, x: x @ w, out_sharding=everywhere)
        return (product(w, x @ w) ** 2).sum()

    with jax.set_mesh(mesh):
        w, x = jax.sharding.reshard(W, everywhere), jax.sharding.reshard(X, everywhere)
        plain = jax.grad(f)(w, x)
        np.testing.assert_array_equal(jax.grad(policyc.apply("* -> f32", f))(w, x), plain)
        assert jnp.isfinite(jax.grad(policyc.apply("* -> mxfp8", f))(w, x)).all()


def test_a_gemm_inside_a_custom_rule_is_an_error_and_can_be_kept():
    @jax.custom_vjp
    def inner(w, x):
        with jax.named_scope("head"):
            return (x @ w).sum()

    inner.defvjp(lambda w, x: (inner(w, x), (w, x)), lambda r, g: (g * r[0], g * r[1]))

    def f(w, x):
        with jax.named_scope("body"):
            h = x @ w
        return inner(w, h)

    with pytest.raises(policyc.PolicyError, match="opaque-site") as caught:
        policyc.apply("* -> nvfp4", f)(W, X)
    (found,) = caught.value.diagnostics
    assert "custom_vjp" in found.message
    assert found.severity == "error"
    assert gemms(jax.grad(policyc.apply("* -> nvfp4; head -> keep", f)), W, X) == 2 + 1


def test_a_weight_that_a_kernel_reads_has_its_name():
    from jax.experimental import pallas

    def kernel(x, w, y):
        y[...] = x[...] @ w[...]

    def f(params, x):
        shape = jax.ShapeDtypeStruct((8, 16), jnp.float32)
        return pallas.pallas_call(kernel, out_shape=shape, interpret=True)(x, params["experts"]).sum()

    (site,) = policyc.plan("experts -> nvfp4", f, {"experts": W}, X).sites
    assert (site.name, site.weight) == ("experts", "rhs")
    with pytest.raises(policyc.PolicyError, match=r"'experts'.*Pallas kernel"):
        policyc.apply("experts -> nvfp4", f)({"experts": W}, X)


def test_expect_is_checked_before_anything_runs():
    with pytest.raises(policyc.PolicyError, match="expects 3 sites and matches 2"):
        policyc.apply("w -> nvfp4 expect 3", loss)(W, X)
    policyc.apply("w -> mxfp8 expect 2", loss)(W, X)


def derive(f):
    """Takes a derivative without computing it."""
    jax.eval_shape(jax.grad(f), W, X)


def test_a_later_loss_may_be_about_other_things_but_not_about_half_of_them():
    with policyc.active("w -> nvfp4 expect 2") as session:
        derive(loss)
        derive(lambda v, x: (x @ v).sum())
        derive(lambda v, x: (v * v).sum())
        assert [sum(p.counts) for p in session.plans] == [2, 0, 0]
        with pytest.raises(policyc.PolicyError, match="expects 2 sites and matches 1"):
            derive(lambda w, x: (x @ w).sum())
    with policyc.active("w -> nvfp4 expect 2"), pytest.raises(policyc.PolicyError, match="matches 0"):
        derive(lambda v, x: (x @ v).sum())
    with policyc.active(
        "w -> nvfp4 expect 2; v -> fp8 expect 1; u -> fp8 expect 1", multiple_losses=True
    ) as session:
        derive(lambda v, x: (x @ v).sum())
        derive(loss)
    assert [d.span.start for d in session.unmet] == [session.policy.rules[2].span.start]


def test_a_loss_traced_at_every_step_is_noted_once():
    with policyc.active("* -> fp8") as session:
        for _ in range(3):
            derive(loss)
    assert len(session.plans) == 1


def test_layer_slices_in_a_scan_count_layers_and_split_it():
    def f(p, x):
        def body(h, layer):
            return jnp.tanh(h @ layer["mlp"]["up"]) @ layer["mlp"]["down"], None

        return jax.lax.scan(body, x, p["decoder"]["layers"])[0].sum()

    stack = jnp.stack([W] * 6)
    p = {"decoder": {"layers": {"mlp": {"up": stack, "down": stack}}}}
    plan = policyc.plan(
        "mlp -> nvfp4 expect 12; layers[-4:].mlp.up -> bf16 expect 4; layers[:15%] -> keep", f, p, X
    )
    check_plan(plan)
    up, down = plan.sites
    kinds = [plan.decisions()[up.address, la].choice(Gemm.FPROP).rule for la in up.layers()]
    assert kinds == [0, 0, 1, 1, 1, 1]
    assert [plan.decisions()[down.address, la].choice(Gemm.FPROP).rule for la in down.layers()] == [0] * 6
    made = policyc.apply(plan.policy, f)
    assert count(made, p, X)["scan"] == 2


def test_nested_stacks_under_one_name_count_as_one():
    def f(p, x):
        def stage(h, layers):
            return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, layers)[0], None

        return jax.lax.scan(stage, x, p["layers"])[0].sum()

    p = {"layers": jnp.stack([jnp.stack([W] * 3)] * 2)}
    plan = policyc.plan("layers -> mxfp8; layers[-2:] -> keep expect 2", f, p, X)
    check_plan(plan)
    (site,) = plan.sites
    kept = [la for la in site.layers() if plan.decisions()[site.address, la].recipe is None]
    assert kept == [(1, 1), (1, 2)]
    assert jnp.isfinite(jax.jit(jax.grad(policyc.apply(plan.policy, f)))(p, X)["layers"]).all()


def test_unrolled_stacks_and_shared_functions():
    block = jax.jit(lambda w, h: jnp.tanh(h @ w))

    def f(p, x):
        for w in p["layers"]:
            x = block(w, x)
        return x.sum()

    p = {"layers": [W] * 4}
    plan = policyc.plan("layers[-1:] -> nvfp4 expect 1; layers[0] @ wgrad -> fp8", f, p, X)
    check_plan(plan)
    assert [bool(plan.decisions()[s.address, ()].recipe) for s in plan.sites] == [True, False, False, True]
    made = jax.make_jaxpr(policyc.apply("* -> fp8; layers[0] -> nvfp4", f))(p, X)
    calls = [b.jaxpr for e in jaxprs.equations(made) for b in jaxprs.sub_jaxprs(e)]
    assert len(calls) == 4
    assert len({id(c) for c in calls}) == 2, "what was shared stays shared where it is treated alike"


def test_a_schedule_switches_without_touching_anything_else():
    policy = policyc.parse("w -> mxfp8\nafter 3 { w -> bf16 }")
    step = jax.jit(jax.value_and_grad(policyc.apply(policy, loss)))
    with pytest.raises(policyc.PolicyError, match="schedule"):
        step(W, X)
    early = jax.value_and_grad(policyc.apply("w -> mxfp8", loss))(W, X)[0]
    late = jax.value_and_grad(policyc.apply("w -> bf16", loss))(W, X)[0]
    values = []
    for n in range(5):
        policyc.set_step(n)
        values.append(float(step(W, X)[0]))
    assert np.allclose(values[:3], early, rtol=1e-5)
    assert np.allclose(values[3:], late, rtol=1e-5)
    assert len(set(values)) == 2


def test_percentages_need_the_length():
    policy = policyc.parse("w -> mxfp8\nafter 50% { w -> bf16 }")
    f = policyc.apply(policy, loss)
    policyc.set_step(9, total=10)
    late = f(W, X)
    policyc.set_step(1)
    assert f(W, X) != late


def test_the_inner_of_two_policies_wins():
    with policyc.active("* -> nvfp4") as outer, policyc.active("* -> keep") as inner:
        assert gemms(jax.grad(loss), W, X) == 0
    assert inner.plans
    assert not outer.plans


def test_applying_twice_is_applying_once():
    once = policyc.apply("* -> nvfp4", loss)
    assert gemms(jax.grad(policyc.apply("* -> nvfp4", once)), W, X) == gemms(jax.grad(once), W, X)


def test_ragged_products():
    def f(w, x, sizes):
        return jnp.square(jax.lax.ragged_dot(x, w, sizes)).sum()

    w, sizes = jnp.stack([W, W * 2]), jnp.array([3, 5], jnp.int32)
    plan = policyc.plan("* -> fp8 expect 1", f, w, X, sizes)
    check_plan(plan)
    (site,) = plan.sites
    assert (site.kind, site.weight, site.m, site.n, site.k) == ("ragged", "rhs", 8, 16, 16)
    found = count(jax.grad(policyc.apply("* -> fp8", f)), w, X, sizes)
    assert found["scaled_ragged_gemm"] >= 2
    assert not found["ragged_dot_general"]
    got, want = policyc.apply("* -> fp8", f)(w, X, sizes), f(w, X, sizes)
    assert abs(got - want) < 0.1 * abs(want)


def test_remat_saves_what_is_quantized():
    f = policyc.apply("* -> nvfp4", loss)
    names = jax.checkpoint_policies.save_only_these_names("quantization")
    saved = count(jax.grad(jax.checkpoint(f, policy=names)), W, X)["nvfp4_quantize"]
    again = count(jax.grad(jax.checkpoint(f)), W, X)["nvfp4_quantize"]
    assert saved <= again


def test_names_stay_with_their_equations():
    def f(w, x):
        with jax.named_scope("outer"):
            return jax.jit(loss)(w, x)

    made = jax.make_jaxpr(policyc.apply("* -> nvfp4", f))(W, X)
    (call,) = [e for e in jaxprs.equations(made) if jaxprs.sub_jaxprs(e)]
    assert jaxprs.name_scopes(call) == ("outer",)


def test_the_weight_may_come_through_layout_only():
    def f(p, x):
        w = p["a"].astype(jnp.bfloat16).T.reshape(16, 16)
        q = jnp.concatenate([p["a"], p["b"]], axis=1)
        return (x.astype(jnp.bfloat16) @ w).sum().astype(jnp.float32) + (x @ q).sum() + (x @ (x.T @ x)).sum()

    plan = policyc.plan("* -> fp8", f, {"a": W, "b": W}, X)
    assert [(s.name, s.weight) for s in plan.sites][:2] == [("a", "rhs"), ("a", "rhs")]
    assert [len(s.parameters) for s in plan.sites] == [1, 2, 0, 0]
    assert plan.sites.sites[2].products == {Gemm.FPROP}


def test_a_matrix_chosen_from_a_stack_is_a_weight_and_a_row_of_an_embedding_is_none():
    """As in a circular pipeline, where every stage takes the weights of its present round."""

    def f(params, ids):
        stages, rounds = params["w"].shape[:2]
        now = jnp.arange(stages) % rounds
        chosen = jax.vmap(lambda w, i: jax.lax.dynamic_index_in_dim(w, i, keepdims=False))(params["w"], now)
        return jnp.einsum("sd,sdf->sf", params["embed"][ids], chosen).sum()

    params = {"w": jnp.ones((2, 3, 16, 16)), "embed": jnp.ones((8, 16))}
    (site,) = policyc.plan("w -> nvfp4 expect 1; embed -> nvfp4 expect 0", f, params, jnp.arange(2)).sites
    assert (site.name, site.weight, site.batch, site.k) == ("w", "rhs", 2, 16)
    both = policyc.plan("* -> keep", lambda p, x: p[jnp.arange(4)] @ x, params["embed"], X.T).sites
    assert [s.weight for s in both] == [None]


def test_a_custom_derivative_is_not_entered_either():
    @jax.custom_jvp
    def inner(w, x):
        return (x @ w).sum()

    inner.defjvp(lambda p, t: (inner(*p), (p[1] @ t[0]).sum()))
    with pytest.raises(policyc.PolicyError, match="custom_jvp"):
        policyc.apply("* -> nvfp4", inner)(W, X)
    assert jax.grad(policyc.apply("* -> keep", inner))(W, X).shape == W.shape


def test_tied_embeddings_are_one_parameter_in_two_sites():
    def f(p, tokens):
        h = jax.nn.one_hot(tokens, 16) @ p["embed"]
        return jax.nn.logsumexp(jnp.tanh(h) @ p["embed"].T)

    plan = policyc.plan("embed -> fp8 expect 2", f, {"embed": W}, jnp.arange(8))
    check_plan(plan)
    assert [s.one_hot for s in plan.sites] == [True, False]
    assert [s.name for s in plan.sites] == ["embed", "embed"]


def test_a_jitted_loss_differentiated_outside_jit_is_compiled_once():
    from jax._src.interpreters import pxla

    inner, other, seen = jax.jit(loss), W + 1, []
    original = pxla.lower_sharding_computation
    with policyc.active("* -> mxfp8"):
        jax.grad(inner)(W, X)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                pxla, "lower_sharding_computation", lambda *a, **k: seen.append(1) or original(*a, **k)
            )
            jax.grad(inner)(other, X)
        assert not seen
