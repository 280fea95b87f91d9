"""`outer=shared`: weights that read the same activation are quantized with the fp32 scale of the largest of them.

Each weight is multiplied with the identity, which every format holds exactly, so a result is a dequantized weight. It
is compared with the oracle: another code or another maximum in bfloat16 would change it by .4 % or more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import policyc
from policyc.language.diagnostics import PolicyError
from tests.support import rounding_oracle as oracle
from tests.support.gemms import relative_error
from tests.support.layered_models import GATED, REMAT, X, accumulated, assert_same_bits, gated_model

K, N, LAYERS = 32, 48, 3
NV = "nvfp4(rht=wgrad, sr=grad, scale2d=weights, outer=shared)"
Weights = dict[str, Any]


def weights(*lead: int) -> Weights:
    """Weights whose largest magnitudes differ by factors that are not powers of two."""
    rng = np.random.default_rng(7)
    return {
        name: (factor * rng.standard_normal((*lead, K, N))).astype(np.float32)
        for name, factor in {"q": 1, "k": 11.3, "v": 0.037, "o": 5.1}.items()
    }


def siblings(x: jax.Array, w: Weights) -> Weights:
    """q, k and v read x; o reads another array. k is transposed, and is the left operand."""
    full = {name: jnp.asarray(v).astype(jnp.bfloat16) for name, v in w.items()}
    dot = partial(jnp.matmul, preferred_element_type=jnp.float32)
    y = {name: dot(x, full[name]) for name in ("q", "v")}
    k = lax.dot_general(full["k"], x, (((0,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return {**y, "k": k.T, "o": dot(jnp.tanh(100 * x).astype(x.dtype), full["o"])}


def expected(w: Weights, groups: str, **of: Callable[..., Mapping[str, Any]]) -> Weights:
    """The dequantized weights, by the oracle, whose `groups` share a maximum: `qkv,o`."""
    rounded = {name: v.astype(ml_dtypes.bfloat16).astype(np.float32) for name, v in w.items()}
    out = {}
    for group in groups.split(","):
        amax = max(np.abs(rounded[name]).max() for name in group)
        for name in group:
            # An outer scale is found from the largest magnitude, so one such column, cut off again, shares it.
            wide = np.concatenate([rounded[name].T, np.zeros((16, K), np.float32)])
            wide[-1, -1] = amax
            out[name] = of.get(name, of["all"])(wide)["dequantized"][:N].T
    return out


def assert_same(ours: Any, values: np.ndarray, name: str) -> None:
    # The outer scale of the identity is not exact, and its product with that of the weight is rounded.
    np.testing.assert_allclose(np.asarray(ours), values, rtol=3e-7, err_msg=name)


nvfp4, fp8 = oracle.nvfp4, partial(oracle.fp8, element="e4m3")
CASES = {
    f"* -> {NV}": ("qkv,o", {"all": partial(nvfp4, tile=16)}),
    "* -> nvfp4(outer=shared)": ("qkv,o", {"all": nvfp4}),
    "* -> fp8(outer=shared)": ("qkv,o", {"all": fp8}),
    "* -> nvfp4(outer=shared); v -> fp8(outer=shared)": ("qk,v,o", {"all": nvfp4, "v": fp8}),
    "* -> nvfp4(outer=shared); q -> nvfp4": ("kv,q,o", {"all": nvfp4}),
    "* @ fprop -> nvfp4(outer=shared)": ("qkv,o", {"all": nvfp4}),
}


def quantized(policy: str, f: Callable[..., Any], w: Weights) -> Weights:
    """The results of a program under a policy. Its loss is their sum."""

    def loss(w: Weights) -> tuple[jax.Array, Weights]:
        y = f(w)
        return sum(jnp.sum(a) for a in jax.tree.leaves(y)), y  # type: ignore[return-value]  # sum starts from an int

    with policyc.active(policy):
        return jax.jit(jax.value_and_grad(loss, has_aux=True))(w)[0][1]


@pytest.mark.parametrize("policy", CASES)
def test_siblings_share_the_scale_of_the_largest(policy: str) -> None:
    groups, of = CASES[policy]
    w, x = weights(), jnp.eye(K, dtype=jnp.bfloat16)
    ours = quantized(policy, partial(siblings, x), w)
    for name, values in expected(w, groups, **of).items():
        assert_same(ours[name], values, name)


@pytest.mark.parametrize(("remat", "policy"), [("none", ""), ("full", ""), ("full", "layers[1].k -> nvfp4")])
def test_each_layer_of_a_scan_has_scales_of_its_own(remat: str, policy: str) -> None:
    """A rule for one layer splits the scan, and takes that layer's k out of the group."""
    stacked, x = {"layers": weights(LAYERS)}, jnp.eye(K, dtype=jnp.bfloat16)
    layer = REMAT[remat](lambda w: siblings(x, w))

    def f(w: Weights) -> Weights:
        return lax.scan(lambda c, each: (c, layer(each)), 0, w["layers"])[1]

    ours = quantized(f"* -> nvfp4(outer=shared)\n{policy}", f, stacked)
    for index in range(LAYERS):
        groups = "qv,k,o" if policy and index == 1 else "qkv,o"
        one = {name: v[index] for name, v in stacked["layers"].items()}
        for name, values in expected(one, groups, all=nvfp4).items():
            assert_same(ours[name][index], values, f"{name} {index}")


def test_casts_and_copies_of_the_array_do_not_part_siblings() -> None:
    """As where each layer of a framework casts its own input. A slice is another array."""
    w, x = weights(), jnp.eye(K)

    def layers(w: Weights) -> Weights:
        inputs = {
            "q": x.astype(jnp.bfloat16),
            "k": x.reshape(K * K).reshape(K, K),
            "v": jax.lax.with_sharding_constraint(x, jax.sharding.SingleDeviceSharding(jax.devices()[0])),
            "o": jnp.concatenate([x, x])[:K],
        }
        y = {}
        for name, rows in inputs.items():
            full = jnp.asarray(w[name]).astype(jnp.bfloat16)
            y[name] = jnp.matmul(rows.astype(jnp.bfloat16), full, preferred_element_type=jnp.float32)
        return y

    ours = quantized("* -> nvfp4(outer=shared)", layers, w)
    for name, values in expected(w, "qkv,o", all=nvfp4).items():
        assert_same(ours[name], values, name)


def test_each_expert_has_a_scale_of_its_own() -> None:
    w = weights(2)
    x = jnp.stack([jnp.eye(K, dtype=jnp.bfloat16)] * 2)

    def experts(w: Weights) -> Weights:
        full = {name: jnp.asarray(w[name]).astype(x.dtype) for name in ("q", "k")}
        return {n: jnp.matmul(x, v, preferred_element_type=jnp.float32) for n, v in full.items()}

    ours = quantized("* -> nvfp4(outer=shared)", experts, w)
    for index in range(2):
        for name, values in expected({n: v[index] for n, v in w.items()}, "qk", all=nvfp4).items():
            assert_same(ours[name][index], values, f"{name} {index}")


def test_a_nan_in_one_weight_reaches_all_that_share_its_scale() -> None:
    w = weights()
    w["v"][0, 0] = np.nan
    ours = quantized("* -> nvfp4(outer=shared)", partial(siblings, jnp.eye(K, dtype=jnp.bfloat16)), w)
    assert {name for name, y in ours.items() if np.isnan(y).any()} == {"q", "k", "v"}


@pytest.mark.parametrize("options", ["rht=wgrad, scale2d=weights", "backward=dequantized", "scale2d=all"])
def test_accumulation_and_unrolling_change_no_bit(options: str) -> None:
    policy = f"* -> nvfp4({options}, outer=shared)"
    loss = policyc.apply(policy, gated_model("full"))
    unrolled = {**GATED, "layers": jax.tree.map(lambda w: w[:2], GATED["layers"])}
    other = policyc.apply(policy, gated_model("none", unrolled=True))
    ours, theirs = (jax.jit(jax.grad(f))(unrolled, X[0]) for f in (loss, other))
    if "dequantized" in options:
        # A gradient in bf16 makes the order of an fp32 sum visible. A block holds some 8 roundings of 2**-9 each.
        for name, grad in ours["layers"].items():
            assert relative_error(grad, theirs["layers"][name]) < 8 * 2**-9, name
    else:
        assert_same_bits(ours, theirs)
    value, _ = jax.jit(accumulated(loss))(unrolled, X)
    np.testing.assert_allclose(value, sum(loss(unrolled, x) for x in X), rtol=1e-6)  # the order of a sum


def test_a_weight_that_is_no_parameter_cannot_share() -> None:
    def merged(w: Weights) -> Weights:
        x = jnp.eye(K)
        return {"q": x @ w["q"], "k": x @ (w["k"] + w["v"])}

    with pytest.raises(PolicyError, match="cannot share its scale with those that read the same array"):
        quantized("* -> nvfp4(outer=shared)", merged, weights())

    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def mapped(w: Weights) -> Weights:
        f = partial(siblings, jnp.eye(K, dtype=jnp.bfloat16))
        return jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P())(w)

    with pytest.raises(PolicyError, match="outer=tensor"):
        quantized("* -> fp8(outer=shared)", mapped, weights())
    quantized("o -> fp8(outer=shared)", mapped, weights())  # alone


@pytest.mark.parametrize("option", ["sr=weights", "rht=fprop"])
def test_a_scale_is_shared_by_weights_as_they_are_served(option: str) -> None:
    with pytest.raises(PolicyError, match="as they are served"):
        policyc.parse(f"* -> nvfp4(outer=shared, {option})")
