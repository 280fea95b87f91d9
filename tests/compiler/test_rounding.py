"""The rounding keys of a loss: seed, site, layer, and the step of the run.

The keys are extra inputs of the rewritten loss, or constants of its quantize equations. Most tests read them there.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import policyc
from policyc.compiler.rewriting.rounding import RandomSource
from policyc.compiler.rewriting.run_step import RunStep, current_run_step
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.containers import IterationRange
from tests.support import rounding_key_oracle as oracle
from tests.support.gemms import normal, quick_jit
from tests.support.planned_model import plan_model

STOCHASTIC = "* -> mxfp4(sr=grad)"


W, X = normal(32, 32, dtype=jnp.bfloat16, divisor=4), normal(32, 32, seed=1, dtype=jnp.bfloat16)


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.square(x @ w).astype(jnp.float32))


jitted_loss = jax.jit(loss)


def quantized(policy: str = STOCHASTIC, loss: Any = loss) -> Any:
    return jax.grad(policyc.apply(policy, loss))


# ---- the words of a key


@pytest.mark.parametrize(
    "run_step",
    [
        None,
        RunStep(seed=5, step=11),
        RunStep(seed=5, step=jnp.int32(11)),
        RunStep(seed=jnp.uint32(5), step=jnp.int32(11)),
    ],
)
def test_a_key_consists_of_seed_site_layer_and_step(run_step: RunStep | None) -> None:
    source = RandomSource(seed=3, run_step=run_step)
    extra = (5, 11) if run_step else ()
    sites = list(plan_model(STOCHASTIC).sites)
    keys = source.layer_keys([(s, [IterationRange(0, loop.size) for loop in s.loops]) for s in sites])
    for site, pair in zip(sites, keys, strict=True):
        a, b = (np.asarray(words).ravel() for words in pair)
        layers = [(o,) for o in site.loop_ordinals()] if site.is_layered else [()]
        expected = [oracle.make_key(3, site.id, *layer, *extra) for layer in layers]
        assert list(zip(a.tolist(), b.tolist(), strict=True)) == expected


def key_constants(policy: str, loss: Any) -> set[tuple[int, ...]]:
    """The rounding keys that are constants of the gradient."""
    gradient = jax.make_jaxpr(quantized(policy, loss))(W, X)
    quantizers = [e for e in jaxprs.all_equations(gradient) if e.primitive.name.endswith("_quantize")]
    words = [tuple(int(v.val) for v in e.invars[1:] if hasattr(v, "val")) for e in quantizers]
    return {w for w in words if w}


@pytest.mark.parametrize("loss", [loss, jitted_loss], ids=["traced twice", "one jaxpr for both seeds"])
def test_the_seed_of_the_policy_is_part_of_every_key(loss: Any) -> None:
    site = policyc.plan(STOCHASTIC, loss, W, X).sites.sites[0]
    assert key_constants(STOCHASTIC, loss) == {oracle.make_key(0, site.id)}
    assert key_constants(f"seed = 7\n{STOCHASTIC}", loss) == {oracle.make_key(7, site.id)}


# ---- the step


def test_the_step_is_a_value_of_the_compiled_program() -> None:
    """One trace for all steps. The same numbers are rounded otherwise in another step, and alike in the same step."""
    traces = []

    @quick_jit
    def step(w: Any, x: Any, number: Any) -> Any:
        traces.append(number)
        with policyc.rounding_step(number, seed=1):
            return quantized()(w, x)

    gradients = [np.asarray(step(W, X, n).astype(jnp.float32)) for n in (0, 1, 0)]
    assert len(traces) == 1
    np.testing.assert_array_equal(gradients[0], gradients[2])
    assert (gradients[0] != gradients[1]).mean() > 0.5


@pytest.mark.parametrize("batched", [("seed",), ("number",), ("number", "seed")], ids=" and ".join)
def test_one_program_serves_several_seeds_or_steps(batched: tuple[str, ...]) -> None:
    """The values that are not batched belong to the trace around that of `vmap`."""

    def step(number: Any, seed: Any) -> Any:
        with policyc.rounding_step(number, seed=seed):
            return quantized()(W, X)

    axes = tuple(0 if name in batched else None for name in ("number", "seed"))
    numbers = [jnp.arange(5, 8) if axis == 0 else jnp.int32(5) for axis in axes]
    together = quick_jit(jax.vmap(step, in_axes=axes))(*numbers)
    alone = [quick_jit(step)(*(n[i] if n.ndim else n for n in numbers)) for i in range(3)]
    np.testing.assert_array_equal(together, jnp.stack(alone))
    assert (together[0] != together[1]).mean() > 0.5


def test_the_step_reaches_microbatches_in_a_scan_and_is_hoisted_out_of_it() -> None:
    def step(w: Any, xs: Any, number: Any) -> Any:
        with policyc.rounding_step(number):
            return jax.lax.scan(lambda total, x: (total + quantized()(w, x), None), w * 0, xs)[0]

    traced = jax.make_jaxpr(step)(W, jnp.stack([X, X]), 3)
    (scan,) = (e for e in traced.eqns if e.primitive.name == "scan")
    inner = {str(e.primitive) for e in jaxprs.all_equations(scan.params["jaxpr"])}
    assert "mxfp4_quantize" in inner
    assert "shift_right_logical" not in inner, "keys are hashed in the scan"


def test_a_function_that_is_jitted_inside_two_steps_takes_the_step_of_each() -> None:
    """JAX keeps the trace of the inner function. It must not be used with the traced step of the first caller."""
    inner = jax.jit(quantized())

    def step(w: Any, x: Any, number: Any) -> Any:
        with policyc.rounding_step(number):
            return inner(w, x)

    first = jax.make_jaxpr(step)(W, X, 0)
    second = jax.make_jaxpr(lambda w, x, number: step(w, x, number))(W, X, 0)
    for traced in (first, second):
        (call,) = (e for e in traced.eqns if e.primitive.name in ("jit", "pjit"))
        assert len(call.invars) == 4, "the operands and the two words of the key"


def test_a_number_under_jit_is_an_error() -> None:
    with policyc.rounding_step(3), pytest.raises(TypeError, match="compile that number into the step"):
        jax.make_jaxpr(quantized())(W, X)
    with policyc.rounding_step(3):
        assert current_run_step() is not None, "outside jit a number is a step like any other"


@pytest.mark.parametrize("step", [1.5, np.arange(3), True])
def test_a_step_is_one_integer(step: Any) -> None:
    with pytest.raises(TypeError, match="the step must be a single integer"), policyc.rounding_step(step):
        pass
    with (
        pytest.raises(TypeError, match="the seed must be a single integer"),
        policyc.rounding_step(0, seed=step),
    ):
        pass


def test_set_step_rejects_a_traced_step() -> None:
    with pytest.raises(TypeError, match=r"policyc\.rounding_step"):
        jax.make_jaxpr(policyc.set_step)(3)


def test_the_step_changes_nothing_without_stochastic_rounding() -> None:
    def step(number: Any, policy: str) -> Any:
        with policyc.rounding_step(number):
            return quantized(policy)(W, X)

    traced = jax.make_jaxpr(step, static_argnums=1)(3, "* -> mxfp8")
    assert str(traced.jaxpr.eqns) == str(
        jax.make_jaxpr(lambda n: quantized("* -> mxfp8")(W, X))(3).jaxpr.eqns
    )


# ---- the same everywhere


def test_remat_and_sharding_change_no_bit() -> None:
    """What is recomputed, or computed in parts, is rounded by the same random bits."""

    def step(f: Any) -> Any:
        def run(w: Any, x: Any, number: Any) -> Any:
            with policyc.rounding_step(number):
                return jax.grad(policyc.apply(STOCHASTIC, f), argnums=1)(w, x)

        return quick_jit(run)

    # The gradient of x is a product whose sums are over an axis that is not sharded, so their order is the same.
    plain, remat = step(loss)(W, X, 2), step(jax.checkpoint(loss))(W, X, 2)
    np.testing.assert_array_equal(np.asarray(plain), np.asarray(remat))
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.device_put(X, NamedSharding(mesh, PartitionSpec("rows")))
    sharded = step(loss)(W, rows, 2)
    np.testing.assert_array_equal(np.asarray(plain), np.asarray(sharded))
